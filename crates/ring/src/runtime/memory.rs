//! The memory that operations in flight own, and the objects that they keep alive.

use isobath_buf::IoBuf;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The maximum number of buffers in one vectored operation (`IOV_MAX`).
const MAX_VECTORS: usize = 1024;

/// The maximum number of bytes requested in one operation.
pub(crate) const MAX_BYTES: usize = 1 << 30;

/// The buffers of a vectored operation, with their description for the kernel.
pub struct Vectored {
    bufs: Vec<IoBuf>,
    iovecs: Vec<libc::iovec>,
    header: libc::msghdr,
}

impl Vectored {
    /// Buffers that are not yet described.
    #[allow(clippy::unnecessary_box_returns)] // its address must not change
    pub fn boxed(bufs: Vec<IoBuf>) -> Box<Self> {
        // SAFETY: a message header of zeroes is valid and empty.
        let header = unsafe { std::mem::zeroed() };
        Box::new(Self { bufs, iovecs: Vec::new(), header })
    }

    /// Describes the bytes from `skip` on, as many as one operation can transfer; returns their number.
    pub fn describe(&mut self, mut skip: usize) -> usize {
        self.iovecs.clear();
        let mut total = 0;
        for buf in &self.bufs {
            if skip >= buf.len() {
                skip -= buf.len();
                continue;
            }
            if self.iovecs.len() == MAX_VECTORS || total >= MAX_BYTES {
                break;
            }
            let part = &buf[skip..];
            let part = &part[..part.len().min(MAX_BYTES - total)];
            self.iovecs.push(libc::iovec {
                iov_base: part.as_ptr().cast_mut().cast(),
                iov_len: part.len(),
            });
            total += part.len();
            skip = 0;
        }
        self.header.msg_iov = self.iovecs.as_mut_ptr();
        self.header.msg_iovlen = self.iovecs.len();
        total
    }

    /// Replaces the buffers, reusing the memory of an empty description.
    pub(super) fn refill(&mut self, bufs: Vec<IoBuf>) {
        self.bufs = bufs;
    }

    /// Takes the buffers, and clears the description, which points to them.
    pub(super) fn empty(&mut self) -> Vec<IoBuf> {
        self.iovecs.clear();
        std::mem::take(&mut self.bufs)
    }

    /// Returns the buffers.
    pub fn into_bufs(self) -> Vec<IoBuf> {
        self.bufs
    }

    /// The latest description, as a message.
    pub(crate) const fn header(&self) -> *const libc::msghdr {
        &raw const self.header
    }

    /// The latest description.
    pub fn iovecs(&self) -> &[libc::iovec] {
        &self.iovecs
    }
}

/// An object that an operation in flight keeps alive besides its memory: its file, or a guard that holds the file.
pub type Lease = Arc<dyn Leased>;

/// An object that operations keep alive. It is notified of operations whose futures are dropped early.
pub trait Leased: Send + Sync {
    /// The future of an operation in flight was dropped.
    fn orphaned(&self) {}

    /// Such an operation has ended.
    fn landed(&self) {}
}

impl Leased for OwnedFd {}

impl Leased for () {}

/// The memory that an operation in flight owns.
pub(crate) enum Keep {
    Nothing,
    Buf(IoBuf),
    Vectored(Box<Vectored>),
    /// An address, which only the kernel reads.
    Address(#[expect(dead_code)] Box<socket2::SockAddr>),
}
