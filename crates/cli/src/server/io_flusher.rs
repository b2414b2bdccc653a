//! Servers of the kernel's own devices.

/// `PR_SET_IO_FLUSHER` of `linux/prctl.h`.
const SET_IO_FLUSHER: i32 = 57;

/// Lets this thread, and those that it starts, finish what the kernel's reclaim of memory may wait for: pages that were
/// written to the device are freed only once this process has written them to the image.
pub(crate) fn become_one() {
    // SAFETY: the call changes only how memory is allocated for this thread.
    if unsafe { libc::prctl(SET_IO_FLUSHER, 1, 0, 0, 0) } < 0 {
        let error = std::io::Error::last_os_error();
        tracing::debug!(%error, "cannot become an I/O flusher");
    }
}
