//! Requests of the transmission phase: parsing and checking.

use super::context::Contexts;
use super::wire::{Cursor, MAX_PAYLOAD, NbdError, REQUEST_MAGIC, command, command_flag};
use isobath_disk::ZeroFlags;

/// A request header as received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Command flags.
    pub flags: u16,
    /// Command number.
    pub command: u16,
    /// The client's ID of the request, repeated in the reply.
    pub cookie: u64,
    /// First byte of the range.
    pub offset: u64,
    /// Length of the range in bytes.
    pub length: u32,
}

/// A request did not begin with the request magic: the stream can no longer be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("wrong request magic: {0:#010x} instead of {REQUEST_MAGIC:#010x}")]
pub struct BadMagic(pub u32);

/// The properties of a connection that apply to every request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// The export's size in bytes.
    pub size: u64,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether replies are structured.
    pub structured: bool,
    /// The metadata contexts selected.
    pub contexts: Contexts,
}

/// A valid request. Ranges lie within the export; lengths are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Read a range of at most [`MAX_PAYLOAD`] bytes.
    Read {
        /// First byte.
        offset: u64,
        /// Bytes to read.
        length: u32,
    },
    /// Write a range of at most [`MAX_PAYLOAD`] bytes.
    Write {
        /// First byte.
        offset: u64,
        /// Bytes to write.
        length: u32,
        /// Reply only once the data is durable.
        fua: bool,
    },
    /// End the session once all earlier requests are done.
    Disconnect,
    /// Make completed writes durable.
    Flush,
    /// Discard a range.
    Trim {
        /// First byte.
        offset: u64,
        /// Bytes to discard.
        length: u32,
        /// Reply only once the change is durable.
        fua: bool,
    },
    /// Bring a range into the cache.
    Cache {
        /// First byte.
        offset: u64,
        /// Bytes to read ahead.
        length: u32,
    },
    /// Make a range read as zeroes.
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// Bytes to zero.
        length: u32,
        /// How it may be done.
        flags: ZeroFlags,
        /// Reply only once the change is durable.
        fua: bool,
    },
    /// Describe a range.
    BlockStatus {
        /// First byte.
        offset: u64,
        /// Bytes to describe, at least 1.
        length: u32,
        /// Describe only the first extent.
        one: bool,
    },
}

impl Command {
    /// Whether it can be carried out in pieces, one after the other.
    pub(crate) const fn can_be_divided(self) -> bool {
        matches!(self, Self::Read { .. } | Self::Write { .. })
    }
}

impl Request {
    /// Length of a request header in bytes.
    pub const SIZE: usize = 28;

    /// Parses a header.
    ///
    /// # Errors
    /// If the magic is wrong.
    pub fn parse(header: &[u8; Self::SIZE]) -> Result<Self, BadMagic> {
        let mut cursor = Cursor(header);
        let magic = cursor.u32().unwrap_or_default();
        if magic != REQUEST_MAGIC {
            return Err(BadMagic(magic));
        }
        Ok(Self {
            flags: cursor.u16().unwrap_or_default(),
            command: cursor.u16().unwrap_or_default(),
            cookie: cursor.u64().unwrap_or_default(),
            offset: cursor.u64().unwrap_or_default(),
            length: cursor.u32().unwrap_or_default(),
        })
    }

