//! Problems of a fleet's images.

use serde::{Serialize, Serializer};
use std::fmt;
use std::io;

macro_rules! troubles {
    ($($(#[$doc:meta])* $name:ident = $word:literal, $text:literal;)*) => {
        /// A problem of an image, or of the name of its backing file.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Trouble {
            $($(#[$doc])* $name,)*
        }

        impl Trouble {
            /// Every kind.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// The name for programs.
            pub fn word(self) -> &'static str {
                match self { $(Self::$name => $word,)* }
            }

            /// The description for users.
            pub fn text(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}

troubles! {
    /// The backing file does not exist.
    Missing = "missing", "its backing file is missing";
    /// The images' backing files form a loop.
    Loop = "loop", "its backing chain has a loop";
    /// The symbolic links form a loop.
    LinkLoop = "link-loop", "its backing file's name leads to a loop of symbolic links";
    /// No permission to read the backing file.
    BackingDenied = "backing-denied", "no permission to read its backing file";
    /// The backing file cannot be read for another reason.
    BackingUnreadable = "backing-unreadable", "its backing file cannot be read";
    /// The backing file is a FIFO, a socket, a directory or a character device.
    NoRegularFile = "not-a-file", "its backing file is a FIFO, a socket, a directory or a character device";
    /// The backing file is a block device, which is not opened.
    Device = "device", "its backing file is a block device, which is not read";
    /// The name begins with `json:`.
    Json = "json", "its backing file's name is a 'json:' description, which is not followed";
    /// The name has a protocol prefix.
    Protocol = "protocol", "its backing file's name has a protocol prefix, which is not followed";
    /// The name is that of layers in an object store.
    Stored = "stored", "its lower layers are in an object store, which is not surveyed";
    /// The name contains a NUL byte or is empty.
    NoFileName = "no-file-name", "its backing file's name is not a file name";
    /// The header says that the backing file is qcow2, but it is not.
    NotQcow2 = "not-qcow2", "its backing file is not qcow2, although the header says so";
    /// The header names no format for the backing file, which is an image in a format that is not supported.
    Foreign = "foreign", "its backing file is an image in a format that is not supported";
    /// It begins like a qcow2 image, but its header is unusable.
    BadHeader = "bad-header", "its header is corrupt or not supported";
    /// No permission to read the image or a directory.
    Denied = "denied", "no permission to read it";
    /// The image, or a directory, cannot be read for another reason.
    Unreadable = "unreadable", "it cannot be read";
    /// Its tables are corrupt or cannot be read; found only if clusters are counted.
    BadTables = "bad-tables", "its tables are corrupt or cannot be read";
    /// The tree of images is too large for its clusters to be counted.
    TooLarge = "too-large", "the disk has too many clusters to count";
}

impl Serialize for Trouble {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.word())
    }
}

impl Trouble {
    /// Why a backing file cannot be examined.
    pub(crate) fn of_backing(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Self::Missing,
            io::ErrorKind::PermissionDenied => Self::BackingDenied,
            _ if error.raw_os_error() == Some(libc::ELOOP) => Self::LinkLoop,
            _ => Self::BackingUnreadable,
        }
    }

    /// Why an image or a directory cannot be examined.
    pub(crate) fn of_image(error: &io::Error) -> Self {
        if error.kind() == io::ErrorKind::PermissionDenied {
            Self::Denied
        } else {
            Self::Unreadable
        }
    }
}

/// A problem and where it was found.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// The file's name, as bytes.
    pub image: Vec<u8>,
    /// What is wrong.
    pub trouble: Trouble,
    /// Details: the name that is not followed, or the error message of the system or of the format.
    pub detail: String,
}

/// The maximum number of problems kept in full; further ones are only counted.
pub const MAX_PROBLEMS: usize = 10_000;

/// The number of problems of each kind, and the first problems in full.
#[derive(Clone, Debug, Default)]
pub struct Problems {
    counts: std::collections::BTreeMap<Trouble, u64>,
    kept: Vec<Problem>,
}

impl Problems {
    pub(crate) fn add(&mut self, image: &[u8], trouble: Trouble, detail: impl fmt::Display) {
        *self.counts.entry(trouble).or_default() += 1;
        if self.kept.len() < MAX_PROBLEMS {
            self.kept.push(Problem { image: image.to_vec(), trouble, detail: detail.to_string() });
        }
    }

    pub(crate) fn merge(&mut self, other: Self) {
        for (trouble, count) in other.counts {
            *self.counts.entry(trouble).or_default() += count;
        }
        let room = MAX_PROBLEMS.saturating_sub(self.kept.len());
        self.kept.extend(other.kept.into_iter().take(room));
    }

    pub(crate) fn sort(&mut self) {
        self.kept.sort();
    }

    /// The number of problems of each kind.
    pub fn counts(&self) -> impl Iterator<Item = (Trouble, u64)> {
        self.counts.iter().map(|(trouble, count)| (*trouble, *count))
    }

    /// The total number of problems.
    pub fn total(&self) -> u64 {
        self.counts.values().sum()
    }

    /// The first [`MAX_PROBLEMS`] problems, sorted by file name.
    pub fn list(&self) -> &[Problem] {
        &self.kept
    }
}
