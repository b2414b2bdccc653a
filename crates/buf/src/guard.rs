//! Survives the loss of mapped memory whose file was cut short.
//!
//! An access to a page past the end of its file, or to one that cannot be read, raises SIGBUS, which would end the
//! process and with it all of its disks. Instead, a handler puts zeroes in place of the page and notes that the mapping
//! [has lost memory](Guard::is_lost), which whoever has read it then asks. When a second page is missing, all of the
//! mapping is replaced. For all other addresses the signal does what it did before.
//!
//! The handler runs in the middle of anything. It takes no lock and allocates nothing: it walks a list whose slots are
//! never freed, only used again, and calls `mmap`.

use parking_lot::Mutex;
use std::io;
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering, fence};

/// How a mapping is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It is only read. Then what replaces it counts for no limit of memory.
    Read,
    /// It is read and written.
    Write,
}

/// A place for a guarded mapping.
#[derive(Debug)]
struct Slot {
    /// Odd while the range changes.
    version: AtomicUsize,
    start: AtomicUsize,
    /// Length of the mapping in bytes; 0 if the slot is unused.
    length: AtomicUsize,
    /// The unit in which it can be mapped, a power of two.
    block: AtomicUsize,
    /// Whether it is written.
    written: AtomicBool,
    /// Whether a page has been lost.
    lost: AtomicBool,
    next: *mut Slot,
}

// SAFETY: `next` does not change once the slot is in the list.
unsafe impl Sync for Slot {}

/// All slots.
static SLOTS: AtomicPtr<Slot> = AtomicPtr::new(ptr::null_mut());
/// The slots that are unused.
static UNUSED: Mutex<Vec<&'static Slot>> = Mutex::new(Vec::new());
/// How many pages all mappings together have lost.
static LOSSES: AtomicUsize = AtomicUsize::new(0);
/// What the signal did before the handler was installed.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// How many pages have been lost so far: cheap to ask, and as long as it does not change, [`Guard::is_lost`] does not.
pub fn losses() -> usize {
    LOSSES.load(Ordering::Acquire)
}

/// Guards a mapping until it is dropped, which must be before the memory is unmapped.
#[derive(Debug)]
pub struct Guard {
    slot: &'static Slot,
    /// How many pages had been lost before: as long as there are no more, none of this mapping is.
    losses: usize,
}

impl Guard {
    /// Guards `length` bytes from `start` on, which were mapped in units of `block` bytes.
    ///
    /// # Errors
    /// The handler cannot be installed.
    pub fn new(
        start: NonNull<u8>,
        length: usize,
        block: usize,
        access: Access,
    ) -> io::Result<Self> {
        install()?;
        let slot = UNUSED.lock().pop().unwrap_or_else(add_slot);
        slot.lost.store(false, Ordering::Relaxed);
        slot.written.store(access == Access::Write, Ordering::Relaxed);
        let losses = losses();
        slot.set(start.as_ptr() as usize, length, block);
        Ok(Self { slot, losses })
    }

    /// Whether a page of the mapping was lost. It then holds zeroes, or what was written there since.
    pub fn is_lost(&self) -> bool {
        losses() != self.losses && self.slot.lost.load(Ordering::Acquire)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.slot.set(0, 0, 1);
        UNUSED.lock().push(self.slot);
    }
}

/// Adds a slot to the list.
fn add_slot() -> &'static Slot {
    let slot = Box::leak(Box::new(Slot {
        version: AtomicUsize::new(0),
        start: AtomicUsize::new(0),
        length: AtomicUsize::new(0),
        block: AtomicUsize::new(1),
        written: AtomicBool::new(false),
        lost: AtomicBool::new(false),
        next: ptr::null_mut(),
    }));
    let mut first = SLOTS.load(Ordering::Acquire);
    loop {
        slot.next = first;
        match SLOTS.compare_exchange(first, slot, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return slot,
            Err(now) => first = now,
        }
    }
}

impl Slot {
    /// Changes the range. Only one thread does so at a time: the one that holds the guard.
    fn set(&self, start: usize, length: usize, block: usize) {
        self.version.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.length.store(length, Ordering::Relaxed);
        self.block.store(block, Ordering::Relaxed);
        self.version.fetch_add(1, Ordering::Release);
    }

    /// The start, the length and the block; `None` while they change. The range of a mapping in use does not.
    fn range(&self) -> Option<(usize, usize, usize)> {
        let version = self.version.load(Ordering::Acquire);
        let range = (
            self.start.load(Ordering::Relaxed),
            self.length.load(Ordering::Relaxed),
            self.block.load(Ordering::Relaxed),
        );
        fence(Ordering::Acquire);
        (version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version)
            .then_some(range)
    }

