//! A guest's plan.

mod embedded;

use crate::image::{Kind, Start};
use crate::value::Sort;
use isobath_disk::Preallocation;
use rand::RngExt;
use rand::rngs::SmallRng;

/// One request. Offsets and lengths in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Writes bytes of a sort.
    Write(u64, u64, Sort),
    /// Writes one compressed cluster.
    Compressed(u64, u64),
    /// Zeroes a range, which may be unmapped.
    Zero(u64, u64, bool),
    /// Discards a range.
    Discard(u64, u64),
    /// Reads a range.
    Read(u64, u64),
    /// Flushes.
    Flush,
    /// Makes the engine do some background work of idle moments.
    Tidy,
}

/// An action on the disk as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// Nothing.
    None,
    /// Resizes it. Where it grows, space is preallocated in this way.
    Resize(u64, Preallocation),
    /// Writes a direct-access index.
    WriteIndex,
    /// Drops its index.
    DropIndex,
    /// Closes and reopens it.
    Reopen,
}

/// Concurrent requests of several tasks.
#[derive(Clone, Debug, Default)]
pub struct Phase {
    /// The requests of each task, in order.
    pub tasks: Vec<Vec<Request>>,
    /// An action beside them.
    pub beside: Option<Act>,
    /// An action after they have ended.
    pub then: Option<Act>,
}

/// A whole history.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The phases, in order.
    pub phases: Vec<Phase>,
    /// Whether the disk is closed at the end.
    pub close: bool,
}

/// The properties of a disk that limit requests.
#[derive(Clone, Copy, Debug)]
pub struct Disk {
    /// Its size in bytes.
    pub size: u64,
    /// Bytes in a cluster.
    pub cluster: u64,
    /// Whether clusters can be compressed.
    pub compresses: bool,
}

impl Disk {
    /// Those of an initial state.
    pub fn of(start: &Start) -> Self {
        Self { size: start.size(), cluster: start.new.cluster_size, compresses: start.compresses() }
    }

    /// A range within the disk: mostly short and aligned to sectors, mostly in the busy part.
    fn range(&self, rng: &mut SmallRng) -> (u64, u64) {
        let size = self.size;
        let offset = if rng.random_bool(0.6) {
            rng.random_range(0..size.min(self.cluster * 4))
        } else {
            rng.random_range(0..size)
        };
        let length = match rng.random_range(0..10) {
            0..3 => 512,
            3..6 => 4096,
            6..8 => self.cluster,
            _ => rng.random_range(1..=(self.cluster * 5).min(128 << 10)),
        };
        let unit = match rng.random_range(0..20) {
            0..2 => 1,
            2..10 => 512,
            10..15 => 4096,
            _ => self.cluster,
        };
        let offset = offset / unit * unit;
        (offset, length.next_multiple_of(unit).min(size - offset))
    }

    fn cluster(&self, rng: &mut SmallRng) -> (u64, u64) {
        let offset = self.range(rng).0 / self.cluster * self.cluster;
        (offset, self.cluster.min(self.size - offset))
    }

    /// A request of any kind.
    pub fn request(&self, kind: Kind, rng: &mut SmallRng) -> Request {
        if kind == Kind::Embedded && rng.random_bool(0.8) {
            return self.request_at_lead(rng);
        }
        let (offset, length) = self.range(rng);
        let compressed = self.compresses && (kind == Kind::Compressed || rng.random_bool(0.1));
        match rng.random_range(0..100) {
            0..15 if compressed => {
                let (offset, length) = self.cluster(rng);
                Request::Compressed(offset, length)
            }
            0..52 => Request::Write(offset, length, sort(rng)),
            52..65 => Request::Zero(offset, length, rng.random()),
            65..77 => {
                let (offset, length) =
                    if rng.random_bool(0.7) { self.cluster(rng) } else { (offset, length) };
                Request::Discard(offset, length)
            }
            77..87 => Request::Read(offset, length),
            87 => Request::Tidy,
            _ => Request::Flush,
        }
    }

