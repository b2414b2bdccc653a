//! The operations in flight: their resources, and how they end. What carries them out is an io_uring, or threads.

use super::call::{Call, Wait};
use super::memory::{Keep, Lease};
use super::ring::{self, Uring};
use super::threads::Threads;
use slab::Slab;
use std::cell::{Cell, RefCell};
use std::io;
use std::mem::MaybeUninit;
use std::task::Waker;

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

/// Identifies an operation in flight.
#[derive(Clone, Copy)]
pub(super) struct Key(u32);

pub(super) enum Backend {
    Ring(Uring),
    Threads(Threads),
}

pub(super) struct Driver {
    backend: Backend,
    slots: RefCell<Slab<Slot>>,
    serial: Cell<u32>,
    /// Operations in flight whose futures are gone.
    orphans: Cell<usize>,
    closed: Cell<bool>,
}

impl Driver {
    pub(super) fn new(backend: Backend) -> Self {
        Self {
            backend,
            slots: RefCell::default(),
            serial: Cell::new(0),
            orphans: Cell::new(0),
            closed: Cell::new(false),
        }
    }

    /// Starts an operation.
    ///
    /// # Safety
    /// The memory that `call` points to must stay valid, and not be accessed otherwise, for as long as `keep` lives;
    /// `lease` must keep its descriptor open.
    pub(super) unsafe fn start(
        &self,
        call: Call,
        keep: Keep,
        lease: Lease,
        abandon: Abandon,
    ) -> Key {
        // Serials stay below `u32::MAX`, so no operation has the number of what a ring does for itself.
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
            let operation = u64::from(serial) << 32 | key as u64;
            // SAFETY: the slot keeps the memory and the descriptor until the operation's completion.
            unsafe {
                match &self.backend {
                    Backend::Ring(ring) => ring.start(operation, call),
                    Backend::Threads(threads) => threads.start(operation, call),
                }
            }
        }
        Key(key as u32)
    }

    /// Makes the first wake-up through an eventfd end a wait. The eventfd must stay open until the driver has been
    /// [drained](Self::drain).
    ///
    /// # Errors
    /// It cannot be watched.
    pub(super) fn listen(&self, eventfd: i32) -> io::Result<()> {
        match &self.backend {
            Backend::Ring(ring) => ring.listen(eventfd),
            Backend::Threads(threads) => threads.listen(eventfd)?,
        }
        Ok(())
    }

    /// The same for the next wake-up after one.
    pub(super) fn listen_again(&self, eventfd: i32) {
        match &self.backend {
            Backend::Ring(ring) => ring.listen(eventfd),
            // It has not ceased to watch.
            Backend::Threads(_) => {}
        }
    }

    /// Submits what is queued, waits as requested, and handles the available completions. Returns whether there was a
    /// wake-up.
    #[must_use = "the next wake-up must be listened for"]
    pub(super) fn enter(&self, wait: Wait) -> bool {
        match &self.backend {
            Backend::Ring(ring) => {
                ring.enter(wait);
                self.reap(ring)
            }
            Backend::Threads(threads) => {
                let woken = threads.enter(wait);
                for (operation, result) in threads.take() {
                    self.complete(operation, result);
                }
                woken
            }
        }
    }

    /// Gives the kernel the operations that a ring has queued.
    pub(super) fn submit_queued(&self) {
        if let Backend::Ring(ring) = &self.backend {
            ring.submit_queued();
        }
    }

    /// Whether operations have completed, or may have, whose tasks do not know it yet.
    pub(super) fn has_completions(&self) -> bool {
        match &self.backend {
            Backend::Ring(ring) => ring.has_completions(),
            Backend::Threads(threads) => threads.may_have_completions(),
        }
    }

    fn reap(&self, ring: &Uring) -> bool {
        let mut woken = false;
        loop {
            let mut room = [const { MaybeUninit::uninit() }; ring::REAP];
            let entries = ring.take(&mut room);
            for entry in entries {
                match entry.user_data() {
                    ring::WAKE => woken = true,
                    ring::CANCEL => {}
                    operation => self.complete(operation, entry.result()),
                }
            }
            if entries.len() < ring::REAP {
                return woken;
            }
        }
    }

    fn complete(&self, operation: u64, result: i32) {
        let (key, serial) = ((operation as u32) as usize, (operation >> 32) as u32);
        let mut slots = self.slots.borrow_mut();
        let Some(slot) = slots.get_mut(key).filter(|slot| slot.serial == serial) else {
            tracing::error!(key, serial, result, "an operation completed that was never started");
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
                tracing::error!(key, serial, first, result, "an operation completed twice");
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

    fn cancel(&self, operation: u64) {
        match &self.backend {
            Backend::Ring(ring) => ring.cancel(operation),
            Backend::Threads(threads) => threads.cancel(operation),
        }
    }

    /// Whether an io_uring carries out the operations.
    pub(super) fn has_ring(&self) -> bool {
        matches!(self.backend, Backend::Ring(_))
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
        if let Backend::Ring(ring) = &self.backend {
            ring.stop_listening();
        }
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
        while self.is_busy() {
            let _ = self.enter(Wait::Forever);
        }
    }

    /// Whether anything is in flight.
    fn is_busy(&self) -> bool {
        match &self.backend {
            Backend::Ring(ring) => ring.is_busy(),
            Backend::Threads(threads) => threads.is_busy(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use isobath_buf::IoBuf;
    use std::os::fd::{AsRawFd, OwnedFd};
    use std::sync::Arc;

    /// Drivers on rings with the flags of every kernel, and one on threads.
    fn drivers(entries: u32, batch: usize) -> impl Iterator<Item = Driver> {
        let rings = (0..=ring::FLAGS.len())
            .map(move |groups| Backend::Ring(Uring::with_flags(groups, entries, batch)));
        let threads = std::iter::once_with(|| Backend::Threads(Threads::new().unwrap()));
        rings.chain(threads).map(Driver::new)
    }

    #[test]
    fn operations_complete_with_every_driver() {
        for driver in drivers(4, 2) {
            let zero: OwnedFd = std::fs::File::open("/dev/zero").unwrap().into();
            let mut keys = Vec::new();
            for _ in 0..100 {
                let mut buf = IoBuf::copy_of(&[1; 512]);
                let (file, pointer) = (zero.as_raw_fd(), buf.as_mut_ptr());
                let call = Call::Read { file, buf: pointer, length: 512, offset: 0 };
                // SAFETY: the operation keeps the buffer, and `zero` stays open until it is done.
                keys.push(unsafe {
                    driver.start(call, Keep::Buf(buf), Arc::new(()), Abandon::Finish)
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
            // SAFETY: the call points to no memory.
            let late = unsafe {
                driver.start(Call::Nothing, Keep::Nothing, Arc::new(()), Abandon::Finish)
            };
            let (result, _) = driver.poll(late, Waker::noop()).unwrap();
            assert_eq!(result, -libc::ECANCELED);
        }
    }

    #[test]
    fn an_eventfd_that_cannot_be_watched_is_an_error() {
        let driver = Driver::new(Backend::Threads(Threads::new().unwrap()));
        let error = driver.listen(-1).unwrap_err();
        assert!(error.to_string().contains("cannot set up epoll"), "{error}");
    }

    #[test]
    fn waits_without_end_are_cancelled() {
        let (pipe, _end) = std::io::pipe().unwrap();
        for driver in drivers(2, 1) {
            let call = Call::Poll { file: pipe.as_raw_fd(), events: libc::POLLIN as u32 };
            let mut keys = (0..50).map(|_| {
                // SAFETY: the call points to no memory; the pipe outlives the driver.
                unsafe { driver.start(call, Keep::Nothing, Arc::new(()), Abandon::Cancel) }
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

    /// Starts a call that points to no memory, on a file that outlives the driver.
    fn start(driver: &Driver, call: Call) -> Key {
        // SAFETY: as said.
        unsafe { driver.start(call, Keep::Nothing, Arc::new(()), Abandon::Cancel) }
    }

    fn result(driver: &Driver, key: Key) -> Option<i32> {
        driver.poll(key, Waker::noop()).map(|(result, _)| result)
    }

    /// Waits for the first of some operations, and gives its place and result.
    fn first(driver: &Driver, keys: &[Key]) -> (usize, i32) {
        loop {
            let ended = |(at, key): (usize, &Key)| Some((at, result(driver, *key)?));
            match keys.iter().enumerate().find_map(ended) {
                Some(first) => return first,
                None => assert!(!driver.enter(Wait::Forever)),
            }
        }
    }

    const IN: u32 = libc::POLLIN as u32;
    const HUNG_UP: u32 = libc::POLLHUP as u32;

    #[test]
    fn every_driver_gives_the_same_results_for_unusual_files() {
        let file = tempfile::tempfile().unwrap();
        let null = std::fs::File::open("/dev/null").unwrap();
        for driver in drivers(4, 1) {
            let poll = |file, events| Call::Poll { file, events };
            for (call, expected) in [
                (poll(-1, IN), -libc::EBADF),
                (poll(file.as_raw_fd(), IN), libc::POLLIN.into()),
                (poll(null.as_raw_fd(), IN), libc::POLLIN.into()),
                (Call::Datasync { file: null.as_raw_fd() }, -libc::EINVAL),
                (Call::Fallocate { file: -1, mode: 0, offset: 0, length: 1 }, -libc::EBADF),
            ] {
                assert_eq!(first(&driver, &[start(&driver, call)]), (0, expected));
            }
            let mut buf = IoBuf::zeroed(8);
            for (file, expected) in [(&file, -libc::ENOTSOCK), (&null, -libc::ENOTSOCK)] {
                let (socket, buf) = (file.as_raw_fd(), buf.as_mut_ptr());
                let key = start(&driver, Call::Recv { socket, buf, length: 8 });
                assert_eq!(first(&driver, &[key]), (0, expected));
            }
            let count = Call::Count { file: null.as_raw_fd(), buf: buf.as_mut_ptr() };
            assert_eq!(first(&driver, &[start(&driver, count)]), (0, 0));
            // Such a file never hangs up.
            let end = start(&driver, poll(file.as_raw_fd(), 0));
            assert_eq!(first(&driver, &[end]), (0, -libc::EINVAL));
            driver.drain();
        }
    }

    #[test]
    fn waits_of_different_kinds_for_one_file_end_each_by_its_own_event() {
        use std::io::{Read, Write};
        use std::os::unix::net::UnixStream;
        for driver in drivers(8, 1) {
            let (mut ours, mut theirs) = UnixStream::pair().unwrap();
            let file = ours.as_raw_fd();
            let alone = Call::Poll { file, events: IN | libc::EPOLLEXCLUSIVE as u32 };
            let mut readers = vec![start(&driver, alone), start(&driver, alone)];
            let given_up = start(&driver, Call::Poll { file, events: IN });
            let end = start(&driver, Call::Poll { file, events: 0 });
            driver.abandon(given_up);
            while driver.has_orphans() {
                assert!(!driver.enter(Wait::Forever));
            }
            for left in [1, 0] {
                theirs.write_all(b"x").unwrap();
                let (at, ready) = first(&driver, &readers);
                assert_eq!(ready as u32, IN);
                readers.remove(at);
                assert_eq!(readers.len(), left);
                assert!(readers.iter().all(|key| result(&driver, *key).is_none()));
                ours.read_exact(&mut [0]).unwrap();
            }
            let writer = start(&driver, Call::Poll { file, events: libc::POLLOUT as u32 });
            assert_eq!(first(&driver, &[writer]), (0, libc::POLLOUT.into()));
            assert!(!driver.enter(Wait::No) && result(&driver, end).is_none());
            drop(theirs);
            let (_, ready) = first(&driver, &[end]);
            assert!(ready as u32 & HUNG_UP != 0);
            driver.drain();
            assert!(driver.slots.borrow().is_empty());
        }
    }
}
