//! A split virtqueue, from the device's side (virtio 1.2, section 2.7).
//!
//! The driver is not trusted: every value is read once, and everything derived from it stays within the memory that was
//! checked when the ring was set up.

use super::memory::Memory;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering, fence};

/// `VRING_DESC_F_NEXT`, `VRING_DESC_F_WRITE` and `VRING_DESC_F_INDIRECT`.
pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;
/// `VRING_AVAIL_F_NO_INTERRUPT` and `VRING_USED_F_NO_NOTIFY`.
const QUIET: u16 = 1;

/// Size of a descriptor in bytes.
pub(crate) const DESCRIPTOR: usize = 16;
/// Maximum size of a queue, and maximum number of descriptors in an indirect table.
pub(crate) const MAX_SIZE: u16 = 1024;

/// A copy of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Descriptor {
    pub(crate) address: u64,
    pub(crate) length: u32,
    pub(crate) flags: u16,
    pub(crate) next: u16,
}

impl Descriptor {
    /// Copies the descriptor at `place`.
    ///
    /// # Safety
    /// 16 bytes at `place` are readable.
    pub(crate) unsafe fn read(place: NonNull<u8>) -> Self {
        let mut bytes = [0; DESCRIPTOR];
        if place.cast::<u64>().is_aligned() {
            let words = place.cast::<u64>();
            let (low, high) = bytes.split_at_mut(8);
            // SAFETY: both words are readable and aligned. Each is read only once, even if it changes concurrently.
            unsafe {
                low.copy_from_slice(&words.read_volatile().to_ne_bytes());
                high.copy_from_slice(&words.add(1).read_volatile().to_ne_bytes());
            }
        } else {
            for (at, byte) in bytes.iter_mut().enumerate() {
                // SAFETY: within the 16 bytes.
                *byte = unsafe { place.add(at).read_volatile() };
            }
        }
        let value = u128::from_le_bytes(bytes);
        Self {
            address: value as u64,
            length: (value >> 64) as u32,
            flags: (value >> 96) as u16,
            next: (value >> 112) as u16,
        }
    }
}

/// Where a ring's parts are, as addresses in the client's process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Addresses {
    pub(crate) descriptors: u64,
    pub(crate) available: u64,
    pub(crate) used: u64,
}

