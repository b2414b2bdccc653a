//! An initramfs, in the "newc" cpio format of the kernel's
//! Documentation/driver-api/early-userspace/buffer-format.rst.

use std::collections::BTreeSet;
use std::path::Path;

/// Files for a guest's initial root directory.
#[derive(Debug, Default)]
pub(super) struct Initramfs {
    archive: Vec<u8>,
    inodes: u32,
    names: BTreeSet<String>,
}

impl Initramfs {
    /// Adds a file and the directories above it. `path` is absolute; an existing file is left unchanged.
    pub(super) fn file(&mut self, path: &Path, content: &[u8], mode: u32) {
        let path = path.to_str().expect("a path in UTF-8").trim_start_matches('/');
        for (end, _) in path.match_indices('/') {
            self.directory(&path[..end]);
        }
        if self.names.insert(path.to_owned()) {
            self.entry(path, 0o100_000 | mode, (0, 0), content);
        }
    }

    /// Adds a directory in an existing directory.
    pub(super) fn directory(&mut self, path: &str) {
        if self.names.insert(path.to_owned()) {
            self.entry(path, 0o040_755, (0, 0), &[]);
        }
    }

    /// Adds a character device in an existing directory.
    pub(super) fn character_device(&mut self, path: &str, major: u32, minor: u32) {
        if self.names.insert(path.to_owned()) {
            self.entry(path, 0o020_600, (major, minor), &[]);
        }
    }

    /// The finished archive.
    pub(super) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.archive
    }

    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.inodes += 1;
        let length = u32::try_from(content.len()).expect("a file below 4 GiB");
        // Inode, mode, uid, gid, links, mtime, size, device, device node's number, length of the name with its NUL
        // byte, checksum (none in this format).
        let name_length = name.len() as u32 + 1;
        let (major, minor) = device;
        let fields = [self.inodes, mode, 0, 0, 1, 0, length, 0, 0, major, minor, name_length, 0];
        self.archive.extend_from_slice(b"070701");
        for field in fields {
            self.archive.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.archive.extend_from_slice(name.as_bytes());
        self.archive.push(0);
        self.pad();
        self.archive.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.archive.resize(self.archive.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::run_program;
    use crate::tools;

    #[test]
    fn busybox_unpacks_it() {
        let mut files = Initramfs::default();
        files.file(Path::new("/a/b/odd"), b"12345", 0o755);
        files.file(Path::new("/a/b/odd"), b"not this", 0o644);
        files.file(Path::new("/a/empty"), b"", 0o644);
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("archive"), files.finish()).unwrap();
        let script = format!(
            "cd {} && {busybox} cpio -i <archive 2>&1 && cat a/b/odd && ls a && stat -c %a a/b/odd",
            directory.path().display(),
            busybox = tools::require("busybox").display()
        );
        let text = run_program("sh", ["-c", &script]).ok().text();
        assert!(text.ends_with("12345b\nempty\n755\n"), "{text}");
    }
}
