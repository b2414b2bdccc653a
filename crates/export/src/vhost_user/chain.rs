//! Descriptor chains: the memory of a request.

use super::memory::Memory;
use super::ring::{DESCRIPTOR, Descriptor, INDIRECT, MAX_SIZE, NEXT, Ring, WRITE};
use std::ptr::NonNull;

/// Guest memory that is contiguous in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) start: NonNull<u8>,
    pub(crate) length: usize,
}

/// The most pieces of a chain's memory in either direction. A descriptor has one for each region of the guest's memory
/// that it touches: seldom more than one, but the peer decides on the regions.
const MOST_PIECES: usize = 2 * MAX_SIZE as usize;

/// An error in a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ChainError {
    #[error("the descriptor chain is too long or contains a loop")]
    TooLong,
    #[error("the chain refers to descriptor {0}, which does not exist")]
    NoDescriptor(u16),
    #[error("an indirect descriptor table is not allowed here")]
    Indirect,
    #[error("the indirect table is outside the guest's memory or has an invalid length")]
    Table,
    #[error("a buffer is outside the guest's memory")]
    Outside,
    #[error("the chain's buffers are in more than {MOST_PIECES} pieces")]
    Pieces,
    #[error("a device-readable descriptor follows a device-writable one")]
    Order,
    #[error("the request is shorter than its header")]
    Short,
}

/// The memory of a chain. The lists are reused for the next chain.
#[derive(Default)]
pub(crate) struct Chain {
    /// The device-readable memory, in order, with adjacent pieces merged.
    pub(crate) readable: Vec<Segment>,
    /// The device-writable memory.
    pub(crate) writable: Vec<Segment>,
    /// Why the request must fail; its status byte may still be written.
    pub(crate) fault: Option<ChainError>,
}

impl Chain {
    /// Follows the chain that starts at `head`. Each descriptor is read once. Errors are stored in `fault`; if the
    /// chain could not be followed to its end, there is no writable memory.
    pub(crate) fn follow(&mut self, ring: &Ring, head: u16) {
        self.readable.clear();
        self.writable.clear();
        self.fault = None;
        if let Err(error) = self.walk(ring, head) {
            self.writable.clear();
            self.fault = Some(error);
        }
    }

    fn walk(&mut self, ring: &Ring, head: u16) -> Result<(), ChainError> {
        let memory = ring.memory();
        let mut index = head;
        for _ in 0..ring.size() {
            let descriptor = ring.descriptor(index).ok_or(ChainError::NoDescriptor(index))?;
            if descriptor.flags & INDIRECT == 0 {
                self.add(memory, descriptor)?;
            } else {
                // The table ends the chain (virtio 1.2, 2.7.5.3.1).
                return if descriptor.flags & NEXT == 0 {
                    self.walk_table(memory, descriptor)
                } else {
                    Err(ChainError::Indirect)
                };
            }
            if descriptor.flags & NEXT == 0 {
                return Ok(());
            }
            index = descriptor.next;
        }
        Err(ChainError::TooLong)
    }

    fn walk_table(&mut self, memory: &Memory, table: Descriptor) -> Result<(), ChainError> {
        let length = table.length as usize;
        let count = length / DESCRIPTOR;
        if count == 0 || !length.is_multiple_of(DESCRIPTOR) || count > usize::from(MAX_SIZE) {
            return Err(ChainError::Table);
        }
        let start = memory.guest_piece(table.address, length).ok_or(ChainError::Table)?;
        let mut index = 0;
        for _ in 0..count {
            if usize::from(index) >= count {
                return Err(ChainError::NoDescriptor(index));
            }
            // SAFETY: the table has `count` descriptors in mapped memory.
            let descriptor =
                unsafe { Descriptor::read(start.add(DESCRIPTOR * usize::from(index))) };
            if descriptor.flags & INDIRECT != 0 {
                return Err(ChainError::Indirect);
            }
            self.add(memory, descriptor)?;
            if descriptor.flags & NEXT == 0 {
                return Ok(());
            }
            index = descriptor.next;
        }
        Err(ChainError::TooLong)
    }

    /// Adds a descriptor's memory.
    fn add(&mut self, memory: &Memory, descriptor: Descriptor) -> Result<(), ChainError> {
        let list = if descriptor.flags & WRITE != 0 {
            &mut self.writable
        } else if self.writable.is_empty() {
            &mut self.readable
        } else {
            return Err(ChainError::Order);
        };
        let (mut address, mut left) = (descriptor.address, descriptor.length as usize);
        while left > 0 {
            let Some((start, rest)) = memory.guest(address) else {
                // The memory so far is no longer needed; a status byte may still follow.
                list.clear();
                self.fault = Some(ChainError::Outside);
                return Ok(());
            };
            let length = left.min(rest);
            push(list, Segment { start, length });
            if list.len() > MOST_PIECES {
                list.clear();
                self.fault = Some(ChainError::Pieces);
                return Ok(());
            }
            address = address.wrapping_add(length as u64);
            left -= length;
        }
        Ok(())
    }

    /// Takes the status byte: the last device-writable byte.
    pub(crate) fn take_status(&mut self) -> Option<NonNull<u8>> {
        let last = self.writable.last_mut()?;
        last.length -= 1;
        // SAFETY: a segment has at least one byte, of which this is the last.
        let status = unsafe { last.start.add(last.length) };
        if last.length == 0 {
            self.writable.pop();
        }
        Some(status)
    }

    /// Copies and removes the first `N` device-readable bytes.
    pub(crate) fn take_header<const N: usize>(&mut self) -> Option<[u8; N]> {
        let mut header = [0; N];
        let (mut filled, mut used) = (0, 0);
        for segment in &mut self.readable {
            let part = header.get_mut(filled..).unwrap_or_default();
            let length = part.len().min(segment.length);
            for (byte, at) in part.iter_mut().zip(0..length) {
                // SAFETY: within the segment.
                *byte = unsafe { segment.start.add(at).read_volatile() };
            }
            filled += length;
            // SAFETY: `length` is at most the segment's.
            segment.start = unsafe { segment.start.add(length) };
            segment.length -= length;
            if segment.length > 0 {
                break;
            }
            used += 1;
        }
        self.readable.drain(..used);
        (filled == N).then_some(header)
    }
}

fn push(list: &mut Vec<Segment>, new: Segment) {
    if let Some(last) = list.last_mut() {
        // SAFETY: the end of a segment is within its memory or just after it.
        let end = unsafe { last.start.add(last.length) };
        if end == new.start {
            last.length += new.length;
            return;
        }
    }
    list.push(new);
}

/// The total length of the segments in bytes.
pub(crate) fn total(segments: &[Segment]) -> usize {
    segments.iter().fold(0, |sum: usize, segment| sum.saturating_add(segment.length))
}