/// Why a ring cannot be used, or can no longer be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RingError {
    #[error("the ring size {0} is not a power of two up to {MAX_SIZE}")]
    Size(u32),
    #[error("the {0} is outside the guest's memory or not aligned")]
    Place(&'static str),
    #[error("the available index {available} is too far ahead of the next entry {next}")]
    TooFar { available: u16, next: u16 },
    #[error("descriptor {0} does not exist")]
    NoDescriptor(u16),
    #[error("the list of requests in flight does not match the ring: {0}")]
    Inflight(&'static str),
}

/// A ring in a guest's memory.
pub(crate) struct Ring {
    size: u16,
    descriptors: NonNull<u8>,
    available: NonNull<u8>,
    used: NonNull<u8>,
    /// Index of the next available entry to take.
    next_available: u16,
    /// The available index last read.
    seen: u16,
    next_used: u16,
    event_index: bool,
    /// The used index when the driver was last notified; `None` if it never was.
    notified: Option<u16>,
    memory: Arc<Memory>,
}

// SAFETY: the pointers are into `memory`, which any thread may use.
unsafe impl Send for Ring {}

/// Length in bytes of the available ring and of the used ring, each with its event field.
fn lengths(size: u16) -> (usize, usize) {
    let size = usize::from(size);
    (6 + 2 * size, 6 + 8 * size)
}

impl Ring {
    /// Locates a ring's parts. It continues with available entry `base`; the used index is the one in memory.
    ///
    /// # Errors
    /// The size is not a power of two up to [`MAX_SIZE`], or a part is not in memory or not aligned.
    pub(crate) fn new(
        memory: Arc<Memory>,
        size: u32,
        at: &Addresses,
        base: u16,
        event_index: bool,
    ) -> Result<Self, RingError> {
        let valid =
            u16::try_from(size).ok().filter(|size| size.is_power_of_two() && *size <= MAX_SIZE);
        let size = valid.ok_or(RingError::Size(size))?;
        let (available, used) = lengths(size);
        let place = |name, address, length, align: usize| {
            let start: Option<NonNull<u8>> = memory.user_piece(address, length);
            let aligned = start.filter(|start| (start.as_ptr() as usize).is_multiple_of(align));
            aligned.ok_or(RingError::Place(name))
        };
        let descriptors =
            place("descriptor table", at.descriptors, DESCRIPTOR * usize::from(size), 16)?;
        let available = place("available ring", at.available, available, 2)?;
        let used = place("used ring", at.used, used, 4)?;
        let mut ring = Self {
            size,
            descriptors,
            available,
            used,
            next_available: base,
            seen: base,
            next_used: 0,
            event_index,
            notified: None,
            memory,
        };
        ring.next_used = ring.used_index();
        Ok(ring)
    }

    pub(crate) fn size(&self) -> u16 {
        self.size
    }

    pub(crate) fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Index of the next available entry.
    pub(crate) fn next_available(&self) -> u16 {
        self.next_available
    }

    /// Continues with another available entry.
    pub(crate) fn set_next_available(&mut self, next: u16) {
        (self.next_available, self.seen) = (next, next);
    }

    /// Word `index` of the available ring: flags, index, entries, and the used event.
    fn available(&self, index: usize) -> &AtomicU16 {
        debug_assert!(2 * index + 2 <= lengths(self.size).0);
        // SAFETY: within the ring, which is aligned and mapped as long as `self`.
        unsafe { AtomicU16::from_ptr(self.available.cast::<u16>().as_ptr().add(index)) }
    }

    /// The half word at `offset` of the used ring.
    fn used(&self, offset: usize) -> &AtomicU16 {
        debug_assert!(offset + 2 <= lengths(self.size).1);
        // SAFETY: as above; every offset used is even.
        unsafe { AtomicU16::from_ptr(self.used.as_ptr().add(offset).cast()) }
    }

    /// The used index in memory.
    pub(crate) fn used_index(&self) -> u16 {
        u16::from_le(self.used(2).load(Ordering::Relaxed))
    }

    /// Takes the next available entry: the head of a chain.
    ///
    /// # Errors
    /// The driver's index is ahead by more than the number of entries, or the entry is not a descriptor.
    pub(crate) fn take(&mut self) -> Result<Option<u16>, RingError> {
        if self.next_available == self.seen && !self.look()? {
            return Ok(None);
        }
        let entry = usize::from(self.next_available & (self.size - 1));
        let head = u16::from_le(self.available(2 + entry).load(Ordering::Relaxed));
        if head >= self.size {
            return Err(RingError::NoDescriptor(head));
        }
        self.next_available = self.next_available.wrapping_add(1);
        Ok(Some(head))
    }

    /// Whether there are available entries, according to the driver's current index.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    pub(crate) fn look(&mut self) -> Result<bool, RingError> {
        let available = u16::from_le(self.available(1).load(Ordering::Acquire));
        if available.wrapping_sub(self.next_available) > self.size {
            return Err(RingError::TooFar { available, next: self.next_available });
        }
        self.seen = available;
        Ok(available != self.next_available)
    }

    /// The available entries that it knows of, and that were not taken yet.
    pub(crate) fn left(&self) -> usize {
        usize::from(self.seen.wrapping_sub(self.next_available))
    }

    /// The descriptor at an index.
    pub(crate) fn descriptor(&self, index: u16) -> Option<Descriptor> {
        let offset = DESCRIPTOR * usize::from(index);
        // SAFETY: the table has `size` descriptors and is mapped as long as `self`.
        (index < self.size).then(|| unsafe { Descriptor::read(self.descriptors.add(offset)) })
    }

    /// Puts a chain into the used ring; the driver sees it after [`publish`](Self::publish).
    pub(crate) fn put(&mut self, head: u16, written: u32) {
        let entry = usize::from(self.next_used & (self.size - 1));
        // SAFETY: entry `entry` of `size` is 8 bytes at 4 + 8 * entry, and the ring is aligned to 4.
        let (id, length) = unsafe {
            let place = self.used.add(4 + 8 * entry).cast::<u32>();
            (AtomicU32::from_ptr(place.as_ptr()), AtomicU32::from_ptr(place.add(1).as_ptr()))
        };
        id.store(u32::from(head).to_le(), Ordering::Relaxed);
        length.store(written.to_le(), Ordering::Relaxed);
        self.next_used = self.next_used.wrapping_add(1);
    }

    /// Shows the driver the completed chains; returns the used index.
    pub(crate) fn publish(&mut self) -> u16 {
        self.used(2).store(self.next_used.to_le(), Ordering::Release);
        self.next_used
    }

    /// Whether the driver wants to be notified of the chains published since the last notification (2.7.7).
    pub(crate) fn needs_notification(&mut self) -> bool {
        fence(Ordering::SeqCst);
        if !self.event_index {
            return u16::from_le(self.available(0).load(Ordering::Relaxed)) & QUIET == 0;
        }
        let wanted =
            u16::from_le(self.available(2 + usize::from(self.size)).load(Ordering::Relaxed));
        let notified = self.notified.replace(self.next_used);
        notified.is_none_or(|notified| crosses(wanted, self.next_used, notified))
    }

    /// Asks the driver for notifications of new entries, and returns whether there are any already (2.7.10).
    ///
    /// # Errors
    /// As [`take`](Self::take).
    pub(crate) fn listen(&mut self) -> Result<bool, RingError> {
        if self.event_index {
            let event = 4 + 8 * usize::from(self.size);
            self.used(event).store(self.next_available.to_le(), Ordering::Relaxed);
        } else {
            self.used(0).store(0, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        self.look()
    }

    /// Asks the driver not to send notifications. With event indices this happens automatically, until the next
    /// [`listen`](Self::listen).
    pub(crate) fn hush(&mut self) {
        if !self.event_index {
            self.used(0).store(QUIET.to_le(), Ordering::Relaxed);
        }
    }
}

/// Whether going from `old` to `new` passes `event` (virtio 1.2, 2.7.7.1: `vring_need_event`).
fn crosses(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::super::memory::RegionAt;
    use super::*;

    const SIZE: u16 = 8;

    /// Memory with a ring: descriptors at 0, available ring at 0x1000, used ring at 0x2000.
    fn ring(base: u16, event_index: bool) -> (Arc<Memory>, Ring) {
        let file = tempfile::tempfile().unwrap();
        file.set_len(0x4000).unwrap();
        let at = RegionAt { guest: 0, size: 0x4000, user: 0x8000, offset: 0 };
        let memory = Arc::new(Memory::default().with(at, &file).unwrap());
        let at = Addresses { descriptors: 0x8000, available: 0x9000, used: 0xa000 };
        let ring = Ring::new(memory.clone(), u32::from(SIZE), &at, base, event_index).unwrap();
        (memory, ring)
    }

    fn put(memory: &Memory, address: u64, value: u16) {
        let place = memory.guest_piece(address, 2).unwrap();
        // SAFETY: mapped, and nothing else accesses it now.
        unsafe { place.cast::<u16>().write_volatile(value) };
    }

    fn get(memory: &Memory, address: u64) -> u16 {
        let place = memory.guest_piece(address, 2).unwrap();
        // SAFETY: as above.
        unsafe { place.cast::<u16>().read_volatile() }
    }

    #[test]
    fn entries_are_taken_in_order_and_around_the_end() {
        let (memory, mut ring) = ring(0xfffe, false);
        put(&memory, 0x1002, 0xfffe);
        assert_eq!(ring.take(), Ok(None));
        for (entry, head) in [(6, 3), (7, 1), (0, 7)] {
            put(&memory, 0x1004 + 2 * entry, head);
        }
        put(&memory, 0x1002, 1);
        for head in [Some(3), Some(1), Some(7), None] {
            assert_eq!(ring.take(), Ok(head));
        }
        assert_eq!(ring.next_available(), 1);
        for (head, written) in [(7, 1), (1, 513)] {
            ring.put(head, written);
        }
        assert_eq!(get(&memory, 0x2002), 0, "not shown yet");
        ring.publish();
        let words: Vec<_> = (0..10).map(|word| get(&memory, 0x2002 + 2 * word)).collect();
        assert_eq!(words, [2, 7, 0, 1, 0, 1, 0, 513, 0, 0]);
    }

    #[test]
    fn nonsense_is_an_error() {
        let (memory, mut ring) = ring(5, false);
        put(&memory, 0x1002, 5 + SIZE + 1);
        assert_eq!(ring.take(), Err(RingError::TooFar { available: 14, next: 5 }));
        put(&memory, 0x1002, 6);
        put(&memory, 0x1004 + 2 * 5, SIZE);
        assert_eq!(ring.take(), Err(RingError::NoDescriptor(SIZE)));
        assert!(ring.descriptor(SIZE).is_none());
    }

    #[test]
    fn parts_must_be_in_memory_and_aligned() {
        let (memory, _) = ring(0, false);
        let good = Addresses { descriptors: 0x8000, available: 0x9000, used: 0xa000 };
        let new = |size, at: &Addresses| Ring::new(memory.clone(), size, at, 0, true).map(drop);
        assert_eq!(new(256, &good), Ok(()));
        for size in [0, 3, 2048, 1 << 16, u32::MAX] {
            assert_eq!(new(size, &good), Err(RingError::Size(size)));
        }
        for bad in [
            Addresses { descriptors: 0x8008, ..good },
            Addresses { descriptors: 0xbff0, ..good },
            Addresses { available: 0x9001, ..good },
            Addresses { available: 0xbffe, ..good },
            Addresses { used: 0xa002, ..good },
            Addresses { used: 0xc000, ..good },
            Addresses { used: u64::MAX - 3, ..good },
        ] {
            assert!(matches!(new(8, &bad), Err(RingError::Place(_))), "{bad:?}");
        }
    }

    #[test]
    fn flags_say_whether_to_notify() {
        let (memory, mut ring) = ring(0, false);
        assert!(ring.needs_notification());
        put(&memory, 0x1000, 1);
        assert!(!ring.needs_notification());
        ring.hush();
        assert_eq!(get(&memory, 0x2000), 1);
        assert_eq!(ring.listen(), Ok(false));
        assert_eq!(get(&memory, 0x2000), 0);
        put(&memory, 0x1002, 1);
        assert_eq!(ring.listen(), Ok(true));
    }

    #[test]
    fn event_indices_say_when_to_notify() {
        let (memory, mut ring) = ring(0, true);
        let used_event = 0x1004 + 2 * u64::from(SIZE);
        let mut step = |event: u16, count: u16| {
            put(&memory, used_event, event);
            (0..count).for_each(|_| ring.put(0, 0));
            ring.publish();
            ring.needs_notification()
        };
        assert!(step(0, 1), "the first time always");
        assert!(step(1, 1), "1 is passed");
        assert!(!step(4, 2), "up to 4, which 4 does not pass");
        assert!(step(4, 1));
        assert!(step(6, 4));
        assert!(!step(6, 1));
        assert_eq!(ring.listen(), Ok(false));
        assert_eq!(get(&memory, 0x2004 + 8 * u64::from(SIZE)), 0);
        assert!(crosses(0xffff, 0, 0xffff) && !crosses(0, 0, 0xffff));
    }

    #[test]
    fn descriptors_are_read_at_any_address() {
        let bytes: Vec<u8> = (0..33).collect();
        for skip in [0, 1, 7] {
            let place = NonNull::from(&bytes[skip]);
            // SAFETY: 16 bytes follow.
            let read = unsafe { Descriptor::read(place) };
            let le = |from: usize, length: usize| {
                (0..length).map(|at| ((skip + from + at) as u64) << (8 * at)).sum::<u64>()
            };
            let expected = Descriptor {
                address: le(0, 8),
                length: le(8, 4) as u32,
                flags: le(12, 2) as u16,
                next: le(14, 2) as u16,
            };
            assert_eq!(read, expected);
        }
    }
}
