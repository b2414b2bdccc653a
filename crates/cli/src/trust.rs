//! Images whose headers are not trusted.

use crate::failure::Failure;
use crate::host;
use isobath_disk::Trust;
use isobath_storage::is_descriptor_set;
use isobath_storage::window::Part;
use std::fs;
use std::path::{Path, PathBuf};

/// For every command that opens images.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct Trusting {
    /// Do not trust the images: open only backing files in --backing-dir, no data file that an image names, and do not
    /// guess a backing file's format
    #[arg(long)]
    pub(crate) untrusted: bool,
    /// A directory whose files an untrusted image may refer to; can be repeated [default: the image's own directory;
    /// none for a block device]
    #[arg(long, value_name = "DIR", requires = "untrusted")]
    backing_dir: Vec<PathBuf>,
}

impl Trusting {
    /// Which files the names in an image may refer to.
    ///
    /// # Errors
    /// If a directory does not exist.
    pub(crate) fn of(&self, image: &Path) -> Result<Trust, Failure> {
        if !self.untrusted {
            return Ok(Trust::Full);
        }
        let own = Vec::from_iter(directory_of(image));
        let directories = if self.backing_dir.is_empty() { &own } else { &self.backing_dir };
        let canonical = |directory: &PathBuf| {
            let found = fs::canonicalize(directory);
            found.map_err(|error| {
                let cause = isobath_storage::cause(&error);
                Failure::new(cause).context(format_args!("'{}'", directory.display()))
            })
        };
        Ok(Trust::Within(directories.iter().map(canonical).collect::<Result<_, _>>()?))
    }
}

/// The directory of an image's file. Neither an export nor a descriptor has one, and beside a device are others, of
/// other users.
fn directory_of(image: &Path) -> Option<PathBuf> {
    let part = Part::of_name(image).map(|part| part.file);
    let file = part.as_deref().unwrap_or(image);
    let nowhere = host::is_export(file) || is_descriptor_set(file);
    if nowhere || fs::metadata(file).is_ok_and(|found| !found.is_file()) {
        return None;
    }
    Some(match file.parent() {
        Some(parent) if parent != Path::new("") => parent.to_owned(),
        _ => ".".into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_may_refer_to_its_own_directory_unless_others_are_given() {
        let directory = tempfile::tempdir().unwrap();
        let real = directory.path().canonicalize().unwrap();
        let image = directory.path().join("image");
        assert_eq!(Trusting::default().of(&image).unwrap(), Trust::Full);
        let own = Trusting { untrusted: true, ..Trusting::default() };
        assert_eq!(own.of(&image).unwrap(), Trust::Within(vec![real.clone()]));
        let here = std::env::current_dir().unwrap().canonicalize().unwrap();
        assert_eq!(own.of(Path::new("image")).unwrap(), Trust::Within(vec![here]));
        assert_eq!(own.of(Path::new("/dev/null")).unwrap(), Trust::Within(Vec::new()));
        assert_eq!(own.of(Path::new("/dev/fdset/1")).unwrap(), Trust::Within(Vec::new()));
        let export = Path::new("nbd+unix:///export?socket=/run/socket");
        assert_eq!(own.of(export).unwrap(), Trust::Within(Vec::new()));
        let given = Trusting { backing_dir: vec![real.clone()], ..own.clone() };
        assert_eq!(given.of(export).unwrap(), Trust::Within(vec![real]));
        let none = Trusting { backing_dir: vec![directory.path().join("none")], ..own };
        assert!(none.of(&image).is_err());
    }
}
