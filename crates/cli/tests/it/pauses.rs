//! `serve --werror`: a disk on a full file system pauses, and goes on once there is space.

use crate::serving::{ISOBATH, QemuIo, Served};
use isobath_qmp::client::{Address, Client};
use isobath_testkit::process::{PATIENCE, run};
use isobath_testkit::{args, qemu, until};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

/// A small file system with an image in it, and a file that fills the rest.
struct Full {
    directory: TempDir,
}

impl Full {
    /// A file system of 8 MiB, and an image of 4 MiB.
    fn new() -> Self {
        Self::of("8m", 4 * MIB)
    }

    fn of(space: &str, size: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let full = Self { directory };
        full.mount(&format!("size={space}"));
        qemu::create(&full.image(), "qcow2", size, "");
        full
    }

    fn mount(&self, options: &str) {
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", options, "none"]).arg(self.path());
        assert_eq!(run(&mut mount).code(), 0, "this test mounts a file system, which needs root");
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn image(&self) -> PathBuf {
        self.path().join("disk.qcow2")
    }

    /// Takes all the space.
    fn fill(&self) {
        use std::io::Write;
        let mut file = File::create(self.path().join("filler")).unwrap();
        while file.write(&[1; 4096]).is_ok_and(|count| count > 0) {}
    }

    fn make_room(&self) {
        fs::remove_file(self.path().join("filler")).unwrap();
    }
}

impl Drop for Full {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.path()).status();
    }
}

/// A server of a full file system's image, and a client of its control socket.
fn serve(full: &Full, sockets: &Path, options: &[&str]) -> (Served, Client) {
    let served = serve_before(full, sockets, options);
    full.fill();
    served
}

/// The same, before it is full.
fn serve_before(full: &Full, sockets: &Path, options: &[&str]) -> (Served, Client) {
    let qmp = sockets.join("qmp.sock");
    let listen = format!("unix:{}", qmp.display());
    let options = [&["--qmp", &*listen], options].concat();
    let served = Served::start(&[full.image()], &options);
    (served, Client::connect(&Address::Unix(qmp)).unwrap())
}

fn disk(client: &mut Client) -> Value {
    client.execute("x-isobath-query-disks", json!({})).unwrap()["disks"][0].clone()
}

fn until_held(client: &mut Client, count: u64) {
    until(&format!("{count} requests to be held"), || disk(client)["held"] == count);
}

/// The next event of this name.
fn event(client: &mut Client, name: &str) -> Value {
    loop {
        let event = client.event(PATIENCE).unwrap().unwrap_or_else(|| panic!("no {name}"));
        if event.name == name {
            return event.data;
        }
    }
}

fn status(client: &mut Client) -> Value {
    client.execute("query-status", json!({})).unwrap()["status"].clone()
}

#[test]
fn a_write_without_space_waits_until_there_is_some() {
    let (full, sockets) = (Full::new(), tempfile::tempdir().unwrap());
    let (served, mut client) = serve(&full, sockets.path(), &["--werror", "enospc"]);
    let uri = served.uri("disk");
    let mut guest = QemuIo::open("raw", &uri);
    guest.ok("aio_write -P 0x5a 0 1M");
    let failed = event(&mut client, "BLOCK_IO_ERROR");
    assert_eq!((&failed["action"], &failed["nospace"]), (&json!("stop"), &json!(true)), "{failed}");
    assert_eq!(failed["operation"], "write");
    let _ = event(&mut client, "STOP");
    assert_eq!(status(&mut client), "io-error");
    until_held(&mut client, 1);
    let blocks = client.execute("query-block", json!({})).unwrap();
    assert_eq!(blocks[0]["io-status"], "nospace");
    // Reads go on, and so do changes of the chain.
    guest.ok("read -P 0 2M 64k");
    let taken = client.execute(
        "blockdev-snapshot-sync",
        json!({"device": "disk", "snapshot-file": full.path().join("no-room.qcow2")}),
    );
    assert!(taken.is_err(), "there is no space for the snapshot");
    let address = sockets.path().join("qmp.sock");
    let ctl = |word: &str| run(Command::new(ISOBATH).arg("ctl").arg(&address).arg(word)).ok();
    let told = ctl("status").text();
    for word in ["paused", "enospc", "write: ", "No space left", "cont'"] {
        assert!(told.contains(word), "{word}: {told}");
    }

    // Nothing has changed: it pauses once more, and says so once more.
    let _ = ctl("cont");
    let _ = event(&mut client, "BLOCK_IO_ERROR");
    until_held(&mut client, 1);

    full.make_room();
    let _ = ctl("cont");
    guest.ok("aio_flush");
    guest.ok("flush");
    guest.ok("read -P 0x5a 0 1M");
    let _ = event(&mut client, "RESUME");
    assert_eq!((status(&mut client), &disk(&mut client)["held"]), (json!("running"), &json!(0)));
    drop((guest, client));
    let done = served.server.stop().ok();
    assert!(done.stderr.contains("the disk pauses"), "{}", done.report());
    let _ = qemu::img(args!["check", full.image()]).ok();
    let _ = qemu::io(&full.image(), "qcow2", &["read -P 0x5a 0 1M"]).ok();
}

