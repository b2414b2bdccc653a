//! A virtual disk over a chain of qcow2 images.
//!
//! [`Disk::open`] opens an image and its backing chain; reads, writes, zero-writes, discards and
//! flushes may then run concurrently. It sees its files only through
//! [`Host`](isobath_storage::Host) and [`Storage`](isobath_storage::Storage), and runs on any
//! executor.
//!
//! ```
//! use isobath_disk::{BlockDevice, Disk, NewDisk, OpenOptions, create};
//! use isobath_storage::{IoBuf, memory::MemoryHost};
//! use std::path::Path;
//!
//! # futures_executor::block_on(async {
//! let host = MemoryHost::default();
//! create(&host, Path::new("disk.qcow2"), &NewDisk::new(1 << 30)).await?;
//! let options = OpenOptions::new().writable(true);
//! let disk = Disk::open(host, Path::new("disk.qcow2"), &options).await?;
//! disk.write(4096, IoBuf::copy_of(b"isobath")).await?;
//! disk.flush().await?;
//! assert_eq!(&*disk.read(4096, IoBuf::zeroed(7)).await?, b"isobath");
//! disk.close().await?;
//! # Ok::<(), isobath_disk::DiskError>(())
//! # }).unwrap();
//! ```

// A `Geometry` is passed by reference everywhere, as in the format's own functions.
#![allow(clippy::trivially_copy_pass_by_ref)]
#![allow(clippy::missing_errors_doc, reason = "errors are those of the storage and of the format")]

mod chain_map;
pub mod clock;
mod compare;
pub mod copy;
pub mod device;
pub mod disk;
pub mod live;
mod measure;
mod named;
mod parts;
pub mod pausing;
mod read;
mod rebase;
mod resize;
mod status;
mod store_index;
#[cfg(test)]
mod testing;
pub mod throttle;
mod touched;
mod vm_state;
pub mod write;

pub use chain_map::MapEntry;
pub use compare::{Compare, CompareError, Difference};
pub use copy::{CopyOptions, DiskCopy};
pub use device::{BlockDevice, BlockStatus, ZeroFlags};
pub use disk::{DEFAULT_MAP_CACHE, Disk};
pub use isobath_chain::chain::{LayerIndex, MAX_LAYERS};
pub use isobath_chain::create::{
    Created, NewDisk, NewEncryption, Preallocation, create, create_held, create_held_beside,
};
pub use isobath_chain::fork::{Forked, Forks, fork};
pub use isobath_chain::index::{IndexInfo, IndexLimits, IndexState, WholeIndex};
pub use isobath_chain::info::{
    BitmapInfo, ForeignInfo, ImageInfo, InfoOptions, Qcow2Info, backing_chain_info, full_name, info,
};
pub use isobath_chain::map::MapStats;
pub use isobath_formats::{VmdkExtent, VmdkInfo};
pub use isobath_image::amend::{Amend, amend, check_amend};
pub use isobath_image::bitmaps::{BitmapAction, BitmapBits, BitmapEditor, read_bitmap};
pub use isobath_image::check::{CheckEvent, CheckOptions, CheckReport, Repair};
pub use isobath_image::durability::MetadataMode;
pub use isobath_image::encryption::{self, Secrets};
pub use isobath_image::error::{self, DiskError, Result};
pub use isobath_image::keys::{KeyChange, change_keys};
pub use isobath_image::layer::{ImageFormat, Layer};
pub use isobath_image::memory::{self, MemoryLimit};
pub use isobath_image::offline::check;
pub use isobath_image::options::{
    BackingFile, Below, OpenOptions, SnapshotChoice, Trust, WhenLocked,
};
#[doc(hidden)]
pub use isobath_image::sabotage;
pub use isobath_image::snapshots::{apply_snapshot, create_snapshot, delete_snapshot};
pub use live::{IoFailure, IoStats, LiveDisk, Overlay, RequestStats};
pub use measure::{Measure, MeasureError, measure};
pub use rebase::Rebase;
pub use resize::NewSize;
pub use store_index::{IndexMismatch, IndexProgress};
