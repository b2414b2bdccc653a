//! Requests around the places where the engine stores its own data in a cluster: the first sector and the first 4 KiB.

use super::{Disk, Request};
use crate::value::Sort;
use rand::RngExt;
use rand::rngs::SmallRng;

/// The number of patterns.
pub(super) const PATTERNS: u32 = 10;

/// Bytes of a lead block.
pub(super) const LEAD: u64 = 4096;

fn any_sort(rng: &mut SmallRng) -> Sort {
    Sort::ALL[rng.random_range(0..Sort::ALL.len())]
}

impl Disk {
    /// A cluster, mostly one of the few busy ones.
    fn busy_cluster(&self, rng: &mut SmallRng) -> u64 {
        let clusters = (self.size / self.cluster).max(1);
        let most = if rng.random_bool(0.8) { clusters.min(6) } else { clusters };
        rng.random_range(0..most) * self.cluster
    }

    fn clipped(&self, offset: u64, length: u64) -> (u64, u64) {
        let offset = offset.min(self.size - 1);
        (offset, length.min(self.size - offset).max(1))
    }

    /// A range that begins or ends near one of the edges in a cluster.
    fn near_edge(&self, rng: &mut SmallRng) -> (u64, u64) {
        let half = self.cluster / 2;
        let within = match rng.random_range(0..12) {
            0..5 => 0,
            5 => 100,
            6 => 256,
            7 => 512,
            8 => 3584,
            9 => LEAD - 1,
            10 => LEAD,
            _ => half,
        };
        let length = match rng.random_range(0..12) {
            0 => 1,
            1 => 200,
            2..4 => 512,
            4 => 513,
            5 => 1024,
            6..9 => 4096,
            9 => 4608,
            10 => self.cluster,
            _ => self.cluster + LEAD,
        };
        self.clipped(self.busy_cluster(rng) + within, length)
    }

    /// A request near the start of a cluster.
    pub(super) fn request_at_lead(&self, rng: &mut SmallRng) -> Request {
        let (offset, length) = self.near_edge(rng);
        match rng.random_range(0..100) {
            0..48 => Request::Write(offset, length, any_sort(rng)),
            48..54 => Request::Zero(offset, length, rng.random()),
            54..64 => {
                let (offset, length) = self.clipped(self.busy_cluster(rng), self.cluster);
                Request::Discard(offset, length)
            }
            64..70 => Request::Read(offset, length),
            70..74 => Request::Tidy,
            _ => Request::Flush,
        }
    }

