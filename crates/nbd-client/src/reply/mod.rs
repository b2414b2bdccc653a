//! Replies in the transmission phase: parses their headers and what may follow them, without I/O.
//!
//! Servers are not trusted. No reply makes the client allocate more than the request itself did, plus [`MAX_HEAD`]
//! bytes.

use crate::wire::{
    Cursor, MAX_STRING, NbdError, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, chunk, command,
};

/// Length of a reply's magic in bytes.
pub const MAGIC: usize = 4;
/// Length of the rest of a simple reply's header in bytes.
pub const SIMPLE_REST: usize = 12;
/// Length of the rest of a structured reply chunk's header in bytes.
pub const CHUNK_REST: usize = 16;
/// The maximum number of bytes of a chunk that are read before it is interpreted: an error with its message.
pub const MAX_HEAD: usize = MAX_STRING + 64;

/// The maximum number of separate pieces of a read while parts between them are missing.
const MAX_PIECES: usize = 4096;
/// The maximum number of chunks with errors in one reply.
const MAX_ERRORS: u32 = 1024;

/// How a server violated the protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Violation(pub String);

fn violation<T>(text: impl Into<String>) -> Result<T, Violation> {
    Err(Violation(text.into()))
}

/// The kind of a reply, by its magic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// A simple reply: [`SIMPLE_REST`] bytes follow.
    Simple,
    /// A chunk of a structured reply: [`CHUNK_REST`] bytes follow.
    Chunk,
}

impl Style {
    /// The kind of the reply that begins with this magic.
    ///
    /// # Errors
    /// It is not the magic of a reply; or it begins a chunk, and `structured` replies were not negotiated.
    pub fn of(magic: [u8; MAGIC], structured: bool) -> Result<Self, Violation> {
        match u32::from_be_bytes(magic) {
            SIMPLE_REPLY_MAGIC => Ok(Self::Simple),
            STRUCTURED_REPLY_MAGIC if structured => Ok(Self::Chunk),
            STRUCTURED_REPLY_MAGIC => {
                violation("it sent a structured reply without being asked to")
            }
            magic => violation(format!("a reply begins with the wrong magic 0x{magic:08x}")),
        }
    }
}

/// The rest of a simple reply's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Simple {
    /// 0, or an error number.
    pub error: u32,
    /// The request's cookie.
    pub cookie: u64,
}

impl Simple {
    /// Parses it.
    pub fn parse(bytes: [u8; SIMPLE_REST]) -> Self {
        let [a, b, c, d, cookie @ ..] = bytes;
        Self { error: u32::from_be_bytes([a, b, c, d]), cookie: u64::from_be_bytes(cookie) }
    }
}

/// The rest of a chunk's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// [`chunk::FLAG_DONE`], and possibly unknown flags.
    pub flags: u16,
    /// One of [`chunk`].
    pub kind: u16,
    /// The request's cookie.
    pub cookie: u64,
    /// Bytes that follow.
    pub length: u32,
}

impl Chunk {
    /// Parses it.
    pub fn parse(bytes: [u8; CHUNK_REST]) -> Self {
        let all = u128::from_be_bytes(bytes);
        Self {
            flags: (all >> 112) as u16,
            kind: (all >> 96) as u16,
            cookie: (all >> 32) as u64,
            length: all as u32,
        }
    }

    /// Whether it is the last of its reply.
    pub fn is_last(&self) -> bool {
        self.flags & chunk::FLAG_DONE != 0
    }

    /// How many bytes to read of it before calling [`Expected::chunk`].
    ///
    /// # Errors
    /// It is longer than its kind allows.
    pub fn head(&self) -> Result<usize, Violation> {
        if self.kind == chunk::OFFSET_DATA {
            return Ok(8.min(self.length as usize));
        }
        let length = self.length as usize;
        if length > MAX_HEAD && self.kind != chunk::BLOCK_STATUS {
            return violation(format!("a chunk of kind {} has {length} bytes", self.kind));
        }
        // Only the first extent is used.
        Ok(length.min(MAX_HEAD))
    }
}

