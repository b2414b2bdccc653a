//! Reading a disk's contents.

use crate::content::{Content, PAGE};
use crate::guest::{Look, SECTOR, sample};
use isobath_disk::BlockDevice;
use isobath_storage::IoBuf;
use std::ops::Range;

/// A disk of that many bytes is read as a whole.
pub(crate) const SMALL: u64 = 8 << 20;
/// Bytes that are read at once.
const READ: u64 = 1 << 20;
/// Of a run of data longer than that, the ends and the middle are read, besides `interest`: nobody writes so much,
/// so that it is space that was allocated in advance.
const LONG_RUN: u64 = 64 << 20;

/// Reads a whole disk; for a large one, the parts with data and `interest`.
///
/// # Errors
/// The disk's.
pub(crate) async fn look(
    disk: &impl BlockDevice,
    interest: &[Range<u64>],
) -> isobath_disk::Result<Look> {
    let size = disk.size();
    if size <= SMALL {
        let bytes = disk.read(0, IoBuf::zeroed(size as usize)).await?;
        return Ok(Look::whole(&bytes));
    }
    let mut parts: Vec<Range<u64>> = interest.to_vec();
    let mut at = 0;
    while at < size {
        for run in disk.block_status(at, size - at, 1024).await? {
            if !run.zero {
                sample(at..at + run.length, LONG_RUN, &mut parts);
            }
            at += run.length;
        }
    }
    let mut look = Look { content: Content::zeroes(size), parts: merged(parts, size) };
    for part in look.parts.clone() {
        let mut at = part.start;
        while at < part.end {
            let next = part.end.min(at + READ);
            let bytes = disk.read(at, IoBuf::zeroed((next - at) as usize)).await?;
            for (page, bytes) in bytes.chunks(PAGE as usize).enumerate() {
                if *bytes != [0; PAGE as usize][..bytes.len()] {
                    look.content.write(at + page as u64 * PAGE, bytes);
                }
            }
            at = next;
        }
    }
    Ok(look)
}

/// The contents of a raw image that is a disk of `size` bytes, and begins with `content`: what [`look`] would read.
pub(crate) fn look_raw(content: &Content, size: u64, interest: &[Range<u64>]) -> Look {
    let mut content = content.clone();
    content.set_len(size);
    let parts = if size <= SMALL {
        std::iter::once(0..size).collect()
    } else {
        merged(interest.iter().cloned().chain(content.data()).collect(), size)
    };
    Look { content, parts }
}

/// The ranges, sorted, merged and extended to whole sectors, of a disk of `size` bytes.
fn merged(mut parts: Vec<Range<u64>>, size: u64) -> Vec<Range<u64>> {
    for part in &mut parts {
        *part = part.start / SECTOR * SECTOR..part.end.next_multiple_of(SECTOR).min(size);
    }
    parts.retain(|part| !part.is_empty());
    parts.sort_by_key(|part| part.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for part in parts {
        match merged.last_mut() {
            Some(last) if part.start <= last.end => last.end = last.end.max(part.end),
            _ => merged.push(part),
        }
    }
    merged
}
