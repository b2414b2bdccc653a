//! `qemu-storage-daemon` by QEMU and by us: the same command lines and QMP sessions, and the same for clients.

use crate::serving::ISOBATH;
use isobath_testkit::process::{PATIENCE, Ready, Server, run};
use isobath_testkit::{args, qemu, until};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;
use tempfile::TempDir;

const SIZE: u64 = 4 << 20;

/// A directory with a chain, and the link to our program.
struct World {
    directory: TempDir,
}

impl World {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let world = Self { directory };
        symlink(ISOBATH, world.at("qemu-storage-daemon")).unwrap();
        qemu::create(&world.at("base.qcow2"), "qcow2", SIZE, "");
        let _ = qemu::io(&world.at("base.qcow2"), "qcow2", &["write -P 1 0 1M"]).ok();
        qemu::create_overlay(&world.at("top.qcow2"), &world.at("base.qcow2"), "qcow2", "");
        let _ = qemu::io(&world.at("top.qcow2"), "qcow2", &["write -P 2 2M 100k"]).ok();
        fs::write(world.at("fuse"), "").unwrap();
        world
    }

    fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// One of the two programs, which is to run in the directory.
    fn program(&self, ours: bool) -> Command {
        let name = "qemu-storage-daemon";
        let program = if ours { self.at(name) } else { qemu::program(name) };
        self.command(program)
    }

    fn command(&self, program: PathBuf) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.directory.path());
        command
    }
}

#[test]
fn exports_of_the_command_line_show_the_same() {
    let world = World::new();
    let socket = world.at("nbd");
    let lines = [
        "--blockdev driver=file,node-name=file,filename=top.qcow2".to_owned(),
        "--blockdev qcow2,node-name=disk,file=file".into(),
        format!("--nbd-server addr.type=unix,addr.path={}", socket.display()),
        "--export nbd,id=one,node-name=disk,name=a,description=text,writable=on".into(),
        "--export type=nbd,id=two,node-name=disk,name=b,allocation-depth=on".into(),
        format!("--export fuse,id=three,node-name=disk,mountpoint={}", world.at("fuse").display()),
        format!(
            "--export vhost-user-blk,id=four,node-name=disk,addr.type=unix,addr.path={}",
            world.at("vhost").display()
        ),
        "--pidfile pid".into(),
    ];
    let uri = |name: &str| format!("nbd+unix:///{name}?socket={}", socket.display());
    let look = |ours| {
        let mut command = world.program(ours);
        command.args(lines.iter().flat_map(|line| line.split_whitespace()));
        let server = Server::start(&mut command, Ready::File(&world.at("pid")));
        assert!(world.at("vhost").exists(), "ours {ours}");
        let list = run(Command::new(qemu::program("qemu-nbd")).arg("-L").arg("-k").arg(&socket));
        let list = list.ok().text();
        let list: Vec<String> =
            list.lines().filter(|line| line.starts_with(" export:")).map(str::to_owned).collect();
        let disk = fs::read(world.at("fuse")).unwrap();
        let write = ["write -P 7 3M 64k", "flush"];
        let _ = qemu::io(Path::new(&uri("a")), "raw", &write).ok();
        assert_ne!(qemu::io(Path::new(&uri("b")), "raw", &write).code(), 0, "ours {ours}");
        let raw = world.at("raw");
        let _ = qemu::img(args!["convert", "-f", "raw", "-O", "raw", uri("b"), &raw]).ok();
        let written = fs::read(raw).unwrap();
        let done = if ours { server.stop() } else { server.stop_qemu() }.ok();
        assert!(done.stderr.is_empty(), "{}", done.report());
        assert!(fs::read(world.at("fuse")).unwrap().is_empty(), "ours {ours}: still mounted");
        assert!(!world.at("pid").exists(), "ours {ours}");
        let _ = fs::remove_file(&socket);
        qemu::assert_clean(&world.at("top.qcow2"));
        let _ = qemu::io(&world.at("top.qcow2"), "qcow2", &["write -P 0 3M 64k"]).ok();
        let mut list = list;
        list.sort();
        (list, disk, written)
    };
    let (theirs, ours) = (look(false), look(true));
    assert_eq!(ours.0, theirs.0);
    assert!(ours.1 == theirs.1 && ours.2 == theirs.2, "the disks differ");
    assert!(ours.2[3 << 20..].starts_with(&[7; 1024]));
}

