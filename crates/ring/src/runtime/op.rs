//! Futures of single operations, and the operations themselves.

use super::call::Call;
use super::driver::{Abandon, Key};
use super::local::Local;
use super::memory::{Keep, Lease, MAX_BYTES, Vectored};
use isobath_buf::IoBuf;
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

/// An operation in flight. If it is dropped before it completes, its resources stay with the driver.
pub(crate) struct Op {
    local: Rc<Local>,
    key: Option<Key>,
}

impl Future for Op {
    type Output = (io::Result<u32>, Keep);

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(key) = self.key else {
            panic!("an operation was polled after completion");
        };
        let Some((result, keep)) = self.local.driver.poll(key, context.waker()) else {
            return Poll::Pending;
        };
        self.key = None;
        let result = u32::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
        Poll::Ready((result, keep))
    }
}

impl Drop for Op {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            self.local.driver.abandon(key);
        }
    }
}

impl Local {
    /// Starts an operation.
    ///
    /// # Safety
    /// As for [`Driver::start`](super::driver::Driver::start).
    unsafe fn op(self: &Rc<Self>, call: Call, keep: Keep, lease: Lease, abandon: Abandon) -> Op {
        // SAFETY: passed on to the caller.
        let key = unsafe { self.driver.start(call, keep, lease, abandon) };
        Op { local: self.clone(), key: Some(key) }
    }

    /// A description for `bufs`, reusing the memory of earlier ones.
    #[allow(clippy::unnecessary_box_returns)] // its address must not change
    pub fn vectored(&self, bufs: Vec<IoBuf>) -> Box<Vectored> {
        match self.spare.borrow_mut().pop() {
            Some(mut vectored) => {
                vectored.refill(bufs);
                vectored
            }
            None => Vectored::boxed(bufs),
        }
    }

    /// Returns the buffers and keeps the description for the next operation.
    pub fn reuse(&self, mut vectored: Box<Vectored>) -> Vec<IoBuf> {
        let bufs = vectored.empty();
        let mut spare = self.spare.borrow_mut();
        if spare.len() < 64 {
            spare.push(vectored);
        }
        bufs
    }
}

pub mod ops {
    //! Operations on this thread's ring, each equivalent to one system call: callers must continue short transfers. An
    //! operation's resources stay with the ring until its completion, even if its future is dropped.

    use super::{
        Abandon, Arc, Call, IoBuf, Keep, Lease, Local, MAX_BYTES, Op, OwnedFd, Rc, Vectored, io,
    };
    use std::os::fd::{AsRawFd, RawFd};

    /// An operation's result, and its buffer.
    pub type Transfer<B = IoBuf> = (io::Result<usize>, B);

    fn fd(file: &Arc<OwnedFd>) -> RawFd {
        file.as_raw_fd()
    }

    fn length(buf: &IoBuf, from: usize) -> u32 {
        (buf.len() - from).min(MAX_BYTES) as u32
    }

    fn buf_back((result, keep): (io::Result<u32>, Keep)) -> Transfer {
        let Keep::Buf(buf) = keep else { unreachable!("the operation was started with a buffer") };
        (result.map(|count| count as usize), buf)
    }

    fn vectored_back((result, keep): (io::Result<u32>, Keep)) -> Transfer<Box<Vectored>> {
        let Keep::Vectored(vectored) = keep else {
            unreachable!("the operation was started with several buffers")
        };
        (result.map(|count| count as usize), vectored)
    }

    /// Reads from a file at `offset` into `buf[from..]`.
    pub async fn read(
        local: &Rc<Local>,
        file: &Arc<OwnedFd>,
        lease: &Lease,
        offset: u64,
        mut buf: IoBuf,
        from: usize,
    ) -> Transfer {
        let length = length(&buf, from);
        let call = Call::Read { file: fd(file), buf: buf[from..].as_mut_ptr(), length, offset };
        // SAFETY: the call points into `buf`, which the operation keeps.
        buf_back(unsafe { local.op(call, Keep::Buf(buf), lease.clone(), Abandon::Finish) }.await)
    }

    /// Writes `buf[from..]` to a file at `offset`.
    pub async fn write(
        local: &Rc<Local>,
        file: &Arc<OwnedFd>,
        lease: &Lease,
        offset: u64,
        buf: IoBuf,
        from: usize,
    ) -> Transfer {
        let length = length(&buf, from);
        let call = Call::Write { file: fd(file), buf: buf[from..].as_ptr(), length, offset };
        // SAFETY: the call points into `buf`, which the operation keeps.
        buf_back(unsafe { local.op(call, Keep::Buf(buf), lease.clone(), Abandon::Finish) }.await)
    }

