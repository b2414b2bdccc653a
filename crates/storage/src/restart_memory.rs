//! Memory that survives a kill of the process, but not a reboot: it lives as long as the page cache does.
//!
//! Data that a program writes to a file is in the kernel's page cache, and stays there when the program is killed. Data
//! in its own memory is lost. A [`RestartMemory`] is kernel memory that a program stores into without a system call: a
//! writer keeps changes in it that are not in its file yet.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

/// The size of a file's restart memory in bytes.
pub const RESTART_MEMORY_BYTES: usize = 2 << 20;

/// The first words of the memory that is looked for. Several users may have left memory for one file, and only one of
/// them what fits its contents.
pub type Mark = [u64; 3];

/// What a file's restart memory is wanted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryUse {
    /// To be written: new memory, or that of this user, whose contents do not matter.
    Create,
    /// To be applied, and removed: existing memory, which nobody else uses meanwhile.
    Take(Mark),
    /// To be read: existing memory, which others may read at the same time.
    Look(Mark),
    /// Like [`Look`](Self::Look), of a file that is read without locks: none while somebody writes to the file.
    Glance(Mark),
    /// To be removed: existing memory that nobody uses, whose contents do not matter. Nothing is waited for.
    Stale,
}

impl MemoryUse {
    /// How the memory that is looked for begins. A host that knows only of one for each file need not compare.
    pub fn mark(self) -> Option<Mark> {
        match self {
            Self::Take(mark) | Self::Look(mark) | Self::Glance(mark) => Some(mark),
            Self::Create | Self::Stale => None,
        }
    }
}

/// The restart memory that belongs to one file. Only its current user changes it.
pub trait RestartMemory: Send + Sync {
    /// The whole memory: [`RESTART_MEMORY_BYTES`], to store into if it was [created](MemoryUse::Create). Of memory that
    /// was found these are the contents, maybe in a copy; they may be anything.
    fn words(&self) -> &[AtomicU64];

    /// Changes one word of memory that was found.
    ///
    /// # Errors
    /// It cannot be changed.
    fn store(&self, place: usize, value: u64) -> io::Result<()> {
        let word = self.words().get(place).ok_or(io::ErrorKind::InvalidInput)?;
        word.store(value, Ordering::Release);
        Ok(())
    }

    /// Its name for messages: the path of a file.
    fn name(&self) -> String;

    /// Removes the memory. A later request for the file's memory gets new memory.
    fn remove(&self);

    /// Sets the memory aside, and returns its new name for messages; `None` if it was removed. A later request for the
    /// file's memory gets new memory.
    ///
    /// # Errors
    /// It cannot be renamed; it is then where it was.
    fn set_aside(&self) -> io::Result<Option<String>>;

    /// Whether a later request for the file's memory would get this one, which is not so if it was removed.
    fn is_there(&self) -> bool;
}
