//! A cache stays within its limit, keeps what is in use, and does without a disk that is full.

use crate::cache::{Layer, files, names, open, open_within, tidy};
use isobath_remote::cache::{Cache, CachedLayer, Filled, LEAST_LIMIT, Look, NotKept, ObjectKind};
use isobath_remote::store::Version;
use isobath_remote::{BLOCK, Digest};
use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

/// Bytes of all files.
fn used(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    // What others remove meanwhile has none.
    let bytes = |path: &Path| fs::symlink_metadata(path).map_or(0, |data| data.blocks() * 512);
    entries.map(|path| if path.is_dir() { used(&path) } else { bytes(&path) }).sum()
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
    let cache = open_within(directory.path(), LEAST_LIMIT);
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
    let small = open_within(directory.path(), LEAST_LIMIT);
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
    let its_files = || {
        let digest = empty.key.digest.to_string();
        names(&inner).into_iter().filter(|name| name.contains(&digest)).count()
    };
    let layer = empty.open(&small);
    assert_eq!(its_files(), 2);
    drop(layer);
    // The thread that looks after the files has them for a moment.
    isobath_testkit::until("the files are removed", || {
        tidy(&small);
        its_files() == 0
    });
}

#[test]
fn manifests_and_objects_do_not_grow_without_limit() {
    let directory = tempfile::tempdir().unwrap();
    let cache = open_within(directory.path(), LEAST_LIMIT);
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
        (0..2).map(|_| open_within(directory.path(), LEAST_LIMIT)).collect();
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
    // The thread that looks after the files has them for a moment.
    isobath_testkit::until("nobody uses the layer", || {
        of_store.open(&cache).look(0) == Look::Unverified
    });
}

#[test]
fn the_smaller_limit_counts_also_while_who_has_it_does_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let _small = open_within(directory.path(), LEAST_LIMIT);
    let large = open(directory.path());
    let of_store = Layer::new(1, 100 * BLOCK);
    let layer = of_store.open(&large);
    (0..100).for_each(|block| of_store.fill(&layer, block));
    isobath_testkit::until("it is within the smaller limit", || {
        used(directory.path()) <= LEAST_LIMIT
    });
}

#[test]
fn a_layer_is_kept_within_the_limit_after_its_cache_was_dropped() {
    let directory = tempfile::tempdir().unwrap();
    let cache = open_within(directory.path(), LEAST_LIMIT);
    let of_store = Layer::new(1, 200 * BLOCK);
    let layer = of_store.open(&cache);
    drop(cache);
    for block in 0..200 {
        isobath_testkit::until("there is room", || {
            matches!(layer.fill(block, of_store.block(block)), Filled::Kept(_))
        });
        assert!(used(directory.path()) <= LEAST_LIMIT);
    }
}

#[test]
fn counts_that_were_lost_are_counted_again() {
    let directory = tempfile::tempdir().unwrap();
    let cache = open(directory.path());
    let of_store = Layer::new(1, 40 * BLOCK);
    let layer = of_store.open(&cache);
    of_store.fill(&layer, 0);
    let usage = directory.path().join("usage");
    // More often than the file is mapped.
    for block in 1..20 {
        let file = OpenOptions::new().write(true).open(&usage).unwrap();
        file.set_len(0).unwrap();
        layer.fill(block, of_store.block(block));
        tidy(&cache);
        of_store.fill(&layer, block);
    }
    assert_eq!(of_store.present(&layer), 20);
}

#[test]
fn files_that_are_removed_while_they_are_in_use_do_not_grow() {
    for suffix in [".map", ".data"] {
        let directory = tempfile::tempdir().unwrap();
        let cache = open(directory.path());
        let of_store = Layer::new(1, 4 * BLOCK);
        let layer = of_store.open(&cache);
        of_store.fill(&layer, 0);
        fs::remove_file(&files(&directory.path().join("layers"), suffix)[0]).unwrap();
        tidy(&cache);
        assert!(!layer.is_attached());
        assert_eq!(layer.look(0), Look::Absent);
        assert_eq!(layer.fill(1, of_store.block(1)), Filled::NotKept(NotKept::Detached));
        // Who opens it now begins anew.
        let again = of_store.open(&cache);
        assert_eq!(again.look(0), Look::Absent);
        of_store.fill(&again, 0);
        assert!(of_store.read(&again, 0));
    }
}

/// Set for a process that is to be alone.
const ALONE: &str = "ISOBATH_TEST_CACHE_ALONE";

#[test]
fn layers_leave_descriptors_for_others() {
    if std::env::var_os(ALONE).is_none() {
        let mut alone = Command::new(std::env::current_exe().unwrap());
        let name = "cache_limits::layers_leave_descriptors_for_others";
        let ended = alone.args(["--exact", name]).env(ALONE, "1").output().unwrap();
        let text = String::from_utf8_lossy(&ended.stdout);
        assert!(ended.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let limit = libc::rlimit { rlim_cur: 256, rlim_max: 256 };
    // SAFETY: `limit` is a live value.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
    let directory = tempfile::tempdir().unwrap();
    let cache = open(directory.path());
    let layers: Vec<Layer> = (0..200).map(|number| Layer::new(number, 5 + number)).collect();
    let opened: Vec<_> = layers.iter().map(|layer| layer.open(&cache)).collect();
    let attached = opened.iter().filter(|layer| layer.is_attached()).count();
    assert_eq!(attached, 32);
    for (of_store, layer) in layers.iter().zip(&opened) {
        assert!(layer.file().metadata().unwrap().len() >= of_store.key.length);
    }
    let own: Vec<File> = (0..128).map(|_| File::open("/dev/null").unwrap()).collect();
    drop((own, opened));
    // The thread that looks after the files has them for a moment.
    isobath_testkit::until("nobody uses the others", || layers[199].open(&cache).is_attached());
}

#[test]
fn opening_one_layer_does_not_wait_for_another_one() {
    let directory = tempfile::tempdir().unwrap();
    let cache = open(directory.path());
    let (stuck, other) = (Layer::new(1, 2 * BLOCK), Layer::new(2, 2 * BLOCK));
    let layer = stuck.open(&cache);
    stuck.fill(&layer, 0);
    drop(layer);
    // A process that was stopped while it was opening it.
    let map = files(&directory.path().join("layers"), ".map");
    let map =
        map.iter().find(|path| path.to_str().unwrap().contains(&stuck.key.digest.to_string()));
    let file = OpenOptions::new().read(true).write(true).open(map.unwrap()).unwrap();
    // SAFETY: all bytes may be zero.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    (range.l_type, range.l_start, range.l_len) = (libc::F_WRLCK as libc::c_short, 1, 1);
    isobath_testkit::until("nobody else opens it", || {
        // SAFETY: `range` is a live value.
        unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) == 0 }
    });
    let (given_up, is_enough) = (AtomicUsize::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_enough.load(Ordering::SeqCst) {
                assert!(!stuck.open(&cache).is_attached());
                given_up.fetch_add(1, Ordering::SeqCst);
            }
        });
        // Each of these would otherwise wait until the stuck one is given up.
        (0..20).for_each(|_| drop(other.open(&cache)));
        let meanwhile = given_up.load(Ordering::SeqCst);
        is_enough.store(true, Ordering::SeqCst);
        assert!(meanwhile < 10, "{meanwhile} of 20");
    });
    drop(file);
    let later = stuck.open(&cache);
    assert!(later.is_attached());
    assert!(stuck.read(&later, 0));
}
