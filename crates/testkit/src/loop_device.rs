//! Loop devices of this host's kernel. They need root.

use crate::process::run;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

/// A loop device; detached when dropped.
#[derive(Debug)]
pub struct LoopDevice(PathBuf);

impl LoopDevice {
    /// A device over `file` that uses the file's page cache.
    pub fn new(file: &Path) -> Self {
        Self::attach(file, "--direct-io=off")
    }

    /// A device over `file` that bypasses the file's page cache (direct I/O).
    pub fn direct(file: &Path) -> Self {
        Self::attach(file, "--direct-io=on")
    }

    fn attach(file: &Path, mode: &str) -> Self {
        let done = run(Command::new("losetup").args(["--show", "-f", mode]).arg(file)).ok();
        Self(PathBuf::from(done.text().trim()))
    }

    /// The device's path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Whether it bypasses its file's page cache.
    pub fn is_direct(&self) -> bool {
        let name = self.0.file_name().unwrap().to_str().unwrap();
        fs::read_to_string(format!("/sys/block/{name}/loop/dio")).unwrap().trim() == "1"
    }

    /// Writes everything that was written to the device to its file.
    pub fn write_back(&self) {
        let _ = run(Command::new("blockdev").arg("--flushbufs").arg(&self.0)).ok();
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let done = run(Command::new("losetup").arg("-d").arg(&self.0));
        assert!(thread::panicking() || done.code() == 0, "{}", done.report());
    }
}
