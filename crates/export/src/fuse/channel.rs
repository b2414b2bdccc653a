//! A `/dev/fuse` descriptor: receives messages and sends replies.

use super::intake::Source;
use super::memory::Memory;
use super::request::{Malformed, Message, Request, WRITE_HEAD};
use super::wire::{IOCTL_CLONE, OutHeader};
use isobath_ring::{Device, Listening};
use isobath_storage::IoBuf;
use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use zerocopy::IntoBytes;

/// The kernel's device for FUSE servers.
pub(super) const DEVICE: &str = "/dev/fuse";
/// Longest payload of a write in bytes.
pub(super) const MAX_WRITE: usize = 1 << 20;

/// Where the payload of a write begins in a buffer: at a page boundary, as direct I/O requires.
const PAYLOAD: usize = isobath_buf::ALIGNMENT;
/// Where a message begins in a buffer.
const START: usize = PAYLOAD - WRITE_HEAD;

/// Opens `/dev/fuse` for non-blocking reads.
pub(super) fn open_device() -> io::Result<OwnedFd> {
    let flags = libc::O_NONBLOCK | libc::O_CLOEXEC;
    let file = File::options().read(true).write(true).custom_flags(flags).open(DEVICE)?;
    Ok(file.into())
}

/// Opens another descriptor for a connection.
pub(super) fn clone_device(connection: &OwnedFd) -> io::Result<OwnedFd> {
    let fresh = open_device()?;
    let number = connection.as_raw_fd() as u32;
    // SAFETY: both descriptors are open, and the call reads one u32.
    let result = unsafe { libc::ioctl(fresh.as_raw_fd(), IOCTL_CLONE as _, &raw const number) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(fresh) }
}

/// One thread's connection to the kernel.
pub(super) struct Channel {
    device: Device,
    memory: Memory,
}

/// The payload of a write, and the rest of its buffer.
pub(super) struct Payload {
    front: IoBuf,
    pub(super) data: IoBuf,
    rest: IoBuf,
}

impl Payload {
    /// Truncates the data to `length` bytes.
    pub(super) fn cut(&mut self, length: usize) {
        let mut tail = std::mem::replace(&mut self.data, IoBuf::empty());
        self.data = tail.split_to(length.min(tail.len()));
        tail.unsplit(std::mem::replace(&mut self.rest, IoBuf::empty()));
        self.rest = tail;
    }
}

/// Why no message was received.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoMessage {
    /// No message is waiting.
    #[error("no request is waiting")]
    Empty,
    /// The file system was unmounted, or the connection aborted.
    #[error("the kernel closed the connection")]
    Ended,
    #[error(transparent)]
    Malformed(#[from] Malformed),
    #[error("cannot read {DEVICE}: {0}")]
    Io(#[from] io::Error),
}

impl Source for Channel {
    type Message = (Message, Option<Payload>);
    type Error = NoMessage;
    type Listening = Listening;

    fn listen(&self) -> Listening {
        self.device.listen()
    }

    fn receive(&self) -> Result<Option<Self::Message>, NoMessage> {
        match self.receive() {
            Ok(message) => Ok(Some(message)),
            Err(NoMessage::Empty) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn is_waiting(&self) -> bool {
        self.device.is_readable()
    }
}

impl Channel {
    pub(super) fn new(device: OwnedFd) -> Self {
        Self { device: Device::from(device), memory: Memory::new(PAYLOAD + MAX_WRITE) }
    }

    /// Receives a message; a write comes with its payload.
    pub(super) fn receive(&self) -> Result<(Message, Option<Payload>), NoMessage> {
        let mut buf = self.memory.take().map_err(NoMessage::Io)?;
        let message = self.read(&mut buf);
        match message {
            Ok(Message { request: Request::Write { length, .. }, .. }) => {
                let front = buf.split_to(PAYLOAD);
                let data = buf.split_to((length as usize).min(buf.len()));
                message.map(|message| (message, Some(Payload { front, data, rest: buf })))
            }
            message => {
                self.memory.put(buf, PAYLOAD);
                message.map(|message| (message, None))
            }
        }
    }

    fn read(&self, buf: &mut IoBuf) -> Result<Message, NoMessage> {
        let room = buf.get_mut(START..).unwrap_or_default();
        loop {
            match self.device.read(room) {
                Ok(count) => return Ok(Message::parse(room.get(..count).unwrap_or_default())?),
                Err(error) => match error.raw_os_error() {
                    // ENOENT: the request was cancelled while it was read.
                    Some(libc::EINTR | libc::ENOENT) => {}
                    Some(libc::EAGAIN) => return Err(NoMessage::Empty),
                    // ECONNABORTED: it was unmounted while a request was being read.
                    Some(libc::ENODEV | libc::ECONNABORTED) => return Err(NoMessage::Ended),
                    _ => return Err(NoMessage::Io(error)),
                },
            }
        }
    }

    /// Returns a payload's buffer to the pool.
    pub(super) fn put(&self, Payload { mut front, data, rest }: Payload) {
        let used = front.len() + data.len();
        if front.as_ptr_range().end == data.as_ptr() && data.as_ptr_range().end == rest.as_ptr() {
            front.unsplit(data);
            front.unsplit(rest);
            self.memory.put(front, used);
        }
    }

    /// Answers a request with `body` and then `data`.
    pub(super) fn reply(&self, unique: u64, body: &[u8], data: &[u8]) {
        self.send(unique, 0, body, data);
    }

    /// Answers a request with an error number.
    pub(super) fn fail(&self, unique: u64, errno: i32) {
        self.send(unique, -errno, &[], &[]);
    }

    fn send(&self, unique: u64, error: i32, body: &[u8], data: &[u8]) {
        let length = size_of::<OutHeader>() + body.len() + data.len();
        let header = OutHeader { len: length as u32, error, unique };
        let parts = [header.as_bytes(), body, data].map(IoSlice::new);
        loop {
            match self.device.write(&parts) {
                Ok(_) => return,
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR) => {}
                    // The requester or the whole connection is gone; reads report both.
                    Some(libc::ENOENT | libc::ENODEV | libc::ECONNABORTED) => return,
                    _ => {
                        tracing::error!(unique, length, %error, "the kernel rejected a FUSE reply");
                        return;
                    }
                },
            }
        }
    }
}
