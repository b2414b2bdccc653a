//! Growth ahead of need (adaptive preallocation, section 3.2 of the FAST '16 paper).
//!
//! A flush after the file has grown makes the host's file system commit its own journal; a flush after writes to blocks
//! that were written before does not. So where that pays
//! ([`gains_from_written_space`](isobath_storage::Storage::gains_from_written_space)) zeroes are written past the end
//! of the file before the space is needed, in amounts that follow the rate of growth. Space that was only reserved
//! (`fallocate`) saves nothing. Unused space is given back when the image is closed.

use super::Allocator;
use crate::{DiskError, Result};
use isobath_storage::{IoBuf, Storage};
use std::ops::Range;
use std::sync::atomic::Ordering;

/// The smallest and the largest amount prepared at once, in bytes.
const STEPS: Range<u64> = 1 << 20..16 << 20;
/// A guest that writes more than this between commits gains less from cheap flushes than it costs to write everything
/// twice.
const MOST_BETWEEN: u64 = 4 << 20;
/// The number of commits for which a step should last, at least and at most.
const LASTS: Range<u32> = 256..4096;
/// Bytes of zeroes written at once.
const PIECE: u64 = 1 << 20;

/// How much to prepare, and when.
#[derive(Debug)]
pub(crate) struct Growth {
    step: u64,
    /// Commits since a step was prepared.
    commits: u32,
    /// Bytes newly used per commit, on average.
    average: u64,
    /// The host could not give more space.
    exhausted: bool,
}

impl Default for Growth {
    fn default() -> Self {
        Self { step: STEPS.start, commits: 0, average: 0, exhausted: false }
    }
}

impl Growth {
    /// Called at each commit, with the bytes newly used since the last one and the bytes still prepared. Returns how
    /// many more are wanted.
    pub(crate) fn committed(&mut self, grown: u64, left: u64) -> Option<u64> {
        self.commits = self.commits.saturating_add(1);
        self.average = (self.average * 7 + grown) / 8;
        if grown == 0 || self.exhausted || left >= self.step / 2 || self.average > MOST_BETWEEN {
            return None;
        }
        if self.commits < LASTS.start {
            self.step = (self.step * 2).min(STEPS.end);
        } else if self.commits > LASTS.end {
            self.step = (self.step / 2).max(STEPS.start);
        }
        self.commits = 0;
        Some(self.step)
    }
}

impl<S: Storage> Allocator<S> {
    /// Notes that this many bytes past everything used before are now in use, written in place.
    pub fn note_growth(&self, bytes: u64) {
        self.grown.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Called at each commit. Returns the bytes to [prepare](Self::prepare).
    pub async fn growth_wanted(&self) -> Option<u64> {
        let grown = self.grown.swap(0, Ordering::Relaxed);
        if !self.layer.storage().gains_from_written_space() {
            return None;
        }
        let mut state = self.state().await;
        let left = (state.prepared.end - state.prepared.start) * self.geometry.cluster_size();
        let step = state.growth.committed(grown, left)?;
        // A small disk never needs that much.
        Some(step.min(self.layer.size() / 8)).filter(|step| *step > 0)
    }

    /// Writes zeroes past the end of the file. Concurrent allocations get space before or after them. The next flush
    /// pays for them, and for the file's growth.
    ///
    /// All at once: flushes in between would each pay for a part of the growth.
    pub async fn prepare(&self, bytes: u64) -> Result<()> {
        let size = self.geometry.cluster_size();
        let region = {
            let mut state = self.state().await;
            let count = bytes.div_ceil(size);
            let start = match self.free_behind(&mut state, count).await {
                Ok(start) => start,
                Err(DiskError::Storage(error)) => {
                    tracing::debug!(%error, "cannot tell where space could be preallocated");
                    return Ok(());
                }
                Err(error) => return Err(error),
            };
            let region = start..start + count;
            self.refuse_tables(region.clone())?;
            state.never_used = region.end;
            state.areas.push(region.clone());
            region
        };
        let bytes = region.start * size..region.end * size;
        let written = write_zeroes(&**self.layer.storage(), bytes).await;
        let mut state = self.state().await;
        state.areas.retain(|area| *area != region);
        state.first_maybe_free = state.first_maybe_free.min(region.start);
        match &written {
            Ok(()) if state.prepared.end == region.start => state.prepared.end = region.end,
            Ok(()) => state.prepared = region,
            Err(error) => {
                // Space is short: a write that needs it will report the error.
                tracing::debug!(%error, "cannot preallocate space at the end of the file");
                state.growth.exhausted = true;
            }
        }
        Ok(())
    }
}

/// Writes zeroes as data.
pub async fn write_zeroes<S: Storage>(storage: &S, range: Range<u64>) -> Result<()> {
    let mut buf = IoBuf::empty();
    let mut at = range.start;
    while at < range.end {
        let length = PIECE.min(range.end - at) as usize;
        if buf.len() != length {
            buf = IoBuf::zeroed(length);
        }
        buf = storage.write_at(at, buf).await?;
        at += length as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_follow_the_rate_of_growth() {
        let mut growth = Growth::default();
        let mut left = 0;
        let mut prepared = Vec::new();
        // 64 KiB per commit: 64 MiB in all.
        for _ in 0..1024_u64 {
            left = i64::max(0, left - (64 << 10));
            if let Some(step) = growth.committed(64 << 10, left as u64) {
                prepared.push(step >> 20);
                left += step as i64;
            }
        }
        assert_eq!(prepared, [2, 4, 8, 16, 16, 16, 16]);
        // 64 bytes per commit, after that.
        for _ in 0..3_000_000 {
            left = i64::max(0, left - 64);
            left += growth.committed(64, left as u64).unwrap_or(0) as i64;
        }
        assert_eq!(growth.step, STEPS.start);
    }

    #[test]
    fn who_seldom_flushes_and_who_does_not_grow_prepare_nothing() {
        let mut growth = Growth::default();
        for _ in 0..100 {
            assert_eq!(growth.committed(64 << 20, 0), None);
        }
        let mut growth = Growth::default();
        assert_eq!(growth.committed(0, 0), None);
    }
}
