//! The list of requests in flight that the client keeps for the server, so that a replacement server loses no request,
//! however the last one ended (vhost-user: "Inflight I/O tracking", split virtqueues).
//!
//! Stores are made in the order that the specification requires. Shared memory keeps every store made before a process
//! is killed, so that order is all that is needed.

use super::memory::Mapping;
use super::ring::{MAX_SIZE, RingError};
use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering};

/// Sizes in bytes of `QueueRegionSplit` without its entries, and of an entry (`DescStateSplit`).
const HEADER: usize = 16;
const ENTRY: usize = 16;
/// Offsets in the header; `features` is at 0.
const VERSION: usize = 8;
const ENTRIES: usize = 10;
const LAST_BATCH_HEAD: usize = 12;
const USED_INDEX: usize = 14;
/// Offsets in an entry.
const IN_FLIGHT: usize = 0;
const NEXT: usize = 6;
const COUNTER: usize = 8;

/// The version of the format.
const CURRENT: u16 = 1;
/// The part of each queue is aligned to this many bytes, so that no two share a cache line.
const ALIGNMENT: usize = 64;
const NAME: &CStr = c"isobath-inflight";

/// The memory for all queues of a device.
pub(crate) struct Region {
    mapping: Mapping,
    queues: u16,
    size: u16,
}

fn part_length(size: u16) -> usize {
    (HEADER + ENTRY * usize::from(size)).next_multiple_of(ALIGNMENT)
}

/// Length in bytes of the memory for `queues` queues of `size` entries.
pub(crate) fn length(queues: u16, size: u16) -> u64 {
    part_length(size) as u64 * u64::from(queues)
}

