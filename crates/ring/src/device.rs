//! Character devices that deliver messages, such as `/dev/fuse`.

use crate::runtime::ops;
use crate::runtime::{Op, required};
use std::fmt;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

/// A device on which each read or write transfers one whole message.
///
/// Reads and writes are plain system calls that must not block, so the device must be in non-blocking mode. The call
/// itself copies the message, so the ring would save nothing. Only the wait for the next message uses the ring.
#[derive(Debug)]
pub struct Device {
    file: Arc<OwnedFd>,
}

/// A wait for a message; see [`Device::listen`].
pub struct Listening {
    file: Arc<OwnedFd>,
    poll: Op,
}

fn start(file: &Arc<OwnedFd>) -> Op {
    const EVENTS: u32 = (libc::EPOLLIN | libc::EPOLLEXCLUSIVE) as u32;
    ops::start_poll(&required(), file, EVENTS)
}

impl Future for Listening {
    /// An error if the device cannot be polled.
    type Output = io::Result<()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            match ready!(Pin::new(&mut self.poll).poll(cx)).0 {
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {
                    self.poll = start(&self.file);
                }
                result => return Poll::Ready(result.map(drop)),
            }
        }
    }
}

impl fmt::Debug for Listening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listening").field("file", &self.file).finish_non_exhaustive()
    }
}

impl From<OwnedFd> for Device {
    /// Takes over a descriptor in non-blocking mode (`O_NONBLOCK`).
    fn from(file: OwnedFd) -> Self {
        Self { file: Arc::new(file) }
    }
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Device {
    /// Begins to wait until there is something to read, or the device has failed. If several wait for one source of
    /// messages, on any threads and descriptors, each message wakes one of them, which must then read until there is no
    /// more (`WouldBlock`), or wait anew: until its executor's thread has noticed the wake-up, it may take those of
    /// further messages as well. Whoever is woken and does not read, or drops the wait, leaves messages to nobody.
    ///
    /// # Panics
    /// Outside [`Executor::block_on`](crate::Executor::block_on), here and when it is polled.
    pub fn listen(&self) -> Listening {
        Listening { file: self.file.clone(), poll: start(&self.file) }
    }

    /// Whether there is something to read now, or the device has failed.
    pub fn is_readable(&self) -> bool {
        let mut poll = libc::pollfd { fd: self.file.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: the call reads and writes one valid `pollfd`. An error is for the read to report.
        unsafe { libc::poll(&raw mut poll, 1, 0) != 0 }
    }

    /// Reads one message into `buf`, and returns its length.
    ///
    /// # Errors
    /// `WouldBlock` if there is none; other errors from the device.
    pub fn read(&self, buf: &mut [u8]) -> io::Result<usize> {
        // SAFETY: the descriptor is open, and the buffer has room for its length.
        let count =
            unsafe { libc::read(self.file.as_raw_fd(), buf.as_mut_ptr().cast(), buf.len()) };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }

    /// Writes one message from at most 1024 parts, and returns the number of bytes taken.
    ///
    /// # Errors
    /// Errors from the device.
    pub fn write(&self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let (first, count) = (parts.as_ptr().cast(), parts.len() as i32);
        // SAFETY: the descriptor is open; an `IoSlice` has the layout of an iovec, and its bytes are valid.
        let count = unsafe { libc::writev(self.file.as_raw_fd(), first, count) };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, Executor, spawn, yield_now};
    use std::cell::Cell;
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::rc::Rc;

    #[test]
    fn a_message_wakes_one_of_those_that_wait() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let device = Rc::new(Device::from(OwnedFd::from(theirs)));
        Executor::new(&Config::default()).unwrap().block_on(async {
            assert_eq!(device.read(&mut [0; 4]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
            let read = Rc::new(Cell::new(0));
            let waiting: Vec<_> = (0..3)
                .map(|_| {
                    let (device, read) = (device.clone(), read.clone());
                    spawn(async move {
                        device.listen().await.unwrap();
                        read.set(read.get() + device.read(&mut [0; 1]).unwrap());
                    })
                })
                .collect();
            yield_now().await;
            for round in 1..=3 {
                ours.write_all(b"x").unwrap();
                while waiting.iter().filter(|task| task.is_finished()).count() < round {
                    yield_now().await;
                }
                assert_eq!(read.get(), round, "somebody was woken in vain");
            }
            assert!(!device.is_readable());
            ours.write_all(b"x").unwrap();
            assert!(device.is_readable());
            assert_eq!(device.write(&[IoSlice::new(b"on"), IoSlice::new(b"ce")]).unwrap(), 4);
        });
    }
}
