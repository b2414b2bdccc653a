//! Complete transfers: through this thread's ring, or by system calls if there is none.

use super::at_once::AtOnce;
use super::landing::Landing;
use super::sys;
use isobath_ring::{Local, ops};
use isobath_storage::IoBuf;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

/// A file to operate on, and what operations in flight keep alive: the file, its locks, and the range that they hold.
#[derive(Clone)]
pub(super) struct Target {
    pub(super) file: Arc<OwnedFd>,
    pub(super) lease: isobath_ring::Lease,
    /// Operations on it whose futures were dropped.
    pub(super) landing: Arc<Landing>,
}

impl Target {
    /// The same file, with another lease for operations in flight.
    pub(super) fn leased(&self, lease: isobath_ring::Lease) -> Self {
        Self { file: self.file.clone(), lease, landing: self.landing.clone() }
    }
}

/// The attempts at one operation.
#[derive(Default)]
struct Attempts {
    cancelled: u32,
}

/// How often an operation is tried that ends with `ECANCELED`. A killed process does not come that far.
const MOST_CANCELLED: u32 = 100;

impl Attempts {
    /// Whether an operation that failed must be tried again.
    ///
    /// `ECANCELED` that nobody asked for means that this process was killed: the kernel cancels what its workers had
    /// not begun. A server that answered would tell a guest of an error, after which it gives up its file system,
    /// where the next server would carry the request out. Trying again leaves it without an answer: no further system
    /// call returns.
    fn again(&mut self, local: Option<&Rc<Local>>, error: &io::Error) -> bool {
        self.may_repeat(local.is_some_and(|local| !local.has_ended()), error)
    }

    fn may_repeat(&mut self, runs: bool, error: &io::Error) -> bool {
        match error.raw_os_error() {
            Some(libc::EINTR | libc::EAGAIN) => true,
            Some(libc::ECANCELED) => {
                self.cancelled += 1;
                runs && self.cancelled < MOST_CANCELLED
            }
            _ => false,
        }
    }
}

/// Reads until the buffer is full or the file ends; returns how much of it is then filled. The first `done` bytes
/// already are. A read that does not end at a multiple of `align` has reached the end of the file.
pub(super) async fn read(
    target: &Target,
    offset: u64,
    mut buf: IoBuf,
    mut done: usize,
    align: u64,
) -> (io::Result<usize>, IoBuf) {
    let (local, mut attempts) = (isobath_ring::current(), Attempts::default());
    while done < buf.len() {
        let at = offset + done as u64;
        let result = if let Some(local) = &local {
            let (result, back) = ops::read(local, &target.file, &target.lease, at, buf, done).await;
            buf = back;
            result
        } else {
            sys::pread(&target.file, &mut buf[done..], at)
        };
        match result {
            Ok(0) => break,
            Ok(count) => {
                done += count;
                if !(done as u64).is_multiple_of(align) {
                    break;
                }
            }
            Err(error) if attempts.again(local.as_ref(), &error) => {}
            Err(error) => return (Err(error), buf),
        }
    }
    (Ok(done), buf)
}

/// Writes the whole buffer; `at_once` as far as it can.
pub(super) async fn write(
    target: &Target,
    offset: u64,
    mut buf: IoBuf,
    at_once: Option<&AtOnce>,
) -> (io::Result<()>, IoBuf) {
    let (local, mut attempts) = (isobath_ring::current(), Attempts::default());
    let mut done = at_once.map_or(0, |at_once| at_once.write(&target.file, &buf, offset));
    while done < buf.len() {
        let at = offset + done as u64;
        let result = if let Some(local) = &local {
            let (result, back) =
                ops::write(local, &target.file, &target.lease, at, buf, done).await;
            buf = back;
            result
        } else {
            sys::pwrite(&target.file, &buf[done..], at)
        };
        match result {
            Ok(0) => return (Err(io::ErrorKind::WriteZero.into()), buf),
            Ok(count) => done += count,
            Err(error) if attempts.again(local.as_ref(), &error) => {}
            Err(error) => return (Err(error), buf),
        }
    }
    (Ok(()), buf)
}

/// Writes all buffers, one after another; `at_once` as far as it can.
pub(super) async fn write_vectored(
    target: &Target,
    offset: u64,
    bufs: Vec<IoBuf>,
    at_once: Option<&AtOnce>,
) -> (io::Result<()>, Vec<IoBuf>) {
    let (local, mut attempts) = (isobath_ring::current(), Attempts::default());
    let mut vectored = match &local {
        Some(local) => local.vectored(bufs),
        None => isobath_ring::Vectored::boxed(bufs),
    };
    let mut done = 0;
    if let Some(at_once) = at_once {
        vectored.describe(0);
        // SAFETY: the vectors describe the buffers, which stay there.
        done = unsafe { at_once.write_vectored(&target.file, vectored.iovecs(), offset) };
    }
    let result = loop {
        if vectored.describe(done) == 0 {
            break Ok(());
        }
        let at = offset + done as u64;
        let result = if let Some(local) = &local {
            let (result, back) =
                ops::writev(local, &target.file, &target.lease, at, vectored).await;
            vectored = back;
            result
        } else {
            // SAFETY: the vectors describe the buffers, which stay there.
            unsafe { sys::pwritev(&target.file, vectored.iovecs(), at) }
        };
        match result {
            Ok(0) => break Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => done += count,
            Err(error) if attempts.again(local.as_ref(), &error) => {}
            Err(error) => break Err(error),
        }
    };
    let bufs = match &local {
        Some(local) => local.reuse(vectored),
        None => vectored.into_bufs(),
    };
    (result, bufs)
}

/// `fallocate(2)`.
pub(super) async fn fallocate(
    target: &Target,
    mode: i32,
    offset: u64,
    length: u64,
) -> io::Result<()> {
    let (local, mut attempts) = (isobath_ring::current(), Attempts::default());
    loop {
        let result = match &local {
            Some(local) => {
                ops::fallocate(local, &target.file, &target.lease, mode, offset, length).await
            }
            None => sys::fallocate(&target.file, mode, offset, length),
        };
        match result {
            Err(error) if attempts.again(local.as_ref(), &error) => {}
            result => return result,
        }
    }
}

/// `fdatasync(2)`.
pub(super) async fn fdatasync(file: &Arc<OwnedFd>) -> io::Result<()> {
    let (local, mut attempts) = (isobath_ring::current(), Attempts::default());
    loop {
        let result = match &local {
            Some(local) => ops::fdatasync(local, file).await,
            None => sys::fdatasync(file),
        };
        match result {
            Err(error) if attempts.again(local.as_ref(), &error) => {}
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_always_cancelled_fails_in_the_end() {
        let error = io::Error::from_raw_os_error;
        let mut attempts = Attempts::default();
        assert!(attempts.may_repeat(false, &error(libc::EINTR)));
        assert!(!attempts.may_repeat(true, &error(libc::EIO)));
        assert!(!attempts.may_repeat(false, &error(libc::ECANCELED)), "the runtime has ended");
        let tries = (0..1000).take_while(|_| attempts.may_repeat(true, &error(libc::ECANCELED)));
        assert!((50..200).contains(&tries.count()));
    }
}
