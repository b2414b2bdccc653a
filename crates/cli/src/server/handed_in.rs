//! Descriptors that whoever started this program has handed in: those of a service manager (`sd_listen_fds(3)`), which
//! have names, and others, by their numbers.

use crate::failure::Failure;
use isobath_ring::net::{Address, listening_at};
use std::env;
use std::fmt;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::process;
use std::str::FromStr;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The first descriptor of a service manager.
pub(crate) const FIRST: RawFd = 3;
const VARIABLES: [&str; 3] = ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"];

/// A service manager's descriptor.
struct Given {
    name: String,
    number: RawFd,
    /// An option names it.
    wanted: bool,
    taken: bool,
}

static GIVEN: Mutex<Vec<Given>> = Mutex::new(Vec::new());

fn given() -> MutexGuard<'static, Vec<Given>> {
    GIVEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Which descriptors an option names: `NAME` or a number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HandedIn {
    /// All that the service manager calls so.
    Name(String),
    /// Any that this program was started with.
    Number(RawFd),
}

impl FromStr for HandedIn {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Err("missing a descriptor's name or number after 'fd:'".into());
        }
        if !text.bytes().all(|byte| byte.is_ascii_digit()) {
            return Ok(Self::Name(text.to_owned()));
        }
        match text.parse() {
            Ok(number) if number >= FIRST => Ok(Self::Number(number)),
            Ok(_) => {
                Err(format!("descriptor {text} is a standard stream; hand in others, from 3 on"))
            }
            Err(_) => Err(format!("'{text}' is no descriptor's number")),
        }
    }
}

impl fmt::Display for HandedIn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => write!(f, "fd:{name}"),
            Self::Number(number) => write!(f, "fd:{number}"),
        }
    }
}

/// Takes note of the service manager's descriptors, and keeps them and the variables that describe them from children.
/// Call it first, while there is only one thread.
///
/// # Errors
/// The variables are not true.
pub(crate) fn receive() -> Result<(), Failure> {
    let [pid, count, names] = VARIABLES.map(|name| env::var(name).ok());
    for name in VARIABLES {
        // SAFETY: there is no other thread.
        unsafe { env::remove_var(name) };
    }
    let own = process::id().to_string();
    let (Some(_), Some(count)) = (pid.filter(|pid| *pid == own), count) else { return Ok(()) };
    let wrong = |why: &str| Failure::new(format_args!("LISTEN_FDS is '{count}', but {why}"));
    let number: RawFd = count.parse().map_err(|_| wrong("it is the number of descriptors"))?;
    let mut names = names.as_deref().unwrap_or_default().split(':');
    let mut given = Vec::new();
    for number in FIRST..FIRST.saturating_add(number) {
        let name = names.next().filter(|name| !name.is_empty()).unwrap_or("unknown").to_owned();
        if flags(number).is_none() {
            return Err(wrong(&format!("descriptor {number} is not open")));
        }
        close_on_exec(number);
        given.push(Given { name, number, wanted: false, taken: false });
    }
    *self::given() = given;
    Ok(())
}

/// How many descriptors the service manager has handed in.
pub(crate) fn count() -> usize {
    given().len()
}

/// Marks the descriptors that options name, and refuses those that nothing names: whoever connects to one would wait
/// forever.
///
/// # Errors
/// An option names a descriptor that there is not, or there is one that none names.
pub(crate) fn check<'a>(named: impl Iterator<Item = &'a HandedIn>) -> Result<(), Failure> {
    for one in named {
        let numbers = one.numbers()?;
        let mut all = given();
        all.iter_mut()
            .filter(|given| numbers.contains(&given.number))
            .for_each(|given| given.wanted = true);
    }
    match given().iter().find(|given| !given.wanted) {
        Some(Given { name, number, .. }) => Err(Failure::new(format_args!(
            "the service manager has handed in '{name}' (descriptor {number}), which no option names; use it, as in \
             --nbd fd:{number} or --add-fd fd={number},set=1, or leave it out"
        ))),
        None => Ok(()),
    }
}

