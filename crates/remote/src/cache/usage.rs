//! What users of a cache count together: a file of a page, mapped by all. Nothing in it must be right; what is wrong
//! only makes the cache hold less, or other blocks, until its files are counted again.

use super::directory::Directory;
use super::sys::{PAGE, Words};
use crate::digest::BLOCK;
use std::fs::File;
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

const NAME: &str = "usage";
const MAGIC: u64 = u64::from_be_bytes(*b"IBUSAGE1");

/// The numbers of words.
const TICK: usize = 1;
const SINCE: usize = 2;
const BYTES: usize = 3;
const MINUTE: usize = 4;

/// Ticks while as many blocks are filled as the cache may hold, and the fewest blocks of a tick.
const PER_ROUND: u64 = 64;
const LEAST_TICK: u64 = 4;

/// Blocks that are filled in a tick, by a cache that holds up to `limit` blocks.
pub(super) fn per_tick(limit: u64) -> u64 {
    (limit / PER_ROUND).max(LEAST_TICK)
}

/// How often the page is mapped; the last time it is memory of this process alone.
const MAPPINGS: usize = 8;

/// The shared counts.
#[derive(Debug)]
pub(super) struct Usage {
    /// The page as it was mapped first, and whenever it was lost, up to `last`.
    mappings: [OnceLock<Words>; MAPPINGS],
    last: AtomicUsize,
    /// Blocks that are filled in a tick.
    tick: u64,
}

impl Usage {
    /// The counts of a cache of so many bytes: shared, or if that is impossible those of this process.
    ///
    /// # Errors
    /// There is no memory.
    pub(super) fn open(directory: &Directory, limit: u64) -> io::Result<Self> {
        let (last, tick) = (AtomicUsize::new(0), per_tick(limit / BLOCK));
        let mut mappings: [OnceLock<Words>; MAPPINGS] = Default::default();
        let [first, ..] = &mut mappings;
        *first = OnceLock::from(mapped(directory)?);
        Ok(Self { mappings, last, tick })
    }

    fn words(&self) -> &Words {
        let words = self.mappings.get(self.last.load(Ordering::Acquire)).and_then(OnceLock::get);
        words.unwrap_or_else(|| unreachable!("the last page was mapped"))
    }

    /// Maps the page again if it was lost.
    ///
    /// # Errors
    /// There is no memory.
    pub(super) fn look_after(&self, directory: &Directory) -> io::Result<()> {
        let next = self.last.load(Ordering::Acquire) + 1;
        let Some(place) = self.mappings.get(next).filter(|_| self.words().is_lost()) else {
            return Ok(());
        };
        let is_last = next + 1 == MAPPINGS;
        let words = if is_last { Words::map(None, PAGE)? } else { mapped(directory)? };
        // Another thread may have done it.
        place.get_or_init(|| words);
        self.last.fetch_max(next, Ordering::AcqRel);
        Ok(())
    }

    fn word(&self, number: usize) -> &AtomicU64 {
        self.words().get(number)
    }

    /// The current tick.
    pub(super) fn now(&self) -> u64 {
        self.word(TICK).load(Ordering::Relaxed)
    }

    /// Begins a new tick.
    pub(super) fn advance(&self) {
        self.word(TICK).fetch_add(1, Ordering::Relaxed);
    }

    /// Begins a new tick if it is the first time that this is called in a minute by any process.
    pub(super) fn advance_with_time(&self) {
        let minute = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs() / 60);
        if self.word(MINUTE).swap(minute, Ordering::Relaxed) != minute {
            self.advance();
        }
    }

    /// Bytes of all files, as far as is known; `None` if it is not.
    pub(super) fn bytes(&self) -> Option<u64> {
        let bytes = self.word(BYTES).load(Ordering::Relaxed);
        (!self.words().is_lost()).then_some(bytes)
    }

    /// Replaces what was known `before` the files were counted by what was counted. What was added meanwhile stays.
    pub(super) fn counted(&self, before: Option<u64>, bytes: u64) {
        match before {
            Some(before) => {
                self.word(BYTES).fetch_add(bytes.wrapping_sub(before), Ordering::Relaxed);
            }
            None => self.word(BYTES).store(bytes, Ordering::Relaxed),
        }
    }

    /// Adds bytes that were written.
    pub(super) fn add(&self, bytes: u64) {
        self.word(BYTES).fetch_add(bytes, Ordering::Relaxed);
    }

    /// Adds a block that was filled.
    pub(super) fn filled(&self, bytes: u64) {
        self.add(bytes);
        if self.word(SINCE).fetch_add(1, Ordering::Relaxed) + 1 >= self.tick {
            self.word(SINCE).store(0, Ordering::Relaxed);
            self.advance();
        }
    }
}

/// The page of the counts: that of the file, or if that is impossible one of this process.
fn mapped(directory: &Directory) -> io::Result<Words> {
    let shared = shared(directory).and_then(|file| Words::map(Some(&file), PAGE));
    shared.or_else(|_| Words::map(None, PAGE))
}

/// The file with the counts.
fn shared(directory: &Directory) -> io::Result<File> {
    match directory.file(NAME) {
        Ok(Some(file)) if is_whole(&file)? => return Ok(file),
        Ok(None) => {}
        Ok(Some(_)) => directory.unlink(NAME)?,
        Err(error) if error.kind() == io::ErrorKind::InvalidData => directory.put_aside(NAME)?,
        Err(error) => return Err(error),
    }
    let new = directory.temporary()?;
    let mut page = [0; PAGE];
    for (to, from) in page.iter_mut().zip(MAGIC.to_ne_bytes()) {
        *to = from;
    }
    std::os::unix::fs::FileExt::write_all_at(new.file(), &page, 0)?;
    new.add(NAME)?;
    let file = directory.file(NAME)?;
    file.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "it was removed"))
}

fn is_whole(file: &File) -> io::Result<bool> {
    let mut magic = [0; 8];
    let length = file.metadata()?.len();
    Ok(length == PAGE as u64
        && std::os::unix::fs::FileExt::read_at(file, &mut magic, 0)? == 8
        && u64::from_ne_bytes(magic) == MAGIC)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_filled_while_the_files_are_counted_is_counted_too() {
        let directory = tempfile::tempdir().unwrap();
        let usage = Usage::open(&Directory::open(directory.path()).unwrap(), 1 << 30).unwrap();
        usage.add(700);
        let before = usage.bytes();
        usage.filled(50);
        usage.counted(before, 600);
        assert_eq!(usage.bytes(), Some(650));
        usage.counted(usage.bytes(), 3);
        assert_eq!(usage.bytes(), Some(3));
    }
}
