//! The negotiation with a server: choosing an export and finding out what it supports.
//!
//! It works on any stream, which is responsible for deadlines. Every length that the server sends is checked before
//! that many bytes are read or allocated, and the number of replies to an option is bounded.

use crate::wire::{
    Cursor, GREETING_MAGIC, MAX_PAYLOAD, MAX_STRING, OLD_STYLE_MAGIC, OPTION_MAGIC,
    OPTION_REPLY_MAGIC, handshake_flag, info, option, option_reply, transmission_flag,
};
use isobath_tls::{Blocking, Channel};
use std::io::{self, ErrorKind, Read, Write};
use std::path::Path;

/// The metadata context that distinguishes data from holes.
pub const ALLOCATION: &str = "base:allocation";

/// The maximum length of a reply to an option in bytes: the longest string, and the numbers before it.
const MAX_REPLY: u32 = MAX_STRING as u32 + 64;
/// The maximum number of replies to one option.
const MAX_REPLIES: u32 = 1024;
/// The largest minimum block size that the protocol allows.
const MAX_MINIMUM: u32 = 64 << 10;
/// Bytes that a server without `NO_ZEROES` sends after the flags of an export.
const PADDING: usize = 124;

/// Why a negotiation failed.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The connection failed, or ended.
    #[error("{}", lost(.0))]
    Io(#[from] io::Error),
    /// The server violated the protocol.
    #[error("the server does not speak the NBD protocol correctly: {0}")]
    Protocol(String),
    /// The server refused, or lacks a required feature.
    #[error("{0}")]
    Refused(String),
}

fn lost(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::UnexpectedEof => "the server closed the connection during negotiation".into(),
        // On Linux, a socket's timeout is reported as this.
        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
            "the server did not answer during negotiation".into()
        }
        _ => format!("negotiation failed: {}", isobath_storage::cause(error)),
    }
}

fn protocol<T>(text: impl Into<String>) -> Result<T, HandshakeError> {
    Err(HandshakeError::Protocol(text.into()))
}

fn refused<T>(text: impl Into<String>) -> Result<T, HandshakeError> {
    Err(HandshakeError::Refused(text.into()))
}

/// The result of a negotiation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// The size of the export in bytes; at most `i64::MAX`.
    pub size: u64,
    /// Its [flags](transmission_flag).
    pub flags: u16,
    /// Whether replies are structured.
    pub structured: bool,
    /// The id of the context `base:allocation`, if the server has it.
    pub allocation: Option<u32>,
    /// The minimum block size: offsets and lengths are multiples of it, except for a range that ends with the export. A
    /// power of two, at most 64 KiB.
    pub minimum: u32,
    /// The maximum length of a read or write in bytes: a multiple of the minimum, at most 32 MiB.
    pub maximum: u32,
}

impl Agreed {
    /// Whether the export has this [flag](transmission_flag).
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// Whether changes are refused.
    pub fn is_read_only(&self) -> bool {
        self.has(transmission_flag::READ_ONLY)
    }

    fn new(size: u64, flags: u16) -> Result<Self, HandshakeError> {
        if size > i64::MAX as u64 {
            return protocol(format!("an export cannot have {size} bytes"));
        }
        if flags & transmission_flag::HAS_FLAGS == 0 {
            return protocol("the export has no flags");
        }
        let (minimum, maximum) = (1, MAX_PAYLOAD);
        Ok(Self { size, flags, structured: false, allocation: None, minimum, maximum })
    }

    fn set_blocks(&mut self, minimum: u32, maximum: u32) -> Result<(), HandshakeError> {
        if !minimum.is_power_of_two() || minimum > MAX_MINIMUM {
            return protocol(format!("the minimum block size cannot be {minimum}"));
        }
        let most = maximum.min(MAX_PAYLOAD) / minimum * minimum;
        if most == 0 {
            return protocol(format!(
                "the maximum block size {maximum} is less than the minimum {minimum}"
            ));
        }
        (self.minimum, self.maximum) = (minimum, most);
        Ok(())
    }
}

/// A reply to an option.
struct Reply {
    kind: u32,
    payload: Vec<u8>,
}

impl Reply {
    /// The message of an error.
    fn message(&self) -> String {
        let text = String::from_utf8_lossy(&self.payload);
        let text = text.trim();
        if text.is_empty() {
            return String::new();
        }
        format!("\nserver reported: {}", isobath_storage::shown(Path::new(text)))
    }
}

struct Session<'a, S> {
    stream: &'a mut S,
    /// The number of replies to the current option.
    replies: u32,
}

