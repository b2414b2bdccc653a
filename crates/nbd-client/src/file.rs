//! An open export.

use crate::connection::{Connection, Request};
use crate::handshake::Agreed;
use crate::reply::Extent;
use crate::wire::{command, command_flag, state, transmission_flag};
use isobath_storage::{
    Allocation, Capabilities, FileId, Identity, IoBuf, Operation, Result, SECTOR, Storage,
    StorageError, ZeroMode,
};
use isobath_sync::WaitGroup;
use std::fmt;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The maximum length of a file, as on Linux.
const MAX_LENGTH: u64 = i64::MAX as u64;
/// The maximum range of a request without data, in bytes: a multiple of every minimum block size.
const MAX_RANGE: u64 = 1 << 30;
/// Bytes of zeroes sent at a time if the server has no command for zeroing.
const ZEROES: u64 = 1 << 20;

/// An open export of an NBD server: a file of a fixed length.
///
/// Reads past its end return zeroes. Writes past it fail with `ENOSPC`, except zeroes in the rest of the last sector,
/// which reads as zeroes anyway. Requests may have any offset and length: they are split at the server's maximum block
/// size and rounded to its minimum.
pub struct NbdFile {
    name: PathBuf,
    id: FileId,
    connection: Arc<Connection>,
    agreed: Agreed,
    writable: bool,
}

impl fmt::Debug for NbdFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NbdFile")
            .field("name", &self.name)
            .field("agreed", &self.agreed)
            .finish_non_exhaustive()
    }
}

/// A change of whole blocks in progress.
struct Whole<'a>(&'a WaitGroup);

impl Drop for Whole<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl NbdFile {
    pub(crate) fn new(
        name: PathBuf,
        id: FileId,
        connection: Arc<Connection>,
        agreed: Agreed,
        writable: bool,
    ) -> Self {
        Self { name, id, connection, agreed, writable }
    }

    fn at(&self, operation: Operation, offset: u64, length: u64, cause: io::Error) -> StorageError {
        StorageError::at(operation, &self.name, offset, length, cause)
    }

    /// Checks the range of a request. Returns its end.
    fn check(&self, operation: Operation, offset: u64, length: u64) -> Result<u64> {
        let refuse =
            |errno| Err(self.at(operation, offset, length, io::Error::from_raw_os_error(errno)));
        if operation != Operation::Read && !self.writable {
            return refuse(libc::EBADF);
        }
        match offset.checked_add(length).filter(|end| *end <= MAX_LENGTH) {
            Some(end) => Ok(end),
            None => refuse(libc::EINVAL),
        }
    }

    /// Checks the range of a change. Returns its end, or the end of the export if that comes first.
    fn check_room(&self, operation: Operation, offset: u64, length: u64) -> Result<u64> {
        let end = self.check(operation, offset, length)?;
        if end > self.agreed.size.next_multiple_of(SECTOR) {
            let full = io::Error::from_raw_os_error(libc::ENOSPC);
            return Err(self.at(operation, offset, length, full));
        }
        Ok(end.min(self.agreed.size))
    }

    fn minimum(&self) -> u64 {
        self.agreed.minimum.into()
    }

    /// A range extended to whole blocks; the last block may be cut off by the end of the export.
    fn around(&self, offset: u64, end: u64) -> (u64, u64) {
        let minimum = self.minimum();
        (offset / minimum * minimum, end.next_multiple_of(minimum).min(self.agreed.size))
    }

    async fn call(
        &self,
        (command, flags): (u16, u16),
        offset: u64,
        length: u64,
        bufs: Vec<IoBuf>,
    ) -> io::Result<(Vec<IoBuf>, Option<Extent>)> {
        // Longer ranges were split before.
        let request = Request { command, flags, offset, length: length as u32 };
        let done = self.connection.call(request, bufs).await;
        done.result.map(|extent| (done.bufs, extent))
    }

    /// Fills a buffer from whole blocks within the export.
    async fn read_whole(&self, offset: u64, mut rest: IoBuf) -> io::Result<IoBuf> {
        let mut at = offset;
        let mut done: Option<IoBuf> = None;
        while done.is_none() || !rest.is_empty() {
            let length = rest.len().min(self.agreed.maximum as usize);
            let part = if length == rest.len() {
                std::mem::replace(&mut rest, IoBuf::empty())
            } else {
                rest.split_to(length)
            };
            let (bufs, _) = self.call((command::READ, 0), at, length as u64, vec![part]).await?;
            for part in bufs {
                match &mut done {
                    Some(done) => done.unsplit(part),
                    None => done = Some(part),
                }
            }
            at += length as u64;
        }
        Ok(done.unwrap_or_else(IoBuf::empty))
    }

