//! Whatever happens to the files of a cache while they are out of use, and much of what may happen while they are in
//! use, shows no wrong byte.

use crate::cache::{Layer, files, names, open, open_within, tidy};
use isobath_remote::cache::{Cache, Filled, LEAST_LIMIT, LayerKey, Look, NotKept, ObjectKind};
use isobath_remote::store::Version;
use isobath_remote::{BLOCK, Digest};
use std::fs::{self, File, OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn the_file(directory: &Path, suffix: &str) -> PathBuf {
    let found = files(&directory.join("layers"), suffix);
    assert_eq!(found.len(), 1, "{found:?}");
    found[0].clone()
}

fn writable(path: &Path) -> File {
    OpenOptions::new().write(true).open(path).unwrap()
}

/// A cache with all blocks of a layer, which nobody uses.
fn filled(of_store: &Layer) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let layer = of_store.open(&open(directory.path()));
    (0..layer.blocks()).for_each(|block| of_store.fill(&layer, block));
    directory
}

/// How many blocks are there now. Then everything can be filled again, and is kept.
fn reopened(directory: &Path, of_store: &Layer) -> usize {
    let cache = open(directory);
    let layer = of_store.open(&cache);
    assert!(layer.is_attached());
    let there = of_store.present(&layer);
    (0..layer.blocks()).for_each(|block| of_store.fill(&layer, block));
    assert_eq!(of_store.present(&layer) as u64, layer.blocks());
    // What nothing refers to is removed.
    isobath_testkit::until("nobody else tidies up", || cache.tidy().unwrap());
    assert_eq!(files(&directory.join("layers"), ".map").len(), 1);
    there
}

#[test]
fn after_a_power_failure_each_block_is_right_or_absent() {
    let of_store = Layer::new(1, 6 * BLOCK + 100);
    // The map was written back, blocks of the data were not, or in part.
    let directory = filled(&of_store);
    let data = writable(&the_file(directory.path(), ".data"));
    data.write_all_at(&vec![0; BLOCK as usize], 0).unwrap();
    data.write_all_at(&[0; 4096], 2 * BLOCK + 8192).unwrap();
    data.set_len(6 * BLOCK).unwrap();
    data.set_len(6 * BLOCK + 100).unwrap();
    assert_eq!(reopened(directory.path(), &of_store), 4);
    // The data was written back, pages of the map were not, or hold anything.
    let directory = filled(&of_store);
    let map = the_file(directory.path(), ".map");
    let kept = fs::read(&map).unwrap();
    for word in [0, 1, 2, 3, !0_u64] {
        let file = writable(&map);
        for block in 0..7 {
            file.write_all_at(&word.to_ne_bytes(), 4096 + block * 8).unwrap();
        }
        let there = reopened(directory.path(), &of_store);
        let is_present = matches!(word & 3, 1 | 2);
        assert_eq!(there, if is_present { 7 } else { 0 }, "{word}");
    }
    // Neither, or the names alone.
    for (what, length) in [(".map", 0), (".map", 4096), (".map", 9000), (".data", 0), (".data", 9)]
    {
        let path = the_file(directory.path(), what);
        writable(&path).set_len(length).unwrap();
        assert_eq!(reopened(directory.path(), &of_store), 0, "{what} {length}");
    }
    let damaged = the_file(directory.path(), ".map");
    for at in (0..120).step_by(7) {
        let mut map = kept.clone();
        map[at] ^= 1;
        fs::write(&damaged, map).unwrap();
        assert_eq!(reopened(directory.path(), &of_store), 0, "{at}");
    }
    fs::remove_file(the_file(directory.path(), ".data")).unwrap();
    assert_eq!(reopened(directory.path(), &of_store), 0);
}

#[test]
fn a_copy_of_a_cache_in_use_is_as_good_as_one() {
    let of_store = Layer::new(1, 4 * BLOCK);
    let directory = tempfile::tempdir().unwrap();
    let layer = of_store.open(&open(directory.path()));
    of_store.fill(&layer, 0);
    let data = the_file(directory.path(), ".data");
    let before = fs::read(&data).unwrap();
    of_store.fill(&layer, 1);
    let copied = tempfile::tempdir().unwrap();
    drop(open(copied.path()));
    let inner = copied.path().join("layers");
    let map = the_file(directory.path(), ".map");
    fs::write(inner.join(data.file_name().unwrap()), before).unwrap();
    fs::copy(&map, inner.join(map.file_name().unwrap())).unwrap();
    assert_eq!(reopened(copied.path(), &of_store), 1);
}

