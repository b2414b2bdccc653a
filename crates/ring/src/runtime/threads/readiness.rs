//! Operations that wait until a file is ready.

use super::super::call::{Call, Wait};
use super::Completion;
use super::calls::{self, Awaited};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

/// Maximum number of events taken at a time.
const EVENTS: usize = 64;

/// What is always told, whether asked for or not.
const ALWAYS: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;
/// What files are ready for that cannot wait.
const NEVER_WAITS: u32 =
    (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDNORM | libc::EPOLLWRNORM) as u32;
const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;

/// The operations that wait, and the epoll instance that tells when they may go on.
pub(super) struct Readiness {
    epoll: OwnedFd,
    files: RefCell<HashMap<RawFd, Watched>>,
    /// The file that each operation waits for.
    places: RefCell<HashMap<u64, RawFd>>,
    /// Tells of completions on other threads.
    bell: RawFd,
    /// Tells of wake-ups from other threads.
    wake: Cell<Option<RawFd>>,
}

/// A file that operations wait for. They keep it open.
struct Watched {
    /// In the order in which they were started.
    waiting: BTreeMap<u64, (Call, u32)>,
    /// What epoll watches it for: at least what they wait for.
    events: u32,
}

impl Watched {
    fn new() -> Self {
        Self { waiting: BTreeMap::new(), events: 0 }
    }

    /// What its operations wait for.
    fn awaited(&self) -> u32 {
        together(self.waiting.values().map(|(_, events)| *events)).unwrap_or(0)
    }
}

/// What epoll has to watch for, given what each of several wait for: for one alone only if all want that.
fn together(events: impl Iterator<Item = u32>) -> Option<u32> {
    events.reduce(|one, other| match one & other & EXCLUSIVE {
        0 => (one | other) & !EXCLUSIVE,
        _ => one | other,
    })
}

impl Readiness {
    pub(super) fn new(bell: RawFd) -> io::Result<Self> {
        // SAFETY: a plain system call.
        let epoll = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if epoll < 0 {
            return Err(explained(&io::Error::last_os_error()));
        }
        let readiness = Self {
            // SAFETY: the descriptor was just created and has no other owner.
            epoll: unsafe { OwnedFd::from_raw_fd(epoll) },
            files: RefCell::default(),
            places: RefCell::default(),
            bell,
            wake: Cell::new(None),
        };
        readiness.watch_eventfd(bell)?;
        Ok(readiness)
    }

    /// Makes an eventfd end waits, from now on.
    pub(super) fn listen(&self, eventfd: RawFd) -> io::Result<()> {
        self.watch_eventfd(eventfd)?;
        self.wake.set(Some(eventfd));
        Ok(())
    }

    fn watch_eventfd(&self, eventfd: RawFd) -> io::Result<()> {
        let watched = self.control(libc::EPOLL_CTL_ADD, eventfd, libc::EPOLLIN as u32);
        watched.map_err(|error| explained(&error))
    }

