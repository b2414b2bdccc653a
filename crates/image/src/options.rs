//! How to open a disk.

use crate::durability::MetadataMode;
use crate::encryption::Secrets;
use crate::layer::ImageFormat;
use crate::memory::MemoryLimit;
use crate::{DiskError, Result};
use isobath_qcow2::Snapshot;
use isobath_storage::{Locking, OpenMode, Storage};
use std::path::PathBuf;
use std::sync::Arc;

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
    /// The image is untrusted: it may only name files below these directories (links followed; what counts is the file
    /// that was opened), and must name their format. It names no external data file, which would be written to.
    /// Direct-access indexes are not used.
    Within(Vec<PathBuf>),
}

impl Trust {
    /// What to do about a file that lies outside, to be appended to the reason.
    pub(crate) fn way_out(&self) -> &'static str {
        match self {
            Self::Within(directories) if directories.is_empty() => {
                ", which names no other file; if it may, allow the directory (--backing-dir)"
            }
            Self::Full | Self::Within(_) => "",
        }
    }

    /// Checks that a file that a header names is where that is allowed: the open file, since its name may have come to
    /// mean another.
    ///
    /// # Errors
    /// If it is elsewhere, or it is not known where.
    pub async fn check_place<S: Storage>(&self, file: &S) -> Result<()> {
        let Self::Within(directories) = self else { return Ok(()) };
        let place = file.real_path().await?;
        if directories.iter().any(|directory| place.starts_with(directory)) {
            return Ok(());
        }
        Err(DiskError::Refused {
            image: file.name().to_owned(),
            reason: format!(
                "it lies outside the directories allowed to an untrusted image{}",
                self.way_out()
            ),
        })
    }
}

/// Which internal snapshot is meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotChoice {
    /// The one with this ID or, if there is none, the first with this name.
    IdOrName(String),
    /// The first with this ID and this name, of which at least one is given.
    Exactly {
        /// The ID.
        id: Option<String>,
        /// The name.
        name: Option<String>,
    },
}

impl SnapshotChoice {
    /// The place of the snapshot in an image's list.
    pub fn find(&self, snapshots: &[Snapshot]) -> Option<usize> {
        let place = |wanted: &dyn Fn(&Snapshot) -> bool| snapshots.iter().position(wanted);
        match self {
            Self::IdOrName(text) => place(&|one| one.id == text.as_bytes())
                .or_else(|| place(&|one| one.name == text.as_bytes())),
            Self::Exactly { id: None, name: None } => None,
            Self::Exactly { id, name } => place(&|one| {
                id.as_ref().is_none_or(|id| one.id == id.as_bytes())
                    && name.as_ref().is_none_or(|name| one.name == name.as_bytes())
            }),
        }
    }
}

/// What is below an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Below {
    /// The backing file that its header names, if any.
    #[default]
    Named,
    /// The backing file that its header names, if any, in this format, whatever the header says.
    NamedWithFormat(ImageFormat),
    /// Nothing, whatever its header names.
    Nothing,
    /// Another backing file than the one that its header names.
    Given(BackingFile),
    /// A file that it is an increment of, as the caller knows, whatever its header names, also if that is nothing. What
    /// is not in the image is read from there. Its format must be given.
    Beneath(BackingFile),
}

impl Below {
    /// The file that is given in the place of the one that the header names.
    pub fn given(&self) -> Option<&BackingFile> {
        match self {
            Self::Given(file) | Self::Beneath(file) => Some(file),
            Self::Named | Self::NamedWithFormat(_) | Self::Nothing => None,
        }
    }
}