    /// Puts zeroes in place of the page at `address`, if it is in the mapping, and of the whole mapping if that is not
    /// the first one; whether that was done.
    fn replace(&self, address: usize) -> bool {
        let Some((start, length, block)) = self.range() else { return false };
        let Some(distance) = address.checked_sub(start).filter(|distance| *distance < length)
        else {
            return false;
        };
        let from = distance & !(block - 1);
        // It is noted first, so that whoever has used the zeroes finds that it is.
        let again = self.lost.swap(true, Ordering::AcqRel);
        LOSSES.fetch_add(1, Ordering::Release);
        // Nobody needs a mapping in which more is missing, and a signal for each page of it would take long. The
        // process also has a limited number of mappings. If there can be no more, the whole one is replaced, too; and
        // if there is no memory for that, each page.
        let written = self.written.load(Ordering::Relaxed);
        let page = |written| map_zeroes(start + from, block.min(length - from), written);
        !again && page(written) || map_zeroes(start, length, written) || page(written)
    }
}

/// Replaces a part of a guarded mapping.
fn map_zeroes(start: usize, length: usize, written: bool) -> bool {
    let access = libc::PROT_READ | if written { libc::PROT_WRITE } else { 0 };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // SAFETY: the range is in a guarded mapping, which the faulting thread keeps; nobody has references to it. The
    // system call is made directly, since a library's function may take locks.
    let mapped = unsafe { libc::syscall(libc::SYS_mmap, start, length, access, flags, -1, 0) };
    mapped != -1
}

/// Installs the handler, once.
fn install() -> io::Result<()> {
    static INSTALLED: Mutex<bool> = Mutex::new(false);
    let mut installed = INSTALLED.lock();
    if *installed {
        return Ok(());
    }
    let mut previous = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: the call fills `previous` if it succeeds.
    let previous = unsafe {
        done(libc::sigaction(libc::SIGBUS, ptr::null(), previous.as_mut_ptr()))?;
        previous.assume_init()
    };
    let previous = PREVIOUS.get_or_init(|| previous);
    let mut action = *previous;
    let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = handle;
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    // SAFETY: the handler has the type that the flags announce, and does only what is allowed in one.
    done(unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) })?;
    *installed = true;
    Ok(())
}