#[test]
fn a_node_with_limits_shows_the_same() {
    let world = World::new();
    let socket = world.at("nbd");
    let uri = format!("nbd+unix:///slow?socket={}", socket.display());
    let lines = [
        "--object throttle-group,id=old,x-iops-total=1000,x-iops-total-max=2000".to_owned(),
        "--object throttle-group,id=g,limits.iops-total=1000,limits.bps-write=100000000".into(),
        "--blockdev driver=file,node-name=file,filename=top.qcow2".into(),
        "--blockdev qcow2,node-name=disk,file=file".into(),
        "--blockdev throttle,node-name=slow,throttle-group=g,file=disk".into(),
        format!("--nbd-server addr.type=unix,addr.path={}", socket.display()),
        "--export nbd,id=one,node-name=slow,name=slow,writable=on".into(),
        "--pidfile pid".into(),
    ];
    let [theirs, ours] = [false, true].map(|ours| {
        let mut command = world.program(ours);
        command.args(lines.iter().flat_map(|line| line.split_whitespace()));
        let server = Server::start(&mut command, Ready::File(&world.at("pid")));
        let write = ["write -P 7 3M 64k", "flush"];
        let _ = qemu::io(Path::new(&uri), "raw", &write).ok();
        let raw = world.at("raw");
        let _ = qemu::img(args!["convert", "-f", "raw", "-O", "raw", &uri, &raw]).ok();
        let done = if ours { server.stop() } else { server.stop_qemu() }.ok();
        assert!(done.stderr.is_empty(), "{}", done.report());
        let _ = fs::remove_file(&socket);
        fs::read(raw).unwrap()
    });
    assert!(ours == theirs, "the disks differ");
    for line in [
        "--object throttle-group,id=g,x-iops=1",
        "--object throttle-group,x-iops-total=1",
        "--object throttle-group,id=g,limits.iops-total=x",
        "--blockdev throttle,node-name=slow,throttle-group=h,file.driver=file,file.filename=top.qcow2",
    ] {
        let done = |ours| run(world.program(ours).args(line.split_whitespace()));
        let [theirs, ours] = [false, true].map(done);
        assert_eq!((ours.code(), theirs.code()), (1, 1), "{line}: {}", ours.report());
    }
}

/// A session on standard input and output. Returns the replies, and what was left at the end.
fn session(world: &World, ours: bool, options: &str, lines: &[&str]) -> Vec<Value> {
    let mut command = world.program(ours);
    command.args(["--chardev", "stdio,id=qmp", "--monitor", "qmp"]);
    command.args(options.split_whitespace());
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let mut output = BufReader::new(output).lines();
    let mut next = || -> Option<Value> {
        let line = output.next()?.unwrap();
        Some(serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line}: {error}")))
    };
    assert!(next().unwrap()["QMP"].is_object(), "ours {ours}");
    let mut replies = Vec::new();
    for line in lines {
        writeln!(input, "{line}").unwrap();
        replies.push(loop {
            let reply = next().unwrap_or_else(|| panic!("{line}: it ended"));
            if reply["event"].is_null() {
                break reply;
            }
        });
    }
    while next().is_some() {}
    assert!(child.wait().unwrap().success(), "ours {ours}");
    replies
}

