//! The kind of a server's history.

use rand::rngs::SmallRng;
use rand::{Rng, RngExt, SeedableRng};
use std::fmt;

/// The kind of a server's history. Each has some of everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Jobs and snapshots of all sorts.
    Mixed,
    /// Streams of backing files' data into an overlay, the active one or one below it.
    Streams,
    /// Commits of overlays' data into a backing file below the active layer.
    Commits,
    /// The active layer is committed, and its base replaces it.
    Pivots,
    /// The disk switches to another image.
    Mirrors,
    /// Snapshots.
    Snapshots,
    /// Layers of equal layout, compressed clusters among them.
    Twins,
    /// The server is killed, and some completed writes are only in its restart log.
    Kills,
    /// The storage fails, once or forever, and jobs stop or continue.
    Faults,
    /// Requests, flushes and jobs are cancelled, and tasks panic.
    Drops,
    /// Block devices, which do not grow.
    Devices,
    /// Files that share space.
    Reflinks,
    /// Persistent bitmaps.
    Bitmaps,
    /// Changes of size between jobs.
    Sizes,
    /// Large clusters and large disks.
    Large,
    /// Chains of many layers.
    Deep,
    /// Layers with external data files, some of them raw images of the disk; kills.
    DataFiles,
}

/// All kinds.
pub const KINDS: [Kind; 17] = [
    Kind::Mixed,
    Kind::Streams,
    Kind::Commits,
    Kind::Pivots,
    Kind::Mirrors,
    Kind::Snapshots,
    Kind::Twins,
    Kind::Kills,
    Kind::Faults,
    Kind::Drops,
    Kind::Devices,
    Kind::Reflinks,
    Kind::Bitmaps,
    Kind::Sizes,
    Kind::Large,
    Kind::Deep,
    Kind::DataFiles,
];

/// So many of the first kinds are [drawn](Kind::random). Others take the place of some of them: see [`Kind::instead`].
pub const COMMON: usize = 16;

impl Kind {
    /// A kind. A state of a large disk takes thirty times as long as others, one of a deep chain four times: there
    /// are fewer of these.
    pub fn random(rng: &mut impl Rng) -> Self {
        match rng.random_range(0..8 * COMMON) {
            0..8 => Self::Mixed,
            8 => Self::Large,
            9..13 => Self::Deep,
            number => KINDS[number % (COMMON - 2)],
        }
    }

    /// The kind that a history with this seed has instead of a common one, if any. The draw is separate, so that other
    /// histories stay as they are.
    pub fn instead(seed: u64) -> Option<Self> {
        let mut rng = SmallRng::seed_from_u64(seed ^ 0x1115_7EAD);
        rng.random_bool(1.0 / 12.0).then_some(Self::DataFiles)
    }

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mixed => "mixed",
            Self::Streams => "streams",
            Self::Commits => "commits",
            Self::Pivots => "pivots",
            Self::Mirrors => "mirrors",
            Self::Snapshots => "snapshots",
            Self::Twins => "twins",
            Self::Kills => "kills",
            Self::Faults => "faults",
            Self::Drops => "drops",
            Self::Devices => "devices",
            Self::Reflinks => "reflinks",
            Self::Bitmaps => "bitmaps",
            Self::Sizes => "sizes",
            Self::Large => "large",
            Self::Deep => "deep",
            Self::DataFiles => "data-files",
        }
    }

    /// The kind of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        KINDS.into_iter().find(|kind| kind.name() == name)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
