//! The transport of a session.

use isobath_storage::IoBuf;
use std::future::{Future, pending};
use std::io;

/// A stream of bytes to and from a client.
///
/// At most one receive and one send are in flight at a time. A dropped future may lose its buffers and received data.
pub trait Transport {
    /// Receives what has arrived, at least one byte, into `buf[from..]`, which must not be empty. The count is 0 once
    /// the client has closed its side.
    fn receive(&self, buf: IoBuf, from: usize) -> impl Future<Output = (io::Result<usize>, IoBuf)>;

    /// Whether the client is known to have disconnected, so that nothing can be sent to it. A client that has only
    /// closed its side may still receive.
    fn is_gone(&self) -> bool {
        false
    }

    /// Waits until the client sends no more. It may still receive.
    fn sends_no_more(&self) -> impl Future<Output = ()> {
        pending()
    }

    /// Waits until [`is_gone`](Self::is_gone) may have changed.
    fn hung_up(&self) -> impl Future<Output = ()> {
        pending()
    }

    /// Sends all of the buffers in order, and returns them.
    fn send(&self, bufs: Vec<IoBuf>) -> impl Future<Output = (io::Result<()>, Vec<IoBuf>)>;
}