    /// Fills a buffer from any range within the export.
    async fn read(&self, offset: u64, mut buf: IoBuf) -> io::Result<IoBuf> {
        if buf.is_empty() {
            return Ok(buf);
        }
        let end = offset + buf.len() as u64;
        let (from, to) = self.around(offset, end);
        if (from, to) == (offset, end) {
            return self.read_whole(offset, buf).await;
        }
        let blocks = self.read_whole(from, IoBuf::zeroed((to - from) as usize)).await?;
        let start = (offset - from) as usize;
        let length = buf.len();
        buf.copy_from_slice(&blocks[start..start + length]);
        Ok(buf)
    }

    /// Begins a change of whole blocks.
    async fn whole(&self) -> Whole<'_> {
        let connection = &*self.connection;
        if self.agreed.minimum > 1 {
            // No change of partial blocks is in progress meanwhile.
            let _guard = connection.partial.lock().await;
            connection.whole.begin();
        } else {
            connection.whole.begin();
        }
        let whole = Whole(&connection.whole);
        connection.landed().await;
        whole
    }

    /// Writes whole blocks within the export.
    async fn write_whole(&self, offset: u64, bufs: Vec<IoBuf>) -> io::Result<Vec<IoBuf>> {
        let length: usize = bufs.iter().map(IoBuf::len).sum();
        let maximum = self.agreed.maximum as usize;
        let write = (command::WRITE, 0);
        if length <= maximum {
            return Ok(self.call(write, offset, length as u64, bufs).await?.0);
        }
        let mut at = offset;
        let mut back: Vec<IoBuf> = Vec::with_capacity(bufs.len());
        let mut left = bufs.into_iter();
        let mut rest = left.next();
        // Whether the next part is the rest of the last buffer in `back`.
        let mut goes_on = false;
        while rest.is_some() {
            let (mut parts, mut room, continues) = (Vec::new(), maximum, goes_on);
            goes_on = false;
            while let Some(mut buf) = rest.take() {
                if buf.len() > room {
                    if room > 0 {
                        parts.push(buf.split_to(room));
                        goes_on = true;
                        room = 0;
                    }
                    goes_on |= parts.is_empty() && continues;
                    rest = Some(buf);
                    break;
                }
                room -= buf.len();
                parts.push(buf);
                rest = left.next();
            }
            let length = (maximum - room) as u64;
            let (parts, _) = self.call(write, at, length, parts).await?;
            for (number, part) in parts.into_iter().enumerate() {
                match back.last_mut() {
                    Some(last) if number == 0 && continues => last.unsplit(part),
                    _ => back.push(part),
                }
            }
            at += length;
        }
        Ok(back)
    }

    /// Writes any range within the export: reads the whole blocks around it, changes them and writes them back.
    async fn write_parts(&self, offset: u64, bufs: &[IoBuf]) -> io::Result<()> {
        let _guard = self.connection.partial.lock().await;
        self.connection.whole.ended().await;
        self.connection.landed().await;
        let length: u64 = bufs.iter().map(|buf| buf.len() as u64).sum();
        let (from, to) = self.around(offset, offset + length);
        let minimum = self.minimum();
        let mut blocks = IoBuf::zeroed((to - from) as usize);
        let last = (to - 1) / minimum * minimum;
        for start in [Some(from), Some(last).filter(|last| *last != from)].into_iter().flatten() {
            let end = (start + minimum).min(to);
            let block = self.read_whole(start, IoBuf::zeroed((end - start) as usize)).await?;
            blocks[(start - from) as usize..(end - from) as usize].copy_from_slice(&block);
        }
        let mut at = (offset - from) as usize;
        for buf in bufs {
            buf.copy_to(&mut blocks[at..at + buf.len()]);
            at += buf.len();
        }
        self.write_whole(from, vec![blocks]).await?;
        Ok(())
    }

    /// Writes any range within the export.
    async fn write(&self, offset: u64, bufs: Vec<IoBuf>) -> io::Result<Vec<IoBuf>> {
        let length: u64 = bufs.iter().map(|buf| buf.len() as u64).sum();
        if length == 0 {
            return Ok(bufs);
        }
        let end = offset + length;
        if self.around(offset, end) == (offset, end) {
            let _whole = self.whole().await;
            return self.write_whole(offset, bufs).await;
        }
        self.write_parts(offset, &bufs).await?;
        Ok(bufs)
    }

    async fn write_as_data(&self, offset: u64, end: u64) -> io::Result<()> {
        let mut at = offset;
        while at < end {
            let length = (end - at).min(ZEROES);
            self.write(at, vec![IoBuf::zeroed(length as usize)]).await?;
            at += length;
        }
        Ok(())
    }

    async fn zero(&self, offset: u64, end: u64, mode: ZeroMode) -> io::Result<()> {
        let can = self.agreed.has(transmission_flag::SEND_WRITE_ZEROES);
        if mode.only_fast && !(can && self.agreed.has(transmission_flag::SEND_FAST_ZERO)) {
            return Err(ErrorKind::Unsupported.into());
        }
        if !can {
            return self.write_as_data(offset, end).await;
        }
        let (first, last) = self.within(offset, end);
        if first >= last {
            return self.write_as_data(offset, end).await;
        }
        let mut flags = 0;
        if !mode.may_unmap {
            flags |= command_flag::NO_HOLE;
        }
        if mode.only_fast {
            flags |= command_flag::FAST_ZERO;
        }
        {
            let _whole = self.whole().await;
            self.each((command::WRITE_ZEROES, flags), first, last, self.agreed.maximum.into())
                .await?;
        }
        self.write_as_data(offset, first).await?;
        self.write_as_data(last, end).await
    }

    /// The whole blocks within a range.
    fn within(&self, offset: u64, end: u64) -> (u64, u64) {
        let minimum = self.minimum();
        let last = if end == self.agreed.size { end } else { end / minimum * minimum };
        (offset.next_multiple_of(minimum), last)
    }

    /// Makes requests without data for a range, each for at most `most` bytes.
    async fn each(&self, what: (u16, u16), offset: u64, end: u64, most: u64) -> io::Result<()> {
        let mut at = offset;
        while at < end {
            let length = (end - at).min(most);
            self.call(what, at, length, Vec::new()).await?;
            at += length;
        }
        Ok(())
    }

    /// Queries the extent at an offset within the export.
    async fn extent(&self, offset: u64) -> io::Result<Allocation> {
        let (from, block_end) = self.around(offset, offset + 1);
        let length = (self.agreed.size - from).min(MAX_RANGE);
        let what = (command::BLOCK_STATUS, command_flag::REQ_ONE);
        let (_, extent) = self.call(what, from, length, Vec::new()).await?;
        let Some(extent) = extent else { return Err(ErrorKind::InvalidData.into()) };
        let end = from + u64::from(extent.length).min(length);
        if end <= offset {
            // The server's extents are smaller than its minimum block size.
            return Ok(Allocation { length: block_end - offset, data: true });
        }
        Ok(Allocation { length: end - offset, data: extent.flags & state::ZERO == 0 })
    }

    /// Reads any range, even past the end.
    async fn read_anywhere(&self, offset: u64, mut buf: IoBuf) -> Result<IoBuf> {
        let length = buf.len() as u64;
        let end = self.check(Operation::Read, offset, length)?;
        self.connection.landed().await;
        let there = end.min(self.agreed.size).saturating_sub(offset) as usize;
        let mut beyond = None;
        if there < buf.len() {
            let mut inside = buf;
            let first = inside.split_to(there);
            inside.fill(0);
            (buf, beyond) = (first, Some(inside));
        }
        let read = self.read(offset, buf).await;
        let mut buf = read.map_err(|error| self.at(Operation::Read, offset, length, error))?;
        if let Some(beyond) = beyond {
            buf.unsplit(beyond);
        }
        Ok(buf)
    }

    /// Writes any range; past the end, only zeroes.
    async fn write_anywhere(&self, offset: u64, mut bufs: Vec<IoBuf>) -> Result<Vec<IoBuf>> {
        let length = bufs.iter().map(|buf| buf.len() as u64).sum();
        let failed = |error| self.at(Operation::Write, offset, length, error);
        let end = self.check_room(Operation::Write, offset, length)?;
        let there = end.saturating_sub(offset);
        if there == length {
            return self.write(offset, bufs).await.map_err(failed);
        }
        // Zeroes past the end need not be written.
        let lengths: Vec<usize> = bufs.iter().map(IoBuf::len).collect();
        let rest = cut(&mut bufs, there as usize);
        if rest.iter().any(|buf| buf.iter().any(|byte| *byte != 0)) {
            return Err(failed(io::Error::from_raw_os_error(libc::ENOSPC)));
        }
        let back = self.write(offset, bufs).await.map_err(failed)?;
        let mut parts = back.into_iter().chain(rest);
        let mut whole = Vec::with_capacity(lengths.len());
        for length in lengths {
            let mut buf = parts.next().unwrap_or_else(IoBuf::empty);
            while buf.len() < length {
                match parts.next() {
                    Some(part) => buf.unsplit(part),
                    None => break,
                }
            }
            whole.push(buf);
        }
        Ok(whole)
    }

    /// Writes zeroes to any range, even past the end.
    async fn zero_anywhere(&self, offset: u64, length: u64, mode: ZeroMode) -> Result<()> {
        let end = self.check_room(Operation::WriteZeroes, offset, length)?;
        if offset >= end {
            return Ok(());
        }
        let done = self.zero(offset, end, mode).await;
        done.map_err(|error| self.at(Operation::WriteZeroes, offset, length, error))
    }

    /// Discards whole blocks.
    async fn trim(&self, offset: u64, length: u64) -> Result<()> {
        let end = self.check(Operation::Discard, offset, length)?.min(self.agreed.size);
        let (first, last) = self.within(offset, end);
        if first >= last || !self.agreed.has(transmission_flag::SEND_TRIM) {
            return Ok(());
        }
        let _whole = self.whole().await;
        let done = self.each((command::TRIM, 0), first, last, MAX_RANGE).await;
        done.map_err(|error| self.at(Operation::Discard, offset, length, error))
    }

    /// Makes all completed changes durable.
    async fn flush_all(&self) -> Result<()> {
        if !self.agreed.has(transmission_flag::SEND_FLUSH) {
            return Ok(());
        }
        self.connection.landed().await;
        let done = self.call((command::FLUSH, 0), 0, 0, Vec::new()).await;
        done.map(|_| ()).map_err(|error| StorageError::new(Operation::Flush, &self.name, error))
    }

    /// Whether there is data at an offset, and for how many bytes that holds.
    async fn run_at(&self, offset: u64) -> Result<Allocation> {
        let size = self.agreed.size;
        if offset >= size {
            return Ok(Allocation { length: 0, data: false });
        }
        if self.agreed.allocation.is_none() {
            return Ok(Allocation { length: size - offset, data: true });
        }
        self.connection.landed().await;
        let found = self.extent(offset).await;
        found.map_err(|error| self.at(Operation::Query, offset, 0, error))
    }
}

