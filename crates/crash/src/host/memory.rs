//! Memory that survives a kill of the server.

use crate::record::Tick;
use isobath_storage::restart_memory::{MemoryUse, RESTART_MEMORY_BYTES, RestartMemory};
use parking_lot::Mutex;
use rand::RngExt;
use rand::rngs::SmallRng;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

type Words = Arc<[AtomicU64]>;
type Place = Arc<Mutex<Option<Words>>>;

/// The words up to the last nonzero one.
type Copied = Arc<[u64]>;

/// The number of words in the head.
const HEAD: usize = 8;
/// The range of last words in which one is damaged.
const LAST: usize = 16;

/// The contents of all files' memory at a moment, by file.
#[derive(Clone, Debug, Default, Hash)]
pub struct Memories(Vec<Option<Copied>>);

impl Memories {
    /// Whether there is any.
    pub fn any(&self) -> bool {
        self.0.iter().any(Option::is_some)
    }

    /// The same with one bit flipped in each, among the last words in use after the head.
    #[must_use]
    pub fn damaged(&self, rng: &mut SmallRng) -> Self {
        let mut memories = self.clone();
        for words in memories.0.iter_mut().flatten().filter(|words| words.len() > HEAD) {
            let first = words.len().saturating_sub(LAST).max(HEAD);
            let place = rng.random_range(first..words.len());
            if let Some(word) = Arc::make_mut(words).get_mut(place) {
                *word ^= 1 << rng.random_range(0..64);
            }
        }
        memories
    }
}

/// The memory of a killed server.
#[derive(Clone, Debug)]
pub struct Killed {
    /// When.
    pub at: Tick,
    /// The memory that it left.
    pub memories: Memories,
}

/// The memory of each file.
#[derive(Default)]
pub(super) struct RestartMemories(Vec<Place>);

/// A file's memory in use.
struct Mapped {
    words: Words,
    place: Place,
}

impl RestartMemory for Mapped {
    fn words(&self) -> &[AtomicU64] {
        &self.words
    }

    fn name(&self) -> String {
        "simulated memory".into()
    }

    fn is_there(&self) -> bool {
        self.place.lock().as_ref().is_some_and(|words| Arc::ptr_eq(words, &self.words))
    }

    fn remove(&self) {
        let mut place = self.place.lock();
        if place.as_ref().is_some_and(|words| Arc::ptr_eq(words, &self.words)) {
            *place = None;
        }
    }

    fn set_aside(&self) -> io::Result<Option<String>> {
        let there = self.is_there().then(|| "simulated memory, set aside".into());
        self.remove();
        Ok(there)
    }
}

const WORDS: usize = RESTART_MEMORY_BYTES / 8;

fn words(copied: &[u64]) -> Words {
    (0..WORDS).map(|at| AtomicU64::new(copied.get(at).copied().unwrap_or(0))).collect()
}

impl RestartMemories {
    /// The memory that a killed server left.
    pub(super) fn restored(memories: &Memories) -> Self {
        let place = |copied: &Option<Copied>| {
            Arc::new(Mutex::new(copied.as_ref().map(|copied| words(copied))))
        };
        Self(memories.0.iter().map(place).collect())
    }

    /// The memory of a file for this use.
    pub(super) fn of(&mut self, file: usize, how: MemoryUse) -> Option<Arc<dyn RestartMemory>> {
        if self.0.len() <= file {
            self.0.resize_with(file + 1, Place::default);
        }
        let place = Arc::clone(&self.0[file]);
        let mut found = place.lock();
        if found.is_none() && how == MemoryUse::Create {
            *found = Some(words(&[]));
        }
        let words = found.clone()?;
        drop(found);
        Some(Arc::new(Mapped { words, place }))
    }

    /// Whether a file has memory.
    pub(super) fn has(&self, file: usize) -> bool {
        self.0.get(file).is_some_and(|place| place.lock().is_some())
    }

    /// Their current contents.
    pub(super) fn copy(&self) -> Memories {
        let copied = |place: &Place| {
            let found = place.lock();
            let words = found.as_ref()?;
            let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
            let used = words.iter().rposition(|word| load(word) != 0).map_or(0, |last| last + 1);
            Some(words[..used].iter().map(load).collect())
        };
        Memories(self.0.iter().map(copied).collect())
    }
}
