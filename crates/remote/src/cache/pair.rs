//! The two files of a layer: its data, at the layer's own offsets, and the map of what is there.
//!
//! A map is named by the layer's key, and names its data by an id that it never shares with another, so that neither is
//! ever taken for that of files which were removed. Who uses them holds shared locks on both. "Verified" means nothing
//! to whoever finds the files unused: anything may have happened to them since. So who opens them first makes all
//! blocks unverified, before anybody else can open them.
//!
//! Whatever makes it doubtful that the words are those that other users see, or will be, *detaches* the files: this
//! process shows and keeps nothing in them any more.

use super::directory::{ATTEMPTS, Directory, is_hex, is_linked};
use super::protocol::{self, Shared};
use super::sys::{self, Lock, PAGE, Part, Words};
use super::word::{State, Word};
use crate::digest::{BLOCK, Digest};
use rustix::fs::{Advice, FallocateFlags};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

/// Which layer it is, and by what its blocks are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayerKey {
    /// The digest of the layer.
    pub digest: Digest,
    /// Its length in bytes.
    pub length: u64,
    /// The digest of its table of checksums.
    pub table: Digest,
}

impl LayerKey {
    /// How many blocks the layer has.
    pub(super) fn blocks(&self) -> u64 {
        self.length.div_ceil(BLOCK)
    }

    fn name(&self) -> String {
        format!("{}-{}-{}", self.digest, self.length, self.table)
    }

    /// The name of the layer's map.
    pub(super) fn map(&self) -> String {
        format!("{}{MAP}", self.name())
    }

    /// The key of the layer with this map.
    pub(super) fn of_map(name: &str) -> Option<Self> {
        Self::parse(name.strip_suffix(MAP)?)
    }

    fn parse(name: &str) -> Option<Self> {
        let mut parts = name.split('-');
        let (digest, length, table) = (parts.next()?, parts.next()?, parts.next()?);
        let key = Self {
            digest: Digest::parse(digest)?,
            length: length.parse().ok()?,
            table: Digest::parse(table)?,
        };
        (key.name() == name).then_some(key)
    }
}

/// What the names of maps and of data end with.
const MAP: &str = ".map";
const DATA: &str = ".data";

/// What a map begins with: what it is, and the order of a word's bytes.
const MAGIC: &[u8; 8] = b"IBCACHE1";
const ORDER: u64 = 0x0102_0304_0506_0708;
const ID: usize = 16;
/// Bytes of the header, the last of which are its checksum. The words begin at the second page.
const HEADER: usize = 8 + 8 + 8 + 32 + 32 + ID + CHECK;
const CHECK: usize = 16;

type Id = [u8; ID];

fn data_name(key: &LayerKey, id: &Id) -> String {
    format!("{}-{:032x}{DATA}", key.name(), u128::from_be_bytes(*id))
}

/// The key and the id in the name of a layer's data.
pub(super) fn of_data(name: &str) -> Option<(LayerKey, String)> {
    let (key, id) = name.strip_suffix(DATA)?.rsplit_once('-')?;
    is_hex(id, 2 * ID).then_some(())?;
    Some((LayerKey::parse(key)?, id.to_owned()))
}

fn header(key: &LayerKey, id: &Id) -> [u8; HEADER] {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&ORDER.to_ne_bytes());
    bytes.extend_from_slice(&key.length.to_ne_bytes());
    bytes.extend_from_slice(key.digest.bytes());
    bytes.extend_from_slice(key.table.bytes());
    bytes.extend_from_slice(id);
    let check = blake3::hash(&bytes);
    let mut whole = [0; HEADER];
    for (to, from) in whole.iter_mut().zip(bytes.iter().chain(check.as_bytes())) {
        *to = *from;
    }
    whole
}

/// The distance of two first generations: that of the golden ratio.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Bytes of the map of a layer.
fn map_length(key: &LayerKey) -> io::Result<usize> {
    let words = key.blocks().checked_mul(8).and_then(|bytes| bytes.checked_add(PAGE as u64));
    let whole = words.and_then(|bytes| bytes.checked_next_multiple_of(PAGE as u64));
    let fits = whole.and_then(|bytes| usize::try_from(bytes).ok());
    fits.ok_or_else(|| io::Error::other("the layer is too large"))
}

