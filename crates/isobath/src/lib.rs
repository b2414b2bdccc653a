//! A virtual-disk engine for qcow2 images with long backing chains.
//!
//! [`Disk::open`] opens an image and its backing chain; reads, writes, zero-writes, discards and flushes may then
//! run concurrently. [`LiveDisk`] is a disk whose chain changes while it is used: it takes snapshots, and
//! [jobs] stream, commit and mirror it. Files are reached only through [`Host`](storage::Host) and
//! [`Storage`](storage::Storage), and the futures run on any executor.
//!
//! ```
//! use isobath::storage::{IoBuf, memory::MemoryHost};
//! use isobath::{BlockDevice, Disk, NewDisk, OpenOptions, create};
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
//! # Ok::<(), isobath::DiskError>(())
//! # }).unwrap();
//! ```

pub use isobath_disk::*;
pub use isobath_jobs as jobs;
pub use isobath_storage as storage;
