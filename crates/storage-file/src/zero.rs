//! Zeroes and holes.

use super::landing::unblocked;
use super::open::Kind;
use super::storage::FileStorage;
use super::sys;
use super::transfer::{self, Target};
use isobath_storage::{IoBuf, ZeroMode};
use std::io;
use std::sync::atomic::Ordering;

const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE;

/// The most zeroes written as data at a time, in bytes.
const CHUNK: u64 = 1 << 20;

fn unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV))
}

impl FileStorage {
    /// `fallocate`, kept apart from partial writes to the same blocks; `false` if the file system
    /// cannot do that.
    async fn allocate(&self, target: &Target, mode: i32, start: u64, end: u64) -> io::Result<bool> {
        let refused = match mode {
            PUNCH => &self.rejected.punch,
            _ => &self.rejected.zero,
        };
        if refused.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let target = match &self.direct {
            Some(direct) => target.leased(direct.share(&target.lease, start, end).await),
            None => target.clone(),
        };
        match transfer::fallocate(&target, mode, start, end - start).await {
            Ok(()) => Ok(true),
            Err(error) if unsupported(&error) => {
                refused.store(true, Ordering::Relaxed);
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Makes `[start, end)` read as zeroes.
    pub(super) async fn zero(&self, start: u64, end: u64, mode: ZeroMode) -> io::Result<()> {
        let target = &*self.kept()?;
        match self.kind {
            Kind::Regular => self.zero_file(target, start, end, mode).await,
            Kind::Device { block } => {
                self.zero_device(target, (start, end), mode, u64::from(block)).await
            }
        }
    }

    async fn zero_file(
        &self,
        target: &Target,
        start: u64,
        end: u64,
        mode: ZeroMode,
    ) -> io::Result<()> {
        if mode.may_unmap && self.allocate(target, PUNCH, start, end).await? {
            if end <= self.length_of(&target.file)? {
                return Ok(());
            }
            // Extends the file in one step. Setting the length instead could truncate what another write has added
            // meanwhile.
            return self.write_buf(target, end - 1, IoBuf::zeroed(1)).await.0;
        }
        if self.allocate(target, ZERO, start, end).await? {
            return Ok(());
        }
        if mode.only_fast {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        self.write_zero_data(target, start, end).await
    }

    /// As [`zero_file`](Self::zero_file); the kernel takes whole blocks only, and writes data for [`ZERO`] if the
    /// device has nothing better.
    async fn zero_device(
        &self,
        target: &Target,
        (start, end): (u64, u64),
        mode: ZeroMode,
        block: u64,
    ) -> io::Result<()> {
        if end > self.length_of(&target.file)? {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        let (first, last) = (start.next_multiple_of(block), end / block * block);
        if first >= last {
            return self.write_zero_data(target, start, end).await;
        }
        let fast = mode.may_unmap && self.allocate(target, PUNCH, first, last).await?;
        if !fast {
            if mode.only_fast {
                return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
            }
            if !self.allocate(target, ZERO | libc::FALLOC_FL_KEEP_SIZE, first, last).await? {
                return self.write_zero_data(target, start, end).await;
            }
        }
        self.write_zero_data(target, start, first).await?;
        self.write_zero_data(target, last, end).await
    }

    async fn write_zero_data(&self, target: &Target, mut start: u64, end: u64) -> io::Result<()> {
        let mut zeroes = IoBuf::zeroed((end - start).min(CHUNK) as usize);
        while start < end {
            let count = (end - start).min(CHUNK);
            drop(zeroes.split_to(zeroes.len() - count as usize));
            let (result, back) = self.write_buf(target, start, zeroes).await;
            result?;
            zeroes = back;
            start += count;
        }
        Ok(())
    }

    /// Releases the space of `[start, end)` if possible.
    pub(super) async fn punch(&self, start: u64, end: u64) -> io::Result<()> {
        let target = self.kept()?;
        let Kind::Device { block } = self.kind else {
            return self.allocate(&target, PUNCH, start, end).await.map(drop);
        };
        let block = u64::from(block);
        let end = end.min(self.length_of(&target.file)?);
        let (first, last) = (start.next_multiple_of(block), end / block * block);
        if first >= last {
            return Ok(());
        }
        let guard = match &self.direct {
            Some(direct) => Some(direct.share(&target.lease, first, last).await),
            None => None,
        };
        let landing = target.landing.clone();
        let result = unblocked(&landing, move || {
            let _guard = guard;
            sys::device_discard(&target.file, first, last - first)
        });
        match result.await {
            Err(error) if unsupported(&error) => Ok(()),
            result => result,
        }
    }
}
