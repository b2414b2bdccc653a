//! The ways to keep metadata that are put to the test: the one place that knows them apart.

use isobath_disk::{MetadataMode, OpenOptions};

/// A mode and what it promises.
#[derive(Clone, Copy, Debug)]
pub struct Mode {
    /// The engine's mode.
    pub metadata: MetadataMode,
    /// Clusters may be leaked after recovery, until `isobath check -r leaks`.
    pub leaks: bool,
    /// `isobath check` finds no corruption in what a crash left, before any recovery.
    pub consistent: bool,
}

/// All modes.
pub const MODES: &[Mode] =
    &[Mode { metadata: MetadataMode::Ordered, leaks: true, consistent: true }];

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
            // A small map makes the engine read tables again.
            map_cache: draw.is_multiple_of(3).then_some(16 << 10),
            ..OpenOptions::default()
        }
    }
}
