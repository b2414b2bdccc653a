//! The names by which an image refers to another one.

use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

/// The directories of a copy; the commands run in the first one.
pub(super) const DIRECTORIES: [&str; 3] = ["", "below", "beside/deep"];

/// What stands for the directory of a copy.
pub(super) const ROOT: &str = "{root}";

/// Links to directories, each with what it holds, from where the link is.
pub(super) const LINKS: [(&str, &str); 2] =
    [("short", "beside/deep"), ("beside/deep/up", "../../below")];

/// A way to name a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Plain,
    Dotted,
    Absolute,
    /// `file:`; QEMU looks for a relative name where it runs, Isobath where the image is.
    File,
    /// A description; relative, Isobath opens it only where it means the same to QEMU.
    Json,
    /// A symbolic link beside the file.
    Link,
    /// A hard link beside the file.
    Hard,
    /// A symbolic link to its directory.
    Directory,
}

impl Form {
    pub(super) fn random(rng: &mut StdRng) -> Self {
        use Form::{Absolute, Directory, Dotted, File, Hard, Link, Plain};
        let all = [Plain, Plain, Plain, Dotted, Absolute, File, Link, Hard, Directory];
        *all.choose(rng).unwrap()
    }

    /// The name by which an image refers to a file; both are given from the root.
    pub(super) fn name(self, rng: &mut StdRng, from: &str, file: &str, format: &str) -> String {
        let (directory, name) = file.rsplit_once('/').unwrap_or(("", file));
        let beside = |name: &str| match directory {
            "" => name.to_owned(),
            _ => format!("{directory}/{name}"),
        };
        match self {
            Self::Plain => relative(from, file),
            Self::Dotted => format!("./{}", relative(from, file)),
            Self::Absolute => format!("{ROOT}/{file}"),
            Self::File if directory.is_empty() && !from.contains('/') && rng.random() => {
                format!("file:{file}")
            }
            Self::File => format!("file:{ROOT}/{file}"),
            Self::Json => {
                let file = if rng.random() { file.to_owned() } else { format!("{ROOT}/{file}") };
                let below = format!(r#"{{"driver":"file","filename":"{file}"}}"#);
                format!(r#"json:{{"driver":"{format}","file":{below}}}"#)
            }
            Self::Link => relative(from, &beside(&link(name))),
            Self::Hard => relative(from, &beside(&hard(name))),
            Self::Directory => match directory {
                "below" => relative(from, &format!("beside/deep/up/{name}")),
                "beside/deep" => relative(from, &format!("short/{name}")),
                _ => relative(from, &format!("below/../{name}")),
            },
        }
    }
}

/// The symbolic link beside a file.
pub(super) fn link(name: &str) -> String {
    format!("link-{name}")
}

/// The hard link beside a file.
pub(super) fn hard(name: &str) -> String {
    format!("hard-{name}")
}

/// The name of a file from the directory of another one.
fn relative(from: &str, file: &str) -> String {
    match from.rsplit_once('/') {
        Some((directory, _)) => match file.strip_prefix(&format!("{directory}/")) {
            Some(name) if !name.contains('/') => name.to_owned(),
            _ => "../".repeat(directory.split('/').count()) + file,
        },
        None => file.to_owned(),
    }
}