/// Creates a file with a new, empty list for `queues` queues of `size` entries.
///
/// # Errors
/// There is not enough memory, or the size is not valid for a queue.
pub(crate) fn create(queues: u16, size: u16) -> io::Result<File> {
    // SAFETY: the name ends with a zero byte.
    let fd =
        unsafe { libc::memfd_create(NAME.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just created, and has no other owner.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.set_len(length(queues, size))?;
    // SAFETY: a plain system call on an open descriptor.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK) } < 0 {
        return Err(io::Error::last_os_error());
    }
    let region = Arc::new(Region::new(&file, 0, length(queues, size), queues, size)?);
    for queue in 0..queues {
        let _ = region.queue(queue);
    }
    Ok(file)
}

impl Region {
    /// Maps the list that a client has kept.
    ///
    /// # Errors
    /// It is shorter than the queues need, or cannot be mapped.
    pub(crate) fn new(
        file: &File,
        offset: u64,
        given: u64,
        queues: u16,
        size: u16,
    ) -> io::Result<Self> {
        let invalid = |text: &str| io::Error::new(io::ErrorKind::InvalidInput, text);
        if queues == 0 || size == 0 || size > MAX_SIZE {
            return Err(invalid(
                "the list of requests in flight has no queues or an invalid queue size",
            ));
        }
        let length = length(queues, size);
        if given < length {
            return Err(invalid("the list of requests in flight is too short"));
        }
        let mapping = Mapping::new(file, offset, length)?;
        if !mapping.start().cast::<u64>().is_aligned() {
            return Err(invalid("the list of requests in flight is not aligned"));
        }
        Ok(Self { mapping, queues, size })
    }

    /// The list of one queue, which is initialized if it was never used.
    ///
    /// # Errors
    /// There is no such queue, or its size or version differs.
    pub(crate) fn queue(self: &Arc<Self>, queue: u16) -> Result<InFlight, RingError> {
        if queue >= self.queues {
            return Err(RingError::Inflight("it has too few queues"));
        }
        // SAFETY: the mapping has a part for each of the queues.
        let start =
            unsafe { self.mapping.start().add(part_length(self.size) * usize::from(queue)) };
        debug_assert!(part_length(self.size) * (usize::from(queue) + 1) <= self.mapping.len());
        let list = InFlight {
            start,
            size: self.size,
            counter: 0,
            region: self.clone(),
            #[cfg(test)]
            stores_left: std::cell::Cell::new(usize::MAX),
        };
        let (version, entries) = (list.half(VERSION), list.half(ENTRIES));
        match (version.load(Ordering::Acquire), entries.load(Ordering::Acquire)) {
            (0, _) => {
                entries.store(self.size, Ordering::Release);
                version.store(CURRENT, Ordering::Release);
            }
            (CURRENT, size) if size == self.size => {}
            (CURRENT, _) => return Err(RingError::Inflight("its queue size differs")),
            _ => return Err(RingError::Inflight("its version is unknown")),
        }
        Ok(list)
    }
}

/// The list of one queue.
pub(crate) struct InFlight {
    start: NonNull<u8>,
    size: u16,
    counter: u64,
    region: Arc<Region>,
    /// The number of stores still made. Later ones are dropped, as after a kill.
    #[cfg(test)]
    stores_left: std::cell::Cell<usize>,
}

// SAFETY: the pointer is into the region, which any thread may use.
unsafe impl Send for InFlight {}

impl InFlight {
    /// The number of entries.
    pub(crate) fn size(&self) -> u16 {
        self.size
    }

    /// Whether a part of its memory was found missing.
    pub(crate) fn is_lost(&self) -> bool {
        self.region.mapping.is_lost()
    }

    fn half(&self, offset: usize) -> &AtomicU16 {
        debug_assert!(offset + 2 <= HEADER + ENTRY * usize::from(self.size));
        // SAFETY: within the part, which is mapped as long as `self` and aligned to 8; offsets of half
        // words are even.
        unsafe { AtomicU16::from_ptr(self.start.as_ptr().add(offset).cast()) }
    }

    fn entry(&self, head: u16) -> Option<usize> {
        (head < self.size).then(|| HEADER + ENTRY * usize::from(head))
    }

    fn mark(&self, entry: usize) -> &AtomicU8 {
        // SAFETY: as in `half`.
        unsafe { AtomicU8::from_ptr(self.start.as_ptr().add(entry + IN_FLIGHT)) }
    }

    fn counter(&self, entry: usize) -> &AtomicU64 {
        // SAFETY: as in `half`; entries are aligned to 8.
        unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(entry + COUNTER).cast()) }
    }

    /// Whether the next store is made.
    #[cfg_attr(not(test), expect(clippy::unused_self, reason = "only tests kill it"))]
    fn alive(&self) -> bool {
        #[cfg(test)]
        {
            let left = self.stores_left.get();
            self.stores_left.set(left.saturating_sub(1));
            left > 0
        }
        #[cfg(not(test))]
        true
    }

    fn set_half(&self, offset: usize, value: u16) {
        if self.alive() {
            self.half(offset).store(value, Ordering::Release);
        }
    }

    /// Records that a request was taken from the available ring.
    pub(crate) fn begin(&mut self, head: u16) {
        let Some(entry) = self.entry(head) else { return };
        if self.alive() {
            self.counter(entry).store(self.counter, Ordering::Release);
        }
        self.counter = self.counter.wrapping_add(1);
        if self.alive() {
            self.mark(entry).store(1, Ordering::Release);
        }
    }

    /// Records that a batch of requests has ended. `publish` shows them to the driver and returns the new used index,
    /// or `None` if the driver may not see them: the next server then finds out by the used ring.
    pub(crate) fn end(
        &mut self,
        heads: impl Iterator<Item = u16> + Clone,
        publish: impl FnOnce() -> Option<u16>,
    ) {
        for head in heads.clone() {
            let Some(entry) = self.entry(head) else { continue };
            self.set_half(entry + NEXT, self.half(LAST_BATCH_HEAD).load(Ordering::Relaxed));
            self.set_half(LAST_BATCH_HEAD, head);
        }
        if !self.alive() {
            return;
        }
        let Some(used) = publish() else { return };
        for head in heads {
            let Some(entry) = self.entry(head) else { continue };
            if self.alive() {
                self.mark(entry).store(0, Ordering::Release);
            }
        }
        self.set_half(USED_INDEX, used);
    }

    /// Forgets all requests: the client has reset the device, and its driver does not wait for them.
    pub(crate) fn forget(&mut self) {
        for head in 0..self.size {
            if let Some(entry) = self.entry(head) {
                self.mark(entry).store(0, Ordering::Release);
            }
        }
    }

    /// Brings the list up to date with the used ring, whose index is `used`, and returns the requests that were in
    /// flight, in the order in which they were taken.
    pub(crate) fn recover(&mut self, used: u16) -> Vec<u16> {
        let missed = used.wrapping_sub(self.half(USED_INDEX).load(Ordering::Acquire));
        let mut head = self.half(LAST_BATCH_HEAD).load(Ordering::Acquire);
        // No batch is larger than the queue: a greater distance means that the ring is new.
        for _ in 0..missed.min(self.size) {
            let Some(entry) = self.entry(head) else { break };
            self.mark(entry).store(0, Ordering::Release);
            head = self.half(entry + NEXT).load(Ordering::Acquire);
        }
        self.half(USED_INDEX).store(used, Ordering::Release);
        let marked = |head: &u16| {
            let entry = self.entry(*head)?;
            (self.mark(entry).load(Ordering::Acquire) != 0)
                .then(|| (self.counter(entry).load(Ordering::Acquire), *head))
        };
        let mut heads: Vec<(u64, u16)> = (0..self.size).filter_map(|head| marked(&head)).collect();
        heads.sort_unstable();
        self.counter = heads.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        heads.into_iter().map(|(_, head)| head).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    const SIZE: u16 = 8;

    fn list(region: &Arc<Region>) -> InFlight {
        region.queue(1).unwrap()
    }

    #[test]
    fn a_batch_that_the_driver_may_not_have_seen_is_in_flight_unless_the_used_ring_has_it() {
        for (used, expected) in [(0, vec![5, 2, 7]), (2, vec![7])] {
            let region = region();
            let mut first = list(&region);
            for head in [5, 2, 7] {
                first.begin(head);
            }
            first.end([2, 5].into_iter(), || None);
            assert_eq!(list(&region).recover(used), expected);
        }
    }

    fn region() -> Arc<Region> {
        let file = create(2, SIZE).unwrap();
        Arc::new(Region::new(&file, 0, length(2, SIZE), 2, SIZE).unwrap())
    }

    #[test]
    fn requests_come_back_in_their_order() {
        let region = region();
        let mut first = list(&region);
        assert!(first.recover(0).is_empty());
        for head in [5, 2, 7, 0] {
            first.begin(head);
        }
        first.end([2].into_iter(), || Some(1));
        let mut second = list(&region);
        assert_eq!(second.recover(1), [5, 7, 0]);
        second.begin(1);
        assert_eq!(list(&region).recover(1), [5, 7, 0, 1]);
        assert!(region.queue(0).unwrap().recover(0).is_empty());
        // A new ring, whose index starts over, has nothing in flight from the old ring's last batch.
        let mut third = list(&region);
        third.end([5, 7, 0, 1].into_iter(), || Some(5));
        assert!(list(&region).recover(0).is_empty());
    }

    /// Takes and completes requests in batches, is killed after `stores` stores, and returns what the driver would then
    /// have seen: the heads taken from the available ring in order, those in the used ring, and whether it was killed.
    fn run_and_die(region: &Arc<Region>, stores: usize) -> (Vec<u16>, Vec<u16>, bool) {
        let mut list = list(region);
        list.recover(0);
        list.stores_left.set(stores);
        let (mut taken, mut used) = (Vec::new(), Vec::new());
        let mut open = VecDeque::new();
        let mut free: VecDeque<u16> = (0..SIZE).collect();
        for round in 0..6_usize {
            for _ in 0..3 {
                let Some(head) = free.pop_front() else { break };
                list.begin(head);
                taken.push(head);
                open.push_back(head);
            }
            if round % 2 == 1 {
                open.rotate_left(1);
            }
            let batch: Vec<u16> = open.drain(..open.len().min(round % 4 + 1)).collect();
            list.end(batch.iter().copied(), || {
                used.extend(&batch);
                Some(used.len() as u16)
            });
            free.extend(&batch);
        }
        (taken, used, list.stores_left.get() == 0)
    }

    #[test]
    fn a_kill_between_any_two_stores_loses_and_repeats_nothing() {
        for stores in 0.. {
            let region = region();
            let (taken, used, killed) = run_and_die(&region, stores);
            let back = list(&region).recover(used.len() as u16);
            // The driver knows of requests that were taken but not used. Those missing from the list come after those
            // in it: the next server takes them from the available ring again.
            let mut known = taken.clone();
            for head in &used {
                let place = known.iter().position(|known| known == head).unwrap();
                known.remove(place);
            }
            assert!(known.starts_with(&back), "after {stores}: {back:?} of {known:?}");
            let again = list(&region).recover(used.len() as u16);
            assert_eq!(again, back, "to be killed while recovering changes nothing");
            if !killed {
                assert_eq!(back, known);
                assert!(stores > 50);
                break;
            }
        }
    }

    #[test]
    fn a_hostile_list_is_only_so_long() {
        let region = region();
        let list = list(&region);
        for head in 0..SIZE {
            let entry = list.entry(head).unwrap();
            list.mark(entry).store(255, Ordering::Relaxed);
            list.set_half(entry + NEXT, head);
            list.counter(entry).store(u64::MAX, Ordering::Relaxed);
        }
        list.set_half(LAST_BATCH_HEAD, 3);
        list.set_half(USED_INDEX, 77);
        assert_eq!(self::list(&region).recover(0), [0, 1, 2, 4, 5, 6, 7]);
        list.set_half(LAST_BATCH_HEAD, u16::MAX);
        assert_eq!(self::list(&region).recover(9).len(), 7);
        list.set_half(ENTRIES, SIZE + 1);
        assert!(region.queue(1).is_err());
        list.set_half(VERSION, 2);
        assert!(region.queue(1).is_err() && region.queue(2).is_err());
    }

    #[test]
    fn a_list_of_a_wrong_length_is_refused() {
        let file = create(1, 256).unwrap();
        let all = length(1, 256);
        assert!(Region::new(&file, 0, all - 1, 1, 256).is_err());
        assert!(Region::new(&file, 4096, all, 1, 256).is_err());
        assert!(Region::new(&file, 0, u64::MAX, 2, 256).is_err());
        assert!(Region::new(&file, 0, u64::MAX, 1, 2048).is_err());
        assert!(Region::new(&file, 0, all, 0, 256).is_err());
    }
}
