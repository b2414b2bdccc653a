//! A cache stays within its limit, keeps what is in use, and does without a disk that is full.

use crate::cache::{Layer, files, names, open};
use isobath_remote::cache::{Cache, CachedLayer, Filled, LEAST_LIMIT, Look, NotKept, ObjectKind};
use isobath_remote::store::Version;
use isobath_remote::{BLOCK, Digest};
use isobath_testkit::process::run;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::thread;

/// Bytes of all files.
fn used(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    // What others remove meanwhile has none.
    let bytes = |path: &Path| fs::symlink_metadata(path).map_or(0, |data| data.blocks() * 512);
    entries.map(|path| if path.is_dir() { used(&path) } else { bytes(&path) }).sum()
}

fn tidy(cache: &Cache) {
    isobath_testkit::until("nobody else tidies up", || cache.tidy().unwrap());
}

/// Keeps a block, after others were evicted if there is no room.
fn fill(cache: &Cache, of_store: &Layer, layer: &CachedLayer, block: u64) {
    isobath_testkit::until("there is room", || match layer.fill(block, of_store.block(block)) {
        Filled::Kept(_) => true,
        Filled::NotKept(NotKept::Full | NotKept::Busy) => {
            tidy(cache);
            false
        }
        other => panic!("{other:?}"),
    });
}

#[test]
fn a_scan_stays_within_the_limit_and_leaves_what_is_read_repeatedly() {
    let directory = tempfile::tempdir().unwrap();
    let cache = Cache::open(directory.path(), LEAST_LIMIT).unwrap();
    let (hot, cold) = (Layer::new(1, 20 * BLOCK), Layer::new(2, 400 * BLOCK));
    let (in_use, scanned) = (hot.open(&cache), cold.open(&cache));
    (0..20).for_each(|block| fill(&cache, &hot, &in_use, block));
    let mut most = 0;
    for block in 0..400 {
        fill(&cache, &cold, &scanned, block);
        assert!(cold.read(&scanned, block) || scanned.look(block) == Look::Absent);
        most = most.max(used(directory.path()));
        if block % 16 == 0 {
            assert_eq!(hot.present(&in_use), 20, "{block}");
        }
    }
    assert!(most <= LEAST_LIMIT, "{most} bytes");
    assert!(most >= LEAST_LIMIT / 4 * 3, "{most} bytes");
    tidy(&cache);
    assert_eq!(hot.present(&in_use), 20);
    assert!(cold.present(&scanned) > 10);
}

#[test]
fn what_is_in_use_stays_as_a_file_and_its_blocks_may_go() {
    let directory = tempfile::tempdir().unwrap();
    let layers: Vec<Layer> = (1..4).map(|number| Layer::new(number, 40 * BLOCK)).collect();
    let large = open(directory.path());
    let opened: Vec<_> = layers.iter().map(|layer| layer.open(&large)).collect();
    for (of_store, layer) in layers.iter().zip(&opened) {
        (0..40).for_each(|block| of_store.fill(layer, block));
    }
    let objects: Vec<Vec<u8>> = (0..8_u8).map(|number| vec![number; 1 << 20]).collect();
    let digests: Vec<Digest> = objects.iter().map(|object| Digest::of(object)).collect();
    let keep =
        |number: usize| large.keep(ObjectKind::Table, &digests[number], &objects[number]).unwrap();
    let held = keep(0);
    (1..8).for_each(|number| drop(keep(number)));
    let mut opened = opened.into_iter();
    let stays = opened.next().unwrap();
    drop(opened);
    // Another server, with less room.
    let small = Cache::open(directory.path(), LEAST_LIMIT).unwrap();
    tidy(&small);
    assert!(used(directory.path()) <= LEAST_LIMIT);
    let inner = directory.path().join("layers");
    assert!(!files(&inner, ".map").is_empty());
    assert!(stays.path().exists() && layers[0].present(&stays) < 40);
    // The held object is there, though it is the oldest; of the others as many as may be.
    let left = names(&directory.path().join("objects"));
    assert!(left.contains(&format!("table-{}", digests[0])), "{left:?}");
    assert!(left.len() < 4, "{left:?}");
    assert!(small.object(ObjectKind::Table, &digests[0]).is_some());
    // It goes on being used.
    (0..10).for_each(|block| fill(&small, &layers[0], &stays, block));
    assert!(layers[0].present(&stays) > 0);
    drop((stays, held));
    // An empty layer that nobody uses is no file.
    let empty = Layer::new(9, BLOCK);
    drop(empty.open(&small));
    let before = files(&inner, ".map").len();
    tidy(&small);
    assert_eq!(files(&inner, ".map").len(), before - 1);
    assert_eq!(files(&inner, ".data").len(), before - 1);
}

