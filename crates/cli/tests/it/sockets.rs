//! Where servers listen, and who can connect.

use crate::serving::ISOBATH;
use isobath_testkit::process::{Ready, Server, run_program};
use isobath_testkit::{args, qemu};
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

fn directory() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    qemu::create(&directory.path().join("vm.qcow2"), "qcow2", MIB, "");
    directory
}

/// `isobath serve` of the image in a directory, where it runs, with this umask.
fn serve(directory: &Path, umask: &str, options: &[&str]) -> Server {
    let mut command = Command::new("sh");
    command.current_dir(directory).env("XDG_RUNTIME_DIR", directory);
    command.args(["-c", "umask $0; exec \"$@\"", umask, ISOBATH, "serve", "vm.qcow2"]);
    Server::start(command.args(options), Ready::Line("-blockdev"))
}

fn mode(path: &Path) -> u32 {
    path.metadata().unwrap().mode() & 0o7777
}

#[test]
fn without_a_frontend_only_this_user_can_connect() {
    let directory = directory();
    let server = serve(directory.path(), "0", &[]);
    let text = server.output();
    let (_, socket) = text.split_once("nbd+unix:///vm?socket=").expect("a socket file");
    let socket = PathBuf::from(socket.lines().next().unwrap());
    assert!(!text.contains("nbd://"), "{text}");
    assert!(socket.metadata().unwrap().file_type().is_socket());
    assert_eq!(mode(&socket), 0o600);
    let own = socket.parent().unwrap();
    assert_eq!((own.file_name().unwrap().to_str(), mode(own) & 0o22), (Some("isobath"), 0));
    let uri = format!("nbd+unix:///vm?socket={}", socket.display());
    let _ = qemu::io(Path::new(&uri), "raw", &["write -P 7 0 1M"]).ok();
    let done = server.stop().ok();
    assert!(done.stderr.is_empty(), "{}", done.report());
    assert!(!socket.exists());
}

#[test]
fn sockets_do_not_take_their_permissions_from_the_umask() {
    let directory = directory();
    let sockets = ["--nbd", "unix:n", "--qmp", "unix:q", "--metrics", "unix:m"];
    let vhost = ["--vhost-user-blk", "unix:v"];
    let names = ["n", "q", "m", "v"].map(|name| directory.path().join(name));
    for umask in ["0", "0777"] {
        let server = serve(directory.path(), umask, &[sockets.as_slice(), &vhost].concat());
        assert_eq!(names.each_ref().map(|name| mode(name)), [0o600; 4], "umask {umask}");
        let _ = server.stop().ok();
    }
    let group = directory.path().metadata().unwrap().gid();
    let number = group.to_string();
    let access = ["--socket-mode", "0660", "--socket-group", &number];
    let server = serve(directory.path(), "0", &[sockets.as_slice(), &vhost, &access].concat());
    for name in &names {
        assert_eq!((mode(name), name.metadata().unwrap().gid()), (0o660, group));
    }
    let _ = server.stop().ok();
}

#[test]
fn an_address_in_use_is_blamed_on_its_option() {
    let directory = directory();
    let image = directory.path().join("vm.qcow2");
    let taken = directory.path().join("taken");
    let _listener = UnixListener::bind(&taken).unwrap();
    let address = format!("unix:{}", taken.display());
    for option in ["--nbd", "--qmp", "--metrics", "--vhost-user-blk"] {
        let more = if option == "--nbd" { args![] } else { args!["--nbd", "0"] };
        let mut all = args!["serve", &image, option, &address];
        all.extend(more);
        let done = run_program(ISOBATH, all).exits(1);
        let wanted = format!("choose another address with {option}\n");
        assert!(done.stderr.ends_with(&wanted), "{}", done.report());
    }
    assert!(fs::symlink_metadata(&taken).unwrap().file_type().is_socket());
}