    /// Writes the buffers of `vectored` to a file at `offset`.
    pub async fn writev(
        local: &Rc<Local>,
        file: &Arc<OwnedFd>,
        lease: &Lease,
        offset: u64,
        vectored: Box<Vectored>,
    ) -> Transfer<Box<Vectored>> {
        let (iovecs, count) = (vectored.iovecs().as_ptr(), vectored.iovecs().len() as u32);
        let call = Call::Writev { file: fd(file), iovecs, count, offset };
        // SAFETY: the call points to the description, which points to buffers; the operation keeps both.
        let op =
            unsafe { local.op(call, Keep::Vectored(vectored), lease.clone(), Abandon::Finish) };
        vectored_back(op.await)
    }

    /// Makes a file's data durable, and the metadata needed to read it.
    ///
    /// # Errors
    /// As `fdatasync(2)`.
    pub async fn fdatasync(local: &Rc<Local>, file: &Arc<OwnedFd>) -> io::Result<()> {
        let call = Call::Datasync { file: fd(file) };
        // SAFETY: the call points to no memory.
        unsafe { local.op(call, Keep::Nothing, file.clone(), Abandon::Finish) }.await.0.map(drop)
    }

    /// `fallocate(2)`.
    ///
    /// # Errors
    /// Those of the system call.
    pub async fn fallocate(
        local: &Rc<Local>,
        file: &Arc<OwnedFd>,
        lease: &Lease,
        mode: i32,
        offset: u64,
        length: u64,
    ) -> io::Result<()> {
        let call = Call::Fallocate { file: fd(file), mode, offset, length };
        // SAFETY: the call points to no memory.
        unsafe { local.op(call, Keep::Nothing, lease.clone(), Abandon::Finish) }.await.0.map(drop)
    }

    /// Connects a socket.
    pub(crate) async fn connect(
        local: &Rc<Local>,
        socket: &Arc<OwnedFd>,
        address: socket2::SockAddr,
    ) -> io::Result<()> {
        let address = Box::new(address);
        let (pointer, length) = (address.as_ptr().cast(), address.len());
        let call = Call::Connect { socket: fd(socket), address: pointer, length };
        // SAFETY: the call points to the boxed address, which the operation keeps.
        let op = unsafe { local.op(call, Keep::Address(address), socket.clone(), Abandon::Cancel) };
        op.await.0.map(drop)
    }

    /// Receives available bytes, at least one, into `buf[from..]`; 0 means that the peer has shut down its side.
    pub(crate) async fn recv(
        local: &Rc<Local>,
        socket: &Arc<OwnedFd>,
        mut buf: IoBuf,
        from: usize,
    ) -> Transfer {
        let length = length(&buf, from);
        let call = Call::Recv { socket: fd(socket), buf: buf[from..].as_mut_ptr(), length };
        // SAFETY: the call points into `buf`, which the operation keeps.
        buf_back(unsafe { local.op(call, Keep::Buf(buf), socket.clone(), Abandon::Cancel) }.await)
    }

    /// Sends `buf[from..]`.
    pub(crate) async fn send(
        local: &Rc<Local>,
        socket: &Arc<OwnedFd>,
        buf: IoBuf,
        from: usize,
    ) -> Transfer {
        let length = length(&buf, from);
        let call = Call::Send { socket: fd(socket), buf: buf[from..].as_ptr(), length };
        // SAFETY: the call points into `buf`, which the operation keeps.
        buf_back(unsafe { local.op(call, Keep::Buf(buf), socket.clone(), Abandon::Cancel) }.await)
    }

    /// Sends the buffers of `vectored`.
    pub(crate) async fn sendmsg(
        local: &Rc<Local>,
        socket: &Arc<OwnedFd>,
        vectored: Box<Vectored>,
    ) -> Transfer<Box<Vectored>> {
        let call = Call::SendMsg { socket: fd(socket), message: vectored.header() };
        // SAFETY: the call points to the boxed description, which points to buffers; the operation keeps both.
        let op =
            unsafe { local.op(call, Keep::Vectored(vectored), socket.clone(), Abandon::Cancel) };
        vectored_back(op.await)
    }

    /// Waits until any of `events` (`POLLIN` and so on) is ready, and returns those that are.
    pub(crate) async fn poll(
        local: &Rc<Local>,
        file: &Arc<OwnedFd>,
        events: u32,
    ) -> io::Result<u32> {
        start_poll(local, file, events).await.0
    }

    /// Like [`poll`], but returns the operation itself.
    pub(crate) fn start_poll(local: &Rc<Local>, file: &Arc<OwnedFd>, events: u32) -> Op {
        let call = Call::Poll { file: fd(file), events };
        // SAFETY: the call points to no memory.
        unsafe { local.op(call, Keep::Nothing, file.clone(), Abandon::Cancel) }
    }

    /// Reads an eventfd's count into `buf`, once it is not 0.
    pub(crate) fn read_count(local: &Rc<Local>, file: &Arc<OwnedFd>, mut buf: IoBuf) -> Op {
        assert!(buf.len() >= 8, "an eventfd's count has eight bytes");
        let call = Call::Count { file: fd(file), buf: buf.as_mut_ptr() };
        // SAFETY: the call points into `buf`, which the operation keeps.
        unsafe { local.op(call, Keep::Buf(buf), file.clone(), Abandon::Cancel) }
    }
}
