//! Reads and writes, synchronous and asynchronous.

use super::report::{Done, dump};
use super::words::{Words, number, pattern};
use crate::messages;
use isobath_disk::{Disk, DiskError, ZeroFlags};
use isobath_storage::{Host, IoBuf};
use std::fs::File;
use std::io::{self, Read as _};
use std::ops::Range;
use std::time::Instant;

/// The most bytes of one request; QEMU's limit.
pub(super) const MOST: u64 = (1 << 31) - 512;
/// The byte written by default.
const PATTERN: u8 = 0xcd;

/// Which command a request comes from, where that makes a difference.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// `read`, `write`: one length.
    Plain,
    /// `readv`, `writev`: several lengths.
    Vectored,
    /// `aio_read`, `aio_write`: several lengths.
    Asynchronous,
}

/// Why a request is not started.
pub(super) enum Refusal {
    /// Wrong usage.
    Usage,
    /// qemu-io's message.
    Because(String),
    /// qemu-io's message on stderr.
    Complaint(String),
}

impl From<String> for Refusal {
    fn from(message: String) -> Self {
        Self::Because(message)
    }
}

/// The result of a request.
pub(super) struct Ended {
    /// What to print.
    pub(super) text: String,
    /// Whether the request succeeded.
    pub(super) good: bool,
}

/// The form in which statistics are printed.
#[derive(Clone, Copy)]
struct Style {
    quiet: bool,
    for_programs: bool,
}

impl Style {
    fn of(words: &Words<'_>) -> Self {
        Self { quiet: words.has('q'), for_programs: words.has('C') }
    }

    fn print(self, text: &mut String, done: &Done) {
        if self.for_programs && !self.quiet {
            text.push_str(&done.for_programs());
        } else if !self.quiet {
            text.push_str(&done.for_people());
        }
    }
}

/// Why a request failed.
pub(super) enum Fault {
    /// The disk's error.
    Disk(DiskError),
    /// QEMU's error number for it.
    Errno(i32),
}

impl From<DiskError> for Fault {
    fn from(error: DiskError) -> Self {
        Self::Disk(error)
    }
}

/// A failed request: the line on stdout is qemu-io's; stderr has the whole reason.
pub(super) fn failed(what: &str, fault: impl Into<Fault>) -> Ended {
    let errno = match fault.into() {
        Fault::Errno(errno) => errno,
        Fault::Disk(error) => {
            messages::complain(&error);
            if let DiskError::OutOfRange { .. } = error { libc::EIO } else { error.errno() }
        }
    };
    Ended { text: format!("{what} failed: {}\n", message_of(errno)), good: false }
}

/// The C library's text for an error number.
fn message_of(errno: i32) -> String {
    let text = io::Error::from_raw_os_error(errno).to_string();
    text.strip_suffix(&format!(" (os error {errno})")).unwrap_or(&text).to_owned()
}

/// The range that a command names: the offset, and the sum of the lengths.
fn range_of(words: &Words<'_>, form: Form, limit: Option<&str>) -> Result<(u64, u64), Refusal> {
    let (offset, lengths) = match words.arguments.as_slice() {
        [offset, lengths @ ..] if !lengths.is_empty() => (*offset, lengths),
        _ => return Err(Refusal::Usage),
    };
    if form == Form::Plain && lengths.len() > 1 {
        return Err(Refusal::Usage);
    }
    let offset = number(offset)?;
    let mut total: u64 = 0;
    for text in lengths {
        let length = number(text)?;
        match (form, limit) {
            (Form::Plain, Some(unless)) if length > MOST => {
                return Err(format!("length cannot exceed {MOST}{unless}, given {text}").into());
            }
            (Form::Vectored | Form::Asynchronous, Some(_)) if length > MOST => {
                return Err(format!("Argument '{text}' exceeds maximum size {MOST}").into());
            }
            _ => {}
        }
        total = total.saturating_add(length);
        if form != Form::Plain && limit.is_some() && total > MOST {
            return Err(format!("The total number of bytes exceed the maximum size {MOST}").into());
        }
    }
    Ok((offset, total))
}

