//! A job's progress in searching for data to copy.

use isobath_image::{Result, violated};
use std::future::Future;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// A pass over a disk, from its start to its end.
#[derive(Default)]
pub(super) struct Scan {
    cursor: AtomicU64,
    /// Bytes of the pieces found so far.
    found: AtomicU64,
    /// Bytes of all pieces, if they were counted.
    counted: AtomicU64,
}

impl Scan {
    pub(super) fn cursor(&self) -> u64 {
        self.cursor.load(Ordering::Relaxed)
    }

    /// Continues after a piece, or at the end of a disk of `size` bytes.
    pub(super) fn pass(&self, found: Option<&Range<u64>>, size: u64) {
        if found.is_some_and(|range| range.start < self.cursor()) {
            violated("a pass finds its pieces in order");
        }
        let cursor = found.map_or(size, |range| range.end);
        let bytes = found.map_or(0, |range| range.end - range.start);
        let sum = self.found.load(Ordering::Relaxed) + bytes;
        // A disk may have become smaller.
        if sum > cursor.max(self.cursor()) {
            violated("a pass finds no more than it goes over");
        }
        self.cursor.store(cursor, Ordering::Relaxed);
        self.found.store(sum, Ordering::Relaxed);
    }

    /// Sets the total bytes of all pieces.
    pub(super) fn count(&self, bytes: u64) {
        self.counted.store(bytes, Ordering::Relaxed);
    }

    /// Counts the total bytes of all pieces; `find` returns the first one from an offset on.
    pub(super) async fn count_all<F>(&self, find: impl Fn(u64) -> F) -> Result<()>
    where
        F: Future<Output = Result<Option<Range<u64>>>>,
    {
        let (mut at, mut bytes) = (0, 0);
        while let Some(range) = find(at).await? {
            bytes += range.end - range.start;
            at = range.end;
        }
        self.count(bytes);
        Ok(())
    }

    /// Bytes examined, and their total.
    pub(super) fn progress(&self, size: u64) -> (u64, u64) {
        (self.cursor().min(size), size)
    }

    /// Bytes still to be found: as counted, or extrapolated from the part examined.
    pub(super) fn remaining(&self, size: u64) -> u64 {
        let found = self.found.load(Ordering::Relaxed);
        let counted = self.counted.load(Ordering::Relaxed);
        if counted > 0 {
            return counted.saturating_sub(found);
        }
        let (seen, rest) = (self.cursor().min(size), size.saturating_sub(self.cursor()));
        if seen == 0 {
            return rest;
        }
        (u128::from(rest) * u128::from(found) / u128::from(seen)) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "a pass finds its pieces in order")]
    fn a_pass_does_not_go_back() {
        let scan = Scan::default();
        scan.pass(Some(&(100..200)), 1000);
        scan.pass(Some(&(150..300)), 1000);
    }

    #[test]
    #[should_panic(expected = "a pass finds no more than it goes over")]
    fn a_pass_does_not_find_more_than_there_is() {
        let scan = Scan { found: AtomicU64::new(150), ..Scan::default() };
        scan.pass(Some(&(100..200)), 1000);
    }

    #[test]
    fn what_remains_is_estimated_until_it_is_counted() {
        let scan = Scan::default();
        assert_eq!(scan.remaining(1000), 1000);
        scan.pass(Some(&(100..200)), 1000);
        assert_eq!(scan.remaining(1000), 400);
        scan.count(150);
        assert_eq!(scan.remaining(1000), 50);
        scan.pass(None, 1000);
        assert_eq!((scan.progress(1000), scan.remaining(1000)), ((1000, 1000), 50));
    }
}
