//! The rights that a keeper needs.

use std::io;

/// Capabilities, by their numbers in `linux/capability.h`: to give the driver commands, to open its devices whoever
/// owns them, and to look at the descriptors of all processes.
const NEEDED: [(u32, &str); 4] = [
    (21, "CAP_SYS_ADMIN"),
    (1, "CAP_DAC_OVERRIDE"),
    (2, "CAP_DAC_READ_SEARCH"),
    (19, "CAP_SYS_PTRACE"),
];

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
    let mut header = Header { version: VERSION, process: 0 };
    let mut sets = [Set::default(); 2];
    // SAFETY: the call reads the header, and writes two sets of this version.
    if unsafe { libc::syscall(libc::SYS_capget, &raw mut header, sets.as_mut_ptr()) } < 0 {
        return Err(failed());
    }
    let kept = keep(sets[0].permitted)?;
    let sets = [Set { effective: kept, permitted: kept, inheritable: 0 }, Set::default()];
    // SAFETY: the call reads the header and two sets.
    if unsafe { libc::syscall(libc::SYS_capset, &raw mut header, sets.as_ptr()) } < 0 {
        return Err(failed());
    }
    Ok(())
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
    fn what_is_lacking_is_named_and_nothing_else_is_kept() {
        assert_eq!(keep(u32::MAX), Ok(1 << 1 | 1 << 2 | 1 << 19 | 1 << 21));
        let lacking = keep(!(1 << 19)).unwrap_err();
        assert!(lacking.contains("needs CAP_SYS_PTRACE: start"), "{lacking}");
        assert!(keep(0).unwrap_err().contains("CAP_SYS_ADMIN, CAP_DAC_OVERRIDE"));
    }
}
