//! An NBD client inside the test, so that the test knows what completed when.

use crate::digest;
use std::fmt;
use std::io::{self, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;

const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
const EXPORT_NAME: u32 = 1;
const GO: u32 = 7;
const STRUCTURED: u32 = 8;
const SET_CONTEXT: u32 = 10;
const ACK: u32 = 1;
const INFO: u32 = 3;
const CONTEXT: u32 = 4;

const REQUEST: u32 = 0x2560_9513;
const SIMPLE_REPLY: u32 = 0x6744_6698;
const CHUNK: u32 = 0x668e_33ef;
const BLOCK_STATUS: u16 = 7;
const FUA: u16 = 1;
const NO_HOLE: u16 = 2;

/// Bytes of requests or replies that a socket buffers without a reader.
const BUFFERED: usize = 64 << 10;

/// A request. Offsets and lengths are in bytes.
#[derive(Clone, Copy)]
pub enum Request<'a> {
    /// Reads.
    Read {
        /// Where it starts.
        offset: u64,
        /// How long it is.
        length: u32,
    },
    /// Writes.
    Write {
        /// Where it starts.
        offset: u64,
        /// The bytes.
        data: &'a [u8],
        /// Whether the reply is sent only when the data is durable.
        fua: bool,
    },
    /// Writes zeroes.
    Zero {
        /// Where they start.
        offset: u64,
        /// How many.
        length: u32,
        /// Whether the space may be released.
        unmap: bool,
    },
    /// Discards.
    Discard {
        /// Where it starts.
        offset: u64,
        /// How long it is.
        length: u32,
    },
    /// Makes all completed writes durable.
    Flush,
}

/// Omits the bytes of a write, which would be unreadable.
impl fmt::Debug for Request<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Read { offset, length } => write!(out, "read {offset} {length}"),
            Self::Write { offset, data, fua } => {
                let (length, digest, fua) =
                    (data.len(), digest(data), if fua { " fua" } else { "" });
                write!(out, "write {offset} {length}{fua}, digest {digest:016x}")
            }
            Self::Zero { offset, length, unmap } => {
                let unmap = if unmap { " unmap" } else { "" };
                write!(out, "write zeroes {offset} {length}{unmap}")
            }
            Self::Discard { offset, length } => write!(out, "discard {offset} {length}"),
            Self::Flush => write!(out, "flush"),
        }
    }
}

impl Request<'_> {
    fn encode(&self, handle: u64, out: &mut Vec<u8>) {
        let (flags, kind, offset, length): (u16, u16, u64, u32) = match *self {
            Self::Read { offset, length } => (0, 0, offset, length),
            Self::Write { offset, data, fua } => {
                (if fua { FUA } else { 0 }, 1, offset, data.len() as u32)
            }
            Self::Flush => (0, 3, 0, 0),
            Self::Discard { offset, length } => (0, 4, offset, length),
            Self::Zero { offset, length, unmap } => {
                (if unmap { 0 } else { NO_HOLE }, 6, offset, length)
            }
        };
        header(flags, kind, handle, offset, length, out);
        if let Self::Write { data, .. } = self {
            out.extend(*data);
        }
    }
}