#[test]
fn manifests_and_objects_do_not_grow_without_limit() {
    let directory = tempfile::tempdir().unwrap();
    let cache = Cache::open(directory.path(), LEAST_LIMIT).unwrap();
    let version = Version { tag: None, number: None };
    for number in 0..64_u8 {
        cache.keep_manifest(&format!("s3://b/{number}"), &vec![number; 512 << 10], &version);
        tidy(&cache);
        let found = cache.manifest(&format!("s3://b/{number}")).unwrap();
        assert_eq!(found.bytes(), vec![number; 512 << 10]);
    }
    assert!(used(&directory.path().join("manifests")) <= LEAST_LIMIT / 8);
    assert!(cache.manifest("s3://b/0").is_none());
}

#[test]
fn threads_of_two_caches_fill_evict_and_read_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let of_store = Layer::new(1, 90 * BLOCK + 1);
    let caches: Vec<Arc<Cache>> =
        (0..2).map(|_| Cache::open(directory.path(), LEAST_LIMIT).unwrap()).collect();
    thread::scope(|scope| {
        for number in 0..6_u64 {
            let (cache, of_store) = (&caches[number as usize % 2], &of_store);
            scope.spawn(move || {
                let layer = of_store.open(cache);
                for round in 0..600 {
                    let block = (round * (number + 3) + number * 17) % layer.blocks();
                    match (round + number) % 5 {
                        0 | 1 => drop(layer.fill(block, of_store.block(block))),
                        2 if round % 20 == 0 => drop(cache.tidy().unwrap()),
                        2 => layer.doubt(block),
                        _ => drop(of_store.read(&layer, block)),
                    }
                }
            });
        }
    });
    tidy(&caches[0]);
    let layer = of_store.open(&caches[1]);
    (0..20).for_each(|block| fill(&caches[1], &of_store, &layer, block));
    assert!(of_store.present(&layer) >= 20);
}

#[test]
fn the_layers_of_a_process_are_opened_once_and_closed_with_the_last_user() {
    let directory = tempfile::tempdir().unwrap();
    let of_store = Layer::new(1, 2 * BLOCK);
    let cache = open(directory.path());
    let (one, two) = (of_store.open(&cache), of_store.open(&cache));
    assert!(Arc::ptr_eq(one.file(), two.file()));
    of_store.fill(&one, 0);
    drop(one);
    assert!(matches!(two.look(0), Look::Verified(_)), "it is in use still");
    drop(two);
    assert_eq!(of_store.open(&cache).look(0), Look::Unverified);
}

/// A file system of this size, until it is dropped.
struct Small(tempfile::TempDir);

impl Small {
    fn new(size: &str) -> Self {
        let options = format!("size={size},mode=700");
        Self::mounted(&["-t", "tmpfs", "-o", &options], Path::new("none"))
    }

    fn mounted(options: &[&str], what: &Path) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        let mounted = run(mount.args(options).arg(what).arg(directory.path()));
        assert_eq!(mounted.code(), 0, "this test mounts a file system, which needs root");
        Self(directory)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Takes all the space.
    fn fill(&self) {
        let mut file = File::create(self.path().join("filler")).unwrap();
        while file.write(&[1; 4096]).is_ok_and(|count| count > 0) {}
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // The thread of a cache may be using it for a moment.
        run(Command::new("umount").arg("-l").arg(self.path()));
    }
}

