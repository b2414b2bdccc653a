//! How `isobath serve` begins and ends: signals, crashes, daemons, locks, and what it refuses.

use crate::serving::{ISOBATH, QemuIo, Served};
use isobath_testkit::process::{Finished, PATIENCE, Ready, Server, run, run_program};
use isobath_testkit::{args, qemu, tools, until, until_some};
use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::ptr;
use std::thread;

const MIB: u64 = 1 << 20;

/// A disk of 64 MiB: a base and an overlay by QEMU.
fn overlay(directory: &Path) -> std::path::PathBuf {
    let (base, image) = (directory.join("base.qcow2"), directory.join("image.qcow2"));
    qemu::create(&base, "qcow2", 64 * MIB, "");
    let _ = qemu::io(&base, "qcow2", &["write -P 0xba 0 64M"]).ok();
    qemu::create_overlay(&image, &base, "qcow2", "cluster_size=16k");
    image
}

/// A client that writes at random, without end, to the second half of the disk.
struct Load(Child);

impl Load {
    fn start(uri: &str) -> Self {
        let fio = Command::new(tools::require("fio"))
            // By a thread: a job that is a process has a session of its own, and outlives a kill of its parent or
            // of the parent's process group.
            .args(["--name=load", "--thread"])
            .args(["--ioengine=nbd", "--rw=randwrite", "--bsrange=512-64k"])
            .args(["--iodepth=16", "--time_based", "--runtime=600", "--offset=32m", "--size=32m"])
            .args(["--fsync=40", &format!("--uri={uri}")])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self(fio)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Serves an overlay, has it written to under load with a flush after each write, ends the server by
/// the signal, and looks for what was flushed. Gives what the server said, and `qemu-img check`: after
/// a recovery, if it refused the image because of a journal.
fn ended_under_load(signal: i32, cache: &str, metadata: &str) -> (Finished, Finished) {
    let directory = tempfile::tempdir().unwrap();
    let image = overlay(directory.path());
    let empty = image.metadata().unwrap().len();
    let options = ["--threads", "2", "--cache", cache, "--metadata", metadata];
    let served = Served::start(&[&image], &options);
    let _load = Load::start(&served.uri(""));
    let mut client = QemuIo::open("raw", served.uri(""));
    let mut flushed = Vec::new();
    until("much that the load has allocated", || {
        if image.metadata().unwrap().len() >= empty + 12 * MIB && flushed.len() >= 30 {
            return true;
        }
        let number = flushed.len() as u64 % 200;
        let (offset, pattern) = (number * 150_001, number % 250 + 1);
        client.ok(&format!("write -P {pattern} {offset} 100000"));
        client.ok("flush");
        flushed.push((offset, pattern));
        false
    });
    served.server.signal(signal);
    let done = served.server.wait();
    // The kernel ends a killed process's rings, and with them its locks, a moment after the process.
    let mut check = until_some("the end of a killed server's locks", || {
        let check = qemu::check(&image);
        (signal != libc::SIGKILL || !check.stderr.contains("lock")).then_some(check)
    });
    let refused = check.stderr.contains("isobath check -r all");
    assert_eq!(refused, signal == libc::SIGKILL && metadata != "ordered", "{}", check.report());
    if refused {
        let recovered = match metadata {
            "embedded" => run_program(Path::new(ISOBATH), args!["seal", &image]),
            _ => run_program(Path::new(ISOBATH), args!["check", "-r", "all", &image]),
        };
        let _ = recovered.ok();
        check = qemu::check(&image);
    }
    let reads: Vec<_> = flushed
        .iter()
        .map(|(offset, pattern)| format!("read -P {pattern} {offset} 100000"))
        .collect();
    let read = qemu::io(&image, "qcow2", &reads).ok();
    assert!(!read.text().contains("Pattern verification failed"), "{}", read.report());
    // What nobody wrote is the backing file's.
    let gap = qemu::io(&image, "qcow2", &["read -P 0xba 100000 50001"]).ok();
    assert!(!gap.text().contains("Pattern verification failed"), "{}", gap.report());
    (done, check)
}

#[test]
fn sigterm_under_load_leaves_a_clean_image() {
    let ways = [
        (libc::SIGTERM, "writeback", "auto"),
        (libc::SIGINT, "none", "journal"),
        (libc::SIGTERM, "writeback", "ordered"),
        (libc::SIGTERM, "none", "embedded"),
    ];
    for (signal, cache, metadata) in ways {
        let (done, check) = ended_under_load(signal, cache, metadata);
        let _ = done.ok();
        let _ = check.ok();
    }
}

#[test]
fn sigkill_under_load_leaves_no_more_than_leaks() {
    let (done, check) = ended_under_load(libc::SIGKILL, "writeback", "ordered");
    assert_eq!(done.code(), -1);
    assert!([0, 3].contains(&check.code()), "{}", check.report());
}

#[test]
fn sigkill_under_load_leaves_what_recovers_everything() {
    for (cache, metadata) in [
        ("writeback", "auto"),
        ("writeback", "journal"),
        ("writeback", "embedded"),
        ("none", "embedded"),
    ] {
        let (done, check) = ended_under_load(libc::SIGKILL, cache, metadata);
        assert_eq!(done.code(), -1);
        let _ = check.ok();
    }
}

/// An image is closed for as long as the storage below it does not answer.
#[test]
fn further_signals_are_answered_by_what_is_waited_for() {
    let directory = tempfile::tempdir().unwrap();
    let (image, socket) = (directory.path().join("image"), directory.path().join("image.sock"));
    qemu::create(&image, "raw", MIB, "");
    let below = qemu::nbd(&image, "raw", &socket, &[]);
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let served = Served::start(&[&uri], &["--format", "raw"]);
    let mut client = QemuIo::open("raw", served.uri(""));
    client.ok("write -P 7 0 1M");
    below.signal(libc::SIGSTOP);
    served.server.signal(libc::SIGTERM);
    // The listener is closed when the first signal has been heard.
    until("the listener's end", || !served.socket.exists());
    let (mut count, mut closing) = (0, 0);
    let mut signals = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP].into_iter().cycle();
    while closing < 3 {
        served.server.signal(signals.next().unwrap());
        until("an answer to a further signal", || {
            let answers = served.server.log().matches("still ending: waiting for ").count();
            assert!(answers <= count + 1, "{}", served.server.log());
            answers == count + 1
        });
        count += 1;
        closing = served.server.log().matches("waiting for the images to be flushed").count();
    }
    below.signal(libc::SIGCONT);
    let done = served.server.wait().exits(0);
    assert!(done.stderr.contains("SIGKILL"), "{}", done.report());
    drop((client, below));
    let _ = qemu::io(&image, "raw", &["read -P 7 0 1M"]).ok();
}

/// Each program that serves, with writes that were answered and not flushed, gets all signals in one moment: the second
/// one is there before the server has acted on the first.
#[test]
fn signals_that_come_together_lose_no_answered_write() {
    let blockdev = "qcow2,node-name=n,file.driver=file,file.filename=DIR/image.qcow2";
    let commands = [
        "serve --nbd unix:DIR/nbd --metadata journal DIR/image.qcow2".to_owned(),
        "serve --nbd unix:DIR/nbd --metadata embedded DIR/image.qcow2".to_owned(),
        "serve --nbd unix:DIR/nbd --metadata ordered DIR/image.qcow2".to_owned(),
        "serve --nbd unix:DIR/nbd --vhost-user-blk unix:DIR/vu DIR/image.qcow2".to_owned(),
        "qemu-nbd -t -k DIR/nbd DIR/image.qcow2".to_owned(),
        format!(
            "qemu-storage-daemon --nbd-server addr.type=unix,addr.path=DIR/nbd --blockdev {blockdev} --export \
             nbd,id=e,node-name=n,writable=on"
        ),
    ];
    for line in commands {
        let directory = tempfile::tempdir().unwrap();
        let image = overlay(directory.path());
        let line = line.replace("DIR", directory.path().to_str().unwrap());
        let socket = directory.path().join("nbd");
        let mut command = Command::new(ISOBATH);
        command.args(line.split_whitespace());
        let server = Server::start(&mut command, Ready::Socket(&socket));
        let uri = format!("nbd+unix:///?socket={}", socket.display());
        let mut client = QemuIo::open("raw", uri);
        client.ok("write -P 7 0 3M");
        client.ok("write -P 8 10000 5000");
        server.signal(libc::SIGSTOP);
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
            server.signal(signal);
        }
        server.signal(libc::SIGCONT);
        let done = server.wait().exits(0);
        drop((client, done));
        qemu::assert_clean(&image);
        let read = ["read -P 7 0 10000", "read -P 8 10000 5000", "read -P 7 15000 3130728"];
        let read = qemu::io(&image, "qcow2", &read).ok();
        assert!(!read.text().contains("Pattern verification failed"), "{line}: {}", read.report());
    }
}

