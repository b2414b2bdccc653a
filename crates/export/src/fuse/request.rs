//! Requests from the kernel: parsing and checking.

use super::wire::{FallocateIn, InHeader, InitIn, LseekIn, SetattrIn, TransferIn, opcode};
use zerocopy::FromBytes;

/// A message from the kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Message {
    /// The kernel's ID of the request, repeated in the reply.
    pub(crate) unique: u64,
    pub(crate) request: Request,
}

/// A request from the kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Request {
    Init(InitIn),
    Getattr,
    Setattr(SetattrIn),
    Open,
    Read {
        offset: u64,
        length: u32,
    },
    /// `length` bytes of payload follow.
    Write {
        offset: u64,
        length: u32,
        /// The data must be durable before the reply: the file was opened with `O_SYNC` or `O_DSYNC`, or the call
        /// requests it.
        durable: bool,
    },
    Fsync,
    Fallocate {
        offset: u64,
        length: u64,
        mode: i32,
    },
    Lseek {
        offset: u64,
        whence: i32,
    },
    Statfs,
    /// Acknowledged without any action.
    Release,
    /// Not answered.
    Forget,
    /// Answered with `ENOSYS`, after which the kernel does without it.
    Unknown,
}

/// An inconsistent message. Nothing after it can be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed FUSE message with opcode {opcode}: received {got} bytes, header says {said}")]
pub(crate) struct Malformed {
    opcode: u32,
    said: u32,
    got: usize,
}

/// Bytes before a write's payload.
pub(crate) const WRITE_HEAD: usize = size_of::<InHeader>() + size_of::<TransferIn>();

impl Message {
    /// Parses a message from the kernel.
    ///
    /// # Errors
    /// If it is too short for its kind, or its length differs from the one in its header.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let short = Malformed { opcode: 0, said: 0, got: bytes.len() };
        let (header, body) = InHeader::read_from_prefix(bytes).map_err(|_| short)?;
        let malformed = Malformed { opcode: header.opcode, said: header.len, got: bytes.len() };
        if header.len as usize != bytes.len() {
            return Err(malformed);
        }
        let request = match header.opcode {
            opcode::INIT => Request::Init(prefix(body).ok_or(malformed)?),
            opcode::GETATTR => Request::Getattr,
            opcode::SETATTR => Request::Setattr(prefix(body).ok_or(malformed)?),
            opcode::OPEN => Request::Open,
            opcode::READ => {
                let TransferIn { offset, size, .. } = prefix(body).ok_or(malformed)?;
                Request::Read { offset, length: size }
            }
            opcode::WRITE => {
                let write: TransferIn = prefix(body).ok_or(malformed)?;
                if bytes.len() != WRITE_HEAD + write.size as usize {
                    return Err(malformed);
                }
                // O_SYNC includes the bit of O_DSYNC.
                let durable = write.flags & libc::O_DSYNC as u32 != 0;
                Request::Write { offset: write.offset, length: write.size, durable }
            }
            opcode::FSYNC => Request::Fsync,
            opcode::FALLOCATE => {
                let FallocateIn { offset, length, mode, .. } = prefix(body).ok_or(malformed)?;
                Request::Fallocate { offset, length, mode: mode as i32 }
            }
            opcode::LSEEK => {
                let LseekIn { offset, whence, .. } = prefix(body).ok_or(malformed)?;
                Request::Lseek { offset, whence: whence as i32 }
            }
            opcode::STATFS => Request::Statfs,
            opcode::RELEASE | opcode::DESTROY => Request::Release,
            opcode::FORGET | opcode::BATCH_FORGET => Request::Forget,
            _ => Request::Unknown,
        };
        Ok(Self { unique: header.unique, request })
    }
}

fn prefix<T: FromBytes>(bytes: &[u8]) -> Option<T> {
    T::read_from_prefix(bytes).ok().map(|(value, _)| value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    fn message(opcode: u32, said: usize, body: &[u8]) -> Vec<u8> {
        let header = InHeader {
            len: said as u32,
            opcode,
            unique: 7,
            nodeid: 1,
            uid: 0,
            gid: 0,
            pid: 1,
            total_extlen: 0,
            padding: 0,
        };
        [header.as_bytes(), body].concat()
    }

    fn write(size: u32, flags: i32) -> Vec<u8> {
        let body = TransferIn {
            fh: 0,
            offset: 512,
            size,
            transfer_flags: 0,
            lock_owner: 0,
            flags: flags as u32,
            padding: 0,
        };
        body.as_bytes().to_vec()
    }

    #[test]
    fn a_write_has_just_its_payload() {
        let bytes = [write(3, libc::O_SYNC), vec![1, 2, 3]].concat();
        let parsed = Message::parse(&message(opcode::WRITE, 83, &bytes)).map(|it| it.request);
        assert!(matches!(parsed, Ok(Request::Write { offset: 512, length: 3, durable: true })));
        for (length, said) in [(2, 82), (4, 84), (3, 84), (3, 82)] {
            let bytes = [write(3, 0), vec![0; length]].concat();
            assert!(Message::parse(&message(opcode::WRITE, said, &bytes)).is_err());
        }
    }

    #[test]
    fn what_is_cut_short_is_malformed() {
        let kinds = [opcode::INIT, opcode::SETATTR, opcode::READ, opcode::FALLOCATE, opcode::LSEEK];
        for kind in kinds {
            assert!(Message::parse(&message(kind, 48, &[0; 8])).is_err(), "{kind}");
        }
        let whole = message(opcode::GETATTR, 40, &[]);
        for length in 0..whole.len() {
            assert!(Message::parse(&whole[..length]).is_err());
        }
        let parsed = Message::parse(&message(9999, 40, &[])).map(|it| (it.unique, it.request));
        assert!(matches!(parsed, Ok((7, Request::Unknown))));
    }
}
