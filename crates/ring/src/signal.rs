//! Awaiting signals.

use crate::runtime::ops;
use crate::runtime::required;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

/// The pipe to which the handler writes signal numbers; -1 while no [`Signals`] exists.
static PIPE: AtomicI32 = AtomicI32::new(-1);

extern "C" fn handler(signal: libc::c_int) {
    let number = signal as u8;
    // SAFETY: `errno` is thread-local; `write` is async-signal-safe, and `number` is on the stack. The pipe is
    // non-blocking: when it is full, enough signals are pending.
    unsafe {
        let errno = libc::__errno_location();
        let saved = *errno;
        libc::write(PIPE.load(Ordering::Relaxed), (&raw const number).cast(), 1);
        *errno = saved;
    }
}

/// Receives this process's signals in place of their default actions, until dropped.
///
/// Only one may exist in a process at a time.
pub struct Signals {
    pipe: Arc<OwnedFd>,
    old: Vec<(i32, libc::sigaction)>,
}

impl Signals {
    /// Takes over `signals`, for example `[libc::SIGTERM, libc::SIGINT]`.
    ///
    /// # Errors
    /// `EBUSY` while another `Signals` exists; `EINVAL` for a signal that cannot be caught.
    pub fn new(signals: &[i32]) -> io::Result<Self> {
        let mut ends = [-1; 2];
        // SAFETY: `ends` has room for two descriptors.
        check(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK) })?;
        // SAFETY: both descriptors were just created.
        let [read, write] = ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) });
        let free = PIPE.compare_exchange(-1, write.as_raw_fd(), Ordering::SeqCst, Ordering::SeqCst);
        if free.is_err() {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        // The write end stays open for as long as PIPE names it; `drop` closes it.
        let _ = write.into_raw_fd();
        let mut taken = Self { pipe: Arc::new(read), old: Vec::new() };
        for signal in signals {
            taken.old.push((*signal, catch(*signal)?));
        }
        Ok(taken)
    }

    /// Waits for the next signal and returns its number. Dropping the future loses no signal.
    ///
    /// # Errors
    /// The ring is out of resources.
    ///
    /// # Panics
    /// Outside [`Executor::block_on`](crate::Executor::block_on).
    pub async fn recv(&mut self) -> io::Result<i32> {
        loop {
            let mut number = 0_u8;
            // SAFETY: one byte is read into a live value.
            let count = unsafe { libc::read(self.pipe.as_raw_fd(), (&raw mut number).cast(), 1) };
            if count == 1 {
                return Ok(i32::from(number));
            }
            ops::poll(&required(), &self.pipe, libc::POLLIN as u32).await?;
        }
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for (signal, action) in &self.old {
            // SAFETY: the action was in force before.
            unsafe { libc::sigaction(*signal, action, ptr::null_mut()) };
        }
        let pipe = PIPE.swap(-1, Ordering::SeqCst);
        // SAFETY: `new` left PIPE as this descriptor's only owner.
        drop(unsafe { OwnedFd::from_raw_fd(pipe) });
    }
}

fn catch(signal: i32) -> io::Result<libc::sigaction> {
    let mut old = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: a zeroed action is valid; the handler is async-signal-safe.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_RESTART;
        libc::sigemptyset(&raw mut action.sa_mask);
        check(libc::sigaction(signal, &raw const action, old.as_mut_ptr()))?;
        Ok(old.assume_init())
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
