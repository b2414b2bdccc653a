//! Running programs, to completion or as servers alongside a test.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::io::{Read, Seek};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::NamedTempFile;

/// A program that runs longer than this is considered hung: it is killed, and the test fails.
pub const PATIENCE: Duration = Duration::from_mins(5);

/// A command that has run to completion.
#[derive(Clone, Debug)]
pub struct Finished {
    /// The command line, for messages.
    pub command: String,
    /// How the program ended.
    pub status: ExitStatus,
    /// What it wrote to its standard output.
    pub stdout: Vec<u8>,
    /// What it wrote to its standard error.
    pub stderr: String,
}

impl Finished {
    /// The exit code; -1 if a signal ended the program.
    pub fn code(&self) -> i32 {
        self.status.code().unwrap_or(-1)
    }

    /// Fails the test unless the exit code is 0.
    #[track_caller]
    #[must_use = "examine the output, or discard it with `let _ =`"]
    pub fn ok(self) -> Self {
        self.exits(0)
    }

    /// Fails the test unless the exit code is `code`.
    #[track_caller]
    #[must_use = "examine the output, or discard it with `let _ =`"]
    pub fn exits(self, code: i32) -> Self {
        assert!(self.status.code() == Some(code), "expected exit code {code}\n{}", self.report());
        self
    }

    /// The standard output as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// The standard output as JSON; fails the test if it is not JSON.
    #[track_caller]
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.stdout)
            .unwrap_or_else(|error| panic!("not JSON: {error}\n{}", self.report()))
    }

    /// The command, its status and its output, for a message.
    pub fn report(&self) -> String {
        let mut report = format!("{}\n{}\n", self.command, self.status);
        for (name, text) in [("stdout", self.text()), ("stderr", self.stderr.clone())] {
            if !text.is_empty() {
                let _ = writeln!(report, "--- {name}\n{}", text.trim_end());
            }
        }
        report
    }
}

/// Runs a command to completion, with an empty standard input.
#[track_caller]
pub fn run(command: &mut Command) -> Finished {
    let mut running = Running::start(command);
    let status = running.wait(PATIENCE);
    running.finished(status)
}

/// Runs a program with arguments to completion; see [`run`] and [`args!`](crate::args).
#[track_caller]
pub fn run_program<P, I>(program: P, arguments: I) -> Finished
where
    P: AsRef<OsStr>,
    I: IntoIterator,
    I::Item: AsRef<OsStr>,
{
    run(Command::new(program).args(arguments))
}