#[test]
fn a_session_on_standard_input_does_the_same() {
    let world = World::new();
    let server = format!("--nbd-server addr.type=unix,addr.path={}", world.at("nbd").display());
    let lines = [
        r#"{"execute": "qmp_capabilities"}"#,
        r#"{"execute": "query-block-exports"}"#,
        r#"{"execute": "blockdev-add", "arguments": {"driver": "file", "node-name": "f", "filename": "nosuch"}}"#,
        r#"{"execute": "blockdev-add", "arguments": {"driver": "file", "node-name": "f", "filename": "top.qcow2"}}"#,
        r#"{"execute": "blockdev-add", "arguments": {"driver": "qcow2", "node-name": "d", "file": "f"}}"#,
        r#"{"execute": "blockdev-add", "arguments": {"driver": "qcow2", "node-name": "d", "file": "f"}}"#,
        r#"{"execute": "block-export-add", "arguments": {"type": "nbd", "id": "e", "node-name": "d", "name": "x"}}"#,
        r#"{"execute": "query-block-exports"}"#,
        r#"{"execute": "blockdev-del", "arguments": {"node-name": "nosuch"}}"#,
        r#"{"execute": "block-export-del", "arguments": {"id": "nosuch"}}"#,
        r#"{"execute": "quit"}"#,
    ];
    let [theirs, ours] = [false, true].map(|ours| session(&world, ours, &server, &lines));
    for ((line, theirs), ours) in lines.iter().zip(&theirs).zip(&ours) {
        assert_eq!(ours["return"], theirs["return"], "{line}: {ours}");
        assert_eq!(ours["error"]["class"], theirs["error"]["class"], "{line}: {ours}");
    }
    for (line, theirs) in lines.iter().zip(&theirs).filter(|(line, _)| line.contains("nosuch")) {
        let at = lines.iter().position(|other| other == line).unwrap();
        assert_eq!(ours[at]["error"]["desc"], theirs["error"]["desc"], "{line}");
    }
    qemu::assert_clean(&world.at("top.qcow2"));
}

#[test]
fn it_goes_on_at_the_end_of_its_input_and_in_the_background() {
    let world = World::new();
    for ours in [false, true] {
        let socket = world.at("nbd");
        let mut command = world.program(ours);
        command.args(["--blockdev", "driver=file,node-name=f,filename=top.qcow2"]);
        command.args(["--blockdev", "driver=qcow2,node-name=d,file=f"]);
        command.arg("--nbd-server").arg(format!("addr.type=unix,addr.path={}", socket.display()));
        command.args(["--export", "nbd,id=e,node-name=d,writable=on"]);
        command.args(["--pidfile", "pid", "--daemonize"]);
        // QEMU's keeps its output open.
        let nowhere = || Stdio::null();
        let started = command.stdin(nowhere()).stdout(nowhere()).stderr(nowhere()).status();
        assert!(started.unwrap().success(), "ours {ours}");
        let pid: i32 = fs::read_to_string(world.at("pid")).unwrap().trim().parse().unwrap();
        let uri = format!("nbd+unix:///d?socket={}", socket.display());
        let _ = qemu::io(Path::new(&uri), "raw", &["read -P 1 0 1M", "read -P 2 2M 100k"]).ok();
        let status = || fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let mut told = false;
        until("the daemon's end", || {
            // QEMU's misses a signal that comes just before it waits.
            if !told || !ours {
                // SAFETY: it is a process of this test.
                unsafe { libc::kill(pid, libc::SIGTERM) };
                told = true;
            }
            status().is_empty() || status().contains(") Z ")
        });
        let _ = fs::remove_file(world.at("pid"));
        let _ = fs::remove_file(&socket);
        let mut command = world.program(ours);
        command.args(["--chardev", "stdio,id=qmp", "--monitor", "qmp", "--pidfile", "pid"]);
        let server = Server::start(command.stdin(Stdio::null()), Ready::File(&world.at("pid")));
        let _ = if ours { server.stop() } else { server.stop_qemu() }.ok();
    }
}

