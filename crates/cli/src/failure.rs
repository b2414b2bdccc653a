//! How a command fails.

use isobath_disk::DiskError;
use isobath_storage::{StorageError, lock};
use std::fmt;
use std::io;

/// The exit code of a command that completed: 0, or one that its `--help` explains.
pub(crate) type Outcome = Result<u8, Failure>;

/// Why a command failed: printed as `isobath: MESSAGE` on stderr.
#[derive(Debug)]
pub(crate) struct Failure {
    /// What to print; `None` if nobody can read it or everything has been printed.
    pub(crate) message: Option<String>,
    /// The exit code; qemu-img's is 1 unless a command says otherwise.
    pub(crate) code: u8,
}

impl Failure {
    /// A failure with exit code 1.
    pub(crate) fn new(message: impl fmt::Display) -> Self {
        Self { message: Some(message.to_string()), code: 1 }
    }

    /// A wrong command line.
    pub(crate) fn usage(message: impl fmt::Display) -> Self {
        Self::new(format_args!("{message}\n{}", crate::program::help_pointer()))
    }

    /// The same failure of a command with `-U`, which it names if that reads an image that others write.
    pub(crate) fn with_force_share(self) -> Self {
        let message = self.message.map(|message| {
            if !message.contains(lock::READ_REFUSED) {
                return message;
            }
            let way_out =
                format!("{}, or read it without a lock with -U (--force-share)", lock::WAY_OUT);
            message.replace(lock::WAY_OUT, &way_out)
        });
        Self { message, ..self }
    }

    /// The same failure with another exit code.
    pub(crate) fn with_code(self, code: u8) -> Self {
        Self { code, ..self }
    }

    /// The same failure, which also says this.
    pub(crate) fn and(self, more: impl fmt::Display) -> Self {
        Self { message: self.message.map(|message| format!("{message}; {more}")), ..self }
    }

    /// The same failure, its message prefixed with what was attempted.
    pub(crate) fn context(self, what: impl fmt::Display) -> Self {
        Self { message: self.message.map(|message| format!("{what}: {message}")), ..self }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.message.as_deref().unwrap_or_default())
    }
}

impl From<DiskError> for Failure {
    fn from(error: DiskError) -> Self {
        Self::new(error)
    }
}

impl From<isobath_formats::Error> for Failure {
    fn from(error: isobath_formats::Error) -> Self {
        Self::new(error)
    }
}

impl From<StorageError> for Failure {
    fn from(error: StorageError) -> Self {
        Self::new(error)
    }
}

impl From<io::Error> for Failure {
    /// An error of standard output. A reader that has exited, such as `head`, is not reported.
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe {
            return Self { message: None, code: 1 };
        }
        Self::new(format_args!("cannot write to standard output: {error}"))
    }
}
