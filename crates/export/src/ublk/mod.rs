//! ublk: the disk as a block device of this machine, `/dev/ublkbN`.
//!
//! The kernel's driver `ublk_drv` (Linux 6.5) hands each request to the queue of the processor that made it. A thread
//! serves a queue: it fetches requests by commands on a ring of its own, copies their data through the character device
//! `/dev/ublkcN`, and commits their results. The code speaks the driver's interface directly ([decision
//! 0054](https://example.invalid/isobath/docs/decisions/0054-ublk-frontend.md)).
//!
//! Devices are added and removed by a [`Keeper`](crate::keeper::Keeper), a program beside the server: this needs rights
//! that a server gives up, and waits in the kernel that whoever serves the device must not be in. A device is removed
//! once nobody uses it. When its server is killed, the keeper deletes it; what has not been flushed is then lost, as
//! when a disk is pulled out. With a parameter it first waits for another server of the image, to which the kernel
//! hands the requests again ([decision
//! 0060](https://example.invalid/isobath/docs/decisions/0060-ublk-user-recovery.md)).

mod frontend;
mod geometry;
mod queue;
mod request;

pub use frontend::{PROTOCOL, UblkFrontend};
pub use geometry::GeometryError;

use crate::stop::Stop;
use geometry::Geometry;
use parking_lot::Mutex;
use std::sync::Arc;

/// A device that is served, for all of its queues.
struct Served<D> {
    device: Arc<D>,
    geometry: Geometry,
    number: u32,
    /// It was another server's, which has been killed.
    is_adopted: bool,
    /// Requested once the export is removed.
    removed: Stop,
    /// Requested once the disk is there, or has failed to be.
    begun: Stop,
    /// Why it has failed.
    failure: Mutex<Option<String>>,
    /// Requested once no request may wait for a paused disk any longer.
    ending: Stop,
    /// Requested once the queues are to be closed, whatever becomes of the device.
    abandoned: Stop,
}
