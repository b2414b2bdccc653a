//! The rights that a keeper needs.

use std::fs;
use std::io;

/// Capabilities, by their numbers in `linux/capability.h`: to give the driver commands, to open its devices whoever
/// owns them, and to look at the descriptors of all processes.
const NEEDED: [(u32, &str); 4] = [
    (ADMIN, "CAP_SYS_ADMIN"),
    (1, "CAP_DAC_OVERRIDE"),
    (2, "CAP_DAC_READ_SEARCH"),
    (19, "CAP_SYS_PTRACE"),
];

/// The capability that servers of devices give up that outlive them.
const ADMIN: u32 = 21;

/// `_LINUX_CAPABILITY_VERSION_3`, with two sets of 32 capabilities.
const VERSION: u32 = 0x2008_0522;

/// `struct __user_cap_header_struct`
#[repr(C)]
struct Header {
    version: u32,
    process: i32,
}

/// `struct __user_cap_data_struct`
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Set {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Gives up all other capabilities of this process, which has one thread, and those that programs could give it.
///
/// # Errors
/// It lacks one that it needs, for users.
pub(super) fn give_up() -> Result<(), String> {
    let failed = || format!("cannot give up capabilities: {}", io::Error::last_os_error());
    // SAFETY: no memory is involved.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } < 0 {
        return Err(failed());
    }
    let sets = held().map_err(|_| failed())?;
    let kept = keep(sets[0].permitted)?;
    let sets = [Set { effective: kept, permitted: kept, inheritable: 0 }, Set::default()];
    hold(sets).map_err(|_| failed())
}

/// The capabilities of this thread.
fn held() -> io::Result<[Set; 2]> {
    let mut header = Header { version: VERSION, process: 0 };
    let mut sets = [Set::default(); 2];
    // SAFETY: the call reads the header, and writes two sets of this version.
    match unsafe { libc::syscall(libc::SYS_capget, &raw mut header, sets.as_mut_ptr()) } {
        0 => Ok(sets),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Lets this thread have only these capabilities, of those that it has.
fn hold(sets: [Set; 2]) -> io::Result<()> {
    let mut header = Header { version: VERSION, process: 0 };
    // SAFETY: the call reads the header and two sets.
    match unsafe { libc::syscall(libc::SYS_capset, &raw mut header, sets.as_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Gives up `CAP_SYS_ADMIN` of this thread, and of those that it starts from now on. The kernel then does not read the
/// partition table of a device while it starts, for which it would hold what removes the device: with a server that is
/// killed meanwhile, for ever, if the device outlives it. Call it when all [keepers](super::Keeper) have been started,
/// which need this right.
///
/// # Errors
/// The kernel refuses it, for users.
pub fn give_up_admin() -> Result<(), String> {
    let without = |set: u32| set & !(1 << ADMIN);
    let done = held().and_then(|[mut low, high]| {
        low.effective = without(low.effective);
        low.permitted = without(low.permitted);
        low.inheritable = without(low.inheritable);
        hold([low, high])
    });
    done.map_err(|error| format!("cannot give up CAP_SYS_ADMIN: {error}"))
}

/// Whether a thread of this process has `CAP_SYS_ADMIN`.
///
/// # Errors
/// It cannot be told.
pub(super) fn is_admin(process: u32) -> io::Result<bool> {
    for thread in fs::read_dir(format!("/proc/{process}/task"))? {
        let status = match fs::read_to_string(thread?.path().join("status")) {
            // It has ended meanwhile.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => continue,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            status => status?,
        };
        let effective = effective(&status).ok_or(io::ErrorKind::InvalidData)?;
        if effective & 1 << ADMIN != 0 {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The effective capabilities in the contents of a `/proc/PID/status`.
fn effective(status: &str) -> Option<u64> {
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(set.trim(), 16).ok()
}

/// What is kept of these capabilities.
fn keep(permitted: u32) -> Result<u32, String> {
    let lacks = NEEDED.iter().filter(|(number, _)| permitted & 1 << number == 0);
    let lacks: Vec<_> = lacks.map(|(_, name)| *name).collect();
    if !lacks.is_empty() {
        return Err(format!(
            "what adds and removes the device needs {}: start the server as root, with these capabilities (see --user)",
            lacks.join(", ")
        ));
    }
    Ok(NEEDED.iter().fold(0, |all, (number, _)| all | 1 << number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_gives_up_a_capability_has_the_others() {
        let status = "Name:\tx\nCapPrm:\t0000000000000000\nCapEff:\t000001ffffffffff\n";
        assert_eq!(effective(status), Some(0x1ff_ffff_ffff));
        assert_eq!((effective("CapEff:\tx"), effective("Name:\tx")), (None, None));
        // Other threads keep theirs.
        let [before, after] = std::thread::spawn(|| {
            let before = held().unwrap()[0].effective;
            give_up_admin().unwrap();
            let own = fs::read_to_string("/proc/thread-self/status").unwrap();
            assert_eq!(effective(&own).unwrap() & 1 << ADMIN, 0);
            [before, held().unwrap()[0].effective]
        })
        .join()
        .unwrap();
        assert_eq!(after, before & !(1 << ADMIN));
        let has = held().unwrap()[0].effective & 1 << ADMIN != 0;
        assert_eq!(is_admin(std::process::id()).unwrap(), has);
        assert!(is_admin(u32::MAX).is_err());
    }

    #[test]
    fn what_is_lacking_is_named_and_nothing_else_is_kept() {
        assert_eq!(keep(u32::MAX), Ok(1 << 1 | 1 << 2 | 1 << 19 | 1 << 21));
        let lacking = keep(!(1 << 19)).unwrap_err();
        assert!(lacking.contains("needs CAP_SYS_PTRACE: start"), "{lacking}");
        assert!(keep(0).unwrap_err().contains("CAP_SYS_ADMIN, CAP_DAC_OVERRIDE"));
    }
}