impl HandedIn {
    /// The numbers of these descriptors.
    ///
    /// # Errors
    /// There are none.
    pub(crate) fn numbers(&self) -> Result<Vec<RawFd>, Failure> {
        let all = given();
        let numbers: Vec<RawFd> = match self {
            Self::Number(number) => {
                let is_given = all.iter().any(|given| given.number == *number && !given.taken);
                let is_there = is_given || is_inherited(*number);
                is_there.then_some(*number).into_iter().collect()
            }
            Self::Name(name) => {
                let named = all.iter().filter(|given| given.name == *name && !given.taken);
                named.map(|given| given.number).collect()
            }
        };
        if numbers.is_empty() {
            let names: Vec<_> = all.iter().map(|given| given.name.as_str()).collect();
            let why = match (self, names.as_slice()) {
                (Self::Number(_), _) => {
                    "it was not open when this program was started, or is used already".to_owned()
                }
                (Self::Name(_), []) => {
                    "no service manager has handed in any (LISTEN_FDS)".to_owned()
                }
                (Self::Name(_), names) => {
                    format!("those handed in are '{}', each to be used once", names.join("', '"))
                }
            };
            return Err(Failure::new(format_args!("there is no descriptor {self}: {why}")));
        }
        Ok(numbers)
    }

    /// Takes the only descriptor of this name or number.
    ///
    /// # Errors
    /// There is none, or there are several.
    pub(crate) fn take(&self) -> Result<OwnedFd, Failure> {
        let numbers = self.numbers()?;
        let [number] = numbers.as_slice() else {
            return Err(Failure::new(format_args!(
                "{} descriptors are called {self}; choose one by its number, as in fd:{}",
                numbers.len(),
                numbers.first().copied().unwrap_or(FIRST)
            )));
        };
        for given in given().iter_mut().filter(|given| given.number == *number) {
            given.taken = true;
        }
        close_on_exec(*number);
        // SAFETY: whoever started this program has opened it, nothing here owns it, and it is not given out again.
        Ok(unsafe { OwnedFd::from_raw_fd(*number) })
    }

    /// Where a socket with this number listens.
    ///
    /// # Errors
    /// There is no such descriptor, or it is no socket to listen on.
    pub(crate) fn address(&self) -> Result<Address, Failure> {
        let numbers = self.numbers()?;
        let mut found = None;
        for number in numbers {
            // SAFETY: the descriptor is open, and stays so until it is taken.
            let socket = unsafe { BorrowedFd::borrow_raw(number) };
            let address = listening_at(socket).map_err(|error| {
                Failure::new(error).context(format_args!("descriptor {number}"))
            })?;
            // Those of one name may be of both kinds: the one that others can reach counts.
            if matches!(address, Address::Tcp(_)) || found.is_none() {
                found = Some(address);
            }
        }
        found.ok_or_else(|| Failure::new(format_args!("there is no descriptor {self}")))
    }
}

/// The flags of a descriptor; `None` if it is not open.
fn flags(number: RawFd) -> Option<libc::c_int> {
    // SAFETY: no memory is involved.
    let flags = unsafe { libc::fcntl(number, libc::F_GETFD) };
    (flags >= 0).then_some(flags)
}

/// Whether the program was started with it: all that it opens itself are closed in children.
fn is_inherited(number: RawFd) -> bool {
    number >= FIRST && flags(number).is_some_and(|flags| flags & libc::FD_CLOEXEC == 0)
}

fn close_on_exec(number: RawFd) {
    // SAFETY: no memory is involved; the descriptor is open, so that the call cannot fail.
    unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_has_a_name_or_a_number() {
        assert_eq!("7".parse(), Ok(HandedIn::Number(7)));
        assert_eq!("vm.socket".parse(), Ok(HandedIn::Name("vm.socket".into())));
        for text in ["", "0", "2", "99999999999"] {
            assert!(text.parse::<HandedIn>().is_err(), "{text}");
        }
    }

    #[test]
    fn what_this_program_opened_itself_is_not_handed_in() {
        let own = std::fs::File::open("/dev/null").unwrap();
        let number = std::os::fd::AsRawFd::as_raw_fd(&own);
        let error = HandedIn::Number(number).take().unwrap_err();
        assert!(error.to_string().contains("was not open"), "{error}");
    }
}
