//! Keeping a cache within its limit.

use super::census::Census;
use super::common::Common;
use super::directory::{Directory, is_temporary};
use super::objects;
use super::pair::{self, LayerKey, Pair};
use super::protocol::{self, Shared};
use super::word::State;
use crate::digest::BLOCK;
use crate::error::Result;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

/// The part of the limit that objects may take while none of them is needed.
const OBJECTS: u64 = 8;

/// The directories of a cache.
#[derive(Debug)]
pub(super) struct Rooms {
    pub(super) root: Directory,
    pub(super) layers: Directory,
    pub(super) objects: Directory,
    pub(super) manifests: Directory,
}

impl Rooms {
    /// Opens them, or creates those that do not exist.
    ///
    /// # Errors
    /// One cannot be used.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let root = Directory::open(path)?;
        let (layers, objects) = (root.inner("layers")?, root.inner("objects")?);
        let manifests = root.inner("manifests")?;
        Ok(Self { root, layers, objects, manifests })
    }
}

/// A file of the cache.
struct Entry<'d> {
    directory: &'d Directory,
    name: String,
    bytes: u64,
    /// When it was last used.
    used: (i64, u64),
}

fn entries(directory: &Directory) -> io::Result<Vec<Entry<'_>>> {
    let mut entries = Vec::new();
    for name in directory.names()? {
        // One that is removed meanwhile is none.
        let Some(stat) = directory.stat(&name)? else { continue };
        let used = (stat.st_mtime, stat.st_mtime_nsec);
        entries.push(Entry { directory, name, bytes: stat.st_blocks as u64 * 512, used });
    }
    Ok(entries)
}

fn count(rooms: &Rooms) -> io::Result<u64> {
    let all = [&rooms.root, &rooms.layers, &rooms.objects, &rooms.manifests];
    all.iter().try_fold(0, |sum: u64, directory| {
        let bytes: u64 = entries(directory)?.iter().map(|entry| entry.bytes).sum();
        Ok(sum.saturating_add(bytes))
    })
}

/// Counts the files, removes what was left, and evicts what is too much. How many blocks and objects were evicted;
/// `None` if somebody else is doing that.
///
/// # Errors
/// The directories cannot be read.
pub(super) fn run(
    rooms: &Rooms,
    common: &Common,
    find: impl Fn(&LayerKey) -> io::Result<Option<Arc<Pair>>>,
) -> io::Result<Option<u64>> {
    let Some(_alone) = rooms.layers.try_alone()? else { return Ok(None) };
    remove_left(rooms)?;
    let keys: Vec<LayerKey> =
        rooms.layers.names()?.iter().filter_map(|name| LayerKey::of_map(name)).collect();
    // A layer that cannot be opened now is left alone.
    let pairs = || keys.iter().filter_map(|key| find(key).ok().flatten());
    let now = common.usage.now();
    let mut census = Census::new(now);
    for pair in pairs() {
        if let Some(_evicting) = pair.evicting()? {
            restore(&pair, now);
        }
        for (_, word) in pair.present() {
            census.add(word);
        }
    }
    let before = common.usage.bytes();
    let used = count(rooms)?;
    common.counted(before, used);
    let mut evicted = 0;
    if used > common.high() {
        let need = (used - common.low()).div_ceil(BLOCK);
        let mut victims = census.victims(need, common.limit() / BLOCK);
        for pair in pairs() {
            if victims.is_done() {
                break;
            }
            let Some(_evicting) = pair.evicting()? else { continue };
            for (block, word) in pair.present() {
                // One that cannot be taken out is seen when the files are counted.
                if victims.take(word)
                    && matches!(protocol::evict(&*pair, block, word, now), Ok(true))
                {
                    evicted += 1;
                }
            }
        }
    }
    for key in &keys {
        let is_empty = find(key).ok().flatten().is_some_and(|pair| pair.is_empty());
        if is_empty {
            // One that is in use stays.
            let _ = Pair::remove(&rooms.layers, key);
        }
    }
    evicted += remove_objects(rooms, common)?;
    let before = common.usage.bytes();
    common.counted(before, count(rooms)?);
    Ok(Some(evicted))
}

/// Ends what an evictor left, and takes out what fillers left, who were killed.
fn restore(pair: &Pair, now: u64) {
    let mut present = 0_u64;
    for (block, word) in pair.present() {
        present += 1;
        if word.state() == State::Evicting {
            // If it cannot be taken out it is absent at least.
            let _ = protocol::finish(pair, block, now);
        }
    }
    let Ok(metadata) = pair.data().metadata() else { return };
    // What the file system needs for itself is not looked for.
    let expected = present * BLOCK + present * BLOCK / 64 + BLOCK / 2;
    if metadata.blocks() * 512 <= expected {
        return;
    }
    let mut offset = 0;
    while let Ok(data) = rustix::fs::seek(&**pair.data(), rustix::fs::SeekFrom::Data(offset)) {
        let block = data / BLOCK;
        if block >= pair.key().blocks() {
            return;
        }
        let word = pair.load(block);
        if word.state() == State::Absent {
            let _ = protocol::evict(pair, block, word, now);
        }
        offset = (block + 1) * BLOCK;
    }
}

/// Removes files that were left by processes that were killed.
fn remove_left(rooms: &Rooms) -> io::Result<()> {
    for directory in [&rooms.root, &rooms.layers, &rooms.objects, &rooms.manifests] {
        for name in directory.names()? {
            // What cannot be removed now stays until the next time.
            if is_temporary(&name) {
                let _ = directory.remove_unused(&name);
            } else if let Some((key, id)) = pair::of_data(&name) {
                let is_left = || matches!(Pair::names(directory, &key, &id), Ok(false));
                let _ = directory.remove_if(&name, is_left);
            }
        }
    }
    Ok(())
}

/// Removes the objects that were not used for longest, if they are too many or there is no other way; how many.
fn remove_objects(rooms: &Rooms, common: &Common) -> io::Result<u64> {
    let mut objects = entries(&rooms.objects)?;
    objects.retain(|entry| objects::is_object(&entry.name));
    let mut manifests = entries(&rooms.manifests)?;
    manifests.retain(|entry| objects::is_manifest(&entry.name));
    objects.append(&mut manifests);
    objects.sort_unstable_by_key(|entry| entry.used);
    let used = count(rooms)?;
    let sum: u64 = objects.iter().map(|entry| entry.bytes).sum();
    let over = if used > common.high() { used - common.low() } else { 0 };
    let mut need = over.max(sum.saturating_sub(common.limit() / OBJECTS));
    let mut removed = 0;
    for entry in objects {
        if need == 0 {
            break;
        }
        // One that is in use stays.
        if matches!(entry.directory.remove_unused(&entry.name), Ok(true)) {
            need = need.saturating_sub(entry.bytes);
            removed += 1;
        }
    }
    Ok(removed)
}