/// The sign that a [`Server`] is ready for requests.
#[derive(Clone, Copy, Debug)]
pub enum Ready<'a> {
    /// The file exists and is not empty, such as a `--pid-file`.
    File(&'a Path),
    /// Somebody listens on the unix socket at this absolute path who did not before the server started. The file alone
    /// says less: `bind(2)` makes it, and connections are refused until `listen(2)`.
    Socket(&'a Path),
    /// The standard output has a line that contains the text.
    Line(&'a str),
}

/// A server that runs alongside a test, and is killed when dropped.
#[derive(Debug)]
pub struct Server {
    running: Running,
}

impl Server {
    /// Starts the server and waits until it is ready; fails the test if it ends first.
    #[track_caller]
    pub fn start(command: &mut Command, ready: Ready<'_>) -> Self {
        Self::try_start(command, ready).unwrap_or_else(|ended| {
            panic!("the server ended before it was ready\n{}", ended.report())
        })
    }

    /// As [`start`](Self::start), for a server that follows a killed one. Tries again if a lock prevents the start: the
    /// kernel releases a killed process's rings, and with them its locks, a moment after the process ends.
    #[track_caller]
    pub fn start_after_kill(command: &mut Command, ready: Ready<'_>) -> Self {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match Self::try_start(command, ready) {
                Ok(server) => return server,
                Err(ended) => assert!(
                    ended.stderr.contains("lock") && Instant::now() < deadline,
                    "the server ended before it was ready\n{}",
                    ended.report()
                ),
            }
        }
    }

    #[track_caller]
    fn try_start(command: &mut Command, ready: Ready<'_>) -> Result<Self, Finished> {
        let directory = command.get_current_dir().map(Path::to_owned);
        let listening = |path: &Path| listeners(path, directory.as_deref());
        let before = match ready {
            Ready::Socket(path) => listening(path),
            Ready::File(_) | Ready::Line(_) => Vec::new(),
        };
        let mut running = Running::start(command);
        let deadline = Instant::now() + PATIENCE;
        loop {
            let is_ready = match ready {
                Ready::File(path) => path.metadata().is_ok_and(|data| data.len() > 0),
                Ready::Socket(path) => listening(path).iter().any(|one| !before.contains(one)),
                Ready::Line(text) => running.output().lines().any(|line| line.contains(text)),
            };
            if is_ready {
                return Ok(Self { running });
            }
            if let Some(status) = running.child.try_wait().expect("wait for the server") {
                return Err(running.finished(status));
            }
            if Instant::now() > deadline {
                let status = running.end();
                panic!("the server is not ready\n{}", running.finished(status).report());
            }
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// The server's process id.
    pub fn pid(&self) -> u32 {
        self.running.child.id()
    }

    /// What the server has written to its standard output so far.
    pub fn output(&self) -> String {
        self.running.output()
    }

    /// What the server has written to its standard error so far.
    pub fn log(&self) -> String {
        self.running.log()
    }

    /// Sends a signal, such as `libc::SIGSTOP`.
    #[track_caller]
    pub fn signal(&self, signal: i32) {
        self.running.signal(signal);
    }

    /// Ends the server with SIGTERM and waits for it.
    #[track_caller]
    pub fn stop(mut self) -> Finished {
        self.running.signal(libc::SIGTERM);
        self.finish()
    }

    /// As [`stop`](Self::stop), for a QEMU server: repeats the signal until the server has ended. QEMU's programs miss
    /// a signal that arrives just before they wait for requests.
    #[track_caller]
    pub fn stop_qemu(mut self) -> Finished {
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.running.signal(libc::SIGTERM);
            if let Some(status) = self.running.wait_for(Duration::from_millis(100)) {
                return self.running.finished(status);
            }
            if Instant::now() > deadline {
                return self.finish();
            }
        }
    }

    /// Kills the server (SIGKILL), as a crash of the program would.
    #[track_caller]
    pub fn kill(mut self) -> Finished {
        let status = self.running.end();
        self.running.finished(status)
    }

    /// Waits for the server to end by itself.
    #[track_caller]
    pub fn wait(mut self) -> Finished {
        self.finish()
    }

    #[track_caller]
    fn finish(&mut self) -> Finished {
        let status = self.running.wait(PATIENCE);
        self.running.finished(status)
    }
}

/// A child whose output goes to files: a child of its own that outlives it (a daemon) would keep a pipe open.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) child: Child,
    command: String,
    stdout: NamedTempFile,
    stderr: NamedTempFile,
}

impl Running {
    #[track_caller]
    pub(crate) fn start(command: &mut Command) -> Self {
        Self::start_with_input(command, Stdio::null())
    }

    #[track_caller]
    pub(crate) fn start_with_input(command: &mut Command, input: Stdio) -> Self {
        let stdout = NamedTempFile::new().expect("a temporary file");
        let stderr = NamedTempFile::new().expect("a temporary file");
        let line = command_line(command);
        let child = command
            .stdin(input)
            .stdout(stdout.as_file().try_clone().expect("a second descriptor"))
            .stderr(stderr.as_file().try_clone().expect("a second descriptor"))
            .spawn()
            .unwrap_or_else(|error| panic!("cannot run {line}: {error}"));
        Self { child, command: line, stdout, stderr }
    }

    pub(crate) fn output(&self) -> String {
        String::from_utf8_lossy(&contents(&self.stdout)).into_owned()
    }

