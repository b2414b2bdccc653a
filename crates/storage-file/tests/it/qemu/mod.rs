//! Images made and opened by QEMU's programs.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use tempfile::TempDir;

pub(crate) fn run(program: &str, arguments: &[&str]) -> Output {
    match Command::new(program).args(arguments).output() {
        Ok(output) => output,
        Err(error) => panic!("{program}: {error}; install qemu-utils"),
    }
}

/// A qcow2 overlay and its backing file.
pub(crate) fn chain() -> (TempDir, PathBuf, PathBuf) {
    let directory = TempDir::new().unwrap();
    let (base, top) = (directory.path().join("base.qcow2"), directory.path().join("top.qcow2"));
    let (b, t) = (base.to_str().unwrap(), top.to_str().unwrap());
    assert!(run("qemu-img", &["create", "-q", "-f", "qcow2", b, "1M"]).status.success());
    let arguments = ["create", "-q", "-f", "qcow2", "-b", b, "-F", "qcow2", t];
    assert!(run("qemu-img", &arguments).status.success());
    (directory, base, top)
}

/// A `qemu-io` that keeps its images open until it is dropped.
pub(crate) struct QemuIo(pub(crate) Child);

impl QemuIo {
    pub(crate) fn open(arguments: &[&str], image: &Path) -> Self {
        let child = Command::new("qemu-io")
            .args(arguments)
            .arg(image)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut child =
            child.unwrap_or_else(|error| panic!("qemu-io: {error}; install qemu-utils"));
        // Its answer to a command shows that the image is open.
        child.stdin.as_mut().unwrap().write_all(b"length\n").unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains("1 MiB"), "qemu-io could not open the image: {line:?}");
        Self(child)
    }
}

impl Drop for QemuIo {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// Makes `qemu-io` open the image once; returns its error if it cannot.
pub(crate) fn opens(arguments: &[&str], image: &Path) -> std::result::Result<(), String> {
    let all = [arguments, &["-c", "length", image.to_str().unwrap()]].concat();
    let output = run("qemu-io", &all);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(()) } else { Err(text) }
}
