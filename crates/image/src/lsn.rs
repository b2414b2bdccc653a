//! The one counter of log sequence numbers.

use isobath_qcow2::Lsn;
use std::sync::atomic::{AtomicU64, Ordering};

/// Assigns the numbers of one image's log: to records of the journal, mappings embedded in data, and commits.
#[derive(Debug, Default)]
pub struct LogSequence {
    last: AtomicU64,
}

impl LogSequence {
    /// The next number, which is assigned only once.
    pub fn next(&self) -> Lsn {
        Lsn::new(self.last.fetch_add(1, Ordering::SeqCst) + 1)
    }

    /// The last number that was assigned; 0 if there is none.
    pub fn last(&self) -> Lsn {
        Lsn::new(self.last.load(Ordering::SeqCst))
    }
}
