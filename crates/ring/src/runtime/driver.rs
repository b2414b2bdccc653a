//! The ring itself: operations in flight, their resources, and how they end.

use super::memory::{Keep, Lease};
use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};
use slab::Slab;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::mem::MaybeUninit;
use std::task::Waker;
use std::time::Duration;

/// `user_data` of cancellations, whose results are not needed.
const CANCEL: u64 = u64::MAX;
/// `user_data` of the read that is completed by wake-ups from other threads.
pub(super) const WAKE: u64 = u64::MAX - 1;

/// Maximum number of completions taken from the queue at a time.
const REAP: usize = 64;

/// What happens to an operation whose future is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Abandon {
    /// It runs to completion: file I/O, which completes soon.
    Finish,
    /// It is cancelled, since it could wait forever.
    Cancel,
}

enum Operation {
    Waiting(Option<Waker>),
    Orphan,
    Done(i32),
}

struct Slot {
    /// Distinguishes this operation's completion from those of the slot's earlier operations.
    serial: u32,
    state: Operation,
    abandon: Abandon,
    keep: Keep,
    /// Keeps the descriptor open, and its number from being reused, until the kernel has taken the entry.
    lease: Option<Lease>,
}

/// How long [`Driver::enter`] waits for a completion.
#[derive(Clone, Copy)]
pub(super) enum Wait {
    No,
    Forever,
    For(Duration),
}

/// Identifies an operation in flight.
#[derive(Clone, Copy)]
pub(super) struct Key(u32);

pub(super) struct Driver {
    ring: RefCell<IoUring>,
    slots: RefCell<Slab<Slot>>,
    /// Entries for which the ring has no room yet, in order.
    backlog: RefCell<VecDeque<squeue::Entry>>,
    serial: Cell<u32>,
    /// Entries written to the submission queue that the kernel has not taken.
    unsubmitted: Cell<usize>,
    /// Entries in the submission queue or the kernel.
    in_ring: Cell<usize>,
    /// Operations in flight whose futures are gone.
    orphans: Cell<usize>,
    closed: Cell<bool>,
    batch: usize,
}

impl Driver {
    pub(super) fn new(entries: u32, batch: usize) -> io::Result<Self> {
        Ok(Self::on(build(entries, FLAGS.len())?, batch))
    }

    fn on(ring: IoUring, batch: usize) -> Self {
        Self {
            ring: RefCell::new(ring),
            slots: RefCell::default(),
            backlog: RefCell::default(),
            serial: Cell::new(0),
            unsubmitted: Cell::new(0),
            in_ring: Cell::new(0),
            orphans: Cell::new(0),
            closed: Cell::new(false),
            batch,
        }
    }

    /// Puts an operation into the ring.
    ///
    /// # Safety
    /// The memory that `entry` points to must stay valid, and not be accessed otherwise, for as long as `keep` lives;
    /// `lease` must keep its descriptor open.
    pub(super) unsafe fn start(
        &self,
        entry: squeue::Entry,
        keep: Keep,
        lease: Lease,
        abandon: Abandon,
    ) -> Key {
        // Serials stay below `u32::MAX`, so no operation has the `user_data` of WAKE or CANCEL.
        let serial = self.serial.get();
        self.serial.set((serial + 1) % u32::MAX);
        let closed = self.closed.get();
        let state =
            if closed { Operation::Done(-libc::ECANCELED) } else { Operation::Waiting(None) };
        let key = self.slots.borrow_mut().insert(Slot {
            serial,
            state,
            abandon,
            keep,
            lease: Some(lease),
        });
        if !closed {
            self.push(entry.user_data(u64::from(serial) << 32 | key as u64));
        }
        Key(key as u32)
    }

    /// Starts the read into `word` that the next wake-up completes.
    ///
    /// # Safety
    /// `word` must be valid until the read's completion, which [`drain`](Self::drain) waits for.
    pub(super) unsafe fn start_wake_read(&self, eventfd: i32, word: *mut u64) {
        let entry = opcode::Read::new(io_uring::types::Fd(eventfd), word.cast(), 8).build();
        self.push(entry.user_data(WAKE));
    }

