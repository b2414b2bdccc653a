//! File systems in files, mounted for a test.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// Bytes of a file system; XFS wants 300 MiB. The file is sparse.
const SIZE: u64 = 320 << 20;

/// A mounted file system, until it is dropped.
pub(crate) struct Mounted {
    directory: TempDir,
    /// The directory, locked: `scripts/sweep` removes others.
    _lock: File,
}

impl Mounted {
    /// Makes a file system by `program`, of the package that messages name, and mounts it.
    pub(crate) fn new(program: &str, package: &str, arguments: &[&str]) -> Self {
        let directory = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let lock = File::open(directory.path()).unwrap();
        lock.lock_shared().unwrap();
        let image = directory.path().join("image");
        File::create(&image).unwrap().set_len(SIZE).unwrap();
        run(program, package, Command::new(program).args(arguments).arg(&image));
        let point = directory.path().join("mounted");
        std::fs::create_dir(&point).unwrap();
        run("mount", "mount", Command::new("mount").args(["-o", "loop"]).args([&image, &point]));
        Self { directory, _lock: lock }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.directory.path().join("mounted")
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        unmount(&self.path());
    }
}

/// At once, or when the last file in it is closed.
fn unmount(point: &Path) {
    let _ = Command::new("umount").arg("--lazy").arg(point).status();
}

fn run(program: &str, package: &str, command: &mut Command) {
    match command.output() {
        Ok(output) if output.status.success() => {}
        Ok(output) => panic!(
            "{program}: {}; this test mounts file systems, which needs root and loop devices",
            String::from_utf8_lossy(&output.stderr)
        ),
        Err(error) => panic!("{program}: {error}; install {package}"),
    }
}
