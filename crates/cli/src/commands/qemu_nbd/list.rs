//! `qemu-nbd --list`: asks a server for its exports.
//!
//! The server is not trusted: the sizes of strings and lists, and the total time, are limited.

use crate::failure::Failure;
use crate::options::printable;
use crate::server::endpoint::Endpoint;
use isobath_export::nbd::wire::{
    GREETING_MAGIC, MAX_STRING, OPTION_MAGIC, OPTION_REPLY_MAGIC, handshake_flag, info, option,
    option_reply, transmission_flag,
};
use isobath_tls::{Blocking, Channel};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// The time limit for the server.
const PATIENCE: Duration = Duration::from_secs(30);
/// Maximum length of a reply's data, in bytes.
const MOST_DATA: usize = 4 + 2 * MAX_STRING;
/// Maximum number of replies to one option.
const MOST_REPLIES: usize = 16_384;

/// Transmission flags by bit.
const FLAGS: [(u16, &str); 11] = [
    (transmission_flag::READ_ONLY, "readonly"),
    (transmission_flag::SEND_FLUSH, "flush"),
    (transmission_flag::SEND_FUA, "fua"),
    (1 << 4, "rotational"),
    (transmission_flag::SEND_TRIM, "trim"),
    (transmission_flag::SEND_WRITE_ZEROES, "zeroes"),
    (transmission_flag::SEND_DF, "df"),
    (transmission_flag::CAN_MULTI_CONN, "multi"),
    (1 << 9, "resize"),
    (transmission_flag::SEND_CACHE, "cache"),
    (transmission_flag::SEND_FAST_ZERO, "fast-zero"),
];

/// Why a server's exports cannot be listed.
#[derive(Debug)]
enum Refused {
    /// The connection ended or failed.
    Io(io::Error),
    /// The server violated the protocol, or refused.
    Said(String),
}

impl From<io::Error> for Refused {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

type Asked<T> = Result<T, Refused>;

/// A reply's type and data.
type Reply = (u32, Vec<u8>);

/// An export that the server listed.
#[derive(Debug, Default, PartialEq, Eq)]
struct Listed {
    name: String,
    description: String,
    /// Its size and transmission flags.
    export: Option<(u64, u16)>,
    /// Minimum, preferred and maximum block size.
    blocks: Option<(u32, u32, u32)>,
    contexts: Vec<String>,
}

/// Prints the exports of the server at `endpoint`, over an encrypted connection if there is a channel for it.
pub(super) fn print(
    endpoint: &Endpoint,
    channel: Option<Channel>,
    out: &mut dyn Write,
) -> Result<(), Failure> {
    let listed = match endpoint {
        Endpoint::Unix(path) => UnixStream::connect(path)
            .map_err(|error| cannot_connect(&path.display().to_string(), &error))
            .map(|stream| exports(Timed::new(stream, UnixStream::set_read_timeout), channel))?,
        Endpoint::HandedIn(_) => Err(Refused::Io(io::Error::new(
            io::ErrorKind::InvalidInput,
            "it is a socket that listens; nobody can connect to it by its descriptor",
        ))),
        Endpoint::Tcp { host, port } => TcpStream::connect((host.as_str(), *port))
            .map_err(|error| cannot_connect(&endpoint.to_string(), &error))
            .map(|stream| exports(Timed::new(stream, TcpStream::set_read_timeout), channel))?,
    };
    let listed = listed.map_err(|refused| match refused {
        Refused::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            Failure::new(format_args!("the server at {endpoint} closed the connection"))
        }
        Refused::Io(error) => Failure::new(format_args!(
            "cannot query the server at {endpoint}: {}",
            isobath_storage::cause(&error)
        )),
        Refused::Said(text) => Failure::new(format_args!("the server at {endpoint}: {text}")),
    })?;
    out.write_all(text(&listed).as_bytes())?;
    Ok(())
}

fn cannot_connect(name: &str, error: &io::Error) -> Failure {
    let cause = isobath_storage::cause(error);
    Failure::new(format_args!("Failed to connect to '{}': {cause}", printable(name)))
}

/// Describes exports as qemu-nbd does.
fn text(exports: &[Listed]) -> String {
    let mut lines = vec![format!("exports available: {}", exports.len())];
    for export in exports {
        lines.push(format!(" export: '{}'", printable(&export.name)));
        if !export.description.is_empty() {
            lines.push(format!("  description: {}", printable(&export.description)));
        }
        if let Some((size, flags)) = export.export.filter(|(_, flags)| *flags != 0) {
            let set = FLAGS.iter().filter(|(bit, _)| flags & bit != 0);
            let names: Vec<String> = set.map(|(_, name)| format!("{name} ")).collect();
            lines.push(format!("  size:  {size}"));
            lines.push(format!("  flags: {flags:#x} ( {})", names.concat()));
        }
        if let Some((least, best, most)) = export.blocks {
            lines.push(format!("  min block: {least}"));
            lines.push(format!("  opt block: {best}"));
            lines.push(format!("  max block: {most}"));
        }
        if !export.contexts.is_empty() {
            lines.push(format!("  available meta contexts: {}", export.contexts.len()));
            lines.extend(export.contexts.iter().map(|name| format!("   {}", printable(name))));
        }
    }
    lines.push(String::new());
    lines.join("\n")
}

