//! Descriptors that a server's parent hands in: sockets that listen already.

use crate::serving::ISOBATH;
use isobath_qmp::client::{Address, Client};
use isobath_testkit::process::{Finished, Ready, Server, run};
use isobath_testkit::{args, descriptors, qemu};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
/// The first descriptor that is handed in.
const FIRST: RawFd = 3;

fn directory() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    qemu::create(&directory.path().join("vm.qcow2"), "qcow2", MIB, "");
    directory
}

/// A command that starts with these descriptors, from 3 on.
fn with(mut command: Command, descriptors: Vec<OwnedFd>) -> Command {
    let copy = |from: RawFd, to: RawFd| {
        // SAFETY: no memory is involved.
        match unsafe { libc::dup2(from, to) } {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    };
    let place = move || {
        let far = 100;
        for (number, descriptor) in (0..).zip(&descriptors) {
            copy(descriptor.as_raw_fd(), far + number)?;
        }
        for (number, _) in (0..).zip(&descriptors) {
            copy(far + number, FIRST + number)?;
            // SAFETY: no memory is involved; the descriptor was just made.
            unsafe { libc::close(far + number) };
        }
        Ok(())
    };
    // SAFETY: it only duplicates and closes descriptors.
    unsafe { command.pre_exec(place) };
    command
}

/// A command as a service manager starts it, with these descriptors.
fn activated(
    directory: &Path,
    descriptors: Vec<OwnedFd>,
    names: &str,
    arguments: &[OsString],
) -> Command {
    let mut command = Command::new("sh");
    command.current_dir(directory).env("XDG_RUNTIME_DIR", directory);
    command.env("LISTEN_FDS", descriptors.len().to_string()).env("LISTEN_FDNAMES", names);
    command.args(["-c", "LISTEN_PID=$$ exec \"$@\"", "sh"]).args(arguments);
    with(command, descriptors)
}

/// `isobath serve vm.qcow2` so.
fn serve(directory: &Path, descriptors: Vec<OwnedFd>, names: &str, options: &[&str]) -> Command {
    let mut arguments = args![ISOBATH, "serve", "vm.qcow2"];
    arguments.extend(options.iter().map(OsString::from));
    activated(directory, descriptors, names, &arguments)
}

fn unix(directory: &Path, name: &str) -> OwnedFd {
    UnixListener::bind(directory.join(name)).unwrap().into()
}

#[test]
fn a_server_listens_on_the_sockets_that_a_service_manager_hands_in() {
    let place = directory();
    let at = |name: &str| place.path().join(name);
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = tcp.local_addr().unwrap().port();
    let sockets = ["n", "m", "q", "v"].map(|name| unix(place.path(), name));
    let descriptors = sockets.into_iter().chain([tcp.into()]).collect();
    let options = ["--nbd", "fd:nbd", "--qmp", "fd:vm.qmp", "--vhost-user-blk", "fd:6"];
    let metrics = ["--metrics", "fd:7"];
    let options = [&options[..], &metrics, &["--sandbox", "strict"]].concat();
    let mut command = serve(place.path(), descriptors, "nbd:nbd:vm.qmp:guest", &options);
    let server = Server::start(&mut command, Ready::Line("-device vhost-user-blk-pci"));
    for (number, socket) in ["n", "m"].into_iter().enumerate() {
        let uri = format!("nbd+unix:///vm?socket={}", at(socket).display());
        assert!(server.output().contains(&uri), "{}", server.output());
        let write = format!("write -P {} {}k 64k", number + 1, number * 64);
        let _ = qemu::io(Path::new(&uri), "raw", &[&write]).ok();
    }
    let mut client = Client::connect(&Address::Unix(at("q"))).unwrap();
    let disks = client.execute("query-block", json!({})).unwrap();
    assert_eq!(disks[0]["device"], "vm");
    assert_eq!(client.server(), Some(server.pid()), "and not who has made the socket");
    drop(UnixStream::connect(at("v")).unwrap());
    let mut scraper = TcpStream::connect(("127.0.0.1", port)).unwrap();
    scraper.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    let mut text = String::new();
    let _ = scraper.read_to_string(&mut text).unwrap();
    assert!(text.contains("isobath_"), "{text}");
    // A child would not have them.
    for number in FIRST..FIRST + 5 {
        let shown = fs::read_to_string(format!("/proc/{}/fdinfo/{number}", server.pid())).unwrap();
        let flags = shown.lines().find_map(|line| line.strip_prefix("flags:")).unwrap();
        let flags = i32::from_str_radix(flags.trim(), 8).unwrap();
        assert!(flags & libc::O_CLOEXEC != 0, "{number}: {shown}");
    }
    drop(client);
    let _ = server.stop().ok();
    for name in ["n", "m", "q", "v"] {
        assert!(at(name).exists(), "'{name}' is the service manager's");
    }
    let read = ["read -P 1 0 64k", "read -P 2 64k 64k"];
    let _ = qemu::io(&at("vm.qcow2"), "qcow2", &read).ok();
}

#[test]
fn systemd_starts_a_server_at_the_first_connection() {
    let place = directory();
    let socket = place.path().join("n");
    let mut command = Command::new("systemd-socket-activate");
    command.current_dir(place.path()).arg("-l").arg(&socket).arg("--fdname=nbd").arg(ISOBATH);
    command.args(["serve", "vm.qcow2", "--nbd", "fd:nbd"]);
    let server = Server::start(&mut command, Ready::Socket(&socket));
    let uri = format!("nbd+unix:///vm?socket={}", socket.display());
    let _ = qemu::io(Path::new(&uri), "raw", &["write -P 7 0 64k", "read -P 7 0 64k"]).ok();
    let _ = server.stop().ok();
}

#[test]
fn qemu_nbd_uses_the_only_socket_and_no_other_address() {
    let place = directory();
    let qemu_nbd = place.path().join("qemu-nbd");
    symlink(ISOBATH, &qemu_nbd).unwrap();
    let mut command = Command::new("systemd-socket-activate");
    let socket = place.path().join("n");
    command.current_dir(place.path()).arg("-l").arg(&socket).arg(&qemu_nbd).arg("vm.qcow2");
    let server = Server::start(&mut command, Ready::Socket(&socket));
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let _ = qemu::io(Path::new(&uri), "raw", &["write -P 7 0 64k", "read -P 7 0 64k"]).ok();
    let _ = server.wait().ok();
    for (options, count) in [
        (&["-k", "/tmp/x"][..], 1),
        (&["-b", "localhost"], 1),
        (&["-p", "10900"], 1),
        (&["-L"], 1),
        (&[], 2),
    ] {
        let refused = |program: OsString| {
            let sockets = (0..count).map(|number| {
                let name = format!("{}-{number}", options.join("").replace('/', ""));
                let _ = fs::remove_file(place.path().join(&name));
                unix(place.path(), &name)
            });
            let mut arguments = vec![program];
            arguments.extend(options.iter().map(OsString::from));
            if options != ["-L"] {
                arguments.push("vm.qcow2".into());
            }
            let sockets = sockets.collect();
            run(&mut activated(place.path(), sockets, "", &arguments)).exits(1).stderr
        };
        let theirs = refused(qemu::program("qemu-nbd").into());
        assert_eq!(refused(qemu_nbd.clone().into()), theirs, "{options:?}");
    }
}

/// What a server says that does not start with one descriptor.
fn refusal(place: &TempDir, descriptor: OwnedFd, options: &[&str]) -> String {
    let done: Finished = run(&mut serve(place.path(), vec![descriptor], "one", options)).exits(1);
    assert!(!place.path().join("own").exists());
    done.stderr
}

#[test]
fn what_is_no_listening_socket_is_refused() {
    let place = directory();
    let at = |name: &str| place.path().join(name);
    let bound = unix_without_listening();
    let (connection, _other) = UnixStream::pair().unwrap();
    let descriptors: [(OwnedFd, &str); 4] = [
        (File::open(at("vm.qcow2")).unwrap().into(), "it is no socket"),
        (UnixDatagram::unbound().unwrap().into(), "datagrams"),
        (connection.into(), "does not listen"),
        (bound, "does not listen"),
    ];
    for (descriptor, told) in descriptors {
        for option in ["--nbd", "--qmp", "--metrics", "--vhost-user-blk"] {
            let descriptor = descriptor.try_clone().unwrap();
            let said = refusal(&place, descriptor, &["--nbd", "unix:own", option, "fd:one"]);
            assert!(said.contains(told), "{option}: {said}");
        }
    }
    let said = refusal(&place, abstract_listener(), &["--nbd", "fd:one"]);
    assert!(said.contains("without a file"), "{said}");
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let said = refusal(&place, tcp.try_clone().unwrap().into(), &["--vhost-user-blk", "fd:one"]);
    assert!(said.contains("requires a Unix socket"), "{said}");
    let said = refusal(&place, tcp.into(), &["--nbd", "unix:own", "--qmp", "fd:one"]);
    assert!(said.contains("could control the server"), "{said}");
}

fn unix_without_listening() -> OwnedFd {
    // SAFETY: no memory is involved.
    let number = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    assert!(number >= 0);
    // SAFETY: it was just made.
    unsafe { std::os::fd::FromRawFd::from_raw_fd(number) }
}

fn abstract_listener() -> OwnedFd {
    use std::os::linux::net::SocketAddrExt;
    let name = format!("isobath-test-{}", std::process::id());
    let address = std::os::unix::net::SocketAddr::from_abstract_name(name).unwrap();
    UnixListener::bind_addr(&address).unwrap().into()
}

#[test]
fn a_descriptor_that_is_not_there_or_that_nothing_uses_is_refused() {
    let place = directory();
    let own = ["--nbd", "unix:own"];
    for (number, (options, told)) in [
        (&["--nbd", "fd:other"][..], "those handed in are 'one'"),
        (&["--nbd", "fd:9"], "was not open when this program was started"),
        (&["--nbd", "fd:one", "--nbd", "fd:one"], "each to be used once"),
        (&["--nbd", "fd:2"], "standard stream"),
        (&["--nbd", "fd:"], "missing"),
        (&own, "'one' (descriptor 3), which no option names"),
        (&[], "'one' (descriptor 3), which no option names"),
    ]
    .into_iter()
    .enumerate()
    {
        let said = refusal(&place, unix(place.path(), &number.to_string()), options);
        assert!(said.contains(told), "{options:?}: {said}");
    }
    let mut command = serve(place.path(), Vec::new(), "", &["--nbd", "fd:one"]);
    let said = run(&mut command).exits(1).stderr;
    assert!(said.contains("no service manager has handed in any"), "{said}");
    let said = run(serve(place.path(), Vec::new(), "", &own).env("LISTEN_FDS", "9")).exits(1);
    assert!(said.stderr.contains("is not open"), "{}", said.report());
    // Meant for another process.
    let mut command = Command::new(ISOBATH);
    command.current_dir(place.path()).args(["serve", "vm.qcow2"]).args(own);
    command.env("LISTEN_PID", "1").env("LISTEN_FDS", "1");
    let _ = Server::start(&mut command, Ready::Line("-blockdev")).stop().ok();
}

#[test]
fn a_user_who_cannot_open_an_image_serves_it_by_a_descriptor() {
    let place = directory();
    let image = place.path().join("vm.qcow2");
    fs::set_permissions(&image, fs::Permissions::from_mode(0o600)).unwrap();
    let file = File::options().read(true).write(true).open(&image).unwrap();
    let descriptors = vec![unix(place.path(), "n"), file.into()];
    let options = "--nbd fd:nbd --add-fd fd=vm,set=1 --sandbox strict --user 65534 --group 65534";
    let mut arguments = args![ISOBATH, "serve", "/dev/fdset/1"];
    arguments.extend(options.split(' ').map(OsString::from));
    let mut command = activated(place.path(), descriptors, "nbd:vm", &arguments);
    let server = Server::start(&mut command, Ready::Line("-blockdev"));
    let uri = format!("nbd+unix:///1?socket={}", place.path().join("n").display());
    let _ =
        qemu::io(Path::new(&uri), "raw", &["write -P 7 0 64k", "flush", "read -P 7 0 64k"]).ok();
    let locked = qemu::io(&image, "qcow2", &["write 0 512"]);
    assert!(locked.code() != 0, "{}", locked.report());
    let _ = server.stop().ok();
    let _ = qemu::io(&image, "qcow2", &["read -P 7 0 64k", "write 0 512"]).ok();
}

#[test]
fn an_open_file_is_for_one_server() {
    let place = directory();
    let image = place.path().join("vm.qcow2");
    let open = || File::options().read(true).write(true).open(&image).unwrap().into();
    let inherited: OwnedFd = open();
    let serve = |descriptor: &OwnedFd, socket: &str| {
        let nbd = format!("unix:{socket}");
        let mut command = Command::new(ISOBATH);
        command.current_dir(place.path()).args(["serve", "/dev/fdset/1", "--add-fd", "fd=3,set=1"]);
        command.args(["--nbd", &nbd, "--sandbox", "strict"]);
        with(command, vec![descriptor.try_clone().unwrap()])
    };
    let first = Server::start(&mut serve(&inherited, "a"), Ready::Line("-blockdev"));
    let second = run(&mut serve(&inherited, "b")).exits(1);
    assert!(second.stderr.contains("open the file anew"), "{}", second.report());
    // Its attempt has released nothing.
    let locked = run(&mut serve(&open(), "c")).exits(1);
    assert!(locked.stderr.contains("lock"), "{}", locked.report());
    let _ = first.stop().ok();
    let _ = Server::start(&mut serve(&inherited, "d"), Ready::Line("-blockdev")).stop().ok();
}

/// A QMP client that sends descriptors.
struct Sender(UnixStream);

impl Sender {
    fn connect(path: &Path) -> Self {
        let mut client = Self(UnixStream::connect(path).unwrap());
        let _ = client.line();
        let _ = client.ask("qmp_capabilities", &json!({}), &[]);
        client
    }

    fn line(&mut self) -> Value {
        let (mut line, mut byte) = (Vec::new(), [0]);
        while byte != *b"\n" {
            self.0.read_exact(&mut byte).unwrap();
            line.extend(byte);
        }
        serde_json::from_slice(&line).unwrap()
    }

    /// A command's result, or its error's text.
    fn ask(&mut self, command: &str, arguments: &Value, files: &[&OwnedFd]) -> Value {
        let text = json!({"execute": command, "arguments": arguments}).to_string();
        let files: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
        descriptors::send(&self.0, text.as_bytes(), &files);
        loop {
            let mut reply = self.line();
            if reply.get("event").is_none() {
                let error = reply["error"]["desc"].take();
                return if error.is_null() { reply["return"].take() } else { error };
            }
        }
    }
}

#[test]
fn a_snapshot_of_images_that_the_server_cannot_open_is_taken_with_their_descriptors() {
    let place = directory();
    let elsewhere = tempfile::tempdir().unwrap();
    let there = |name: &str| elsewhere.path().join(name);
    qemu::create(&there("base.qcow2"), "qcow2", MIB, "");
    for (overlay, backing) in [("top.qcow2", "base.qcow2"), ("other.qcow2", "top.qcow2")] {
        let mut command = Command::new(qemu::program("qemu-img"));
        command.args(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"]).arg(there(backing));
        let _ = run(command.arg(there(overlay))).ok();
    }
    qemu::create(&there("none.qcow2"), "qcow2", MIB, "");
    let options = ["--nbd", "unix:n", "--qmp", "unix:q", "--sandbox", "strict"];
    let server =
        Server::start(&mut serve(place.path(), Vec::new(), "", &options), Ready::Line("-blockdev"));
    let mut client = Sender::connect(&place.path().join("q"));
    for (set, name) in ["base.qcow2", "top.qcow2", "other.qcow2", "none.qcow2"].iter().enumerate() {
        let file = File::options().read(true).write(true).open(there(name)).unwrap().into();
        let _ = client.ask("add-fd", &json!({"fdset-id": set}), &[&file]);
    }
    let node = |set: usize| {
        let file = json!({"driver": "file", "filename": format!("/dev/fdset/{set}")});
        json!({"driver": "qcow2", "node-name": format!("n{set}"), "file": file, "backing": null})
    };
    for set in 0..4 {
        let added = client.ask("blockdev-add", &node(set), &[]);
        assert_eq!(added, json!({}), "{set}");
    }
    let mut put_on = |overlay: usize| {
        let arguments = json!({"node": "n0", "overlay": format!("n{overlay}")});
        client.ask("blockdev-snapshot", &arguments, &[])
    };
    let nameless = put_on(3).to_string();
    assert!(nameless.contains("the file that was handed in"), "{nameless}");
    assert!(!nameless.contains("name '/dev"), "{nameless}");
    let wrong = put_on(2).to_string();
    assert!(wrong.contains("not the active image"), "{wrong}");
    assert_eq!(put_on(1), json!({}));
    let _ = server.stop().ok();
    let _ = qemu::io(&there("top.qcow2"), "qcow2", &["read -P 0 0 64k"]).ok();
}

#[test]
fn clients_hand_in_no_more_descriptors_and_text_than_the_server_can_spare() {
    let place = directory();
    let most = 64_usize;
    let mut command = serve(place.path(), Vec::new(), "", &["--nbd", "unix:n", "--qmp", "unix:q"]);
    let files = most as u64 * 8;
    let limit = move || {
        let limit = libc::rlimit { rlim_cur: files, rlim_max: files };
        // SAFETY: the limit is live; nothing else is accessed.
        match unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    // SAFETY: it only makes a system call.
    unsafe { command.pre_exec(limit) };
    let server = Server::start(&mut command, Ready::Line("-blockdev"));
    let mut client = Sender::connect(&place.path().join("q"));
    let image: OwnedFd = File::open(place.path().join("vm.qcow2")).unwrap().into();
    let long = "x".repeat(4097);
    for (command, arguments) in
        [("add-fd", json!({"opaque": long})), ("getfd", json!({"fdname": long}))]
    {
        let refused = client.ask(command, &arguments, &[&image]).to_string();
        assert!(refused.contains("it can have 4096"), "{refused}");
    }
    // It came with a request that does not use it.
    let _ = client.ask("query-fdsets", &json!({}), &[&image]);
    let unused = client.ask("add-fd", &json!({}), &[]);
    assert_eq!(unused, "No file descriptor supplied via SCM_RIGHTS");
    for _ in 1..most {
        let added = client.ask("add-fd", &json!({"fdset-id": 1}), &[&image]);
        assert_eq!(added["fdset-id"], 1, "{added}");
    }
    let named = client.ask("getfd", &json!({"fdname": "x"}), &[&image]);
    assert_eq!(named, json!({}));
    let mut other = Sender::connect(&place.path().join("q"));
    for (command, arguments) in [("add-fd", json!({})), ("getfd", json!({"fdname": "y"}))] {
        let refused = other.ask(command, &arguments, &[&image]).to_string();
        assert!(refused.contains("64 file descriptors have been handed in"), "{refused}");
    }
    assert_eq!(client.ask("closefd", &json!({"fdname": "x"}), &[]), json!({}));
    let added = other.ask("add-fd", &json!({"fdset-id": 2}), &[&image]);
    assert_eq!(added["fdset-id"], 2, "{added}");
    let _ = server.stop().ok();
}

#[test]
fn a_client_hands_in_descriptors_as_to_qemu() {
    let place = directory();
    let at = |name: &str| place.path().join(name);
    qemu::create(&at("other.qcow2"), "qcow2", MIB, "");
    let options = ["--nbd", "unix:n", "--qmp", "unix:q", "--sandbox", "strict"];
    let mut command = serve(place.path(), Vec::new(), "", &options);
    let server = Server::start(&mut command, Ready::Line("-blockdev"));
    let mut client = Sender::connect(&at("q"));
    let image: OwnedFd =
        File::options().read(true).write(true).open(at("other.qcow2")).unwrap().into();
    let none = "No file descriptor supplied via SCM_RIGHTS";
    let many = "More than 4 file descriptors were sent at once, and all were closed; send one with \
                each command that uses one";
    for (command, arguments, files, answer) in [
        ("add-fd", json!({}), 0, json!(none)),
        ("getfd", json!({"fdname": "x"}), 0, json!(none)),
        (
            "getfd",
            json!({"fdname": "1x"}),
            1,
            json!("Parameter 'fdname' expects a name not starting with a digit"),
        ),
        (
            "add-fd",
            json!({"fdset-id": -1}),
            1,
            json!("Parameter 'fdset-id' expects a non-negative value"),
        ),
        ("getfd", json!({"fdname": "x"}), 3, json!({})),
        ("add-fd", json!({}), 0, json!(none)),
        // QEMU closes what is beyond 16.
        ("getfd", json!({"fdname": "y"}), 5, json!(many)),
        ("getfd", json!({"fdname": "y"}), 20, json!(many)),
        ("query-fdsets", json!({}), 5, json!([])),
        ("getfd", json!({"fdname": "y"}), 0, json!(none)),
        ("getfd", json!({"fdname": "x"}), 4, json!({})),
        ("closefd", json!({"fdname": "x"}), 0, json!({})),
        ("closefd", json!({"fdname": "x"}), 0, json!("File descriptor named 'x' not found")),
        (
            "remove-fd",
            json!({"fdset-id": 9}),
            0,
            json!("File descriptor named 'fdset-id:9' not found"),
        ),
        (
            "remove-fd",
            json!({"fdset-id": 3, "fd": 9}),
            0,
            json!("File descriptor named 'fdset-id:3, fd:9' not found"),
        ),
        ("query-fdsets", json!({}), 0, json!([])),
    ] {
        assert_eq!(
            client.ask(command, &arguments, &vec![&image; files]),
            answer,
            "{command} {arguments}"
        );
    }
    let added = client.ask("add-fd", &json!({"fdset-id": 3, "opaque": "rw"}), &[&image]);
    assert_eq!(added["fdset-id"], 3, "{added}");
    let shown = json!([{"fdset-id": 3, "fds": [{"fd": added["fd"], "opaque": "rw"}]}]);
    assert_eq!(client.ask("query-fdsets", &json!({}), &[]), shown);
    let node = |name: &str| {
        let file = json!({"driver": "file", "filename": "/dev/fdset/3"});
        json!({"driver": "qcow2", "node-name": name, "file": file})
    };
    assert_eq!(client.ask("blockdev-add", &node("d"), &[]), json!({}));
    let twice = client.ask("blockdev-add", &node("e"), &[]).to_string();
    assert!(twice.contains("lock"), "{twice}");
    let nameless = json!({"node-name": "d", "snapshot-node-name": "s", "snapshot-file": at("s")});
    let refused = client.ask("blockdev-snapshot-sync", &nameless, &[]).to_string();
    assert!(refused.contains("handed in as a descriptor"), "{refused}");
    assert_eq!(client.ask("remove-fd", &json!({"fdset-id": 3}), &[]), json!({}));
    assert_eq!(client.ask("query-fdsets", &json!({}), &[]), json!([{"fdset-id": 3, "fds": []}]));
    let export = json!({"id": "v", "type": "vhost-user-blk", "node-name": "d", "addr": {"type": "fd", "str": "s"}});
    let unknown = client.ask("block-export-add", &export, &[]);
    assert_eq!(unknown, "File descriptor named 's' has not been found");
    assert_eq!(
        client.ask("getfd", &json!({"fdname": "s"}), &[&unix(place.path(), "v")]),
        json!({})
    );
    assert_eq!(client.ask("block-export-add", &export, &[]), json!({}));
    drop(UnixStream::connect(at("v")).unwrap());
    let _ = client.ask("add-fd", &json!({"fdset-id": 5}), &[&image]);
    drop(client);
    // The client has left once the server has noticed; what it left unused goes, and what is used stays.
    loop {
        let mut client = Sender::connect(&at("q"));
        let sets = client.ask("query-fdsets", &json!({}), &[]);
        if sets == json!([{"fdset-id": 3, "fds": []}]) {
            break;
        }
        assert_eq!(sets.as_array().map(Vec::len), Some(2), "{sets}");
        drop(client);
        thread::sleep(Duration::from_millis(10));
    }
    let _ = server.stop().ok();
}
