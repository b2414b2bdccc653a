//! The user that a server becomes.

use crate::failure::Failure;
use std::ffi::CString;
use std::io;
use std::ptr;

/// The longest entry of a user.
const LONGEST: usize = 1 << 20;

/// A user of the system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct User {
    number: u32,
    /// The name and the main group, if the system knows the user.
    known: Option<(CString, u32)>,
}

impl User {
    /// The user's number.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }
}

/// A user, by name or number.
///
/// # Errors
/// There is no user of that name, or the system cannot be asked.
pub(crate) fn parse(text: &str) -> Result<User, String> {
    let none = || format!("there is no user '{text}'");
    if let Ok(number) = text.parse::<u32>() {
        // The greatest number means none.
        return if number == u32::MAX { Err(none()) } else { of_number(number) };
    }
    let name = CString::new(text).map_err(|_| "a user's name has no NUL".to_owned())?;
    let found = ask(|entry, space, found| {
        // SAFETY: `name` ends with NUL, `space` has the length given, and the other pointers are to live values.
        unsafe { libc::getpwnam_r(name.as_ptr(), entry, space.as_mut_ptr(), space.len(), found) }
    })?;
    let (number, group, name) = found.ok_or_else(none)?;
    Ok(User { number, known: Some((name, group)) })
}

fn of_number(number: u32) -> Result<User, String> {
    let found = ask(|entry, space, found| {
        // SAFETY: as for a name.
        unsafe { libc::getpwuid_r(number, entry, space.as_mut_ptr(), space.len(), found) }
    })?;
    Ok(User { number, known: found.map(|(_, group, name)| (name, group)) })
}

/// The number, main group and name that one of the C library's functions finds.
fn ask(
    call: impl Fn(*mut libc::passwd, &mut [libc::c_char], *mut *mut libc::passwd) -> i32,
) -> Result<Option<(u32, u32, CString)>, String> {
    let mut space = vec![0; 1 << 10];
    loop {
        // SAFETY: all zeroes are a valid `passwd`: null pointers and the number 0.
        let mut entry: libc::passwd = unsafe { std::mem::zeroed() };
        let mut found = ptr::null_mut();
        match call(&raw mut entry, &mut space, &raw mut found) {
            0 if found.is_null() => return Ok(None),
            0 => {
                // SAFETY: the entry was found, so its name is a string in `space`.
                let name = unsafe { std::ffi::CStr::from_ptr(entry.pw_name) }.to_owned();
                return Ok(Some((entry.pw_uid, entry.pw_gid, name)));
            }
            libc::ERANGE if space.len() < LONGEST => space.resize(space.len() * 2, 0),
            libc::EINTR => {}
            error => return Err(io::Error::from_raw_os_error(error).to_string()),
        }
    }
}

/// Becomes this user, in its groups or in `group` only. Nothing can be regained.
///
/// # Errors
/// The process may not, or a user that the system does not know has no group.
pub(super) fn become_one(user: Option<&User>, group: Option<u32>) -> Result<(), Failure> {
    let main = match (user, group) {
        (None, None) => return Ok(()),
        (_, Some(group)) => group,
        (Some(User { known: Some((_, group)), .. }), None) => *group,
        (Some(User { number, .. }), None) => {
            return Err(Failure::new(format_args!(
                "the system does not know user {number}; give its group with --group"
            )));
        }
    };
    let done = |result: i32, what: &str| match result {
        0 => Ok(()),
        _ => Err(Failure::new(isobath_storage::cause(&io::Error::last_os_error()))
            .context(format_args!("cannot {what}"))),
    };
    // SAFETY: the pointers are to live values, of which the lengths are right.
    unsafe {
        match (user, group) {
            (Some(User { known: Some((name, _)), .. }), None) => {
                done(libc::initgroups(name.as_ptr(), main), "join the groups of --user")?;
            }
            _ => done(libc::setgroups(1, &raw const main), "leave the groups of this user")?,
        }
        done(libc::setresgid(main, main, main), "join the group")?;
        if let Some(user) = user {
            let number = user.number;
            done(libc::setresuid(number, number, number), "become --user")?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_has_a_name_or_a_number() {
        let root = User { number: 0, known: Some((c"root".into(), 0)) };
        assert_eq!(parse("root"), Ok(root.clone()));
        assert_eq!(parse("0"), Ok(root));
        assert_eq!(parse("3999999999"), Ok(User { number: 3_999_999_999, known: None }));
        for text in ["no such user", "", "4294967295", "a\0b", "-1"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn an_unknown_user_needs_a_group() {
        assert!(become_one(Some(&User { number: 3_999_999_999, known: None }), None).is_err());
    }
}
