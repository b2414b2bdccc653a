//! The block device that every frontend serves.

use crate::pausing::Pausing;
use crate::throttle::{Direction, Drained};
use isobath_image::{DiskError, Result};
use isobath_storage::IoBuf;
use std::future::{Future, pending, ready};

/// How zeroes may be written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZeroFlags {
    /// The range may be unmapped (NBD: `NBD_CMD_FLAG_NO_HOLE` not set).
    pub may_unmap: bool,
    /// Fail with `ENOTSUP` unless it is faster than writing the zeroes (NBD: `FAST_ZERO`).
    pub only_fast: bool,
}

/// The state of a run of guest bytes (QEMU's block status).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockStatus {
    /// Length of the run in bytes, at least 1.
    pub length: u64,
    /// The run is allocated in some layer of the chain.
    pub allocated: bool,
    /// The run is known to read as zeroes.
    pub zero: bool,
    /// The run is stored compressed.
    pub compressed: bool,
    /// The layer that determines the contents: 0 is the active layer. If nothing is allocated, the chain's length.
    pub depth: u32,
    /// The layer whose file holds plain data, as in `depth`, and the byte offset in the file.
    pub host: Option<(u32, u64)>,
}

/// The interface of a disk for frontends. Offsets and lengths are in bytes, without alignment requirements.
///
/// Requests may run concurrently. Concurrent overlapping writes take effect in some order, each as a whole per cluster;
/// a request issued after another's reply sees its effect.
///
/// Requests do not wait for the disk's limits: a frontend [asks](Self::admit) before each.
pub trait BlockDevice: Send + Sync + 'static {
    /// The disk's size in bytes.
    fn size(&self) -> u64;

    /// Whether writes are refused.
    fn is_read_only(&self) -> bool;

    /// The optimal alignment of requests in bytes (the cluster or subcluster size).
    fn preferred_block(&self) -> u32;

    /// Reads `buf.len()` bytes at `offset`.
    fn read(&self, offset: u64, buf: IoBuf) -> impl Future<Output = Result<IoBuf>>;

    /// Writes `buf` at `offset` and returns the buffer.
    fn write(&self, offset: u64, buf: IoBuf) -> impl Future<Output = Result<IoBuf>>;

    /// Makes a range read as zeroes.
    fn write_zeroes(
        &self,
        offset: u64,
        length: u64,
        flags: ZeroFlags,
    ) -> impl Future<Output = Result<()>>;

    /// Releases a range's space where possible; it then reads as zeroes or as before, never as something older.
    fn discard(&self, offset: u64, length: u64) -> impl Future<Output = Result<()>>;

    /// Makes everything that completed before this call durable.
    fn flush(&self) -> impl Future<Output = Result<()>>;

    /// Describes the range in runs, in order and without gaps, at most `max_runs` of them; the runs returned may end
    /// before the range does, or cover all of it.
    fn block_status(
        &self,
        offset: u64,
        length: u64,
        max_runs: usize,
    ) -> impl Future<Output = Result<Vec<BlockStatus>>>;

    /// Makes the disk `size` bytes long if it is shorter; new bytes read as zeroes.
    ///
    /// # Errors
    /// If the device cannot grow.
    fn grow(&self, size: u64) -> impl Future<Output = Result<()>> {
        let _ = size;
        async { Err(DiskError::Unsupported("this device cannot grow".into())) }
    }

    /// Waits until the size differs from `known`. Never completes for a device whose size never changes.
    fn resized(&self, known: u64) -> impl Future<Output = ()> {
        let _ = known;
        pending()
    }

    /// Waits until the disk's limits let a client's request pass, and counts it. Frontends call it once for each
    /// request that reads, writes, zeroes or discards `bytes` bytes, before they take memory for it and before the
    /// first of the calls above that it needs. A request whose future is dropped while it waits is not counted.
    fn admit(&self, direction: Direction, bytes: u64) -> impl Future<Output = ()> {
        let _ = (direction, bytes);
        ready(())
    }

    /// From now on, and until the returned value is dropped, [`admit`](Self::admit) lets requests pass without waiting,
    /// those that wait already too. They are counted all the same. A frontend holds one while it waits for its requests
    /// to end; meanwhile those of the disk's other frontends pass as well.
    fn drain(&self) -> Drained {
        Drained::default()
    }

    /// What becomes of requests when the storage fails; `None` for a device whose requests then always fail. The calls
    /// above fail all the same: a frontend asks this what to do.
    fn pausing(&self) -> Option<&Pausing> {
        None
    }
}

/// Implements the trait for a type that has its methods.
macro_rules! block_device {
    ($device:ident $($more:tt)*) => {
        impl<H: Host> BlockDevice for $device<H> {
            $($more)*

            fn size(&self) -> u64 {
                $device::size(self)
            }

            fn is_read_only(&self) -> bool {
                $device::is_read_only(self)
            }

            fn preferred_block(&self) -> u32 {
                $device::preferred_block(self)
            }

            fn read(&self, offset: u64, buf: IoBuf) -> impl Future<Output = Result<IoBuf>> {
                $device::read(self, offset, buf)
            }

            fn write(&self, offset: u64, buf: IoBuf) -> impl Future<Output = Result<IoBuf>> {
                $device::write(self, offset, buf)
            }

            fn write_zeroes(
                &self,
                offset: u64,
                length: u64,
                flags: ZeroFlags,
            ) -> impl Future<Output = Result<()>> {
                $device::write_zeroes(self, offset, length, flags)
            }

            fn discard(&self, offset: u64, length: u64) -> impl Future<Output = Result<()>> {
                $device::discard(self, offset, length)
            }

            fn flush(&self) -> impl Future<Output = Result<()>> {
                $device::flush(self)
            }

            fn block_status(
                &self,
                offset: u64,
                length: u64,
                max_runs: usize,
            ) -> impl Future<Output = Result<Vec<BlockStatus>>> {
                $device::block_status(self, offset, length, max_runs)
            }

            fn grow(&self, size: u64) -> impl Future<Output = Result<()>> {
                $device::grow(self, size)
            }

            fn resized(&self, known: u64) -> impl Future<Output = ()> {
                $device::resized(self, known)
            }
        }
    };
}
pub(crate) use block_device;