/// Truncates buffers to `keep` bytes in total. Returns the rest.
fn cut(bufs: &mut Vec<IoBuf>, keep: usize) -> Vec<IoBuf> {
    let mut left = keep;
    let mut rest = Vec::new();
    for buf in std::mem::take(bufs) {
        if left == 0 && !buf.is_empty() {
            rest.push(buf);
        } else if buf.len() <= left {
            left -= buf.len();
            bufs.push(buf);
        } else {
            let mut buf = buf;
            bufs.push(buf.split_to(left));
            rest.push(buf);
            left = 0;
        }
    }
    rest
}

/// Futures are boxed, so that they do not enlarge the futures of a host that combines this with other files.
impl Storage for NbdFile {
    fn identity(&self) -> Identity<'_> {
        Identity { name: Path::new(&self.name), id: self.id }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { read_only: !self.writable, ..Capabilities::default() }
    }

    fn read_at(&self, offset: u64, buf: IoBuf) -> impl Future<Output = Result<IoBuf>> {
        Box::pin(self.read_anywhere(offset, buf))
    }

    fn write_vectored_at(
        &self,
        offset: u64,
        bufs: Vec<IoBuf>,
    ) -> impl Future<Output = Result<Vec<IoBuf>>> {
        Box::pin(self.write_anywhere(offset, bufs))
    }

    fn write_zeroes(
        &self,
        offset: u64,
        length: u64,
        mode: ZeroMode,
    ) -> impl Future<Output = Result<()>> {
        Box::pin(self.zero_anywhere(offset, length, mode))
    }

    fn discard(&self, offset: u64, length: u64) -> impl Future<Output = Result<()>> {
        Box::pin(self.trim(offset, length))
    }

    /// Has no effect if the server does not support flushing, as in QEMU: completed writes are then as durable as they
    /// will get.
    fn flush(&self) -> impl Future<Output = Result<()>> {
        Box::pin(self.flush_all())
    }

    async fn len(&self) -> Result<u64> {
        Ok(self.agreed.size)
    }

    /// An export keeps its length: shortening has no effect, as on a device, and lengthening fails with `ENOSPC`.
    async fn set_len(&self, length: u64) -> Result<()> {
        self.check_room(Operation::SetLength, length, 0).map(|_| ())
    }

    fn allocation(&self, offset: u64) -> impl Future<Output = Result<Allocation>> {
        Box::pin(self.run_at(offset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_cut_where_the_export_ends() {
        for keep in 0..=12 {
            let bytes = [&b"abcd"[..], b"", b"efgh", b"ijkl"];
            let mut bufs: Vec<IoBuf> = bytes.iter().map(|part| IoBuf::copy_of(part)).collect();
            let rest = cut(&mut bufs, keep);
            let joined =
                |bufs: &[IoBuf]| bufs.iter().flat_map(|buf| buf.to_vec()).collect::<Vec<_>>();
            assert_eq!(joined(&bufs), b"abcdefghijkl"[..keep]);
            assert_eq!(joined(&rest), b"abcdefghijkl"[keep..]);
        }
    }
}
