//! The handshake: fixed newstyle negotiation as a state machine without I/O.
//!
//! Pass the client's input to [`Handshake::advance`]; it consumes whole messages, appends the output to send, and
//! reports when the transmission phase begins.

use super::bitmap::ExportedBitmap;
use super::context::{Context, Contexts, is_listed, is_selected};
use super::wire::{
    Cursor, GREETING_MAGIC, MAX_PAYLOAD, MAX_STRING, OPTION_MAGIC, OPTION_REPLY_MAGIC,
    handshake_flag, info, option, option_reply, transmission_flag,
};

use std::borrow::Cow;
use std::sync::Arc;

/// Maximum length of option data that is read, in bytes. An option with more is refused and its data skipped.
pub const MAX_OPTION: usize = 64 << 10;
/// Maximum length of option data that is skipped, in bytes. An option with more ends the session.
pub const MAX_SKIP: u32 = 32 << 20;

/// While more than this many bytes wait to be sent, no further option is handled.
const MAX_OUTPUT: usize = 64 << 10;
const OPTION_HEADER: usize = 16;
const CLIENT_FLAGS: usize = 4;

/// An export as the handshake describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// The name by which clients choose the export.
    pub name: String,
    /// A human-readable description; may be empty.
    pub description: String,
    /// Size in bytes.
    pub size: u64,
    /// Whether writes are refused.
    pub read_only: bool,
    /// The preferred alignment of requests in bytes.
    pub preferred_block: u32,
    /// Whether `qemu:allocation-depth` is offered.
    pub allocation_depth: bool,
    /// Whether a client may have several connections.
    pub multi_conn: bool,
    /// Bitmaps that are offered.
    pub bitmaps: Arc<[ExportedBitmap]>,
}

impl ExportInfo {
    /// The transmission flags.
    pub fn flags(&self, structured: bool) -> u16 {
        use transmission_flag as flag;
        let writes = if self.read_only {
            flag::READ_ONLY
        } else {
            flag::SEND_TRIM | flag::SEND_WRITE_ZEROES | flag::SEND_FAST_ZERO
        };
        let fragments = if structured { flag::SEND_DF } else { 0 };
        flag::HAS_FLAGS
            | flag::SEND_FLUSH
            | flag::SEND_FUA
            | flag::SEND_CACHE
            | if self.multi_conn { flag::CAN_MULTI_CONN } else { 0 }
            | writes
            | fragments
    }

    /// The metadata contexts that are offered, with their names.
    fn contexts(&self) -> Vec<(Context, Cow<'static, str>)> {
        let mut contexts = vec![(Context::Allocation, "base:allocation".into())];
        if self.allocation_depth {
            contexts.push((Context::Depth, "qemu:allocation-depth".into()));
        }
        let bitmaps = (0..).map(Context::Bitmap).zip(self.bitmaps.iter());
        contexts.extend(bitmaps.map(|(context, bitmap)| (context, bitmap.context().into())));
        contexts
    }

    /// The preferred block size as the protocol requires it: a power of two, 512 bytes to the maximum.
    fn preferred(&self) -> u32 {
        self.preferred_block.clamp(512, MAX_PAYLOAD).next_power_of_two()
    }
}

/// What the client and the server agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreement {
    /// Index of the chosen export, among those last passed to [`Handshake::advance`].
    pub export: usize,
    /// Whether replies are structured.
    pub structured: bool,
    /// The metadata contexts selected for this export.
    pub contexts: Contexts,
}

/// The state of a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// More input is needed.
    More,
    /// The client has ended the session: send the output and close.
    Aborted,
    /// The transmission phase begins with the next byte of input.
    Transmission(Agreement),
    /// Send the output, and perform a TLS handshake: all further input and output is encrypted.
    StartTls,
}

/// Whether a client can encrypt its connection, by `STARTTLS`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encryption {
    /// It cannot.
    #[default]
    Unsupported,
    /// It may.
    Optional,
    /// It must, before anything else.
    Required,
    /// It does.
    Established,
}