    /// The header's bytes.
    pub fn encode(&self) -> [u8; Self::SIZE] {
        let mut header = [0; Self::SIZE];
        header[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        header[4..6].copy_from_slice(&self.flags.to_be_bytes());
        header[6..8].copy_from_slice(&self.command.to_be_bytes());
        header[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        header[16..24].copy_from_slice(&self.offset.to_be_bytes());
        header[24..].copy_from_slice(&self.length.to_be_bytes());
        header
    }

    /// How many bytes of payload follow the header, whether the request is valid or not.
    pub const fn payload(&self) -> u32 {
        if self.command == command::WRITE { self.length } else { 0 }
    }

    /// Checks the request against what was negotiated.
    ///
    /// # Errors
    /// The error to reply: `EINVAL` for an unknown command or flag, or a range past the end;
    /// `EPERM` for a write to a read-only export; `ENOSPC` for a write past the end; `EOVERFLOW`
    /// for a read or write above [`MAX_PAYLOAD`].
    pub fn check(&self, terms: &Terms) -> Result<Command, NbdError> {
        let (offset, length) = (self.offset, self.length);
        let fua = self.flags & command_flag::FUA != 0;
        let flags = self.flags & !command_flag::FUA;
        let allow = |allowed: u16| {
            if flags & !allowed == 0 { Ok(()) } else { Err(NbdError::Invalid) }
        };
        let within = |error: NbdError| {
            let end = offset.checked_add(u64::from(length));
            if end.is_some_and(|end| end <= terms.size) { Ok(()) } else { Err(error) }
        };
        let payload = || if length <= MAX_PAYLOAD { Ok(()) } else { Err(NbdError::Overflow) };
        let writable = || if terms.read_only { Err(NbdError::Perm) } else { Ok(()) };

        match self.command {
            command::READ => {
                allow(if terms.structured { command_flag::DF } else { 0 })?;
                payload()?;
                within(NbdError::Invalid)?;
                Ok(Command::Read { offset, length })
            }
            command::WRITE => {
                allow(0)?;
                writable()?;
                payload()?;
                within(NbdError::NoSpace)?;
                Ok(Command::Write { offset, length, fua })
            }
            command::DISC => Ok(Command::Disconnect),
            command::FLUSH => {
                allow(0)?;
                if offset != 0 || length != 0 {
                    return Err(NbdError::Invalid);
                }
                Ok(Command::Flush)
            }
            command::TRIM => {
                allow(0)?;
                writable()?;
                within(NbdError::Invalid)?;
                Ok(Command::Trim { offset, length, fua })
            }
            command::CACHE => {
                allow(0)?;
                within(NbdError::Invalid)?;
                Ok(Command::Cache { offset, length })
            }
            command::WRITE_ZEROES => {
                allow(command_flag::NO_HOLE | command_flag::FAST_ZERO)?;
                writable()?;
                within(NbdError::NoSpace)?;
                let flags = ZeroFlags {
                    may_unmap: flags & command_flag::NO_HOLE == 0,
                    only_fast: flags & command_flag::FAST_ZERO != 0,
                };
                Ok(Command::WriteZeroes { offset, length, flags, fua })
            }
            command::BLOCK_STATUS => {
                allow(command_flag::REQ_ONE)?;
                if terms.contexts.is_empty() || length == 0 {
                    return Err(NbdError::Invalid);
                }
                within(NbdError::Invalid)?;
                let one = flags & command_flag::REQ_ONE != 0;
                Ok(Command::BlockStatus { offset, length, one })
            }
            _ => Err(NbdError::Invalid),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::context::Context;
    use super::*;

    fn terms() -> Terms {
        let mut contexts = Contexts::default();
        contexts.insert(Context::Allocation);
        Terms { size: 1 << 30, read_only: false, structured: true, contexts }
    }

    fn request(command: u16, flags: u16, offset: u64, length: u32) -> Request {
        Request { flags, command, cookie: 7, offset, length }
    }

    #[test]
    fn headers_survive_the_wire() {
        let request = request(command::WRITE, 1, 0x0123_4567_89ab_cdef, 0xfedc_ba98);
        assert_eq!(Request::parse(&request.encode()), Ok(request));
        let mut bad = request.encode();
        bad[0] = 0;
        assert_eq!(Request::parse(&bad), Err(BadMagic(0x0060_9513)));
    }

    #[test]
    fn errors_follow_the_specification() {
        use command::{BLOCK_STATUS, CACHE, FLUSH, READ, TRIM, WRITE, WRITE_ZEROES};
        let end = 1 << 30;
        let table = [
            (request(READ, 0, end, 1), NbdError::Invalid),
            (request(READ, 0, u64::MAX, 1), NbdError::Invalid),
            (request(READ, 0, 0, MAX_PAYLOAD + 1), NbdError::Overflow),
            (request(READ, command_flag::DF, 0, MAX_PAYLOAD + 1), NbdError::Overflow),
            (request(READ, command_flag::NO_HOLE, 0, 1), NbdError::Invalid),
            (request(WRITE, 0, end - 1, 2), NbdError::NoSpace),
            (request(WRITE, 0, 0, u32::MAX), NbdError::Overflow),
            (request(WRITE, command_flag::DF, 0, 1), NbdError::Invalid),
            (request(WRITE_ZEROES, 0, end, 1), NbdError::NoSpace),
            (request(WRITE_ZEROES, command_flag::REQ_ONE, 0, 1), NbdError::Invalid),
            (request(TRIM, 0, end, 1), NbdError::Invalid),
            (request(CACHE, 0, end, 1), NbdError::Invalid),
            (request(FLUSH, 0, 1, 0), NbdError::Invalid),
            (request(BLOCK_STATUS, 0, 0, 0), NbdError::Invalid),
            (request(BLOCK_STATUS, 0, end, 1), NbdError::Invalid),
            (request(8, 0, 0, 0), NbdError::Invalid),
            (request(u16::MAX, 0, 0, 0), NbdError::Invalid),
        ];
        for (request, error) in table {
            assert_eq!(request.check(&terms()), Err(error), "{request:?}");
        }
    }

    #[test]
    fn what_was_not_negotiated_is_refused() {
        let plain = Terms { structured: false, contexts: Contexts::default(), ..terms() };
        let df = request(command::READ, command_flag::DF, 0, 1);
        assert_eq!(df.check(&plain), Err(NbdError::Invalid));
        assert!(df.check(&terms()).is_ok());
        let status = request(command::BLOCK_STATUS, 0, 0, 1);
        assert_eq!(status.check(&plain), Err(NbdError::Invalid));
    }

    #[test]
    fn a_read_only_export_refuses_every_write() {
        let terms = Terms { read_only: true, ..terms() };
        for command in [command::WRITE, command::TRIM, command::WRITE_ZEROES] {
            assert_eq!(request(command, 0, 0, 1).check(&terms), Err(NbdError::Perm));
        }
        assert_eq!(request(command::FLUSH, 0, 0, 0).check(&terms), Ok(Command::Flush));
    }

    #[test]
    fn fua_is_taken_on_every_command() {
        for command in command::READ..=command::BLOCK_STATUS {
            let length = u32::from(command != command::FLUSH);
            assert!(request(command, command_flag::FUA, 0, length).check(&terms()).is_ok());
        }
        let zeroes = request(command::WRITE_ZEROES, 0x13, 0, u32::MAX >> 2);
        let flags = ZeroFlags { may_unmap: false, only_fast: true };
        assert_eq!(
            zeroes.check(&terms()),
            Ok(Command::WriteZeroes { offset: 0, length: u32::MAX >> 2, flags, fua: true })
        );
    }

    #[test]
    fn empty_requests_at_the_end_are_within() {
        for command in [command::READ, command::WRITE, command::TRIM, command::WRITE_ZEROES] {
            assert!(request(command, 0, 1 << 30, 0).check(&terms()).is_ok());
        }
    }
}