/// A stream whose use is limited to [`PATIENCE`] in total.
struct Timed<S> {
    stream: S,
    limit: fn(&S, Option<Duration>) -> io::Result<()>,
    until: Instant,
}

impl<S> Timed<S> {
    fn new(stream: S, limit: fn(&S, Option<Duration>) -> io::Result<()>) -> Self {
        Self { stream, limit, until: Instant::now() + PATIENCE }
    }
}

impl<S: Read> Read for Timed<S> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        (self.limit)(&self.stream, Some(left))?;
        self.stream.read(buf).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
            _ => error,
        })
    }
}

impl<S: Write> Write for Timed<S> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.stream.write(buf)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// A server that is asked.
struct Server<S>(S);

impl<S: Read + Write> Server<S> {
    fn number<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.0.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn ask(&mut self, option: u32, data: &[u8]) -> io::Result<()> {
        let length = data.len() as u32;
        let parts =
            [&OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &length.to_be_bytes(), data];
        self.0.write_all(&parts.concat())
    }

    /// One reply to `option`: its type and data.
    fn reply(&mut self, option: u32) -> Asked<Reply> {
        let magic = u64::from_be_bytes(self.number()?);
        if magic != OPTION_REPLY_MAGIC {
            return Err(Refused::Said(format!("a reply has the wrong magic, {magic:#018x}")));
        }
        let answered = u32::from_be_bytes(self.number()?);
        if answered != option {
            return Err(Refused::Said(format!("a reply to option {answered} instead of {option}")));
        }
        let kind = u32::from_be_bytes(self.number()?);
        let length = u32::from_be_bytes(self.number()?) as usize;
        if length > MOST_DATA {
            return Err(Refused::Said(format!(
                "a reply has {length} bytes, more than {MOST_DATA}"
            )));
        }
        let mut data = vec![0; length];
        self.0.read_exact(&mut data)?;
        Ok((kind, data))
    }

    /// The replies to `option` before its acknowledgement; `None` if it is refused.
    fn replies(&mut self, option: u32, data: &[u8]) -> Asked<Option<Vec<Reply>>> {
        self.ask(option, data)?;
        let mut replies = Vec::new();
        loop {
            match self.reply(option)? {
                (option_reply::ACK, _) => return Ok(Some(replies)),
                (kind, _) if kind & option_reply::ERROR != 0 => return Ok(None),
                reply if replies.len() < MOST_REPLIES => replies.push(reply),
                _ => return Err(Refused::Said(format!("more than {MOST_REPLIES} replies"))),
            }
        }
    }
}

/// Takes bytes from the front.
fn take<'a>(data: &mut &'a [u8], count: usize) -> Asked<&'a [u8]> {
    let malformed = || Refused::Said("a reply is malformed".into());
    let (front, rest) = data.split_at_checked(count).ok_or_else(malformed)?;
    *data = rest;
    Ok(front)
}

