//! What a client of a file is told whose FUSE server is gone.

/// Whether an error number says that the server has ended: it was stopped, or has panicked.
pub fn tells_end(error: i32) -> bool {
    matches!(error, libc::ENOTCONN | libc::ECONNABORTED)
}

/// Whether an error number may come of nothing but a kill of the server. The request was carried out, or was not, or
/// in part.
///
/// `EIO` is among them because it may be the kernel's: `fuse_dev_do_read` and `fuse_dev_do_write` (fs/fuse/dev.c) end
/// a request with it if they cannot copy it to the server's memory, or the answer from there, as when SIGKILL comes in
/// the middle. A server that lives, or ends by itself, has its memory for as long as it has requests: from it, `EIO`
/// is a failure. So it is from servers of NBD and vhost-user, for whom no kernel answers.
pub fn tells_kill(error: i32) -> bool {
    tells_end(error) || matches!(error, libc::EINTR | libc::EIO)
}
