//! Two hosts as one.

use isobath_ring::block_on;
use isobath_storage::either::{EitherFile, EitherHost, Side};
use isobath_storage::memory::MemoryHost;
use isobath_storage::{Host, IoBuf, MemoryUse, StorageExt};
use isobath_storage_file::FileHost;
use isobath_storage_test::conformance::{self, WRITABLE};
use std::path::Path;
use tempfile::TempDir;

fn side(prefix: &'static str) -> impl Fn(&Path) -> Side + Send + Sync {
    move |name| if name.starts_with(prefix) { Side::Second } else { Side::First }
}

#[test]
fn each_side_is_a_host_also_in_a_pair_of_pairs() {
    let directory = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let inner = EitherHost::new(FileHost, MemoryHost::new(), side("/two"));
    let host = EitherHost::new(inner, MemoryHost::new(), side("/three"));
    for place in [directory.path(), Path::new("/two"), Path::new("/three")] {
        block_on(conformance::check(&host, place, false));
    }
}

#[test]
fn files_of_different_sides_differ_and_share_nothing() {
    let (one, two) = (MemoryHost::new(), MemoryHost::new());
    let host = EitherHost::new(one.clone(), two.clone(), side("/two"));
    block_on(async {
        let a = host.create(Path::new("/one/a"), WRITABLE).await.unwrap();
        let b = host.create(Path::new("/two/b"), WRITABLE).await.unwrap();
        let c = host.create(Path::new("/two/c"), WRITABLE).await.unwrap();
        assert!(matches!((&a, &b), (EitherFile::First(_), EitherFile::Second(_))));
        let own = |file: &EitherFile<_, _>| match file {
            EitherFile::First(file) | EitherFile::Second(file) => StorageExt::id(file),
        };
        assert_eq!(own(&a), own(&b), "the hosts number their files alike");
        assert!(a.id() != b.id() && b.id() != c.id());
        a.write_at(0, IoBuf::copy_of(&[7; 4096])).await.unwrap();
        b.write_at(0, IoBuf::copy_of(&[8; 4096])).await.unwrap();
        assert_eq!(c.clone_alignment(), Some(4096));
        assert!(!c.clone_range(&a, 0, 0, 4096).await.unwrap());
        assert!(c.clone_range(&b, 0, 0, 4096).await.unwrap());
        assert_eq!(two.contents("/two/c").unwrap(), [8; 4096]);
        // Extensions are those of the side.
        c.retire().await.unwrap();
        assert!(c.is_read_only() && !b.is_read_only());
        assert!(b.stamp().await.unwrap().is_some());
        assert!(b.restart_memory(MemoryUse::Create).await.unwrap().is_some());
        host.remove(Path::new("/two/b")).await.unwrap();
        assert_eq!(two.names(), [Path::new("/two/c")]);
        assert_eq!(one.names(), [Path::new("/one/a")]);
    });
}

/// A link from one side to a name that belongs to the other is an error.
#[test]
fn a_link_to_a_name_of_the_other_side_is_refused() {
    let directory = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let real = directory.path().canonicalize().unwrap();
    let other = real.join("other");
    std::fs::create_dir(&other).unwrap();
    std::fs::write(other.join("file"), b"").unwrap();
    std::fs::write(real.join("plain"), b"").unwrap();
    std::os::unix::fs::symlink(other.join("file"), real.join("link")).unwrap();
    let rule = move |name: &Path| if name.starts_with(&other) { Side::Second } else { Side::First };
    let host = EitherHost::new(FileHost, MemoryHost::new(), rule);
    assert_eq!(host.canonical(&real.join("plain")).unwrap(), real.join("plain"));
    let error = host.canonical(&real.join("link")).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::CrossesDevices);
}

/// A storage without extensions, with only the mandatory operations.
mod plain {
    use super::*;
    use isobath_storage::{
        Access, Capabilities, FileId, Identity, Result, Storage, ZeroMode, memory::MemoryFile,
    };

    struct Plain(MemoryFile);

    impl Storage for Plain {
        fn identity(&self) -> Identity<'_> {
            Identity { id: FileId { device: 9, inode: 9 }, ..self.0.identity() }
        }

        fn capabilities(&self) -> Capabilities {
            Capabilities::default()
        }

        async fn read_at(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
            self.0.read_at(offset, buf).await
        }

        async fn write_vectored_at(&self, offset: u64, bufs: Vec<IoBuf>) -> Result<Vec<IoBuf>> {
            self.0.write_vectored_at(offset, bufs).await
        }

        async fn write_zeroes(&self, offset: u64, length: u64, mode: ZeroMode) -> Result<()> {
            self.0.write_zeroes(offset, length, mode).await
        }

        async fn flush(&self) -> Result<()> {
            self.0.flush().await
        }

        async fn len(&self) -> Result<u64> {
            self.0.len().await
        }

        async fn set_len(&self, length: u64) -> Result<()> {
            self.0.set_len(length).await
        }
    }

    #[test]
    fn what_is_missing_has_an_answer() {
        let host = MemoryHost::new();
        block_on(async {
            let [one, two] = ["/one", "/two"].map(|name| host.create(Path::new(name), WRITABLE));
            let (one, two) = (Plain(one.await.unwrap()), Plain(two.await.unwrap()));
            one.write_at(1 << 20, IoBuf::copy_of(b"x")).await.unwrap();
            assert_eq!(one.name(), Path::new("/one"));
            assert_eq!(one.atomic_write(), 512);
            assert!(!one.is_read_only() && !one.extends_with_zeroes());
            assert_eq!(one.clone_alignment(), None);
            assert!(!two.clone_range(&one, 0, 0, 4096).await.unwrap());
            // Without information on holes, all of it is data.
            assert_eq!(one.allocated().await.unwrap(), (1 << 20) + 1);
            assert_eq!(one.free_space(), None);
            one.discard(0, 4096).await.unwrap();
            assert_eq!(one.stamp().await.unwrap(), None);
            assert_eq!(one.settled_stamp().await.unwrap(), None);
            assert!(one.restart_memory(MemoryUse::Create).await.unwrap().is_none());
            one.advise(Access::Random).await;
            one.admit_writer(true).await.unwrap();
            one.retire().await.unwrap();
            assert!(!one.is_read_only(), "without roles it stays as it is");
        });
    }
}
