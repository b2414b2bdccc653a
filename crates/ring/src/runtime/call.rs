//! What an operation asks of the kernel, whoever asks.

use std::os::fd::RawFd;

/// One operation, equivalent to one system call. Whoever starts it keeps what it points to until it ends.
#[derive(Clone, Copy)]
pub(super) enum Call {
    /// Does nothing.
    #[cfg(test)]
    Nothing,
    /// `pread`.
    Read { file: RawFd, buf: *mut u8, length: u32, offset: u64 },
    /// `pwrite`.
    Write { file: RawFd, buf: *const u8, length: u32, offset: u64 },
    /// `pwritev`.
    Writev { file: RawFd, iovecs: *const libc::iovec, count: u32, offset: u64 },
    /// `fdatasync`.
    Datasync { file: RawFd },
    /// `fallocate`.
    Fallocate { file: RawFd, mode: i32, offset: u64, length: u64 },
    /// `connect`.
    Connect { socket: RawFd, address: *const libc::sockaddr, length: u32 },
    /// `recv`, of one byte at least.
    Recv { socket: RawFd, buf: *mut u8, length: u32 },
    /// `send`. No signal tells that the peer is gone.
    Send { socket: RawFd, buf: *const u8, length: u32 },
    /// `sendmsg`, in other respects like `Send`.
    SendMsg { socket: RawFd, message: *const libc::msghdr },
    /// Waits until any of `events` is ready, an error or the peer's end, and gives those that are.
    Poll { file: RawFd, events: u32 },
    /// Reads the count of an eventfd, once it is not 0, into eight bytes.
    Count { file: RawFd, buf: *mut u8 },
}

// SAFETY: the memory belongs to the operation until it ends, on whichever thread the call is made.
unsafe impl Send for Call {}

/// How long to wait for the end of an operation.
#[derive(Clone, Copy)]
pub(super) enum Wait {
    No,
    Forever,
    For(std::time::Duration),
}
