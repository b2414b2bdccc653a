//! Processes that hold keys or guests' data leave no core dump, and are closed to other programs of their user.

use crate::serving::ISOBATH;
use isobath_testkit::process::{Ready, Server, run};
use isobath_testkit::{args, qemu};
use rustix::fs::{Mode, OFlags};
use std::fs::{self, Permissions};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// The tests run as root, to whom every process is open. A server's user is another, whom a container has, too.
const USER: u32 = 65534;
/// Their environment may have it.
const VARIABLE: &str = "ISOBATH_CORE_DUMPS";

/// A directory of that user, with an image.
fn directory() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    qemu::create(&directory.path().join("vm.qcow2"), "qcow2", 1 << 20, "");
    for path in [directory.path().to_owned(), directory.path().join("vm.qcow2")] {
        std::os::unix::fs::chown(path, Some(USER), Some(USER)).unwrap();
    }
    directory
}

/// Serves the image as that user, who starts the server.
fn serve(directory: &Path, cores: Option<&str>) -> Server {
    let program = Program::new();
    let mut command = Command::new(program.name());
    command.uid(USER).gid(USER).env_remove(VARIABLE);
    if let Some(value) = cores {
        command.env(VARIABLE, value);
    }
    start(&mut command, directory)
}

/// The program, by a descriptor that children have, too: the user need not be able to reach its directory.
struct Program(OwnedFd);

impl Program {
    fn new() -> Self {
        Self(rustix::fs::open(ISOBATH, OFlags::PATH, Mode::empty()).unwrap())
    }

    fn name(&self) -> String {
        format!("/proc/self/fd/{}", self.0.as_raw_fd())
    }
}

/// Serves the image by a command that executes the [`Program`].
fn start(command: &mut Command, directory: &Path) -> Server {
    command.current_dir(directory);
    command.args(["serve", "vm.qcow2", "--nbd", "unix:n", "--qmp", "unix:q", "--pid-file", "pid"]);
    Server::start(command, Ready::Line("-blockdev"))
}

/// Who owns the process's files in /proc: root, if the process is not dumpable.
fn owner(server: &Server) -> u32 {
    fs::metadata(format!("/proc/{}/mem", server.pid())).unwrap().uid()
}

/// Whether the process may leave a core dump.
fn may_dump(server: &Server) -> bool {
    let limits = fs::read_to_string(format!("/proc/{}/limits", server.pid())).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    words[4..6] != ["0", "0"]
}

#[test]
fn a_server_leaves_no_core_dump_and_is_closed_to_its_users_programs() {
    for value in [None, Some("off")] {
        let directory = directory();
        let server = serve(directory.path(), value);
        assert_eq!((owner(&server), may_dump(&server)), (0, false), "{value:?}");
        // It serves all the same.
        let uri = format!("nbd+unix:///vm?socket={}", directory.path().join("n").display());
        let _ = qemu::io(Path::new(&uri), "raw", &["write -P 7 0 1M", "read -P 7 0 1M"]).ok();
        let done = server.stop().ok();
        assert!(done.stderr.is_empty(), "{}", done.report());
    }
}

#[test]
fn core_dumps_are_left_on_if_that_is_asked_for() {
    let directory = directory();
    let server = serve(directory.path(), Some("on"));
    assert_eq!(owner(&server), USER);
    let _ = server.stop().ok();
}

#[test]
fn a_server_whose_kernel_would_hide_its_own_locks_from_it_stays_open_to_its_users_programs() {
    let directory = directory();
    // Before Linux 5.14 the kernel bars the user from it, once the process is closed.
    let barred = directory.path().join("fdinfo");
    fs::create_dir(&barred).unwrap();
    fs::set_permissions(&barred, Permissions::from_mode(0o700)).unwrap();
    let script = "mount --bind fdinfo /proc/$$/fdinfo && user=$1 && shift && \
                  exec setpriv --reuid=$user --regid=$user --clear-groups -- \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"]);
    let program = Program::new();
    command.arg(USER.to_string()).arg(program.name()).env_remove(VARIABLE);
    let server = start(&mut command, directory.path());
    // A core dump is withheld all the same.
    assert_eq!((owner(&server), may_dump(&server)), (USER, false));
    let done = server.stop().ok();
    assert!(done.stderr.contains("/proc/self/fdinfo"), "{}", done.report());
}

#[test]
fn a_command_that_reads_a_secret_leaves_no_core_dump() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::write(at("secret"), "secret").unwrap();
    let object = format!("secret,id=s,file={}", at("secret").display());
    let create = args![
        "create",
        "-q",
        "-f",
        "luks",
        "--object",
        &object,
        "-o",
        "key-secret=s,iter-time=10",
        "disk",
        "1M"
    ];
    let _ = run(Command::new(ISOBATH).args(create).current_dir(directory.path())).ok();
    // It has read the secret, and waits for a server that says nothing.
    let silent = UnixListener::bind(at("silent")).unwrap();
    let mut command = Command::new(ISOBATH);
    command.current_dir(directory.path()).stderr(Stdio::null()).env_remove(VARIABLE);
    command.args(["convert", "-n", "-f", "luks", "-O", "raw", "--secret-file", "secret", "disk"]);
    let mut child = command.arg("nbd+unix:///x?socket=silent").spawn().unwrap();
    let (client, _) = silent.accept().unwrap();
    let limits = fs::read_to_string(format!("/proc/{}/limits", child.id())).unwrap();
    drop((client, silent));
    assert_eq!(child.wait().unwrap().code(), Some(1));
    let line = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
    assert_eq!(line.split_whitespace().nth(5), Some("0"), "{line}");
}