    fn push(&self, entry: squeue::Entry) {
        let mut backlog = self.backlog.borrow_mut();
        let mut ring = self.ring.borrow_mut();
        // SAFETY: the entry's creator keeps what it points to until its completion.
        if backlog.is_empty() && unsafe { ring.submission().push(&entry) }.is_ok() {
            self.pushed();
        } else {
            backlog.push_back(entry);
            self.refill(&mut ring, &mut backlog);
        }
        if self.unsubmitted.get() >= self.batch {
            self.submit(&ring);
        }
    }

    /// Moves entries from the backlog into the submission queue.
    fn refill(&self, ring: &mut IoUring, backlog: &mut VecDeque<squeue::Entry>) {
        while let Some(entry) = backlog.front() {
            // SAFETY: the entry's creator keeps what it points to until its completion.
            let mut pushed = unsafe { ring.submission().push(entry) };
            if pushed.is_err() {
                self.submit(ring);
                // SAFETY: as above.
                pushed = unsafe { ring.submission().push(entry) };
            }
            if pushed.is_err() {
                break;
            }
            backlog.pop_front();
            self.pushed();
        }
    }

    fn pushed(&self) {
        self.in_ring.set(self.in_ring.get() + 1);
        self.unsubmitted.set(self.unsubmitted.get() + 1);
    }

    /// Submits the queued entries without waiting. Entries that the kernel does not take now are submitted again in the
    /// next turn.
    fn submit(&self, ring: &IoUring) {
        match ring.submit() {
            Ok(taken) => self.taken(taken),
            Err(error) => check(&error),
        }
    }

    fn taken(&self, count: usize) {
        self.unsubmitted.set(self.unsubmitted.get().saturating_sub(count));
    }

