//! Clients of a served disk, one for each of its frontends, that know what was answered to them.

use crate::vhost_raw::Shared;
use isobath_testkit::fuse;
use isobath_testkit::nbd::{Nbd, Request};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use virtio_driver::{
    VhostUser, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags,
    VirtioTransport,
};

/// A request that a server has not answered by then, nor died of, is lost.
const PATIENCE: Duration = Duration::from_mins(2);
/// Bytes of memory for a request of a virtual machine, and requests at a time.
const PLACE: usize = 64 << 10;
const DEPTH: usize = 16;

/// How far the kill of a server has come.
#[derive(Default)]
pub(crate) struct Kill {
    begun: AtomicBool,
    done: AtomicBool,
}

impl Kill {
    /// Kills the server by `kill`.
    pub(crate) fn carry_out(&self, kill: impl FnOnce()) {
        self.begun.store(true, Ordering::SeqCst);
        kill();
        self.done.store(true, Ordering::SeqCst);
    }

    /// The server may be dead.
    fn has_begun(&self) -> bool {
        self.begun.load(Ordering::SeqCst)
    }

    /// The server is dead or dying.
    fn is_done(&self) -> bool {
        self.done.load(Ordering::SeqCst)
    }
}

/// How a disk is reached.
#[derive(Clone, Debug)]
pub(crate) enum Frontend {
    /// The socket, and the export's name.
    Nbd(PathBuf, String),
    /// The socket of a vhost-user-blk device.
    Vhost(PathBuf),
    /// The file.
    Fuse(PathBuf),
}

