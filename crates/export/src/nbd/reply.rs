//! Replies of the transmission phase: encoding.

use super::wire::{NbdError, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, chunk};

/// Length of a simple reply without data, in bytes.
pub const SIMPLE_SIZE: usize = 16;
/// Length of a structured chunk's header in bytes.
pub const CHUNK_SIZE: usize = 20;
/// Length of what precedes the data in a structured reply to a read, in bytes.
pub const READ_SIZE: usize = CHUNK_SIZE + 8;

/// A simple reply; a read's data follows it.
pub fn simple(cookie: u64, error: Option<NbdError>) -> [u8; SIMPLE_SIZE] {
    let mut reply = [0; SIMPLE_SIZE];
    reply[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    reply[4..8].copy_from_slice(&error.map_or(0, NbdError::value).to_be_bytes());
    reply[8..].copy_from_slice(&cookie.to_be_bytes());
    reply
}

/// The header of a structured chunk with `length` bytes of payload.
pub fn chunk_header(cookie: u64, flags: u16, kind: u16, length: u32) -> [u8; CHUNK_SIZE] {
    let mut header = [0; CHUNK_SIZE];
    header[..4].copy_from_slice(&STRUCTURED_REPLY_MAGIC.to_be_bytes());
    header[4..6].copy_from_slice(&flags.to_be_bytes());
    header[6..8].copy_from_slice(&kind.to_be_bytes());
    header[8..16].copy_from_slice(&cookie.to_be_bytes());
    header[16..].copy_from_slice(&length.to_be_bytes());
    header
}

/// The header of a structured reply to a read, before all its `length` bytes (at least 1) of data.
pub fn read_header(cookie: u64, offset: u64, length: u32) -> [u8; READ_SIZE] {
    read_part(cookie, offset, length, true)
}

/// The header of a chunk with a part of the data of a structured reply to a read, which may be the last one.
pub fn read_part(cookie: u64, offset: u64, length: u32, is_last: bool) -> [u8; READ_SIZE] {
    let mut header = [0; READ_SIZE];
    let flags = if is_last { chunk::FLAG_DONE } else { 0 };
    let chunk = chunk_header(cookie, flags, chunk::OFFSET_DATA, length + 8);
    header[..CHUNK_SIZE].copy_from_slice(&chunk);
    header[CHUNK_SIZE..].copy_from_slice(&offset.to_be_bytes());
    header
}

/// The structured reply to a read of no bytes.
pub fn empty_read(cookie: u64) -> [u8; CHUNK_SIZE] {
    chunk_header(cookie, chunk::FLAG_DONE, chunk::NONE, 0)
}

/// A complete structured reply that reports an error, with a human-readable message.
pub fn structured_error(cookie: u64, error: NbdError, message: &str) -> Vec<u8> {
    let message = &message.as_bytes()[..message.len().min(super::wire::MAX_STRING)];
    let length = message.len() as u16;
    let mut reply = Vec::with_capacity(CHUNK_SIZE + 6 + message.len());
    let header = chunk_header(cookie, chunk::FLAG_DONE, chunk::ERROR, 6 + u32::from(length));
    reply.extend_from_slice(&header);
    reply.extend_from_slice(&error.value().to_be_bytes());
    reply.extend_from_slice(&length.to_be_bytes());
    reply.extend_from_slice(message);
    reply
}

/// The chunk of one metadata context, appended to `reply`.
pub fn block_status(
    reply: &mut Vec<u8>,
    cookie: u64,
    context: u32,
    extents: &[(u32, u32)],
    last: bool,
) {
    let flags = if last { chunk::FLAG_DONE } else { 0 };
    let length = 4 + 8 * extents.len() as u32;
    reply.extend_from_slice(&chunk_header(cookie, flags, chunk::BLOCK_STATUS, length));
    reply.extend_from_slice(&context.to_be_bytes());
    for (length, flags) in extents {
        reply.extend_from_slice(&length.to_be_bytes());
        reply.extend_from_slice(&flags.to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_simple_reply() {
        let reply = simple(0x0102_0304_0506_0708, Some(NbdError::NoSpace));
        assert_eq!(reply, *b"\x67\x44\x66\x98\0\0\0\x1c\x01\x02\x03\x04\x05\x06\x07\x08");
    }

    #[test]
    fn a_structured_read() {
        let reply = read_header(1, 0x1000, 512);
        let expected =
            b"\x66\x8e\x33\xef\0\x01\0\x01\0\0\0\0\0\0\0\x01\0\0\x02\x08\0\0\0\0\0\0\x10\0";
        assert_eq!(reply, *expected);
    }

    #[test]
    fn a_structured_error() {
        let reply = structured_error(2, NbdError::Io, "no");
        assert_eq!(&reply[4..8], b"\0\x01\x80\x01");
        assert_eq!(&reply[16..], b"\0\0\0\x08\0\0\0\x05\0\x02no");
    }

    #[test]
    fn extents_of_two_contexts() {
        let mut reply = Vec::new();
        block_status(&mut reply, 3, 0, &[(4096, 3)], false);
        block_status(&mut reply, 3, 1, &[(1, 1), (2, 0)], true);
        assert_eq!(reply.len(), CHUNK_SIZE + 12 + CHUNK_SIZE + 20);
        assert_eq!(&reply[4..8], b"\0\0\0\x05");
        assert_eq!(&reply[16..32], b"\0\0\0\x0c\0\0\0\0\0\0\x10\0\0\0\0\x03");
        assert_eq!(&reply[36..40], b"\0\x01\0\x05");
        assert_eq!(&reply[48..], b"\0\0\0\x14\0\0\0\x01\0\0\0\x01\0\0\0\x01\0\0\0\x02\0\0\0\0");
    }
}
