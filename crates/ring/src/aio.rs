//! Linux's older interface for asynchronous I/O, of which only the notification is used.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// Operations that a context has room for.
const ROOM: usize = 64;

/// The operation `pread`.
const PREAD: u16 = 0;
/// The completion is signalled to an eventfd.
const TO_EVENTFD: u32 = 1;

/// `struct iocb`, as little-endian machines have it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Control {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    file: u32,
    buf: u64,
    length: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    eventfd: u32,
}

/// `struct io_event`.
#[repr(C)]
struct Completion([u64; 4]);

const _: () = assert!(size_of::<Control>() == 64 && cfg!(target_endian = "little"));

/// Adds to the counts of eventfds: the kernel does so when a read ends, and one of no bytes ends at once.
pub(crate) struct Aio {
    context: libc::c_ulong,
    /// An empty file in memory.
    file: OwnedFd,
}

impl Aio {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: a plain system call with a name that ends with a zero.
        let file = unsafe { libc::memfd_create(c"isobath-notify".as_ptr(), libc::MFD_CLOEXEC) };
        if file < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just created and has no other owner.
        let file = unsafe { OwnedFd::from_raw_fd(file) };
        let mut context: libc::c_ulong = 0;
        // SAFETY: the context's number is written to a live value, which is 0 before.
        done(unsafe { libc::syscall(libc::SYS_io_setup, ROOM, &raw mut context) })?;
        Ok(Self { context, file })
    }

    /// Fails with `EINVAL` unless a file is an eventfd. Its count stays as it is.
    pub(crate) fn check(&self, eventfd: RawFd) -> io::Result<()> {
        // The kernel looks at the eventfd before it finds that no buffer can be there.
        let refused = Control { buf: u64::MAX, length: 1, ..self.read(eventfd) };
        match self.submit(refused) {
            Err(error) if error.raw_os_error() == Some(libc::EFAULT) => Ok(()),
            Err(error) => Err(error),
            Ok(()) => Err(io::Error::other("the kernel read into a buffer that cannot be")),
        }
    }

    /// Adds 1 to an eventfd's count, unless it is at its maximum. Never waits.
    pub(crate) fn signal(&self, eventfd: RawFd) -> io::Result<()> {
        self.submit(self.read(eventfd))
    }

    fn read(&self, eventfd: RawFd) -> Control {
        Control {
            opcode: PREAD,
            file: self.file.as_raw_fd() as u32,
            flags: TO_EVENTFD,
            eventfd: eventfd as u32,
            ..Control::default()
        }
    }

    /// Submits an operation, once there is room for its completion.
    fn submit(&self, control: Control) -> io::Result<()> {
        match self.try_submit(control) {
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {
                self.make_room()?;
                self.try_submit(control)
            }
            result => result,
        }
    }

    fn try_submit(&self, mut control: Control) -> io::Result<()> {
        let mut list = [&raw mut control];
        let list = list.as_mut_ptr();
        // SAFETY: one operation is described, which reads no byte, or fails before it reads one.
        done(unsafe { libc::syscall(libc::SYS_io_submit, self.context, 1_usize, list) })
    }

    /// Takes completions, which tell nothing more.
    fn make_room(&self) -> io::Result<()> {
        let mut events = [const { MaybeUninit::<Completion>::uninit() }; ROOM];
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: there is room for that many events, and the time is a live value.
        done(unsafe {
            let (events, now) = (events.as_mut_ptr(), &raw const now);
            libc::syscall(libc::SYS_io_getevents, self.context, 0_usize, ROOM, events, now)
        })
    }
}

impl Drop for Aio {
    fn drop(&mut self) {
        // SAFETY: the context is this one's alone.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

fn done(result: libc::c_long) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
