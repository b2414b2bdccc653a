//! vhost-user-blk: a virtual machine's disk, accessed through memory shared with it.
//!
//! The client is a virtual machine monitor (QEMU, Cloud Hypervisor) or a library (libblkio); its guest's requests
//! arrive in rings in its memory, and data is transferred between that memory and the disk without being copied. Rings
//! are split virtqueues with indirect descriptors and event indices. The server can be stopped, or even killed, and
//! replaced while the guest runs: the client keeps a list of the requests in flight.
//!
//! ```no_run
//! # use isobath_disk::BlockDevice;
//! use isobath_export::vhost_user::{Options, Server};
//! use isobath_ring::{Config, Executor, Worker};
//! use std::os::unix::net::UnixListener;
//! use std::sync::Arc;
//!
//! # fn serve<D: BlockDevice>(device: Arc<D>) -> Result<(), Box<dyn std::error::Error>> {
//! let server = Server::new(device, Options::default())?;
//! let listener = UnixListener::bind("/run/disk.sock")?;
//! // Queues are spread over these threads; without any, they share the accepting one.
//! let workers = [Worker::start("vring-0", &Config::default())?];
//! let handles = workers.each_ref().map(|worker| worker.handle().clone());
//! Executor::new(&Config::default())?.block_on(server.serve(listener, &handles))?;
//! # Ok(())
//! # }
//! ```
//!
//! Neither a guest nor its virtual machine monitor can harm the process or other clients, with one exception: a monitor
//! that shares a file of a FUSE file system as its memory can make the threads that serve it wait. A monitor that cuts
//! the shared memory short while it is in use is disconnected. To survive that, a handler for SIGBUS is installed once
//! memory is mapped; other faults do what they did before.

mod bounce;
mod chain;
mod config;
mod frontend;
mod inflight;
mod memory;
mod notify;
mod options;
mod queue;
mod request;
mod ring;
mod server;
mod session;
mod throttle;
mod vring;
mod wire;

pub use frontend::{PROTOCOL, VhostUserFrontend};
pub use options::{MAX_QUEUES, Options, OptionsError};
pub use server::Server;
