//! Runs a program by ptrace, and interferes with one of the system calls that touch its files.
//!
//! A seccomp filter lets only calls of interest stop, so a traced program is nearly as fast as any. Entries of an
//! io_uring count as calls of their own: see [`ring`](super::ring).

use super::ring::{Entry, Rings};
use isobath_testkit::process::Finished;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::mem::MaybeUninit;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::ptr;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

/// A traced program that takes longer hangs.
const PATIENCE: Duration = Duration::from_mins(1);

/// What a call does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Open,
    Read,
    Write,
    Sync,
    /// Changes how much of a file there is.
    Allocate,
    /// Changes a directory.
    Name,
    Attribute,
    Lock,
    /// Cannot fail in a way that matters: a close, or a lock that is given up.
    Release,
}

/// A call on a file of the test.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) kind: Kind,
    /// How many bytes it writes; 0 if it writes none.
    pub(super) length: u64,
    /// The call as text, for messages.
    pub(super) text: String,
}

/// What happens at the chosen call.
pub(super) enum Deed<'a> {
    Nothing,
    /// The program is killed before the call is made.
    Kill,
    /// The call writes the first half of its pages; then the program is killed.
    Tear,
    /// The call fails with this error.
    Fail(i32),
    /// The program gets this signal before the call is made.
    Signal(i32),
    /// All threads are held while this runs.
    Hold(&'a mut dyn FnMut()),
    /// This runs before each call.
    Watch(&'a mut dyn FnMut(&Call)),
}

/// A program that has ended.
pub(super) struct Traced {
    /// The calls that it made, up to the chosen one if it was killed there.
    pub(super) calls: Vec<Call>,
    pub(super) finished: Finished,
    /// It was killed because it took too long.
    pub(super) hung: bool,
}

/// Runs a command in a directory, and does the deed at call number `at`.
pub(super) fn trace(directory: &Path, command: &mut Command, at: usize, deed: Deed<'_>) -> Traced {
    let mut outputs = [0; 2].map(|_| tempfile::tempfile().expect("a temporary file"));
    let [out, err] = &outputs;
    command.current_dir(directory).stdin(Stdio::null());
    command.stdout(out.try_clone().unwrap()).stderr(err.try_clone().unwrap());
    let filter = filter();
    let begin = move || begin(&filter);
    // SAFETY: `begin` only makes system calls.
    unsafe { command.pre_exec(begin) };
    #[expect(clippy::zombie_processes, reason = "the tracer waits for it, as for its threads")]
    let child = command.spawn().expect("start the traced program");
    let leader = child.id() as libc::pid_t;
    let (ended, watched) = mpsc::channel::<()>();
    let watchdog = thread::spawn(move || {
        let hung = watched.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout);
        if hung {
            send(leader, libc::SIGKILL);
        }
        hung
    });
    let mut tracer = Tracer {
        directory: directory.canonicalize().unwrap(),
        leader,
        rings: Rings::default(),
        threads: BTreeSet::new(),
        held: Vec::new(),
        stopping: BTreeSet::new(),
        at,
        deed,
        doomed: false,
        calls: Vec::new(),
    };
    let status = tracer.run();
    drop(ended);
    let hung = watchdog.join().unwrap();
    let [stdout, stderr] = outputs.each_mut().map(contents);
    let finished = Finished {
        command: format!("{command:?}"),
        status,
        stdout,
        stderr: String::from_utf8_lossy(&stderr).into_owned(),
    };
    Traced { calls: tracer.calls, finished, hung }
}

fn contents(file: &mut File) -> Vec<u8> {
    let mut bytes = Vec::new();
    file.rewind().unwrap();
    file.read_to_end(&mut bytes).unwrap();
    bytes
}

fn send(process: libc::pid_t, signal: i32) {
    // SAFETY: kill takes two integers; the caller has not reaped the process yet.
    unsafe { libc::kill(process, signal) };
}

/// In the child, before the program begins: it is traced, by the thread that started it, and filtered.
fn begin(filter: &[libc::sock_filter]) -> io::Result<()> {
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: the filter is only read, and lives until the calls return.
    let done = unsafe {
        libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
    };
    if done { Ok(()) } else { Err(io::Error::last_os_error()) }
}