    pub(crate) fn log(&self) -> String {
        String::from_utf8_lossy(&contents(&self.stderr)).into_owned()
    }

    #[track_caller]
    pub(crate) fn signal(&self, signal: i32) {
        // SAFETY: kill takes two integers; the child has not been reaped, so the id is still its own.
        let result = unsafe { libc::kill(self.child.id() as libc::pid_t, signal) };
        assert!(result == 0, "cannot signal {}", self.command);
    }

    /// Waits for the child to end; fails the test, with the output so far, if that takes too long.
    #[track_caller]
    pub(crate) fn wait(&mut self, patience: Duration) -> ExitStatus {
        if let Some(status) = self.wait_for(patience) {
            return status;
        }
        let status = self.end();
        panic!("killed: ran for more than {patience:?}\n{}", self.finished(status).report());
    }

    /// Waits at most this long for the child to end.
    pub(crate) fn wait_for(&mut self, patience: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + patience;
        let mut pause = Duration::from_micros(100);
        loop {
            if let Some(status) = self.child.try_wait().expect("wait for a child") {
                return Some(status);
            }
            if Instant::now() > deadline {
                return None;
            }
            thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(5));
        }
    }

    /// Kills the child if it is still running.
    pub(crate) fn end(&mut self) -> ExitStatus {
        let _ = self.child.kill();
        self.child.wait().expect("wait for a killed child")
    }

    pub(crate) fn finished(&self, status: ExitStatus) -> Finished {
        Finished {
            command: self.command.clone(),
            status,
            stdout: contents(&self.stdout),
            stderr: self.log(),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The sockets' inodes, as `/proc/net/unix` has them, of those who listen at this absolute path. A relative name there
/// may be in any directory: one in `directory`, or in this process's without that, counts if a process there has it.
fn listeners(path: &Path, directory: Option<&Path>) -> Vec<String> {
    const LISTENS: u64 = 1 << 16; // __SO_ACCEPTCON of the kernel
    assert!(path.is_absolute(), "'{}' is not an absolute path", path.display());
    let own = std::env::current_dir().expect("the working directory");
    let directory = own.join(directory.unwrap_or(Path::new("")));
    // Names need not be UTF-8.
    let table = std::fs::read("/proc/net/unix").expect("read the table of unix sockets");
    let table = String::from_utf8_lossy(&table);
    let listens = |line: &str| {
        // Num, RefCount, Protocol, Flags, Type, St, Inode, Path: the last is all of the rest.
        let mut fields = line.split_whitespace();
        let flags = u64::from_str_radix(fields.nth(3)?, 16).ok()?;
        let inode = fields.nth(2)?;
        let (_, name) = line.split_once(&format!(" {inode} "))?;
        let found = flags & LISTENS != 0
            && directory.join(name) == path
            && (Path::new(name).is_absolute() || is_open_in(&directory, inode));
        found.then(|| inode.to_owned())
    };
    table.lines().filter_map(listens).collect()
}

/// Whether a process whose working directory is this one has the socket.
fn is_open_in(directory: &Path, inode: &str) -> bool {
    let socket = format!("socket:[{inode}]");
    let Ok(directory) = directory.canonicalize() else { return false };
    let processes = std::fs::read_dir("/proc").expect("list the processes").flatten();
    let leads_to = |link: &Path, to: &Path| link.read_link().is_ok_and(|found| found == to);
    let there = processes.filter(|process| leads_to(&process.path().join("cwd"), &directory));
    // A process may end at any time.
    let descriptors = there.filter_map(|process| process.path().join("fd").read_dir().ok());
    descriptors.flatten().flatten().any(|open| leads_to(&open.path(), Path::new(&socket)))
}

fn contents(file: &NamedTempFile) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut file = file.reopen().expect("open a temporary file again");
    file.rewind().expect("rewind a temporary file");
    file.read_to_end(&mut bytes).expect("read a temporary file");
    bytes
}

fn command_line(command: &Command) -> String {
    let mut line = command.get_program().to_string_lossy().into_owned();
    for argument in command.get_args() {
        let argument = argument.to_string_lossy();
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./:,+%@".contains(c);
        if !argument.is_empty() && argument.chars().all(plain) {
            let _ = write!(line, " {argument}");
        } else {
            let _ = write!(line, " '{argument}'");
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Programs that bind a socket, and listen on it only once a file is there.
    fn listens_after(file: &Path, directory: &Path, name: &Path) -> Command {
        let mut command = Command::new("python3");
        let text = "import os, socket, sys, time\n\
                    ours = socket.socket(socket.AF_UNIX)\n\
                    ours.bind(sys.argv[1])\n\
                    while not os.path.exists(sys.argv[2]): time.sleep(0.01)\n\
                    ours.listen()\n\
                    time.sleep(1000)\n";
        let _ = command.current_dir(directory).arg("-c").arg(text).arg(name).arg(file);
        command
    }

    #[test]
    fn a_socket_is_ready_when_somebody_new_listens_on_it() {
        let directory = tempfile::tempdir().unwrap();
        let (socket, file) = (directory.path().join("a socket"), directory.path().join("file"));
        for name in [socket.as_path(), Path::new("a socket")] {
            let mut command = listens_after(&file, directory.path(), name);
            // One that listened there before, whose name is another's now.
            let _older = std::os::unix::net::UnixListener::bind(&socket).unwrap();
            std::fs::remove_file(&socket).unwrap();
            let before = listeners(&socket, Some(directory.path()));
            // One that begins to listen meanwhile, on another socket of the same relative name.
            let elsewhere = tempfile::tempdir().unwrap();
            std::fs::write(elsewhere.path().join("file"), "").unwrap();
            let stranger = Path::new("a socket");
            let mut stranger =
                listens_after(Path::new("file"), elsewhere.path(), stranger).spawn().unwrap();
            let server = thread::scope(|scope| {
                let waits = scope.spawn(|| Server::start(&mut command, Ready::Socket(&socket)));
                while !socket.exists() {
                    assert!(!waits.is_finished(), "ready without a file");
                    thread::yield_now();
                }
                let refused = std::os::unix::net::UnixStream::connect(&socket).unwrap_err();
                assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
                let other = elsewhere.path().join("a socket");
                while std::os::unix::net::UnixStream::connect(&other).is_err() {
                    thread::yield_now();
                }
                let found = listeners(&socket, Some(directory.path()));
                assert_eq!(found, before, "what is elsewhere is not taken for it");
                std::fs::write(&file, "").unwrap();
                waits.join().unwrap()
            });
            drop(std::os::unix::net::UnixStream::connect(&socket).unwrap());
            let _ = server.kill();
            stranger.kill().unwrap();
            let _ = stranger.wait().unwrap();
            std::fs::remove_file(&socket).unwrap();
            std::fs::remove_file(&file).unwrap();
        }
    }

    #[test]
    fn a_failure_shows_the_command_and_both_outputs() {
        let done = run_program("sh", ["-c", "echo out; echo err >&2; exit 3"]).exits(3);
        let report = done.report();
        for part in ["sh -c 'echo out", "exit status: 3", "--- stdout\nout", "--- stderr\nerr"] {
            assert!(report.contains(part), "{part:?} is not in {report:?}");
        }
    }

    #[test]
    fn a_daemon_that_lives_on_does_not_keep_the_caller() {
        assert_eq!(run_program("sh", ["-c", "sleep 3 & echo $!"]).ok().text().lines().count(), 1);
    }

    #[test]
    fn a_server_is_ready_by_its_line_and_ends_by_sigterm() {
        let mut command = Command::new("sh");
        command
            .args(["-c", "trap 'echo bye; exit 7' TERM; echo ready; while :; do sleep 0.01; done"]);
        let server = Server::start(&mut command, Ready::Line("ready"));
        let done = server.stop().exits(7);
        assert_eq!(done.text(), "ready\nbye\n");
    }
}
