//! The system calls of operations.

use super::super::call::Call;
use std::io;
use std::os::fd::RawFd;

/// A file whose readiness for any of some events (`EPOLLIN` and so on) an operation may have to wait for.
#[derive(Clone, Copy)]
pub(super) struct Awaited {
    pub(super) file: RawFd,
    pub(super) events: u32,
}

const READABLE: u32 = libc::EPOLLIN as u32;
const WRITABLE: u32 = libc::EPOLLOUT as u32;

/// What an operation waits for that can wait forever; `None` for those that end soon.
pub(super) fn awaited(call: &Call) -> Option<Awaited> {
    let (file, events) = match *call {
        Call::Recv { socket, .. } => (socket, READABLE),
        Call::Count { file, .. } => (file, READABLE),
        Call::Connect { socket, .. } | Call::Send { socket, .. } | Call::SendMsg { socket, .. } => {
            (socket, WRITABLE)
        }
        Call::Poll { file, events } => (file, events),
        _ => return None,
    };
    Some(Awaited { file, events })
}

/// The result of a call that waits for nothing else, from a thread that may wait.
///
/// # Safety
/// What the call points to must be valid, and not be accessed otherwise.
pub(super) unsafe fn carry_out(call: &Call) -> i32 {
    // SAFETY: passed on to the caller.
    unsafe {
        match *call {
            Call::Read { file, buf, length, offset } => {
                transferred(libc::pread(file, buf.cast(), length as usize, offset as i64))
            }
            Call::Write { file, buf, length, offset } => {
                transferred(libc::pwrite(file, buf.cast(), length as usize, offset as i64))
            }
            Call::Writev { file, iovecs, count, offset } => {
                transferred(libc::pwritev(file, iovecs, count as i32, offset as i64))
            }
            Call::Datasync { file } => done(libc::fdatasync(file)),
            Call::Fallocate { file, mode, offset, length } => {
                done(libc::fallocate(file, mode, offset as i64, length as i64))
            }
            #[cfg(test)]
            Call::Nothing => 0,
            Call::Connect { .. }
            | Call::Recv { .. }
            | Call::Send { .. }
            | Call::SendMsg { .. }
            | Call::Poll { .. }
            | Call::Count { .. } => unreachable!("it is carried out when its file is ready"),
        }
    }
}

/// The result of an operation, if it need not wait.
///
/// # Safety
/// As for [`carry_out`].
pub(super) unsafe fn begin(call: &Call) -> Option<i32> {
    // SAFETY: passed on to the caller.
    unsafe {
        match *call {
            Call::Connect { socket, address, length } => connect(socket, address, length),
            // epoll tells at once whether it is ready.
            Call::Poll { .. } => None,
            _ => attempt(call),
        }
    }
}

/// The result of an operation whose file is ready for `ready`; `None` if it must wait after all.
///
/// # Safety
/// As for [`carry_out`].
pub(super) unsafe fn go_on(call: &Call, ready: u32) -> Option<i32> {
    match *call {
        Call::Poll { .. } => Some(ready as i32),
        Call::Connect { socket, .. } => Some(outcome(socket)),
        // SAFETY: passed on to the caller.
        _ => unsafe { attempt(call) },
    }
}

/// Makes a call in a way that never waits, whatever the file's mode, which other programs may change.
unsafe fn attempt(call: &Call) -> Option<i32> {
    const FLAGS: i32 = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: passed on to the caller.
    let result = unsafe {
        match *call {
            Call::Recv { socket, buf, length } => {
                transferred(libc::recv(socket, buf.cast(), length as usize, FLAGS))
            }
            Call::Send { socket, buf, length } => {
                transferred(libc::send(socket, buf.cast(), length as usize, FLAGS))
            }
            Call::SendMsg { socket, message } => transferred(libc::sendmsg(socket, message, FLAGS)),
            Call::Count { file, buf } => {
                let vector = libc::iovec { iov_base: buf.cast(), iov_len: 8 };
                // -1: an eventfd has no offset.
                transferred(libc::preadv2(file, &raw const vector, 1, -1, libc::RWF_NOWAIT))
            }
            _ => unreachable!("it is carried out by a thread, or needs more than a call"),
        }
    };
    (result != -libc::EAGAIN).then_some(result)
}

/// Begins to connect a socket. Its mode is as before afterwards; nobody else has it yet.
unsafe fn connect(socket: RawFd, address: *const libc::sockaddr, length: u32) -> Option<i32> {
    // SAFETY: the descriptor is open, and the caller's address is valid.
    let result = unsafe {
        let mode = libc::fcntl(socket, libc::F_GETFL);
        if mode < 0 || libc::fcntl(socket, libc::F_SETFL, mode | libc::O_NONBLOCK) < 0 {
            return Some(done(-1));
        }
        let result = done(libc::connect(socket, address, length));
        if libc::fcntl(socket, libc::F_SETFL, mode) < 0 {
            return Some(done(-1));
        }
        result
    };
    (result != -libc::EINPROGRESS).then_some(result)
}

/// How an attempt to connect has ended.
fn outcome(socket: RawFd) -> i32 {
    let mut error = 0_i32;
    let mut length = size_of::<i32>() as libc::socklen_t;
    // SAFETY: at most `length` bytes are written to a live value.
    let result = unsafe {
        let error = (&raw mut error).cast();
        libc::getsockopt(socket, libc::SOL_SOCKET, libc::SO_ERROR, error, &raw mut length)
    };
    if result < 0 { done(result) } else { -error }
}

fn transferred(count: isize) -> i32 {
    // No operation transfers more than `MAX_BYTES`.
    if count < 0 { failure() } else { count as i32 }
}

fn done(result: libc::c_int) -> i32 {
    if result < 0 { failure() } else { 0 }
}

fn failure() -> i32 {
    -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}