#[test]
fn a_full_disk_keeps_nothing_more_and_is_used_again_when_there_is_room() {
    let small = Small::new("12m");
    let reserve = small.path().join("reserve");
    fs::write(&reserve, vec![1; 4 << 20]).unwrap();
    let cache = open(small.path());
    let of_store = Layer::new(1, 60 * BLOCK);
    let layer = of_store.open(&cache);
    let mut kept = 0;
    for block in 0..60 {
        match layer.fill(block, of_store.block(block)) {
            Filled::Kept(_) => kept += 1,
            filled => assert_eq!(filled, Filled::NotKept(NotKept::Failing)),
        }
    }
    assert!((20..32).contains(&kept), "{kept}");
    small.fill();
    assert_eq!(of_store.present(&layer), kept);
    // Another layer can have no files, and objects none.
    let other = Layer::new(2, 3 * BLOCK);
    let detached = other.open(&cache);
    assert!(!detached.is_attached());
    assert_eq!((detached.blocks(), detached.file().metadata().unwrap().len()), (3, 3 * BLOCK));
    assert_eq!((detached.look(2), detached.verify(2)), (Look::Absent, Look::Absent));
    assert_eq!(detached.fill(2, other.block(2)), Filled::NotKept(NotKept::Detached));
    assert_eq!(detached.fill(2, other.block(1)), Filled::Wrong);
    let (digest, object) = (Digest::of(&[7; 9000]), [7; 9000]);
    let held = cache.keep(ObjectKind::Heads, &digest, &object).unwrap();
    assert!(!held.is_kept());
    assert_eq!(**held.bytes(), object);
    cache.keep_manifest("s3://b/vm", &object, &Version { tag: None, number: None });
    assert!(cache.manifest("s3://b/vm").is_none());
    // A cache that is opened now works, and shows what is there.
    let second = open(small.path());
    assert_eq!(of_store.present(&of_store.open(&second)), kept);
    fs::remove_file(small.path().join("filler")).unwrap();
    fs::remove_file(reserve).unwrap();
    tidy(&cache);
    let tried = (0..20_000).find(|_| matches!(layer.fill(59, of_store.block(59)), Filled::Kept(_)));
    assert!(tried.is_some());
    assert!(of_store.read(&layer, 59));
    assert!(other.open(&cache).is_attached());
}

/// Drops what the kernel has of a file in memory and can read from the disk again.
fn forget(file: &File) {
    // SAFETY: a system call without memory.
    let done = unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    assert_eq!(done, 0);
}

#[test]
fn blocks_that_the_disk_refused_after_they_were_kept_are_not_believed() {
    // A file system on a disk that is full before its file system is.
    let below = Small::new("12m");
    let image = below.path().join("image");
    File::create(&image).unwrap().set_len(64 << 20).unwrap();
    let mkfs = isobath_testkit::tools::require("mkfs.ext4");
    let lazy = "lazy_itable_init=0,lazy_journal_init=0";
    let made = run(Command::new(mkfs).args(["-q", "-F", "-E", lazy]).arg(&image));
    assert_eq!(made.code(), 0, "{}", made.report());
    let small = Small::mounted(&["-o", "loop"], &image);
    let of_store = Layer::new(1, 60 * BLOCK);
    // The modes of a new file system's root are those of the system.
    let inner = small.path().join("cache");
    let cache = open(&inner);
    let layer = of_store.open(&cache);
    below.fill();
    (0..60).for_each(|block| of_store.fill(&layer, block));
    let _ = run(Command::new("sync").arg("-f").arg(layer.path()));
    forget(layer.file());
    // Whoever verifies or fills a block hears of it, and what was lost is not shown any more.
    layer.verify(0);
    assert!(of_store.present(&layer) < 60);
    drop(layer);
    let again = of_store.open(&cache);
    assert!(of_store.present(&again) < 60);
}