    fn random_tasks(&self, kind: Kind, rng: &mut SmallRng) -> Vec<Vec<Request>> {
        let most = if rng.random_bool(0.1) { 14 } else { 6 };
        (0..rng.random_range(1..=5))
            .map(|_| (0..rng.random_range(1..=most)).map(|_| self.request(kind, rng)).collect())
            .collect()
    }

    /// The number of [patterns](Self::pattern) for histories of a kind.
    pub const fn patterns(kind: Kind) -> u32 {
        if matches!(kind, Kind::Embedded) { PATTERNS + embedded::PATTERNS } else { PATTERNS }
    }

    /// The pattern of a log, a database or a file system: small writes, each flushed, `times` times.
    pub fn pattern(&self, number: u32, times: u64, rng: &mut SmallRng) -> Vec<Vec<Request>> {
        if number >= PATTERNS {
            return self.pattern_at_lead(number - PATTERNS, times, rng);
        }
        let sort = sort(rng);
        let unit = 4096.min(self.cluster);
        let place = |rng: &mut SmallRng| {
            let cluster = rng.random_range(0..(self.size / self.cluster).max(1));
            (cluster * self.cluster).min(self.size - unit)
        };
        let (start, other) = (place(rng), place(rng));
        let within = |offset: u64| offset.min(self.size - unit);
        match number {
            // Appends, each flushed.
            0 => vec![
                (0..times)
                    .flat_map(|n| {
                        [Request::Write(within(start + n * unit), unit, sort), Request::Flush]
                    })
                    .collect(),
            ],
            // One block, repeatedly.
            1 => vec![
                (0..times)
                    .flat_map(|_| [Request::Write(start, unit, sort), Request::Flush])
                    .collect(),
            ],
            // Discards what was just flushed, so that its space is reused.
            2 => vec![
                (0..times)
                    .flat_map(|n| {
                        [
                            Request::Write(start, self.cluster.min(self.size - start), sort),
                            Request::Flush,
                            Request::Discard(start, self.cluster.min(self.size - start)),
                            Request::Write(within(other + n * self.cluster), unit, sort),
                            Request::Flush,
                        ]
                    })
                    .collect(),
            ],
            // All of a tiny image, so that its structure grows.
            3 => {
                let clusters = (self.size / self.cluster).min(times * 6);
                let clusters = clusters.min((MOST_FILLED / self.cluster).max(1));
                vec![
                    (0..clusters)
                        .map(|n| Request::Write(n * self.cluster, self.cluster, sort))
                        .chain([Request::Flush])
                        .collect(),
                ]
            }
            // One flushes while others write.
            4 => {
                let mut tasks = vec![vec![Request::Flush; 6]];
                for _ in 0..3 {
                    let writes = (0..4).map(|_| {
                        let (offset, length) = self.range(rng);
                        Request::Write(offset, length, sort)
                    });
                    tasks.push(writes.collect());
                }
                tasks
            }
            // Zeroes over what was flushed, and data over that.
            5 => vec![
                (0..times)
                    .flat_map(|n| {
                        [
                            Request::Write(start, unit, sort),
                            Request::Flush,
                            Request::Zero(start, unit, n % 2 == 0),
                            Request::Flush,
                            Request::Write(start, unit, sort),
                        ]
                    })
                    .collect(),
            ],
            // Two append to the same cluster, each with its own flush.
            6 => (0..2)
                .map(|task| {
                    (0..times)
                        .flat_map(|n| {
                            let offset = within(start + (2 * n + task) * 512);
                            [Request::Write(offset, 512, sort), Request::Flush]
                        })
                        .collect()
                })
                .collect(),
            // Compressed clusters, overwritten in part.
            7 if self.compresses => vec![
                (0..times)
                    .flat_map(|_| {
                        let whole = self.cluster.min(self.size - start);
                        [
                            Request::Compressed(start, whole),
                            Request::Flush,
                            Request::Write(start, unit, sort),
                            Request::Flush,
                        ]
                    })
                    .collect(),
            ],
            // Discards a cluster that a record has data of, so that its space is reused.
            8 => vec![
                (0..times)
                    .flat_map(|n| {
                        let whole = self.cluster.min(self.size - start);
                        [
                            Request::Write(start, unit, sort),
                            Request::Flush,
                            Request::Write(start, unit, sort),
                            Request::Flush,
                            Request::Discard(start, whole),
                            Request::Flush,
                            Request::Write(within(other + n * self.cluster), unit, sort),
                            Request::Flush,
                        ]
                    })
                    .collect(),
            ],
            // Far apart, so that tables are allocated.
            _ => vec![
                (0..times)
                    .flat_map(|n| {
                        let offset = self.size / times * n / 512 * 512;
                        [Request::Write(offset, 512.min(self.size - offset), sort), Request::Flush]
                    })
                    .collect(),
            ],
        }
    }
}