/// The id in the header of a map; `None` if the map is not that of this layer.
fn read_id(map: &File, key: &LayerKey) -> io::Result<Option<Id>> {
    if map.metadata()?.len() != map_length(key)? as u64 {
        return Ok(None);
    }
    let mut found = [0; HEADER];
    match map.read_exact_at(&mut found, 0) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    }
    let mut id = [0; ID];
    for (to, from) in id.iter_mut().zip(found.iter().skip(HEADER - CHECK - ID)) {
        *to = *from;
    }
    Ok((found == header(key, &id)).then_some(id))
}

/// The files of a layer, in use until it is dropped.
#[derive(Debug)]
pub(super) struct Pair {
    key: LayerKey,
    words: Words,
    map: File,
    data: Arc<File>,
    path: PathBuf,
    /// The generation of the next word that is changed for the first time.
    first: AtomicU64,
    /// Whether the files were found not to be usable.
    detached: AtomicBool,
}

impl Drop for Pair {
    fn drop(&mut self) {
        sys::unlock(&self.map);
        sys::unlock(&self.data);
    }
}

/// The right to evict blocks of a layer.
pub(super) struct Evicting<'p>(&'p Pair);

impl Drop for Evicting<'_> {
    fn drop(&mut self) {
        // It does not fail for a lock that was taken.
        let _ = sys::try_lock(&self.0.map, Part::Evicting, Lock::Free);
    }
}

/// Whether a lock is waited for that others hold for moments only.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wait {
    Little,
    Never,
}

impl Wait {
    fn lock(self, file: &File, part: Part, lock: Lock) -> io::Result<()> {
        match self {
            Self::Little => sys::lock(file, part, lock),
            Self::Never => sys::lock_at_once(file, part, lock),
        }
    }
}

/// What was found where the files of a layer may be.
enum Found {
    Pair(Pair),
    None,
    /// What is there is not what it should be, and was removed.
    Removed,
}

impl Pair {
    /// The files of a layer; `None` if there are none. Waits for nobody.
    ///
    /// # Errors
    /// They cannot be opened, or somebody else is just opening them.
    pub(super) fn find(directory: &Directory, key: &LayerKey) -> io::Result<Option<Self>> {
        for _ in 0..ATTEMPTS {
            match Self::look(directory, key, Wait::Never)? {
                Found::Pair(pair) => return Ok(Some(pair)),
                Found::None => return Ok(None),
                Found::Removed => {}
            }
        }
        Err(restless())
    }

    /// The files of a layer, which are created if there are none.
    ///
    /// # Errors
    /// They can be neither opened nor created.
    pub(super) fn open(directory: &Directory, key: &LayerKey) -> io::Result<Self> {
        for _ in 0..ATTEMPTS {
            match Self::look(directory, key, Wait::Little)? {
                Found::Pair(pair) => return Ok(pair),
                Found::None => create(directory, key)?,
                Found::Removed => {}
            }
        }
        Err(restless())
    }

