//! `isobath serve` beside a test, and clients of it.

use isobath_testkit::process::{Finished, PATIENCE, Ready, Server};
use isobath_testkit::{args, qemu};
use std::ffi::OsStr;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use tempfile::TempDir;

/// The program under test.
pub(crate) const ISOBATH: &str = env!("CARGO_BIN_EXE_isobath");

/// `isobath serve` on a unix socket.
pub(crate) struct Served {
    pub(crate) server: Server,
    pub(crate) socket: PathBuf,
    _directory: TempDir,
}

impl Served {
    /// Serves images; `options` are further arguments.
    #[track_caller]
    pub(crate) fn start<I: AsRef<OsStr>>(images: &[I], options: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("nbd.sock");
        let mut command = Command::new(ISOBATH);
        command.arg("serve").args(options).args(images);
        command.arg("--nbd").arg(format!("unix:{}", socket.display()));
        let server = Server::start(&mut command, Ready::Line("-blockdev"));
        Self { server, socket, _directory: directory }
    }

    /// The URI of an export.
    pub(crate) fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket.display())
    }

    /// Ends it by SIGTERM; it must have nothing to complain about.
    #[track_caller]
    pub(crate) fn stop(self) -> Finished {
        let done = self.server.stop().ok();
        assert!(done.stderr.is_empty(), "{}", done.report());
        done
    }
}

/// A qemu-io that stays connected.
pub(crate) struct QemuIo {
    child: Child,
    input: ChildStdin,
    output: ChildStdout,
}

const PROMPT: &str = "qemu-io> ";

impl QemuIo {
    /// Connects to an export, or opens an image.
    #[track_caller]
    pub(crate) fn open(format: &str, name: impl AsRef<OsStr>) -> Self {
        let mut child = Command::new(qemu::program("qemu-io"))
            .args(["-f", format])
            .arg(name)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("start qemu-io");
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut client = Self { child, input, output };
        client.until_prompt();
        client
    }

    /// Carries out a command and gives what it printed.
    #[track_caller]
    pub(crate) fn run(&mut self, command: &str) -> String {
        writeln!(self.input, "{command}").expect("qemu-io takes commands");
        self.until_prompt()
    }

    #[track_caller]
    fn until_prompt(&mut self) -> String {
        let mut text = Vec::new();
        let mut byte = [0];
        while !text.ends_with(PROMPT.as_bytes()) {
            let fd = self.output.as_raw_fd();
            let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            // SAFETY: one entry, which is alive.
            let ready = unsafe { libc::poll(&raw mut poll, 1, PATIENCE.as_millis() as i32) };
            let said = String::from_utf8_lossy(&text);
            assert!(ready == 1, "waited {PATIENCE:?} for qemu-io after {said:?}");
            let count = self.output.read(&mut byte).expect("read from qemu-io");
            assert!(count > 0, "qemu-io ended after {said:?}");
            text.extend(byte);
        }
        text.truncate(text.len() - PROMPT.len());
        String::from_utf8_lossy(&text).into_owned()
    }

    /// Carries out a command that must succeed.
    #[track_caller]
    pub(crate) fn ok(&mut self, command: &str) {
        let text = self.run(command).to_lowercase();
        assert!(!text.contains("fail") && !text.contains("error"), "{command}: {text}");
    }
}

impl Drop for QemuIo {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Fails the test unless a disk has the bytes of a raw file, as qemu-img sees both.
#[track_caller]
pub(crate) fn assert_same_bytes(uri: &str, raw: &Path) {
    let _ = qemu::img(args!["compare", "-f", "raw", "-F", "raw", uri, raw]).ok();
}
