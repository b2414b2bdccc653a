//! Whether a handle writes, and what became of that.

use super::beside::Admission;
use super::transfer::Target;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

/// Opened for reading.
const READING: u8 = 0;
const WRITABLE: u8 = 1;
/// No change may begin any more; those begun may be in progress, and nothing is durable yet.
pub(super) const ENDING: u8 = 2;
/// Every change has ended and was flushed, or the flush has failed.
pub(super) const ENDED: u8 = 3;

/// Whether a handle writes.
pub(super) struct Writing(AtomicU8);

impl Writing {
    pub(super) fn new(writable: bool) -> Self {
        Self(AtomicU8::new(if writable { WRITABLE } else { READING }))
    }

    /// Whether it never wrote, nor will.
    pub(super) fn is_none(&self) -> bool {
        self.0.load(Ordering::Relaxed) == READING
    }

    /// Whether changes are refused.
    pub(super) fn has_ended(&self) -> bool {
        self.0.load(Ordering::Acquire) != WRITABLE
    }

    /// Whether every change has ended and was flushed, or the flush has failed.
    pub(super) fn is_flushed(&self) -> bool {
        self.0.load(Ordering::Acquire) == ENDED
    }

    pub(super) fn set(&self, state: u8) {
        self.0.store(state, Ordering::Release);
    }
}

/// The role's changes since the file was opened.
#[derive(Default)]
pub(super) struct Changed {
    /// The writer's descriptor, until its last operation has ended.
    pub(super) writer: Option<Arc<Target>>,
    /// The file no longer had its name when writing ended.
    pub(super) nameless: bool,
    /// This process may open the file for writing.
    pub(super) admits: bool,
    /// That, if the file is locked.
    pub(super) admission: Option<Admission>,
}
