//! Commands to devices (`IORING_OP_URING_CMD`).

use crate::event::Event;
use crate::runtime::explain;
use io_uring::register::Restriction;
use io_uring::squeue::{Entry, Entry128};
use io_uring::types::Fd;
use io_uring::{IoUring, cqueue, opcode, squeue};
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::task::{Context, Poll};

/// Commands to a device whose completions may take forever, such as those that fetch requests from a driver.
///
/// They are on a ring of their own, which takes nothing else: an executor's rings accept no commands, whoever takes
/// over the process. And a driver may keep a command until the ring that it came from is closed, which dropping this
/// does; an executor waits for its operations.
pub struct Commands {
    ring: IoUring,
    event: Event,
    /// Commands for which the ring has no room yet, in order.
    backlog: VecDeque<Entry>,
}

/// A ring for [`Commands`] that no thread uses yet. A process that confines itself makes it before, and hands it to the
/// thread that is to use it.
pub struct CommandRing {
    ring: IoUring,
    eventfd: OwnedFd,
}

impl CommandRing {
    /// A ring for `entries` commands in flight.
    ///
    /// # Errors
    /// There is no io_uring that takes commands (Linux 5.19), it is forbidden, or memory or descriptors are short.
    pub fn new(entries: u32) -> io::Result<Self> {
        // SAFETY: a plain system call.
        let eventfd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if eventfd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just created, with no other owner.
        let eventfd = unsafe { OwnedFd::from_raw_fd(eventfd) };
        let ring: IoUring = build(entries)?;
        ring.submitter().register_eventfd(eventfd.as_raw_fd())?;
        enable(&ring)?;
        Ok(Self { ring, eventfd })
    }
}

impl fmt::Debug for CommandRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CommandRing").field("ring", &self.ring.as_raw_fd()).finish_non_exhaustive()
    }
}

impl From<CommandRing> for Commands {
    /// Commands of this thread.
    fn from(CommandRing { ring, eventfd }: CommandRing) -> Self {
        Self { ring, event: Event::from(eventfd), backlog: VecDeque::new() }
    }
}

impl Commands {
    /// Adds a command; [`submit`](Self::submit) gives it to the device. `token` comes back with its completion.
    ///
    /// # Safety
    /// What the command lets the device access must stay valid until its completion, and the descriptor open until the
    /// command has been submitted.
    pub unsafe fn push(
        &mut self,
        device: BorrowedFd<'_>,
        command: u32,
        payload: [u8; 16],
        token: u64,
    ) {
        let entry = opcode::UringCmd16::new(Fd(device.as_raw_fd()), command).cmd(payload).build();
        self.backlog.push_back(entry.user_data(token));
    }

    /// Gives the device the commands that were added. Those that the kernel does not take now are given to it by the
    /// next call.
    ///
    /// # Errors
    /// The ring is unusable.
    pub fn submit(&mut self) -> io::Result<()> {
        loop {
            let mut queue = self.ring.submission();
            while let Some(entry) = self.backlog.front() {
                // SAFETY: the creator of the entry has promised that it stays valid.
                if unsafe { queue.push(entry) }.is_err() {
                    break;
                }
                self.backlog.pop_front();
            }
            queue.sync();
            if queue.is_empty() && !queue.cq_overflow() {
                return Ok(());
            }
            drop(queue);
            match self.ring.submit() {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR) => {}
                    // Completions have to be taken first.
                    Some(libc::EAGAIN | libc::EBUSY) => return Ok(()),
                    _ => return Err(error),
                },
            }
        }
    }

    /// Whether commands wait to be submitted, or completions for which the ring had no room: then
    /// [`submit`](Self::submit) is to be called before anybody waits.
    pub fn is_full(&mut self) -> bool {
        let queue = self.ring.submission();
        !queue.is_empty() || queue.cq_overflow() || !self.backlog.is_empty()
    }

    /// The next completion, its token and result, if there is one.
    pub fn take(&mut self) -> Option<(u64, i32)> {
        let entry = self.ring.completion().next()?;
        Some((entry.user_data(), entry.result()))
    }

    /// Waits until there may be completions. All waits must be on one thread.
    ///
    /// # Errors
    /// The executor cannot wait.
    ///
    /// # Panics
    /// Outside [`Executor::block_on`](crate::Executor::block_on).
    pub fn poll_completions(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.event.poll_take(cx).map_ok(drop)
    }
}

impl fmt::Debug for Commands {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Commands").field("ring", &self.ring.as_raw_fd()).finish_non_exhaustive()
    }
}

/// Gives a device one command and waits for its result, as `ioctl` does. Blocks the thread.
///
/// # Safety
/// What the command lets the device access must be valid until this returns.
///
/// # Errors
/// Those of the device; there is no io_uring that takes commands (Linux 5.19), or it is forbidden.
pub unsafe fn command(device: BorrowedFd<'_>, command: u32, payload: [u8; 80]) -> io::Result<u32> {
    // SAFETY: the caller keeps what the command refers to until its completion, which is awaited here.
    let mut ring = unsafe { begun(device, command, payload) }?;
    loop {
        match ring.submit_and_wait(1) {
            Err(error) if error.raw_os_error() != Some(libc::EINTR) => return Err(error),
            _ => {}
        }
        if let Some(done) = result_of(&mut ring) {
            return done;
        }
    }
}

