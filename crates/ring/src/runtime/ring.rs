//! Operations through an io_uring.

use super::call::{Call, Wait};
use io_uring::register::Restriction;
use io_uring::types::{Fd, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::mem::MaybeUninit;

/// `user_data` of cancellations, whose results are not needed.
pub(super) const CANCEL: u64 = u64::MAX;
/// `user_data` of the read that is completed by wake-ups from other threads.
pub(super) const WAKE: u64 = u64::MAX - 1;

/// Maximum number of completions taken from the queue at a time.
pub(super) const REAP: usize = 64;

/// Room for completions.
pub(super) type Room = [MaybeUninit<cqueue::Entry>; REAP];

const SEND_FLAGS: i32 = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;

/// Why there is no ring.
#[derive(Debug)]
pub(crate) enum Refused {
    /// This kernel has none that serves, or something forbids it. What and why, for people.
    Forbidden(String),
    /// There could be one, but not now.
    Failed(io::Error),
}

impl From<Refused> for io::Error {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Forbidden(why) => Self::new(io::ErrorKind::Unsupported, why),
            Refused::Failed(error) => error,
        }
    }
}

pub(super) struct Uring {
    ring: RefCell<IoUring>,
    /// Entries for which the ring has no room yet, in order.
    backlog: RefCell<VecDeque<squeue::Entry>>,
    /// Entries written to the submission queue that the kernel has not taken.
    unsubmitted: Cell<usize>,
    /// Entries in the submission queue or the kernel.
    in_ring: Cell<usize>,
    batch: usize,
    /// Where the kernel writes the eventfd's count, which is never read.
    word: Box<Cell<u64>>,
}

impl Uring {
    pub(super) fn new(entries: u32, batch: usize) -> Result<Self, Refused> {
        Ok(Self::on(build(entries, FLAGS.len())?, batch))
    }

    fn on(ring: IoUring, batch: usize) -> Self {
        Self {
            ring: RefCell::new(ring),
            backlog: RefCell::default(),
            unsubmitted: Cell::new(0),
            in_ring: Cell::new(0),
            batch,
            word: Box::default(),
        }
    }

    /// A ring with the flags of an older kernel: the first `groups` of them.
    #[cfg(test)]
    pub(super) fn with_flags(groups: usize, entries: u32, batch: usize) -> Self {
        Self::on(build(entries, groups).unwrap(), batch)
    }

    /// Puts an operation into the ring.
    ///
    /// # Safety
    /// What `call` points to must stay valid, and not be accessed otherwise, until the completion of `operation`; its
    /// file must be open until then.
    pub(super) unsafe fn start(&self, operation: u64, call: Call) {
        self.push(entry(call).user_data(operation));
    }

    /// Starts the read that the next wake-up completes.
    pub(super) fn listen(&self, eventfd: i32) {
        // The word lives until the ring has been drained, and nothing here reads or writes it.
        let entry = opcode::Read::new(Fd(eventfd), self.word.as_ptr().cast(), 8).build();
        self.push(entry.user_data(WAKE));
    }

    /// Ends that read.
    pub(super) fn stop_listening(&self) {
        self.cancel(WAKE);
    }

    pub(super) fn cancel(&self, operation: u64) {
        self.push(opcode::AsyncCancel::new(operation).build().user_data(CANCEL));
    }

    fn push(&self, entry: squeue::Entry) {
        let mut backlog = self.backlog.borrow_mut();
        let mut ring = self.ring.borrow_mut();
        // SAFETY: the entry's creator keeps what it points to until its completion.
        if backlog.is_empty() && unsafe { ring.submission().push(&entry) }.is_ok() {
            self.pushed();
        } else {
            backlog.push_back(entry);
            self.refill(&mut ring, &mut backlog);
        }
        if self.unsubmitted.get() >= self.batch {
            self.submit(&ring);
        }
    }

    /// Moves entries from the backlog into the submission queue.
    fn refill(&self, ring: &mut IoUring, backlog: &mut VecDeque<squeue::Entry>) {
        while let Some(entry) = backlog.front() {
            // SAFETY: the entry's creator keeps what it points to until its completion.
            let mut pushed = unsafe { ring.submission().push(entry) };
            if pushed.is_err() {
                self.submit(ring);
                // SAFETY: as above.
                pushed = unsafe { ring.submission().push(entry) };
            }
            if pushed.is_err() {
                break;
            }
            backlog.pop_front();
            self.pushed();
        }
    }