/// What to do with the request's buffer after a part of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing.
    Nothing,
    /// The next `length` bytes belong to the buffer from `at` on.
    Data {
        /// Where in the buffer.
        at: usize,
        /// How many bytes.
        length: usize,
    },
    /// Zero `length` bytes of the buffer from `at` on.
    Zeroes {
        /// Where in the buffer.
        at: usize,
        /// How many bytes.
        length: usize,
    },
    /// Skip the next `length` bytes.
    Skip {
        /// How many bytes.
        length: usize,
    },
}

/// The first extent of a described range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Its length in bytes; not 0, and possibly more than requested.
    pub length: u32,
    /// Its [state](crate::wire::state).
    pub flags: u32,
}

/// The expected reply to one request, and what has arrived of it.
#[derive(Clone, Debug)]
pub struct Expected {
    command: u16,
    offset: u64,
    length: u32,
    /// The ID of the context whose extents were requested.
    context: u32,
    /// The pieces of the buffer that have arrived, in order, with adjacent ones merged.
    pieces: Vec<(usize, usize)>,
    extent: Option<Extent>,
    error: Option<u32>,
    errors: u32,
}

impl Expected {
    /// The reply expected to a request; `context` is the ID of the context `base:allocation`, if extents are requested.
    pub fn new(command: u16, offset: u64, length: u32, context: u32) -> Self {
        Self {
            command,
            offset,
            length,
            context,
            pieces: Vec::new(),
            extent: None,
            error: None,
            errors: 0,
        }
    }

    /// The error number that was reported.
    pub fn error(&self) -> Option<u32> {
        self.error
    }

    /// The extent that was reported.
    pub fn extent(&self) -> Option<Extent> {
        self.extent
    }

    /// Handles a simple reply, which is complete. `structured` says whether structured replies were negotiated.
    ///
    /// # Errors
    /// A simple reply to this command is not allowed.
    pub fn simple(&mut self, error: u32, structured: bool) -> Result<Step, Violation> {
        let reads = self.command == command::READ;
        if structured && reads || self.command == command::BLOCK_STATUS {
            return violation("it sent a simple reply where a structured one was agreed upon");
        }
        if error != 0 {
            self.error = Some(error);
            return Ok(Step::Nothing);
        }
        if !reads {
            return Ok(Step::Nothing);
        }
        self.pieces = vec![(0, self.length as usize)];
        Ok(Step::Data { at: 0, length: self.length as usize })
    }

    /// Handles a chunk: its header, and the [first bytes](Chunk::head) after it.
    ///
    /// # Errors
    /// It does not match the request, or contradicts earlier chunks.
    pub fn chunk(&mut self, header: &Chunk, head: &[u8]) -> Result<Step, Violation> {
        let short = || Violation(format!("a chunk of kind {} is too short", header.kind));
        let mut cursor = Cursor(head);
        match header.kind {
            chunk::NONE => {
                if header.length != 0 || !header.is_last() {
                    return violation("a chunk that says nothing is not the last, or has bytes");
                }
                Ok(Step::Nothing)
            }
            chunk::OFFSET_DATA => {
                let offset = cursor.u64().ok_or_else(short)?;
                let length = header.length - 8;
                let at = self.piece(offset, length.into())?;
                Ok(Step::Data { at, length: length as usize })
            }
            chunk::OFFSET_HOLE => {
                let (offset, length) = (cursor.u64(), cursor.u32());
                let (Some(offset), Some(length)) = (offset, length) else { return Err(short()) };
                if !cursor.is_empty() {
                    return violation("a chunk with a hole has more bytes than one has");
                }
                let at = self.piece(offset, length.into())?;
                Ok(Step::Zeroes { at, length: length as usize })
            }
            chunk::BLOCK_STATUS => self.extents(header, cursor).ok_or_else(short)?,
            kind if kind & chunk::IS_ERROR != 0 => {
                let (error, message) = (cursor.u32(), cursor.u16());
                let (Some(error), Some(message)) = (error, message) else { return Err(short()) };
                let message = cursor.bytes(message.into()).ok_or_else(short)?;
                if message.len() > MAX_STRING {
                    return violation("the message of an error has more than 4096 bytes");
                }
                let rest = match kind {
                    chunk::ERROR => 0,
                    chunk::ERROR_OFFSET => 8,
                    // Only the beginning of an unknown kind of error has a known format.
                    _ => cursor.0.len(),
                };
                if cursor.0.len() != rest {
                    return violation("the chunk of an error has the wrong length");
                }
                if error == 0 {
                    return violation("it reported an error that is none");
                }
                self.errors += 1;
                if self.errors > MAX_ERRORS {
                    return violation("it reports errors of one request without an end");
                }
                self.error.get_or_insert(error);
                Ok(Step::Nothing)
            }
            kind => violation(format!("it sent a chunk of the unknown kind {kind}")),
        }
    }