fn number(data: &mut &[u8], bytes: usize) -> Asked<u64> {
    Ok(take(data, bytes)?.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

fn string(bytes: &[u8]) -> Asked<String> {
    if bytes.len() > MAX_STRING {
        return Err(Refused::Said(format!("a string has {} bytes", bytes.len())));
    }
    Ok(String::from_utf8_lossy(bytes).into_owned())
}

/// The exports of the server at the other end.
fn exports<S: Read + Write>(stream: S, channel: Option<Channel>) -> Asked<Vec<Listed>> {
    let mut server = Server(stream);
    let magics = [u64::from_be_bytes(server.number()?), u64::from_be_bytes(server.number()?)];
    if magics != [GREETING_MAGIC, OPTION_MAGIC] {
        return Err(Refused::Said("it is not an NBD server that can list exports".into()));
    }
    let flags = u16::from_be_bytes(server.number()?);
    if flags & handshake_flag::FIXED_NEWSTYLE == 0 {
        return Err(Refused::Said("it cannot list exports".into()));
    }
    let known = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
    server.0.write_all(&u32::from(flags & known).to_be_bytes())?;
    let Some(channel) = channel else { return list(server) };
    if server.replies(option::STARTTLS, &[])?.is_none_or(|replies| !replies.is_empty()) {
        return Err(Refused::Said("it does not encrypt connections (TLS)".into()));
    }
    list(Server(Blocking::handshake(server.0, channel)?))
}

fn list<S: Read + Write>(mut server: Server<S>) -> Asked<Vec<Listed>> {
    let structured = server.replies(option::STRUCTURED_REPLY, &[])?.is_some();
    let Some(found) = server.replies(option::LIST, &[])? else {
        return Err(Refused::Said("it does not list its exports".into()));
    };
    let mut exports = Vec::new();
    for (kind, data) in found {
        if kind != option_reply::SERVER {
            return Err(Refused::Said(format!("a reply of type {kind} in a list of exports")));
        }
        let mut data = &data[..];
        let length = number(&mut data, 4)? as usize;
        let name = string(take(&mut data, length)?)?;
        exports.push(Listed { name, description: string(data)?, ..Listed::default() });
    }
    for export in &mut exports {
        let name = [&(export.name.len() as u32).to_be_bytes(), export.name.as_bytes()].concat();
        let wanted = [&name[..], &1_u16.to_be_bytes(), &info::BLOCK_SIZE.to_be_bytes()].concat();
        for (_, data) in server.replies(option::INFO, &wanted)?.unwrap_or_default() {
            let mut data = &data[..];
            match number(&mut data, 2)? as u16 {
                info::EXPORT => {
                    let size = number(&mut data, 8)?;
                    export.export = Some((size, number(&mut data, 2)? as u16));
                }
                info::BLOCK_SIZE => {
                    let mut next = || number(&mut data, 4).map(|number| number as u32);
                    export.blocks = Some((next()?, next()?, next()?));
                }
                _ => {}
            }
        }
        if structured {
            let wanted = [&name[..], &0_u32.to_be_bytes()].concat();
            let found = server.replies(option::LIST_META_CONTEXT, &wanted)?;
            for (_, data) in found.unwrap_or_default() {
                let mut data = &data[..];
                number(&mut data, 4)?;
                export.contexts.push(string(data)?);
            }
        }
    }
    // The list is complete, even if the connection fails now.
    let _ = server.ask(option::ABORT, &[]);
    Ok(exports)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that sends these bytes, whatever it receives.
    struct Sent(io::Cursor<Vec<u8>>);

    impl Read for Sent {
        fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
            self.0.read(buf)
        }
    }

    impl Write for Sent {
        fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
            Ok(buf.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn listed(sent: &[u8]) -> Asked<Vec<Listed>> {
        exports(Timed::new(Sent(io::Cursor::new(sent.to_vec())), |_, _| Ok(())), None)
    }

    fn reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
        let length = data.len() as u32;
        let magic = OPTION_REPLY_MAGIC.to_be_bytes();
        [&magic[..], &option.to_be_bytes(), &kind.to_be_bytes(), &length.to_be_bytes(), data]
            .concat()
    }

    fn greeting() -> Vec<u8> {
        [&GREETING_MAGIC.to_be_bytes()[..], &OPTION_MAGIC.to_be_bytes(), &[0, 3]].concat()
    }

    #[test]
    fn a_server_with_few_answers_is_listed() {
        let sent = [
            greeting(),
            reply(option::STRUCTURED_REPLY, option_reply::ERR_UNSUP, b"no"),
            reply(option::LIST, option_reply::SERVER, b"\0\0\0\x01athe text"),
            reply(option::LIST, option_reply::ACK, b""),
            reply(option::INFO, option_reply::ERR_UNSUP, b""),
        ];
        let found = listed(&sent.concat()).unwrap();
        assert_eq!(text(&found), "exports available: 1\n export: 'a'\n  description: the text\n");
    }

    #[test]
    fn hostile_servers_are_left() {
        let list = |data: &[u8]| {
            let ack = reply(option::STRUCTURED_REPLY, option_reply::ACK, b"");
            [greeting(), ack, reply(option::LIST, option_reply::SERVER, data)].concat()
        };
        let long = reply(option::LIST, option_reply::SERVER, &[0; 9000]);
        let ack = reply(option::STRUCTURED_REPLY, option_reply::ACK, b"");
        let mut many = [greeting(), ack.clone()].concat();
        many.extend(reply(option::LIST, option_reply::SERVER, b"\0\0\0\0").repeat(20_000));
        for sent in [
            b"HTTP/1.1 400 Bad Request\r\n".to_vec(),
            greeting(),
            [greeting(), reply(option::LIST, option_reply::ACK, b"")].concat(),
            [greeting(), vec![7; 40]].concat(),
            [greeting(), ack, long].concat(),
            [list(b"\xff\xff\xff\xff"), reply(option::LIST, option_reply::ACK, b"")].concat(),
            [list(b"\0"), reply(option::LIST, option_reply::ACK, b"")].concat(),
            many,
        ] {
            assert!(listed(&sent).is_err(), "{} bytes", sent.len());
        }
    }
}
