//! What is fetched of a layer, and by whom it is judged.

use super::flight::Flight;
use crate::error::{Error, Result};
use std::ops::Range;
use std::sync::Arc;

/// A failure that several are told of.
pub(crate) type Shared<T> = std::result::Result<T, Arc<Error>>;

/// What became of a block.
pub(crate) type Fetched = Shared<Block>;

/// A block that was fetched and is right.
#[derive(Clone)]
pub(crate) struct Block {
    bytes: Arc<Vec<u8>>,
    range: Range<usize>,
}

impl Block {
    /// A part of what was fetched.
    pub(super) fn new(bytes: &Arc<Vec<u8>>, range: Range<usize>) -> Self {
        Self { bytes: Arc::clone(bytes), range }
    }

    /// Its bytes; none if less was fetched.
    pub(super) fn bytes(&self) -> &[u8] {
        self.bytes.get(self.range.clone()).unwrap_or_default()
    }

    /// Copies bytes of it, from the byte `from` on, and returns whether it has so many.
    #[must_use]
    pub(crate) fn copy(&self, from: usize, to: &mut [u8]) -> bool {
        let end = from.checked_add(to.len());
        match end.and_then(|end| self.bytes().get(from..end)) {
            Some(bytes) => {
                to.copy_from_slice(bytes);
                true
            }
            None => false,
        }
    }
}

/// A block that somebody waits for.
pub(crate) struct Awaited {
    pub(crate) block: u64,
    pub(crate) flight: Arc<Flight<Fetched>>,
    /// Nobody had begun to fetch it when this began to wait for it.
    pub(crate) is_fresh: bool,
}

/// Whether a failure may be over by now, so that who joined the attempt late makes one of their own.
pub(crate) fn may_pass(error: &Error) -> bool {
    matches!(error, Error::Store(_) | Error::Local(_))
}

/// A layer whose blocks are fetched.
pub(super) trait Wanted: Send + Sync {
    /// What distinguishes it from all others.
    fn number(&self) -> u64;

    /// The name of its object.
    fn key(&self) -> &str;

    /// Where a block is in it, and how long it is.
    fn range(&self, block: u64) -> (u64, usize);

    /// Whether a block is not to be had without fetching it.
    fn is_missing(&self, block: u64) -> bool;

    /// Whether nothing of a block is here, not even what is to be verified.
    fn is_absent(&self, block: u64) -> bool;

    /// Takes a block that was fetched, if it is right, and says whether it is.
    ///
    /// # Errors
    /// Fetching it once more does not help.
    fn accept(&self, block: u64, bytes: &[u8]) -> Result<bool>;
}
