//! The window through which requests and small payloads are received.

use super::request::Request;
use super::transport::Transport;
use isobath_storage::IoBuf;
use std::io;

/// Size of the window in bytes.
pub(crate) const WINDOW: usize = 128 << 10;
/// How many bytes of the window are used while large writes arrive, so that their payload is received in place and not
/// copied.
pub(crate) const NARROW: usize = 4 << 10;

/// Input received but not yet consumed.
pub(crate) struct Window {
    buf: IoBuf,
    start: usize,
    end: usize,
}

impl Window {
    pub(crate) fn new() -> Self {
        Self { buf: IoBuf::zeroed(WINDOW), start: 0, end: 0 }
    }

    pub(crate) fn unread(&self) -> &[u8] {
        self.buf.get(self.start..self.end).unwrap_or_default()
    }

    /// Consumes up to `count` bytes and returns how many there were.
    pub(crate) fn skip(&mut self, count: usize) -> usize {
        let count = count.min(self.end - self.start);
        self.start += count;
        count
    }

    /// Receives more input after the unread bytes, for at most `size` bytes in total. Returns how many were received.
    pub(crate) async fn fill<T: Transport>(
        &mut self,
        transport: &T,
        size: usize,
    ) -> io::Result<usize> {
        self.buf.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let mut buf = std::mem::replace(&mut self.buf, IoBuf::empty());
        let rest = if size < buf.len() {
            let front = buf.split_to(size.max(self.end + Request::SIZE));
            std::mem::replace(&mut buf, front)
        } else {
            IoBuf::empty()
        };
        let (result, mut buf) = transport.receive(buf, self.end).await;
        buf.unsplit(rest);
        self.buf = buf;
        let count = result?;
        self.end = self.buf.len().min(self.end + count);
        Ok(count)
    }
}
