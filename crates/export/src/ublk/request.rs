//! Requests of the kernel: what they are, and carrying them out.

use super::geometry::{Geometry, MAX_BYTES};
use crate::keeper::wire::{Descriptor, SECTOR, data_at, operation};
use crate::pool::{Pool, Pooled};
use crate::steady::{Failed, Steady};
use crate::stop::Stop;
use isobath_disk::throttle::Direction;
use isobath_disk::{BlockDevice, DiskError, ZeroFlags};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// A request. Offsets and lengths are in bytes, within the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    Read { offset: u64, length: u32 },
    Write { offset: u64, length: u32, durable: bool },
    Flush,
    Discard { offset: u64, length: u64 },
    Zero { offset: u64, length: u64, may_unmap: bool, durable: bool },
}

impl Request {
    /// The request that a descriptor has.
    ///
    /// # Errors
    /// The error number of one that is refused.
    pub(super) fn new(descriptor: &Descriptor, geometry: &Geometry) -> Result<Self, i32> {
        let Descriptor { operation, sectors, start, .. } = *descriptor;
        let kind = operation & operation::MASK;
        if kind == operation::FLUSH {
            return Ok(Self::Flush);
        }
        let length = u64::from(sectors) * SECTOR;
        let within = start
            .checked_mul(SECTOR)
            .filter(|offset| offset.checked_add(length).is_some_and(|end| end <= geometry.size));
        let Some(offset) = within.filter(|_| length > 0) else { return Err(libc::EIO) };
        let durable = operation & operation::FUA != 0;
        let changes = kind != operation::READ;
        if changes && geometry.read_only {
            return Err(libc::EROFS);
        }
        let data = || {
            let length = u32::try_from(length).ok().filter(|length| *length <= MAX_BYTES);
            length.ok_or(libc::EIO)
        };
        match kind {
            operation::READ => Ok(Self::Read { offset, length: data()? }),
            operation::WRITE => Ok(Self::Write { offset, length: data()?, durable }),
            operation::DISCARD => Ok(Self::Discard { offset, length }),
            operation::WRITE_ZEROES => {
                let may_unmap = operation & operation::NO_UNMAP == 0;
                Ok(Self::Zero { offset, length, may_unmap, durable })
            }
            _ => Err(libc::EOPNOTSUPP),
        }
    }
}

/// What a queue's requests are carried out with.
pub(super) struct Service<'a, D> {
    pub(super) device: &'a D,
    pub(super) geometry: &'a Geometry,
    /// The character device.
    pub(super) file: &'a File,
    pub(super) queue: u16,
    pub(super) pool: &'a Pool,
    /// Requested once no request may wait for a paused disk any longer.
    pub(super) ending: &'a Stop,
}

/// Why a request fails: its error number.
struct Refusal(i32);

impl From<DiskError> for Refusal {
    fn from(error: DiskError) -> Self {
        Self(match error {
            // The disk has shrunk.
            DiskError::OutOfRange { .. } => libc::EIO,
            error => match error.errno() {
                errno @ 1..=4095 => errno,
                _ => libc::EIO,
            },
        })
    }
}

impl<D: BlockDevice> Service<'_, D> {
    /// Carries out a request, and returns the result for the kernel: the number of bytes, or a negative error number.
    pub(super) async fn serve(&self, tag: u16, descriptor: Descriptor) -> i32 {
        let request = match Request::new(&descriptor, self.geometry) {
            Ok(request) => request,
            Err(errno) => {
                tracing::warn!(?descriptor, errno, "request refused");
                return -errno;
            }
        };
        self.carry_out(tag, request).await.unwrap_or_else(|Refusal(errno)| -errno)
    }

    async fn carry_out(&self, tag: u16, request: Request) -> Result<i32, Refusal> {
        let steady = Steady::new(self.device, self.ending);
        let done = match request {
            Request::Read { offset, length } => {
                let pooled = match self.read(&steady, offset, length).await {
                    Ok(pooled) => pooled,
                    Err(failed) => return Err(refusal(request, failed)),
                };
                if pooled.data.len() != length as usize {
                    let got = pooled.data.len();
                    tracing::error!(?request, got, "a read returned the wrong length");
                    return Err(Refusal(libc::EIO));
                }
                self.file
                    .write_all_at(&pooled.data, data_at(self.queue, tag, 0))
                    .map_err(|error| given_up(&error))?;
                self.pool.put(pooled);
                return Ok(length as i32);
            }
            Request::Write { offset, length, durable } => {
                let done = steady.admit(Direction::Write, u64::from(length)).await;
                done.map_err(|failed| refusal(request, failed))?;
                let Pooled { mut data, spare } = self.pool.take(length as usize);
                self.file
                    .read_exact_at(&mut data, data_at(self.queue, tag, 0))
                    .map_err(|error| given_up(&error))?;
                match steady.write(offset, data).await {
                    Ok(data) => self.pool.put(Pooled { data, spare }),
                    Err(failed) => return Err(refusal(request, failed)),
                }
                let flushed = if durable { steady.flush().await } else { Ok(()) };
                flushed.map(|()| length as i32)
            }
            Request::Flush if self.geometry.read_only => Ok(0),
            Request::Flush => steady.flush().await.map(|()| 0),
            Request::Discard { offset, length } => {
                match steady.admit(Direction::Write, length).await {
                    Ok(()) => steady.discard(offset, length).await.map(|()| 0),
                    Err(failed) => Err(failed),
                }
            }
            Request::Zero { offset, length, may_unmap, durable } => {
                let zeroed = async {
                    steady.admit(Direction::Write, length).await?;
                    let flags = ZeroFlags { may_unmap, only_fast: false };
                    steady.write_zeroes(offset, length, flags).await?;
                    if durable { steady.flush().await } else { Ok(()) }
                };
                zeroed.await.map(|()| 0)
            }
        };
        done.map_err(|failed| refusal(request, failed))
    }

    async fn read(
        &self,
        steady: &Steady<'_, D>,
        offset: u64,
        length: u32,
    ) -> Result<Pooled, Failed> {
        steady.admit(Direction::Read, u64::from(length)).await?;
        let Pooled { data, spare } = self.pool.take(length as usize);
        let data = steady.read(offset, data).await?;
        Ok(Pooled { data, spare })
    }
}