    /// Submits queued entries, waits as requested, and handles the available completions. Returns whether the wake-up
    /// read was among them.
    #[must_use = "the wake-up read must be started again"]
    pub(super) fn enter(&self, wait: Wait) -> bool {
        {
            let mut ring = self.ring.borrow_mut();
            self.refill(&mut ring, &mut self.backlog.borrow_mut());
            let result = match wait {
                Wait::No => {
                    let queue = ring.submission();
                    let idle =
                        self.unsubmitted.get() == 0 && !queue.taskrun() && !queue.cq_overflow();
                    drop(queue);
                    if idle { Ok(0) } else { ring.submit() }
                }
                Wait::Forever => ring.submit_and_wait(1),
                Wait::For(duration) => {
                    let time = Timespec::from(duration);
                    ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&time))
                }
            };
            match result {
                Ok(taken) => self.taken(taken),
                // The wait ended without a completion; the number of submitted entries is unknown.
                Err(error) => {
                    check(&error);
                    self.unsubmitted.set(ring.submission().len());
                }
            }
        }
        self.reap()
    }

    /// Whether operations have completed whose tasks do not know it yet.
    pub(super) fn has_completions(&self) -> bool {
        let mut ring = self.ring.borrow_mut();
        let queue = ring.submission();
        let in_kernel = queue.taskrun() || queue.cq_overflow();
        drop(queue);
        in_kernel || !ring.completion().is_empty()
    }

    fn reap(&self) -> bool {
        let mut woken = false;
        loop {
            let mut space = [const { MaybeUninit::<cqueue::Entry>::uninit() }; REAP];
            let entries = {
                let mut ring = self.ring.borrow_mut();
                let entries = ring.completion().fill(&mut space);
                self.in_ring.set(self.in_ring.get() - entries.len());
                &*entries
            };
            for entry in entries {
                match entry.user_data() {
                    WAKE => woken = true,
                    CANCEL => {}
                    user_data => self.complete(user_data, entry.result()),
                }
            }
            if entries.len() < REAP {
                return woken;
            }
        }
    }

    fn complete(&self, user_data: u64, result: i32) {
        let (key, serial) = ((user_data as u32) as usize, (user_data >> 32) as u32);
        let mut slots = self.slots.borrow_mut();
        let Some(slot) = slots.get_mut(key).filter(|slot| slot.serial == serial) else {
            tracing::error!(
                key,
                serial,
                result,
                "io_uring completed an operation that was never started"
            );
            return;
        };
        let lease = slot.lease.take();
        match std::mem::replace(&mut slot.state, Operation::Done(result)) {
            Operation::Waiting(waker) => {
                drop(slots);
                if let Some(waker) = waker {
                    waker.wake();
                }
            }
            Operation::Orphan => {
                let slot = slots.remove(key);
                drop(slots);
                self.orphans.set(self.orphans.get() - 1);
                drop(slot);
                if let Some(lease) = lease {
                    lease.landed();
                }
            }
            Operation::Done(first) => {
                tracing::error!(
                    key,
                    serial,
                    first,
                    result,
                    "io_uring completed an operation twice"
                );
            }
        }
    }

    /// The result and the kept resources of an operation, once it is done; the key is then invalid.
    pub(super) fn poll(&self, key: Key, waker: &Waker) -> Option<(i32, Keep)> {
        let mut slots = self.slots.borrow_mut();
        let slot = slots.get_mut(key.0 as usize)?;
        match &mut slot.state {
            Operation::Done(result) => {
                let result = *result;
                Some((result, slots.remove(key.0 as usize).keep))
            }
            Operation::Waiting(Some(known)) if known.will_wake(waker) => None,
            Operation::Waiting(place) => {
                let old = place.replace(waker.clone());
                drop(slots);
                drop(old);
                None
            }
            Operation::Orphan => None,
        }
    }

    /// Records that an operation's future was dropped before it received the result; the key is then invalid.
    pub(super) fn abandon(&self, key: Key) {
        let index = key.0 as usize;
        let mut slots = self.slots.borrow_mut();
        let Some(slot) = slots.get_mut(index) else { return };
        if let Operation::Done(_) = slot.state {
            let slot = slots.remove(index);
            drop(slots);
            drop(slot);
            return;
        }
        let waker = std::mem::replace(&mut slot.state, Operation::Orphan);
        if let Some(lease) = &slot.lease {
            lease.orphaned();
        }
        let cancel =
            (slot.abandon == Abandon::Cancel).then(|| u64::from(slot.serial) << 32 | index as u64);
        drop(slots);
        drop(waker);
        self.orphans.set(self.orphans.get() + 1);
        if let Some(target) = cancel {
            self.cancel(target);
        }
    }

    fn cancel(&self, target: u64) {
        self.push(opcode::AsyncCancel::new(target).build().user_data(CANCEL));
    }

    /// Whether this has been [drained](Self::drain), so that operations fail.
    pub(super) fn is_closed(&self) -> bool {
        self.closed.get()
    }

    /// Whether an operation without a future is in flight.
    pub(super) fn has_orphans(&self) -> bool {
        self.orphans.get() > 0
    }

    /// Ends every operation: cancels those that could wait forever and waits for the rest. Operations started from now
    /// on fail with `ECANCELED`.
    pub(super) fn drain(&self) {
        self.closed.set(true);
        self.cancel(WAKE);
        let targets: Vec<u64> = self
            .slots
            .borrow()
            .iter()
            .filter(|(_, slot)| {
                matches!(slot.state, Operation::Waiting(_)) && slot.abandon == Abandon::Cancel
            })
            .map(|(key, slot)| u64::from(slot.serial) << 32 | key as u64)
            .collect();
        for target in targets {
            self.cancel(target);
        }
        while self.in_ring.get() > 0 || !self.backlog.borrow().is_empty() {
            let _ = self.enter(Wait::Forever);
        }
    }
}

/// Ignores errors of `io_uring_enter` that the next turn resolves; panics on all others, which make the ring unusable.
fn check(error: &io::Error) {
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EBUSY | libc::EINTR | libc::ETIME) => {}
        _ => panic!("io_uring_enter failed: {error}"),
    }
}

/// Flags by the kernel that introduced them: 5.19; 6.0 and 6.1 (useful only together).
const FLAGS: [fn(&mut io_uring::Builder); 2] = [
    |builder| {
        builder.setup_submit_all().setup_coop_taskrun().setup_taskrun_flag();
    },
    |builder| {
        builder.setup_single_issuer().setup_defer_taskrun();
    },
];