    fn control(&self, what: i32, file: RawFd, events: u32) -> io::Result<()> {
        let mut event = libc::epoll_event { events, u64: file as u64 };
        // SAFETY: the event is a live value.
        let result = unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), what, file, &raw mut event) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Makes epoll watch a file for other events than before. One that is watched for one waiter alone must be added
    /// anew for that.
    fn change(&self, file: RawFd, from: u32, to: u32) -> io::Result<()> {
        if from == to {
            return Ok(());
        }
        if (from | to) & EXCLUSIVE == 0 {
            return self.control(libc::EPOLL_CTL_MOD, file, to);
        }
        self.control(libc::EPOLL_CTL_DEL, file, 0)?;
        self.control(libc::EPOLL_CTL_ADD, file, to)
    }

    /// Whether any operation waits.
    pub(super) fn is_used(&self) -> bool {
        !self.places.borrow().is_empty()
    }

    /// Lets an operation wait, or completes it if it cannot.
    pub(super) fn add(
        &self,
        (operation, call): (u64, Call),
        Awaited { file, events }: Awaited,
        done: &mut Vec<Completion>,
    ) {
        let mut files = self.files.borrow_mut();
        let before = files.get(&file).map(|watched| watched.events);
        let all = together(before.into_iter().chain([events])).unwrap_or(events);
        let result = match before {
            None => self.control(libc::EPOLL_CTL_ADD, file, events),
            Some(before) => self.change(file, before, all),
        };
        if let Err(error) = result {
            if before.is_some() {
                self.fail(&mut files, file, &error, done);
            }
            return done.push((operation, unwatched(&call, events, &error)));
        }
        let place = files.entry(file).or_insert_with(Watched::new);
        place.events = all;
        place.waiting.insert(operation, (call, events));
        self.places.borrow_mut().insert(operation, file);
    }

    /// Completes all operations that wait for a file, which may not be watched any more.
    fn fail(
        &self,
        files: &mut HashMap<RawFd, Watched>,
        file: RawFd,
        error: &io::Error,
        done: &mut Vec<Completion>,
    ) {
        let _ = self.control(libc::EPOLL_CTL_DEL, file, 0);
        let waiting = files.remove(&file).into_iter().flat_map(|watched| watched.waiting);
        let mut places = self.places.borrow_mut();
        for (operation, _) in waiting {
            places.remove(&operation);
            done.push((operation, -shortage(error)));
        }
    }

    /// Forgets an operation; `false` if it does not wait.
    pub(super) fn remove(&self, operation: u64) -> bool {
        let Some(file) = self.places.borrow_mut().remove(&operation) else { return false };
        let mut files = self.files.borrow_mut();
        if let Some(watched) = files.get_mut(&file) {
            watched.waiting.remove(&operation);
            // Otherwise it may be watched for more than is awaited; the first event of that kind corrects it.
            if watched.waiting.is_empty() {
                self.forget(&mut files, file);
            }
        }
        true
    }

    fn forget(&self, files: &mut HashMap<RawFd, Watched>, file: RawFd) {
        if files.remove(&file).is_some()
            && let Err(error) = self.control(libc::EPOLL_CTL_DEL, file, 0)
        {
            panic!("epoll does not know a file that it watches: {error}");
        }
    }

    /// Waits as requested; completes the operations whose files are ready. Returns whether another thread has woken
    /// this one.
    pub(super) fn wait(&self, wait: Wait, done: &mut Vec<Completion>) -> bool {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; EVENTS];
        let mut woken = false;
        let count = self.events(wait, &mut events);
        for event in &events[..count] {
            let (file, ready) = (event.u64 as RawFd, event.events);
            if file == self.bell || Some(file) == self.wake.get() {
                clear(file);
                woken |= file != self.bell;
            } else {
                self.ready(file, ready, done);
            }
        }
        woken
    }

    fn events(&self, wait: Wait, events: &mut [libc::epoll_event; EVENTS]) -> usize {
        let epoll = self.epoll.as_raw_fd();
        let timeout = match wait {
            Wait::No => 0,
            Wait::Forever => -1,
            Wait::For(duration) => {
                wait_for(epoll, duration);
                0
            }
        };
        // SAFETY: there is room for that many events.
        let count = unsafe { libc::epoll_wait(epoll, events.as_mut_ptr(), EVENTS as i32, timeout) };
        usize::try_from(count).unwrap_or_else(|_| {
            check("epoll_wait");
            0
        })
    }

    /// Lets the operations go on that wait for what a file is ready for.
    fn ready(&self, file: RawFd, ready: u32, done: &mut Vec<Completion>) {
        let mut files = self.files.borrow_mut();
        let Some(watched) = files.get_mut(&file) else { return };
        let mut places = self.places.borrow_mut();
        let mut alone = true;
        watched.waiting.retain(|operation, (call, events)| {
            let ready = ready & (*events | ALWAYS);
            let exclusive = *events & EXCLUSIVE != 0;
            if ready == 0 || (exclusive && !alone) {
                return true;
            }
            alone &= !exclusive;
            // SAFETY: whoever started the operation promised that its memory is valid until its completion.
            let Some(result) = (unsafe { calls::go_on(call, ready) }) else { return true };
            places.remove(operation);
            done.push((*operation, result));
            false
        });
        if watched.waiting.is_empty() {
            self.forget(&mut files, file);
            return;
        }
        let (before, awaited) = (watched.events, watched.awaited());
        watched.events = awaited;
        drop(places);
        if let Err(error) = self.change(file, before, awaited) {
            self.fail(&mut files, file, &error, done);
        }
    }
}

/// The result of an operation for whose file epoll refused to watch: one that cannot wait, such as a regular file or
/// /dev/null, is always ready.
fn unwatched(call: &Call, events: u32, error: &io::Error) -> i32 {
    match call {
        Call::Poll { .. } if error.raw_os_error() == Some(libc::EPERM) => {
            let ready = (events & NEVER_WAITS) as i32;
            if ready == 0 { -libc::EINVAL } else { ready }
        }
        _ => -shortage(error),
    }
}

/// Why an executor cannot be set up, for people.
fn explained(error: &io::Error) -> io::Error {
    let hint = match error.raw_os_error() {
        Some(libc::ENOSPC) => {
            "; this user's watches are used up: raise the sysctl fs.epoll.max_user_watches"
        }
        _ => "",
    };
    let kind = io::Error::from_raw_os_error(shortage(error)).kind();
    io::Error::new(kind, format!("cannot set up epoll: {error}{hint}"))
}

/// The error of an operation whose file cannot be watched. A lack of watches is no lack of space on a disk.
fn shortage(error: &io::Error) -> i32 {
    match error.raw_os_error() {
        Some(libc::ENOSPC) | None => libc::ENOMEM,
        Some(number) => number,
    }
}

/// Waits until an epoll instance has events, for up to `duration`. It could itself wait for whole milliseconds only.
fn wait_for(epoll: RawFd, duration: std::time::Duration) {
    let mut poll = libc::pollfd { fd: epoll, events: libc::POLLIN, revents: 0 };
    let timeout = libc::timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(duration.subsec_nanos()),
    };
    // SAFETY: both are live values.
    if unsafe { libc::ppoll(&raw mut poll, 1, &raw const timeout, ptr::null()) } < 0 {
        check("ppoll");
    }
}

/// Sets the count of an eventfd to 0.
fn clear(eventfd: RawFd) {
    let mut count = 0_u64;
    // The file does not block, and a count of 0 is as good. SAFETY: eight bytes of a live value.
    unsafe { libc::read(eventfd, (&raw mut count).cast(), 8) };
}

/// Ignores an interruption by a signal; panics on other errors, after which nothing can be awaited.
fn check(call: &str) {
    let error = io::Error::last_os_error();
    assert!(error.kind() == io::ErrorKind::Interrupted, "{call} failed: {error}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lack_of_watches_is_explained_and_is_no_lack_of_space() {
        let error = explained(&io::Error::from_raw_os_error(libc::ENOSPC));
        assert_eq!(error.kind(), io::ErrorKind::OutOfMemory);
        assert!(error.to_string().contains("fs.epoll.max_user_watches"), "{error}");
        let error = explained(&io::Error::from_raw_os_error(libc::EMFILE));
        assert!(!error.to_string().contains("watches"), "{error}");
    }
}
