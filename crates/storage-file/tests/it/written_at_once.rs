//! Small writes into the page cache are made by the thread that wants them, where that is allowed.

use crate::mounted::Mounted;
use isobath_ring::{Config, Executor};
use isobath_storage::{Host, IoBuf, Locking, OpenMode, Storage, StorageExt};
use isobath_storage_file::{FileHost, FileStorage, LimitedHost, WriteAtOnce};
use std::future::{Future, poll_fn};
use std::path::Path;
use std::pin::pin;

const PAGE: usize = 4096;
const WRITABLE: OpenMode = OpenMode { writable: true, direct: false, locking: Locking::Exclusive };

fn host() -> LimitedHost {
    let host = FileHost::with_descriptors(10);
    host.write_at_once(WriteAtOnce::Anywhere);
    host
}

fn run(test: impl Future<Output = ()>) {
    Executor::new(&Config::default()).unwrap().block_on(test);
}

/// A new file of 1 MiB with data.
async fn filled(host: &LimitedHost, path: &Path, mode: OpenMode) -> FileStorage {
    let file = host.create(path, mode).await.unwrap();
    file.write_at(0, IoBuf::copy_of(&vec![1; 1 << 20])).await.unwrap();
    file
}

/// Writes, and tells whether that had been done when the future was first polled.
async fn is_done_at_once(write: impl Future<Output = ()>) -> bool {
    let (mut write, mut polls) = (pin!(write), 0);
    poll_fn(|cx| {
        polls += 1;
        write.as_mut().poll(cx)
    })
    .await;
    polls == 1
}

async fn one(file: &FileStorage, offset: usize, length: usize) -> bool {
    let buf = IoBuf::copy_of(&vec![2; length]);
    is_done_at_once(async { drop(file.write_at(offset as u64, buf).await.unwrap()) }).await
}

async fn several(file: &FileStorage, offset: usize, lengths: &[usize]) -> bool {
    let bufs = lengths.iter().map(|length| IoBuf::copy_of(&vec![3; *length])).collect();
    is_done_at_once(async {
        drop(file.write_vectored_at(offset as u64, bufs).await.unwrap());
    })
    .await
}

#[test]
fn on_ext4_whole_pages_are_written_at_once() {
    let mounted = Mounted::new("mkfs.ext4", "e2fsprogs", &["-q"]);
    let path = |name: &str| mounted.path().join(name);
    // A thread makes the first such call at all events; how long that took decides about the next.
    run(async {
        let file = filled(&host(), &path("one"), WRITABLE).await;
        assert!(one(&file, 8 * PAGE, PAGE).await);
        let found = file.read_at(8 * PAGE as u64 - 1, IoBuf::zeroed(PAGE + 2)).await.unwrap();
        assert_eq!((found[0], found[PAGE + 1]), (1, 1));
        assert_eq!(&found[1..=PAGE], [2; PAGE]);
    });
    run(async {
        let file = filled(&host(), &path("several"), WRITABLE).await;
        assert!(several(&file, 0, &[512, PAGE, 2 * PAGE - 512]).await);
        let found = file.read_at(0, IoBuf::zeroed(3 * PAGE + 1)).await.unwrap();
        assert_eq!(&found[..3 * PAGE], [3; 3 * PAGE]);
        assert_eq!(found[3 * PAGE], 1);
    });
}

#[test]
fn what_might_wait_or_takes_long_is_not_written_at_once() {
    let mounted = Mounted::new("mkfs.ext4", "e2fsprogs", &["-q"]);
    let path = |name: &str| mounted.path().join(name);
    run(async {
        let file = filled(&host(), &path("file"), WRITABLE).await;
        assert!(!one(&file, 0, 17 * PAGE).await, "it is long");
        assert!(!one(&file, 512, PAGE).await, "a page would have to be read");
        assert!(!one(&file, 0, 512).await, "a page would have to be read");
        let allowed_to_nobody = FileHost::with_descriptors(10);
        let file = filled(&allowed_to_nobody, &path("other"), WRITABLE).await;
        assert!(!one(&file, 0, PAGE).await, "nobody has allowed it");
        let direct = OpenMode { direct: true, ..WRITABLE };
        let file = filled(&host(), &path("direct"), direct).await;
        assert!(!one(&file, 0, PAGE).await, "it does not go to the page cache");
    });
}

#[test]
fn what_is_written_at_once_is_there() {
    for (program, package) in [("mkfs.ext4", "e2fsprogs"), ("mkfs.xfs", "xfsprogs")] {
        let mounted = Mounted::new(program, package, &["-q"]);
        run(async {
            let file = filled(&host(), &mounted.path().join("file"), WRITABLE).await;
            let mut model = vec![1; 1 << 20];
            for step in 0..600_usize {
                let (offset, length) = (step * 7919 % 250 * PAGE, (1 + step % 5) * PAGE);
                let short = if step % 7 == 0 { 512 } else { 0 };
                model[offset..offset + length - short].fill(step as u8);
                let buf = IoBuf::copy_of(&vec![step as u8; length - short]);
                if step % 3 == 0 {
                    let mut rest = buf;
                    let first = rest.split_to(rest.len() / 2);
                    file.write_vectored_at(offset as u64, vec![first, rest]).await.unwrap();
                } else {
                    file.write_at(offset as u64, buf).await.unwrap();
                }
            }
            file.flush().await.unwrap();
            let found = file.read_at(0, IoBuf::zeroed(1 << 20)).await.unwrap();
            assert!(*found == *model, "{program}");
        });
    }
}
