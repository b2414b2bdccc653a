//! FUSE: the disk as one regular file on the host, for loop devices, `dd` and forensics.
//!
//! An existing file is the mount point; while the disk is served, that path is the disk. The file can be read, written,
//! synced, punched and zeroed (`fallocate`), and its holes can be queried (`lseek`). Its size is always the disk's
//! current size. The page cache is bypassed, so data written through one frontend is immediately visible through all
//! others; for the same reason, shared mappings of the file are not supported. A private mapping shows the disk's
//! contents as of its creation or later.
//!
//! Operations that a disk does not support are refused: the file cannot be truncated (`EPERM`), not even by opening it
//! with `O_TRUNC` (`dd` needs `conv=notrunc`). It grows only with [`Options::growable`], in sectors of 512 bytes.
//! Otherwise writes stop at the end of the disk, as on a block device, and fail with `ENOSPC` beyond it. Allocating
//! space (`fallocate` without further flags) succeeds within the disk, but reserves nothing in the underlying storage.
//!
//! After `SIGKILL`, the file stays mounted, and accessing it fails with `ENOTCONN` ("Transport endpoint is not
//! connected") until it is unmounted with `umount` or by the next [`Mount::new`].
//!
//! The code speaks the kernel's protocol directly on `/dev/fuse` ([decision
//! 0010](https://example.invalid/isobath/docs/decisions/0010-fuse-frontend.md)).
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
//! // Requests are spread over these threads; without any, they share this one.
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
mod intake;
mod memory;
mod mount;
mod options;
mod place;
mod request;
mod serve;
mod trial;
mod turns;
mod wire;
mod worker;

pub use frontend::{FuseFrontend, PROTOCOL};
pub use mount::Mount;
pub use options::{AllowOther, Options};
pub use place::MountError;
pub use trial::{Answer, Trial};
