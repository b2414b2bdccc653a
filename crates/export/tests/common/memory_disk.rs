//! A disk in memory, for tests of what serves it.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::expect_used)]

use isobath_disk::clock::SystemClock;
use isobath_disk::pausing::Pausing;
use isobath_disk::throttle::{Direction, Drained, Group, Limits, Throttle};
use isobath_disk::{BlockDevice, BlockStatus, DiskError, Result, ZeroFlags};
use isobath_storage::{IoBuf, Operation, StorageError};
use parking_lot::Mutex;
use std::future::poll_fn;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Poll, Waker};

/// Bytes for which the disk keeps one state.
pub const BLOCK: u64 = 4096;

/// What a block holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Block {
    /// Nothing, in any layer.
    Absent,
    /// Zeroes, in a layer.
    Zero(u32),
    /// Data, in a layer.
    Data(u32),
}

#[derive(Debug)]
pub struct Content {
    bytes: Vec<u8>,
    blocks: Vec<Block>,
}

/// A disk whose content and history can be looked at.
pub struct MemoryDisk {
    pub content: Mutex<Content>,
    pub read_only: bool,
    /// Zeroing is never fast.
    pub slow_zeroes: bool,
    /// Requests that touch this byte fail with this error number.
    pub broken: Option<(u64, i32)>,
    /// Flushes fail.
    pub broken_flush: bool,
    /// While it is some, requests of this direction fail with this error number.
    pub failing: Mutex<Option<(Direction, i32)>>,
    pub pausing: Pausing,
    /// How often a request gives way before it is carried out.
    pub delay: usize,
    /// No request is carried out while this is some: those that wait for it.
    pub held: Mutex<Option<Vec<Waker>>>,
    pub flushes: AtomicUsize,
    /// Bytes of the buffers that were read into.
    pub read: AtomicUsize,
    /// Requests under way.
    pub running: AtomicUsize,
    /// The most requests that were under way at once.
    pub most_running: AtomicUsize,
    /// Bytes of the ranges of requests under way.
    pub in_flight: AtomicUsize,
    /// The most bytes of a single read or write.
    pub largest: AtomicUsize,
    pub throttle: Throttle,
    /// What requests asked the limits for.
    pub admitted: Mutex<Vec<(Direction, u64)>>,
}

struct Running<'a>(&'a MemoryDisk, usize);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::Relaxed);
        self.0.in_flight.fetch_sub(self.1, Ordering::Relaxed);
    }
}

impl MemoryDisk {
    pub fn new(size: usize) -> Self {
        let blocks = vec![Block::Absent; size.div_ceil(BLOCK as usize)];
        Self {
            content: Mutex::new(Content { bytes: vec![0; size], blocks }),
            read_only: false,
            slow_zeroes: false,
            broken: None,
            broken_flush: false,
            failing: Mutex::default(),
            pausing: Pausing::new(Arc::<SystemClock>::default()),
            delay: 0,
            held: Mutex::new(None),
            flushes: AtomicUsize::new(0),
            read: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            most_running: AtomicUsize::new(0),
            in_flight: AtomicUsize::new(0),
            largest: AtomicUsize::new(0),
            throttle: Throttle::default(),
            admitted: Mutex::default(),
        }
    }

    /// Fills a range with a byte, as data of a layer.
    #[must_use]
    pub fn with(self, offset: usize, length: usize, byte: u8, layer: u32) -> Self {
        self.update(offset as u64, length as u64, Block::Data(layer), |bytes| bytes.fill(byte));
        self
    }

    /// From now on one request passes, and the next ones would wait for a second for each of its bytes.
    pub fn limit(&self) {
        let mut limits = Limits::default();
        assert!(limits.set_by_name("bps-total", 1));
        let group = Arc::new(Group::new("slow", Arc::<SystemClock>::default()));
        group.set_limits(&limits);
        self.throttle.set_group(Some(group));
    }

    /// Carries out what was held, and holds nothing any more.
    pub fn release(&self) {
        let waiting = self.held.lock().take();
        waiting.into_iter().flatten().for_each(Waker::wake);
    }

    /// Changes all of it.
    pub fn overwrite(&self, write: impl FnOnce(&mut [u8])) {
        let size = self.content.lock().bytes.len();
        self.update(0, size as u64, Block::Data(0), write);
    }

    pub fn bytes(&self, offset: usize, length: usize) -> Vec<u8> {
        self.content.lock().bytes[offset..offset + length].to_vec()
    }

    fn update(&self, offset: u64, length: u64, state: Block, write: impl FnOnce(&mut [u8])) {
        let mut content = self.content.lock();
        let end = offset + length;
        write(&mut content.bytes[offset as usize..end as usize]);
        // A block that is only partly zeroed or discarded still counts as data.
        let whole = matches!(state, Block::Data(_));
        let (first, last) = if whole {
            (offset / BLOCK, end.div_ceil(BLOCK))
        } else {
            (
                offset.div_ceil(BLOCK),
                if end == content.bytes.len() as u64 { end.div_ceil(BLOCK) } else { end / BLOCK },
            )
        };
        for block in first..last {
            content.blocks[block as usize] = state;
        }
    }