#[test]
fn a_copy_of_a_map_begins_no_second_session_on_the_data() {
    let of_store = Layer::new(1, 60 * BLOCK);
    let directory = tempfile::tempdir().unwrap();
    let first = open(directory.path());
    let one = of_store.open(&first);
    (0..60).for_each(|block| of_store.fill(&one, block));
    // As other programs replace a file.
    let map = the_file(directory.path(), ".map");
    let copy = map.with_extension("copy");
    fs::copy(&map, &copy).unwrap();
    fs::rename(&copy, &map).unwrap();
    let second = open(directory.path());
    let two = of_store.open(&second);
    assert!(two.is_attached() && two.path() != one.path());
    assert_eq!(two.look(0), Look::Absent);
    of_store.fill(&two, 1);
    assert!(of_store.read(&two, 1));
    // Somebody evicts.
    let small = open_within(directory.path(), LEAST_LIMIT);
    tidy(&small);
    of_store.present(&one);
    // Nobody else sees its map.
    tidy(&first);
    assert!(!one.is_attached());
    assert_eq!(of_store.present(&one), 0);
    drop(one);
    tidy(&second);
    assert_eq!(files(&directory.path().join("layers"), ".data").len(), 1);
}

#[test]
fn one_layer_with_two_tables_is_two() {
    let directory = tempfile::tempdir().unwrap();
    let right = Layer::new(1, 2 * BLOCK);
    // What a manifest of somebody else says of the same layer.
    let other = Layer::new(2, 2 * BLOCK);
    let key = LayerKey { digest: right.key.digest, ..other.key };
    let wrong = Layer { key, ..other };
    let cache = open(directory.path());
    let (one, two) = (right.open(&cache), wrong.open(&cache));
    right.fill(&one, 0);
    wrong.fill(&two, 1);
    assert_eq!((one.look(1), two.look(0)), (Look::Absent, Look::Absent));
    assert_eq!((right.present(&one), wrong.present(&two)), (1, 1));
    assert_eq!(one.fill(1, wrong.block(1)), Filled::Wrong);
    let shorter = LayerKey { length: 2 * BLOCK - 1, ..right.key };
    let three = cache.layer(&shorter, Arc::clone(&right.table)).unwrap();
    assert_eq!(three.look(0), Look::Absent);
    // A table that is not the key's is refused.
    let error = cache.layer(&right.key, Arc::clone(&wrong.table)).unwrap_err().to_string();
    assert!(error.contains("not the one that its manifest names"), "{error}");
    let longer = LayerKey { length: 2 * BLOCK + 1, ..right.key };
    assert!(cache.layer(&longer, Arc::clone(&right.table)).is_err());
}

#[test]
fn a_map_that_is_cut_short_in_use_shows_nothing_and_kills_nobody() {
    let of_store = Layer::new(1, 3 * BLOCK);
    let directory = tempfile::tempdir().unwrap();
    let cache = open(directory.path());
    let layer = of_store.open(&cache);
    of_store.fill(&layer, 0);
    of_store.fill(&layer, 2);
    let Look::Verified(stamp) = layer.look(2) else { panic!("it was filled") };
    writable(&the_file(directory.path(), ".map")).set_len(4096).unwrap();
    assert!(!layer.still(2, stamp));
    assert_eq!((layer.look(2), layer.look(0), layer.verify(0)), {
        (Look::Absent, Look::Absent, Look::Absent)
    });
    assert!(!layer.is_attached());
    assert_eq!(layer.fill(0, of_store.block(0)), Filled::NotKept(NotKept::Detached));
    layer.doubt(0);
    cache.tidy().unwrap();
    // Who opens it now begins anew; the other goes on without.
    let again = of_store.open(&cache);
    assert!(again.is_attached());
    of_store.fill(&again, 0);
    assert_eq!((of_store.read(&again, 0), of_store.read(&layer, 0)), (true, false));
}