/// A QMP client that has negotiated.
struct Control(BufReader<UnixStream>);

impl Control {
    fn connect(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut control = Self(BufReader::new(stream));
        assert!(control.line().contains("QMP"));
        control.send(r#"{"execute": "qmp_capabilities"}"#);
        assert!(control.line().contains("return"));
        control
    }

    fn send(&mut self, command: &str) {
        self.0.get_mut().write_all(command.as_bytes()).unwrap();
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        line
    }

    /// The reply to a command, after events.
    fn reply(&mut self) -> String {
        loop {
            let line = self.line();
            if !line.contains("\"event\"") {
                return line;
            }
        }
    }
}

#[test]
fn a_qmp_command_that_hangs_does_not_keep_the_server() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let image = overlay(directory.path());
    // An image whose header names an export of a server that accepts, and says nothing.
    let silent = UnixListener::bind(path("silent")).unwrap();
    let backing = format!("nbd+unix:///?socket={}", path("silent").display());
    let made = args![
        "create",
        "-q",
        "-u",
        "-f",
        "qcow2",
        "-b",
        backing,
        "-F",
        "raw",
        path("hostile"),
        "1M"
    ];
    let _ = run_program(qemu::program("qemu-img"), made).ok();
    let qmp = format!("unix:{}", path("qmp").display());
    let served = Served::start(&[&image], &["--metadata", "journal", "--qmp", &qmp]);
    let mut client = QemuIo::open("raw", served.uri(""));
    client.ok("write -P 7 0 1M");
    let add = |name: &str| {
        let file = path("hostile");
        let file = format!(r#"{{"driver": "file", "filename": "{}"}}"#, file.display());
        let node = format!(r#"{{"driver": "qcow2", "node-name": "{name}", "file": {file}}}"#);
        format!(r#"{{"execute": "blockdev-add", "arguments": {node}}}"#)
    };
    let mut control = Control::connect(&path("qmp"));
    control.send(&add("n"));
    let _waits = silent.accept().unwrap();
    // One that waits for the first one, and would hang as well. It is read together with the command before it.
    let mut other = Control::connect(&path("qmp"));
    other.send(&format!(r#"{{"execute": "query-status"}} {}"#, add("o")));
    let reply = other.reply();
    assert!(reply.contains("running"), "{reply}");
    served.server.signal(libc::SIGTERM);
    let done = served.server.wait().exits(0);
    for control in [&mut control, &mut other] {
        let reply = control.reply();
        assert!(reply.contains("the server is shutting down"), "{reply}: {}", done.report());
    }
    drop(client);
    qemu::assert_clean(&image);
    let _ = qemu::io(&image, "qcow2", &["read -P 7 0 1M"]).ok();
}

#[test]
fn a_snapshot_that_is_given_up_is_not_said_to_have_failed() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let image = overlay(directory.path());
    // An overlay that there is already, below which a server is looked for that says nothing.
    let silent = UnixListener::bind(path("silent")).unwrap();
    let backing = format!("nbd+unix:///?socket={}", path("silent").display());
    let made = ["create", "-q", "-u", "-f", "qcow2", "-F", "qcow2", "-b", &backing];
    let made = made.map(OsString::from).into_iter().chain(args![path("new"), "64M"]);
    let _ = run_program(qemu::program("qemu-img"), made).ok();
    let qmp = format!("unix:{}", path("qmp").display());
    let options = ["--metadata", "journal", "--export-name", "vm", "--qmp", &qmp];
    let served = Served::start(&[&image], &options);
    let mut control = Control::connect(&path("qmp"));
    let new = path("new").display().to_string();
    let new = format!(r#"{{"device": "vm", "snapshot-file": "{new}", "mode": "existing"}}"#);
    control.send(&format!(r#"{{"execute": "blockdev-snapshot-sync", "arguments": {new}}}"#));
    let _waits = silent.accept().unwrap();
    served.server.signal(libc::SIGTERM);
    let _ = served.server.wait().exits(0);
    let reply = control.reply();
    assert!(reply.contains("whether it has taken effect is not known"), "{reply}");
}

#[test]
fn a_job_that_hangs_does_not_keep_the_server() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    qemu::create(&path("base"), "raw", 64 * MIB, "");
    let base = qemu::nbd(&path("base"), "raw", &path("base.sock"), &["-r"]);
    let backing = format!("nbd+unix:///?socket={}", path("base.sock").display());
    let image = path("image.qcow2");
    let made = args!["create", "-q", "-f", "qcow2", "-b", backing, "-F", "raw", &image];
    let _ = run_program(qemu::program("qemu-img"), made).ok();
    let qmp = format!("unix:{}", path("qmp").display());
    let served = Served::start(&[&image], &["--metadata", "journal", "--qmp", &qmp]);
    let mut client = QemuIo::open("raw", served.uri(""));
    client.ok("write -P 7 0 1M");
    let mut control = Control::connect(&path("qmp"));
    base.signal(libc::SIGSTOP);
    control.send(r#"{"execute": "block-stream", "arguments": {"job-id": "j", "device": "image"}}"#);
    let reply = control.reply();
    assert!(reply.contains("return"), "{reply}");
    served.server.signal(libc::SIGTERM);
    let done = served.server.wait().exits(0);
    assert!(done.stderr.contains("a cancelled job does not end"), "{}", done.report());
    base.signal(libc::SIGCONT);
    drop(client);
    qemu::assert_clean(&image);
    let _ = qemu::io(&image, "qcow2", &["read -P 7 0 1M"]).ok();
    drop(base);
}

/// Creates an image of 1 MiB whose header names an export of a server as its data file, and starts that server.
fn data_elsewhere(image: &Path, data: &Path, socket: &Path) -> Server {
    qemu::create(data, "raw", MIB, "");
    let server = qemu::nbd(data, "raw", socket, &[]);
    let name = format!("nbd+unix:///?socket={}", socket.display());
    // `qemu-img` creates a data file by a name that is as long.
    let mut plain = image.with_extension("").display().to_string();
    plain.extend(std::iter::repeat_n('-', name.len() - plain.len()));
    qemu::create(image, "qcow2", MIB, &format!("data_file={plain},data_file_raw=on"));
    let mut bytes = fs::read(image).unwrap();
    let at = bytes.windows(plain.len()).position(|window| window == plain.as_bytes()).unwrap();
    bytes[at..at + name.len()].copy_from_slice(name.as_bytes());
    fs::write(image, bytes).unwrap();
    server
}

/// The storage of a disk that a client has added does not answer, and there is a command that closes it, or none.
#[test]
fn an_added_disk_that_hangs_keeps_no_other_from_being_closed() {
    let delete = r#"{"execute": "blockdev-del", "arguments": {"node-name": "n"}}"#;
    // Both wait for limits.
    thread::scope(|scope| {
        for command in [None, Some(delete)] {
            scope.spawn(move || end_beside_a_hung_disk(command));
        }
    });
}

/// Ends a server to which a disk was added whose storage does not answer. Before that a client sends a command that
/// closes the disk, if there is one.
fn end_beside_a_hung_disk(command: Option<&str>) {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let (image, added, socket) = (overlay(directory.path()), path("added"), path("added.sock"));
    let below = data_elsewhere(&added, &path("data"), &socket);
    let qmp = format!("unix:{}", path("qmp").display());
    let served = Served::start(&[&image], &["--metadata", "journal", "--qmp", &qmp]);
    let mut client = QemuIo::open("raw", served.uri(""));
    client.ok("write -P 7 0 1M");
    let mut control = Control::connect(&path("qmp"));
    let file = format!(r#"{{"driver": "file", "filename": "{}"}}"#, added.display());
    let node = format!(r#"{{"driver": "qcow2", "node-name": "n", "file": {file}}}"#);
    let export = r#"{"type": "nbd", "id": "e", "node-name": "n", "name": "n", "writable": true}"#;
    control.send(&format!(r#"{{"execute": "blockdev-add", "arguments": {node}}}"#));
    let reply = control.reply();
    assert!(reply.contains("return"), "{reply}");
    control.send(&format!(r#"{{"execute": "block-export-add", "arguments": {export}}}"#));
    let reply = control.reply();
    assert!(reply.contains("return"), "{reply}");
    let mut other = QemuIo::open("raw", served.uri("n"));
    other.ok("write -P 8 0 1M");
    if command.is_some() {
        let export = r#"{"id": "e", "mode": "hard"}"#;
        control.send(&format!(r#"{{"execute": "block-export-del", "arguments": {export}}}"#));
        let reply = control.reply();
        assert!(reply.contains("return"), "{reply}");
        until("the export's end", || {
            control.send(r#"{"execute": "query-block-exports"}"#);
            !control.reply().contains("\"e\"")
        });
    }
    below.signal(libc::SIGSTOP);
    if let Some(command) = command {
        // It is read together with the one before it, which is answered.
        control.send(&format!(r#"{{"execute": "query-status"}} {command}"#));
        let reply = control.reply();
        assert!(reply.contains("running"), "{reply}");
    }
    served.server.signal(libc::SIGTERM);
    until("the limit for the disk whose storage does not answer", || {
        served
            .server
            .log()
            .contains("a disk's storage does not answer; all others are closed before it")
    });
    // It stays locked. QEMU's check refuses an image whose journal is in use.
    until("the end of the other image's journal", || {
        let check = run_program(qemu::program("qemu-img"), args!["check", "-U", &image]);
        assert!(check.code() == 0 || check.stderr.contains("journal"), "{}", check.report());
        check.code() == 0
    });
    below.signal(libc::SIGCONT);
    let done = served.server.wait().exits(0);
    drop((client, done, other, below));
    let _ = qemu::io(&image, "qcow2", &["read -P 7 0 1M"]).ok();
    let _ = qemu::io(&path("data"), "raw", &["read -P 8 0 1M"]).ok();
}

#[test]
fn a_server_that_is_out_of_descriptors_ends_when_it_is_told() {
    let directory = tempfile::tempdir().unwrap();
    let image = overlay(directory.path());
    let path = |name: &str| directory.path().join(name);
    let mut command = Command::new(ISOBATH);
    command.args(["serve", "--nbd", "unix:n", "--qmp", "unix:q", "--log", "log"]).arg(&image);
    let server = Server::start(command.current_dir(directory.path()), Ready::Line("-blockdev"));
    let limit = libc::rlimit { rlim_cur: 3, rlim_max: 3 };
    // SAFETY: the limit is a live value; the process is the server, which has not been told to end.
    let limited = unsafe {
        libc::prlimit(server.pid() as i32, libc::RLIMIT_NOFILE, &raw const limit, ptr::null_mut())
    };
    assert_eq!(limited, 0);
    let _clients = ["n", "q"].map(|name| UnixStream::connect(path(name)).unwrap());
    for what in ["cannot accept a connection", "cannot accept a QMP client"] {
        until(what, || fs::read_to_string(path("log")).unwrap().contains(what));
    }
    let _ = server.stop().ok();
}

#[test]
fn an_image_that_is_served_is_locked() {
    let directory = tempfile::tempdir().unwrap();
    let image = overlay(directory.path());
    let served = Served::start(&[&image], &[]);
    for options in [&["-c", "length"][..], &["-r", "-c", "length"]] {
        for (program, first) in [(qemu::program("qemu-io"), None), (ISOBATH.into(), Some("io"))] {
            let arguments = first.iter().chain(options);
            let done = run(Command::new(program).args(arguments).arg(&image)).exits(1);
            assert!(done.report().contains("lock"), "{}", done.report());
        }
    }
    let again = run_program(ISOBATH, args!["serve", "--nbd", "0", &image]).exits(1);
    assert!(again.stderr.contains("lock"), "{}", again.report());
    // A base is open for reading only, and may be read by others.
    let _ = run_program(
        qemu::program("qemu-io"),
        args!["-r", "-c", "length", directory.path().join("base.qcow2")],
    )
    .ok();
    let base = qemu::io(&directory.path().join("base.qcow2"), "qcow2", &["length"]).exits(1);
    assert!(base.report().contains("lock"), "{}", base.report());
    let _ = served.stop();

    let socket = directory.path().join("nbd.sock");
    let _server = qemu::nbd(&image, "qcow2", &socket, &[]);
    let done = run_program(ISOBATH, args!["serve", "--nbd", "0", &image]).exits(1);
    assert!(
        done.stderr.contains("lock") && done.stderr.contains("image.qcow2"),
        "{}",
        done.report()
    );
}

#[test]
fn a_read_only_export_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let image = overlay(directory.path());
    let before = fs::read(&image).unwrap();
    let served = Served::start(&[&image], &["--read-only"]);
    let info = run_program(tools::require("nbdinfo"), args!["--json", served.uri("")]).ok().json();
    assert_eq!(info["exports"][0]["is_read_only"], true);
    let write = qemu::io(Path::new(&served.uri("")), "raw", &["write 0 4k"]).exits(1);
    assert!(!write.text().contains("wrote"), "{}", write.report());
    let read = args!["-r", "-f", "raw", "-c", "read -P 0xba 0 64M", served.uri("")];
    let _ = run_program(qemu::program("qemu-io"), read).ok();
    let _ = served.stop();
    assert!(fs::read(&image).unwrap() == before, "a read-only server has written");
}

#[test]
fn a_daemon_is_ready_when_the_command_returns() {
    let directory = tempfile::tempdir().unwrap();
    let image = overlay(directory.path());
    let (socket, pid_file) = (directory.path().join("nbd.sock"), directory.path().join("pid"));
    let address = format!("unix:{}", socket.display());
    let start = |image: &Path, address: &str| {
        let arguments =
            args!["serve", "--daemonize", "--pid-file", &pid_file, "--nbd", address, image];
        run_program(ISOBATH, arguments)
    };
    let started = start(&image, &address).ok();
    assert!(started.text().contains("-drive"), "{}", started.report());
    let pid: i32 = fs::read_to_string(&pid_file).unwrap().trim().parse().unwrap();
    let uri = format!("nbd+unix:///image?socket={}", socket.display());
    let _ = qemu::io(Path::new(&uri), "raw", &["read -P 0xba 0 1M", "write -P 5 0 1M"]).ok();

    // What goes wrong before it is ready is told, with the exit code.
    let locked = start(&image, "0").exits(1);
    assert!(locked.stderr.contains("lock"), "{}", locked.report());
    let other = directory.path().join("other.qcow2");
    qemu::create(&other, "qcow2", MIB, "");
    let held = start(&other, "0").exits(1);
    assert!(held.stderr.contains("PID file"), "{}", held.report());
    assert!(held.stderr.contains("another process has locked it"), "{}", held.report());
    let taken = start(&other, &address).exits(1);
    assert!(taken.stderr.contains("cannot listen"), "{}", taken.report());

    // SAFETY: kill takes two integers; the process is the daemon, which has not been told to end.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGTERM) }, 0);
    until("the end of the daemon's files", || !pid_file.exists() && !socket.exists());
    // It is gone once its locks are.
    until("the end of the daemon's locks", || qemu::io(&image, "qcow2", &["length"]).code() == 0);
    qemu::assert_clean(&image);
    let _ = qemu::io(&image, "qcow2", &["read -P 5 0 1M"]).ok();
}

#[test]
fn a_daemons_messages_go_to_its_log() {
    let nbd = "addr.type=unix,addr.path=DIR/nbd";
    let blockdev = "qcow2,node-name=n,file.driver=file,file.filename=DIR/image.qcow2";
    let commands = [
        "serve --daemonize --nbd unix:DIR/nbd --pid-file pid DIR/image.qcow2 --log".to_owned(),
        "qemu-nbd --fork -t -k DIR/nbd --pid-file=pid DIR/image.qcow2".to_owned(),
        format!(
            "qemu-storage-daemon --daemonize --pidfile pid --nbd-server {nbd} --blockdev {blockdev} \
             --export nbd,id=e,node-name=n"
        ),
    ];
    for line in commands {
        messages_go_to_the_log(&line);
    }
}

/// Runs a server in the background, with its log in a file that its command line names last, or the environment.
fn messages_go_to_the_log(line: &str) {
    let directory = tempfile::tempdir().unwrap();
    let image = overlay(directory.path());
    let path = |name: &str| directory.path().join(name);
    let start = |log: &str| {
        let line = line.replace("DIR", directory.path().to_str().unwrap());
        let mut command = Command::new(ISOBATH);
        command.args(line.split_whitespace()).env("ISOBATH_LOG", "info");
        if line.ends_with("--log") {
            command.arg(log);
        } else {
            command.env("ISOBATH_LOG_FILE", log);
        }
        run(command.current_dir(directory.path()))
    };
    let refused = start("base.qcow2").exits(1);
    assert!(refused.stderr.contains("cannot log to 'base.qcow2'"), "{}", refused.report());
    let _ = start("").exits(1);
    assert!(!path("nbd").exists());
    fs::write(path("log"), "before\n").unwrap();
    let started = start("log").ok();
    assert_eq!(started.stderr, "");
    let pid: i32 = fs::read_to_string(path("pid")).unwrap().trim().parse().unwrap();
    // A client that sends what is no handshake is noted.
    let mut client = UnixStream::connect(path("nbd")).unwrap();
    client.write_all(&[0xff; 64]).unwrap();
    drop(client);
    let logged = || fs::read_to_string(path("log")).unwrap();
    until("a message in the log", || logged().contains("a connection ended with an error"));
    assert!(logged().starts_with("before\n"), "{}", logged());
    // SAFETY: kill takes two integers; the process is the daemon, which has not been told to end.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGTERM) }, 0);
    until("the end of the daemon's locks", || qemu::io(&image, "qcow2", &["length"]).code() == 0);
}

#[test]
fn a_service_manager_is_told() {
    let directory = tempfile::tempdir().unwrap();
    let image = overlay(directory.path());
    let path = directory.path().join("notify.sock");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut command = Command::new(ISOBATH);
    command.args(["serve", "--nbd", "0"]).arg(&image).env("NOTIFY_SOCKET", &path);
    let server = Server::start(&mut command, Ready::Line("-blockdev"));
    let mut message = [0; 100];
    let length = manager.recv(&mut message).unwrap();
    assert_eq!(message[..length].trim_ascii(), b"READY=1");
    let _ = server.stop().ok();
    let length = manager.recv(&mut message).unwrap();
    assert_eq!(message[..length].trim_ascii(), b"STOPPING=1");
}

#[test]
fn what_cannot_be_served_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let refused = |arguments: Vec<std::ffi::OsString>, part: &str| {
        let mut all = args!["serve", "--nbd", "0"];
        all.extend(arguments);
        let done = run_program(ISOBATH, all).exits(1);
        assert!(done.stderr.contains(part), "{part:?}: {}", done.report());
    };
    refused(args![path("none.qcow2")], "none.qcow2");
    fs::write(path("raw"), vec![0; 65536]).unwrap();
    refused(args![path("raw")], "--format raw");
    refused(args!["--nbd", "localhost:http", path("raw")], "is not a port");
    refused(
        args!["--format", "raw", "--export-name", "a", "--export-name", "b", path("raw")],
        "2 export names",
    );
    refused(args!["--format", "raw", "--pid-file", path("no/pid"), path("raw")], "PID file");
    refused(args!["--backing-dir", ".", path("raw")], "--untrusted");

    let far = path("far");
    fs::create_dir(&far).unwrap();
    qemu::create(&far.join("base.qcow2"), "qcow2", MIB, "");
    fs::create_dir(path("near")).unwrap();
    let image = path("near").join("image.qcow2");
    qemu::create_overlay(&image, &far.join("base.qcow2"), "qcow2", "");
    refused(args!["--untrusted", &image], "outside the directories allowed");
    refused(args!["--sandbox-dir", "/", "--format", "raw", path("raw")], "root directory");
    let far = far.to_str().unwrap();
    let _ = Served::start(&[&image], &["--untrusted", "--backing-dir", far]).stop();
    let _ = Served::start(&[path("raw")], &["--format", "raw"]).stop();
    let _ = Served::start(&[path("raw")], &["--read-only"]).stop();
}
