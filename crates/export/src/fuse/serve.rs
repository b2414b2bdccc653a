//! Executing and answering requests.

use super::channel::{Channel, Payload};
use super::file::{Inode, SECTOR, statfs};
use super::request::{Message, Request};
use super::wire::{AttrOut, LseekOut, OpenOut, SetattrIn, WriteOut, open_flag, set};
use crate::pool::{Pool, Pooled};
use crate::steady::{Failed, Steady};
use crate::stop::Stop;
use isobath_disk::throttle::Direction;
use isobath_disk::{BlockDevice, DiskError, ZeroFlags};
use isobath_storage::IoBuf;
use std::cell::Cell;
use std::sync::Arc;
use zerocopy::{Immutable, IntoBytes};

/// Number of runs to query at a time when searching for a hole or data.
const RUNS: usize = 256;

/// The export, shared by all threads.
pub(super) struct Export<D> {
    pub(super) device: Arc<D>,
    pub(super) inode: Inode,
    pub(super) read_only: bool,
    pub(super) growable: bool,
    /// How many requests may be in flight on each thread.
    pub(super) requests: usize,
}

/// One thread's part of serving.
pub(super) struct Service<'a, D> {
    pub(super) export: &'a Export<D>,
    pub(super) channel: &'a Channel,
    pub(super) pool: &'a Pool,
    /// Number of requests in flight.
    pub(super) running: &'a Cell<usize>,
    /// Requested once no request may wait for a paused disk any longer.
    pub(super) ending: &'a Stop,
}

/// Why a request is refused.
#[derive(Debug)]
enum Refusal {
    /// Because of the request itself.
    Request(i32),
    /// The disk failed.
    Disk(DiskError),
}

impl From<Failed> for Refusal {
    fn from(failed: Failed) -> Self {
        Self::Disk(failed.error)
    }
}

impl From<DiskError> for Refusal {
    fn from(error: DiskError) -> Self {
        Self::Disk(error)
    }
}

impl Refusal {
    fn errno(&self) -> i32 {
        match self {
            Self::Request(errno) => *errno,
            // Only if the disk has shrunk in the meantime: requests are truncated to its size.
            Self::Disk(DiskError::OutOfRange { .. }) => libc::EIO,
            Self::Disk(error) => error.errno(),
        }
    }
}

type Outcome<T = ()> = Result<T, Refusal>;

