//! Groups of users.

use std::ffi::CString;
use std::io;
use std::ptr;

/// The longest entry of a group, with its members.
const LONGEST: usize = 1 << 24;

/// The number of a group, from its name or number.
///
/// # Errors
/// There is no group of that name, or the system cannot be asked.
pub(crate) fn parse(text: &str) -> Result<u32, String> {
    if let Ok(number) = text.parse::<u32>() {
        // The greatest number means none.
        return if number == u32::MAX { Err("there is no such group".into()) } else { Ok(number) };
    }
    let name = CString::new(text).map_err(|_| "a group's name has no NUL".to_owned())?;
    let mut space = vec![0; 1 << 10];
    loop {
        // SAFETY: all zeroes are a valid `group`: null pointers and the number 0.
        let mut entry: libc::group = unsafe { std::mem::zeroed() };
        let mut found = ptr::null_mut();
        // SAFETY: `name` ends with NUL, `space` has the length given, and the other pointers are to live values.
        let error = unsafe {
            libc::getgrnam_r(
                name.as_ptr(),
                &raw mut entry,
                space.as_mut_ptr(),
                space.len(),
                &raw mut found,
            )
        };
        match error {
            0 if found.is_null() => return Err(format!("there is no group '{text}'")),
            0 => return Ok(entry.gr_gid),
            libc::ERANGE if space.len() < LONGEST => space.resize(space.len() * 2, 0),
            libc::EINTR => {}
            error => return Err(io::Error::from_raw_os_error(error).to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_has_a_name_or_a_number() {
        assert_eq!(parse("root"), Ok(0));
        assert_eq!(parse("12345"), Ok(12345));
        for text in ["no such group", "", "4294967295", "a\0b"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
