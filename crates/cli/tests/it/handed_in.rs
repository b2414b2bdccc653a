//! Descriptors that a server's parent hands in: sockets that listen already.

use crate::serving::ISOBATH;
use isobath_qmp::client::{Address, Client};
use isobath_testkit::process::{Finished, Ready, Server, run};
use isobath_testkit::{args, qemu};
use serde_json::json;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::symlink;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
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
