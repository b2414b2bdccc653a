//! Which layer has which guest clusters.

use crate::error::GenerateError;
use crate::shape::Chain;
use isobath_qcow2::ClusterIndex;
use rand::rngs::Xoshiro256PlusPlus;
use rand::{Rng, SeedableRng};
use std::str::FromStr;

/// How owners of clusters are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Distribution {
    /// All layers are equally likely.
    Uniform,
    /// A few layers own most clusters: the layer of rank `r`, from 1, is drawn with a probability proportional to
    /// `1 / r`. The seed determines which layer has which rank.
    Zipf,
    /// Layer `i` of `n` owns the `i`-th of `n` equal parts of the disk.
    Sequential,
}

/// The share of a disk's clusters that are allocated in some layer: 0 to 1.
///
/// Parsed from a percentage (`90%`) or a fraction (`0.9`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fill(f64);

impl Fill {
    /// A share.
    ///
    /// # Errors
    /// If it is below 0, above 1 or not a number.
    pub fn new(share: f64) -> Result<Self, GenerateError> {
        if (0.0..=1.0).contains(&share) {
            Ok(Self(share))
        } else {
            Err(GenerateError::Fill(share.to_string()))
        }
    }

    /// This share of `all` clusters, rounded to the nearest whole number.
    fn of(self, all: u64) -> u64 {
        ((all as f64 * self.0).round() as u64).min(all)
    }
}

impl FromStr for Fill {
    type Err = GenerateError;

    fn from_str(text: &str) -> Result<Self, GenerateError> {
        let (number, whole) = match text.strip_suffix('%') {
            Some(percent) => (percent, 100.0),
            None => (text, 1.0),
        };
        let no_share = || GenerateError::Fill(text.to_owned());
        let number: f64 = number.parse().map_err(|_| no_share())?;
        Self::new(number / whole).map_err(|_| no_share())
    }
}

/// The guest clusters that each layer has, in ascending order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ownership {
    /// Where each layer's clusters start in `clusters`, and the end of the last.
    starts: Vec<usize>,
    clusters: Vec<ClusterIndex>,
}

impl Ownership {
    /// Fills a share of the disk's clusters, chosen at random, each in exactly one layer.
    ///
    /// # Errors
    /// If the chain has no layers or no size, or there is not enough memory: 8 bytes per filled cluster.
    pub fn draw(
        chain: &Chain,
        fill: Fill,
        distribution: Distribution,
    ) -> Result<Self, GenerateError> {
        let geometry = chain.geometry()?;
        let all = geometry.clusters_for(chain.size);
        let count = fill.of(all);
        let owner = Owner::new(distribution, chain, all);
        Self::collect(chain.layers, count, || {
            let mut random = Xoshiro256PlusPlus::seed_from_u64(chain.seed);
            let (mut next, mut wanted) = (0, count);
            let owner = &owner;
            std::iter::from_fn(move || {
                if wanted == 0 {
                    return None;
                }
                // Selection sampling: a cluster is chosen with probability `wanted / (all - next)`, so that every
                // subset is equally likely. Once as many are wanted as are left, all of them are chosen.
                while below(&mut random, all - next) >= wanted {
                    next += 1;
                }
                let cluster = next;
                next += 1;
                wanted -= 1;
                Some((owner.draw(cluster, &mut random), ClusterIndex::new(cluster)))
            })
        })
    }

    /// Takes the clusters that a trace's writes touch; a cluster may be in several layers.
    pub(crate) fn from_pairs(
        layers: u32,
        mut pairs: Vec<(u32, ClusterIndex)>,
    ) -> Result<Self, GenerateError> {
        pairs.sort_unstable();
        pairs.dedup();
        Self::collect(layers, pairs.len() as u64, || pairs.iter().copied())
    }