fn refusal(request: Request, Failed { error, .. }: Failed) -> Refusal {
    tracing::warn!(?request, %error, "request failed");
    error.into()
}

/// The kernel does not give or take a request's data: it has given up the request.
fn given_up(error: &io::Error) -> Refusal {
    tracing::warn!(%error, "the kernel has given up a request");
    Refusal(libc::EIO)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: (u64, u32) = (1 << 30, 65536);

    fn request(operation: u32, start: u64, sectors: u32) -> Result<Request, i32> {
        let geometry = Geometry::new(GEOMETRY.0, GEOMETRY.1, false).unwrap();
        let descriptor = Descriptor { operation, sectors, start, address: 0 };
        Request::new(&descriptor, &geometry)
    }

    #[test]
    fn descriptors_are_understood() {
        assert_eq!(request(0, 8, 16), Ok(Request::Read { offset: 4096, length: 8192 }));
        let write = |durable| Ok(Request::Write { offset: 0, length: 512, durable });
        assert_eq!(request(1, 0, 1), write(false));
        assert_eq!(request(1 | 1 << 13, 0, 1), write(true));
        // Others' flags, such as those of metadata and of swap space, change nothing.
        assert_eq!(request(1 | 1 << 11 | 1 << 16, 0, 1), write(false));
        assert_eq!(request(2, 0, 0), Ok(Request::Flush));
        let whole = 1 << 21;
        assert_eq!(request(3, 0, whole), Ok(Request::Discard { offset: 0, length: 1 << 30 }));
        let zero =
            |may_unmap| Ok(Request::Zero { offset: 512, length: 1024, may_unmap, durable: false });
        assert_eq!(request(5, 1, 2), zero(true));
        assert_eq!(request(5 | 1 << 15, 1, 2), zero(false));
    }

    #[test]
    fn what_is_beyond_the_device_or_unknown_fails() {
        for kind in [0, 1, 3, 5] {
            for (start, sectors) in
                [(1 << 21, 1), ((1 << 21) - 1, 2), (u64::MAX, 1), (u64::MAX / 512, 1), (0, 0)]
            {
                assert_eq!(
                    request(kind, start, sectors),
                    Err(libc::EIO),
                    "{kind} {start} {sectors}"
                );
            }
        }
        for kind in [0, 1] {
            assert!(request(kind, 0, 2048).is_ok());
            assert_eq!(request(kind, 0, 2049), Err(libc::EIO));
        }
        for kind in [4, 6, 10, 18, 255] {
            assert_eq!(request(kind, 0, 1), Err(libc::EOPNOTSUPP));
        }
        let geometry = Geometry::new(GEOMETRY.0, GEOMETRY.1, true).unwrap();
        for kind in [1, 3, 5] {
            let descriptor = Descriptor { operation: kind, sectors: 1, start: 0, address: 0 };
            assert_eq!(Request::new(&descriptor, &geometry), Err(libc::EROFS));
        }
    }

    #[test]
    fn errors_are_numbers_that_the_kernel_knows() {
        let errno = |error: DiskError| Refusal::from(error).0;
        assert_eq!(errno(DiskError::Closed), DiskError::Closed.errno());
        assert_eq!(errno(DiskError::Unsupported("no".into())), libc::EOPNOTSUPP);
    }
}
