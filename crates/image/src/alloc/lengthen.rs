//! The file's length, ahead of need.
//!
//! Writes past the end of a file may be made one after another, while others wait: Linux does so where they bypass the
//! page cache. So where it [is so](isobath_storage::Capabilities::extends_one_at_a_time) the file is made longer before
//! its end is reached, which takes a block of space, in steps that follow its growth. What is too long is cut when the
//! image is closed, as is what is [prepared](Allocator::prepare).

use super::{Allocator, TailCut};
use crate::{DiskError, Result};
use isobath_storage::Storage;
use std::ops::Range;
use std::sync::atomic::Ordering;

/// The smallest and the largest step, in bytes.
const STEPS: Range<u64> = 1 << 20..64 << 20;
/// The least step, in clusters.
const LEAST: u64 = 8;

/// How long the file was made.
#[derive(Debug)]
pub(super) struct Length {
    /// In clusters; it may be longer.
    pub(super) until: u64,
    /// The last step, in clusters.
    step: u64,
    /// It was made longer since it was last cut.
    pub(super) is_ahead: bool,
}

impl Length {
    /// Of a file with this many clusters.
    pub(super) fn new(clusters: u64) -> Self {
        Self { until: clusters, step: 0, is_ahead: false }
    }

    /// Of a file that is not made longer.
    pub(super) fn left_alone() -> Self {
        Self::new(u64::MAX)
    }

    /// The file ends there from now on.
    pub(super) fn cut(&mut self, clusters: u64) {
        if self.until != u64::MAX {
            *self = Self::new(clusters);
        }
    }

    /// It is not made longer any more.
    fn leave(&mut self) {
        self.until = u64::MAX;
    }

    /// Whether at most half of a step is left after `used` clusters.
    pub(super) fn is_short(&self, used: u64) -> bool {
        self.until.saturating_sub(used) <= self.step / 2
    }
}

impl<S: Storage> Allocator<S> {
    /// Makes the file longer if its end is near. Called before clusters are taken: nothing is lost if the caller is
    /// dropped here.
    pub async fn lengthen(&self) -> Result<()> {
        if !self.is_short.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        if let Some(clusters) = self.next_length().await? {
            let length = clusters << self.geometry.cluster_bits();
            self.layer.storage().expect_length(length).await;
        }
        Ok(())
    }

    /// Truncates the file after its last cluster in use if it was made longer.
    pub async fn cut_what_was_added(&self) -> Result<()> {
        if !self.state().await.length.is_ahead {
            return Ok(());
        }
        match self.cut_tail(TailCut::KeepingData).await {
            // Everything is written: a longer file does no harm.
            Err(DiskError::Storage(error)) => {
                tracing::warn!(%error, "cannot truncate the file after its last cluster in use");
                Ok(())
            }
            result => result,
        }
    }

    /// How many clusters long the file is to be, if it is to be made longer.
    async fn next_length(&self) -> Result<Option<u64>> {
        let bits = self.geometry.cluster_bits();
        let mut state = self.lock().await;
        if !state.length.is_short(state.never_used) {
            return Ok(None);
        }
        let least = STEPS.start.max(LEAST << bits);
        let step = (state.length.step << bits << 1).clamp(least, STEPS.end);
        // A small disk never needs that much.
        let step = step.min(self.layer.size() / 8) >> bits;
        let start = state.never_used;
        if step == 0 {
            state.length.leave();
            return Ok(None);
        }
        match self.free_behind(&mut state, step).await {
            Ok(found) if found == start => {}
            // Clusters in use behind the end were lost when the file was truncated: they must not read as zeroes.
            Ok(_) => {
                state.length.leave();
                return Ok(None);
            }
            Err(DiskError::Storage(error)) => {
                tracing::debug!(%error, "cannot tell whether the file may be made longer");
                return Ok(None);
            }
            Err(error) => return Err(error),
        }
        state.length = Length { until: start + step, step, is_ahead: true };
        Ok(Some(start + step))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_short_before_its_end_is_reached() {
        let length = Length::new(10);
        assert!(!length.is_short(9));
        assert!(length.is_short(10) && length.is_short(11));
        let mut length = Length { until: 100, step: 16, is_ahead: true };
        assert!(!length.is_short(91));
        assert!(length.is_short(92) && length.is_short(200));
        length.cut(50);
        assert!(!length.is_short(49) && length.is_short(50));
        let mut length = Length::left_alone();
        length.cut(50);
        assert!(!length.is_short(1 << 50));
    }
}
