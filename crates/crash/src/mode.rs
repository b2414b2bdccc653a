//! The metadata modes under test; the only module that distinguishes them.

use crate::image::Kind;
use isobath_disk::{MetadataMode, OpenOptions};

/// A mode and its guarantees.
#[derive(Clone, Copy, Debug)]
pub struct Mode {
    /// The engine's mode.
    pub metadata: MetadataMode,
    /// `isobath check` finds no corruption in what a crash left, before any recovery.
    pub consistent: bool,
    /// The oldest version of an image that is opened for writing.
    pub version: u32,
    /// The kind of a third of its histories.
    pub favours: Option<Kind>,
}

const fn mode(metadata: MetadataMode, version: u32, favours: Option<Kind>) -> Mode {
    Mode { metadata, consistent: true, version, favours }
}

/// All modes.
pub const MODES: &[Mode] = &[
    mode(MetadataMode::Ordered, 2, None),
    mode(MetadataMode::Journal, 3, None),
    mode(MetadataMode::Auto, 2, None),
    mode(MetadataMode::Embedded, 3, Some(Kind::Embedded)),
];

/// Sizes of journals: so small that no record fits, or that they wrap around, up to the engine's own choice.
const JOURNALS: [Option<u64>; 5] =
    [Some(16 << 10), Some(32 << 10), Some(64 << 10), Some(128 << 10), None];

/// Sizes of zones, down to one cluster, and the most zones. The engine's own choice would make files too long for a
/// simulation.
const ZONES: [u64; 6] = [16 << 10, 64 << 10, 64 << 10, 128 << 10, 512 << 10, 4 << 20];
const MOST_ZONES: [Option<u32>; 6] = [Some(1), Some(2), Some(2), Some(3), Some(4), None];

/// One of `choices`, and the rest of the random number.
const fn choose<T: Copy, const N: usize>(choices: [T; N], draw: u64) -> (T, u64) {
    (choices[(draw % N as u64) as usize], draw / N as u64)
}

impl Mode {
    /// The name on the command line.
    pub const fn name(&self) -> &'static str {
        self.metadata.name()
    }

    /// The mode of that name.
    pub fn from_name(name: &str) -> Option<&'static Self> {
        MODES.iter().find(|mode| mode.name() == name)
    }

    /// The options for opening a disk; `draw` chooses among those that must make no difference.
    pub fn options(&self, writable: bool, draw: u64) -> OpenOptions {
        let (journal_size, rest) = choose(JOURNALS, draw / 3);
        let (zone_size, rest) = choose(ZONES, rest);
        let (zones, rest) = choose(MOST_ZONES, rest);
        // Nothing is embedded then.
        let restart_log = self.metadata != MetadataMode::Embedded && rest % 3 == 0;
        // A small map makes the engine read tables again.
        let map_cache = draw.is_multiple_of(3).then_some(16 << 10);
        let mut options = OpenOptions::new()
            .writable(writable)
            .metadata(self.metadata)
            .zone_size(zone_size)
            .restart_log(restart_log);
        options.journal_size = journal_size;
        options.zones = zones;
        options.map_cache = map_cache;
        options
    }
}