fn header(flags: u16, kind: u16, handle: u64, offset: u64, length: u32, out: &mut Vec<u8>) {
    out.extend(REQUEST.to_be_bytes());
    out.extend(flags.to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.extend(handle.to_be_bytes());
    out.extend(offset.to_be_bytes());
    out.extend(length.to_be_bytes());
}

/// A run of a metadata context: its length, and its flags there.
pub type Run = (u64, u32);

/// A connection to an export.
#[derive(Debug)]
pub struct Nbd {
    stream: BufReader<UnixStream>,
    size: u64,
    /// The ids of the requested metadata contexts, in the order of the request.
    contexts: Vec<u32>,
}

impl Nbd {
    /// Connects to an export.
    ///
    /// # Errors
    /// If the socket fails; a server that rejects the export closes it.
    pub fn connect(socket: &Path, export: &str) -> io::Result<Self> {
        let mut stream = Self::greeted(socket)?;
        let option = option(EXPORT_NAME, export.as_bytes());
        stream.get_mut().write_all(&option)?;
        let size = u64::from_be_bytes(array(&mut stream)?);
        let _flags: [u8; 2] = array(&mut stream)?;
        Ok(Self { stream, size, contexts: Vec::new() })
    }

    /// Connects for block status in metadata contexts, all of which the server must support.
    ///
    /// # Errors
    /// As [`connect`](Self::connect); or if the server refuses, or lacks a context.
    pub fn connect_with(socket: &Path, export: &str, contexts: &[String]) -> io::Result<Self> {
        let mut stream = Self::greeted(socket)?;
        stream.get_mut().write_all(&option(STRUCTURED, &[]))?;
        let _ = replies(&mut stream)?;
        let mut ask = sized(export.as_bytes());
        ask.extend((contexts.len() as u32).to_be_bytes());
        ask.extend(contexts.iter().flat_map(|context| sized(context.as_bytes())));
        stream.get_mut().write_all(&option(SET_CONTEXT, &ask))?;
        let given = replies(&mut stream)?;
        let number = |name: &String| {
            let found = given
                .iter()
                .find(|(kind, data)| *kind == CONTEXT && data.get(4..) == Some(name.as_bytes()));
            let id = found.and_then(|(_, data)| data.get(..4)?.try_into().ok());
            id.map(u32::from_be_bytes).ok_or_else(|| broken(&format!("no context {name}")))
        };
        let contexts = contexts.iter().map(number).collect::<io::Result<_>>()?;
        let mut go = sized(export.as_bytes());
        go.extend([0; 2]);
        stream.get_mut().write_all(&option(GO, &go))?;
        let infos = replies(&mut stream)?;
        let size = infos.iter().find_map(|(kind, data)| {
            let export = *kind == INFO && data.get(..2) == Some(&[0, 0]);
            export.then(|| data.get(2..10)?.try_into().ok()).flatten().map(u64::from_be_bytes)
        });
        Ok(Self { stream, size: size.ok_or_else(|| broken("no size"))?, contexts })
    }

    fn greeted(socket: &Path) -> io::Result<BufReader<UnixStream>> {
        let mut stream = BufReader::new(UnixStream::connect(socket)?);
        let _: [u8; 18] = array(&mut stream)?;
        // Fixed newstyle, no zeroes.
        stream.get_mut().write_all(&3_u32.to_be_bytes())?;
        Ok(stream)
    }

    /// The size of the export in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Sends all requests at once, and waits for the replies. Returns one buffer per request, in order: the bytes of a
    /// read, nothing for other requests.
    ///
    /// # Errors
    /// If the socket fails; `Other` if the server replies with an error.
    pub fn submit(&mut self, requests: &[Request<'_>]) -> io::Result<Vec<Vec<u8>>> {
        let mut bytes = Vec::new();
        let mut awaited = 0;
        for (handle, request) in requests.iter().enumerate() {
            request.encode(handle as u64, &mut bytes);
            if let Request::Read { length, .. } = request {
                awaited += *length as usize;
            }
        }
        if bytes.len().min(awaited) <= BUFFERED {
            self.stream.get_mut().write_all(&bytes)?;
            return self.replies(requests);
        }
        let mut writer = self.stream.get_ref().try_clone()?;
        thread::scope(|scope| {
            let sent = scope.spawn(move || writer.write_all(&bytes));
            let answers = self.replies(requests)?;
            sent.join().expect("no panic while sending").map(|()| answers)
        })
    }

    fn replies(&mut self, requests: &[Request<'_>]) -> io::Result<Vec<Vec<u8>>> {
        let mut answers = vec![Vec::new(); requests.len()];
        for _ in requests {
            if u32::from_be_bytes(array(&mut self.stream)?) != SIMPLE_REPLY {
                return Err(broken("not a simple reply"));
            }
            let error = u32::from_be_bytes(array(&mut self.stream)?);
            let handle = u64::from_be_bytes(array(&mut self.stream)?) as usize;
            let request = requests.get(handle).ok_or_else(|| broken("an unknown handle"))?;
            if error != 0 {
                let error = io::Error::from_raw_os_error(error as i32);
                return Err(io::Error::other(format!("{request:?}: {error}")));
            }
            if let Request::Read { length, .. } = request {
                answers[handle].resize(*length as usize, 0);
                self.stream.read_exact(&mut answers[handle])?;
            }
        }
        Ok(answers)
    }

    /// Writes, and waits for the reply.
    ///
    /// # Errors
    /// See [`submit`](Self::submit).
    pub fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.submit(&[Request::Write { offset, data, fua: false }]).map(drop)
    }

    /// Flushes.
    ///
    /// # Errors
    /// See [`write`](Self::write).
    pub fn flush(&mut self) -> io::Result<()> {
        self.submit(&[Request::Flush]).map(drop)
    }

    /// Reads the whole export.
    ///
    /// # Errors
    /// See [`write`](Self::write).
    pub fn read_all(&mut self) -> io::Result<Vec<u8>> {
        const PART: u64 = 1 << 20;
        let mut bytes = Vec::with_capacity(self.size as usize);
        let offsets: Vec<u64> = (0..self.size).step_by(PART as usize).collect();
        for some in offsets.chunks(8) {
            let part = |offset: &u64| Request::Read {
                offset: *offset,
                length: (self.size - offset).min(PART) as u32,
            };
            let requests: Vec<_> = some.iter().map(part).collect();
            bytes.extend(self.submit(&requests)?.concat());
        }
        Ok(bytes)
    }

    /// The block status of the whole export, in each of the requested contexts.
    ///
    /// # Errors
    /// See [`write`](Self::write).
    pub fn status(&mut self) -> io::Result<Vec<Vec<Run>>> {
        let mut runs: Vec<Vec<Run>> = vec![Vec::new(); self.contexts.len()];
        let mut at = 0;
        while at < self.size {
            let mut request = Vec::new();
            let length = (self.size - at).min(1 << 31) as u32;
            header(0, BLOCK_STATUS, 0, at, length, &mut request);
            self.stream.get_mut().write_all(&request)?;
            let mut next = u64::MAX;
            let mut last = false;
            while !last {
                let (flags, kind, data) = self.chunk()?;
                last = flags & 1 != 0;
                if kind == 5 {
                    next = next.min(at + self.take(&data, &mut runs)?);
                } else if kind != 0 {
                    return Err(io::Error::other(format!("block status: {data:x?}")));
                }
            }
            if next == u64::MAX || next == at {
                return Err(broken("no block status"));
            }
            // Contexts may describe ranges of different lengths.
            for runs in &mut runs {
                cut(runs, next);
            }
            at = next;
        }
        Ok(runs)
    }

    /// Appends the runs of one context; returns their total length.
    fn take(&self, data: &[u8], runs: &mut [Vec<Run>]) -> io::Result<u64> {
        let word = |bytes: &[u8]| u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        if data.len() < 12 || data.len() % 8 != 4 {
            return Err(broken("a block status of unexpected length"));
        }
        let context = self.contexts.iter().position(|context| *context == word(data));
        let runs = &mut runs[context.ok_or_else(|| broken("an unknown context"))?];
        let mut length = 0;
        for run in data[4..].chunks_exact(8) {
            runs.push((u64::from(word(run)), word(&run[4..])));
            length += u64::from(word(run));
        }
        Ok(length)
    }

    /// A chunk of a structured reply: flags, type, data.
    fn chunk(&mut self) -> io::Result<(u16, u16, Vec<u8>)> {
        if u32::from_be_bytes(array(&mut self.stream)?) != CHUNK {
            return Err(broken("not a structured reply"));
        }
        let flags = u16::from_be_bytes(array(&mut self.stream)?);
        let kind = u16::from_be_bytes(array(&mut self.stream)?);
        let _handle: [u8; 8] = array(&mut self.stream)?;
        let mut data = vec![0; u32::from_be_bytes(array(&mut self.stream)?) as usize];
        self.stream.read_exact(&mut data)?;
        Ok((flags, kind, data))
    }
}

/// Removes everything at or after `end`.
fn cut(runs: &mut Vec<Run>, end: u64) {
    let mut at = 0;
    for run in runs.iter_mut() {
        run.0 = run.0.min(end - at);
        at += run.0;
    }
    runs.retain(|run| run.0 > 0);
}

fn sized(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u32).to_be_bytes(), bytes].concat()
}

