//! The messages of the vhost-user protocol, and the socket that carries them.
//!
//! Everything is in the host's byte order (vhost-user: "Message Specification").

use isobath_ring::Readiness;
use isobath_ring::net::receive_files;
use std::fs::File;
use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::ptr;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Length of a header in bytes.
const HEADER: usize = 12;
/// Maximum length of a body in bytes: the longest are memory tables and configuration spaces with their header.
pub(crate) const MAX_BODY: usize = 4096;
/// Maximum number of descriptors in a message.
const MAX_FILES: usize = 32;

/// Header flags: the version, a reply, a reply required.
const VERSION_MASK: u32 = 3;
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

/// The requests of clients, as numbered in the specification.
pub(crate) mod code {
    pub(crate) const GET_FEATURES: u32 = 1;
    pub(crate) const SET_FEATURES: u32 = 2;
    pub(crate) const SET_OWNER: u32 = 3;
    pub(crate) const RESET_OWNER: u32 = 4;
    pub(crate) const SET_MEM_TABLE: u32 = 5;
    pub(crate) const SET_VRING_NUM: u32 = 8;
    pub(crate) const SET_VRING_ADDR: u32 = 9;
    pub(crate) const SET_VRING_BASE: u32 = 10;
    pub(crate) const GET_VRING_BASE: u32 = 11;
    pub(crate) const SET_VRING_KICK: u32 = 12;
    pub(crate) const SET_VRING_CALL: u32 = 13;
    pub(crate) const SET_VRING_ERR: u32 = 14;
    pub(crate) const GET_PROTOCOL_FEATURES: u32 = 15;
    pub(crate) const SET_PROTOCOL_FEATURES: u32 = 16;
    pub(crate) const GET_QUEUE_NUM: u32 = 17;
    pub(crate) const SET_VRING_ENABLE: u32 = 18;
    pub(crate) const SET_BACKEND_REQ_FD: u32 = 21;
    pub(crate) const GET_CONFIG: u32 = 24;
    pub(crate) const SET_CONFIG: u32 = 25;
    pub(crate) const GET_INFLIGHT_FD: u32 = 31;
    pub(crate) const SET_INFLIGHT_FD: u32 = 32;
    pub(crate) const RESET_DEVICE: u32 = 34;
    pub(crate) const GET_MAX_MEM_SLOTS: u32 = 36;
    pub(crate) const ADD_MEM_REG: u32 = 37;
    pub(crate) const REM_MEM_REG: u32 = 38;
    pub(crate) const SET_STATUS: u32 = 39;
    pub(crate) const GET_STATUS: u32 = 40;

    /// To the client, on the backend channel: the configuration space has changed.
    pub(crate) const BACKEND_CONFIG_CHANGE: u32 = 2;
}

/// Protocol feature bits.
pub(crate) mod protocol {
    pub(crate) const MQ: u64 = 1 << 0;
    pub(crate) const REPLY_ACK: u64 = 1 << 3;
    pub(crate) const BACKEND_REQ: u64 = 1 << 5;
    pub(crate) const CONFIG: u64 = 1 << 9;
    pub(crate) const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub(crate) const RESET_DEVICE: u64 = 1 << 13;
    pub(crate) const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    pub(crate) const STATUS: u64 = 1 << 16;
}

/// A vring's number and a value.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct VringState {
    pub(crate) index: u32,
    pub(crate) value: u32,
}

/// Addresses of a vring's parts in the client's process.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct VringAddress {
    pub(crate) index: u32,
    pub(crate) flags: u32,
    pub(crate) descriptors: u64,
    pub(crate) used: u64,
    pub(crate) available: u64,
    pub(crate) log: u64,
}

/// A memory region.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct MemoryRegion {
    pub(crate) guest: u64,
    pub(crate) size: u64,
    pub(crate) user: u64,
    pub(crate) offset: u64,
}

/// The header before bytes of the configuration space.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct ConfigPart {
    pub(crate) offset: u32,
    pub(crate) size: u32,
    pub(crate) flags: u32,
}

/// The memory for requests in flight.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct InFlightArea {
    pub(crate) length: u64,
    pub(crate) offset: u64,
    pub(crate) queues: u16,
    pub(crate) queue_size: u16,
    pub(crate) padding: u32,
}

/// A message from a client.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) code: u32,
    /// Whether the client waits for a reply, if `REPLY_ACK` was negotiated.
    pub(crate) needs_reply: bool,
    pub(crate) body: Vec<u8>,
    pub(crate) files: Vec<OwnedFd>,
}

impl Message {
    /// The body, if it is exactly a `T`.
    pub(crate) fn read<T: FromBytes>(&self) -> io::Result<T> {
        T::read_from_bytes(&self.body).map_err(|_| invalid("the message has the wrong length"))
    }

    /// The `T` at the start of the body, if there is one, and the rest.
    pub(crate) fn read_prefix<T: FromBytes>(&self) -> io::Result<(T, &[u8])> {
        T::read_from_prefix(&self.body).map_err(|_| invalid("the message is too short"))
    }

    /// Takes the descriptor that came with it, which must be the only one.
    pub(crate) fn file(&mut self) -> io::Result<OwnedFd> {
        match (self.files.pop(), self.files.is_empty()) {
            (Some(file), true) => Ok(file),
            _ => Err(invalid("the message has the wrong number of file descriptors")),
        }
    }
}