/// The result of one call to [`Handshake::advance`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Bytes of input consumed; the rest must be passed again, followed by more.
    pub consumed: usize,
    /// The state of the handshake now.
    pub outcome: Outcome,
}

/// A protocol violation by the client, which ends the session immediately.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// Client flags that were not offered.
    #[error("the client set flags that were not offered: {0:#x}")]
    ClientFlags(u32),
    /// An option without the option magic.
    #[error("wrong option magic: {0:#018x} instead of {OPTION_MAGIC:#018x}")]
    OptionMagic(u64),
    /// An option that needs fixed newstyle from a client that did not ask for it.
    #[error("the client sent option {0} without negotiating fixed newstyle")]
    NotFixed(u32),
    /// An option too long to be skipped.
    #[error("option {option} has {length} bytes of data, which is too long")]
    OptionTooLong {
        /// The option.
        option: u32,
        /// Its length in bytes.
        length: u32,
    },
    /// `EXPORT_NAME` for an export that does not exist; the protocol has no error reply for it.
    #[error("there is no export named '{0}'")]
    NoSuchExport(String),
    /// `EXPORT_NAME` without the encryption that is required; the protocol has no error reply for it.
    #[error("the client chose an export without encryption (TLS), which is required")]
    TlsRequired,
    /// Input that follows `STARTTLS` before it was answered: the client, or somebody between it and the server, sent
    /// without encryption what could be taken for encrypted.
    #[error("{0} bytes follow STARTTLS without encryption")]
    AfterStartTls(usize),
}

/// A fixed newstyle handshake, the server's side.
#[derive(Debug, Default)]
pub struct Handshake {
    greeted: bool,
    fixed: bool,
    no_zeroes: bool,
    structured: bool,
    encryption: Encryption,
    /// The export for which contexts were selected, and the selected contexts.
    selected: Option<(String, Contexts)>,
    /// Number of bytes of refused option data still to be skipped.
    skip: u32,
}