    /// Sorts `count` pairs by their layer; within a layer they keep their order. `pairs` is called twice and must yield
    /// the same pairs both times.
    fn collect<I>(layers: u32, count: u64, pairs: impl Fn() -> I) -> Result<Self, GenerateError>
    where
        I: Iterator<Item = (u32, ClusterIndex)>,
    {
        let no_memory = |_| GenerateError::Memory(count);
        let mut starts = Vec::new();
        starts.try_reserve_exact(layers as usize + 2).map_err(no_memory)?;
        // Counts are kept one entry further on: filling in the clusters moves each start to where it belongs.
        starts.resize(layers as usize + 2, 0usize);
        for (layer, _) in pairs() {
            starts[layer as usize + 2] += 1;
        }
        for layer in 1..starts.len() {
            starts[layer] += starts[layer - 1];
        }
        let mut clusters = Vec::new();
        clusters.try_reserve_exact(count as usize).map_err(no_memory)?;
        clusters.resize(count as usize, ClusterIndex::new(0));
        for (layer, cluster) in pairs() {
            let place = &mut starts[layer as usize + 1];
            clusters[*place] = cluster;
            *place += 1;
        }
        starts.pop();
        Ok(Self { starts, clusters })
    }

    /// The number of layers.
    pub fn layers(&self) -> u32 {
        self.starts.len() as u32 - 1
    }

    /// The clusters of one layer; empty if there is no such layer.
    pub fn clusters_of(&self, layer: u32) -> &[ClusterIndex] {
        match self.starts.get(layer as usize..layer as usize + 2) {
            Some(&[start, end]) => &self.clusters[start..end],
            _ => &[],
        }
    }

    /// The number of clusters of all layers together.
    pub fn total(&self) -> u64 {
        self.clusters.len() as u64
    }
}

/// Draws owners.
enum Owner {
    Uniform(u64),
    /// For each rank, the sum of the weights up to and including it, and the layer of that rank.
    Zipf(Vec<f64>, Vec<u32>),
    Sequential(u64, u64),
}

impl Owner {
    fn new(distribution: Distribution, chain: &Chain, all: u64) -> Self {
        match distribution {
            Distribution::Uniform => Self::Uniform(chain.layers.into()),
            Distribution::Sequential => Self::Sequential(chain.layers.into(), all),
            Distribution::Zipf => {
                let mut sum = 0.0;
                let sums = (1..=chain.layers)
                    .map(|rank| {
                        sum += 1.0 / f64::from(rank);
                        sum
                    })
                    .collect();
                let mut random = Xoshiro256PlusPlus::seed_from_u64(!chain.seed);
                let mut layers: Vec<_> = (0..chain.layers).collect();
                for last in (1..layers.len()).rev() {
                    layers.swap(last, below(&mut random, last as u64 + 1) as usize);
                }
                Self::Zipf(sums, layers)
            }
        }
    }