    fn look(directory: &Directory, key: &LayerKey, wait: Wait) -> io::Result<Found> {
        let name = key.map();
        let map = match directory.file(&name) {
            Ok(Some(map)) => map,
            Ok(None) => return Ok(Found::None),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                return directory.put_aside(&name).map(|()| Found::Removed);
            }
            Err(error) => return Err(error),
        };
        // It ends with the file if it is not given up before.
        wait.lock(&map, Part::Opening, Lock::Alone)?;
        if !is_linked(&map)? {
            return Ok(Found::Removed);
        }
        Self::join(directory, key, map, wait)
    }

    /// Becomes a user of a map that nobody else begins to use or removes meanwhile.
    fn join(directory: &Directory, key: &LayerKey, map: File, wait: Wait) -> io::Result<Found> {
        // Before its locks are given up, so that it is not the map of somebody who has made it anew. Others that have
        // it open detach it.
        let remove = |map: &File| directory.unlink_file(&key.map(), map).map(|()| Found::Removed);
        let Some(id) = read_id(&map, key)? else { return remove(&map) };
        let name = data_name(key, &id);
        let data = match directory.file(&name) {
            Ok(Some(data)) => data,
            Ok(None) => return remove(&map),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => return remove(&map),
            Err(error) => return Err(error),
        };
        // Whoever looks for data without a map holds this one for a moment.
        wait.lock(&data, Part::Use, Lock::Shared)?;
        if data.metadata()?.len() != key.length || !is_linked(&data)? {
            return remove(&map);
        }
        sys::lock(&map, Part::Use, Lock::Shared)?;
        let words = Words::map(Some(&map), map_length(key)?)?;
        let mut first = [0; 8];
        getrandom::fill(&mut first).map_err(io::Error::other)?;
        let (first, path) = (AtomicU64::new(u64::from_ne_bytes(first)), directory.path(&name));
        let (data, detached) = (Arc::new(data), AtomicBool::new(false));
        let pair = Self { key: *key, words, map, data, path, first, detached };
        if sys::try_lock(&pair.map, Part::Use, Lock::Alone)? {
            // Who creates the files holds the data for a moment after the map has its name.
            match wait.lock(&pair.data, Part::Use, Lock::Alone) {
                Ok(()) => {}
                Err(error)
                    if error.kind() == io::ErrorKind::ResourceBusy && wait == Wait::Little =>
                {
                    // Another map, of which this one is a copy, is in use with the same data.
                    return remove(&pair.map);
                }
                Err(error) => return Err(error),
            }
            // What the disk does not have is shown by the disk, not by the kernel, which may have failed to write it.
            rustix::fs::fadvise(&*pair.data, 0, None, Advice::DontNeed)?;
            (0..key.blocks()).for_each(|block| protocol::renew(&pair, block));
            if pair.is_lost() {
                return remove(&pair.map);
            }
            sys::try_lock(&pair.data, Part::Use, Lock::Shared)?;
            sys::try_lock(&pair.map, Part::Use, Lock::Shared)?;
        }
        sys::try_lock(&pair.map, Part::Opening, Lock::Free)?;
        Ok(Found::Pair(pair))
    }

    /// Removes the files of a layer if nobody uses them; whether nobody did.
    ///
    /// # Errors
    /// They cannot be examined or removed.
    pub(super) fn remove(directory: &Directory, key: &LayerKey) -> io::Result<bool> {
        let name = key.map();
        let Some(map) = directory.file(&name)? else { return Ok(true) };
        let alone = sys::try_lock(&map, Part::Opening, Lock::Alone)?
            && sys::try_lock(&map, Part::Use, Lock::Alone)?;
        if !alone || !is_linked(&map)? {
            return Ok(false);
        }
        let id = read_id(&map, key)?;
        // Data without a map is removed by whoever tidies up.
        directory.unlink(&name)?;
        id.map_or(Ok(()), |id| directory.unlink(&data_name(key, &id)))?;
        Ok(true)
    }

    /// Whether the map of a layer names the data with this id.
    ///
    /// # Errors
    /// The map cannot be read.
    pub(super) fn names(directory: &Directory, key: &LayerKey, id: &str) -> io::Result<bool> {
        let Some(map) = directory.file(&key.map())? else { return Ok(false) };
        let named = read_id(&map, key)?;
        Ok(named.is_some_and(|named| format!("{:032x}", u128::from_be_bytes(named)) == id))
    }

    pub(super) fn key(&self) -> &LayerKey {
        &self.key
    }

    pub(super) fn data(&self) -> &Arc<File> {
        &self.data
    }

    pub(super) fn path(&self) -> &PathBuf {
        &self.path
    }

    /// Bytes of a block.
    pub(super) fn block_length(&self, block: u64) -> usize {
        block_length(&self.key, block)
    }

    /// Whether the files are detached: others may not see what is done here, and nothing in them counts.
    pub(super) fn is_lost(&self) -> bool {
        self.words.is_lost() || self.detached.load(Ordering::Acquire)
    }

    /// Whether no block is there.
    pub(super) fn is_empty(&self) -> bool {
        self.present().next().is_none() && !self.is_lost()
    }

    /// Makes all blocks absent if the kernel has lost what was written to the data, and detaches the files if that
    /// concerns the map, which is removed then.
    pub(super) fn look_for_losses(&self, directory: &Directory) {
        let has_lost_words = match map_length(&self.key) {
            Ok(length) => sys::has_lost_writes(&self.map, length as u64),
            Err(_) => unreachable!("the map is mapped"),
        };
        if has_lost_words {
            self.detach();
            // If its name stays, so does this user, and who opens it hears of the error from the kernel.
            let _ = directory.unlink_file(&self.key.map(), &self.map);
        }
        if sys::has_lost_writes(&self.data, self.key.length) {
            (0..self.key.blocks()).for_each(|block| protocol::lose(self, block));
        }
    }

    /// Keeps other evictors out until it is dropped, also those that have the files in another directory; `None` if
    /// there is one. Whoever calls it has the lock of evictions of the directory.
    ///
    /// # Errors
    /// The file system has no locks.
    pub(super) fn evicting(&self) -> io::Result<Option<Evicting<'_>>> {
        let is_alone = sys::try_lock(&self.map, Part::Evicting, Lock::Alone)?;
        Ok(is_alone.then_some(Evicting(self)))
    }

    fn detach(&self) {
        self.detached.store(true, Ordering::Release);
    }

    /// Detaches files that were removed: nobody counts or evicts what is in them.
    pub(super) fn look_for_names(&self) {
        if !matches!((is_linked(&self.map), is_linked(&self.data)), (Ok(true), Ok(true))) {
            self.detach();
        }
    }

    /// Ends the use of files that are detached, so that who opens them next begins anew. Whoever calls it has the lock
    /// of evictions: nobody in this process is just taking out a block that others may fill then.
    pub(super) fn leave_if_lost(&self) {
        if self.is_lost() {
            sys::unlock(&self.map);
            sys::unlock(&self.data);
        }
    }

    /// Notes that a block is used.
    pub(super) fn note(&self, block: u64, word: Word, now: u64) {
        if let Some(used) = word.used(now) {
            // If others have changed it, that may be noted some other time.
            let _ = self.word(block).compare_exchange(
                word.bits(),
                used.bits(),
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
        }
    }

    /// The blocks that are not absent, with their words.
    pub(super) fn present(&self) -> impl Iterator<Item = (u64, Word)> {
        let blocks = (0..self.key.blocks()).map(|block| (block, self.load(block)));
        blocks.filter(|(_, word)| word.state() != State::Absent)
    }

    fn word(&self, block: u64) -> &AtomicU64 {
        assert!(block < self.key.blocks(), "the layer has no block {block}");
        self.words.get(PAGE / 8 + block as usize)
    }
}

