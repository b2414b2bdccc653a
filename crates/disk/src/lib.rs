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
//! create(&host, Path::new("disk.qcow2"), &NewDisk { size: Some(1 << 30), ..NewDisk::default() }).await?;
//! let options = OpenOptions { writable: true, ..OpenOptions::default() };
//! let disk = Disk::open(host, Path::new("disk.qcow2"), &options).await?;
//! disk.write(4096, IoBuf::copy_of(b"isobath")).await?;
//! disk.flush().await?;
//! assert_eq!(&*disk.read(4096, IoBuf::zeroed(7)).await?, b"isobath");
//! disk.close().await?;
//! # Ok::<(), isobath_disk::DiskError>(())
//! # }).unwrap();
//! ```

// A `Geometry` goes by reference everywhere, as in the format's own functions.
#![allow(clippy::trivially_copy_pass_by_ref)]

mod alloc;
mod chain;
mod chain_map;
mod check;
mod compare;
mod copy;
mod create;
pub mod device;
mod disk;
mod durability;
pub mod error;
mod index;
mod info;
pub mod jobs;
pub mod live;
mod map;
mod measure;
mod per_thread;
mod range_lock;
mod read;
mod read_gate;
mod resize;
#[doc(hidden)]
pub mod sabotage;
mod status;
mod tables;
mod touched;
mod write;

pub use chain::{ImageFormat, Layer, LayerIndex, MAX_LAYERS, OpenOptions, Trust};
pub use chain_map::MapEntry;
pub use check::{CheckEvent, CheckOptions, CheckReport, Repair, check};
pub use compare::{Compare, CompareError, Difference};
pub use copy::{Copy, CopyOptions};
pub use create::{NewDisk, create};
pub use device::{BlockDevice, BlockStatus, ZeroFlags};
pub use disk::{DEFAULT_MAP_CACHE, Disk};
pub use durability::MetadataMode;
pub use error::{DiskError, Result};
pub use index::{IndexInfo, IndexMismatch, IndexProgress, IndexState};
pub use info::{BitmapInfo, ImageInfo, InfoOptions, Qcow2Info, backing_chain_info, info};
pub use live::{IoFailure, IoStats, LiveDisk, Overlay, RequestStats};
pub use map::MapStats;
pub use measure::{Measure, measure};
pub use resize::Preallocation;
