//! The numbers of the NBD protocol (`doc/proto.md` of the NBD project, "Values"), for the client and the server. All
//! are sent big-endian.

/// First magic of the server's greeting, `NBDMAGIC`.
pub const GREETING_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second magic of the greeting and of every option, `IHAVEOPT`.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Second magic of the greeting of a server that knows no options.
pub const OLD_STYLE_MAGIC: u64 = 0x0000_4202_8186_1253;
/// Magic of every reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Magic of a request in the transmission phase.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Magic of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Magic of a structured reply chunk.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// Maximum length of a string in bytes: export names, descriptions, queries.
pub const MAX_STRING: usize = 4096;
/// Maximum payload of a read or write in bytes, advertised as the maximum block size.
pub const MAX_PAYLOAD: u32 = 32 << 20;

/// Handshake flags of the server, and client flags, which have the same bits.
pub mod handshake_flag {
    /// Options are answered one by one.
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    /// The reply to `EXPORT_NAME` does not end in 124 zero bytes.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Option types.
pub mod option {
    /// Choose an export and proceed to transmission, without error replies.
    pub const EXPORT_NAME: u32 = 1;
    /// End the session.
    pub const ABORT: u32 = 2;
    /// List the exports.
    pub const LIST: u32 = 3;
    /// Encrypt the session.
    pub const STARTTLS: u32 = 5;
    /// Describe an export.
    pub const INFO: u32 = 6;
    /// Describe an export and proceed to transmission.
    pub const GO: u32 = 7;
    /// Use structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// List metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Select metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Use headers with 64-bit lengths.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Types of a reply to an option.
pub mod option_reply {
    /// Done.
    pub const ACK: u32 = 1;
    /// One export of a list.
    pub const SERVER: u32 = 2;
    /// One piece of information on an export.
    pub const INFO: u32 = 3;
    /// One metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// Set in every error.
    pub const ERROR: u32 = 1 << 31;
    /// The option is unknown.
    pub const ERR_UNSUP: u32 = ERROR + 1;
    /// The server's policy forbids it.
    pub const ERR_POLICY: u32 = ERROR + 2;
    /// The option's data is invalid.
    pub const ERR_INVALID: u32 = ERROR + 3;
    /// The server's platform cannot do it.
    pub const ERR_PLATFORM: u32 = ERROR + 4;
    /// Only an encrypted session may do it.
    pub const ERR_TLS_REQD: u32 = ERROR + 5;
    /// No export has this name.
    pub const ERR_UNKNOWN: u32 = ERROR + 6;
    /// The server is being shut down.
    pub const ERR_SHUTDOWN: u32 = ERROR + 7;
    /// The client must ask for the block sizes.
    pub const ERR_BLOCK_SIZE_REQD: u32 = ERROR + 8;
    /// The option's data is too long.
    pub const ERR_TOO_BIG: u32 = ERROR + 9;
}

/// Kinds of information on an export.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// The export's own name.
    pub const NAME: u16 = 1;
    /// A human-readable description.
    pub const DESCRIPTION: u16 = 2;
    /// Minimum, preferred and maximum block size.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags of an export.
pub mod transmission_flag {
    /// Always set.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// Writes are refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// `FLUSH` is supported.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// The FUA command flag is supported.
    pub const SEND_FUA: u16 = 1 << 3;
    /// `TRIM` is supported.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// `WRITE_ZEROES` is supported.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// The DF command flag is supported.
    pub const SEND_DF: u16 = 1 << 7;
    /// Connections to this export are coherent with one another.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// `CACHE` is supported.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// The `FAST_ZERO` command flag is supported.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Commands.
pub mod command {
    /// Read a range.
    pub const READ: u16 = 0;
    /// Write a range.
    pub const WRITE: u16 = 1;
    /// End the session.
    pub const DISC: u16 = 2;
    /// Make completed writes durable.
    pub const FLUSH: u16 = 3;
    /// Discard a range.
    pub const TRIM: u16 = 4;
    /// Bring a range into the cache.
    pub const CACHE: u16 = 5;
    /// Make a range read as zeroes.
    pub const WRITE_ZEROES: u16 = 6;
    /// Describe a range.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Command flags.
pub mod command_flag {
    /// Reply only once the written data is durable.
    pub const FUA: u16 = 1 << 0;
    /// Zeroes must stay allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// Answer a read in one chunk.
    pub const DF: u16 = 1 << 2;
    /// Describe one extent only.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Zero only if that is faster than writing.
    pub const FAST_ZERO: u16 = 1 << 4;
}

/// Types of structured reply chunks, and their flag.
pub mod chunk {
    /// Flag: the last chunk of a reply.
    pub const FLAG_DONE: u16 = 1 << 0;
    /// No payload.
    pub const NONE: u16 = 0;
    /// Data and its offset.
    pub const OFFSET_DATA: u16 = 1;
    /// A run of zeroes: its offset and length.
    pub const OFFSET_HOLE: u16 = 2;
    /// Extents of a metadata context.
    pub const BLOCK_STATUS: u16 = 5;
    /// Set in every failure.
    pub const IS_ERROR: u16 = 1 << 15;
    /// A failure.
    pub const ERROR: u16 = IS_ERROR + 1;
    /// A failure at an offset.
    pub const ERROR_OFFSET: u16 = IS_ERROR + 2;
}

/// Extent flags of `base:allocation`.
pub mod state {
    /// The range is not allocated.
    pub const HOLE: u32 = 1 << 0;
    /// The range reads as zeroes.
    pub const ZERO: u32 = 1 << 1;
}

/// Error values of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum NbdError {
    /// `EPERM`: a write to a read-only export.
    Perm = 1,
    /// `EIO`: the underlying storage failed.
    Io = 5,
    /// `EINVAL`: the request is invalid.
    Invalid = 22,
    /// `ENOSPC`: no space, or a write past the end of the export.
    NoSpace = 28,
    /// `EOVERFLOW`: the request is longer than [`MAX_PAYLOAD`].
    Overflow = 75,
    /// `ENOTSUP`: not supported (a fast zero that would be slow).
    NotSupported = 95,
}

impl NbdError {
    /// The error for a host error number. Numbers unknown to the protocol become `EIO`.
    pub fn from_errno(errno: i32) -> Self {
        match errno {
            libc::EPERM | libc::EROFS | libc::EACCES => Self::Perm,
            libc::EINVAL => Self::Invalid,
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => Self::NoSpace,
            libc::EOPNOTSUPP => Self::NotSupported,
            _ => Self::Io,
        }
    }

