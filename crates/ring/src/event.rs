//! Eventfds on the ring.

use crate::runtime::required;
use crate::runtime::{Keep, Op, ops};
use isobath_buf::IoBuf;
use std::fmt;
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

/// The size of an eventfd's count, in bytes.
const COUNT: usize = 8;

/// An eventfd that one task waits on repeatedly.
///
/// A wait costs one operation and, after the first, no allocation. All waits must be on one thread.
pub struct Event {
    file: Arc<OwnedFd>,
    state: Wait,
}

enum Wait {
    Idle(IoBuf),
    /// Reads the count.
    Reading(Op),
    /// The file is non-blocking, so its readiness is awaited first.
    Waiting(Op, IoBuf),
    /// An operation lost its buffer, which never happens on a ring.
    Lost,
}

impl From<OwnedFd> for Event {
    fn from(file: OwnedFd) -> Self {
        Self { file: Arc::new(file), state: Wait::Idle(IoBuf::zeroed(COUNT)) }
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Event {
    /// Reads the count once it is not 0. The wait continues between calls, until there is a count or the `Event` is
    /// dropped.
    ///
    /// # Errors
    /// The file cannot be read; `InvalidData` if it returns anything but a count, which no eventfd does.
    ///
    /// # Panics
    /// Outside [`Executor::block_on`](crate::Executor::block_on).
    pub fn poll_take(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<u64>> {
        loop {
            match &mut self.state {
                Wait::Idle(_) => {
                    let Wait::Idle(buf) = std::mem::replace(&mut self.state, Wait::Lost) else {
                        continue;
                    };
                    self.state = Wait::Reading(ops::read_count(&required(), &self.file, buf));
                }
                Wait::Reading(op) => {
                    let (result, keep) = ready!(Pin::new(op).poll(cx));
                    let Keep::Buf(buf) = keep else {
                        self.state = Wait::Lost;
                        continue;
                    };
                    let count = buf.first_chunk::<COUNT>().map(|count| u64::from_ne_bytes(*count));
                    let error = match result {
                        Ok(length) if length as usize == COUNT => {
                            self.state = Wait::Idle(buf);
                            return Poll::Ready(Ok(count.unwrap_or(0)));
                        }
                        Ok(_) => io::ErrorKind::InvalidData.into(),
                        Err(error) => error,
                    };
                    if error.kind() == io::ErrorKind::WouldBlock {
                        let wait = ops::start_poll(&required(), &self.file, libc::POLLIN as u32);
                        self.state = Wait::Waiting(wait, buf);
                        continue;
                    }
                    self.state = Wait::Idle(buf);
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Poll::Ready(Err(error));
                    }
                }
                Wait::Waiting(op, _) => {
                    let (result, _) = ready!(Pin::new(op).poll(cx));
                    let Wait::Waiting(_, buf) = std::mem::replace(&mut self.state, Wait::Lost)
                    else {
                        continue;
                    };
                    self.state = Wait::Idle(buf);
                    match result {
                        Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                            return Poll::Ready(Err(error));
                        }
                        _ => {}
                    }
                }
                Wait::Lost => return Poll::Ready(Err(io::ErrorKind::InvalidData.into())),
            }
        }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event").field("file", &self.file).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, Executor, spawn, yield_now};
    use std::fs::File;
    use std::future::poll_fn;
    use std::io::Write;
    use std::os::fd::FromRawFd;

    fn eventfd(flags: i32) -> (File, Event) {
        // SAFETY: a plain system call.
        let fd = unsafe { libc::eventfd(0, flags) };
        assert!(fd >= 0);
        // SAFETY: just created, with no other owner.
        let file = unsafe { OwnedFd::from_raw_fd(fd) };
        (File::from(file.try_clone().unwrap()), Event::from(file))
    }

    #[test]
    fn counts_arrive_whatever_the_mode() {
        for flags in [0, libc::EFD_NONBLOCK, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC] {
            Executor::new(&Config::default()).unwrap().block_on(async {
                let (mut writer, mut event) = eventfd(flags);
                for round in 1..20_u64 {
                    let wait = spawn(async move {
                        let count = poll_fn(|cx| event.poll_take(cx)).await.unwrap();
                        (count, event)
                    });
                    if round % 2 == 0 {
                        yield_now().await;
                    }
                    writer.write_all(&round.to_ne_bytes()).unwrap();
                    let (count, back) = wait.await.unwrap();
                    assert_eq!(count, round);
                    event = back;
                }
            });
        }
    }

    #[test]
    fn a_wait_that_nobody_ends_keeps_nobody() {
        let (writer, mut event) = eventfd(0);
        Executor::new(&Config::default()).unwrap().block_on(async {
            let first = poll_fn(|cx| Poll::Ready(event.poll_take(cx).is_pending()));
            assert!(first.await);
            yield_now().await;
            drop(event);
        });
        drop(writer);
    }

    #[test]
    fn what_is_no_eventfd_is_told() {
        Executor::new(&Config::default()).unwrap().block_on(async {
            let null = File::open("/dev/null").unwrap();
            let mut event = Event::from(OwnedFd::from(null));
            let error = poll_fn(|cx| event.poll_take(cx)).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        });
    }
}
