//! How changes of metadata reach the file.

mod attend;
pub(crate) mod data_journal;
mod group;
pub(crate) mod journal;
mod leads;
mod metadata;
mod ordered;
mod upkeep;
pub(crate) mod zones;

pub use group::GroupCommit;
pub use metadata::Metadata;
pub use ordered::Ordered;
pub use upkeep::Upkeep;

use crate::Result;
use crate::layer::Qcow2Layer;
use crate::readers::Readers;
use isobath_storage::Storage;
use journal::Journal;

/// A way to make recorded changes durable (`--metadata`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MetadataMode {
    /// Like [`Journal`](Self::Journal) after some flushes, if the image can have a journal; otherwise like
    /// [`Ordered`](Self::Ordered).
    #[default]
    Auto,
    /// Writes in an order that leaves a consistent image after a crash at any point; lost space at
    /// worst. A flush after allocations makes two syncs.
    Ordered,
    /// Writes a journal inside the image, which is not usable without it until it is closed or
    /// recovered. A flush makes one sync, and while the journal is in use a crash loses no space.
    Journal,
    /// Like [`Journal`](Self::Journal), but if the data of a new cluster is slightly compressible, its mapping is
    /// embedded in it: then a flush writes nothing to the journal either. Until the image is closed, some of its blocks
    /// are stored differently, and a recovery looks for them.
    Embedded,
}

impl MetadataMode {
    /// All modes.
    pub const ALL: [Self; 4] = [Self::Auto, Self::Ordered, Self::Journal, Self::Embedded];

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Ordered => "ordered",
            Self::Journal => "journal",
            Self::Embedded => "embedded",
        }
    }

    /// The mode of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.name() == name)
    }
}

/// A commit policy in use; at most one commit runs at a time.
pub enum CommitPolicy {
    /// Writes in order.
    Ordered(Ordered),
    /// A journal in the image.
    Journal(Box<Journal>),
}

impl CommitPolicy {
    /// `journal_size` is [`OpenOptions::journal_size`](crate::options::OpenOptions::journal_size), for a disk of
    /// `disk_size` bytes. With `at_once` no mode waits until its journal pays.
    pub fn new(
        mode: MetadataMode,
        journal_size: Option<u64>,
        disk_size: u64,
        at_once: bool,
    ) -> Self {
        let size = journal_size.unwrap_or((disk_size / 32).clamp(MIN_JOURNAL, MAX_JOURNAL));
        match mode {
            MetadataMode::Ordered => Self::Ordered(Ordered),
            MetadataMode::Auto => Self::Journal(Box::new(Journal::new(at_once, size))),
            MetadataMode::Journal => Self::Journal(Box::new(Journal::new(true, size))),
            MetadataMode::Embedded => {
                let size = size.max(MIN_EMBEDDED);
                Self::Journal(Box::new(Journal::new(true, size)))
            }
        }
    }

    /// Makes everything recorded so far durable.
    pub async fn commit<S: Storage>(
        &self,
        metadata: &Metadata<S>,
        readers: &Readers,
    ) -> Result<()> {
        match self {
            Self::Ordered(mode) => mode.commit(metadata, readers).await,
            Self::Journal(mode) => mode.commit(metadata, readers).await,
        }
    }

    /// Refuses an image that cannot have the requested journal.
    pub async fn refuse_without_journal<S: Storage>(&self, layer: &Qcow2Layer<S>) -> Result<()> {
        match self {
            Self::Journal(journal) => journal.refuse_without_room(layer).await,
            Self::Ordered(_) => Ok(()),
        }
    }

    /// The journal, if there may be one.
    pub fn journal(&self) -> Option<&Journal> {
        match self {
            Self::Ordered(_) => None,
            Self::Journal(journal) => Some(journal),
        }
    }
}

/// The default size of a journal's area in bytes: large enough that checkpoints are rare, small enough to be read
/// quickly.
const MAX_JOURNAL: u64 = 4 << 20;
/// Bytes that a journal may take.
pub(crate) const JOURNAL_MEMORY: u64 = journal::MEMORY;
/// The same for small disks.
const MIN_JOURNAL: u64 = 1 << 20;
/// The minimum with zones: whole lead blocks and the list of zones go into one record.
const MIN_EMBEDDED: u64 = 256 << 10;