    fn draw(&self, cluster: u64, random: &mut Xoshiro256PlusPlus) -> u32 {
        match self {
            Self::Uniform(layers) => below(random, *layers) as u32,
            Self::Sequential(layers, all) => {
                (u128::from(cluster) * u128::from(*layers) / u128::from(*all)) as u32
            }
            Self::Zipf(sums, layers) => {
                let unit = (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
                let sought = unit * sums.last().copied().unwrap_or(0.0);
                let rank = sums.partition_point(|sum| *sum <= sought).min(layers.len() - 1);
                layers[rank]
            }
        }
    }
}

/// A random number below `limit`, uniform but for one part in 2^64 / `limit`.
fn below(random: &mut Xoshiro256PlusPlus, limit: u64) -> u64 {
    ((u128::from(random.next_u64()) * u128::from(limit)) >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Data;
    use std::collections::HashSet;

    fn chain(layers: u32, clusters: u64) -> Chain {
        Chain { layers, size: clusters << 16, cluster_bits: 16, data: Data::Zero, seed: 7 }
    }

    fn draw(layers: u32, clusters: u64, fill: f64, distribution: Distribution) -> Ownership {
        let fill = Fill::new(fill).unwrap();
        Ownership::draw(&chain(layers, clusters), fill, distribution).unwrap()
    }

    fn counts(ownership: &Ownership) -> Vec<usize> {
        (0..ownership.layers()).map(|layer| ownership.clusters_of(layer).len()).collect()
    }

    #[test]
    fn a_share_is_a_percentage_or_a_fraction() {
        for (text, count) in [("90%", 900), ("0.9", 900), ("1", 1000), ("0%", 0), ("0.05%", 1)] {
            assert_eq!(text.parse::<Fill>().unwrap().of(1000), count, "{text}");
        }
        for text in ["", "%", "90", "-1%", "101%", "nan", "1.5", "x"] {
            let error = text.parse::<Fill>().unwrap_err().to_string();
            assert!(error.contains(&format!("'{text}'")), "{error}");
        }
    }

    #[test]
    fn every_filled_cluster_has_one_owner_and_the_share_is_exact() {
        for distribution in [Distribution::Uniform, Distribution::Zipf, Distribution::Sequential] {
            let ownership = draw(13, 10_000, 0.9, distribution);
            assert_eq!(ownership.total(), 9000);
            let mut seen = HashSet::new();
            for layer in 0..13 {
                let clusters = ownership.clusters_of(layer);
                assert!(clusters.is_sorted());
                assert!(clusters.iter().all(|c| c.get() < 10_000 && seen.insert(*c)));
            }
            assert_eq!(seen.len(), 9000);
            assert!(ownership.clusters_of(13).is_empty());
        }
        assert_eq!(draw(3, 100, 1.0, Distribution::Uniform).total(), 100);
        assert_eq!(draw(3, 100, 0.0, Distribution::Uniform).total(), 0);
    }

    #[test]
    fn filled_clusters_lie_anywhere() {
        let ownership = draw(1, 100_000, 0.5, Distribution::Uniform);
        let tenths = ownership.clusters_of(0).iter().fold([0; 10], |mut tenths, cluster| {
            tenths[(cluster.get() / 10_000) as usize] += 1;
            tenths
        });
        assert!(tenths.iter().all(|count| (4700..5300).contains(count)), "{tenths:?}");
    }

    #[test]
    fn owners_follow_the_distribution() {
        let uniform = counts(&draw(100, 100_000, 1.0, Distribution::Uniform));
        assert!(uniform.iter().all(|count| (800..1200).contains(count)), "{uniform:?}");

        let mut zipf = counts(&draw(100, 100_000, 1.0, Distribution::Zipf));
        assert!(!zipf.is_sorted_by(|a, b| a >= b), "ranks are dealt out at random");
        zipf.sort_unstable();
        zipf.reverse();
        // The sum of 1/r up to 100 is 5.187.
        for rank in [1, 2, 10] {
            let expected = 100_000.0 / 5.187 / f64::from(rank);
            let share = zipf[rank as usize - 1] as f64 / expected;
            assert!((0.9..1.1).contains(&share), "rank {rank}: {zipf:?}");
        }

        let sequential = draw(3, 10, 1.0, Distribution::Sequential);
        let clusters = (0..3).map(|layer| sequential.clusters_of(layer).iter().map(|c| c.get()));
        let clusters: Vec<Vec<_>> = clusters.map(Iterator::collect).collect();
        assert_eq!(clusters, [vec![0, 1, 2, 3], vec![4, 5, 6], vec![7, 8, 9]]);
    }

    #[test]
    fn the_seed_decides() {
        let one = draw(10, 1000, 0.9, Distribution::Uniform);
        assert_eq!(one, draw(10, 1000, 0.9, Distribution::Uniform));
        let other = Chain { seed: 8, ..chain(10, 1000) };
        let fill = Fill::new(0.9).unwrap();
        assert_ne!(one, Ownership::draw(&other, fill, Distribution::Uniform).unwrap());
    }
}