#[test]
fn a_flush_while_writes_wait_for_space_succeeds_and_they_go_on() {
    let (full, sockets) = (Full::new(), tempfile::tempdir().unwrap());
    let (served, mut client) = serve(&full, sockets.path(), &["--werror", "enospc"]);
    let mut guest = QemuIo::open("raw", served.uri("disk"));
    guest.ok("aio_write -P 0x5a 0 1M");
    until_held(&mut client, 1);
    QemuIo::open("raw", served.uri("disk")).ok("flush");
    full.make_room();
    client.execute("cont", json!({})).unwrap();
    guest.ok("aio_flush");
    guest.ok("flush");
    drop((guest, client));
    let _ = served.server.stop().ok();
    let _ = qemu::io(&full.image(), "qcow2", &["read -P 0x5a 0 1M"]).ok();
    let _ = qemu::img(args!["check", full.image()]).ok();
}

#[test]
fn a_snapshot_elsewhere_gives_a_paused_disk_its_space() {
    let (full, sockets) = (Full::new(), tempfile::tempdir().unwrap());
    let elsewhere = sockets.path().to_str().unwrap();
    let options = ["--werror", "enospc", "--sandbox-dir", elsewhere];
    let (served, mut client) = serve(&full, sockets.path(), &options);
    let mut guest = QemuIo::open("raw", served.uri("disk"));
    guest.ok("aio_write -P 0x5a 0 1M");
    until_held(&mut client, 1);
    let overlay = sockets.path().join("over.qcow2");
    let arguments = json!({"device": "disk", "snapshot-file": overlay});
    client.execute("blockdev-snapshot-sync", arguments).unwrap();
    assert_eq!(disk(&mut client)["held"], 1);
    client.execute("cont", json!({})).unwrap();
    guest.ok("aio_flush");
    guest.ok("flush");
    drop((guest, client));
    let _ = served.server.stop().ok();
    let _ = qemu::io(&overlay, "qcow2", &["read -P 0x5a 0 1M"]).ok();
    let _ = qemu::img(args!["check", overlay]).ok();
}

#[test]
fn a_server_that_ends_waits_for_no_paused_request() {
    let (full, sockets) = (Full::new(), tempfile::tempdir().unwrap());
    let options = ["--werror", "stop", "--throttle", "iops-total=100000"];
    let (served, mut client) = serve(&full, sockets.path(), &options);
    let mut guest = QemuIo::open("raw", served.uri("disk"));
    let mut gone = QemuIo::open("raw", served.uri("disk"));
    gone.ok("aio_write -P 1 2M 1M");
    until_held(&mut client, 1);
    guest.ok("aio_write -P 1 0 1M");
    until_held(&mut client, 2);
    // Nor does one of a client that has left.
    drop(gone);
    until_held(&mut client, 1);
    drop(client);
    // What failed has left nothing behind for which the image would need space now.
    let done = served.server.stop().ok();
    assert!(done.stderr.contains("No space left"), "{}", done.report());
    let text = guest.run("aio_flush");
    assert!(text.contains("failed"), "{text}");
}

#[test]
fn what_a_client_sent_before_it_left_is_not_carried_out_after_what_others_send() {
    let (full, sockets) = (Full::new(), tempfile::tempdir().unwrap());
    let (served, mut client) = serve(&full, sockets.path(), &["--werror", "enospc"]);
    let mut gone = QemuIo::open("raw", served.uri("disk"));
    gone.ok("aio_write -P 0x41 0 1M");
    until_held(&mut client, 1);
    drop(gone);
    until_held(&mut client, 0);
    let mut guest = QemuIo::open("raw", served.uri("disk"));
    guest.ok("aio_write -P 0x42 0 64k");
    until_held(&mut client, 1);
    // It fails once more, and then there is space.
    client.execute("cont", json!({})).unwrap();
    until_held(&mut client, 1);
    full.make_room();
    client.execute("cont", json!({})).unwrap();
    for command in ["aio_flush", "flush", "read -P 0x42 0 64k", "read -P 0 64k 960k"] {
        guest.ok(command);
    }
    drop((guest, client));
    let _ = served.server.stop().ok();
    let _ = qemu::io(&full.image(), "qcow2", &["read -P 0x42 0 64k"]).ok();
}

