//! The ways to keep metadata that are put to the test: the one place that knows them apart.

use isobath_disk::{MetadataMode, OpenOptions};

/// A mode and what it promises.
#[derive(Clone, Copy, Debug)]
pub struct Mode {
    /// The engine's mode.
    pub metadata: MetadataMode,
    /// `isobath check` finds no corruption in what a crash left, before any recovery.
    pub consistent: bool,
    /// The oldest version of an image that is opened for writing.
    pub version: u32,
}

/// All modes.
pub const MODES: &[Mode] = &[
    Mode { metadata: MetadataMode::Ordered, consistent: true, version: 2 },
    Mode { metadata: MetadataMode::Journal, consistent: true, version: 3 },
    Mode { metadata: MetadataMode::Auto, consistent: true, version: 2 },
];

/// Sizes of journals: so small that they wrap around, up to the engine's own choice.
const JOURNALS: [Option<u64>; 5] = [Some(16 << 10), Some(32 << 10), Some(64 << 10), Some(0), None];

impl Mode {
    /// The name on the command line.
    pub const fn name(&self) -> &'static str {
        self.metadata.name()
    }

    /// The mode of that name.
    pub fn from_name(name: &str) -> Option<&'static Self> {
        MODES.iter().find(|mode| mode.name() == name)
    }

    /// How a disk is opened; `draw` chooses among what must make no difference.
    pub fn options(&self, writable: bool, draw: u64) -> OpenOptions {
        OpenOptions {
            writable,
            metadata: self.metadata,
            journal_size: JOURNALS[(draw / 3 % JOURNALS.len() as u64) as usize],
            // A small map makes the engine read tables again.
            map_cache: draw.is_multiple_of(3).then_some(16 << 10),
            ..OpenOptions::default()
        }
    }
}