    /// Patterns that test lead blocks, `times` times.
    pub(super) fn pattern_at_lead(
        &self,
        number: u32,
        times: u64,
        rng: &mut SmallRng,
    ) -> Vec<Vec<Request>> {
        let start = self.busy_cluster(rng);
        let cluster = |n: u64| start + n * self.cluster;
        let mut write = |offset: u64, length: u64, sort: Option<Sort>| {
            let (offset, length) = self.clipped(offset, length);
            Request::Write(offset, length, sort.unwrap_or_else(|| any_sort(rng)))
        };
        let flush = Request::Flush;
        match number {
            // First writes of clusters, with their lead blocks and without, and the rest after a flush.
            0 => {
                let places = [0, 512, LEAD, self.cluster / 2];
                let task = (0..times).flat_map(|n| {
                    let place = places[n as usize % places.len()];
                    let first = write(cluster(n) + place, 512, None);
                    let rest = write(cluster(n) + LEAD, self.cluster - LEAD, None);
                    [first, flush, rest, flush]
                });
                vec![task.collect()]
            }
            // A lead block with contents of every sort.
            1 => {
                let sorts = [
                    Sort::Plain,
                    Sort::Random,
                    Sort::Sector,
                    Sort::Block,
                    Sort::Hostile,
                    Sort::Mixed,
                    Sort::Copied,
                    Sort::Text,
                ];
                let task = (0..times * 2).flat_map(|n| {
                    let sort = sorts[(n + start / self.cluster) as usize % sorts.len()];
                    [write(cluster(0), LEAD, Some(sort)), flush]
                });
                vec![task.collect()]
            }
            // Across the edges of what may be compressed.
            2 => {
                let task = (0..times).flat_map(|n| {
                    let whole = write(cluster(0), self.cluster, Some(Sort::Plain));
                    let edge = if n % 2 == 0 { 512 } else { LEAD };
                    [whole, flush, write(cluster(0) + edge - 256, 512, None), flush]
                });
                vec![task.collect()]
            }
            // The same guest cluster is discarded and rewritten.
            3 => {
                let (offset, length) = self.clipped(cluster(0), self.cluster);
                let task = (0..times).flat_map(|_| {
                    let discard = Request::Discard(offset, length);
                    let other = write(cluster(1), LEAD, None);
                    [write(offset, length, None), flush, discard, other, flush]
                });
                vec![task.collect()]
            }
            // First writes beside flushes, and others over their lead blocks.
            4 => {
                let first = (0..times * 2).map(|n| write(cluster(n), LEAD, None)).collect();
                let over = (0..times * 2).map(|n| write(cluster(n), 512, None)).collect();
                vec![first, vec![flush; times as usize * 2], over]
            }
            // Data that looks like the engine's own, over its own and in new clusters.
            5 => {
                let task = (0..times).flat_map(|n| {
                    let sort = if n % 2 == 0 { Sort::Hostile } else { Sort::Copied };
                    let own = write(cluster(0), 512, Some(Sort::Plain));
                    let over = write(cluster(0), LEAD, Some(sort));
                    [
                        own,
                        flush,
                        over,
                        flush,
                        write(cluster(n + 1), self.cluster, Some(sort)),
                        flush,
                    ]
                });
                vec![task.collect()]
            }
            // A record that takes a block, then one that takes its first sector, then none, before the next flush.
            6 => {
                // The first flush sets the zone up.
                let task = (0..=times).flat_map(|n| {
                    let block = write(cluster(n), LEAD, Some(Sort::Block));
                    let sector = write(cluster(n), 512, Some(Sort::Text));
                    let plain = write(cluster(n), 512, Some(Sort::Random));
                    [block, flush, sector, plain, flush]
                });
                vec![task.collect()]
            }
            // A cluster that was just embedded is discarded, by a commit that is too large for a record: many lead
            // blocks become plain.
            7 => {
                let many = 12 * self.cluster;
                let (first, all) = self.clipped(cluster(0), 13 * self.cluster);
                let (_, one) = self.clipped(cluster(0), self.cluster);
                let task = (0..=times).flat_map(|_| {
                    [
                        Request::Discard(first, all),
                        flush,
                        write(cluster(1), many, Some(Sort::Plain)),
                        flush,
                        write(cluster(0), self.cluster, Some(Sort::Sector)),
                        flush,
                        Request::Discard(first, one),
                        write(cluster(1), many, Some(Sort::Random)),
                        flush,
                    ]
                });
                vec![task.collect()]
            }
            // First writes beside flushes, and others whose clusters go at once: in a commit that began before
            // them, and waits for the first.
            8 => {
                let (even, odd) = (|n: u64| cluster(2 * n), |n: u64| cluster(2 * n + 1));
                let first = (0..times * 3).map(|n| write(even(n), LEAD, None)).collect();
                let mut tasks = vec![first, vec![flush; times as usize * 3]];
                for task in 0..2 {
                    let gone = (0..times * 3).flat_map(|n| {
                        let (offset, length) = self.clipped(odd(task * 3 + n % 3), self.cluster);
                        let end = match n % 3 {
                            0 => Request::Discard(offset, length),
                            may_unmap => Request::Zero(offset, length, may_unmap == 1),
                        };
                        [write(offset, LEAD, Some(Sort::Text)), end]
                    });
                    tasks.push(gone.collect());
                }
                tasks
            }
            // Appends of whole clusters, each flushed.
            _ => {
                let task = (0..times)
                    .flat_map(|n| [write(cluster(n), self.cluster, Some(Sort::Plain)), flush]);
                vec![task.collect()]
            }
        }
    }
}
