#![doc = include_str!("../README.md")]
//!
//! # Parts
//! - [`Disk`] is an image and its backing chain, in use: [opened](Disk::open), read, written, flushed;
//!   [snapshots](Disk::snapshot) and [jobs] change its chain meanwhile. [`blocking::Disk`] is one for programs without
//!   an executor.
//! - [`create()`], [`info()`], [`check()`], [`measure()`] and [`seal()`] are for images that nobody has open.
//! - Files are reached only through [`Host`](storage::Host) and [`Storage`](storage::Storage), and the futures run on
//!   any executor. On that of [`ring`], a [`FileHost`](file::FileHost) uses io_uring, where
//!   [it can](ring::Io). A program that reads the same data again and again allows reads [through
//!   mappings](file::FileHost::map_reads), and one that writes little at a time writes [at
//!   once](file::FileHost::write_at_once), as Isobath's servers do.
//! - A method's errors are named in its documentation; [`DiskError`] says what each of them means.

pub mod blocking;
mod disk;
mod image;
mod layer;

pub use disk::Disk;
pub use image::{backing_chain_info, check, create, info, measure, seal};
pub use isobath_disk::{
    BackingFile, Below, BitmapInfo, BlockStatus, CheckEvent, CheckOptions, CheckReport,
    DEFAULT_MAP_CACHE, DiskError, ForeignInfo, ImageFormat, ImageInfo, IndexLimits, InfoOptions,
    IoFailure, IoStats, MAX_LAYERS, MapEntry, MapStats, Measure, MemoryLimit, MetadataMode,
    NewDisk, NewEncryption, OpenOptions, Overlay, Preallocation, Qcow2Info, Repair, RequestStats,
    Result, Secrets, SnapshotChoice, Trust, VmdkExtent, VmdkInfo, ZeroFlags,
};
pub use isobath_qcow2::{CompressionType, FormatError, Snapshot};
pub use isobath_ring as ring;
pub use isobath_storage as storage;
pub use isobath_storage_file as file;
pub use layer::LayerInfo;

/// The secrets of encrypted images, and how new ones are encrypted.
///
/// ```
/// use isobath::encryption::Secret;
/// use isobath::storage::memory::MemoryHost;
/// use isobath::{Disk, NewDisk, NewEncryption, OpenOptions, create};
/// use std::time::Duration;
///
/// # futures_executor::block_on(async {
/// let host = MemoryHost::default();
/// let secret = || Secret::new(b"correct horse".to_vec()).unwrap();
/// let mut new = NewDisk::new(1 << 20);
/// let mut encryption = NewEncryption::new(secret());
/// // The time that guessing takes; 2 s unless it is set.
/// encryption.options.iter_time = Duration::from_millis(1);
/// new.encryption = Some(encryption);
/// create(&host, "disk.qcow2", &new).await?;
/// let disk = Disk::open(host, "disk.qcow2", &OpenOptions::new().secrets(secret())).await?;
/// assert!(disk.layers()[0].encrypted);
/// disk.close().await?;
/// # Ok::<(), isobath::DiskError>(())
/// # }).unwrap();
/// ```
#[cfg(feature = "encryption")]
pub mod encryption {
    pub use isobath_disk::encryption::{
        CipherAlgorithm, CipherMode, CreateOptions, Hash, Info, IvGenerator, MAX_SECRET, Secret,
        SlotState,
    };
}

/// Block jobs: long-running operations on a disk in use, which change its chain in one step at their end.
pub mod jobs {
    pub use isobath_jobs::pace::{Forecast, Pacing};
    pub use isobath_jobs::record::{Interval, JobRecord, JobSample};
    pub use isobath_jobs::{
        CommitOptions, IoStatus, Job, JobError, JobEvent, JobKind, JobOptions, JobStatus, Listener,
        MirrorOptions, MirrorSync, OnError, Progress, StreamOptions, Verb, VerbRefused,
    };
}

/// The README of the repository: its Rust is compiled by `cargo test --doc`.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct RepositoryReadme;
