//! Distributions.

use serde::Serialize;
use std::collections::BTreeMap;

/// The chains of one length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LengthShare {
    /// Files in a chain.
    pub length: u32,
    /// Chains of that length.
    pub chains: u64,
    /// Files whose longest chain is of that length.
    pub files: u64,
}

/// The distribution of lengths, over chains and over files (the paper's figure 5).
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Lengths {
    /// The median over chains.
    pub median: u32,
    /// The 90th percentile over chains.
    pub p90: u32,
    /// The 99th percentile over chains.
    pub p99: u32,
    /// The longest.
    pub longest: u32,
    /// The mean over chains.
    pub mean: f64,
    /// Every length that occurs, in ascending order.
    pub shares: Vec<LengthShare>,
}

impl Lengths {
    pub(crate) fn of(chains: impl Iterator<Item = u32>, files: impl Iterator<Item = u32>) -> Self {
        let mut counts: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
        for length in chains {
            counts.entry(length).or_default().0 += 1;
        }
        for length in files {
            counts.entry(length).or_default().1 += 1;
        }
        let shares: Vec<LengthShare> = counts
            .into_iter()
            .map(|(length, (chains, files))| LengthShare { length, chains, files })
            .collect();
        let total: u64 = shares.iter().map(|share| share.chains).sum();
        let sum: f64 =
            shares.iter().map(|share| f64::from(share.length) * share.chains as f64).sum();
        let at = |part: f64| {
            let wanted = ((total as f64 * part).ceil() as u64).max(1);
            let mut seen = 0;
            shares
                .iter()
                .find(|share| {
                    seen += share.chains;
                    seen >= wanted
                })
                .map_or(0, |share| share.length)
        };
        Self {
            median: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            longest: shares.iter().filter(|s| s.chains > 0).map(|s| s.length).max().unwrap_or(0),
            mean: if total == 0 { 0.0 } else { (sum / total as f64 * 100.0).round() / 100.0 },
            shares,
        }
    }

    /// The shares (0 to 1) of all chains, and of all files, that are in chains of at most `length` files.
    pub fn up_to(&self, length: u32) -> (f64, f64) {
        let sum = |of: fn(&LengthShare) -> u64, most: u32| -> u64 {
            self.shares.iter().filter(|share| share.length <= most).map(of).sum()
        };
        let share = |of: fn(&LengthShare) -> u64| {
            let total = sum(of, u32::MAX);
            if total == 0 { 0.0 } else { sum(of, length) as f64 / total as f64 }
        };
        (share(|share| share.chains), share(|share| share.files))
    }
}

/// Common time spans, in seconds, with their names.
pub(crate) const SPANS: [(u32, &str); 6] = [
    (60, "a minute"),
    (3600, "an hour"),
    (86_400, "a day"),
    (7 * 86_400, "a week"),
    (30 * 86_400, "30 days"),
    (365 * 86_400, "a year"),
];

/// The maximum number of points kept of a distribution.
const POINTS: usize = 200;

/// The distribution of time spans, in seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Spread {
    /// The number of spans.
    pub count: u64,
    /// The smallest.
    pub least: u32,
    /// The 10th percentile.
    pub p10: u32,
    /// The median.
    pub median: u32,
    /// The 90th percentile.
    pub p90: u32,
    /// The largest.
    pub most: u32,
    /// How many are at most a minute, an hour, a day, a week, 30 days, a year.
    pub at_most: [u64; 6],
    /// The cumulative distribution: spans, each with the share (0 to 1) of spans that are not longer.
    pub cdf: Vec<(u32, f64)>,
}

impl Spread {
    pub(crate) fn of(mut spans: Vec<u32>) -> Self {
        spans.sort_unstable();
        let count = spans.len();
        let at = |part: f64| {
            let index = ((count as f64 * part).ceil() as usize).saturating_sub(1);
            spans.get(index).copied().unwrap_or(0)
        };
        let mut cdf: Vec<(u32, f64)> = Vec::new();
        for step in 1..=POINTS.min(count) {
            let index = (count * step).div_ceil(POINTS.min(count)) - 1;
            let Some(&span) = spans.get(index) else { break };
            // Spans equal to this one count too.
            let share = spans.partition_point(|&one| one <= span) as f64 / count as f64;
            if cdf.last().is_none_or(|last| last.0 != span) {
                cdf.push((span, (share * 1e6).round() / 1e6));
            }
        }
        Self {
            count: count as u64,
            least: at(0.0),
            p10: at(0.1),
            median: at(0.5),
            p90: at(0.9),
            most: at(1.0),
            at_most: SPANS.map(|(most, _)| spans.partition_point(|&span| span <= most) as u64),
            cdf,
        }
    }
}

