//! One queue of a device: fetching requests, and committing their results.

use super::Served;
use super::geometry::MAX_BYTES;
use super::request::Service;
use crate::keeper::wire::{Command, Descriptor, IoPayload, descriptors_at, descriptors_length};
use crate::pool::Pool;
use crate::slots::Slots;
use isobath_disk::BlockDevice;
use isobath_ring::{CommandRing, Commands};
use std::cell::RefCell;
use std::fs::File;
use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::pin::pin;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::task::{Context, Poll};

/// Bytes of free buffers that a queue keeps.
pub(super) const POOL_BYTES: usize = 16 << 20;
/// Number of requests to take before the thread's other tasks have a turn.
const BURST: usize = 16;
/// Number of results that the kernel gets at a time, unless there are no more requests to take.
const BATCH: usize = 8;

/// A queue that no thread serves yet.
pub(super) struct Queue {
    number: u16,
    depth: u16,
    /// The character device.
    file: Arc<File>,
    descriptors: Descriptors,
    ring: CommandRing,
}

impl Queue {
    /// A queue of a device, with requests of `depth` tags, whose commands `ring` has room for.
    pub(super) fn new(
        file: &Arc<File>,
        number: u16,
        depth: u16,
        ring: CommandRing,
    ) -> io::Result<Self> {
        let descriptors = Descriptors::map(file, number, depth)?;
        Ok(Self { number, depth, file: file.clone(), descriptors, ring })
    }

    /// Serves the queue on this thread, which the kernel demands to be always the same, until the device is stopped.
    pub(super) async fn serve<D: BlockDevice>(self, served: &Served<D>) -> io::Result<()> {
        let Self { number, depth, file, descriptors, ring } = self;
        let pool = Pool::new(POOL_BYTES.min(usize::from(depth) * MAX_BYTES as usize));
        let service = Service {
            device: &*served.device,
            geometry: &served.geometry,
            file: &file,
            queue: number,
            pool: &pool,
            ending: &served.ending,
        };
        // The results of requests, which the kernel does not know yet.
        let results = RefCell::new(Vec::new());
        let slots = RefCell::new(Slots::new());
        let mut commands = Commands::from(ring);
        let fetch = |commands: &mut Commands, command: Command, tag: u16, result: i32| {
            let payload = IoPayload::new(number, tag, result).payload();
            // SAFETY: the command refers to no memory, and the descriptor is open for as long as the queue is served.
            unsafe { commands.push(file.as_fd(), command.code(), payload, u64::from(tag)) };
        };
        for tag in 0..depth {
            fetch(&mut commands, Command::Fetch, tag, 0);
        }
        // The tags with a request, or a command that fetches one.
        let mut live = usize::from(depth);
        // Those with a request.
        let held = RefCell::new(vec![false; usize::from(depth)]);
        let commit = |commands: &mut Commands| {
            for (tag, result) in results.borrow_mut().drain(..) {
                held.borrow_mut()[usize::from(tag)] = false;
                fetch(commands, Command::CommitAndFetch, tag, result);
            }
            commands.submit()
        };
        let mut work = |cx: &mut Context<'_>| -> Poll<io::Result<()>> {
            let mut taken = 0;
            loop {
                slots.borrow_mut().poll(cx);
                commit(&mut commands)?;
                let before = taken;
                while taken < BURST
                    && let Some((token, result)) = commands.take()
                {
                    taken += 1;
                    let tag = token as u16;
                    if result == 0 {
                        let descriptor = descriptors.read(tag);
                        held.borrow_mut()[usize::from(tag)] = true;
                        let (service, results) = (&service, &results);
                        slots.borrow_mut().start(|| async move {
                            let result = service.serve(tag, descriptor).await;
                            results.borrow_mut().push((tag, result));
                        });
                        // Whoever waits for these goes on while the next ones are served.
                        if results.borrow().len() == BATCH {
                            commit(&mut commands)?;
                        }
                    } else if result == -libc::ENODEV {
                        live -= 1;
                    } else {
                        // Its request would never end.
                        let error = io::Error::from_raw_os_error(-result);
                        tracing::error!(queue = number, tag, %error, "the kernel has refused a command");
                        return Poll::Ready(Err(error));
                    }
                }
                if taken == BURST {
                    commit(&mut commands)?;
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                if taken > before {
                    continue;
                }
                if live == 0 {
                    return Poll::Ready(Ok(()));
                }
                if !commands.is_full() && commands.poll_completions(cx)?.is_pending() {
                    return Poll::Pending;
                }
            }
        };
        let mut abandoned = pin!(served.abandoned.requested());
        let ended = poll_fn(|cx| match abandoned.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(io::Error::other("the device was given up"))),
            Poll::Pending => work(cx),
        })
        .await;
        if ended.is_err() {
            // The kernel ends only requests that it can still hand over.
            let held = held.borrow();
            let held = (0..depth).filter(|tag| held[usize::from(*tag)]);
            held.for_each(|tag| fetch(&mut commands, Command::CommitAndFetch, tag, -libc::EIO));
            let _ = commands.submit();
        }
        ended
    }
}

/// The mapped descriptors of a queue's requests, which the kernel writes.
struct Descriptors {
    start: NonNull<Descriptor>,
    length: usize,
    depth: u16,
}

// SAFETY: the memory is mapped for the whole process.
unsafe impl Send for Descriptors {}

impl Descriptors {
    fn map(file: &File, queue: u16, depth: u16) -> io::Result<Self> {
        // SAFETY: a plain call.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        let page = usize::try_from(page).map_err(|_| io::Error::last_os_error())?;
        let length = descriptors_length(depth, page);
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe {
            libc::mmap(
                ptr::null_mut(),
                length,
                libc::PROT_READ,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                file.as_raw_fd(),
                descriptors_at(queue) as i64,
            )
        };
        match NonNull::new(start.cast::<Descriptor>()) {
            Some(mapped) if start != libc::MAP_FAILED => Ok(Self { start: mapped, length, depth }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// The descriptor of a request that the kernel has handed over.
    fn read(&self, tag: u16) -> Descriptor {
        assert!(tag < self.depth, "the kernel has handed over a request of another queue");
        // SAFETY: it is within the mapping, aligned, and any bytes make a descriptor. The kernel changes it only while
        // it has the tag.
        unsafe { self.start.as_ptr().add(usize::from(tag)).read_volatile() }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: the mapping is this one's, and nothing refers to it any longer.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.length) };
    }
}