    fn pushed(&self) {
        self.in_ring.set(self.in_ring.get() + 1);
        self.unsubmitted.set(self.unsubmitted.get() + 1);
    }

    /// Submits the queued entries without waiting. Entries that the kernel does not take now are submitted again in the
    /// next turn.
    fn submit(&self, ring: &IoUring) {
        match ring.submit() {
            Ok(taken) => self.taken(taken),
            Err(error) => check(&error),
        }
    }

    /// Submits what is queued, if anything is.
    pub(super) fn submit_queued(&self) {
        if self.unsubmitted.get() > 0 {
            self.submit(&self.ring.borrow());
        }
    }

    fn taken(&self, count: usize) {
        self.unsubmitted.set(self.unsubmitted.get().saturating_sub(count));
    }

    /// Submits queued entries, and waits as requested.
    pub(super) fn enter(&self, wait: Wait) {
        let mut ring = self.ring.borrow_mut();
        self.refill(&mut ring, &mut self.backlog.borrow_mut());
        let result = match wait {
            Wait::No => {
                let queue = ring.submission();
                let idle = self.unsubmitted.get() == 0 && !queue.taskrun() && !queue.cq_overflow();
                drop(queue);
                if idle { Ok(0) } else { ring.submit() }
            }
            Wait::Forever => ring.submit_and_wait(1),
            Wait::For(duration) => {
                let time = Timespec::from(duration);
                ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&time))
            }
        };
        match result {
            Ok(taken) => self.taken(taken),
            // The wait ended without a completion; the number of submitted entries is unknown.
            Err(error) => {
                check(&error);
                self.unsubmitted.set(ring.submission().len());
            }
        }
    }

    /// Whether operations have completed whose tasks do not know it yet.
    pub(super) fn has_completions(&self) -> bool {
        let mut ring = self.ring.borrow_mut();
        let queue = ring.submission();
        let in_kernel = queue.taskrun() || queue.cq_overflow();
        drop(queue);
        in_kernel || !ring.completion().is_empty()
    }

    /// Takes completions from the queue: all that there are, if they are fewer than there is room for.
    pub(super) fn take<'a>(&self, room: &'a mut Room) -> &'a [cqueue::Entry] {
        let mut ring = self.ring.borrow_mut();
        let entries = ring.completion().fill(room);
        self.in_ring.set(self.in_ring.get() - entries.len());
        entries
    }

    /// Whether anything is in the ring or waits for it.
    pub(super) fn is_busy(&self) -> bool {
        self.in_ring.get() > 0 || !self.backlog.borrow().is_empty()
    }
}

#[inline]
fn entry(call: Call) -> squeue::Entry {
    match call {
        #[cfg(test)]
        Call::Nothing => opcode::Nop::new().build(),
        Call::Read { file, buf, length, offset } => {
            opcode::Read::new(Fd(file), buf, length).offset(offset).build()
        }
        Call::Write { file, buf, length, offset } => {
            opcode::Write::new(Fd(file), buf, length).offset(offset).build()
        }
        Call::Writev { file, iovecs, count, offset } => {
            opcode::Writev::new(Fd(file), iovecs, count).offset(offset).build()
        }
        Call::Datasync { file } => opcode::Fsync::new(Fd(file)).flags(FsyncFlags::DATASYNC).build(),
        Call::Fallocate { file, mode, offset, length } => {
            opcode::Fallocate::new(Fd(file), length).offset(offset).mode(mode).build()
        }
        Call::Connect { socket, address, length } => {
            opcode::Connect::new(Fd(socket), address, length).build()
        }
        Call::Recv { socket, buf, length } => opcode::Recv::new(Fd(socket), buf, length).build(),
        Call::Send { socket, buf, length } => {
            opcode::Send::new(Fd(socket), buf, length).flags(SEND_FLAGS).build()
        }
        Call::SendMsg { socket, message } => {
            opcode::SendMsg::new(Fd(socket), message).flags(SEND_FLAGS as u32).build()
        }
        Call::Poll { file, events } => opcode::PollAdd::new(Fd(file), events).build(),
        Call::Count { file, buf } => opcode::Read::new(Fd(file), buf, 8).build(),
    }
}