/// Why an option is refused: an error type and a human-readable message.
type Refusal = (u32, &'static str);

const MALFORMED: Refusal = (option_reply::ERR_INVALID, "the option's data is malformed");
const NO_DATA: Refusal = (option_reply::ERR_INVALID, "the option takes no data");
const UNKNOWN: Refusal = (option_reply::ERR_UNKNOWN, "there is no export with this name");
const UNSTRUCTURED: Refusal =
    (option_reply::ERR_INVALID, "metadata contexts require structured replies");
const TOO_LONG: Refusal = (option_reply::ERR_TOO_BIG, "the option's data is too long");
const NAME_TOO_LONG: Refusal = (option_reply::ERR_TOO_BIG, "a name is longer than 4096 bytes");
const TLS_REQUIRED: Refusal =
    (option_reply::ERR_TLS_REQD, "the server requires encryption (TLS): send STARTTLS first");
const TLS_ESTABLISHED: Refusal = (option_reply::ERR_INVALID, "the connection is already encrypted");
const UNSUPPORTED: Refusal = (option_reply::ERR_UNSUP, "this server does not support the option");

impl Handshake {
    /// A handshake with a client that can, may or must encrypt.
    pub fn new(encryption: Encryption) -> Self {
        Self { encryption, ..Self::default() }
    }

    /// The greeting that the server sends before anything else.
    pub fn greeting() -> [u8; 18] {
        let mut greeting = [0; 18];
        let flags = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
        greeting[..8].copy_from_slice(&GREETING_MAGIC.to_be_bytes());
        greeting[8..16].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
        greeting[16..].copy_from_slice(&flags.to_be_bytes());
        greeting
    }

    /// Takes the next messages from `input` and appends the replies to `output`.
    ///
    /// The exports may differ from those in the last call.
    ///
    /// Input that ends within a message is left unconsumed. A message is at most [`MAX_OPTION`] bytes and a header
    /// long, so a buffer of that size always makes progress. If there is much output, some messages may be left for the
    /// next call.
    ///
    /// # Errors
    /// A violation after which the session must be closed without a reply.
    pub fn advance(
        &mut self,
        exports: &[ExportInfo],
        input: &[u8],
        output: &mut Vec<u8>,
    ) -> Result<Step, Violation> {
        let mut cursor = Cursor(input);
        let mut consumed = 0;
        loop {
            let outcome = self.message(exports, &mut cursor, output)?;
            let Some(outcome) = outcome else {
                return Ok(Step { consumed, outcome: Outcome::More });
            };
            consumed = input.len() - cursor.0.len();
            if outcome == Outcome::StartTls && !cursor.is_empty() {
                return Err(Violation::AfterStartTls(cursor.0.len()));
            }
            if outcome != Outcome::More || output.len() > MAX_OUTPUT {
                return Ok(Step { consumed, outcome });
            }
        }
    }

    /// Handles one message; `None` if it is incomplete.
    fn message(
        &mut self,
        exports: &[ExportInfo],
        cursor: &mut Cursor<'_>,
        output: &mut Vec<u8>,
    ) -> Result<Option<Outcome>, Violation> {
        if !self.greeted {
            return self.client_flags(cursor);
        }
        if self.skip > 0 {
            let take = cursor.0.len().min(self.skip as usize);
            if take == 0 {
                return Ok(None);
            }
            cursor.bytes(take);
            self.skip -= take as u32;
            return Ok(Some(Outcome::More));
        }
        if cursor.0.len() < OPTION_HEADER {
            return Ok(None);
        }
        let mut ahead = *cursor;
        let (Some(magic), Some(kind), Some(length)) = (ahead.u64(), ahead.u32(), ahead.u32())
        else {
            return Ok(None);
        };
        if magic != OPTION_MAGIC {
            return Err(Violation::OptionMagic(magic));
        }
        if !self.fixed && kind != option::EXPORT_NAME {
            return Err(Violation::NotFixed(kind));
        }
        let limit = if kind == option::EXPORT_NAME { MAX_STRING as u32 } else { MAX_SKIP };
        if length > limit {
            return Err(Violation::OptionTooLong { option: kind, length });
        }
        if length as usize > MAX_OPTION {
            *cursor = ahead;
            self.skip = length;
            self.forget(kind);
            refuse(output, kind, if self.needs_tls(kind) { TLS_REQUIRED } else { TOO_LONG });
            return Ok(Some(Outcome::More));
        }
        let Some(data) = ahead.bytes(length as usize) else { return Ok(None) };
        *cursor = ahead;
        self.option(exports, kind, data, output).map(Some)
    }

    fn client_flags(&mut self, cursor: &mut Cursor<'_>) -> Result<Option<Outcome>, Violation> {
        if cursor.0.len() < CLIENT_FLAGS {
            return Ok(None);
        }
        let flags = cursor.u32().unwrap_or_default();
        let fixed = u32::from(handshake_flag::FIXED_NEWSTYLE);
        let no_zeroes = u32::from(handshake_flag::NO_ZEROES);
        if flags & !(fixed | no_zeroes) != 0 {
            return Err(Violation::ClientFlags(flags));
        }
        self.fixed = flags & fixed != 0;
        self.no_zeroes = flags & no_zeroes != 0;
        self.greeted = true;
        Ok(Some(Outcome::More))
    }

    /// Whether this option is refused because the connection is not encrypted.
    fn needs_tls(&self, kind: u32) -> bool {
        let exempt = matches!(kind, option::STARTTLS | option::ABORT);
        self.encryption == Encryption::Required && !exempt
    }

    /// Answers `STARTTLS`. What was negotiated without encryption is forgotten: somebody else may have sent it.
    fn start_tls(&mut self, data: &[u8], output: &mut Vec<u8>) -> Outcome {
        let refusal = match self.encryption {
            Encryption::Unsupported => Some(UNSUPPORTED),
            Encryption::Established => Some(TLS_ESTABLISHED),
            _ if !data.is_empty() => Some(NO_DATA),
            Encryption::Optional | Encryption::Required => None,
        };
        if let Some(refusal) = refusal {
            refuse(output, option::STARTTLS, refusal);
            return Outcome::More;
        }
        self.encryption = Encryption::Established;
        self.structured = false;
        self.selected = None;
        reply(output, option::STARTTLS, option_reply::ACK, &[]);
        Outcome::StartTls
    }

    /// Clears the selected contexts if this option selects new ones: if it fails or is refused, none remain selected.
    fn forget(&mut self, kind: u32) {
        if kind == option::SET_META_CONTEXT {
            self.selected = None;
        }
    }

    fn option(
        &mut self,
        exports: &[ExportInfo],
        kind: u32,
        data: &[u8],
        output: &mut Vec<u8>,
    ) -> Result<Outcome, Violation> {
        if self.needs_tls(kind) {
            if kind == option::EXPORT_NAME {
                return Err(Violation::TlsRequired);
            }
            refuse(output, kind, TLS_REQUIRED);
            return Ok(Outcome::More);
        }
        self.forget(kind);
        let result = match kind {
            option::STARTTLS => return Ok(self.start_tls(data, output)),
            option::EXPORT_NAME => return self.export_name(exports, data, output),
            option::ABORT => {
                reply(output, kind, option_reply::ACK, &[]);
                return Ok(Outcome::Aborted);
            }
            option::LIST if data.is_empty() => {
                list(exports, output);
                Ok(())
            }
            option::STRUCTURED_REPLY if data.is_empty() => {
                self.structured = true;
                Ok(())
            }
            option::LIST | option::STRUCTURED_REPLY => Err(NO_DATA),
            option::INFO | option::GO => match self.describe(exports, kind, data, output) {
                Ok(export) if kind == option::GO => {
                    reply(output, kind, option_reply::ACK, &[]);
                    return Ok(Outcome::Transmission(self.agreement(exports, export)));
                }
                described => described.map(drop),
            },
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                self.contexts(exports, kind, data, output)
            }
            _ => Err(UNSUPPORTED),
        };
        match result {
            Ok(()) => reply(output, kind, option_reply::ACK, &[]),
            Err(refusal) => refuse(output, kind, refusal),
        }
        Ok(Outcome::More)
    }

    fn agreement(&self, exports: &[ExportInfo], export: usize) -> Agreement {
        let name = exports.get(export).map(|export| &export.name);
        let contexts = match &self.selected {
            Some((selected, contexts)) if Some(selected) == name => *contexts,
            _ => Contexts::default(),
        };
        Agreement { export, structured: self.structured, contexts }
    }

    fn export_name(
        &self,
        exports: &[ExportInfo],
        name: &[u8],
        output: &mut Vec<u8>,
    ) -> Result<Outcome, Violation> {
        let Some((index, export)) = find(exports, name) else {
            let name = String::from_utf8_lossy(name).into_owned();
            return Err(Violation::NoSuchExport(name));
        };
        output.extend_from_slice(&export.size.to_be_bytes());
        output.extend_from_slice(&export.flags(self.structured).to_be_bytes());
        if !self.no_zeroes {
            output.extend_from_slice(&[0; 124]);
        }
        Ok(Outcome::Transmission(self.agreement(exports, index)))
    }

    /// `INFO` and `GO`, up to the final acknowledgement.
    fn describe(
        &self,
        exports: &[ExportInfo],
        kind: u32,
        data: &[u8],
        output: &mut Vec<u8>,
    ) -> Result<usize, Refusal> {
        let mut cursor = Cursor(data);
        let name = cursor.string().ok_or(MALFORMED)?;
        let count = cursor.u16().ok_or(MALFORMED)?;
        if cursor.0.len() != usize::from(count) * 2 {
            return Err(MALFORMED);
        }
        if name.len() > MAX_STRING {
            return Err(NAME_TOO_LONG);
        }
        let (index, export) = find(exports, name).ok_or(UNKNOWN)?;
        let (mut wants_name, mut wants_description) = (false, false);
        while let Some(wanted) = cursor.u16() {
            wants_name |= wanted == info::NAME;
            wants_description |= wanted == info::DESCRIPTION;
        }
        let mut item = |number: u16, parts: &[&[u8]]| {
            let number = number.to_be_bytes();
            let mut payload: Vec<&[u8]> = vec![&number];
            payload.extend_from_slice(parts);
            reply(output, kind, option_reply::INFO, &payload);
        };
        if wants_name {
            item(info::NAME, &[export.name.as_bytes()]);
        }
        if wants_description && !export.description.is_empty() {
            item(info::DESCRIPTION, &[export.description.as_bytes()]);
        }
        let sizes = [1, export.preferred(), MAX_PAYLOAD].map(u32::to_be_bytes);
        item(info::BLOCK_SIZE, &[&sizes[0], &sizes[1], &sizes[2]]);
        let flags = export.flags(self.structured).to_be_bytes();
        item(info::EXPORT, &[&export.size.to_be_bytes(), &flags]);
        Ok(index)
    }

    /// `LIST_META_CONTEXT` and `SET_META_CONTEXT`, up to the final acknowledgement.
    fn contexts(
        &mut self,
        exports: &[ExportInfo],
        kind: u32,
        data: &[u8],
        output: &mut Vec<u8>,
    ) -> Result<(), Refusal> {
        if !self.structured {
            return Err(UNSTRUCTURED);
        }
        let mut cursor = Cursor(data);
        let name = cursor.string().ok_or(MALFORMED)?;
        let count = cursor.u32().ok_or(MALFORMED)?;
        let listing = kind == option::LIST_META_CONTEXT;
        let found = find(exports, name);
        let offered = found.map(|(_, export)| export.contexts()).unwrap_or_default();
        let mut chosen = Contexts::default();
        for _ in 0..count {
            let query = cursor.string().ok_or(MALFORMED)?;
            if query.len() > MAX_STRING {
                return Err(NAME_TOO_LONG);
            }
            for (context, name) in &offered {
                if is_selected(name, query) || listing && is_listed(name, query) {
                    chosen.insert(*context);
                }
            }
        }
        if !cursor.is_empty() {
            return Err(MALFORMED);
        }
        if name.len() > MAX_STRING {
            return Err(NAME_TOO_LONG);
        }
        let (_, export) = found.ok_or(UNKNOWN)?;
        for (context, name) in &offered {
            if chosen.contains(*context) || listing && count == 0 {
                let id = if listing { 0 } else { context.id() };
                let payload = [&id.to_be_bytes()[..], name.as_bytes()];
                reply(output, kind, option_reply::META_CONTEXT, &payload);
            }
        }
        if !listing {
            self.selected = Some((export.name.clone(), chosen));
        }
        Ok(())
    }
}

