//! Errors of the storage below an image.

use isobath_qcow2::text::Shown;
use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// What was attempted when a [`StorageError`] arose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Opening an existing file.
    Open,
    /// Creating or truncating a file.
    Create,
    /// Taking an image lock.
    Lock,
    /// Removing a file.
    Remove,
    /// Reading bytes.
    Read,
    /// Writing bytes.
    Write,
    /// Writing zeroes.
    WriteZeroes,
    /// Discarding.
    Discard,
    /// Making writes durable.
    Flush,
    /// Querying the length or the holes.
    Query,
    /// Changing the length.
    SetLength,
    /// Sharing the space of another file's bytes.
    Clone,
    /// Ending writing.
    Retire,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Open => "open",
            Self::Create => "create",
            Self::Lock => "lock",
            Self::Remove => "remove",
            Self::Read => "read",
            Self::Write => "write",
            Self::WriteZeroes => "write zeroes to",
            Self::Discard => "discard in",
            Self::Flush => "flush",
            Self::Query => "query",
            Self::SetLength => "resize",
            Self::Clone => "clone into",
            Self::Retire => "finish writing to",
        })
    }
}

/// A failed storage operation: what, where and why.
#[derive(Debug, thiserror::Error)]
pub struct StorageError {
    /// The operation that failed.
    pub operation: Operation,
    /// The file it was meant for.
    pub name: PathBuf,
    /// Byte offset and length, if the operation has them.
    pub range: Option<(u64, u64)>,
    /// The cause.
    #[source]
    pub source: io::Error,
}

impl StorageError {
    /// An error without a byte range.
    pub fn new(operation: Operation, name: &Path, source: io::Error) -> Self {
        Self { operation, name: name.to_owned(), range: None, source }
    }

    /// An error of `length` bytes at `offset`.
    pub fn at(
        operation: Operation,
        name: &Path,
        offset: u64,
        length: u64,
        source: io::Error,
    ) -> Self {
        Self { operation, name: name.to_owned(), range: Some((offset, length)), source }
    }

    /// The kind of the cause.
    pub fn kind(&self) -> io::ErrorKind {
        self.source.kind()
    }

    /// The operating system's error number of the cause, or `EIO`.
    pub fn errno(&self) -> i32 {
        self.source.raw_os_error().unwrap_or(libc::EIO)
    }
}

/// A file's name for messages. Names may come from images: control characters, and characters that reorder or hide
/// text, are escaped.
pub fn shown(name: &Path) -> impl fmt::Display + '_ {
    Shown(name.to_string_lossy())
}

/// A name as one word of a command that a message tells the user to type. A shell reads it as the name, unless that has
/// characters that [`shown`] escapes. It has backslashes and no quotes, since such messages put the command in quotes.
pub fn word(name: &(impl AsRef<OsStr> + ?Sized)) -> String {
    let name = name.as_ref().to_string_lossy();
    let mut quoted = String::with_capacity(name.len());
    for c in name.chars() {
        let plain = c.is_alphanumeric() || "_-+.,/:=@%".contains(c);
        if !plain && (c == ' ' || c.is_ascii_graphic()) {
            quoted.push('\\');
        }
        quoted.push(c);
    }
    Shown(quoted).to_string()
}

/// What a process has given up, as a remark on permissions that it lacks.
static CONFINED: OnceLock<&'static str> = OnceLock::new();

/// Says in all later errors for lack of a permission that this process has confined itself, and how to do without.
pub fn note_confinement(remark: &'static str) {
    let _ = CONFINED.set(remark);
}

/// The text of an I/O error without the number of the operating system's error.
pub fn cause(error: &io::Error) -> String {
    let text = error.to_string();
    let Some(number) = error.raw_os_error() else { return text };
    let text = text.trim_end_matches(&format!(" (os error {number})"));
    match CONFINED.get() {
        Some(remark) if matches!(number, libc::EACCES | libc::EPERM) => {
            format!("{text} ({remark})")
        }
        _ => text.to_owned(),
    }
}

impl fmt::Display for StorageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot {} '{}'", self.operation, shown(&self.name))?;
        if let Some((offset, length)) = self.range {
            write!(f, " at offset {offset} (length {length})")?;
        }
        write!(f, ": {}", cause(&self.source))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn names_do_nothing_to_a_terminal() {
        let source = io::Error::from_raw_os_error(libc::ENOENT);
        let name = Path::new("\u{1b}[2Jä\nb\u{202e}");
        let error = StorageError::new(Operation::Open, name, source);
        let expected = "cannot open '\\u{1b}[2Jä\\nb\\u{202e}': ";
        assert!(error.to_string().starts_with(expected), "{error}");
    }

    #[test]
    fn a_name_in_a_command_is_one_word_of_a_shell() {
        for plain in ["/disks/vm-1.qcow2", "s3://bucket/a/vm@sha256:00", "ä_b%20,c=d+e"] {
            assert_eq!(word(plain), plain);
        }
        for name in
            ["a b", "it's", "\"$HOME\" `x`", "~/*?[a]{b,c}", "a;b|c&d>e<f#!(g)^", "a\\b", "né"]
        {
            let command = format!("printf %s {}", word(Path::new(name)));
            let printed = Command::new("sh").args(["-c", &command]).output().unwrap().stdout;
            assert_eq!(String::from_utf8(printed).unwrap(), name, "{command}");
        }
        assert_eq!(word("a\n\u{202e}b"), "a\\n\\u{202e}b");
    }
}
