//! Descriptors for another process, or another part of this one.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::net::UnixStream;

/// Sends bytes over a socket, and descriptors with them (`SCM_RIGHTS`), in one message.
///
/// # Panics
/// If not all of it can be sent at once.
#[track_caller]
pub fn send(socket: &UnixStream, bytes: &[u8], files: &[BorrowedFd<'_>]) {
    let mut vector =
        libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let length = size_of_val(files) as u32;
    // SAFETY: it only computes.
    let room = unsafe { libc::CMSG_SPACE(length) } as usize;
    let mut control = vec![0_u64; room.div_ceil(size_of::<u64>())];
    // SAFETY: a header of zeroes is valid; it describes memory that is alive, with room for what is written.
    let sent = unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        (header.msg_iov, header.msg_iovlen) = (&raw mut vector, 1);
        if !files.is_empty() {
            header.msg_control = control.as_mut_ptr().cast();
            header.msg_controllen = room;
            let message = libc::CMSG_FIRSTHDR(&raw const header);
            (*message).cmsg_level = libc::SOL_SOCKET;
            (*message).cmsg_type = libc::SCM_RIGHTS;
            (*message).cmsg_len = libc::CMSG_LEN(length) as usize;
            let data = libc::CMSG_DATA(message).cast::<[u8; size_of::<RawFd>()]>();
            for (number, file) in files.iter().enumerate() {
                data.add(number).write(file.as_raw_fd().to_ne_bytes());
            }
        }
        libc::sendmsg(socket.as_raw_fd(), &raw const header, libc::MSG_NOSIGNAL)
    };
    assert_eq!(sent, bytes.len() as isize, "{}", io::Error::last_os_error());
}