/// Creates a ring with the best flags that the kernel supports, from the first `most` groups.
fn build(entries: u32, most: usize) -> io::Result<IoUring> {
    let mut groups = most;
    loop {
        let mut builder = IoUring::builder();
        builder.setup_clamp().setup_cqsize(entries.saturating_mul(4)).dontfork();
        for set in &FLAGS[..groups] {
            set(&mut builder);
        }
        match builder.build(entries) {
            Ok(ring) => return check_features(ring),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) && groups > 0 => groups -= 1,
            Err(error) => return Err(explain(&error)),
        }
    }
}

fn check_features(ring: IoUring) -> io::Result<IoUring> {
    let have = ring.params();
    if have.is_feature_nodrop() && have.is_feature_ext_arg() && have.is_feature_fast_poll() {
        return Ok(ring);
    }
    let text = "this kernel's io_uring is too old; Linux 5.11 or later is required";
    Err(io::Error::new(io::ErrorKind::Unsupported, text))
}

fn explain(error: &io::Error) -> io::Error {
    let hint = match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            "; sysctl kernel.io_uring_disabled or a seccomp filter forbids it"
        }
        Some(libc::ENOSYS) => "; Linux 5.11 or later is required",
        Some(libc::ENOMEM) => "; the limit on locked memory (ulimit -l) may be too low",
        _ => "",
    };
    io::Error::new(error.kind(), format!("cannot set up io_uring: {error}{hint}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use isobath_buf::IoBuf;
    use std::os::fd::{AsRawFd, OwnedFd};
    use std::sync::Arc;

    #[test]
    fn rings_work_with_the_flags_of_every_kernel() {
        for groups in 0..=FLAGS.len() {
            let driver = Driver::on(build(4, groups).unwrap(), 2);
            let zero: OwnedFd = std::fs::File::open("/dev/zero").unwrap().into();
            let mut keys = Vec::new();
            for _ in 0..100 {
                let mut buf = IoBuf::copy_of(&[1; 512]);
                let fd = io_uring::types::Fd(zero.as_raw_fd());
                let entry = opcode::Read::new(fd, buf.as_mut_ptr(), 512).build();
                // SAFETY: the operation keeps the buffer, and `zero` stays open until it is done.
                keys.push(unsafe {
                    driver.start(entry, Keep::Buf(buf), Arc::new(()), Abandon::Finish)
                });
            }
            for (index, key) in keys.into_iter().enumerate() {
                if index % 3 == 0 {
                    driver.abandon(key);
                    continue;
                }
                let (result, keep) = loop {
                    match driver.poll(key, Waker::noop()) {
                        Some(done) => break done,
                        None => assert!(!driver.enter(Wait::Forever)),
                    }
                };
                let Keep::Buf(buf) = keep else { panic!("the buffer comes back") };
                assert_eq!((result, &*buf), (512, &[0; 512][..]));
            }
            driver.drain();
            assert!(driver.slots.borrow().is_empty() && !driver.has_orphans());
            let nop = opcode::Nop::new().build();
            // SAFETY: the entry points to no memory.
            let late = unsafe { driver.start(nop, Keep::Nothing, Arc::new(()), Abandon::Finish) };
            let (result, _) = driver.poll(late, Waker::noop()).unwrap();
            assert_eq!(result, -libc::ECANCELED);
        }
    }

    #[test]
    fn waits_without_end_are_cancelled() {
        let (pipe, _end) = std::io::pipe().unwrap();
        for groups in 0..=FLAGS.len() {
            let driver = Driver::on(build(2, groups).unwrap(), 1);
            let fd = io_uring::types::Fd(pipe.as_raw_fd());
            let mut keys = (0..50).map(|_| {
                let entry = opcode::PollAdd::new(fd, libc::POLLIN as u32).build();
                // SAFETY: the entry points to no memory; the pipe outlives the driver.
                unsafe { driver.start(entry, Keep::Nothing, Arc::new(()), Abandon::Cancel) }
            });
            for key in keys.by_ref().take(25) {
                driver.abandon(key);
            }
            while driver.has_orphans() {
                let _ = driver.enter(Wait::Forever);
            }
            let held: Vec<Key> = keys.collect();
            driver.drain();
            for key in held {
                assert_eq!(driver.poll(key, Waker::noop()).unwrap().0, -libc::ECANCELED);
            }
            assert!(driver.slots.borrow().is_empty());
        }
    }
}