pub(crate) fn invalid(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// A connected socket of a client.
pub(crate) struct Connection {
    socket: Readiness,
    header: [u8; HEADER],
    body: Vec<u8>,
    files: Vec<OwnedFd>,
    /// Number of bytes received of the header and the body that follows it.
    filled: usize,
}

impl From<UnixStream> for Connection {
    fn from(socket: UnixStream) -> Self {
        Self::from(OwnedFd::from(socket))
    }
}

impl From<OwnedFd> for Connection {
    fn from(socket: OwnedFd) -> Self {
        Self {
            socket: Readiness::from(socket),
            header: [0; HEADER],
            body: Vec::new(),
            files: Vec::new(),
            filled: 0,
        }
    }
}

impl Connection {
    /// Receives a message; `None` at the end of the connection. Dropping the future loses no data.
    ///
    /// # Errors
    /// The input is not a message, or the connection has failed.
    pub(crate) async fn receive(&mut self) -> io::Result<Option<Message>> {
        loop {
            if let Some(message) = self.complete()? {
                return Ok(Some(message));
            }
            let space = match self.filled.checked_sub(HEADER) {
                None => self.header.get_mut(self.filled..),
                Some(filled) => self.body.get_mut(filled..),
            };
            let space = space.unwrap_or_default();
            match receive(self.socket.as_fd(), space, &mut self.files) {
                Ok(0) if self.filled == 0 => return Ok(None),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.socket.ready(libc::POLLIN).await?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// The received message, if it is complete.
    fn complete(&mut self) -> io::Result<Option<Message>> {
        if self.filled < HEADER {
            return Ok(None);
        }
        let word = |at: usize| {
            let bytes = self.header.get(4 * at..4 * at + 4).and_then(|bytes| bytes.first_chunk());
            bytes.map_or(0, |bytes| u32::from_ne_bytes(*bytes))
        };
        let (code, flags, length) = (word(0), word(1), word(2) as usize);
        if flags & VERSION_MASK != VERSION || flags & REPLY != 0 || length > MAX_BODY {
            return Err(invalid("the data received is not a vhost-user message"));
        }
        self.body.resize(length, 0);
        if self.filled < HEADER + length {
            return Ok(None);
        }
        self.filled = 0;
        Ok(Some(Message {
            code,
            needs_reply: flags & NEED_REPLY != 0,
            body: std::mem::take(&mut self.body),
            files: std::mem::take(&mut self.files),
        }))
    }

    /// Answers a message.
    pub(crate) async fn reply(
        &self,
        code: u32,
        body: &[u8],
        file: Option<&File>,
    ) -> io::Result<()> {
        self.send(code, VERSION | REPLY, body, file).await
    }

    /// Sends a message that requires no reply.
    pub(crate) async fn tell(&self, code: u32) -> io::Result<()> {
        self.send(code, VERSION, &[], None).await
    }

    async fn send(
        &self,
        code: u32,
        flags: u32,
        body: &[u8],
        file: Option<&File>,
    ) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(HEADER + body.len());
        for word in [code, flags, body.len() as u32] {
            bytes.extend_from_slice(&word.to_ne_bytes());
        }
        bytes.extend_from_slice(body);
        let (mut left, mut file) = (bytes.as_slice(), file);
        while !left.is_empty() {
            match send(self.socket.number(), left, file) {
                Ok(count) => {
                    left = left.get(count..).unwrap_or_default();
                    file = None;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.socket.ready(libc::POLLOUT).await?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Room for a control message with one descriptor, aligned as the kernel requires.
type Control = [MaybeUninit<u64>; 3];

/// Receives the available bytes that fit into `space`, and the descriptors that come with them.
fn receive(
    socket: BorrowedFd<'_>,
    space: &mut [u8],
    files: &mut Vec<OwnedFd>,
) -> io::Result<usize> {
    let arrival = receive_files(socket, space, MAX_FILES)?;
    files.extend(arrival.files);
    if arrival.lost || files.len() > MAX_FILES {
        return Err(invalid(
            "the message has too many file descriptors, or the server can have no more",
        ));
    }
    Ok(arrival.count)
}

/// Sends as many bytes as the socket accepts now, with a descriptor if there is one.
fn send(socket: i32, bytes: &[u8], file: Option<&File>) -> io::Result<usize> {
    let mut vector =
        libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control: Control = [MaybeUninit::uninit(); 3];
    // SAFETY: a message header of zeroes is valid and empty.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = &raw mut vector;
    header.msg_iovlen = 1;
    if let Some(file) = file {
        header.msg_control = control.as_mut_ptr().cast();
        // SAFETY: the buffer is aligned and large enough for one control message with one descriptor. The message is
        // written completely; the kernel does not read its padding.
        unsafe {
            header.msg_controllen = libc::CMSG_SPACE(size_of::<i32>() as u32) as usize;
            ptr::write_bytes(header.msg_control.cast::<u8>(), 0, header.msg_controllen);
            let message = libc::CMSG_FIRSTHDR(&raw const header);
            (*message).cmsg_level = libc::SOL_SOCKET;
            (*message).cmsg_type = libc::SCM_RIGHTS;
            (*message).cmsg_len = libc::CMSG_LEN(size_of::<i32>() as u32) as usize;
            libc::CMSG_DATA(message).cast::<i32>().write_unaligned(file.as_raw_fd());
        }
    }
    // SAFETY: the header describes memory that is alive.
    let count = unsafe {
        libc::sendmsg(socket, &raw const header, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
    };
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}
