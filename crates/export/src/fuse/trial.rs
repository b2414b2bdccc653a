//! The server without a kernel, for tests with arbitrary messages.

use super::channel::{Channel, NoMessage};
use super::file::Inode;
use super::handshake::agree;
use super::options::Options;
use super::request::Request;
use super::serve::{Export, Service};
use crate::pool::Pool;
use crate::stop::Stop;
use isobath_disk::BlockDevice;
use isobath_ring::block_on;
use std::cell::Cell;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

/// Bytes of free buffers for reads.
const POOL_BYTES: usize = 4 << 20;

/// Maximum length of a reply in bytes.
const MOST: usize = 64 << 10;

/// A disk served to the caller, one message after another, over a socket that preserves message boundaries like
/// `/dev/fuse`.
pub struct Trial<D> {
    export: Export<D>,
    channel: Channel,
    caller: OwnedFd,
    pool: Pool,
    running: Cell<usize>,
}

/// The result of sending a message.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    /// The message is inconsistent; a server would end here.
    Malformed,
    /// No reply.
    Silence,
    /// A reply.
    Reply(Vec<u8>),
}

impl<D: BlockDevice> Trial<D> {
    /// A server for `device`. [`Options::allow_other`] is ignored.
    ///
    /// # Errors
    /// If the sockets cannot be created.
    pub fn new(device: Arc<D>, options: Options) -> io::Result<Self> {
        let Options { writable, growable, allow_other: _, requests } = options;
        let read_only = !writable || device.is_read_only();
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        let mut ends = [-1; 2];
        // SAFETY: there is room for two descriptors.
        if unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) } < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: both descriptors were just created, and have no other owner.
        let [served, caller] = ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) });
        let growable = growable && !read_only;
        let inode = Inode::new(read_only);
        let export = Export { device, inode, read_only, growable, requests };
        let (channel, pool) = (Channel::new(served), Pool::new(POOL_BYTES));
        Ok(Self { export, channel, caller, pool, running: Cell::new(0) })
    }

    /// Sends a message as the kernel would, and returns the result.
    ///
    /// # Errors
    /// If the message is longer than the socket accepts.
    ///
    /// # Panics
    /// If a request does not complete, or gets more than one reply.
    pub fn send(&self, message: &[u8]) -> io::Result<Answer> {
        // SAFETY: the descriptor is open, and the pointer and the length are those of `message`.
        let sent = unsafe {
            libc::send(self.caller.as_raw_fd(), message.as_ptr().cast(), message.len(), 0)
        };
        if sent < 0 {
            return Err(io::Error::last_os_error());
        }
        let (message, payload) = match self.channel.receive() {
            Ok(received) => received,
            Err(NoMessage::Malformed(_)) => return Ok(Answer::Malformed),
            Err(error) => return Err(io::Error::other(error)),
        };
        if let Request::Init(kernel) = &message.request {
            let _ = agree(kernel);
        }
        self.running.set(1);
        let service = Service {
            export: &self.export,
            channel: &self.channel,
            pool: &self.pool,
            running: &self.running,
            ending: &Stop::default(),
        };
        block_on(service.serve(message, payload));
        assert_eq!(self.running.get(), 0, "a request did not end");
        let reply = self.receive();
        assert!(reply.is_none() || self.receive().is_none(), "a second reply");
        Ok(reply.map_or(Answer::Silence, Answer::Reply))
    }

    fn receive(&self) -> Option<Vec<u8>> {
        let mut buf = vec![0; MOST];
        // SAFETY: the descriptor is open, and the pointer and the length are those of `buf`.
        let count = unsafe {
            libc::recv(self.caller.as_raw_fd(), buf.as_mut_ptr().cast(), buf.len(), libc::MSG_TRUNC)
        };
        let count = usize::try_from(count).ok().filter(|count| *count > 0)?;
        buf.truncate(count);
        Some(buf)
    }
}