    /// The message of an error reply.
    pub const fn message(self) -> &'static str {
        match self {
            Self::Perm => "the export is read-only",
            Self::Io => "the export's storage failed; see the server's log for the cause",
            Self::Invalid => "the request is not valid for this export",
            Self::NoSpace => "no space is left, or the request extends past the end of the export",
            Self::Overflow => "the request is longer than 32 MiB",
            Self::NotSupported => "the operation would not be faster than writing zeroes",
        }
    }

    /// The value on the wire.
    pub const fn value(self) -> u32 {
        self as u32
    }
}

/// Reads big-endian numbers and runs of bytes from the front of a slice.
#[derive(Clone, Copy, Debug)]
pub struct Cursor<'a>(pub &'a [u8]);

impl<'a> Cursor<'a> {
    /// The next `count` bytes; `None`, here and below, if there are fewer.
    pub fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }

    /// A number of 16 bits.
    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    /// A number of 32 bits.
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    /// A number of 64 bits.
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A string preceded by its 32-bit length.
    pub fn string(&mut self) -> Option<&'a [u8]> {
        let length = self.u32()?;
        self.bytes(usize::try_from(length).ok()?)
    }

    /// Whether nothing is left.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_stops_at_the_end() {
        let mut cursor = Cursor(&[0, 0, 0, 2, b'h', b'i', 0]);
        assert_eq!(cursor.string(), Some(&b"hi"[..]));
        assert_eq!((cursor.u16(), cursor.is_empty()), (None, false));
        assert_eq!(Cursor(&[0xff; 8]).string(), None);
    }

    #[test]
    fn host_errors_keep_their_meaning() {
        assert_eq!(NbdError::from_errno(libc::EDQUOT), NbdError::NoSpace);
        assert_eq!(NbdError::from_errno(libc::ENOTSUP), NbdError::NotSupported);
        assert_eq!(NbdError::from_errno(libc::ENOMEM), NbdError::Io);
        assert_eq!(NbdError::NotSupported.value(), 95);
    }
}