pub(super) fn block_length(key: &LayerKey, block: u64) -> usize {
    let start = block.saturating_mul(BLOCK);
    assert!(start < key.length, "the layer has no block {block}");
    (key.length - start).min(BLOCK) as usize
}

impl Shared for Pair {
    fn load(&self, block: u64) -> Word {
        Word::from_bits(self.word(block).load(Ordering::Acquire))
    }

    fn load_after_reads(&self, block: u64) -> Word {
        fence(Ordering::Acquire);
        self.load(block)
    }

    fn replace(&self, block: u64, from: Word, to: Word) -> bool {
        let (word, from, to) = (self.word(block), from.bits(), to.bits());
        let replaced = word.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire);
        // What is done to the file next is not seen by who has seen the old word after it.
        fence(Ordering::SeqCst);
        replaced.is_ok() && !self.is_lost()
    }

    fn is_shared(&self) -> bool {
        !self.is_lost()
    }

    fn first(&self) -> u64 {
        // All bits change, so that none of these is near another one's successors.
        self.first.fetch_add(STEP, Ordering::Relaxed)
    }

    fn write(&self, block: u64, bytes: &[u8]) -> io::Result<()> {
        self.data.write_all_at(bytes, block * BLOCK)
    }

    fn read(&self, block: u64) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; self.block_length(block)];
        self.data.read_exact_at(&mut bytes, block * BLOCK)?;
        Ok(bytes)
    }

    fn punch(&self, block: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&*self.data, flags, block * BLOCK, BLOCK)?)
    }
}

/// Creates the files of a layer, unless somebody else does at the same time.
fn create(directory: &Directory, key: &LayerKey) -> io::Result<()> {
    let mut id = [0; ID];
    getrandom::fill(&mut id).map_err(io::Error::other)?;
    let name = data_name(key, &id);
    let data = directory.create(&name)?;
    let added = data.set_len(key.length).and_then(|()| add_map(directory, key, &id));
    if !matches!(added, Ok(true)) {
        directory.unlink(&name)?;
    }
    sys::unlock(&data);
    added.map(drop)
}

fn add_map(directory: &Directory, key: &LayerKey, id: &Id) -> io::Result<bool> {
    let map = directory.temporary()?;
    let length = map_length(key)? as u64;
    // Without holes: a word that is changed needs no room.
    rustix::fs::fallocate(map.file(), FallocateFlags::empty(), 0, length)?;
    map.file().write_all_at(&header(key, id), 0)?;
    map.add(&key.map())
}

fn restless() -> io::Error {
    io::Error::new(io::ErrorKind::ResourceBusy, "other processes keep removing it")
}