impl<S: Read + Write> Session<'_, S> {
    fn array<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn u16(&mut self) -> io::Result<u16> {
        self.array().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> io::Result<u32> {
        self.array().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> io::Result<u64> {
        self.array().map(u64::from_be_bytes)
    }

    fn send(&mut self, option: u32, payload: &[u8]) -> io::Result<()> {
        self.replies = 0;
        let length = payload.len() as u32;
        let parts = [
            &OPTION_MAGIC.to_be_bytes()[..],
            &option.to_be_bytes(),
            &length.to_be_bytes(),
            payload,
        ];
        self.stream.write_all(&parts.concat())
    }

    /// The next reply to an option.
    fn reply(&mut self, to: u32) -> Result<Reply, HandshakeError> {
        self.replies += 1;
        if self.replies > MAX_REPLIES {
            return protocol("it answers an option without an end");
        }
        let magic = self.u64()?;
        if magic != OPTION_REPLY_MAGIC {
            return protocol(format!("a reply to an option has the wrong magic 0x{magic:016x}"));
        }
        let option = self.u32()?;
        if option != to {
            return protocol(format!("it replied to option {option} instead of {to}"));
        }
        let (kind, length) = (self.u32()?, self.u32()?);
        if length > MAX_REPLY {
            return protocol(format!("a reply to an option has {length} bytes"));
        }
        let mut payload = vec![0; length as usize];
        self.stream.read_exact(&mut payload)?;
        if kind == option_reply::ACK && length > 0 {
            return protocol("an acknowledgement has data");
        }
        Ok(Reply { kind, payload })
    }

    /// Negotiates everything with a server that supports fixed newstyle.
    fn choose(&mut self, export: &str, no_zeroes: bool) -> Result<Agreed, HandshakeError> {
        let structured = self.structured()?;
        let allocation = if structured { self.allocation(export)? } else { None };
        let agreed = match self.go(export)? {
            Some(agreed) => agreed,
            None => self.export_name(export, no_zeroes)?,
        };
        Ok(Agreed { structured, allocation, ..agreed })
    }

    /// Requests structured replies.
    fn structured(&mut self) -> Result<bool, HandshakeError> {
        self.send(option::STRUCTURED_REPLY, &[])?;
        match self.reply(option::STRUCTURED_REPLY)?.kind {
            option_reply::ACK => Ok(true),
            kind if kind & option_reply::ERROR != 0 => Ok(false),
            kind => protocol(format!(
                "it replied to the request for structured replies with type {kind}"
            )),
        }
    }

    /// Requests the context `base:allocation`. Returns its ID.
    fn allocation(&mut self, export: &str) -> Result<Option<u32>, HandshakeError> {
        let option = option::SET_META_CONTEXT;
        let payload = [&string(export)[..], &1_u32.to_be_bytes(), &string(ALLOCATION)].concat();
        self.send(option, &payload)?;
        let mut found = None;
        loop {
            let reply = self.reply(option)?;
            match reply.kind {
                option_reply::ACK => return Ok(found),
                option_reply::META_CONTEXT => {
                    let mut cursor = Cursor(&reply.payload);
                    let id = cursor.u32();
                    if id.is_none() || cursor.0 != ALLOCATION.as_bytes() || found.is_some() {
                        return protocol("it selects a metadata context that was not requested");
                    }
                    found = id;
                }
                // The export may not exist, which the next option reports more clearly.
                kind if kind & option_reply::ERROR != 0 => return Ok(None),
                kind => {
                    return protocol(format!(
                        "it replied to the request for a metadata context with type {kind}"
                    ));
                }
            }
        }
    }

    /// Chooses the export; `None` if the server does not support the option.
    fn go(&mut self, export: &str) -> Result<Option<Agreed>, HandshakeError> {
        let wanted = [&1_u16.to_be_bytes()[..], &info::BLOCK_SIZE.to_be_bytes()].concat();
        self.send(option::GO, &[&string(export)[..], &wanted].concat())?;
        let (mut agreed, mut blocks) = (None, None);
        loop {
            let reply = self.reply(option::GO)?;
            let mut cursor = Cursor(&reply.payload);
            match reply.kind {
                option_reply::ACK => break,
                option_reply::INFO => match cursor.u16() {
                    Some(info::EXPORT) => match (cursor.u64(), cursor.u16()) {
                        (Some(size), Some(flags)) if cursor.is_empty() => {
                            agreed = Some(Agreed::new(size, flags)?);
                        }
                        _ => return protocol("the description of the export has the wrong length"),
                    },
                    Some(info::BLOCK_SIZE) => match (cursor.u32(), cursor.u32(), cursor.u32()) {
                        (Some(minimum), Some(_), Some(maximum)) if cursor.is_empty() => {
                            blocks = Some((minimum, maximum));
                        }
                        _ => return protocol("the block sizes have the wrong length"),
                    },
                    Some(_) => {}
                    None => return protocol("a piece of information has no type"),
                },
                option_reply::ERR_UNSUP => return Ok(None),
                kind if kind & option_reply::ERROR != 0 => return explained(&reply),
                kind => {
                    return protocol(format!(
                        "it replied to the choice of an export with type {kind}"
                    ));
                }
            }
        }
        let Some(mut agreed) = agreed else {
            return protocol("it did not say how large the export is");
        };
        if let Some((minimum, maximum)) = blocks {
            agreed.set_blocks(minimum, maximum)?;
        }
        Ok(Some(agreed))
    }

    /// Chooses the export by the option that every server supports, but that has no error replies.
    fn export_name(&mut self, export: &str, no_zeroes: bool) -> Result<Agreed, HandshakeError> {
        self.send(option::EXPORT_NAME, export.as_bytes())?;
        let size = match self.u64() {
            Ok(size) => size,
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                return refused(format!(
                    "the server closed the connection; it probably has no export '{}'",
                    isobath_storage::shown(Path::new(export))
                ));
            }
            Err(error) => return Err(error.into()),
        };
        let flags = self.u16()?;
        if !no_zeroes {
            let _: [u8; PADDING] = self.array()?;
        }
        Agreed::new(size, flags)
    }
}