const CALLS: [i64; 31] = [
    libc::SYS_openat,
    libc::SYS_open,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_write,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_copy_file_range,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_sync_file_range,
    libc::SYS_fallocate,
    libc::SYS_ftruncate,
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_unlink,
    libc::SYS_unlinkat,
    libc::SYS_link,
    libc::SYS_linkat,
    libc::SYS_symlink,
    libc::SYS_mkdir,
    libc::SYS_fsetxattr,
    libc::SYS_fremovexattr,
    libc::SYS_ioctl,
    libc::SYS_flock,
    libc::SYS_close,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
];

/// Stops [`CALLS`], OFD locks, and what maps shared memory, such as a ring.
fn filter() -> Vec<libc::sock_filter> {
    // Offsets within `seccomp_data`: the call's number, and the lower half of an argument.
    let argument = |number: u32| 16 + 8 * number;
    let load = |offset: u32| (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, offset);
    let equal =
        |value: i64, yes, no| (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, yes, no, value as u32);
    let any =
        |bits: i32, yes, no| (libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K, yes, no, bits as u32);
    let end = |action: u32| (libc::BPF_RET | libc::BPF_K, 0, 0, action);
    let (stop, pass) = (end(libc::SECCOMP_RET_TRACE), end(libc::SECCOMP_RET_ALLOW));
    let mut code = vec![load(0)];
    for call in CALLS {
        code.extend([equal(call, 0, 1), stop]);
    }
    code.extend([equal(libc::SYS_fcntl, 0, 4), load(argument(1))]);
    code.extend([equal(libc::F_OFD_SETLK.into(), 0, 1), stop, pass]);
    code.extend([
        equal(libc::SYS_mmap, 0, 3),
        load(argument(3)),
        any(libc::MAP_SHARED, 0, 1),
        stop,
    ]);
    code.push(pass);
    let instruction =
        |(code, jt, jf, k): (u32, u8, u8, u32)| libc::sock_filter { code: code as u16, jt, jf, k };
    code.into_iter().map(instruction).collect()
}

struct Tracer<'a> {
    directory: PathBuf,
    leader: libc::pid_t,
    rings: Rings,
    threads: BTreeSet<libc::pid_t>,
    /// Stops of threads that were held, to be handled afterwards.
    held: Vec<(libc::pid_t, i32)>,
    /// Threads to which a SIGSTOP is on its way that is not for the program.
    stopping: BTreeSet<libc::pid_t>,
    at: usize,
    deed: Deed<'a>,
    /// The program is to be killed when its call ends.
    doomed: bool,
    calls: Vec<Call>,
}

