//! Threads that make calls which may wait.

use super::super::bell::Bell;
use super::super::call::Call;
use super::{Completion, calls};
use isobath_sync::{Condvar, Mutex};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

/// The most threads of one executor. More would bring a disk with a deep queue little.
const MOST: usize = 16;

/// They make system calls only.
const STACK: usize = 128 << 10;

/// The number of an operation, and its call.
type Job = (u64, Call);

/// One executor's threads, of which there are as many as it has needed at a time.
pub(super) struct Pool {
    shared: Arc<Shared>,
    threads: RefCell<Vec<JoinHandle<()>>>,
    /// There can be no more threads.
    full: Cell<bool>,
}

struct Shared {
    state: Mutex<State>,
    work: Condvar,
    /// Rings when there are completions and the executor sleeps.
    bell: Bell,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    done: Vec<Completion>,
    /// Threads that wait for a job.
    idle: usize,
    /// Whether the executor waits in the kernel or is about to, so that only the bell wakes it.
    sleeping: bool,
    ended: bool,
}

impl Shared {
    fn new() -> io::Result<Self> {
        Ok(Self { state: Mutex::default(), work: Condvar::new(), bell: Bell::new()? })
    }

    /// Adds a job. Returns whether it has to wait for a thread.
    fn add(&self, job: Job) -> bool {
        let mut state = self.state.lock();
        state.jobs.push_back(job);
        let waits = state.jobs.len() > state.idle;
        drop(state);
        self.work.notify_one();
        waits
    }

    /// Waits for a job; `None` once the pool has ended.
    fn next(&self) -> Option<Job> {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            if state.ended {
                return None;
            }
            state.idle += 1;
            state = self.work.wait(state);
            state.idle -= 1;
        }
    }

    fn finish(&self, completion: Completion) {
        let mut state = self.state.lock();
        state.done.push(completion);
        if std::mem::take(&mut state.sleeping) {
            self.bell.ring();
        }
    }

    /// Announces that the executor will wait in the kernel; `false` if there are completions.
    fn prepare_sleep(&self) -> bool {
        let mut state = self.state.lock();
        state.sleeping = state.done.is_empty();
        state.sleeping
    }

    fn take(&self, done: &mut Vec<Completion>) {
        let mut state = self.state.lock();
        state.sleeping = false;
        done.append(&mut state.done);
    }

    /// Ends the threads once they have done all jobs.
    fn end(&self) {
        self.state.lock().ended = true;
        self.work.notify_all();
    }
}

/// What a thread of the pool does.
fn work(shared: &Shared) {
    while let Some((operation, call)) = shared.next() {
        // SAFETY: whoever submitted the job promised it.
        let result = unsafe { calls::carry_out(&call) };
        shared.finish((operation, result));
    }
}

impl Pool {
    pub(super) fn new() -> io::Result<Self> {
        let shared = Arc::new(Shared::new()?);
        Ok(Self { shared, threads: RefCell::default(), full: Cell::new(false) })
    }

    /// An eventfd that is readable when there are completions for an executor that sleeps.
    pub(super) fn descriptor(&self) -> i32 {
        self.shared.bell.descriptor()
    }

    /// Has a thread make a call. If there is none, and none can be started, the call is made here.
    ///
    /// # Safety
    /// What the call points to must be valid, and not be accessed otherwise, until its completion is
    /// [taken](Self::take) or in `done`.
    pub(super) unsafe fn submit(&self, (operation, call): Job, done: &mut Vec<Completion>) {
        let mut threads = self.threads.borrow_mut();
        if threads.is_empty() && !self.start(&mut threads) {
            // SAFETY: passed on to the caller.
            done.push((operation, unsafe { calls::carry_out(&call) }));
        } else if self.shared.add((operation, call)) && !self.full.get() {
            let started = threads.len() < MOST && self.start(&mut threads);
            self.full.set(!started);
        }
    }

    fn start(&self, threads: &mut Vec<JoinHandle<()>>) -> bool {
        let shared = self.shared.clone();
        let thread = thread::Builder::new().name("file-calls".into()).stack_size(STACK);
        match without_signals(|| thread.spawn(move || work(&shared))) {
            Ok(thread) => {
                threads.push(thread);
                true
            }
            Err(error) => {
                tracing::debug!(%error, threads = threads.len(), "no more threads for files");
                false
            }
        }
    }

    /// As [`Shared::prepare_sleep`].
    pub(super) fn prepare_sleep(&self) -> bool {
        self.shared.prepare_sleep()
    }

    /// Whether there are completions.
    pub(super) fn has_completions(&self) -> bool {
        !self.shared.state.lock().done.is_empty()
    }

    /// Moves the completions to `done`. The executor is awake then.
    pub(super) fn take(&self, done: &mut Vec<Completion>) {
        self.shared.take(done);
    }
}

/// Has a thread be started that takes no signals, except for its own faults: a write beyond the limit on files then
/// fails with `EFBIG`, and no call is interrupted.
fn without_signals<T>(start: impl FnOnce() -> T) -> T {
    let (mut most, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: the sets are live values, and filled before they are read.
    unsafe {
        libc::sigfillset(most.as_mut_ptr());
        for fault in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL] {
            libc::sigdelset(most.as_mut_ptr(), fault);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, most.as_ptr(), before.as_mut_ptr());
    }
    let started = start();
    // SAFETY: as above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut()) };
    started
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.end();
        for thread in self.threads.take() {
            if thread.join().is_err() {
                tracing::error!("a thread that makes calls on files panicked");
            }
        }
    }
}

#[cfg(all(test, loom))]
mod interleavings {
    use super::*;
    use isobath_sync::{Cell, explore};

    const JOBS: u64 = 2;

    /// A pool, and what each call reads and writes.
    struct Tried {
        shared: Shared,
        memory: [Cell<u8>; JOBS as usize],
    }

    fn tried() -> Tried {
        Tried { shared: Shared::new().unwrap(), memory: [Cell::new(0), Cell::new(0)] }
    }

    /// A thread of the pool, whose calls write to the memory.
    fn work(tried: &Tried) {
        while let Some((operation, Call::Nothing)) = tried.shared.next() {
            tried.memory[operation as usize].set(1);
            tried.shared.finish((operation, 0));
        }
    }

    /// Submits the jobs, sleeps until they are done, and ends the threads.
    fn execute(tried: &Tried) {
        for job in 0..JOBS {
            tried.shared.add((job, Call::Nothing));
        }
        let mut done = Vec::new();
        while done.len() < JOBS as usize {
            if tried.shared.prepare_sleep() {
                tried.shared.bell.wait();
            }
            tried.shared.take(&mut done);
        }
        done.sort_unstable();
        assert_eq!(done, [(0, 0), (1, 0)]);
        assert!(tried.memory.iter().all(|memory| memory.get() == 1));
        tried.shared.end();
    }

    #[test]
    fn every_call_is_made_once_and_its_end_wakes_the_executor() {
        let tasks: &[fn(&Tried)] = &[work, execute];
        explore("Pool, one thread", 5, tried, tasks, |_| ());
        let tasks: &[fn(&Tried)] = &[work, work, execute];
        explore("Pool, two threads", 2, tried, tasks, |_| ());
    }
}
