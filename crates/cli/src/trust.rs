//! Images whose headers are not trusted.

use crate::failure::Failure;
use isobath_disk::Trust;
use std::fs;
use std::path::PathBuf;

/// For every command that opens images.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct Trusting {
    /// Do not trust the images: open only backing files in --backing-dir, no data file that an image names, and do not
    /// guess a backing file's format
    #[arg(long)]
    pub(crate) untrusted: bool,
    /// A directory whose files an untrusted image may refer to; can be repeated [default: none]
    #[arg(long, value_name = "DIR", requires = "untrusted")]
    backing_dir: Vec<PathBuf>,
}

impl Trusting {
    /// Which files the names in an image may refer to. The directory of an untrusted image is not among them unless it
    /// is given: its other files may be other users' disks.
    ///
    /// # Errors
    /// If a directory does not exist.
    pub(crate) fn trust(&self) -> Result<Trust, Failure> {
        if !self.untrusted {
            return Ok(Trust::Full);
        }
        let canonical = |directory: &PathBuf| {
            let found = fs::canonicalize(directory);
            found.map_err(|error| {
                let cause = isobath_storage::cause(&error);
                Failure::new(cause).context(format_args!("'{}'", directory.display()))
            })
        };
        let directories = self.backing_dir.iter().map(canonical);
        Ok(Trust::Within(directories.collect::<Result<_, _>>()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_untrusted_image_may_refer_to_the_directories_that_are_given() {
        let directory = tempfile::tempdir().unwrap();
        let real = directory.path().canonicalize().unwrap();
        assert_eq!(Trusting::default().trust().unwrap(), Trust::Full);
        let alone = Trusting { untrusted: true, ..Trusting::default() };
        assert_eq!(alone.trust().unwrap(), Trust::Within(Vec::new()));
        let given = Trusting { backing_dir: vec![directory.path().join(".")], ..alone.clone() };
        assert_eq!(given.trust().unwrap(), Trust::Within(vec![real]));
        let none = Trusting { backing_dir: vec![directory.path().join("none")], ..alone };
        assert!(none.trust().is_err());
    }
}
