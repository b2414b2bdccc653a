//! A directory whose files and directories are reached without links, whoever renames them meanwhile.

use crate::probe;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, openat2, statat};
use rustix::io::Errno;
use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// How often a resolution is tried that a rename interrupts.
const MOST_TRIES: u32 = 100;

/// A directory, under the path by which it was named.
pub(crate) struct Tree {
    root: OwnedFd,
    path: PathBuf,
}

/// A name in a directory.
pub(crate) struct Entry {
    pub(crate) name: OsString,
    pub(crate) kind: FileType,
}

impl Tree {
    /// The directory at this path, which may be a link.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(path, flags, Mode::empty())?;
        Ok(Self { root, path: path.to_owned() })
    }

    /// Opens a regular file of the tree for reading; changes nothing and never blocks.
    pub(crate) fn file(&self, path: &Path) -> io::Result<(File, Metadata)> {
        probe::opened(|flags| Ok(self.reach(path, flags)?.into()))
    }

    /// Opens a directory of the tree, or its root.
    pub(crate) fn directory(&self, path: &Path) -> io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(self.reach(path, flags)?.into())
    }

    /// Opens what the path led to when it was found. A directory that has been replaced by a link is not followed.
    fn reach(&self, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
        let below = path.strip_prefix(&self.path).map_err(io::Error::other)?;
        let below = if below.as_os_str().is_empty() { Path::new(".") } else { below };
        let flags = flags | OFlags::NOFOLLOW;
        let no_links =
            ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        for _ in 0..MOST_TRIES {
            match openat2(&self.root, below, flags, Mode::empty(), no_links) {
                Err(Errno::AGAIN) => {}
                // The kernel is older than Linux 5.6, or the call is forbidden.
                Err(Errno::NOSYS | Errno::PERM) => {
                    return Ok(rustix::fs::open(path, flags, Mode::empty())?);
                }
                opened => return Ok(opened?),
            }
        }
        Err(io::ErrorKind::ResourceBusy.into())
    }
}

/// The names in a directory.
pub(crate) fn entries(directory: &File) -> io::Result<impl Iterator<Item = io::Result<Entry>>> {
    let entries = Dir::read_from(directory)?;
    Ok(entries.filter_map(move |entry| {
        let entry = match entry {
            Ok(entry) => entry,
            Err(error) => return Some(Err(error.into())),
        };
        let name = OsString::from_vec(entry.file_name().to_bytes().to_vec());
        if name == "." || name == ".." {
            return None;
        }
        let kind = match entry.file_type() {
            // Not every file system says. If there is nothing, it was removed meanwhile.
            FileType::Unknown => {
                let found = statat(directory, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW).ok()?;
                FileType::from_raw_mode(found.st_mode)
            }
            known => known,
        };
        Some(Ok(Entry { name, kind }))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_directory_that_is_replaced_by_a_link_does_not_lead_out_of_the_tree() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        for directory in ["tree/a/b", "outside/b"] {
            fs::create_dir_all(at(directory)).unwrap();
            fs::write(at(directory).join("file"), directory).unwrap();
        }
        let tree = Tree::open(&at("tree")).unwrap();
        let names = |path: &str| {
            let directory = tree.directory(&at(path))?;
            let names = entries(&directory)?.map(|entry| Ok(entry?.name));
            names.collect::<io::Result<Vec<_>>>()
        };
        assert_eq!(names("tree").unwrap(), ["a"]);
        assert_eq!(names("tree/a/b").unwrap(), ["file"]);
        assert_eq!(tree.file(&at("tree/a/b/file")).unwrap().1.len(), 8);
        fs::rename(at("tree/a"), at("moved")).unwrap();
        symlink(at("outside"), at("tree/a")).unwrap();
        for path in ["tree/a", "tree/a/b"] {
            names(path).unwrap_err();
        }
        tree.file(&at("tree/a/b/file")).unwrap_err();
    }
}