/// Ignores errors of `io_uring_enter` that the next turn resolves; panics on all others, which make the ring unusable.
fn check(error: &io::Error) {
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EBUSY | libc::EINTR | libc::ETIME) => {}
        _ => panic!("io_uring_enter failed: {error}"),
    }
}

/// Flags by the kernel that introduced them: 5.19; 6.0 and 6.1 (useful only together).
pub(super) const FLAGS: [fn(&mut io_uring::Builder); 2] = [
    |builder| {
        builder.setup_submit_all().setup_coop_taskrun().setup_taskrun_flag();
    },
    |builder| {
        builder.setup_single_issuer().setup_defer_taskrun();
    },
];

/// Creates a ring with the best flags that the kernel supports, from the first `most` groups.
fn build(entries: u32, most: usize) -> Result<IoUring, Refused> {
    let mut groups = most;
    loop {
        let mut builder = IoUring::builder();
        builder.setup_clamp().setup_cqsize(entries.saturating_mul(4)).dontfork().setup_r_disabled();
        for set in &FLAGS[..groups] {
            set(&mut builder);
        }
        match builder.build(entries) {
            Ok(ring) => {
                let ring = check_features(ring)?;
                restrict(&ring).map_err(|error| explain(&error))?;
                return Ok(ring);
            }
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) && groups > 0 => groups -= 1,
            Err(error) => return Err(explain(&error)),
        }
    }
}

/// What [`entry`] makes, and cancels.
const OPERATIONS: [u8; 12] = [
    opcode::Nop::CODE,
    opcode::Read::CODE,
    opcode::Write::CODE,
    opcode::Writev::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
    opcode::Connect::CODE,
    opcode::Recv::CODE,
    opcode::Send::CODE,
    opcode::SendMsg::CODE,
    opcode::PollAdd::CODE,
    opcode::AsyncCancel::CODE,
];

/// Enables a ring for these operations only. So whoever takes over a process that has confined itself neither opens
/// files nor makes sockets through its rings, which no filter of system calls sees.
fn restrict(ring: &IoUring) -> io::Result<()> {
    let mut allowed = OPERATIONS.map(Restriction::sqe_op);
    ring.submitter().register_restrictions(&mut allowed)?;
    ring.submitter().register_enable_rings()
}

const TOO_OLD: &str = "this kernel's io_uring is too old; Linux 5.11 or later has one that serves";

fn check_features(ring: IoUring) -> Result<IoUring, Refused> {
    let have = ring.params();
    if have.is_feature_nodrop() && have.is_feature_ext_arg() && have.is_feature_fast_poll() {
        return Ok(ring);
    }
    Err(Refused::Forbidden(TOO_OLD.into()))
}

/// What an error of `io_uring_setup` means.
pub(crate) fn explain(error: &io::Error) -> Refused {
    let hint = match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            return Refused::Forbidden(format!(
                "io_uring is forbidden ({error}), by sysctl kernel.io_uring_disabled or a seccomp \
                 filter, such as a container's"
            ));
        }
        Some(libc::ENOSYS) => {
            return Refused::Forbidden(format!(
                "there is no io_uring ({error}): the kernel lacks it, or a seccomp filter, such as \
                 a container's, hides it"
            ));
        }
        Some(libc::EINVAL) => return Refused::Forbidden(TOO_OLD.into()),
        Some(libc::ENOMEM) => format!(
            "; the limit on locked memory (ulimit -l) is {}: raise it, or set ISOBATH_IO=threads",
            locked_memory()
        ),
        _ => String::new(),
    };
    Refused::Failed(io::Error::new(error.kind(), format!("cannot set up io_uring: {error}{hint}")))
}

/// The limit on locked memory, for people.
fn locked_memory() -> String {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a live value; the call accesses no other memory.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    match limit.rlim_cur {
        _ if result < 0 => "unknown".into(),
        libc::RLIM_INFINITY => "unlimited".into(),
        bytes => format!("{} KiB", bytes >> 10),
    }
}
