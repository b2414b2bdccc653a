//! Settings of an executor.

/// What an executor does its I/O with, and the sizes of its ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// What does the I/O.
    pub io: Io,
    /// Entries of the submission queue, rounded up to a power of two; the completion queue has four times as many. They
    /// do not limit the number of operations in flight.
    pub entries: u32,
    /// Entries after which the queue is submitted even if more could be added.
    pub batch: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { io: Io::Any, entries: 256, batch: 16 }
    }
}

/// What an executor does its I/O with. A [`Notify`](crate::Notify) has a ring of its own, or none if that is forbidden.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Io {
    /// What the environment variable `ISOBATH_IO` names (`io_uring` or `threads`); if it is not set, io_uring, or
    /// threads if io_uring is missing, too old (before Linux 5.11) or forbidden.
    #[default]
    Any,
    /// io_uring.
    Ring,
    /// Threads for files, and epoll for everything else.
    Threads,
}
