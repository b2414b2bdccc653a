//! `serve --memory-limit`.

use crate::serving::{ISOBATH, QemuIo, Served};
use isobath_qmp::client::{Address, Client};
use isobath_testkit::nbd::{Nbd, Request};
use isobath_testkit::process::run;
use isobath_testkit::{args, qemu, until};
use serde_json::json;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
/// What the process takes besides, as the documentation says.
const BESIDES: u64 = 64 * MIB;

fn images(count: usize, size: u64) -> (TempDir, Vec<PathBuf>) {
    let directory = tempfile::tempdir().unwrap();
    let images: Vec<_> =
        (0..count).map(|number| directory.path().join(format!("disk{number}"))).collect();
    for image in &images {
        qemu::create(image, "qcow2", size, "");
    }
    (directory, images)
}

/// A value of a process's status, in bytes.
fn status(process: u32, field: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim_start_matches(':').trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// A client that sends write requests for as long as the server takes any.
struct Greedy {
    stream: UnixStream,
    /// A write of 1 MiB.
    request: Vec<u8>,
    /// Bytes of it that were sent.
    sent: usize,
}

impl Greedy {
    fn connect(socket: &Path, export: &str) -> Self {
        let mut stream = UnixStream::connect(socket).unwrap();
        let name = (export.len() as u32).to_be_bytes();
        let option = [&b"\0\0\0\x03IHAVEOPT\0\0\0\x01"[..], &name, export.as_bytes()].concat();
        stream.write_all(&option).unwrap();
        // The greeting, the size and the flags.
        stream.read_exact(&mut [0; 18 + 8 + 2]).unwrap();
        stream.set_nonblocking(true).unwrap();
        let head = [0x25, 0x60, 0x95, 0x13, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];
        let payload = vec![7; 1 << 20];
        let request = [&head[..], &[0; 8], &(1_u32 << 20).to_be_bytes(), &payload].concat();
        Self { stream, request, sent: 0 }
    }

    /// Sends what the server takes now. Returns whether that was anything.
    fn send(&mut self) -> bool {
        let mut any = false;
        while let Ok(more) = self.stream.write(&self.request[self.sent..]) {
            self.sent = (self.sent + more) % self.request.len();
            any = true;
        }
        any
    }
}

#[test]
fn greedy_clients_of_many_disks_take_no_more_than_the_limit() {
    const LIMIT: u64 = 384;
    let (_directory, images) = images(5, 32 * MIB);
    let limit = format!("{LIMIT}M");
    let mut options = vec!["--memory-limit", &limit, "--threads", "2", "--throttle", ""];
    // Their writes wait.
    options.extend(["--throttle", "bps-total=1"].repeat(4));
    let served = Served::start(&images, &options);
    let process = served.server.pid();
    // One on each thread.
    let mut others = [(); 2].map(|()| Nbd::connect(&served.socket, "disk0").unwrap());
    let export = |number| format!("disk{}", number % 4 + 1);
    let mut clients: Vec<_> =
        (0..22).map(|number| Greedy::connect(&served.socket, &export(number))).collect();
    let data = vec![5; MIB as usize];
    let mut idle = 0;
    while idle < 50 {
        let taken = clients.iter_mut().filter_map(|client| client.send().then_some(())).count();
        idle = if taken == 0 { idle + 1 } else { 0 };
        for other in &mut others {
            other.write(0, &data).unwrap();
            let read = Request::Read { offset: 0, length: MIB as u32 };
            assert!(other.submit(&[read]).unwrap() == [&data[..]]);
        }
    }
    let (most, held) = (status(process, "VmHWM"), status(process, "RssAnon"));
    assert!(most < LIMIT * MIB + BESIDES, "{} MiB", most / MIB);
    assert!(held > 48 * MIB, "each client has some, {} MiB", held / MIB);
    drop((clients, others));
    let _ = served.server.stop().ok();
}

/// A client that has asked for 64 MiB, and never reads.
fn deaf(socket: &Path, export: &str) -> UnixStream {
    let mut stream = Greedy::connect(socket, export).stream;
    let request = [0x25, 0x60, 0x95, 0x13, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let request = [&request[..], &[0; 8], &(1_u32 << 20).to_be_bytes()].concat();
    stream.write_all(&request.repeat(64)).unwrap();
    stream
}

/// What a client writes into its part of the disk: bytes that are nowhere else in it.
fn contents(client: usize, length: usize) -> Vec<u8> {
    let word = |at: usize| ((client as u64 + 1) << 32 | at as u64).to_le_bytes();
    (0..length / 8).flat_map(word).collect()
}

#[test]
fn the_largest_requests_are_carried_out_with_the_least_limit_beside_clients_that_never_read() {
    const CLIENTS: usize = 4;
    const LARGEST: usize = 32 << 20;
    let (_directory, images) = images(1, (CLIENTS * LARGEST) as u64);
    let served = Served::start(&images, &["--memory-limit", "256M", "--threads", "2"]);
    let process = served.server.pid();
    let before = status(process, "RssAnon");
    let deaf: Vec<_> = (0..8).map(|_| deaf(&served.socket, "disk0")).collect();
    until("replies that nobody reads", || status(process, "RssAnon") > before + 12 * MIB);
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let socket = &served.socket;
            scope.spawn(move || {
                let mut connection = Nbd::connect(socket, "disk0").unwrap();
                let data = contents(client, LARGEST);
                let offset = (client * LARGEST) as u64;
                let read = Request::Read { offset, length: LARGEST as u32 };
                connection.write(offset, &data).unwrap();
                let read = connection.submit(&[read, read]).unwrap();
                assert!(read.len() == 2 && read.iter().all(|read| *read == data), "{client}");
            });
        }
    });
    // QEMU's replies are structured, and come in pieces.
    let mut qemu = QemuIo::open("raw", served.uri("disk0"));
    qemu.ok("write -P 7 0 32M");
    qemu.ok("read -P 7 0 32M");
    drop((qemu, deaf));
    let most = status(process, "VmHWM");
    assert!(most < 256 * MIB + BESIDES, "{} MiB", most / MIB);
    let _ = served.server.stop().ok();
    let disk = qemu::read_disk(&images[0], "qcow2");
    assert!(disk[..LARGEST].iter().all(|byte| *byte == 7));
    for (client, part) in disk.chunks(LARGEST).enumerate().skip(1) {
        assert!(part == contents(client, LARGEST), "{client}");
    }
}

