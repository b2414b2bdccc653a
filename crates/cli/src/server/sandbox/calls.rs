//! Which system calls a confined server may make, by seccomp.
//!
//! A call that is not allowed fails with `EPERM`, as in a container: the server says so and goes on.

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};
use std::collections::BTreeMap;
use std::env::consts;
use std::process;

/// When a filter applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// While images are opened, sockets bound and threads started.
    Starting,
    /// From then on.
    Serving,
}

/// Calls on descriptors, memory, time and threads, which reach nothing new, and those for files, which Landlock
/// restricts. Where the C library makes a call in one of several forms, by its version, all are here. What nothing in a
/// server calls is not: a test has a list of that.
const ALWAYS: &[libc::c_long] = &[
    // Data of images, logs and devices, with a ring and without.
    libc::SYS_read,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_lseek,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_fallocate,
    libc::SYS_ftruncate,
    libc::SYS_fadvise64,
    libc::SYS_io_uring_enter,
    // A front-end's eventfds are signalled by the ends of reads, which wait for nothing.
    libc::SYS_io_setup,
    libc::SYS_io_submit,
    libc::SYS_io_getevents,
    libc::SYS_io_destroy,
    // Connections that exist.
    libc::SYS_accept4,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_ppoll,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    // Descriptors: copies of those that a front-end sends, locks, wake-ups, the memory for requests in flight.
    libc::SYS_close,
    libc::SYS_dup3,
    libc::SYS_fcntl,
    libc::SYS_flock,
    libc::SYS_eventfd2,
    libc::SYS_pipe2,
    libc::SYS_memfd_create,
    // Files: new images, records of jobs, restart logs, the PID file, the state in /proc and /sys. The directory of
    // restart logs is there; mkdirat() only tells so.
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_fstatfs,
    libc::SYS_statfs,
    libc::SYS_readlinkat,
    libc::SYS_getdents64,
    libc::SYS_getcwd,
    libc::SYS_unlinkat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_mkdirat,
    libc::SYS_fchmod,
    // The modules of the C library's name service look whether files are there.
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    // Memory: the allocator's, guests', stacks and images' files, and whether a thread had to wait for any.
    libc::SYS_getrusage,
    libc::SYS_mincore,
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    // Threads, time and signals.
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_gettimeofday,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
    // About the process and the system. The C library sorts addresses in as much memory as sysinfo() lets it, and its
    // resolver asks for the host's name.
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getrandom,
    libc::SYS_getrlimit,
    libc::SYS_sysinfo,
    libc::SYS_uname,
];

/// The same by their earlier forms, which this processor's kernel still has and C libraries use.
#[cfg(target_arch = "x86_64")]
const EARLIER: &[libc::c_long] = &[
    libc::SYS_open,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_access,
    libc::SYS_readlink,
    libc::SYS_unlink,
    libc::SYS_rename,
    libc::SYS_mkdir,
    libc::SYS_poll,
    libc::SYS_dup2,
    libc::SYS_epoll_wait,
    libc::SYS_time,
    // Loading a module asks for the processor's protection of control flow.
    libc::SYS_arch_prctl,
];
#[cfg(not(target_arch = "x86_64"))]
const EARLIER: &[libc::c_long] = &[];

/// For sockets that are not there yet.
const SOCKETS: &[libc::c_long] = &[
    libc::SYS_socket,
    libc::SYS_connect,
    libc::SYS_bind,
    libc::SYS_listen,
    // The resolver sends its questions with it.
    libc::SYS_sendmmsg,
];

/// For the permissions of new socket files. By name, and no rule of Landlock concerns them.
const PERMISSIONS: &[libc::c_long] = &[
    libc::SYS_fchmodat,
    libc::SYS_fchownat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chmod,
];

/// For rings, of which each thread sets up its own at its start.
const RINGS: &[libc::c_long] = &[libc::SYS_io_uring_setup, libc::SYS_io_uring_register];

/// What is left to the second stage.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Kept {
    /// Making sockets.
    pub(super) sockets: bool,
    /// Notifying the service manager, by a socket made for it.
    pub(super) notifies: bool,
}

/// Restricts this process's calls for good: all of its threads, which must not have been restricted differently.
///
/// # Errors
/// The kernel refuses it.
pub(super) fn restrict(stage: Stage, kept: Kept) -> Result<(), String> {
    let rules = rules(stage, kept).map_err(|error| error.to_string())?;
    apply(rules, SeccompAction::Errno(libc::EPERM as u32), SeccompAction::Allow)?;
    if stage == Stage::Starting {
        // The flags of clone3() are in memory, where no filter sees them. The C library then uses clone().
        let clone = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
        apply(clone, SeccompAction::Allow, SeccompAction::Errno(libc::ENOSYS as u32))?;
    }
    Ok(())
}

fn apply(rules: Rules, otherwise: SeccompAction, action: SeccompAction) -> Result<(), String> {
    let error = |error: &dyn std::fmt::Display| error.to_string();
    let processor = TargetArch::try_from(consts::ARCH).map_err(|reason| error(&reason))?;
    let filter =
        SeccompFilter::new(rules, otherwise, action, processor).map_err(|reason| error(&reason))?;
    let program = BpfProgram::try_from(filter).map_err(|reason| error(&reason))?;
    seccompiler::apply_filter_all_threads(&program).map_err(|reason| error(&reason))
}

