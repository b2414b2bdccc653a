//! A cache stays within its limit, keeps what is in use, and does without a disk that is full.

use crate::cache::{Layer, files, names, open, tidy};
use isobath_remote::cache::{Cache, CachedLayer, Filled, LEAST_LIMIT, Look, NotKept, ObjectKind};
use isobath_remote::store::Version;
use isobath_remote::{BLOCK, Digest};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
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
