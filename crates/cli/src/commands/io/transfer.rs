//! Reads and writes, synchronous and asynchronous.

use super::opening::Opened;
use super::report::{Done, dump};
use super::words::{Words, number, pattern};
use crate::full;
use isobath_disk::{Disk, DiskError, LayerIndex, ZeroFlags};
use isobath_storage::{Host, IoBuf};
use std::fs::File;
use std::io::{self, Read as _};
use std::ops::Range;
use std::time::Instant;

/// Maximum bytes of one request; QEMU's limit.
pub(super) const MOST: u64 = (1 << 31) - 512;
/// Bytes copied at once by copy-on-read.
const COPY_AT_ONCE: u64 = 4 << 20;
/// The byte written by default.
const PATTERN: u8 = 0xcd;

/// The kind of command that a request comes from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// `read`, `write`: one length.
    Plain,
    /// `readv`, `writev`: several lengths.
    Vectored,
    /// `aio_read`, `aio_write`: several lengths.
    Asynchronous,
}

/// Why a request was not started.
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
    /// The full reason for a failure, for stderr.
    pub(super) reason: Option<String>,
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

/// The error of a change to a read-only disk.
pub(super) fn read_only() -> Ended {
    Ended { reason: Some("Block node is read-only".into()), ..Ended::bad(String::new()) }
}

impl Ended {
    /// Success.
    pub(super) fn good(text: String) -> Self {
        Self { text, reason: None, good: true }
    }

    /// Failure.
    pub(super) fn bad(text: String) -> Self {
        Self { text, reason: None, good: false }
    }
}

/// A failed request: qemu-io's line for stdout, and the full reason for stderr after it.
pub(super) fn failed(what: &str, fault: impl Into<Fault>) -> Ended {
    let (errno, reason) = match fault.into() {
        Fault::Errno(errno) => (errno, None),
        Fault::Disk(DiskError::OutOfRange { .. }) => (libc::EIO, None),
        Fault::Disk(error) => {
            let full = full::place(&error).map(|place| format!("; {place}"));
            (error.errno(), Some(format!("{error}{}", full.unwrap_or_default())))
        }
    };
    Ended { reason, ..Ended::bad(format!("{what} failed: {}\n", message_of(errno))) }
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

/// Refuses what is not whole sectors, in qemu-io's words.
fn check_sectors(values: &[(u64, &str)]) -> Result<(), Refusal> {
    match values.iter().find(|(value, _)| !value.is_multiple_of(512)) {
        Some((value, name)) => {
            Err(format!("{value} is not a sector-aligned value for '{name}'").into())
        }
        None => Ok(()),
    }
}

/// A read to perform.
pub(super) struct Read {
    offset: u64,
    length: u64,
    /// The expected byte, and the range to verify.
    verify: Option<(u8, Range<usize>)>,
    dump: bool,
    style: Style,
    form: Form,
    /// The virtual machine's state is meant.
    state: bool,
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
        let (style, dump, state) = (Style::of(words), words.has('v'), words.has('b'));
        if state {
            check_sectors(&[(offset, "offset"), (length, "count")])?;
        }
        Ok(Self { offset, length, verify, dump, style, form, state })
    }

    /// Performs the read.
    pub(super) async fn run(self, opened: &Opened) -> Ended {
        let disk = &opened.disk;
        let Self { offset, length, .. } = self;
        let name = if self.form == Form::Plain { "read" } else { "readv" };
        if self.state && disk.active_qcow2().is_none() {
            return failed(name, Fault::Errno(libc::ENOTSUP));
        }
        let start = Instant::now();
        if opened.copies_on_read()
            && !self.state
            && let Err(error) = copy_up(disk, offset, length).await
        {
            return failed(name, error);
        }
        let buf = IoBuf::zeroed(length as usize);
        let read = if self.state {
            Box::pin(disk.read_vm_state(offset, buf)).await
        } else {
            disk.read(offset, buf).await
        };
        let buf = match read {
            Ok(buf) => buf,
            Err(error) => return failed(name, error),
        };
        let time = start.elapsed();
        let mut ended = Ended::good(String::new());
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

/// Copies the clusters of a range that are only in lower layers to the active layer.
async fn copy_up<H: Host>(disk: &Disk<H>, offset: u64, length: u64) -> Result<(), DiskError> {
    let Some(qcow2) = disk.active_qcow2() else { return Ok(()) };
    let cluster = qcow2.geometry.cluster_size();
    let start = offset / cluster * cluster;
    let end = offset.saturating_add(length).min(disk.size()).next_multiple_of(cluster);
    let below = disk.surplus(LayerIndex::new(0), disk.active_index());
    let mut at = start;
    while at < end {
        let next = end.min(at + COPY_AT_ONCE.next_multiple_of(cluster));
        let copied = disk.pull(below, at..next).await;
        disk.or_mark_corrupt(copied).await?;
        at = next;
    }
    Ok(())
}

/// A write to perform.
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
    Bytes { pattern: Vec<u8>, to: To },
}

/// Where data is written to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum To {
    Disk,
    /// Compressed.
    Compressed,
    /// The virtual machine's state.
    State,
}