#[test]
fn a_map_that_is_cut_and_extended_repeats_no_stamp() {
    let of_store = Layer::new(1, 2 * BLOCK);
    let directory = tempfile::tempdir().unwrap();
    let cache = open(directory.path());
    let layer = of_store.open(&cache);
    of_store.fill(&layer, 1);
    let Look::Verified(stamp) = layer.look(1) else { panic!("it was filled") };
    let map = writable(&the_file(directory.path(), ".map"));
    let length = map.metadata().unwrap().len();
    map.set_len(0).unwrap();
    map.set_len(length).unwrap();
    assert_eq!(layer.look(1), Look::Absent);
    // Unless the cache's own thread has looked meanwhile, the words are shared still.
    let filled = layer.fill(1, of_store.block(1));
    assert!(matches!(filled, Filled::Kept(_) | Filled::NotKept(NotKept::Detached)), "{filled:?}");
    assert!(!layer.still(1, stamp));
}

#[test]
fn data_that_cannot_be_read_in_use_is_fetched_again() {
    let of_store = Layer::new(1, 3 * BLOCK);
    let directory = tempfile::tempdir().unwrap();
    let layer = of_store.open(&open(directory.path()));
    (0..3).for_each(|block| of_store.fill(&layer, block));
    writable(&the_file(directory.path(), ".data")).set_len(BLOCK + 5).unwrap();
    // A server's read ends too early; it says so.
    layer.doubt(1);
    layer.doubt(2);
    assert_eq!((layer.verify(1), layer.verify(2)), (Look::Absent, Look::Absent));
    of_store.fill(&layer, 1);
    of_store.fill(&layer, 2);
    assert_eq!(of_store.present(&layer), 3);
}

#[test]
fn what_is_no_file_of_ours_is_put_aside() {
    let of_store = Layer::new(1, BLOCK);
    let directory = filled(&of_store);
    let (map, data) = (the_file(directory.path(), ".map"), the_file(directory.path(), ".data"));
    let elsewhere = tempfile::tempdir().unwrap();
    let victim = elsewhere.path().join("victim");
    // A copy: the thread of the cache that was dropped may be opening the file itself, and marks its blocks.
    fs::copy(&map, &victim).unwrap();
    fs::remove_file(&map).unwrap();
    let before = fs::read(&victim).unwrap();
    symlink(&victim, &map).unwrap();
    assert_eq!(reopened(directory.path(), &of_store), 0);
    assert_eq!(fs::read(&victim).unwrap(), before, "the link was not followed");
    let map = the_file(directory.path(), ".map");
    fs::remove_file(&map).unwrap();
    fs::create_dir(&map).unwrap();
    assert_eq!(reopened(directory.path(), &of_store), 0);
    fs::remove_file(directory.path().join("usage")).unwrap();
    fs::create_dir(directory.path().join("usage")).unwrap();
    assert_eq!(reopened(directory.path(), &of_store), 1);
    fs::write(directory.path().join("usage"), b"short").unwrap();
    assert_eq!(reopened(directory.path(), &of_store), 1);
    assert!(!data.exists(), "what nothing refers to is removed");
}

#[test]
fn a_directory_that_others_may_write_to_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("cache");
    drop(open(&path));
    for file in ["", "layers", "objects", "manifests"] {
        assert_eq!(fs::metadata(path.join(file)).unwrap().mode() & 0o7777, 0o700, "{file}");
    }
    let refused = |path: &Path| Cache::open(path, 1 << 30).unwrap_err().to_string();
    for (inner, mode) in [("", 0o770), ("", 0o702), ("layers", 0o720), ("objects", 0o777)] {
        fs::set_permissions(path.join(inner), Permissions::from_mode(mode)).unwrap();
        let error = refused(&path);
        assert!(error.contains("others may write to it"), "{error}");
        fs::set_permissions(path.join(inner), Permissions::from_mode(0o700)).unwrap();
    }
    drop(open(&path));
    assert!(refused(&path.join("no/directory")).contains("cannot create"));
    assert!(refused(&path.join("usage")).contains("cannot open"));
    assert!(refused(Path::new("/proc")).contains("cannot hold a cache"));
    fs::rename(path.join("layers"), path.join("elsewhere")).unwrap();
    symlink(path.join("elsewhere"), path.join("layers")).unwrap();
    assert!(refused(&path).contains("cannot open the directory"));
}