fn done(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The signal's handler.
extern "C" fn handle(signal: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid description; the address is only used as a number. The error number is this
    // thread's own.
    unsafe {
        let interrupted = *libc::__errno_location();
        respond(signal, (*info).si_code, (*info).si_addr() as usize);
        *libc::__errno_location() = interrupted;
    }
}

fn respond(signal: i32, code: i32, address: usize) {
    // Codes up to 0 are those of signals that a process has sent.
    let is_fault = code > 0;
    if is_fault && replace(address) {
        return;
    }
    let Some(previous) = PREVIOUS.get() else { return };
    if !is_fault && previous.sa_sigaction == libc::SIG_IGN {
        return;
    }
    // A fault repeats itself once the handler has returned.
    // SAFETY: this was the action before; both calls are allowed in a handler.
    unsafe {
        libc::sigaction(signal, previous, ptr::null_mut());
        if !is_fault {
            libc::raise(signal);
        }
    }
}

fn replace(address: usize) -> bool {
    let mut slot = SLOTS.load(Ordering::Acquire);
    // SAFETY: slots are never freed.
    while let Some(one) = unsafe { slot.as_ref() } {
        if one.replace(address) {
            return true;
        }
        slot = one.next;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsRawFd;

    const PAGE: usize = 4096;

    fn mapped(pages: usize) -> (File, NonNull<u8>) {
        let file = tempfile::tempfile().unwrap();
        file.set_len((pages * PAGE) as u64).unwrap();
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: a new mapping.
        let start = unsafe {
            libc::mmap(ptr::null_mut(), pages * PAGE, access, flags, file.as_raw_fd(), 0)
        };
        assert_ne!(start, libc::MAP_FAILED);
        (file, NonNull::new(start.cast()).unwrap())
    }

    #[test]
    fn a_page_that_is_gone_is_zeroes_and_the_others_stay_until_a_second_one_is() {
        let (file, start) = mapped(4);
        let guard = Guard::new(start, 4 * PAGE, PAGE, Access::Write).unwrap();
        // SAFETY: within the mapping, which is guarded.
        let byte = |page: usize| unsafe { start.add(page * PAGE + 5) };
        for page in 0..4 {
            // SAFETY: as above.
            unsafe { byte(page).write_volatile(7) };
        }
        assert!(!guard.is_lost());
        let before = losses();
        file.set_len(2 * PAGE as u64).unwrap();
        // SAFETY: as above; the error number is this thread's own.
        unsafe {
            assert_eq!(byte(1).read_volatile(), 7);
            assert!(!guard.is_lost());
            *libc::__errno_location() = libc::EAGAIN;
            let lost = byte(2).read_volatile();
            assert_eq!((lost, *libc::__errno_location()), (0, libc::EAGAIN));
            byte(2).write_volatile(8);
            assert_eq!(byte(2).read_volatile(), 8);
            assert_eq!(byte(1).read_volatile(), 7);
            byte(3).write_volatile(9);
            let found = [0, 1, 2, 3].map(|page| byte(page).read_volatile());
            assert_eq!(found, [0, 0, 0, 9]);
        }
        assert!(guard.is_lost() && losses() > before);
        drop(guard);
        // SAFETY: the mapping is not used any more.
        unsafe { libc::munmap(start.as_ptr().cast(), 4 * PAGE) };
        let (file, start) = mapped(1);
        let guard = Guard::new(start, PAGE, PAGE, Access::Write).unwrap();
        assert!(!guard.is_lost(), "the slot's past is forgotten");
        drop((guard, file));
        // SAFETY: as above.
        unsafe { libc::munmap(start.as_ptr().cast(), PAGE) };
    }

    #[test]
    fn memory_that_grows_again_stays_lost() {
        let (file, start) = mapped(2);
        let guard = Guard::new(start, 2 * PAGE, PAGE, Access::Write).unwrap();
        file.set_len(0).unwrap();
        // SAFETY: within the mapping, which is guarded.
        unsafe { start.write_volatile(7) };
        file.set_len(2 * PAGE as u64).unwrap();
        // SAFETY: as above.
        unsafe {
            assert_eq!((start.read_volatile(), start.add(PAGE).read_volatile()), (7, 0));
        }
        assert!(guard.is_lost());
        drop(guard);
        // SAFETY: the mapping is not used any more.
        unsafe { libc::munmap(start.as_ptr().cast(), 2 * PAGE) };
    }

    #[test]
    fn threads_that_find_the_same_page_missing_all_go_on() {
        let (file, start) = mapped(64);
        let guard = Guard::new(start, 64 * PAGE, PAGE, Access::Write).unwrap();
        file.set_len(0).unwrap();
        let address = start.as_ptr() as usize;
        let barrier = std::sync::Barrier::new(4);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    barrier.wait();
                    for page in 0..64 {
                        // SAFETY: within the mapping, which is guarded.
                        let byte =
                            unsafe { ((address + page * PAGE) as *const u8).read_volatile() };
                        assert_eq!(byte, 0);
                    }
                });
            }
        });
        assert!(guard.is_lost());
        drop(guard);
        // SAFETY: the mapping is not used any more.
        unsafe { libc::munmap(start.as_ptr().cast(), 64 * PAGE) };
    }

    #[test]
    fn a_mapping_that_is_only_read_survives_where_memory_is_limited() {
        let (file, start) = mapped(64);
        let guard = Guard::new(start, 64 * PAGE, PAGE, Access::Read).unwrap();
        file.set_len(0).unwrap();
        // SAFETY: the child makes system calls only, and reads memory that is guarded.
        let child = unsafe {
            let child = libc::fork();
            if child == 0 {
                let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
                libc::setrlimit(libc::RLIMIT_DATA, &raw const none);
                let sum: u8 = (0..64).map(|page| start.add(page * PAGE).read_volatile()).sum();
                libc::_exit(i32::from(sum));
            }
            child
        };
        let mut status = 0;
        // SAFETY: `status` is a live value.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        drop((guard, file));
        // SAFETY: the mapping is not used any more.
        unsafe { libc::munmap(start.as_ptr().cast(), 64 * PAGE) };
    }

    #[test]
    fn elsewhere_the_signal_ends_the_process() {
        let (other_file, other) = mapped(1);
        let guard = Guard::new(other, PAGE, PAGE, Access::Write).unwrap();
        for sent in [false, true] {
            let (file, start) = mapped(1);
            file.set_len(0).unwrap();
            // SAFETY: the child makes system calls only, and accesses memory whose loss is to end it.
            let child = unsafe {
                let child = libc::fork();
                if child == 0 {
                    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
                    libc::setrlimit(libc::RLIMIT_CORE, &raw const none);
                    if sent {
                        // The action before is the standard library's, which takes the first for a fault that will
                        // repeat itself.
                        libc::raise(libc::SIGBUS);
                        libc::raise(libc::SIGBUS);
                        libc::_exit(0);
                    }
                    start.read_volatile();
                    libc::_exit(0);
                }
                child
            };
            let mut status = 0;
            // SAFETY: `status` is a live value.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert!(libc::WIFSIGNALED(status), "{status:#x}");
            assert_eq!(libc::WTERMSIG(status), libc::SIGBUS);
            // SAFETY: the mapping is not used any more.
            unsafe { libc::munmap(start.as_ptr().cast(), PAGE) };
        }
        drop((guard, other_file));
        // SAFETY: as above.
        unsafe { libc::munmap(other.as_ptr().cast(), PAGE) };
    }
}