/// The most bytes that a pattern fills.
const MOST_FILLED: u64 = 8 << 20;

/// The number of patterns for every kind.
const PATTERNS: u32 = 10;

/// A sort of contents: often one that compresses.
fn sort(rng: &mut SmallRng) -> Sort {
    let any = Sort::ALL[rng.random_range(0..Sort::ALL.len())];
    if rng.random() { Sort::Plain } else { any }
}

/// Mostly none.
pub fn preallocation(rng: &mut SmallRng) -> Preallocation {
    let modes = [Preallocation::Metadata, Preallocation::Falloc, Preallocation::Full];
    if rng.random_bool(0.6) { Preallocation::Off } else { modes[rng.random_range(0..3)] }
}

/// The kind of the requests for an image: a cluster may be too small for lead blocks, and without layers below there is
/// nothing to index.
pub fn fitting(requests: Kind, start: &Start) -> Kind {
    let fits = match requests {
        Kind::Embedded => start.new.cluster_size >= embedded::LEAD,
        Kind::Index => start.new.backing_file.is_some(),
        _ => true,
    };
    if fits { requests } else { Kind::Flushes }
}

/// A random history of a kind.
pub fn random(kind: Kind, start: &Start, rng: &mut SmallRng) -> Plan {
    let mut disk = Disk::of(start);
    let long = rng.random_bool(0.05);
    let phases = rng.random_range(1..=if long { 12 } else { 4 });
    let mut plan = Plan { phases: Vec::new(), close: rng.random_bool(0.4) };
    for _ in 0..phases {
        let often = match kind {
            Kind::Flushes => 0.8,
            Kind::Embedded => 0.4,
            _ => 0.1,
        };
        let mut phase = Phase::default();
        let act = match kind {
            Kind::Resize if rng.random_bool(0.8) => {
                let size = if rng.random() {
                    disk.size + rng.random_range(0..200) * 512
                } else {
                    rng.random_range(16..=(disk.size / 512).max(16)) * 512
                };
                Some(Act::Resize(size, preallocation(rng)))
            }
            Kind::Index if rng.random_bool(0.7) => {
                Some(if rng.random_bool(0.7) { Act::WriteIndex } else { Act::DropIndex })
            }
            _ if rng.random_bool(0.1) => Some(Act::Reopen),
            _ => None,
        };
        let beside = rng.random_bool(0.5) && act != Some(Act::Reopen);
        if let (Some(Act::Resize(size, _)), true) = (act, beside) {
            // Requests avoid the moving end.
            let low = disk.size.min(size);
            disk.size = if low >= disk.cluster { low / disk.cluster * disk.cluster } else { low };
        }
        phase.tasks = if rng.random_bool(often) {
            let number = rng.random_range(0..Disk::patterns(kind));
            // Often so many that a journal is checkpointed several times, and wraps around.
            let many = kind == Kind::Flushes && rng.random_bool(0.6);
            let times = if many { rng.random_range(8..=30) } else { rng.random_range(2..=8) };
            disk.pattern(number, times, rng)
        } else {
            disk.random_tasks(kind, rng)
        };
        if let (Some(Act::Resize(size, _)), true) = (act, beside) {
            for task in &mut phase.tasks {
                task.retain(|request| {
                    !matches!(request, Request::Discard(..) | Request::Compressed(..))
                });
            }
            disk.size = size;
        }
        if let (Some(Act::Resize(size, _)), false) = (act, beside) {
            disk.size = size;
        }
        *(if beside { &mut phase.beside } else { &mut phase.then }) = act;
        plan.phases.push(phase);
    }
    plan
}