#[test]
fn what_does_not_fit_is_refused_and_fits_once_something_has_gone() {
    let (directory, images) = images(5, 64 * MIB);
    let serve = |options: &[&str], images: &[PathBuf]| {
        run(Command::new(ISOBATH).arg("serve").args(options).args(images))
    };
    let refused = serve(&["--memory-limit", "255M"], &images).exits(1);
    assert!(refused.stderr.contains("must be at least 256M"), "{}", refused.report());
    let refused = serve(&["--memory-limit", "256M", "--map-cache", "250M"], &images).exits(1);
    assert!(
        refused.stderr.contains("disk0': its map with its other caches may take 2"),
        "{}",
        refused.report()
    );

    let qmp = directory.path().join("qmp.sock");
    let listen = format!("unix:{}", qmp.display());
    let options = ["--memory-limit", "288M", "--threads", "2", "--qmp", &listen];
    let refused = serve(&[&options[..], &["--nbd", "unix:nbd"]].concat(), &images).exits(1);
    assert!(refused.stderr.contains("of the limit of 288.0 MiB only"), "{}", refused.report());
    let served = Served::start(&images[..2], &options);
    let mut client = Client::connect(&Address::Unix(qmp)).unwrap();
    let add = |client: &mut Client, number: usize| {
        let file = json!({ "driver": "file", "filename": images[number] });
        let node = format!("node{number}");
        let node = json!({ "driver": "qcow2", "node-name": node, "file": file });
        client.execute("blockdev-add", node).map_err(|error| error.to_string())
    };
    add(&mut client, 2).unwrap();
    let refused = add(&mut client, 3).unwrap_err();
    assert!(
        refused.contains("may take 48.") && refused.contains("of the limit of 288.0 MiB only"),
        "{refused}"
    );
    client.execute("blockdev-del", json!({ "node-name": "node2" })).unwrap();
    add(&mut client, 3).unwrap();
    let mut export = |number: usize| {
        let path = directory.path().join(format!("vhost{number}"));
        let address = json!({ "type": "unix", "path": path });
        let export = json!({
            "type": "vhost-user-blk", "id": format!("export{number}"), "node-name": "node3",
            "addr": address,
        });
        client.execute("block-export-add", export).map_err(|error| error.to_string())
    };
    // The first one takes what all share.
    let refused = (0..100).find_map(|number| export(number).err()).unwrap();
    assert!(refused.contains("a vhost-user-blk export may take 1.0 MiB"), "{refused}");
    client.execute("block-export-del", json!({ "id": "export0", "mode": "hard" })).unwrap();
    until("an export that fits again", || {
        let path = directory.path().join("again");
        let address = json!({ "type": "unix", "path": path });
        let export = json!({
            "type": "vhost-user-blk", "id": "again", "node-name": "node3", "addr": address,
        });
        client.execute("block-export-add", export).is_ok()
    });
    drop(client);
    let _ = served.server.stop().ok();
    let _ = run(Command::new(ISOBATH).args(args!["check", &images[0]])).ok();
}