impl Tracer<'_> {
    /// Traces the program to its end.
    fn run(&mut self) -> ExitStatus {
        let (_, first) = wait(self.leader).expect("the program starts");
        assert!(libc::WIFSTOPPED(first), "the program ended before it began: {first:#x}");
        self.threads.insert(self.leader);
        let options = libc::PTRACE_O_TRACESECCOMP
            | libc::PTRACE_O_TRACECLONE
            | libc::PTRACE_O_TRACEFORK
            | libc::PTRACE_O_TRACEVFORK
            | libc::PTRACE_O_TRACESYSGOOD
            | libc::PTRACE_O_EXITKILL;
        request(libc::PTRACE_SETOPTIONS, self.leader, options as usize);
        request(libc::PTRACE_CONT, self.leader, 0);
        loop {
            let (thread, status) = self.held.pop().or_else(|| wait(-1)).expect("the program's end");
            if !libc::WIFSTOPPED(status) {
                self.threads.remove(&thread);
                if thread == self.leader {
                    return ExitStatus::from_raw(status);
                }
                continue;
            }
            self.stopped(thread, status);
        }
    }

    fn stopped(&mut self, thread: libc::pid_t, status: i32) {
        let is_new = self.threads.insert(thread);
        match (libc::WSTOPSIG(status), status >> 16) {
            (libc::SIGTRAP, libc::PTRACE_EVENT_SECCOMP) => {
                let Some(mut registers) = registers(thread) else { return };
                if self.entered(thread, &mut registers) {
                    request(libc::PTRACE_SYSCALL, thread, 0);
                } else {
                    request(libc::PTRACE_CONT, thread, 0);
                }
            }
            (libc::SIGTRAP, _) => request(libc::PTRACE_CONT, thread, 0),
            // A call has ended that a ring is made by, or the last one before the program is killed.
            (signal, _) if signal == libc::SIGTRAP | 0x80 => {
                if self.doomed {
                    send(self.leader, libc::SIGKILL);
                } else if let Some(registers) = registers(thread) {
                    self.rings.made(thread, &registers);
                }
                request(libc::PTRACE_CONT, thread, 0);
            }
            (libc::SIGSTOP, _) if is_new || self.stopping.remove(&thread) => {
                request(libc::PTRACE_CONT, thread, 0);
            }
            (signal, _) => request(libc::PTRACE_CONT, thread, signal as usize),
        }
    }

    /// A call is about to be made. Returns whether its end is of interest.
    fn entered(&mut self, thread: libc::pid_t, registers: &mut libc::user_regs_struct) -> bool {
        match registers.orig_rax as i64 {
            libc::SYS_mmap | libc::SYS_io_uring_setup => return true,
            libc::SYS_io_uring_enter => return self.submitted(thread, registers),
            _ => {}
        }
        let Some(call) = self.describe(thread, registers) else { return false };
        if let Deed::Watch(watch) = &mut self.deed {
            watch(&call);
        }
        if !self.note(call) {
            return false;
        }
        match &mut self.deed {
            Deed::Nothing | Deed::Watch(_) => {}
            Deed::Kill => send(self.leader, libc::SIGKILL),
            Deed::Signal(signal) => send(self.leader, *signal),
            Deed::Tear => {
                registers.rdx = half(registers.rdx);
                set_registers(thread, registers);
                self.doomed = true;
            }
            Deed::Fail(error) => {
                registers.orig_rax = u64::MAX;
                registers.rax = i64::from(-*error) as u64;
                set_registers(thread, registers);
            }
            Deed::Hold(_) => self.hold(thread),
        }
        self.doomed
    }

    /// Entries are about to be submitted to a ring.
    fn submitted(&mut self, thread: libc::pid_t, registers: &mut libc::user_regs_struct) -> bool {
        let entries = self.rings.entries(thread, registers);
        for (number, mut entry) in entries.into_iter().enumerate() {
            let Some(call) = self.entry(&entry) else { continue };
            if !self.note(call) {
                continue;
            }
            match &mut self.deed {
                Deed::Nothing | Deed::Watch(_) => {}
                Deed::Kill if number == 0 => send(self.leader, libc::SIGKILL),
                Deed::Signal(signal) => send(self.leader, *signal),
                Deed::Kill | Deed::Tear => {
                    let tears = matches!(self.deed, Deed::Tear);
                    if tears {
                        entry.shorten(half(entry.length()) as u32);
                    }
                    // It submits those before, and does not wait for what would wake it.
                    registers.rsi = number as u64 + u64::from(tears);
                    registers.rdx = 0;
                    set_registers(thread, registers);
                    self.doomed = true;
                    return true;
                }
                Deed::Fail(error) => entry.fail(*error),
                Deed::Hold(_) => self.hold(thread),
            }
        }
        false
    }

    /// Counts a call. Returns whether it is the chosen one.
    fn note(&mut self, call: Call) -> bool {
        self.calls.push(call);
        self.calls.len() - 1 == self.at
    }

    /// Runs what is to be run while no thread does.
    fn hold(&mut self, thread: libc::pid_t) {
        for other in self.threads.clone() {
            if other == thread {
                continue;
            }
            // SAFETY: tgkill takes integers; the thread is not reaped yet, so the id is its own.
            unsafe { libc::syscall(libc::SYS_tgkill, self.leader, other, libc::SIGSTOP) };
            // If something else stops it first, the signal comes later.
            self.stopping.insert(other);
            self.held.extend(wait(other));
        }
        if let Deed::Hold(meanwhile) = &mut self.deed {
            meanwhile();
        }
    }

    fn path_of(&self, descriptor: u64) -> Option<String> {
        let path = fs::read_link(format!("/proc/{}/fd/{}", self.leader, descriptor as i32)).ok()?;
        // Others, such as a pipe, have no path.
        if path.is_absolute() { self.own(&path) } else { None }
    }

    /// The name of a file of the test.
    fn own(&self, path: &Path) -> Option<String> {
        let path = self.directory.join(path);
        let name = path.strip_prefix(&self.directory).ok()?;
        Some(name.to_string_lossy().into_owned())
    }

    fn describe(&self, thread: libc::pid_t, registers: &libc::user_regs_struct) -> Option<Call> {
        let user = registers;
        let on = |descriptor: u64| self.path_of(descriptor);
        let named = |address: u64| self.own(Path::new(&text_at(thread, address)?));
        // In the directory that a descriptor stands for.
        let within = |directory: u64, address: u64| {
            let name = text_at(thread, address)?;
            let link = format!("/proc/{}/fd/{}", self.leader, directory as i32);
            let here = directory as i32 == libc::AT_FDCWD || Path::new(&name).is_absolute();
            let directory = if here { PathBuf::new() } else { fs::read_link(link).ok()? };
            self.own(&directory.join(name))
        };
        let call = |kind, length, what: &str, name: Option<String>| {
            name.map(|name| Call { kind, length, text: format!("{what} {name}") })
        };
        match registers.orig_rax as i64 {
            libc::SYS_openat => {
                call(Kind::Open, 0, &format!("openat {:#x}", user.rdx), within(user.rdi, user.rsi))
            }
            libc::SYS_open => {
                call(Kind::Open, 0, &format!("open {:#x}", user.rsi), named(user.rdi))
            }
            libc::SYS_pread64 | libc::SYS_preadv | libc::SYS_preadv2 => {
                call(Kind::Read, 0, &format!("pread at {:#x}", user.r10), on(user.rdi))
            }
            libc::SYS_write | libc::SYS_pwrite64 => {
                let what = format!("pwrite {:#x} at {:#x}", user.rdx, user.r10);
                call(Kind::Write, user.rdx, &what, on(user.rdi))
            }
            libc::SYS_pwritev | libc::SYS_pwritev2 => {
                call(Kind::Write, 0, &format!("pwritev at {:#x}", user.r10), on(user.rdi))
            }
            libc::SYS_copy_file_range => {
                call(Kind::Write, 0, &format!("copy_file_range {:#x}", user.r8), on(user.rdx))
            }
            libc::SYS_fsync | libc::SYS_fdatasync | libc::SYS_sync_file_range => {
                call(Kind::Sync, 0, "sync", on(user.rdi))
            }
            libc::SYS_fallocate => {
                let what = format!("fallocate {:#x}, {:#x} at {:#x}", user.rsi, user.r10, user.rdx);
                call(Kind::Allocate, 0, &what, on(user.rdi))
            }
            libc::SYS_ftruncate => {
                call(Kind::Allocate, 0, &format!("ftruncate {:#x}", user.rsi), on(user.rdi))
            }
            libc::SYS_rename | libc::SYS_link => {
                call(Kind::Name, 0, "rename or link", named(user.rdi))
            }
            libc::SYS_renameat | libc::SYS_renameat2 => {
                call(Kind::Name, 0, "renameat", within(user.rdi, user.rsi))
            }
            libc::SYS_linkat | libc::SYS_symlink => call(Kind::Name, 0, "linkat", named(user.r10)),
            libc::SYS_unlink | libc::SYS_mkdir => {
                call(Kind::Name, 0, "unlink or mkdir", named(user.rdi))
            }
            libc::SYS_unlinkat => call(Kind::Name, 0, "unlinkat", within(user.rdi, user.rsi)),
            libc::SYS_fsetxattr | libc::SYS_fremovexattr => {
                call(Kind::Attribute, 0, "fsetxattr", on(user.rdi))
            }
            libc::SYS_ioctl => {
                call(Kind::Release, 0, &format!("ioctl {:#x}", user.rsi), on(user.rdi))
            }
            libc::SYS_flock => call(Kind::Lock, 0, "flock", on(user.rdi)),
            libc::SYS_fcntl => {
                let mut lock = [0; 32];
                read(thread, user.rdx, &mut lock);
                let [kind, _, ..] = lock;
                let start = u64::from_ne_bytes(lock[8..16].try_into().unwrap());
                let releases = i32::from(kind) == libc::F_UNLCK;
                let what = if releases { "unlock" } else { "lock" };
                let kind = if releases { Kind::Release } else { Kind::Lock };
                call(kind, 0, &format!("{what} {start}"), on(user.rdi))
            }
            libc::SYS_close => call(Kind::Release, 0, "close", on(user.rdi)),
            _ => None,
        }
    }

    fn entry(&self, entry: &Entry) -> Option<Call> {
        let name = self.path_of(entry.descriptor())?;
        let (kind, what) = entry.operation()?;
        let length = if kind == Kind::Write { entry.length() } else { 0 };
        let text = format!("ring: {what} {:#x} at {:#x} {name}", entry.length(), entry.offset());
        Some(Call { kind, length, text })
    }
}