    /// Fails as the storage would.
    fn ask_storage(&self, direction: Direction) -> Result<()> {
        match *self.failing.lock() {
            Some((of, errno)) if of == direction => {
                let error = std::io::Error::from_raw_os_error(errno);
                Err(StorageError::new(Operation::Write, Path::new("full.img"), error).into())
            }
            _ => Ok(()),
        }
    }

    async fn enter(&self, offset: u64, length: u64) -> Result<Running<'_>> {
        let running = self.running.fetch_add(1, Ordering::Relaxed) + 1;
        self.most_running.fetch_max(running, Ordering::Relaxed);
        self.in_flight.fetch_add(length as usize, Ordering::Relaxed);
        let running = Running(self, length as usize);
        let mut left = self.delay;
        poll_fn(|cx| {
            if let Some(waiting) = &mut *self.held.lock() {
                waiting.push(cx.waker().clone());
                return Poll::Pending;
            }
            if left == 0 {
                return Poll::Ready(());
            }
            left -= 1;
            cx.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
        let size = self.size();
        if offset.checked_add(length).is_none_or(|end| end > size) {
            return Err(DiskError::OutOfRange { offset, length, size });
        }
        match self.broken {
            Some((byte, errno)) if (offset..offset + length).contains(&byte) => {
                let error = std::io::Error::from_raw_os_error(errno);
                let name = Path::new("broken.img");
                Err(StorageError::at(Operation::Read, name, offset, length, error).into())
            }
            _ => Ok(running),
        }
    }
}

impl BlockDevice for MemoryDisk {
    fn size(&self) -> u64 {
        self.content.lock().bytes.len() as u64
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn preferred_block(&self) -> u32 {
        BLOCK as u32
    }

    async fn admit(&self, direction: Direction, bytes: u64) {
        self.admitted.lock().push((direction, bytes));
        self.throttle.admit(direction, bytes).await;
    }

    fn drain(&self) -> Drained {
        self.throttle.drain()
    }

    fn pausing(&self) -> Option<&Pausing> {
        Some(&self.pausing)
    }

    async fn read(&self, offset: u64, mut buf: IoBuf) -> Result<IoBuf> {
        self.largest.fetch_max(buf.len(), Ordering::Relaxed);
        let _running = self.enter(offset, buf.len() as u64).await?;
        self.ask_storage(Direction::Read)?;
        let content = self.content.lock();
        let range = offset as usize..offset as usize + buf.len();
        buf.copy_from_slice(&content.bytes[range]);
        self.read.fetch_add(buf.len(), Ordering::Relaxed);
        Ok(buf)
    }

    async fn write(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        self.largest.fetch_max(buf.len(), Ordering::Relaxed);
        let _running = self.enter(offset, buf.len() as u64).await?;
        self.ask_storage(Direction::Write)?;
        let length = buf.len() as u64;
        self.update(offset, length, Block::Data(0), |bytes| bytes.copy_from_slice(&buf));
        Ok(buf)
    }

    async fn write_zeroes(&self, offset: u64, length: u64, flags: ZeroFlags) -> Result<()> {
        let _running = self.enter(offset, length).await?;
        self.ask_storage(Direction::Write)?;
        if flags.only_fast && self.slow_zeroes {
            return Err(DiskError::Unsupported("zeroing is not fast here".into()));
        }
        let state = if flags.may_unmap { Block::Zero(0) } else { Block::Data(0) };
        self.update(offset, length, state, |bytes| bytes.fill(0));
        Ok(())
    }

    async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        let _running = self.enter(offset, length).await?;
        self.ask_storage(Direction::Write)?;
        self.update(offset, length, Block::Zero(0), |bytes| bytes.fill(0));
        Ok(())
    }

    async fn flush(&self) -> Result<()> {
        let _running = self.enter(0, 0).await?;
        self.ask_storage(Direction::Write)?;
        if self.broken_flush {
            let error = std::io::Error::from_raw_os_error(libc::EIO);
            let name = Path::new("broken.img");
            return Err(StorageError::new(Operation::Flush, name, error).into());
        }
        self.flushes.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    async fn block_status(
        &self,
        offset: u64,
        length: u64,
        max_runs: usize,
    ) -> Result<Vec<BlockStatus>> {
        let _running = self.enter(offset, length).await?;
        let content = self.content.lock();
        let mut runs: Vec<BlockStatus> = Vec::new();
        let (mut at, end) = (offset, offset + length);
        while at < end && runs.len() < max_runs {
            let block = content.blocks[(at / BLOCK) as usize];
            let next = ((at / BLOCK + 1) * BLOCK).min(end);
            let (allocated, zero, depth) = match block {
                Block::Absent => (false, true, 9),
                Block::Zero(layer) => (true, true, layer),
                Block::Data(layer) => (true, false, layer),
            };
            let length = next - at;
            runs.push(BlockStatus {
                length,
                allocated,
                zero,
                compressed: false,
                depth,
                host: None,
            });
            at = next;
        }
        Ok(runs)
    }
}
