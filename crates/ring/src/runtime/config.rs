//! Settings of an executor.

/// Sizes of an executor's ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Entries of the submission queue, rounded up to a power of two; the completion queue has four times as many. They
    /// do not limit the number of operations in flight.
    pub entries: u32,
    /// Entries after which the queue is submitted even if more could be added.
    pub batch: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { entries: 256, batch: 16 }
    }
}