/// A read to be made.
pub(super) struct Read {
    offset: u64,
    length: u64,
    /// The byte expected, and where.
    verify: Option<(u8, Range<usize>)>,
    dump: bool,
    style: Style,
    form: Form,
}

impl Read {
    pub(super) fn parse(words: &Words<'_>, form: Form) -> Result<Self, Refusal> {
        let expected = words.value('P').map(pattern).transpose()?;
        let start = words.value('s').map(number).transpose()?;
        let count = words.value('l').map(number).transpose()?;
        if expected.is_none() && (start.is_some() || count.is_some()) {
            return Err(Refusal::Usage);
        }
        let (offset, length) = range_of(words, form, Some(""))?;
        let start = start.unwrap_or(0);
        let end = start.saturating_add(count.unwrap_or(length.saturating_sub(start)));
        if end > length {
            return Err("pattern verification range exceeds end of read data".to_owned().into());
        }
        let verify = expected.map(|byte| (byte, start as usize..end as usize));
        Ok(Self { offset, length, verify, dump: words.has('v'), style: Style::of(words), form })
    }

    pub(super) async fn run<H: Host>(self, disk: &Disk<H>) -> Ended {
        let Self { offset, length, .. } = self;
        let start = Instant::now();
        let buf = match disk.read(offset, IoBuf::zeroed(length as usize)).await {
            Ok(buf) => buf,
            Err(error) => {
                return failed(if self.form == Form::Plain { "read" } else { "readv" }, error);
            }
        };
        let time = start.elapsed();
        let mut ended = Ended { text: String::new(), good: true };
        if let Some((byte, range)) = self.verify {
            let (at, count) = (offset + range.start as u64, range.len());
            if buf.get(range).is_none_or(|bytes| bytes.iter().any(|found| *found != byte)) {
                ended.text = format!("Pattern verification failed at offset {at}, {count} bytes\n");
                ended.good = false;
            }
        }
        if self.dump {
            ended.text.push_str(&dump(offset, &buf));
        }
        let done = Done { verb: "read", offset, bytes: length, time };
        self.style.print(&mut ended.text, &done);
        ended
    }
}

/// A write to be made.
pub(super) struct Write {
    offset: u64,
    length: u64,
    source: Source,
    /// Make it durable before it completes.
    durable: bool,
    style: Style,
    form: Form,
}

/// The data to write.
enum Source {
    Zeroes(ZeroFlags),
    Bytes { pattern: Vec<u8>, compressed: bool },
}

impl Write {
    pub(super) fn parse(words: &Words<'_>, form: Form) -> Result<Self, Refusal> {
        let zeroes = words.has('z');
        let compressed = words.has('c');
        let durable = words.has('f');
        let byte = words.value('P').map(pattern).transpose()?;
        let file = words.value('s');
        for (wrong, message) in [
            (
                usize::from(zeroes) + usize::from(byte.is_some()) + usize::from(file.is_some()) > 1,
                "Only one of -z, -P, and -s can be specified at the same time",
            ),
            (durable && compressed, "-f and -b or -c cannot be specified at the same time"),
            (words.has('n') && !zeroes, "-n requires -z to be specified"),
            (words.has('u') && !zeroes, "-u requires -z to be specified"),
            (
                zeroes && words.arguments.len() > 2 && form == Form::Asynchronous,
                "-z supports only a single length parameter",
            ),
        ] {
            if wrong {
                return Err(message.to_owned().into());
            }
        }
        let limit = if zeroes && (words.has('n') || form == Form::Asynchronous) {
            None
        } else {
            Some(" without -n")
        };
        let (offset, length) = range_of(words, form, limit)?;
        for (value, text, name) in [(offset, 0, "offset"), (length, 1, "count")] {
            if compressed && value % 512 != 0 {
                let text = words.arguments.get(text).copied().unwrap_or_default();
                return Err(format!("{text} is not a sector-aligned value for '{name}'").into());
            }
        }
        let source = if zeroes {
            Source::Zeroes(ZeroFlags { may_unmap: words.has('u'), only_fast: words.has('n') })
        } else {
            let pattern = match file {
                Some(file) => pattern_file(file, length)?,
                None => vec![byte.unwrap_or(PATTERN)],
            };
            Source::Bytes { pattern, compressed }
        };
        Ok(Self { offset, length, source, durable, style: Style::of(words), form })
    }

