//! How to open a disk.

use crate::durability::MetadataMode;
use crate::layer::ImageFormat;
use isobath_storage::{Locking, OpenMode};
use std::path::PathBuf;

/// Methods that set a field and return the options, to build them in one expression.
#[macro_export]
#[doc(hidden)]
macro_rules! setters {
    ($options:ident: $($field:ident: $type:ty),* $(,)?) => {
        impl $options {
            $(
                #[doc = concat!("Sets [`", stringify!($field), "`](Self::", stringify!($field), ").")]
                #[must_use]
                pub fn $field(mut self, $field: $type) -> Self {
                    self.$field = $field.into();
                    self
                }
            )*
        }
    };
}
pub use setters;

/// How far the names in an image's header are trusted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Trust {
    /// The image is trusted: any file that it names is opened, and a backing file without a named format is probed, as
    /// in QEMU.
    #[default]
    Full,
    /// The image is untrusted: it may only name files below these directories (links followed), and must name their
    /// format. Direct-access indexes are not used.
    Within(Vec<PathBuf>),
}

/// How to open a disk.
///
/// ```
/// use isobath_image::options::OpenOptions;
///
/// let options = OpenOptions::new().writable(true).map_cache(16 << 20);
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OpenOptions {
    /// Allow writes to the active layer.
    pub writable: bool,
    /// Bypass the page cache (`--cache none`).
    pub direct: bool,
    /// Image locks to take.
    pub locking: Locking,
    /// The active layer's format; `None` probes.
    pub format: Option<ImageFormat>,
    /// Whether to open the backing chain; without it, its data reads as zeroes.
    pub backing: bool,
    /// How far names in headers are trusted.
    pub trust: Trust,
    /// How changes of metadata reach the file.
    pub metadata: MetadataMode,
    /// Size of the journal in bytes, if there is one; `None` uses 1/32 of the disk's size, 1 to 4 MiB.
    pub journal_size: Option<u64>,
    /// Size of a zone in bytes, in mode `embedded`, rounded to whole clusters, 1 to 4,096; `None` uses 64 MiB.
    pub zone_size: Option<u64>,
    /// The most zones in use, in mode `embedded`: a recovery looks for records in all of them, and a close makes them
    /// plain. `None` uses 8; with 0 nothing is embedded.
    pub zones: Option<u32>,
    /// Memory for the map in bytes; `None` uses what the disk needs, up to `DEFAULT_MAP_CACHE`.
    pub map_cache: Option<usize>,
    /// What a request was answered for outlives this process being killed, flushed or not, as it does
    /// with a file: who opens the image for writing next on this machine, before that is started again,
    /// finds it. Not in mode `ordered`, nor where the image has no room for a journal; the others set
    /// it up with the first change, and nothing is embedded. While the journal cannot be set up because the device
    /// fails, each change is made durable before it is answered.
    pub restart_log: bool,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            writable: false,
            direct: false,
            locking: Locking::default(),
            format: None,
            backing: true,
            trust: Trust::default(),
            metadata: MetadataMode::default(),
            journal_size: None,
            zone_size: None,
            zones: None,
            map_cache: None,
            restart_log: false,
        }
    }
}

impl OpenOptions {
    /// Like [`default`](Self::default): read-only, with the whole backing chain.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets [`format`](Self::format).
    #[must_use]
    pub fn format(mut self, format: impl Into<Option<ImageFormat>>) -> Self {
        self.format = format.into();
        self
    }
}

setters! {
    OpenOptions:
    writable: bool,
    direct: bool,
    locking: Locking,
    backing: bool,
    trust: Trust,
    metadata: MetadataMode,
    journal_size: u64,
    zone_size: u64,
    zones: u32,
    map_cache: usize,
    restart_log: bool,
}

impl OpenOptions {
    /// Whether an index is trusted. A malicious one could expose parts of the files below that no guest may see.
    pub fn may_use_index(&self) -> bool {
        self.trust == Trust::Full
    }

    /// How to open a file of the disk.
    pub fn mode(&self, writable: bool) -> OpenMode {
        OpenMode { writable, direct: self.direct, locking: self.locking }
    }
}
