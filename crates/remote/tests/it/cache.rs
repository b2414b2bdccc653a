//! A cache shows a layer's bytes or nothing, whatever happens to its files.

use isobath_remote::cache::{Cache, CachedLayer, Filled, LEAST_LIMIT, LayerKey, Look, NotKept};
use isobath_remote::{BLOCK, Digest};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A layer as a store has it.
pub(crate) struct Layer {
    pub(crate) bytes: Vec<u8>,
    pub(crate) table: Arc<[u8]>,
    pub(crate) key: LayerKey,
}

impl Layer {
    /// One of so many bytes, none of which are zeroes; others have another number.
    pub(crate) fn new(number: u64, length: u64) -> Self {
        let byte = |at: u64| ((at / 7 + at / BLOCK * 31 + number * 97) % 255) as u8 + 1;
        let bytes: Vec<u8> = (0..length).map(byte).collect();
        let table = bytes.chunks(BLOCK as usize).map(blake3::hash);
        let table: Arc<[u8]> = table.flat_map(|hash| hash.as_bytes()[..16].to_vec()).collect();
        let key = LayerKey { digest: Digest::of(&bytes), length, table: Digest::of(&table) };
        Self { bytes, table, key }
    }

    pub(crate) fn open(&self, cache: &Arc<Cache>) -> Arc<CachedLayer> {
        cache.layer(&self.key, Arc::clone(&self.table)).unwrap()
    }

    pub(crate) fn block(&self, block: u64) -> &[u8] {
        self.bytes.chunks(BLOCK as usize).nth(block as usize).unwrap()
    }

    /// Fills a block.
    pub(crate) fn fill(&self, layer: &CachedLayer, block: u64) {
        // The thread of a cache may just be taking out what was left in the file.
        isobath_testkit::until("nobody else changes the block", || {
            let filled = layer.fill(block, self.block(block));
            let is_kept = matches!(filled, Filled::Kept(_));
            assert!(is_kept || filled == Filled::NotKept(NotKept::Busy), "{filled:?}");
            is_kept
        });
    }

    /// Reads a block as a server does, and says whether it was there. It is right then.
    pub(crate) fn read(&self, layer: &CachedLayer, block: u64) -> bool {
        let mut look = layer.look(block);
        if look == Look::Unverified {
            look = layer.verify(block);
        }
        let Look::Verified(stamp) = look else { return false };
        let mut bytes = vec![0; self.block(block).len()];
        let read = layer.file().read_exact_at(&mut bytes, block * BLOCK);
        if !layer.still(block, stamp) {
            return false;
        }
        read.unwrap();
        assert!(bytes == self.block(block), "block {block} is not the layer's");
        true
    }

    /// How many blocks are there.
    pub(crate) fn present(&self, layer: &CachedLayer) -> usize {
        (0..layer.blocks()).filter(|block| self.read(layer, *block)).count()
    }
}

pub(crate) fn open(directory: &Path) -> Arc<Cache> {
    open_within(directory, 1 << 30)
}

/// Opens a cache, and waits until its thread has counted the files, so that it does not while they are filled.
pub(crate) fn open_within(directory: &Path, limit: u64) -> Arc<Cache> {
    let cache = Cache::open(directory, limit).unwrap();
    isobath_testkit::until("the files are counted", || cache.rounds() > 0);
    cache
}

pub(crate) fn tidy(cache: &Cache) {
    isobath_testkit::until("nobody else tidies up", || cache.tidy().unwrap());
}

/// The files of a directory of the cache whose names end so.
pub(crate) fn files(directory: &Path, suffix: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.to_str().unwrap().ends_with(suffix)).collect()
}

/// The names in a directory.
pub(crate) fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name());
    entries.map(|name| name.into_string().unwrap()).collect()
}

#[test]
fn what_is_filled_is_read_from_the_file_also_by_others_and_later() {
    let directory = tempfile::tempdir().unwrap();
    let of_store = Layer::new(1, 3 * BLOCK + 5);
    {
        let (one, other) = (open(directory.path()), open(directory.path()));
        let (one, other) = (of_store.open(&one), of_store.open(&other));
        assert_eq!((one.blocks(), one.file().metadata().unwrap().len()), (4, 3 * BLOCK + 5));
        assert_eq!(one.look(3), Look::Absent);
        let Filled::Kept(stamp) = one.fill(3, of_store.block(3)) else { panic!("not kept") };
        assert_eq!((one.look(3), other.look(3)), (Look::Verified(stamp), Look::Verified(stamp)));
        of_store.fill(&other, 1);
        assert_eq!((of_store.present(&one), of_store.present(&other)), (2, 2));
        assert!(one.still(3, stamp));
        one.doubt(3);
        assert!(!other.still(3, stamp));
        assert_eq!(other.look(3), Look::Unverified);
        assert_eq!(of_store.present(&other), 2);
    }
    let cache = open(directory.path());
    // The threads that look after the files have them for a moment.
    isobath_testkit::until("nobody uses the layer", || {
        of_store.open(&cache).look(1) == Look::Unverified
    });
    let later = of_store.open(&cache);
    assert_eq!((later.look(1), later.look(2), later.look(3)), {
        (Look::Unverified, Look::Absent, Look::Unverified)
    });
    assert_eq!(of_store.present(&later), 2);
    assert!(matches!(later.look(1), Look::Verified(_)));
}

#[test]
fn wrong_bytes_are_not_kept() {
    let directory = tempfile::tempdir().unwrap();
    let of_store = Layer::new(1, 2 * BLOCK + 9);
    let layer = of_store.open(&open(directory.path()));
    let mut wrong = of_store.block(0).to_vec();
    wrong[77] ^= 1;
    let short = &of_store.block(0)[1..];
    for wrong in [&wrong, of_store.block(1), short, &[], &of_store.bytes[..]] {
        assert_eq!(layer.fill(0, wrong), Filled::Wrong);
    }
    assert_eq!(layer.fill(2, of_store.block(0)), Filled::Wrong);
    assert_eq!(of_store.present(&layer), 0);
}

#[test]
fn a_small_limit_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let error = Cache::open(directory.path(), LEAST_LIMIT - 1).unwrap_err().to_string();
    assert!(error.contains("at least 16777216"), "{error}");
}
