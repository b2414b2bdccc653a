//! Programs to which the kernel refuses system calls, as it does in many containers.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// The system calls of io_uring.
pub const IO_URING: &[i64] =
    &[libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register];

/// The system calls that start threads.
pub const THREADS: &[i64] = &[libc::SYS_clone, libc::SYS_clone3];

/// Makes `calls` of a program fail with `error`, by a seccomp filter.
///
/// # Panics
/// When the program is started, if it cannot have the filter.
pub fn forbid<'a>(command: &'a mut Command, calls: &[i64], error: i32) -> &'a mut Command {
    let filter = filter(calls, error);
    // SAFETY: between fork and exec there are only system calls.
    unsafe { command.pre_exec(move || install(&filter)) }
}

/// The filter's program: it compares the call's number with each of the list.
fn filter(calls: &[i64], error: i32) -> Vec<libc::sock_filter> {
    let step =
        |code: u32, jump: u8, k: u32| libc::sock_filter { code: code as u16, jt: jump, jf: 0, k };
    // `seccomp_data` begins with the number.
    let load = step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0);
    let compare = |(at, call): (usize, &i64)| {
        let to_the_error = calls.len() - at;
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, to_the_error as u8, *call as u32)
    };
    let allow = step(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW);
    let refuse = step(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ERRNO | error as u32);
    let compared = calls.iter().enumerate().map(compare);
    [load].into_iter().chain(compared).chain([allow, refuse]).collect()
}

fn install(filter: &[libc::sock_filter]) -> io::Result<()> {
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: the program is valid, and only read.
    let set = || unsafe {
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
    };
    // Without privileges of its own, a process must give up those that it could gain.
    // SAFETY: a plain system call.
    let allowed =
        || unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1_u64, 0_u64, 0_u64, 0_u64) == 0 };
    if set() || (allowed() && set()) { Ok(()) } else { Err(io::Error::last_os_error()) }
}