/// A backing file, instead of the one that an image's header names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingFile {
    /// The file.
    pub name: PathBuf,
    /// Its format. `None` is the one that the image above names for its own backing file, or, if it names none, probes.
    /// If that image is not trusted, the format must be given.
    pub format: Option<ImageFormat>,
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
    /// Apply what killed servers and crashes have left in journals and restart logs. Without it the files are opened,
    /// and there is no disk of them.
    #[doc(hidden)]
    pub recovers: bool,
    /// Bypass the page cache (`--cache none`).
    pub direct: bool,
    /// Image locks to take.
    pub locking: Locking,
    /// The active layer's format; `None` probes.
    pub format: Option<ImageFormat>,
    /// The active layer's internal snapshot to read instead of its current state; read-only.
    pub snapshot: Option<SnapshotChoice>,
    /// Bring the restart logs of killed servers into the images first, although nothing is written to this disk: who
    /// relies on its contents makes others durable that need them. Backing files of a writable disk are always treated
    /// so; where a disk is only read, the logs are overlaid in memory.
    pub bring_in: bool,
    /// Whether to open the backing chain; without it, its data reads as zeroes.
    pub backing: bool,
    /// The active layer's external data file, instead of the one that its header names. It is trusted. An image that
    /// keeps its data itself is refused with one.
    pub data_file: Option<PathBuf>,
    /// What is below the active layer, below the next one, and so on; below deeper ones, what the headers name. Files
    /// given here are trusted. Direct-access indexes, which describe the others, are not used with them.
    pub backing_files: Vec<Below>,
    /// How far names in headers are trusted.
    pub trust: Trust,
    /// Whether direct-access indexes in images are used and written. They are not where verifying one reads more than
    /// it saves, as with layers that are read over a network. One that the host has beside these is used in any case.
    pub index: bool,
    /// Layers of which a direct-access index has the [head](isobath_qcow2::Head) are opened without being read. Who
    /// examines or rewrites an index reads them.
    pub heads: bool,
    /// The image itself is named by another's header, so that it must lie where `trust` allows. A chain sets this for
    /// the images below its active one, except for those that were given.
    pub named: bool,
    /// How changes of metadata reach the file.
    pub metadata: MetadataMode,
    /// Size of the journal in bytes, if there is one; `None` uses 1/32 of the disk's size, 1 to 4 MiB.
    pub journal_size: Option<u64>,
    /// Size of a zone in bytes, in mode `embedded`, rounded to whole clusters, 1 to 4,096; `None` uses 64 MiB.
    pub zone_size: Option<u64>,
    /// The most zones in use, in mode `embedded`: a recovery looks for records in all of them, and a close makes them
    /// plain. `None` uses 8; with 0 nothing is embedded.
    pub zones: Option<u32>,
    /// The secrets of encrypted images.
    pub secrets: Secrets,
    /// Memory for the map in bytes; `None` uses what the disk needs, up to `DEFAULT_MAP_CACHE`.
    pub map_cache: Option<usize>,
    /// What the disk's map, caches and L1 tables may take is reserved here: an image that does not fit is not opened.
    /// Without a size of its own the map gets at most a sixteenth. `None` for no such bound.
    pub memory: Option<Arc<MemoryLimit>>,
    /// What a request was answered for outlives this process being killed, flushed or not, as it does
    /// with a file: who opens the image for writing next on this machine, before that is started again,
    /// finds it. Not in mode `ordered`, nor where the image has no room for a journal; the others set
    /// it up with the first change, and nothing is embedded. While the journal cannot be set up because the device
    /// fails, each change is made durable before it is answered.
    pub restart_log: bool,
    /// The repair of an image opens it: its corrupt bit is no reason not to.
    pub(crate) repairing: bool,
    /// Who opens it has asked for its repair: that may take as long, and as much memory, as it takes.
    pub(crate) unbounded_repair: bool,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            writable: false,
            recovers: true,
            direct: false,
            locking: Locking::default(),
            format: None,
            snapshot: None,
            bring_in: false,
            backing: true,
            data_file: None,
            backing_files: Vec::new(),
            trust: Trust::default(),
            index: true,
            heads: true,
            named: false,
            metadata: MetadataMode::default(),
            journal_size: None,
            zone_size: None,
            zones: None,
            secrets: Secrets::default(),
            map_cache: None,
            memory: None,
            restart_log: false,
            repairing: false,
            unbounded_repair: false,
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

    /// Sets [`secrets`](Self::secrets).
    #[must_use]
    pub fn secrets(mut self, secrets: impl Into<Secrets>) -> Self {
        self.secrets = secrets.into();
        self
    }

    /// Sets [`data_file`](Self::data_file).
    #[must_use]
    pub fn data_file(mut self, name: impl Into<Option<PathBuf>>) -> Self {
        self.data_file = name.into();
        self
    }

    /// Sets [`snapshot`](Self::snapshot).
    #[must_use]
    pub fn snapshot(mut self, snapshot: impl Into<Option<SnapshotChoice>>) -> Self {
        self.snapshot = snapshot.into();
        self
    }
}

setters! {
    OpenOptions:
    writable: bool,
    direct: bool,
    locking: Locking,
    bring_in: bool,
    backing: bool,
    backing_files: Vec<Below>,
    trust: Trust,
    index: bool,
    heads: bool,
    named: bool,
    metadata: MetadataMode,
    journal_size: u64,
    zone_size: u64,
    zones: u32,
    map_cache: usize,
    memory: Option<Arc<MemoryLimit>>,
    restart_log: bool,
}

impl OpenOptions {
    /// Whether an index is used: it is trusted, and describes what is opened. A malicious one could expose parts of the
    /// files below that no guest may see; one of the current state says nothing of a snapshot.
    pub fn may_use_index(&self) -> bool {
        self.index
            && self.may_use_index_beside()
            && self.backing_files.iter().all(|below| *below == Below::Named)
    }

    /// Whether an index that the host has beside the layers is used. Which layers it is of, the host says.
    pub fn may_use_index_beside(&self) -> bool {
        self.trust == Trust::Full && self.snapshot.is_none()
    }

    /// What is below the layer at `depth`, 0 being the active one.
    pub fn below(&self, depth: usize) -> &Below {
        self.backing_files.get(depth).unwrap_or(&Below::Named)
    }

    /// How to open a file of the disk.
    pub fn mode(&self, writable: bool) -> OpenMode {
        OpenMode { writable, direct: self.direct, locking: self.locking }
    }
}
