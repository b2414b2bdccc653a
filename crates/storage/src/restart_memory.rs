//! Memory that survives a kill of the process, but not a reboot: it lives as long as the page cache does.
//!
//! What a program writes to a file is in the kernel's page cache, and stays there when the program is
//! killed. What it only keeps in its own memory is gone. A [`RestartMemory`] is memory of the kernel's that
//! a program stores into without a system call: a writer keeps in one what its file does not say yet.

use std::sync::atomic::AtomicU64;

/// Bytes of a file's restart memory.
pub const RESTART_MEMORY_BYTES: usize = 2 << 20;

/// The restart memory that belongs to one file. Only its user at the time changes it.
pub trait RestartMemory: Send + Sync {
    /// The memory, all of it: [`RESTART_MEMORY_BYTES`]. New memory holds zeroes; other holds what it was
    /// left with, by whoever could open it.
    fn words(&self) -> &[AtomicU64];

    /// What it is, for people: the path of a file.
    fn name(&self) -> String;

    /// Gives the memory back. Who asks for the file's later gets other.
    fn remove(&self);

    /// Whether who asks for the file's memory later gets this; not if somebody has removed it.
    fn is_there(&self) -> bool;
}