/// Gives a device one command and waits for its result, or until `order` can be read or its other end is closed: then
/// the command is given up, and the result is `None`. Blocks the thread.
///
/// # Safety
/// What the command lets the device access must be valid until its completion, which may be after this returns.
///
/// # Errors
/// As [`command`].
pub unsafe fn command_unless(
    device: BorrowedFd<'_>,
    command: u32,
    payload: [u8; 80],
    order: BorrowedFd<'_>,
) -> io::Result<Option<u32>> {
    // SAFETY: the caller keeps what the command refers to.
    let mut ring = unsafe { begun(device, command, payload) }?;
    let mut is_begun = false;
    loop {
        if !is_begun {
            match ring.submit() {
                Err(error) if error.raw_os_error() != Some(libc::EINTR) => return Err(error),
                done => is_begun = done.is_ok(),
            }
        }
        if let Some(done) = result_of(&mut ring) {
            return done.map(Some);
        }
        let wait = |descriptor| libc::pollfd { fd: descriptor, events: libc::POLLIN, revents: 0 };
        let mut waits = [wait(ring.as_raw_fd()), wait(order.as_raw_fd())];
        let patience = if is_begun { -1 } else { 0 };
        // SAFETY: the call reads and writes these two structures.
        if unsafe { libc::poll(waits.as_mut_ptr(), 2, patience) } < 0 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        } else if waits[1].revents != 0 {
            return result_of(&mut ring).transpose();
        }
    }
}

/// A ring with a command that is to be submitted.
///
/// # Safety
/// As [`command_unless`].
unsafe fn begun(
    device: BorrowedFd<'_>,
    command: u32,
    payload: [u8; 80],
) -> io::Result<IoUring<Entry128>> {
    let mut ring: IoUring<Entry128> = build(1)?;
    enable(&ring)?;
    let entry = opcode::UringCmd80::new(Fd(device.as_raw_fd()), command).cmd(payload).build();
    // SAFETY: the caller keeps what the command refers to until its completion. A ring takes its one entry.
    unsafe { ring.submission().push(&entry) }.map_err(io::Error::other)?;
    Ok(ring)
}

/// The result of a ring's command, once it has completed.
fn result_of(ring: &mut IoUring<Entry128>) -> Option<io::Result<u32>> {
    let result = ring.completion().next()?.result();
    Some(u32::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result)))
}

/// A disabled ring.
fn build<S: squeue::EntryMarker>(entries: u32) -> io::Result<IoUring<S>> {
    let mut builder = IoUring::<S, cqueue::Entry>::builder();
    builder.dontfork().setup_r_disabled().setup_submit_all().setup_coop_taskrun();
    builder.build(entries.max(1)).map_err(|error| explain(&error).into())
}

/// Enables a ring for commands only.
fn enable<S: squeue::EntryMarker>(ring: &IoUring<S>) -> io::Result<()> {
    let mut allowed = [Restriction::sqe_op(opcode::UringCmd16::CODE)];
    ring.submitter().register_restrictions(&mut allowed)?;
    ring.submitter().register_enable_rings()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, Executor, Io};
    use std::future::poll_fn;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    /// Where io_uring is forbidden there is nothing to test but that it is said.
    fn commands(entries: u32) -> Option<Commands> {
        let ring = CommandRing::new(entries)
            .inspect_err(|error| assert!(error.to_string().contains("io_uring"), "{error}"));
        ring.ok().map(Commands::from)
    }

    #[test]
    fn every_command_completes_with_its_token_and_wakes_whoever_waits() {
        for io in [Io::Any, Io::Threads] {
            let Some(mut commands) = commands(4) else { return };
            let (ours, _theirs) = UnixStream::pair().unwrap();
            Executor::new(&Config { io, ..Config::default() }).unwrap().block_on(async {
                // More than the ring has room for.
                for token in 0..11 {
                    // SAFETY: the command refers to no memory.
                    unsafe { commands.push(ours.as_fd(), u32::MAX, [0; 16], token) };
                }
                let mut tokens = Vec::new();
                while tokens.len() < 11 {
                    commands.submit().unwrap();
                    while let Some((token, result)) = commands.take() {
                        assert!(result < 0, "a socket knows no such command: {result}");
                        tokens.push(token);
                    }
                    if tokens.len() < 11 && !commands.is_full() {
                        poll_fn(|cx| commands.poll_completions(cx)).await.unwrap();
                    }
                }
                tokens.sort_unstable();
                assert!(tokens.iter().copied().eq(0..11), "{tokens:?}");
                // What has completed has rung.
                poll_fn(|cx| commands.poll_completions(cx)).await.unwrap();
            });
        }
    }

    #[test]
    fn a_single_command_has_the_devices_error() {
        if commands(1).is_none() {
            return;
        }
        let (ours, _theirs) = UnixStream::pair().unwrap();
        // SAFETY: the command refers to no memory.
        let error = unsafe { command(ours.as_fd(), u32::MAX, [0; 80]) }.unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP));
        // The same with an order that nobody gives.
        let (order, _other) = UnixStream::pair().unwrap();
        // SAFETY: the command refers to no memory.
        let done = unsafe { command_unless(ours.as_fd(), u32::MAX, [0; 80], order.as_fd()) };
        assert_eq!(done.unwrap_err().raw_os_error(), Some(libc::EOPNOTSUPP));
    }
}
