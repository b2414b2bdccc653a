//! A queue as set up by its client.

use super::bounce::Bounces;
use super::inflight::InFlight;
use super::memory::Memory;
use super::notify::Notifier;
use super::queue::{self, Setup};
use super::request::ID_BYTES;
use super::ring::{Addresses, Ring};
use super::wire::invalid;
use crate::stop::Stop;
use isobath_disk::BlockDevice;
use isobath_disk::throttle::Drained;
use isobath_ring::{Handle, RemoteJoin};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// The state shared by all queues of a client.
pub(crate) struct Common<D> {
    pub(crate) device: Arc<D>,
    pub(crate) bounces: Arc<Bounces>,
    pub(crate) memory: Arc<Memory>,
    pub(crate) event_index: bool,
    pub(crate) write_through: bool,
    pub(crate) read_only: bool,
    pub(crate) serial: [u8; ID_BYTES],
    pub(crate) poll: Duration,
    /// Requested when memory was lost.
    pub(crate) lost: Arc<Stop>,
}

/// A queue's settings, and its task if it runs.
pub(crate) struct Vring {
    index: u16,
    worker: Handle,
    pub(crate) size: u32,
    pub(crate) addresses: Addresses,
    /// Index of the next available entry.
    pub(crate) base: u16,
    /// What it was when the queue was last stopped.
    stopped_at: Option<u16>,
    /// The queue is started once this is set.
    pub(crate) kick: Option<OwnedFd>,
    pub(crate) call: Arc<Notifier>,
    pub(crate) error: Arc<Notifier>,
    pub(crate) enabled: bool,
    running: Option<Running>,
}

struct Running {
    stop: Arc<Stop>,
    /// Lets its requests pass without waiting for the disk's limits.
    drain: Box<dyn Fn() -> Drained>,
    ended: RemoteJoin<u16>,
}

impl Vring {
    pub(crate) fn new(index: u16, worker: Handle, enabled: bool) -> Self {
        Self {
            index,
            worker,
            size: 0,
            addresses: Addresses::default(),
            base: 0,
            stopped_at: None,
            kick: None,
            call: Arc::default(),
            error: Arc::default(),
            enabled,
            running: None,
        }
    }

    pub(crate) fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Whether it has everything that it needs to start, and is not running.
    pub(crate) fn is_ready(&self) -> bool {
        self.enabled && self.kick.is_some() && self.running.is_none()
    }

    /// Starts the queue's task.
    ///
    /// # Errors
    /// The ring is invalid, or not within the guest's memory.
    pub(crate) fn start<D: BlockDevice>(
        &mut self,
        common: &Common<D>,
        in_flight: Option<InFlight>,
    ) -> io::Result<()> {
        let kick = self.kick.as_ref().ok_or_else(|| invalid("the queue has no kick eventfd"))?;
        let memory = common.memory.clone();
        let ring = Ring::new(memory, self.size, &self.addresses, self.base, common.event_index)
            .map_err(io::Error::other)?;
        let stop = Arc::new(Stop::default());
        let setup = Setup {
            index: self.index,
            device: common.device.clone(),
            bounces: common.bounces.clone(),
            ring,
            in_flight,
            continues: self.stopped_at == Some(self.base),
            kick: kick.try_clone()?,
            call: self.call.clone(),
            error: self.error.clone(),
            stop: stop.clone(),
            serial: common.serial,
            read_only: common.read_only,
            write_through: common.write_through,
            poll: common.poll,
            lost: common.lost.clone(),
        };
        let device = common.device.clone();
        let drain = Box::new(move || device.drain());
        let ended = self.worker.spawn_with(move || queue::run(setup));
        self.running = Some(Running { stop, drain, ended });
        Ok(())
    }

    /// Tells the queue to take no more requests.
    pub(crate) fn request_stop(&self) {
        if let Some(running) = &self.running {
            running.stop.request();
        }
    }

    /// Stops the queue, and waits until all requests that it took have ended.
    pub(crate) async fn stop(&mut self) {
        self.request_stop();
        let Some(running) = self.running.take() else { return };
        // The client waits too.
        let _drained = (running.drain)();
        match running.ended.await {
            Ok(base) => {
                self.base = base;
                self.stopped_at = Some(base);
            }
            Err(error) => {
                tracing::error!(queue = self.index, %error, "a queue terminated unexpectedly");
            }
        }
    }
}
