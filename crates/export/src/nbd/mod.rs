//! NBD, the network block device protocol: a server for any
//! [`BlockDevice`](isobath_disk::BlockDevice).
//!
//! It speaks fixed newstyle with simple and structured replies, and describes its exports with the metadata contexts
//! `base:allocation`, `qemu:allocation-depth` and `qemu:dirty-bitmap:NAME`. Connections are encrypted by TLS
//! where a listener has credentials. Extended headers are refused as unsupported. Exports can be added and removed
//! while it serves.
//!
//! ```no_run
//! # use isobath_disk::BlockDevice;
//! use isobath_export::nbd::{Export, Limits, Server};
//! use isobath_ring::net::Listener;
//! use isobath_ring::{Config, Executor, Signals, Worker, spawn};
//! use std::path::Path;
//! use std::sync::Arc;
//!
//! # fn serve<D: BlockDevice>(device: Arc<D>) -> Result<(), Box<dyn std::error::Error>> {
//! let export = Export {
//!     name: "disk".into(),
//!     description: String::new(),
//!     read_only: false,
//!     allocation_depth: true,
//!     bitmaps: Arc::default(),
//!     device,
//! };
//! let server = Arc::new(Server::new(vec![export], Limits::default())?);
//! let listener = Listener::bind_unix(Path::new("/run/disk.sock"))?;
//! // Connections are spread over these threads; without any, they share the accepting one.
//! let workers = [Worker::start("nbd-0", &Config::default())?];
//! let handles = workers.each_ref().map(|worker| worker.handle().clone());
//!
//! Executor::new(&Config::default())?.block_on(async {
//!     let mut signals = Signals::new(&[libc::SIGTERM, libc::SIGINT])?;
//!     let stopping = server.clone();
//!     spawn(async move {
//!         let _ = signals.recv().await;
//!         stopping.stop();
//!     });
//!     server.serve(listener, &handles).await
//! })?;
//! # Ok(())
//! # }
//! ```

mod admission;
mod bitmap;
pub mod context;
mod exports;
mod frontend;
pub mod handshake;
mod live;
mod outbox;
mod pieces;
mod places;
pub mod reply;
pub mod request;
mod serve;
mod server;
mod session;
mod transport;
mod window;

pub use bitmap::{ExportedBitmap, MAX_BITMAPS};
pub use exports::{Export, ExportError, ExportState, RemoveError};
pub use frontend::{NbdFrontend, PROTOCOL};
/// The numbers of the protocol.
pub use isobath_nbd_client::wire;
pub use live::Gone;
pub use server::{Attached, Limits, Server, ServerError, WhenFull};
pub use session::{InFlight, SessionError};
pub use transport::Transport;