/// Turns a server's error reply into a failure.
fn explained<T>(reply: &Reply) -> Result<T, HandshakeError> {
    let what = match reply.kind {
        option_reply::ERR_POLICY => "Denied by server for option 7 (go)".to_owned(),
        option_reply::ERR_TLS_REQD => {
            "Server requires TLS for option 7 (go): use --image-opts with tls-creds=ID, and --object \
             tls-creds-x509,id=ID,dir=DIR,endpoint=client"
                .to_owned()
        }
        option_reply::ERR_PLATFORM => "Server lacks support for option 7 (go)".to_owned(),
        option_reply::ERR_INVALID => "Invalid parameters for option 7 (go)".to_owned(),
        option_reply::ERR_UNKNOWN => "Requested export not available".to_owned(),
        option_reply::ERR_SHUTDOWN => "Server shutting down before option 7 (go)".to_owned(),
        option_reply::ERR_BLOCK_SIZE_REQD => {
            "Server requires INFO_BLOCK_SIZE for option 7 (go)".to_owned()
        }
        kind => format!("Unknown error code 0x{kind:x} when asking for option 7 (go)"),
    };
    refused(what + &reply.message())
}

/// A string preceded by its length.
fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
}

impl<S: Read + Write> Session<'_, S> {
    /// Reads the greeting, and answers it. Returns the flags.
    fn greet(&mut self) -> Result<u16, HandshakeError> {
        let magic = self.u64()?;
        if magic != GREETING_MAGIC {
            return protocol("its greeting is not that of an NBD server");
        }
        match self.u64()? {
            OPTION_MAGIC => {}
            OLD_STYLE_MAGIC => {
                return refused(
                    "the server speaks only the first version of the NBD protocol, which is not supported",
                );
            }
            magic => return protocol(format!("its greeting has the wrong magic 0x{magic:016x}")),
        }
        let known = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
        let flags = self.u16()? & known;
        self.stream.write_all(&u32::from(flags).to_be_bytes())?;
        Ok(flags)
    }

    /// Asks for a TLS handshake.
    fn start_tls(&mut self) -> Result<(), HandshakeError> {
        self.send(option::STARTTLS, &[])?;
        let reply = self.reply(option::STARTTLS)?;
        match reply.kind {
            option_reply::ACK => Ok(()),
            option_reply::ERR_UNSUP | option_reply::ERR_POLICY => {
                refused(format!("the server does not encrypt connections (TLS){}", reply.message()))
            }
            kind if kind & option_reply::ERROR != 0 => {
                refused(format!("the server refuses to encrypt{}", reply.message()))
            }
            kind => protocol(format!("it replied to the request for TLS with type {kind}")),
        }
    }

    /// Chooses the export, with a server that has these flags.
    fn choose_by(&mut self, export: &str, flags: u16) -> Result<Agreed, HandshakeError> {
        let no_zeroes = flags & handshake_flag::NO_ZEROES != 0;
        if flags & handshake_flag::FIXED_NEWSTYLE == 0 {
            return self.export_name(export, no_zeroes);
        }
        let agreed = self.choose(export, no_zeroes);
        if matches!(&agreed, Err(HandshakeError::Refused(_))) {
            // Failing to send is harmless: the server notices the end of the stream.
            let _ = self.send(option::ABORT, &[]);
        }
        agreed
    }
}

/// Chooses the export of this name, and negotiates how it is used. Afterwards the stream carries requests and replies.
///
/// # Errors
/// The stream fails or ends; the server violates the protocol, speaks only its first version, or refuses.
pub fn negotiate<S: Read + Write>(stream: &mut S, export: &str) -> Result<Agreed, HandshakeError> {
    let mut session = Session { stream, replies: 0 };
    let flags = session.greet()?;
    session.choose_by(export, flags)
}

/// Encrypts the connection by the channel, and then does what [`negotiate`] does. Returns the encrypted stream, too.
///
/// # Errors
/// As [`negotiate`], or the server does not encrypt, is not the expected one, or does not admit the client.
pub fn negotiate_secured<S: Read + Write>(
    mut stream: S,
    channel: Channel,
    export: &str,
) -> Result<(Agreed, Blocking<S>), HandshakeError> {
    let mut session = Session { stream: &mut stream, replies: 0 };
    let flags = session.greet()?;
    if flags & handshake_flag::FIXED_NEWSTYLE == 0 {
        return refused("the server is too old to encrypt connections (TLS)");
    }
    session.start_tls()?;
    let mut stream = Blocking::handshake(stream, channel)?;
    let agreed = Session { stream: &mut stream, replies: 0 }.choose_by(export, flags)?;
    Ok((agreed, stream))
}

#[cfg(test)]
mod tests;