/// The first half of what is to be written, in whole pages.
fn half(length: u64) -> u64 {
    (length / 2).next_multiple_of(4096)
}

/// Waits for a thread of a program that this thread traces; -1 is any. `None` if there is none.
fn wait(thread: libc::pid_t) -> Option<(libc::pid_t, i32)> {
    let mut status = 0;
    loop {
        // SAFETY: `status` is valid for the call.
        let found =
            unsafe { libc::waitpid(thread, &raw mut status, libc::__WALL | libc::__WNOTHREAD) };
        if found > 0 {
            return Some((found, status));
        }
        if io::Error::last_os_error().raw_os_error() != Some(libc::EINTR) {
            return None;
        }
    }
}

/// A request without an answer. It fails if the thread has just been killed, which the next wait tells.
fn request(what: libc::c_uint, thread: libc::pid_t, data: usize) {
    // SAFETY: the requests used here take an integer.
    unsafe { libc::ptrace(what, thread, 0, data) };
}

fn registers(thread: libc::pid_t) -> Option<libc::user_regs_struct> {
    let mut registers = MaybeUninit::<libc::user_regs_struct>::uninit();
    // SAFETY: the kernel fills the registers in, if it returns 0.
    unsafe {
        let to = registers.as_mut_ptr();
        (libc::ptrace(libc::PTRACE_GETREGS, thread, 0, to) == 0).then(|| registers.assume_init())
    }
}

