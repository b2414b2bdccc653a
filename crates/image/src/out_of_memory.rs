//! The error of a limit on memory.

use std::fmt;

/// Less memory is left than something may take.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{what} may take {} of memory, but of the limit of {} only {} are left; raise the memory limit, \
     or serve less",
    Mebibytes(*.needed),
    Mebibytes(*.limit),
    Mebibytes(*.left)
)]
pub struct OutOfMemory {
    /// What may take it.
    pub what: String,
    /// How many bytes.
    pub needed: u64,
    /// The limit in bytes.
    pub limit: u64,
    /// Bytes of it that are not reserved.
    pub left: u64,
}

/// A number of bytes, for messages.
struct Mebibytes(u64);

impl fmt::Display for Mebibytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} MiB", self.0 as f64 / f64::from(1 << 20))
    }
}
