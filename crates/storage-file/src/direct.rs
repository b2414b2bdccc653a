//! `O_DIRECT`: transfers in whole blocks, from aligned memory.
//!
//! Unaligned requests go through an aligned copy. A write that covers part of a block first reads the block and then
//! writes all of it, while no other write to it runs. A write that ends in a partial block past the end of the file
//! extends the file to whole blocks and then truncates it; `len` and other writes there wait meanwhile, but a crash, or
//! a future dropped in between, can leave zeroes up to the end of the block.

use super::ranges::{Guard, Ranges};
use super::sys;
use super::transfer::{self, Target};
use isobath_ring::Lease;
use isobath_storage::IoBuf;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The most bytes copied at a time, so that memory stays bounded.
const CHUNK: u64 = 1 << 20;

/// How a file opened with `O_DIRECT` is used.
pub(super) struct Direct {
    /// Alignment of memory in bytes, at most that of an [`IoBuf`].
    memory: u64,
    /// Alignment of offsets and lengths in bytes, a power of two.
    block: u64,
    /// Writes past the end extend the file.
    extends: bool,
    ranges: Arc<Ranges>,
}

impl Direct {
    pub(super) fn new(memory: u64, block: u64, extends: bool) -> io::Result<Self> {
        let fits = |align: u64| align.is_power_of_two() && align <= CHUNK;
        if !fits(block) || !fits(memory) || memory > isobath_buf::ALIGNMENT as u64 {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                format!(
                    "O_DIRECT requires memory aligned to {memory} and blocks of {block} bytes \
                     here, which is not supported; use the page cache (--cache writeback)"
                ),
            ));
        }
        Ok(Self { memory, block, extends, ranges: Arc::default() })
    }

    fn down(&self, offset: u64) -> u64 {
        offset & !(self.block - 1)
    }

    /// Offsets are at most `i64::MAX`, so this does not overflow.
    fn up(&self, offset: u64) -> u64 {
        self.down(offset + self.block - 1)
    }

    fn in_blocks(&self, offset: u64) -> bool {
        self.down(offset) == offset
    }

    fn is_aligned(&self, buf: &IoBuf) -> bool {
        (buf.as_ptr() as u64).is_multiple_of(self.memory) && self.in_blocks(buf.len() as u64)
    }

    /// Where the last block of a file of this length begins, which is not empty.
    pub(super) fn last_block(&self, length: u64) -> u64 {
        self.down(length - 1)
    }

    /// Excludes partial writes to the blocks of `[start, end)`.
    pub(super) async fn share(&self, lease: &Lease, start: u64, end: u64) -> Arc<Guard> {
        self.ranges.hold(lease, self.down(start), self.up(end), false).await
    }

    /// Excludes all changes of the blocks from `start` on.
    pub(super) async fn hold_from(&self, lease: &Lease, start: u64) -> Arc<Guard> {
        self.ranges.hold(lease, self.down(start), u64::MAX, true).await
    }

    /// Waits until no write is about to truncate the file.
    pub(super) async fn settled(&self, lease: &Lease) -> Arc<Guard> {
        self.ranges.hold(lease, u64::MAX - 1, u64::MAX, false).await
    }

    /// Reads until the buffer is full or the file ends; returns how much was read.
    pub(super) async fn read(
        &self,
        target: &Target,
        offset: u64,
        buf: IoBuf,
    ) -> (io::Result<usize>, IoBuf) {
        if self.in_blocks(offset) && self.is_aligned(&buf) {
            return transfer::read(target, offset, buf, 0, self.block).await;
        }
        Box::pin(self.read_copy(target, offset, buf)).await
    }

    /// Reads whole blocks and copies the requested part.
    async fn read_copy(
        &self,
        target: &Target,
        offset: u64,
        mut buf: IoBuf,
    ) -> (io::Result<usize>, IoBuf) {
        let end = offset + buf.len() as u64;
        let mut at = offset;
        while at < end {
            let start = self.down(at);
            let stop = self.up(end).min(start + CHUNK);
            let copy = IoBuf::zeroed((stop - start) as usize);
            let (result, copy) = transfer::read(target, start, copy, 0, self.block).await;
            let count = match result {
                Ok(count) => count as u64,
                Err(error) => return (Err(error), buf),
            };
            let have = (start + count).min(end);
            if have > at {
                buf[(at - offset) as usize..(have - offset) as usize]
                    .copy_from_slice(&copy[(at - start) as usize..(have - start) as usize]);
                at = have;
            }
            if count < stop - start {
                break;
            }
        }
        (Ok((at - offset) as usize), buf)
    }

    /// Writes the whole buffer.
    pub(super) async fn write(
        &self,
        target: &Target,
        offset: u64,
        buf: IoBuf,
    ) -> (io::Result<()>, IoBuf) {
        if self.in_blocks(offset) && self.is_aligned(&buf) {
            let guard = self.share(&target.lease, offset, offset + buf.len() as u64).await;
            let target = target.leased(guard);
            return transfer::write(&target, offset, buf, None).await;
        }
        let result = Box::pin(self.write_copy(target, offset, std::slice::from_ref(&buf))).await;
        (result, buf)
    }

    /// Writes all buffers, one after another.
    pub(super) async fn write_vectored(
        &self,
        target: &Target,
        offset: u64,
        bufs: Vec<IoBuf>,
    ) -> (io::Result<()>, Vec<IoBuf>) {
        if self.in_blocks(offset) && bufs.iter().all(|buf| self.is_aligned(buf)) {
            let length: u64 = bufs.iter().map(|buf| buf.len() as u64).sum();
            let guard = self.share(&target.lease, offset, offset + length).await;
            let target = target.leased(guard);
            return transfer::write_vectored(&target, offset, bufs, None).await;
        }
        let result = Box::pin(self.write_copy(target, offset, &bufs)).await;
        (result, bufs)
    }

    /// Writes copies of the buffers, in whole blocks.
    async fn write_copy(&self, target: &Target, offset: u64, bufs: &[IoBuf]) -> io::Result<()> {
        let end = offset + bufs.iter().map(|buf| buf.len() as u64).sum::<u64>();
        let (first, last) = (self.down(offset), self.up(end));
        let partial = first < offset || end < last;
        let mut guard = self.ranges.hold(&target.lease, first, last, partial).await;
        let mut cut = None;
        if self.extends && end < last && last > length(&target.file)? {
            drop(guard);
            guard = self.hold_from(&target.lease, first).await;
            let length = length(&target.file)?;
            cut = (last > length).then_some(length);
        }
        let target = target.leased(guard.clone());
        let mut source = Source { bufs, skip: 0 };
        let mut at = first;
        let mut result = Ok(());
        while at < last {
            let stop = last.min(at + CHUNK);
            result = self.write_chunk(&target, (at, stop), (offset, end), &mut source).await;
            if result.is_err() {
                break;
            }
            at = stop;
        }
        if let Some(length) = cut {
            sys::ftruncate(&target.file, length.max(at.min(end)))?;
        }
        drop(guard);
        result
    }

    /// Writes the blocks of `[start, stop)`, in which `[offset, end)` comes from `source`.
    async fn write_chunk(
        &self,
        target: &Target,
        (start, stop): (u64, u64),
        (offset, end): (u64, u64),
        source: &mut Source<'_>,
    ) -> io::Result<()> {
        let mut copy = IoBuf::zeroed((stop - start) as usize);
        let tail = stop - self.block;
        if start < offset {
            self.read_block(target, start, &mut copy[..self.block as usize]).await?;
        }
        if end < stop && !(tail == start && start < offset) {
            self.read_block(target, tail, &mut copy[(tail - start) as usize..]).await?;
        }
        let (from, to) = (offset.max(start), end.min(stop));
        source.copy(&mut copy[(from - start) as usize..(to - start) as usize]);
        transfer::write(target, start, copy, None).await.0
    }

    async fn read_block(&self, target: &Target, at: u64, into: &mut [u8]) -> io::Result<()> {
        let block = IoBuf::zeroed(self.block as usize);
        let (result, block) = transfer::read(target, at, block, 0, self.block).await;
        result?;
        into.copy_from_slice(&block);
        Ok(())
    }
}

fn length(file: &OwnedFd) -> io::Result<u64> {
    Ok(sys::stat(file)?.st_size as u64)
}

/// Bytes of several buffers, taken in order.
struct Source<'a> {
    bufs: &'a [IoBuf],
    /// Bytes of the first buffer that were already taken.
    skip: usize,
}

impl Source<'_> {
    fn copy(&mut self, mut into: &mut [u8]) {
        while !into.is_empty()
            && let Some((first, rest)) = self.bufs.split_first()
        {
            let part = &first[self.skip..];
            let count = part.len().min(into.len());
            let (now, later) = into.split_at_mut(count);
            now.copy_from_slice(&part[..count]);
            into = later;
            self.skip += count;
            if self.skip == first.len() {
                (self.bufs, self.skip) = (rest, 0);
            }
        }
    }
}