fn set_registers(thread: libc::pid_t, registers: &libc::user_regs_struct) {
    // SAFETY: the registers are valid for the call.
    unsafe { libc::ptrace(libc::PTRACE_SETREGS, thread, 0, ptr::from_ref(registers)) };
}

fn memory(address: u64, length: usize) -> libc::iovec {
    libc::iovec { iov_base: ptr::without_provenance_mut(address as usize), iov_len: length }
}

/// Reads a program's memory. Returns how much could be read.
pub(super) fn read(thread: libc::pid_t, address: u64, to: &mut [u8]) -> usize {
    let local = libc::iovec { iov_base: to.as_mut_ptr().cast(), iov_len: to.len() };
    let remote = memory(address, to.len());
    // SAFETY: `local` is valid for the call; the kernel checks `remote`.
    let length =
        unsafe { libc::process_vm_readv(thread, &raw const local, 1, &raw const remote, 1, 0) };
    length.try_into().unwrap_or(0)
}

/// Changes a program's memory.
pub(super) fn write(thread: libc::pid_t, address: u64, from: &[u8]) {
    let local = libc::iovec { iov_base: from.as_ptr().cast_mut().cast(), iov_len: from.len() };
    let remote = memory(address, from.len());
    // SAFETY: `local` is valid for the call and only read; the kernel checks `remote`.
    let length =
        unsafe { libc::process_vm_writev(thread, &raw const local, 1, &raw const remote, 1, 0) };
    assert_eq!(length, from.len() as isize, "the program's memory can be changed");
}

/// A name in a program's memory.
fn text_at(thread: libc::pid_t, address: u64) -> Option<String> {
    let mut bytes = vec![0; 512];
    let length = read(thread, address, &mut bytes);
    let bytes = bytes.get(..length)?;
    let end = bytes.iter().position(|byte| *byte == 0)?;
    Some(String::from_utf8_lossy(&bytes[..end]).into_owned())
}