/// Overlays created in a period.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Bin {
    /// Its start, in seconds since 1970.
    pub start: i64,
    /// The number created.
    pub count: u64,
}

/// The maximum number of bins of a timeline.
const BINS: i64 = 60;

/// A histogram of creation times.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Timeline {
    /// The width of a bin, in seconds.
    pub step: i64,
    /// The bins, without gaps.
    pub bins: Vec<Bin>,
}

impl Timeline {
    pub(crate) fn of(times: impl Iterator<Item = i64> + Clone) -> Self {
        const STEPS: [i64; 9] =
            [60, 600, 3600, 6 * 3600, 86_400, 7 * 86_400, 30 * 86_400, 91 * 86_400, 365 * 86_400];
        let Some((first, last)) = times.clone().fold(None, |range: Option<(i64, i64)>, time| {
            Some(range.map_or((time, time), |(first, last)| (first.min(time), last.max(time))))
        }) else {
            return Self::default();
        };
        let span = last.saturating_sub(first);
        let step = STEPS
            .into_iter()
            .find(|step| span / step < BINS - 1)
            .unwrap_or_else(|| span / (BINS - 1) + 1);
        let start = first.div_euclid(step);
        let bins = last.div_euclid(step).saturating_sub(start) + 1;
        let mut bins: Vec<Bin> = (0..bins)
            .map(|bin| Bin { start: (start + bin).saturating_mul(step), count: 0 })
            .collect();
        for time in times {
            if let Ok(bin) = usize::try_from(time.div_euclid(step) - start)
                && let Some(bin) = bins.get_mut(bin)
            {
                bin.count += 1;
            }
        }
        Self { step, bins }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lengths_over_chains_and_files() {
        // Eight single images, one chain of 3, one of 9.
        let chains = [1, 1, 1, 1, 1, 1, 1, 1, 3, 9];
        let files = chains.iter().flat_map(|&length| vec![length; length as usize]);
        let lengths = Lengths::of(chains.into_iter(), files.collect::<Vec<_>>().into_iter());
        assert_eq!((lengths.median, lengths.p90, lengths.p99, lengths.longest), (1, 3, 9, 9));
        assert!((lengths.mean - 2.0).abs() < 1e-9);
        assert_eq!(lengths.up_to(2), (0.8, 0.4));
        assert_eq!(lengths.up_to(9), (1.0, 1.0));
        let share = LengthShare { length: 9, chains: 1, files: 9 };
        assert_eq!(lengths.shares.last(), Some(&share));
        let none = Lengths::of(std::iter::empty(), std::iter::empty());
        assert_eq!((none.median, none.mean, none.up_to(1)), (0, 0.0, (0.0, 0.0)));
    }

    #[test]
    fn spans_are_summed_up() {
        let spread = Spread::of((1..=1000).rev().collect());
        assert_eq!((spread.least, spread.p10, spread.median), (1, 100, 500));
        assert_eq!((spread.p90, spread.most, spread.count), (900, 1000, 1000));
        assert_eq!(spread.at_most, [60, 1000, 1000, 1000, 1000, 1000]);
        assert_eq!(spread.cdf.len(), POINTS);
        assert_eq!(spread.cdf.last(), Some(&(1000, 1.0)));
        assert_eq!(Spread::of(vec![7, 7]).cdf, [(7, 1.0)]);
        assert_eq!(Spread::of(vec![]), Spread::default());
    }

    proptest! {
        #[test]
        fn a_timeline_counts_all_in_few_bins(
            times in prop::collection::vec(prop_oneof![
                any::<i32>().prop_map(i64::from),
                -62_135_596_800..253_402_300_799_i64,
                1_700_000_000..1_700_010_000_i64,
            ], 0..50),
        ) {
            let timeline = Timeline::of(times.iter().copied());
            prop_assert!(timeline.bins.len() <= BINS as usize + 1);
            let counted: u64 = timeline.bins.iter().map(|bin| bin.count).sum();
            prop_assert_eq!(counted, times.len() as u64);
        }
    }
}
