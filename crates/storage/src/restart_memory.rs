//! Memory that survives a kill of the process, but not a reboot: it lives as long as the page cache does.
//!
//! Data that a program writes to a file is in the kernel's page cache, and stays there when the program is killed. Data
//! in its own memory is lost. A [`RestartMemory`] is kernel memory that a program stores into without a system call: a
//! writer keeps changes in it that are not in its file yet.

use std::io;
use std::sync::atomic::AtomicU64;

/// The size of a file's restart memory in bytes.
pub const RESTART_MEMORY_BYTES: usize = 2 << 20;

/// What a file's restart memory is wanted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryUse {
    /// To be written: existing memory, or new one.
    Create,
    /// To be applied, and removed: existing memory, which nobody else uses meanwhile.
    Take,
    /// To be read: existing memory, which others may read at the same time.
    Look,
    /// Like [`Look`](Self::Look), of a file that is read without locks: none while somebody writes to the file.
    Glance,
}

/// The restart memory that belongs to one file. Only its current user changes it.
pub trait RestartMemory: Send + Sync {
    /// The whole memory: [`RESTART_MEMORY_BYTES`]. New memory holds zeroes; existing memory holds what its last user,
    /// or anyone who could open it, left.
    fn words(&self) -> &[AtomicU64];

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