    /// Handles the extents in a chunk; `None` if it is too short.
    fn extents(
        &mut self,
        header: &Chunk,
        mut cursor: Cursor<'_>,
    ) -> Option<Result<Step, Violation>> {
        if self.command != command::BLOCK_STATUS {
            return Some(violation("it sent extents that were not requested"));
        }
        let context = cursor.u32()?;
        if context != self.context || self.extent.is_some() {
            return Some(violation(
                "it sent extents of a context that was not requested, or sent them twice",
            ));
        }
        if header.length % 8 != 4 {
            return Some(violation("a chunk ends within an extent"));
        }
        let extent = Extent { length: cursor.u32()?, flags: cursor.u32()? };
        if extent.length == 0 {
            return Some(violation("it sent an extent of no bytes"));
        }
        self.extent = Some(extent);
        let length = (header.length as usize).saturating_sub(MAX_HEAD);
        Some(Ok(if length == 0 { Step::Nothing } else { Step::Skip { length } }))
    }

    /// Records that a piece has arrived. Returns its position in the buffer.
    fn piece(&mut self, offset: u64, length: u64) -> Result<usize, Violation> {
        if self.command != command::READ {
            return violation("it sent data that was not requested");
        }
        let at = offset.checked_sub(self.offset);
        let at = at.filter(|at| {
            length > 0 && at.checked_add(length).is_some_and(|end| end <= self.length.into())
        });
        let Some(at) = at else {
            return violation(format!(
                "it sent {length} bytes at {offset} for a read of {} at {}",
                self.length, self.offset
            ));
        };
        let (start, end) = (at as usize, (at + length) as usize);
        let next = self.pieces.partition_point(|piece| piece.1 < start);
        match self.pieces.get_mut(next) {
            // It continues the piece before it.
            Some(piece) if piece.1 == start => {
                piece.1 = end;
                if let Some(after) = self.pieces.get(next + 1).copied() {
                    if after.0 < end {
                        return violation("it sent bytes of a read twice");
                    }
                    if after.0 == end {
                        self.pieces[next].1 = after.1;
                        self.pieces.remove(next + 1);
                    }
                }
            }
            Some(piece) if piece.0 < end => return violation("it sent bytes of a read twice"),
            Some(piece) if piece.0 == end => piece.0 = start,
            _ => {
                if self.pieces.len() == MAX_PIECES {
                    return violation("it sent a read in too many pieces");
                }
                self.pieces.insert(next, (start, end));
            }
        }
        Ok(start)
    }

    /// Completes the reply after its last part.
    ///
    /// # Errors
    /// The reply is incomplete.
    pub fn finish(&self) -> Result<(), Violation> {
        if self.error.is_some() {
            return Ok(());
        }
        match self.command {
            command::READ if self.pieces[..] != [(0, self.length as usize)] => {
                violation("it ended the reply to a read before all of its bytes had come")
            }
            command::BLOCK_STATUS if self.extent.is_none() => {
                violation("it described a range without an extent")
            }
            _ => Ok(()),
        }
    }
}

/// The operating system's error number for the error in a reply. The protocol's numbers are Linux's; unknown ones
/// become `EIO`.
pub fn errno(error: u32) -> i32 {
    const KNOWN: [u32; 8] = [
        NbdError::Perm.value(),
        NbdError::Io.value(),
        libc::ENOMEM as u32,
        NbdError::Invalid.value(),
        NbdError::NoSpace.value(),
        NbdError::Overflow.value(),
        NbdError::NotSupported.value(),
        libc::ESHUTDOWN as u32,
    ];
    if KNOWN.contains(&error) { error as i32 } else { libc::EIO }
}

#[cfg(test)]
mod tests;
