//! The limit on open files.

/// The most files that can be open at once, if the limit is [raised](raise_limit).
pub(crate) fn limit() -> u64 {
    raise_limit();
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: there is room for the answer.
    match unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } {
        0 => limit.rlim_cur,
        _ => 1024,
    }
}

/// Raises it as far as permitted: a chain needs a descriptor for each layer.
pub(crate) fn raise_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a live value; the calls access no other memory.
    let raised = unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) == 0 && {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) == 0
        }
    };
    if !raised {
        tracing::debug!("cannot raise the limit on open files");
    }
}