impl Write {
    pub(super) fn parse(words: &Words<'_>, form: Form) -> Result<Self, Refusal> {
        let zeroes = words.has('z');
        let durable = words.has('f');
        let byte = words.value('P').map(pattern).transpose()?;
        let file = words.value('s');
        for (wrong, message) in [
            (
                usize::from(zeroes) + usize::from(byte.is_some()) + usize::from(file.is_some()) > 1,
                "Only one of -z, -P, and -s can be specified at the same time",
            ),
            (words.has('b') && zeroes, "-b and -z cannot be specified at the same time"),
            (
                durable && (words.has('c') || words.has('b')),
                "-f and -b or -c cannot be specified at the same time",
            ),
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
        let to = match (words.has('b'), words.has('c')) {
            (true, _) => To::State,
            (false, true) => To::Compressed,
            (false, false) => To::Disk,
        };
        if to != To::Disk {
            check_sectors(&[(offset, "offset"), (length, "count")])?;
        }
        let source = if zeroes {
            Source::Zeroes(ZeroFlags { may_unmap: words.has('u'), only_fast: words.has('n') })
        } else {
            let pattern = match file {
                Some(file) => pattern_file(file, length)?,
                None => vec![byte.unwrap_or(PATTERN)],
            };
            Source::Bytes { pattern, to }
        };
        let style = Style::of(words);
        Ok(Self { offset, length, source, durable, style, form })
    }

    /// Performs the write.
    pub(super) async fn run(self, opened: &Opened) -> Ended {
        let Self { offset, length, .. } = self;
        let name = match self.form {
            Form::Plain => "write",
            Form::Vectored => "writev",
            Form::Asynchronous => "aio_write",
        };
        if opened.is_read_only() {
            return read_only();
        }
        let start = Instant::now();
        if let Err(fault) = self.perform(opened).await {
            return failed(name, fault);
        }
        let done = Done { verb: "wrote", offset, bytes: length, time: start.elapsed() };
        let mut ended = Ended::good(String::new());
        self.style.print(&mut ended.text, &done);
        ended
    }

    async fn perform(&self, opened: &Opened) -> Result<(), Fault> {
        let disk = &opened.disk;
        match &self.source {
            Source::Zeroes(flags) => {
                let may_unmap = flags.may_unmap && !opened.ignores_discards();
                let flags = ZeroFlags { may_unmap, ..*flags };
                let _alone = opened.alone().await;
                disk.write_zeroes(self.offset, self.length, flags).await?;
            }
            Source::Bytes { pattern, to } => {
                let mut buf = IoBuf::zeroed(self.length as usize);
                fill(&mut buf, pattern);
                match (to, &opened.compressed) {
                    (To::Disk, Some(compressed)) => {
                        disk.check_range(self.offset, self.length)?;
                        Box::pin(compressed.write(&**disk, self.offset, &buf)).await?;
                    }
                    (To::Disk, None) => drop(disk.write(self.offset, buf).await?),
                    (To::Compressed, _) => {
                        let _alone = opened.alone().await;
                        write_compressed(disk, self.offset, buf).await?;
                    }
                    (To::State, _) if disk.active_qcow2().is_none() => {
                        return Err(Fault::Errno(libc::ENOTSUP));
                    }
                    (To::State, _) => drop(Box::pin(disk.write_vm_state(self.offset, buf)).await?),
                }
            }
        }
        if opened.writes_through() || (self.durable && !opened.ignores_flushes()) {
            disk.flush().await?;
        }
        Ok(())
    }
}

/// The contents of a file, at most `length` bytes. A longer write repeats them.
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