/// The allowed calls; with conditions, if one of these is met.
type Rules = BTreeMap<libc::c_long, Vec<SeccompRule>>;

fn rules(stage: Stage, kept: Kept) -> Result<Rules, seccompiler::BackendError> {
    use SeccompCmpOp::{Eq, MaskedEq, Ne};
    let argument = |number, is: SeccompCmpOp, value: u64| {
        SeccompCondition::new(number, SeccompCmpArgLen::Dword, is, value)
    };
    let any = |call: &libc::c_long| (*call, Vec::new());
    let mut rules: Rules = ALWAYS.iter().chain(EARLIER).map(any).collect();
    // Queried by clone()'s caller too; see `restrict`.
    rules.insert(libc::SYS_clone3, Vec::new());
    let thread = libc::CLONE_THREAD as u64;
    let thread = SeccompRule::new(vec![argument(0, MaskedEq(thread), thread)?])?;
    rules.insert(libc::SYS_clone, vec![thread]);
    // Signals to this process, such as abort()'s.
    let own = u64::from(process::id());
    for call in [libc::SYS_tgkill, libc::SYS_kill] {
        rules.insert(call, vec![SeccompRule::new(vec![argument(0, Eq, own)?])?]);
    }
    // Nothing can be typed at the terminal that the server was started from.
    let typed = [libc::TIOCSTI, libc::TIOCLINUX].map(|request| argument(1, Ne, request));
    let typed = typed.into_iter().collect::<Result<_, _>>()?;
    rules.insert(libc::SYS_ioctl, vec![SeccompRule::new(typed)?]);
    let names = [libc::PR_SET_NAME, libc::PR_SET_VMA]
        .map(|option| SeccompRule::new(vec![argument(0, Eq, option as u64)?]));
    rules.insert(libc::SYS_prctl, names.into_iter().collect::<Result<_, _>>()?);
    // Limits of this process: number 0.
    rules.insert(libc::SYS_prlimit64, vec![SeccompRule::new(vec![argument(0, Eq, 0)?])?]);
    if stage == Stage::Starting {
        rules.extend(RINGS.iter().map(any));
        // The next filter.
        rules.insert(libc::SYS_seccomp, Vec::new());
        rules.remove(&libc::SYS_prctl);
        rules.insert(libc::SYS_prctl, Vec::new());
    }
    if stage == Stage::Starting || kept.sockets {
        rules.extend(SOCKETS.iter().chain(PERMISSIONS).map(any));
    } else if kept.notifies {
        let (domain, kind) = (libc::AF_UNIX as u64, libc::SOCK_DGRAM as u64);
        let socket = vec![argument(0, Eq, domain)?, argument(1, MaskedEq(0xf), kind)?];
        rules.insert(libc::SYS_socket, vec![SeccompRule::new(socket)?]);
    }
    Ok(rules)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What programs often call, and nothing in a server does.
    const UNUSED: &[libc::c_long] = &[
        libc::SYS_splice,
        libc::SYS_tee,
        libc::SYS_sendfile,
        libc::SYS_copy_file_range,
        libc::SYS_sync_file_range,
        libc::SYS_readv,
        libc::SYS_truncate,
        libc::SYS_pselect6,
        libc::SYS_dup,
        libc::SYS_socketpair,
        libc::SYS_timerfd_create,
        libc::SYS_timerfd_settime,
        libc::SYS_linkat,
        libc::SYS_symlinkat,
        libc::SYS_mknodat,
        libc::SYS_fchown,
        libc::SYS_umask,
        libc::SYS_fgetxattr,
        libc::SYS_fsetxattr,
        libc::SYS_flistxattr,
        libc::SYS_msync,
        libc::SYS_membarrier,
        libc::SYS_set_tid_address,
        libc::SYS_clock_getres,
        libc::SYS_rt_sigtimedwait,
    ];

    #[test]
    fn what_nothing_in_a_server_calls_is_denied() {
        let all = Kept { sockets: true, notifies: true };
        for stage in [Stage::Starting, Stage::Serving] {
            let rules = rules(stage, all).unwrap();
            for call in UNUSED {
                assert!(!rules.contains_key(call), "{call}");
            }
        }
    }

    #[test]
    fn programs_are_never_executed_and_sockets_are_made_by_who_needs_them() {
        let all = Kept { sockets: true, notifies: true };
        let none = Kept::default();
        let has = |stage, kept, call| rules(stage, kept).unwrap().contains_key(&call);
        for stage in [Stage::Starting, Stage::Serving] {
            for call in [libc::SYS_execve, libc::SYS_execveat, libc::SYS_ptrace, libc::SYS_mount] {
                assert!(!has(stage, all, call), "{call}");
            }
            assert!(has(stage, all, libc::SYS_connect));
        }
        for call in SOCKETS.iter().chain(PERMISSIONS).chain(RINGS).chain(&[libc::SYS_seccomp]) {
            assert!(has(Stage::Starting, none, *call));
            assert!(!has(Stage::Serving, none, *call));
        }
        let notifies = Kept { notifies: true, ..none };
        assert!(has(Stage::Serving, notifies, libc::SYS_socket));
        assert!(!has(Stage::Serving, notifies, libc::SYS_connect));
    }
}