#[test]
fn command_lines_are_refused_as_by_qemu() {
    let world = World::new();
    for line in [
        "--blockdev driver=file,node-name=a,filename=nosuch",
        "--blockdev driver=qcow2,node-name=a,file=b",
        "--blockdev driver=file,filename=top.qcow2,node-name=x,foo=1",
        "--blockdev x",
        "--blockdev driver=file,filename=top.qcow2,node-name=a,read-only=maybe",
        "--nbd-server addr.type=unix,addr.path=/nosuch/a",
    ] {
        let done = |ours| run(world.program(ours).args(line.split_whitespace()));
        let [theirs, ours] = [false, true].map(done);
        assert_eq!((ours.code(), theirs.code()), (1, 1), "{line}: {}", ours.report());
        if !line.contains("/nosuch/a") {
            assert_eq!(ours.stderr.lines().next(), theirs.stderr.lines().next(), "{line}");
        }
    }
    for (line, words) in [
        ("--monitor a", "chardev \"a\" not found"),
        ("--chardev stdio", "Parameter 'id' is missing"),
        ("--chardev null,id=a", "chardev backend 'null' is not supported"),
        ("--chardev socket,id=a,path=x", "connecting to a socket is not supported"),
        ("--nbd-server addr.type=x", "does not accept value 'x'"),
        ("--object iothread,id=a", "does not accept value 'iothread'"),
        ("--export nbd,id=a,node-name=b", "NBD server not running"),
        ("--foo", "unrecognized option '--foo'"),
    ] {
        let done = run(world.program(true).args(line.split_whitespace()));
        assert_eq!(done.code(), 1, "{line}: {}", done.report());
        assert!(done.stderr.contains(words), "{line}: {}", done.report());
    }
}

/// Whoever waits for a socket may stop the server at once.
#[test]
fn a_signal_at_the_first_sight_of_a_socket_ends_it_in_order() {
    let world = World::new();
    let socket = world.at("nbd");
    for round in 0..20 {
        let mut command = world.program(true);
        command.arg("--nbd-server").arg(format!("addr.type=unix,addr.path={}", socket.display()));
        let mut server = command.spawn().unwrap();
        let deadline = Instant::now() + PATIENCE;
        while !socket.exists() {
            assert!(Instant::now() < deadline, "round {round}: no socket");
            std::hint::spin_loop();
        }
        // SAFETY: `kill` uses no memory of ours; the process is our child, which nobody has waited for.
        assert_eq!(unsafe { libc::kill(server.id() as libc::pid_t, libc::SIGTERM) }, 0);
        let status = server.wait().unwrap();
        assert!(status.success(), "round {round}: {status}");
    }
}

/// Who waits for the daemon must not take it for one that serves.
#[test]
fn a_daemon_that_is_ended_before_it_is_ready_has_failed() {
    let world = World::new();
    let silent = UnixListener::bind(world.at("silent")).unwrap();
    let backing = format!("nbd+unix:///?socket={}", world.at("silent").display());
    let create = ["create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", &backing, "waits", "1M"];
    let _ = run(world.command(qemu::program("qemu-img")).args(create)).ok();
    let blockdev = "driver=qcow2,node-name=n,file.driver=file,file.filename=waits";
    for (daemonize, code) in [(false, 0), (true, 1)] {
        let mut command = world.program(true);
        command.args(["--blockdev", blockdev]).args(daemonize.then_some("--daemonize"));
        let child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let _waits = silent.accept().unwrap();
        let own = child.id();
        let children = fs::read_to_string(format!("/proc/{own}/task/{own}/children")).unwrap();
        let server = children.split_whitespace().next().map_or(own, |pid| pid.parse().unwrap());
        // SAFETY: no memory is involved; it is this test's own process, which nobody has waited for.
        assert_eq!(unsafe { libc::kill(server as libc::pid_t, libc::SIGTERM) }, 0);
        let done = child.wait_with_output().unwrap();
        let told = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(code), "{told}");
        assert_eq!(told.contains("interrupted by a signal during startup"), daemonize, "{told}");
    }
}
