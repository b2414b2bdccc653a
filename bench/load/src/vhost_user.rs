//! A virtio-blk driver over vhost-user: what a guest's driver does, without the guest.

use crate::Result;
use crate::drive::{self, Port};
use crate::options::Load;
use serde_json::Value;
use std::hint;
use std::io;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;
use virtio_driver::{
    EventFd, QueueNotifier, VhostUser, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkTransport,
    VirtioFeatureFlags, VirtioTransport,
};

/// Entries of a queue at least, and descriptors that a request takes.
const QUEUE_SIZE: u16 = 128;
const DESCRIPTORS: u16 = 3;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The device's socket
    socket: PathBuf,
    #[command(flatten)]
    load: Load,
}

/// Runs the load; gives its line.
///
/// # Errors
/// There is no device at the socket, or it refuses what is asked of it.
pub(crate) fn run(args: &Args) -> Result<Value> {
    let load = &args.load;
    let path = args.socket.to_str().ok_or("the socket's name is not UTF-8")?;
    let features = VirtioFeatureFlags::VERSION_1 | VirtioFeatureFlags::RING_EVENT_IDX;
    // Without FLUSH every write would have to be durable.
    let of_disks =
        VirtioBlkFeatureFlags::MQ | VirtioBlkFeatureFlags::FLUSH | VirtioBlkFeatureFlags::RO;
    // The device learns of the memory before its queues do.
    let memory = drive::buffers(load)?;
    let mut device = VhostUser::new(path, features.bits() | of_disks.bits())?;
    device.map_mem_region(memory.address(), memory.len(), memory.file(), 0)?;
    let device: &mut VirtioBlkTransport = &mut device;
    let capacity = u64::from(device.get_config()?.capacity).saturating_mul(512);
    let entries = (load.qd * DESCRIPTORS).next_power_of_two().max(QUEUE_SIZE);
    let queues = VirtioBlkQueue::setup_queues(device, usize::from(load.queues), entries)?;
    let ports = queues.into_iter().zip(0..).map(|(mut requests, number)| {
        requests.set_used_notif_enabled(false);
        let call = device.get_completion_fd(usize::from(number));
        wait_in_read(&call)?;
        Ok(Queue {
            requests,
            kick: device.get_submission_notifier(usize::from(number)),
            call,
            buffers: drive::first_buffer(&memory, load, number),
            block: load.bs as usize,
            writes: load.rw.writes(),
            poll: load.poll,
            pushed: false,
        })
    });
    drive::run("vhost-user", load, capacity, ports.collect::<Result<_>>()?)
}

/// Has reads of an event descriptor wait: the device, which shares it, may have turned that off.
fn wait_in_read(event: &EventFd) -> io::Result<()> {
    // SAFETY: two calls with a descriptor and flags.
    let done = unsafe {
        let flags = libc::fcntl(event.as_raw_fd(), libc::F_GETFL);
        libc::fcntl(event.as_raw_fd(), libc::F_SETFL, flags & !libc::O_NONBLOCK)
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

struct Queue<'a> {
    requests: VirtioBlkQueue<'a, usize>,
    kick: Box<dyn QueueNotifier>,
    call: Arc<EventFd>,
    buffers: usize,
    block: usize,
    writes: bool,
    poll: bool,
    /// Something was added that the device has not been told of.
    pushed: bool,
}

impl Port for Queue<'_> {
    fn push(&mut self, slot: usize, offset: u64) -> Result<()> {
        let buffer = (self.buffers + slot * self.block) as *mut u8;
        // SAFETY: the buffer is the slot's own, which has one request at a time; `run` keeps the memory
        // until every queue has seen all its completions, or the program ends.
        unsafe {
            if self.writes {
                self.requests.write_raw(offset, buffer, self.block, slot)?;
            } else {
                self.requests.read_raw(offset, buffer, self.block, slot)?;
            }
        }
        self.pushed = true;
        Ok(())
    }

    fn submit(&mut self) -> Result<()> {
        if self.pushed && self.requests.avail_notif_needed() {
            self.kick.notify()?;
        }
        self.pushed = false;
        Ok(())
    }

    fn complete(&mut self, done: &mut Vec<(usize, bool)>) -> Result<()> {
        loop {
            done.extend(self.requests.completions().map(|each| (each.context, each.ret == 0)));
            if !done.is_empty() {
                return Ok(());
            }
            if self.poll {
                hint::spin_loop();
                continue;
            }
            self.requests.set_used_notif_enabled(true);
            if !self.requests.completions().has_next() {
                self.call.read()?;
            }
            // Of what has come, and of more until the next sleep, nobody need tell.
            self.requests.set_used_notif_enabled(false);
        }
    }
}
