//! FUSE: the disk as one regular file of the host, for loop devices, `dd`, forensics.
//!
//! An existing file is the mount point; while the disk is served, that path is the disk. The file can be
//! read, written, synced, punched and zeroed (`fallocate`), and asked for its holes (`lseek`). It has the
//! disk's size, always as it is at the moment. The page cache is not used, so that what one frontend writes
//! every other one reads at once; for the same reason the file cannot be mapped shared. A private mapping
//! shows what the disk held when it was made, or later.
//!
//! What has no place on a disk is refused: the file gets no shorter (`EPERM`), also not by being opened
//! with `O_TRUNC` (`dd` wants `conv=notrunc`). It gets longer only with [`Options::growable`], in sectors
//! of 512 bytes. Otherwise writes end at the end of the disk, as on a block device, and beyond it fail with
//! `ENOSPC`. To allocate space (`fallocate` without further flags) succeeds within the disk and reserves
//! nothing below it.
//!
//! After `SIGKILL` nobody is left to unmount: the path then says `ENOTCONN` ("Transport endpoint is not
//! connected") until `umount` is called or the next [`Mount::new`] clears it away.
//!
//! The protocol is the kernel's own, spoken to `/dev/fuse` directly
//! ([decision 0010](https://example.invalid/isobath/docs/decisions/0010-fuse-frontend.md)).
//!
//! ```no_run
//! # use isobath_disk::BlockDevice;
//! use isobath_export::fuse::{Mount, Options};
//! use isobath_ring::{Config, Executor, Signals, Worker, spawn};
//! use std::path::Path;
//! use std::sync::Arc;
//!
//! # fn serve<D: BlockDevice>(device: Arc<D>) -> Result<(), Box<dyn std::error::Error>> {
//! let options = Options { writable: true, ..Options::default() };
//! let mount = Mount::new(device, Path::new("/srv/disk.raw"), options)?;
//! // Requests are spread over these threads; without any they share this one.
//! let workers = [Worker::start("fuse-0", &Config::default())?];
//! let handles = workers.each_ref().map(|worker| worker.handle().clone());
//!
//! Executor::new(&Config::default())?.block_on(async {
//!     let mut signals = Signals::new(&[libc::SIGTERM, libc::SIGINT])?;
//!     let stopping = mount.clone();
//!     spawn(async move {
//!         let _ = signals.recv().await;
//!         stopping.stop();
//!     });
//!     mount.serve(&handles).await
//! })?;
//! # Ok(())
//! # }
//! ```

mod channel;
mod file;
mod frontend;
mod handshake;
mod helper;
mod memory;
mod mount;
mod place;
mod request;
mod serve;
mod trial;
mod wire;
mod worker;

pub use frontend::{FuseFrontend, PROTOCOL};
pub use mount::{AllowOther, Mount, Options};
pub use place::MountError;
pub use trial::{Answer, Trial};