#[test]
fn a_disk_that_fills_its_file_system_between_two_flushes_goes_on_once_there_is_space() {
    // The table that the first write needs is made while much is free.
    let (full, sockets) = (Full::of("128m", 1 << 30), tempfile::tempdir().unwrap());
    let (served, mut client) = serve_before(&full, sockets.path(), &["--werror", "enospc"]);
    let mut guest = QemuIo::open("raw", served.uri("disk"));
    for piece in 0..10 {
        guest.ok(&format!("aio_write -P {} {}M 16M", 1 + piece, 16 * piece));
    }
    let _ = event(&mut client, "STOP");
    QemuIo::open("raw", served.uri("disk")).ok("flush");
    full.mount("remount,size=256m");
    client.execute("cont", json!({})).unwrap();
    guest.ok("aio_flush");
    guest.ok("flush");
    for piece in 0..10 {
        guest.ok(&format!("read -P {} {}M 16M", 1 + piece, 16 * piece));
    }
    drop((guest, client));
    let _ = served.server.stop().ok();
    let _ = qemu::img(args!["check", full.image()]).ok();
}

#[test]
fn without_a_policy_a_write_without_space_fails_at_once() {
    let (full, sockets) = (Full::new(), tempfile::tempdir().unwrap());
    let (served, mut client) = serve(&full, sockets.path(), &[]);
    let mut guest = QemuIo::open("raw", served.uri("disk"));
    let text = guest.run("write -P 1 0 1M");
    assert!(text.contains("No space left"), "{text}");
    let failed = event(&mut client, "BLOCK_IO_ERROR");
    assert_eq!((&failed["action"], &failed["nospace"]), (&json!("report"), &json!(true)));
    assert_eq!((status(&mut client), &disk(&mut client)["held"]), (json!("running"), &json!(0)));
    // A policy set later concerns the next one; one that reports ends the wait.
    let set = |client: &mut Client, policy: &str| {
        let arguments = json!({"id": "disk", "werror": policy});
        client.execute("x-isobath-set-on-failure", arguments).unwrap();
    };
    set(&mut client, "stop");
    guest.ok("aio_write -P 1 0 1M");
    until_held(&mut client, 1);
    set(&mut client, "report");
    let text = guest.run("aio_flush");
    assert!(text.contains("No space left"), "{text}");
    drop((guest, client));
    full.make_room();
    let _ = served.server.stop().ok();
}

#[test]
fn stop_keeps_all_requests_until_cont() {
    let (full, sockets) = (Full::new(), tempfile::tempdir().unwrap());
    let (served, mut client) = serve_before(&full, sockets.path(), &[]);
    client.execute("stop", json!({})).unwrap();
    let _ = event(&mut client, "STOP");
    assert_eq!(status(&mut client), "paused");
    let mut guest = QemuIo::open("raw", served.uri("disk"));
    guest.ok("aio_write -P 7 0 64k");
    guest.ok("aio_read 1M 64k");
    until_held(&mut client, 2);
    client.execute("cont", json!({})).unwrap();
    guest.ok("aio_flush");
    guest.ok("read -P 7 0 64k");
    let _ = event(&mut client, "RESUME");
    drop((guest, client));
    let _ = served.stop();
}

#[test]
fn a_copy_that_is_made_while_all_is_stopped_has_what_was_written() {
    let (full, sockets) = (Full::new(), tempfile::tempdir().unwrap());
    let options = ["--metadata", "ordered"];
    let (served, mut client) = serve_before(&full, sockets.path(), &options);
    let mut guest = QemuIo::open("raw", served.uri("disk"));
    guest.ok("write -P 7 0 64k");
    client.execute("stop", json!({})).unwrap();
    let copy = sockets.path().join("copy.qcow2");
    fs::copy(full.image(), &copy).unwrap();
    let _ = qemu::io(&copy, "qcow2", &["read -P 7 0 64k"]).ok();
    client.execute("cont", json!({})).unwrap();
    drop((guest, client));
    let _ = served.stop();
}

#[test]
fn what_waits_in_a_stopped_disk_does_not_change_it_when_the_server_ends() {
    let (full, sockets) = (Full::new(), tempfile::tempdir().unwrap());
    let (served, mut client) = serve_before(&full, sockets.path(), &[]);
    client.execute("stop", json!({})).unwrap();
    let mut guest = QemuIo::open("raw", served.uri("disk"));
    guest.ok("aio_write -P 7 0 64k");
    until_held(&mut client, 1);
    drop(client);
    let _ = served.server.stop().ok();
    let text = guest.run("aio_flush");
    assert!(text.contains("failed"), "{text}");
    let _ = qemu::io(&full.image(), "qcow2", &["read -P 0 0 64k"]).ok();
}

#[test]
fn a_policy_that_pauses_needs_a_way_to_go_on() {
    let directory = tempfile::tempdir().unwrap();
    let images = ["a", "b", "c"].map(|name| directory.path().join(name));
    for (options, told) in [
        (vec!["--werror", "stop"], "needs --qmp"),
        (vec!["--rerror", "enospc"], "expected report or stop"),
        (vec!["--werror", "report", "--werror", "report"], "2 times for 3 images"),
    ] {
        let done = run(Command::new(ISOBATH).arg("serve").args(&options).args(&images));
        assert_ne!(done.code(), 0, "{options:?}");
        assert!(done.stderr.contains(told), "{options:?}: {}", done.stderr);
    }
}
