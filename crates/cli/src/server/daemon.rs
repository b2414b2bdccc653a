//! Going into the background once clients can connect.

use crate::failure::Failure;
use crate::messages;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process;

/// The child's side: the parent waits until the child reports that it is ready.
#[derive(Debug)]
pub(crate) struct Daemon {
    parent: File,
}

impl Daemon {
    /// Forks. The parent waits here and never returns: it exits with 0 when the child is [`ready`](Self::ready), and
    /// with the child's exit code if the child ends first.
    ///
    /// Call it while there is only one thread.
    ///
    /// # Errors
    /// Those of `pipe2(2)` and `fork(2)`.
    pub(crate) fn start() -> io::Result<Self> {
        let mut ends = [-1; 2];
        // SAFETY: `ends` has room for two descriptors.
        if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) } < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: both descriptors were just created.
        let [read, write] = ends.map(|end| File::from(unsafe { OwnedFd::from_raw_fd(end) }));
        // SAFETY: there is no other thread, so the child may continue like any process.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            0 => {
                // SAFETY: no memory is involved. A new child leads no group, so it cannot fail.
                unsafe { libc::setsid() };
                Ok(Self { parent: write })
            }
            child => {
                drop(write);
                process::exit(wait_for(child, read))
            }
        }
    }

    /// Lets the parent exit with 0 and detaches from the terminal: standard input and output become `/dev/null`, and so
    /// does standard error, unless it has become a log.
    ///
    /// # Errors
    /// `/dev/null` cannot be opened.
    fn ready(mut self, logs: bool) -> io::Result<()> {
        let null = OpenOptions::new().read(true).write(true).open("/dev/null")?;
        for number in 0..if logs { 2 } else { 3 } {
            // SAFETY: both descriptors are open; the previous standard descriptor is closed.
            if unsafe { libc::dup2(null.as_raw_fd(), number) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        // The parent may have been killed meanwhile.
        let _ = self.parent.write_all(&[0]);
        Ok(())
    }
}

/// What is to happen once clients can connect.
#[derive(Debug)]
pub(crate) struct WhenReady {
    /// Goes into the background.
    pub(crate) daemon: Option<Daemon>,
    /// Gets the messages from then on.
    pub(crate) log: Option<File>,
}

impl WhenReady {
    /// Does it.
    ///
    /// # Errors
    /// Standard error, or the others, cannot be replaced.
    pub(crate) fn ready(self) -> Result<(), Failure> {
        if let Some(log) = &self.log {
            messages::log_to(log).map_err(|error| Failure::new(error).context("the log"))?;
        }
        if let Some(daemon) = self.daemon {
            let ready = daemon.ready(self.log.is_some());
            ready.map_err(|error| Failure::new(error).context("/dev/null"))?;
        }
        Ok(())
    }
}

/// The exit code for the parent.
fn wait_for(child: libc::pid_t, mut ready: File) -> i32 {
    if ready.read_exact(&mut [0]).is_ok() {
        return 0;
    }
    let mut status = 0;
    // SAFETY: `status` is a live value.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    if waited == child && libc::WIFEXITED(status) { libc::WEXITSTATUS(status).max(1) } else { 1 }
}