/// Finds an export by name. The empty name also selects the first one.
fn find<'a>(exports: &'a [ExportInfo], name: &[u8]) -> Option<(usize, &'a ExportInfo)> {
    let named = exports.iter().enumerate().find(|(_, export)| export.name.as_bytes() == name);
    named.or_else(|| exports.first().filter(|_| name.is_empty()).map(|first| (0, first)))
}

fn list(exports: &[ExportInfo], output: &mut Vec<u8>) {
    for export in exports {
        let length = (export.name.len() as u32).to_be_bytes();
        let payload = [&length[..], export.name.as_bytes(), export.description.as_bytes()];
        reply(output, option::LIST, option_reply::SERVER, &payload);
    }
}

fn refuse(output: &mut Vec<u8>, kind: u32, (error, message): Refusal) {
    reply(output, kind, error, &[message.as_bytes()]);
}

fn reply(output: &mut Vec<u8>, kind: u32, reply: u32, payload: &[&[u8]]) {
    let length: usize = payload.iter().map(|part| part.len()).sum();
    output.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
    output.extend_from_slice(&kind.to_be_bytes());
    output.extend_from_slice(&reply.to_be_bytes());
    output.extend_from_slice(&(length as u32).to_be_bytes());
    for part in payload {
        output.extend_from_slice(part);
    }
}

#[cfg(test)]
#[path = "handshake_tests.rs"]
mod tests;