    pub(super) async fn run<H: Host>(self, disk: &Disk<H>) -> Ended {
        let Self { offset, length, .. } = self;
        let name = match self.form {
            Form::Plain => "write",
            Form::Vectored => "writev",
            Form::Asynchronous => "aio_write",
        };
        let start = Instant::now();
        if let Err(fault) = self.perform(disk).await {
            return failed(name, fault);
        }
        let done = Done { verb: "wrote", offset, bytes: length, time: start.elapsed() };
        let mut ended = Ended { text: String::new(), good: true };
        self.style.print(&mut ended.text, &done);
        ended
    }

    async fn perform<H: Host>(&self, disk: &Disk<H>) -> Result<(), Fault> {
        match &self.source {
            Source::Zeroes(flags) => disk.write_zeroes(self.offset, self.length, *flags).await?,
            Source::Bytes { pattern, compressed } => {
                let mut buf = IoBuf::zeroed(self.length as usize);
                fill(&mut buf, pattern);
                if *compressed {
                    write_compressed(disk, self.offset, buf).await?;
                } else {
                    disk.write(self.offset, buf).await?;
                }
            }
        }
        if self.durable {
            disk.flush().await?;
        }
        Ok(())
    }
}

/// The content of a file, as much of it as a write of `length` bytes has room for. Such a write is filled
/// with it again and again.
fn pattern_file(name: &str, length: u64) -> Result<Vec<u8>, Refusal> {
    let mut bytes = Vec::new();
    let read = File::open(name).and_then(|file| file.take(length).read_to_end(&mut bytes));
    match read.map(|_| bytes) {
        Ok(bytes) if bytes.is_empty() => Err(Refusal::Complaint(format!("{name}: file is empty"))),
        Ok(bytes) => Ok(bytes),
        Err(error) => {
            let text = error.raw_os_error().map_or_else(|| error.to_string(), message_of);
            Err(Refusal::Complaint(format!("{name}: {text}")))
        }
    }
}

fn fill(buf: &mut [u8], pattern: &[u8]) {
    match pattern {
        [byte] => buf.fill(*byte),
        pattern => {
            for part in buf.chunks_mut(pattern.len().max(1)) {
                if let Some(from) = pattern.get(..part.len()) {
                    part.copy_from_slice(from);
                }
            }
        }
    }
}

/// Writes whole clusters, each compressed.
async fn write_compressed<H: Host>(
    disk: &Disk<H>,
    offset: u64,
    mut buf: IoBuf,
) -> Result<(), Fault> {
    let header = disk.layers().next().and_then(|layer| layer.header());
    let Some(Ok(geometry)) = header.map(|header| header.geometry()) else {
        return Err(Fault::Errno(libc::ENOTSUP));
    };
    let (size, length) = (geometry.cluster_size(), buf.len() as u64);
    let end = offset.checked_add(length).filter(|end| *end <= disk.size());
    let end = end.ok_or(Fault::Errno(libc::EIO))?;
    if !offset.is_multiple_of(size) || (!length.is_multiple_of(size) && end != disk.size()) {
        return Err(Fault::Errno(libc::EINVAL));
    }
    for at in (offset..end).step_by(size as usize) {
        let part = buf.split_to(buf.len().min(size as usize));
        disk.write_compressed(at, part).await?;
    }
    Ok(())
}