#[test]
fn objects_are_verified_whenever_they_are_read() {
    let directory = tempfile::tempdir().unwrap();
    let cache = open(directory.path());
    let (bytes, digest) = (b"object", Digest::of(b"object"));
    assert!(cache.keep(ObjectKind::Table, &digest, b"other").is_err());
    assert!(cache.object(ObjectKind::Table, &digest).is_none());
    let held = cache.keep(ObjectKind::Table, &digest, bytes).unwrap();
    assert!(held.is_kept());
    assert_eq!(&**held.bytes(), bytes);
    drop(held);
    assert!(cache.object(ObjectKind::Heads, &digest).is_none());
    let path = directory.path().join("objects").join(format!("table-{digest}"));
    for damage in [&b"objecT"[..], b"", b"object "] {
        assert_eq!(&**cache.object(ObjectKind::Table, &digest).unwrap().bytes(), bytes);
        fs::write(&path, damage).unwrap();
        assert!(cache.object(ObjectKind::Table, &digest).is_none());
        assert!(!path.exists());
        cache.keep(ObjectKind::Table, &digest, bytes).unwrap();
    }
}

#[test]
fn the_last_manifest_is_remembered_with_its_version() {
    let directory = tempfile::tempdir().unwrap();
    let (first, second) = ("s3://b/p/vm", "s3://b/p/vm2");
    let version = |tag: Option<&str>, number: Option<&str>| Version {
        tag: tag.map(str::to_owned),
        number: number.map(str::to_owned),
    };
    let cache = open(directory.path());
    assert!(cache.manifest(first).is_none());
    cache.keep_manifest(first, b"{}\n\n", &version(Some("\"a\nb\""), None));
    cache.keep_manifest(second, b"", &version(None, Some("7")));
    drop(cache);
    let cache = open(directory.path());
    let found = cache.manifest(first).unwrap();
    let one = version(Some("\"a\nb\""), None);
    assert_eq!((found.bytes(), found.version()), (&b"{}\n\n"[..], &one));
    cache.keep_manifest(first, b"new", &version(None, None));
    let found = cache.manifest(first).unwrap();
    assert_eq!((found.bytes(), found.version()), (&b"new"[..], &version(None, None)));
    let inner = directory.path().join("manifests");
    assert_eq!(names(&inner).len(), 2);
    // One chain's file under the name of another, and damage.
    let path = |address: &str| inner.join(Digest::of(address.as_bytes()).to_string());
    fs::copy(path(second), path(first)).unwrap();
    assert!(cache.manifest(first).is_none());
    let whole = fs::read(path(second)).unwrap();
    for at in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[at] ^= 1;
        fs::write(path(second), damaged).unwrap();
        assert!(cache.manifest(second).is_none(), "{at}");
    }
}

#[test]
fn a_block_that_a_killed_evictor_left_is_filled_again() {
    let of_store = Layer::new(1, 8 * BLOCK);
    let directory = tempfile::tempdir().unwrap();
    let cache = open(directory.path());
    let layer = of_store.open(&cache);
    tidy(&cache);
    let map = writable(&the_file(directory.path(), ".map"));
    map.write_all_at(&(5_u64 << 24 | 3).to_ne_bytes(), 4096).unwrap();
    let counted = || {
        let usage = fs::read(directory.path().join("usage")).unwrap();
        u64::from_ne_bytes(usage[24..32].try_into().unwrap())
    };
    let before = counted();
    // Whoever tries lets it be done soon, and nothing is counted that is not kept.
    of_store.fill(&layer, 0);
    assert!(of_store.read(&layer, 0));
    assert!(counted() <= before + 2 * BLOCK, "{} {before}", counted());
}

#[test]
fn users_of_one_file_in_two_directories_evict_one_after_the_other() {
    let of_store = Layer::new(1, 60 * BLOCK);
    let directory = tempfile::tempdir().unwrap();
    let (first, second) = (directory.path().join("first"), directory.path().join("second"));
    let cache = open(&first);
    let layer = of_store.open(&cache);
    drop(open(&second));
    for suffix in [".data", ".map"] {
        let file = the_file(&first, suffix);
        fs::hard_link(&file, second.join("layers").join(file.file_name().unwrap())).unwrap();
    }
    let others = open_within(&second, LEAST_LIMIT);
    let other = of_store.open(&others);
    assert!(other.is_attached());
    std::thread::scope(|scope| {
        for cache in [&cache, &others] {
            scope.spawn(|| {
                (0..20).for_each(|_| {
                    cache.tidy().unwrap();
                });
            });
        }
        for _ in 0..3 {
            for block in 0..60 {
                layer.fill(block, of_store.block(block));
                of_store.read(&other, block);
                of_store.read(&layer, block);
            }
        }
    });
}