fn option(kind: u32, data: &[u8]) -> Vec<u8> {
    [&OPTION_MAGIC.to_be_bytes()[..], &kind.to_be_bytes(), &sized(data)].concat()
}

/// The replies to an option, up to its acknowledgement: type and data of each.
fn replies(stream: &mut impl Read) -> io::Result<Vec<(u32, Vec<u8>)>> {
    let mut replies = Vec::new();
    loop {
        if u64::from_be_bytes(array(stream)?) != OPTION_REPLY {
            return Err(broken("not a reply to an option"));
        }
        let _option: [u8; 4] = array(stream)?;
        let kind = u32::from_be_bytes(array(stream)?);
        let mut data = vec![0; u32::from_be_bytes(array(stream)?) as usize];
        stream.read_exact(&mut data)?;
        if kind == ACK {
            return Ok(replies);
        }
        if kind & 1 << 31 != 0 {
            let text = String::from_utf8_lossy(&data).into_owned();
            return Err(io::Error::other(format!("an option was refused: {kind:#x} {text}")));
        }
        replies.push((kind, data));
    }
}

fn array<const N: usize>(stream: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn broken(what: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("NBD: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_told_without_its_bytes() {
        let told = |data| format!("{:?}", Request::Write { offset: 4096, data, fua: true });
        let (one, other) = (told(&[7; 10_000]), told(&[8; 10_000]));
        assert!(one.starts_with("write 4096 10000 fua, digest "), "{one}");
        assert!(one.len() < 60 && one != other, "{one} {other}");
    }
}
