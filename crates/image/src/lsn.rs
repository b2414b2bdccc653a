//! The one counter of log sequence numbers.

use isobath_qcow2::Lsn;
use std::sync::atomic::{AtomicU64, Ordering};

/// Gives out the numbers of one image's log, to records of the journal, to mappings embedded in data and to
/// commits alike.
#[derive(Debug, Default)]
pub struct LogSequence {
    last: AtomicU64,
}

impl LogSequence {
    /// The next number, which nobody else gets.
    pub fn next(&self) -> Lsn {
        Lsn::new(self.last.fetch_add(1, Ordering::SeqCst) + 1)
    }

    /// The last number that was given out; 0 if there is none.
    pub fn last(&self) -> Lsn {
        Lsn::new(self.last.load(Ordering::SeqCst))
    }
}
