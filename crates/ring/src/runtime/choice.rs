//! What an executor does its I/O with.

use super::config::{Config, Io};
use super::driver::Backend;
use super::ring::{Refused, Uring};
use super::threads::Threads;
use std::io;

/// The variable that says so where a program does not.
const VARIABLE: &str = "ISOBATH_IO";

/// What does the I/O; if it is threads because there is no ring, also why there is none.
pub(super) type Chosen = (Backend, Option<String>);

/// Whether to try io_uring.
pub(crate) enum Choice {
    /// It, or nothing.
    Ring,
    /// If it is there and permitted.
    Try,
    /// No.
    Threads,
}

/// The choice of a program and of its environment.
pub(crate) fn choice(io: Io) -> io::Result<Choice> {
    match io {
        Io::Ring => return Ok(Choice::Ring),
        Io::Threads => return Ok(Choice::Threads),
        Io::Any => {}
    }
    let Some(value) = std::env::var_os(VARIABLE) else { return Ok(Choice::Try) };
    match value.to_str() {
        Some("io_uring") => Ok(Choice::Ring),
        Some("threads") => Ok(Choice::Threads),
        _ => {
            let text =
                format!("{VARIABLE} is {}: it may be io_uring, threads, or unset", value.display());
            Err(io::Error::new(io::ErrorKind::InvalidInput, text))
        }
    }
}

/// Makes what does the I/O.
pub(super) fn backend(config: &Config) -> io::Result<Chosen> {
    let ring = || Uring::new(config.entries.max(1), config.batch.max(1)).map(Backend::Ring);
    let why = match choice(config.io)? {
        Choice::Ring => return Ok((ring()?, None)),
        Choice::Try => match ring() {
            Ok(ring) => return Ok((ring, None)),
            Err(Refused::Forbidden(why)) => Some(why),
            Err(Refused::Failed(error)) => return Err(error),
        },
        Choice::Threads => None,
    };
    Ok((Backend::Threads(Threads::new()?), why))
}
