//! What a keeper waits for: its server's orders and end, and the time until which a device waits for a server.

use std::io;
use std::mem::zeroed;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::parent_id;
use std::ptr;
use std::time::Duration;

/// A moment: how long after the machine was started it is, whether the machine slept meanwhile or not.
pub(super) type SinceBoot = Duration;

/// The present moment.
pub(super) fn now() -> SinceBoot {
    // SAFETY: zeroes are a valid time.
    let mut time: libc::timespec = unsafe { zeroed() };
    // SAFETY: the call writes one time. It cannot fail: this clock exists since Linux 2.6.39.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut time) };
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

fn descriptor(result: libc::c_long) -> io::Result<OwnedFd> {
    match i32::try_from(result) {
        // SAFETY: the call has returned a new descriptor.
        Ok(descriptor) if descriptor >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(descriptor) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether a descriptor can be read, or its other end is closed, within this time.
fn is_readable(what: BorrowedFd<'_>, patience: Duration) -> bool {
    let mut poll = libc::pollfd { fd: what.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: the call reads and writes one valid `pollfd`. Signals are ignored or end the process.
    unsafe { libc::poll(&raw mut poll, 1, patience.as_millis() as i32) > 0 }
}

/// Can be read once the server has sent an order or has closed its end, or a time is over.
pub(super) struct Events {
    any: OwnedFd,
    timer: OwnedFd,
}

impl Events {
    /// Those of a server's socket. There is no time yet.
    pub(super) fn new(stream: BorrowedFd<'_>) -> io::Result<Self> {
        // SAFETY: plain system calls.
        let (any, timer) = unsafe {
            (
                libc::epoll_create1(libc::EPOLL_CLOEXEC),
                libc::timerfd_create(libc::CLOCK_BOOTTIME, libc::TFD_CLOEXEC | libc::TFD_NONBLOCK),
            )
        };
        let (any, timer) = (descriptor(any.into())?, descriptor(timer.into())?);
        for source in [stream, timer.as_fd()] {
            let events = (libc::EPOLLIN | libc::EPOLLRDHUP) as u32;
            let mut event = libc::epoll_event { events, u64: 0 };
            let (to, add) = (any.as_raw_fd(), libc::EPOLL_CTL_ADD);
            // SAFETY: the call reads one event.
            if unsafe { libc::epoll_ctl(to, add, source.as_raw_fd(), &raw mut event) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(Self { any, timer })
    }

    /// The time is over at this moment; `None` for never.
    pub(super) fn set(&self, until: Option<SinceBoot>) -> io::Result<()> {
        // Zero is no moment for the kernel.
        let until = until.map_or(Duration::ZERO, |until| until.max(Duration::from_nanos(1)));
        // SAFETY: zeroes are a valid time.
        let mut times: libc::itimerspec = unsafe { zeroed() };
        times.it_value.tv_sec = i64::try_from(until.as_secs()).unwrap_or(i64::MAX);
        times.it_value.tv_nsec = until.subsec_nanos().into();
        let (timer, absolute) = (self.timer.as_raw_fd(), libc::TFD_TIMER_ABSTIME);
        // SAFETY: the call reads one pair of times.
        match unsafe { libc::timerfd_settime(timer, absolute, &raw const times, ptr::null_mut()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Whether the time is over.
    pub(super) fn is_over(&self) -> bool {
        is_readable(self.timer.as_fd(), Duration::ZERO)
    }

    /// Waits so long; returns whether there is something to see to, at once if there is.
    pub(super) fn wait(&self, patience: Duration) -> bool {
        is_readable(self.any.as_fd(), patience)
    }

    /// Waits until there is.
    pub(super) fn next(&self) {
        while !self.wait(Duration::from_hours(1)) {}
    }
}

impl AsFd for Events {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.any.as_fd()
    }
}

/// The process that has started this one: the server.
pub(super) struct Server {
    pub(super) number: u32,
    /// `None` if it has ended before this was made.
    process: Option<OwnedFd>,
}

impl Server {
    /// # Errors
    /// The kernel cannot tell when it ends.
    pub(super) fn parent(number: u32) -> io::Result<Self> {
        // SAFETY: a plain system call.
        let opened = descriptor(unsafe { libc::syscall(libc::SYS_pidfd_open, number, 0) });
        // Only while it is the parent it is the process of this number.
        let process = if parent_id() == number { Some(opened?) } else { None };
        Ok(Self { number, process })
    }

    /// Waits so long; returns whether it has ended, at once if it has.
    pub(super) fn has_ended(&self, patience: Duration) -> bool {
        self.process.as_ref().is_none_or(|process| is_readable(process.as_fd(), patience))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    const LONG: Duration = Duration::from_mins(10);

    #[test]
    fn orders_ends_and_times_are_noticed() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let events = Events::new(ours.as_fd()).unwrap();
        assert!(!events.wait(Duration::ZERO) && !events.is_over());
        events.set(Some(now() + LONG)).unwrap();
        assert!(!events.wait(Duration::ZERO));
        for past in [Duration::ZERO, now()] {
            events.set(Some(past)).unwrap();
            events.next();
            assert!(events.is_over());
        }
        events.set(None).unwrap();
        assert!(!events.wait(Duration::ZERO) && !events.is_over());
        theirs.write_all(b"x").unwrap();
        assert!(events.wait(LONG) && !events.is_over());
        std::io::Read::read_exact(&mut &ours, &mut [0]).unwrap();
        assert!(!events.wait(Duration::ZERO));
        drop(theirs);
        assert!(events.wait(LONG) && !events.is_over());
    }

    #[test]
    fn a_parent_lives_and_another_process_has_ended_for_its_child() {
        assert!(!Server::parent(parent_id()).unwrap().has_ended(Duration::ZERO));
        assert!(Server::parent(u32::MAX >> 1).unwrap().has_ended(LONG));
    }
}
