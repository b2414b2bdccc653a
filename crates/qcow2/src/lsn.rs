//! Log sequence numbers.

use std::fmt;

/// A log sequence number: the place of a change in the order in which an image's writer logged its changes.
///
/// The records of a [journal](crate::journal), the mappings [embedded](crate::embedded) in data and the commits
/// that end batches of either take their numbers from one counter. A number is given out once in one use of the
/// journal; 0 stands before the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lsn(u64);

impl Lsn {
    /// Behind every number that is given out.
    pub const MAX: Self = Self(u64::MAX);

    /// The number as it is stored.
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number as it is stored.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The number right behind this one; [`MAX`](Self::MAX) has none and stays.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }

    /// The number right before this one; 0 has none and stays.
    #[must_use]
    pub const fn before(self) -> Self {
        Self(self.0.saturating_sub(1))
    }
}

impl fmt::Display for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