/// Who sends requests and waits for their answers. That the server is gone is an error; the requests may or may not
/// have been carried out then.
pub(crate) trait Client {
    /// Sends all, and waits until all are answered.
    fn submit(&mut self, requests: &[Request<'_>]) -> io::Result<()>;
}

impl Client for Nbd {
    fn submit(&mut self, requests: &[Request<'_>]) -> io::Result<()> {
        let done = self.submit(requests);
        // An answer that is an error is no end of a server.
        if let Err(error) = &done {
            assert!(error.kind() != io::ErrorKind::Other, "NBD: {error}");
        }
        done.map(drop)
    }
}

/// A file in which the disk is.
struct Mounted<'a> {
    file: File,
    kill: &'a Kill,
}

impl Client for Mounted<'_> {
    fn submit(&mut self, requests: &[Request<'_>]) -> io::Result<()> {
        let Self { file, kill } = self;
        for request in requests {
            let done = match *request {
                Request::Write { offset, data, .. } => file.write_all_at(data, offset),
                Request::Zero { offset, length, .. } => {
                    allocate(file, libc::FALLOC_FL_ZERO_RANGE, offset, length)
                }
                Request::Discard { offset, length } => {
                    allocate(file, libc::FALLOC_FL_PUNCH_HOLE, offset, length)
                }
                Request::Flush => file.sync_data(),
                Request::Read { .. } => unreachable!("the load does not read"),
            };
            if let Err(error) = &done {
                let dead = error.raw_os_error().is_some_and(fuse::tells_kill);
                assert!(dead && kill.has_begun(), "FUSE: {request:?}: {error}");
            }
            done?;
        }
        Ok(())
    }
}

fn allocate(file: &File, mode: i32, offset: u64, length: u32) -> io::Result<()> {
    let mode = mode | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: only numbers, and a descriptor that is open.
    let done = unsafe { libc::fallocate(file.as_raw_fd(), mode, offset as i64, i64::from(length)) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// A virtual machine.
struct Machine<'a, 'b> {
    queue: VirtioBlkQueue<'a, ()>,
    memory: &'b Shared,
    notify: Box<dyn Fn() + 'b>,
    call: i32,
    kill: &'b Kill,
}

impl Client for Machine<'_, '_> {
    fn submit(&mut self, requests: &[Request<'_>]) -> io::Result<()> {
        for (number, request) in requests.iter().enumerate() {
            let place = number * PLACE;
            match *request {
                Request::Write { offset, data, .. } => {
                    assert!(number < DEPTH && data.len() <= PLACE);
                    self.memory.write(place as u64, data);
                    // SAFETY: within the shared memory.
                    let start = unsafe { self.memory.start().add(place) };
                    // SAFETY: the memory is shared with the device until after the queue's end.
                    unsafe { self.queue.write_raw(offset, start, data.len(), ()) }
                }
                Request::Zero { offset, length, unmap } => {
                    self.queue.write_zeroes(offset, length.into(), unmap, ())
                }
                Request::Discard { offset, length } => {
                    self.queue.discard(offset, length.into(), ())
                }
                Request::Flush => self.queue.flush(()),
                Request::Read { .. } => unreachable!("the load does not read"),
            }
            .map_err(io::Error::other)?;
        }
        if self.queue.avail_notif_needed() {
            (self.notify)();
        }
        let until = Instant::now() + PATIENCE;
        let mut left = requests.len();
        while left > 0 {
            // What was answered before the end is there after it.
            let dead = self.kill.is_done();
            let mut some = false;
            for completion in self.queue.completions() {
                assert_eq!(completion.ret, 0, "an error of the device");
                left -= 1;
                some = true;
            }
            if left > 0 && !some {
                if dead {
                    return Err(io::ErrorKind::ConnectionReset.into());
                }
                assert!(Instant::now() < until, "a request is not answered");
                wait_a_little(self.call);
            }
        }
        Ok(())
    }
}

/// Waits for a call of the device, for some milliseconds at most.
fn wait_a_little(call: i32) {
    let mut poll = libc::pollfd { fd: call, events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry, which is alive.
    if unsafe { libc::poll(&raw mut poll, 1, 5) } == 1 {
        let mut count = 0_u64;
        // SAFETY: 8 bytes of a live value.
        let _ = unsafe { libc::read(call, (&raw mut count).cast(), 8) };
    }
}

impl Frontend {
    /// Connects, and has `work` use the connection. `kill` tells whether the server was killed, which the
    /// memory of a virtual machine does not show, nor an error of a file.
    pub(crate) fn with<T>(
        &self,
        kill: &Kill,
        work: impl FnOnce(&mut dyn Client) -> T,
    ) -> io::Result<T> {
        match self {
            Self::Nbd(socket, export) => Ok(work(&mut Nbd::connect(socket, export)?)),
            Self::Fuse(path) => {
                let file = File::options().read(true).write(true).open(path)?;
                Ok(work(&mut Mounted { file, kill }))
            }
            Self::Vhost(socket) => machine(socket, kill, work),
        }
    }
}

fn machine<T>(
    socket: &Path,
    kill: &Kill,
    work: impl FnOnce(&mut dyn Client) -> T,
) -> io::Result<T> {
    let features = VirtioFeatureFlags::VERSION_1 | VirtioFeatureFlags::RING_EVENT_IDX;
    let blk = VirtioBlkFeatureFlags::FLUSH
        | VirtioBlkFeatureFlags::MQ
        | VirtioBlkFeatureFlags::DISCARD
        | VirtioBlkFeatureFlags::WRITE_ZEROES;
    let path = socket.to_str().unwrap();
    let device = VhostUser::new(path, features.bits() | blk.bits());
    let mut device = device.map_err(io::Error::other)?;
    let memory = Shared::new(DEPTH * PLACE);
    let start = memory.start() as usize;
    let mapped = device.map_mem_region(start, memory.len(), memory.file.as_raw_fd(), 0);
    mapped.map_err(io::Error::other)?;
    let device: &mut VirtioBlkTransport = &mut device;
    let queues = VirtioBlkQueue::setup_queues(device, 1, 128);
    let mut queue = queues.map_err(io::Error::other)?.remove(0);
    queue.set_used_notif_enabled(true);
    let notifier = device.get_submission_notifier(0);
    let call = device.get_completion_fd(0);
    let notify = Box::new(move || drop(notifier.notify()));
    Ok(work(&mut Machine { queue, memory: &memory, notify, call: call.as_raw_fd(), kill }))
}