impl<D: BlockDevice> Service<'_, D> {
    /// Executes one request and answers it.
    pub(super) async fn serve(self, message: Message, payload: Option<Payload>) {
        let Message { unique, request } = message;
        match request {
            Request::Read { offset, length } => {
                let done = self.read(unique, offset, length).await;
                done.unwrap_or_else(|refusal| self.refuse(message, &refusal));
            }
            Request::Write { offset, durable, .. } => {
                let done = self.write(offset, payload, durable).await;
                self.answer(message, done.map(|size| WriteOut { size, padding: 0 }));
            }
            Request::Fsync => self.answer(message, self.flush().await),
            Request::Fallocate { offset, length, mode } => {
                self.answer(message, self.fallocate(offset, length, mode).await);
            }
            Request::Lseek { offset, whence } => {
                let found = self.seek(offset, whence).await;
                self.answer(message, found.map(|offset| LseekOut { offset }));
            }
            Request::Getattr => self.answer(message, Ok(self.attributes())),
            Request::Setattr(wanted) => {
                let done = self.setattr(&wanted).await;
                self.answer(message, done.map(|()| self.attributes()));
            }
            Request::Open => {
                let open_flags = open_flag::DIRECT_IO | open_flag::PARALLEL_DIRECT_WRITES;
                self.answer(message, Ok(OpenOut { fh: 0, open_flags, padding: 0 }));
            }
            Request::Statfs => self.answer(message, Ok(statfs(self.size()))),
            Request::Release => self.answer(message, Ok(())),
            Request::Forget => {}
            // Only the first message of a connection is INIT.
            Request::Init(_) => self.channel.fail(unique, libc::EIO),
            Request::Unknown => self.channel.fail(unique, libc::ENOSYS),
        }
        self.running.set(self.running.get() - 1);
    }

    fn answer<T: IntoBytes + Immutable>(&self, message: Message, done: Outcome<T>) {
        match done {
            Ok(body) => self.channel.reply(message.unique, body.as_bytes(), &[]),
            Err(refusal) => self.refuse(message, &refusal),
        }
    }

    fn refuse(&self, Message { unique, request }: Message, refusal: &Refusal) {
        match refusal {
            Refusal::Request(errno) => tracing::debug!(?request, errno, "request refused"),
            Refusal::Disk(error) => tracing::warn!(?request, %error, "request failed"),
        }
        self.channel.fail(unique, refusal.errno());
    }

    /// The disk, for requests that wait while it is paused.
    fn steady(&self) -> Steady<'_, D> {
        Steady::new(&*self.export.device, self.ending)
    }

    fn size(&self) -> u64 {
        self.export.device.size()
    }

    fn attributes(&self) -> AttrOut {
        // The kernel must not cache the attributes: others may change the disk's size.
        let attr = self.export.inode.attributes(self.size());
        AttrOut { attr_valid: 0, attr_valid_nsec: 0, dummy: 0, attr }
    }

    /// Reads up to the end of the disk.
    async fn read(&self, unique: u64, offset: u64, length: u32) -> Outcome {
        let left = self.size().saturating_sub(offset);
        let length = u64::from(length).min(left) as usize;
        if length == 0 {
            self.channel.reply(unique, &[], &[]);
            return Ok(());
        }
        self.steady().admit(Direction::Read, length as u64).await?;
        let Pooled { data, spare } = self.pool.take(length);
        let data = self.steady().read(offset, data).await?;
        if data.len() != length {
            tracing::error!(offset, length, got = data.len(), "a read returned the wrong length");
            return Err(Refusal::Request(libc::EIO));
        }
        self.channel.reply(unique, &[], &data);
        self.pool.put(Pooled { data, spare });
        Ok(())
    }

    /// Writes up to the end of the disk, after growing it if possible, and returns the number of bytes written.
    async fn write(&self, offset: u64, payload: Option<Payload>, durable: bool) -> Outcome<u32> {
        self.writable()?;
        let Some(mut payload) = payload else { return Err(Refusal::Request(libc::EIO)) };
        let length = self.reach(offset, payload.data.len() as u64).await?;
        if length > 0 {
            self.steady().admit(Direction::Write, length).await?;
            self.export.inode.touch();
            payload.cut(length as usize);
            let data = std::mem::replace(&mut payload.data, IoBuf::empty());
            payload.data = self.steady().write(offset, data).await?;
            self.channel.put(payload);
        }
        if durable {
            self.steady().flush().await?;
        }
        Ok(length as u32)
    }

    async fn flush(&self) -> Outcome {
        if self.export.read_only { Ok(()) } else { Ok(self.steady().flush().await?) }
    }

    async fn fallocate(&self, offset: u64, length: u64, mode: i32) -> Outcome {
        use libc::{FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE, FALLOC_FL_ZERO_RANGE};
        const PUNCH: i32 = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
        self.writable()?;
        let end = offset.checked_add(length).ok_or(Refusal::Request(libc::EFBIG))?;
        let may_unmap = match mode {
            // Space is allocated on write; nothing needs to be reserved.
            FALLOC_FL_KEEP_SIZE => return Ok(()),
            0 => return self.grow_for(end).await,
            PUNCH => true,
            FALLOC_FL_ZERO_RANGE => {
                self.grow_for(end).await?;
                false
            }
            mode if mode == FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE => false,
            _ => return Err(Refusal::Request(libc::EOPNOTSUPP)),
        };
        let length = end.min(self.size()).saturating_sub(offset);
        if length > 0 {
            self.steady().admit(Direction::Write, length).await?;
            self.export.inode.touch();
            let flags = ZeroFlags { may_unmap, only_fast: false };
            self.steady().write_zeroes(offset, length, flags).await?;
        }
        Ok(())
    }

    /// Finds the next data or hole from `offset` on, as `lseek(2)` does.
    async fn seek(&self, offset: u64, whence: i32) -> Outcome<u64> {
        let for_data = match whence {
            libc::SEEK_DATA => true,
            libc::SEEK_HOLE => false,
            _ => return Err(Refusal::Request(libc::EINVAL)),
        };
        let size = self.size();
        if offset >= size {
            return Err(Refusal::Request(libc::ENXIO));
        }
        let mut at = offset;
        while at < size {
            let runs = self.export.device.block_status(at, size - at, RUNS).await?;
            let before = at;
            for run in runs {
                if (run.allocated && !run.zero) == for_data {
                    return Ok(at);
                }
                at = at.saturating_add(run.length);
            }
            if at == before {
                tracing::error!(offset, "the disk returned no extents");
                return Err(Refusal::Request(libc::EIO));
            }
        }
        // The end of the file counts as a hole.
        if for_data { Err(Refusal::Request(libc::ENXIO)) } else { Ok(size) }
    }

    async fn setattr(&self, wanted: &SetattrIn) -> Outcome {
        if wanted.valid & set::SIZE != 0 {
            self.writable()?;
            let (old, new) = (self.size(), wanted.size);
            if new < old {
                // Opening the file with O_TRUNC must not delete the disk's data as a side effect.
                return Err(Refusal::Request(libc::EPERM));
            }
            if new > old && !self.export.growable {
                return Err(Refusal::Request(libc::EPERM));
            }
            self.grow_for(new).await?;
        }
        self.export.inode.change(wanted).map_err(Refusal::Request)
    }

    fn writable(&self) -> Outcome {
        if self.export.read_only { Err(Refusal::Request(libc::EROFS)) } else { Ok(()) }
    }

    /// How many bytes of a write are within the disk, after growing it if that is allowed.
    async fn reach(&self, offset: u64, length: u64) -> Outcome<u64> {
        let end = offset.checked_add(length).ok_or(Refusal::Request(libc::EFBIG))?;
        let size = self.size();
        if end <= size {
            return Ok(length);
        }
        if !self.export.growable && offset < size {
            return Ok(size - offset);
        }
        self.grow_for(end).await?;
        Ok(length)
    }

    /// Grows the disk to `end` if it is shorter.
    async fn grow_for(&self, end: u64) -> Outcome {
        if end <= self.size() {
            return Ok(());
        }
        if !self.export.growable {
            return Err(Refusal::Request(libc::ENOSPC));
        }
        let size = end.checked_next_multiple_of(SECTOR).ok_or(Refusal::Request(libc::EFBIG))?;
        match self.export.device.grow(size).await {
            // The image does not allow this size.
            Err(error @ (DiskError::Refused { .. } | DiskError::Unsupported(_))) => {
                tracing::warn!(size, %error, "cannot grow the disk");
                Err(Refusal::Request(libc::EFBIG))
            }
            done => Ok(done?),
        }
    }
}
