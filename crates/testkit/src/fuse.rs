//! The errors that users of a file get when its FUSE server is gone.

/// Whether an error number means that the server has ended: it was stopped, or it panicked.
pub fn tells_end(error: i32) -> bool {
    matches!(error, libc::ENOTCONN | libc::ECONNABORTED)
}

/// Whether an error number may be solely due to a kill of the server. The request was then executed in full, in part,
/// or not at all.
///
/// `EIO` is included because it may come from the kernel: `fuse_dev_do_read` and `fuse_dev_do_write` (fs/fuse/dev.c)
/// end a request with it if they cannot copy the request to the server's memory, or the reply from there, as when
/// SIGKILL arrives in the middle. A server that is running, or ends by itself, keeps its memory for as long as it has
/// requests: from such a server, `EIO` is a failure. The same holds for NBD and vhost-user servers, for which no kernel
/// replies.
pub fn tells_kill(error: i32) -> bool {
    tells_end(error) || matches!(error, libc::EINTR | libc::EIO)
}
