//! Real servers: qemu-nbd, and nbdkit with the properties that a client must respect.

use crate::shared::{WRITABLE, name, nbdkit, open, read};
use isobath_nbd_client::name::ExportName;
use isobath_nbd_client::{Encryption, NbdFile, NbdHost};
use isobath_ring::{Config, Executor, block_on};
use isobath_storage::{Host, IoBuf, OpenMode, Storage, StorageError, StorageExt, ZeroMode};
use isobath_testkit::certificates::Keys;
use isobath_testkit::process::{Ready, Server};
use isobath_testkit::seed::Seed;
use isobath_testkit::{qemu, until};
use isobath_tls::ClientCredentials;
use rand::RngExt;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::pin::pin;
use std::process::Command;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::thread;

fn pattern(length: usize, generation: u64) -> Vec<u8> {
    (0..length as u64).map(|at| (at.wrapping_mul(31) ^ generation.wrapping_mul(97)) as u8).collect()
}

/// Random requests, and the bytes that must be there. `most` is the longest request.
async fn against_a_model(file: &NbdFile, model: &mut [u8], most: usize, steps: u64) {
    let seed = Seed::new();
    let mut random = seed.rng();
    let size = model.len();
    for step in 0..steps {
        let unit = [1, 512, 4096][random.random_range(0..3)];
        let offset = random.random_range(0..size) / unit * unit;
        let length = (1 + random.random_range(0..most)).next_multiple_of(unit).min(size - offset);
        let (at, bytes) = (offset as u64, length as u64);
        match random.random_range(0..10) {
            0..=3 => {
                let data = pattern(length, step);
                model[offset..offset + length].copy_from_slice(&data);
                let mut parts: Vec<IoBuf> = Vec::new();
                let mut rest = &data[..];
                while !rest.is_empty() {
                    let (part, after) = rest.split_at(random.random_range(0..=rest.len()));
                    parts.push(IoBuf::copy_of(part));
                    rest = after;
                }
                let lengths: Vec<usize> = parts.iter().map(IoBuf::len).collect();
                let back = file.write_vectored_at(at, parts).await.unwrap();
                assert_eq!(back.iter().map(IoBuf::len).collect::<Vec<_>>(), lengths);
                assert!(
                    back.iter().flat_map(|part| part.iter()).eq(&data),
                    "other bytes came back"
                );
            }
            4 | 5 => {
                let mode = ZeroMode { may_unmap: step % 2 == 0, only_fast: step % 3 == 0 };
                match file.write_zeroes(at, bytes, mode).await {
                    Err(error) => {
                        assert!(
                            mode.only_fast && error.kind() == ErrorKind::Unsupported,
                            "{error}"
                        );
                    }
                    Ok(()) => model[offset..offset + length].fill(0),
                }
            }
            6 => {
                file.discard(at, bytes).await.unwrap();
                // What is there now is the server's business.
                let now = read(file, at, length).await;
                model[offset..offset + length].copy_from_slice(&now);
            }
            7 => file.flush().await.unwrap(),
            _ => {
                let wanted = &model[offset..offset + length];
                assert!(read(file, at, length).await == wanted, "step {step}: {offset} {length}");
            }
        }
    }
    assert!(read(file, 0, size).await == model);
}

/// The runs of an export with data.
async fn data(file: &NbdFile) -> Vec<(u64, u64)> {
    let (mut at, mut found) = (0, Vec::new());
    loop {
        let run = file.allocation(at).await.unwrap();
        if run.length == 0 {
            return found;
        }
        if run.data {
            found.push((at, run.length));
        }
        at += run.length;
    }
}

#[test]
fn qemu_nbd_keeps_every_byte() {
    for (size, options) in [(3 << 20, &[][..]), (1_000_003, &[]), (3 << 20, &["--cache=none"])] {
        let directory = tempfile::tempdir().unwrap();
        let (image, socket) = (directory.path().join("raw"), directory.path().join("s"));
        let mut model = pattern(size, 99);
        fs::write(&image, &model).unwrap();
        let server = qemu::nbd(&image, "raw", &socket, options);
        let file = open(&socket).unwrap();
        // QEMU serves whole sectors.
        assert_eq!(block_on(file.len()).unwrap(), size.next_multiple_of(512) as u64);
        model.resize(size.next_multiple_of(512), 0);
        block_on(against_a_model(&file, &mut model, 200_000, 300));
        block_on(file.flush()).unwrap();
        drop(file);
        let _ = server.stop_qemu();
        let mut now = fs::read(&image).unwrap();
        now.resize(model.len(), 0);
        assert!(now == model, "{size} {options:?}");
    }
}

#[test]
fn what_a_server_can_is_respected() {
    for words in [
        &["memory", "1000000"][..],
        &["--no-sr", "memory", "3M"],
        &["--filter=nozero", "memory", "3M"],
        &["--filter=nozero", "--filter=noextents", "memory", "3M"],
        &["--mask-handshake=0", "memory", "3M"],
        &["--mask-handshake=1", "memory", "3M"],
        &["--mask-handshake=2", "memory", "3M"],
        &[
            "--filter=blocksize-policy",
            "memory",
            "3M",
            "blocksize-minimum=4096",
            "blocksize-preferred=4096",
            "blocksize-maximum=64k",
            "blocksize-error-policy=error",
        ],
        &[
            "--filter=blocksize-policy",
            "memory",
            "1M",
            "blocksize-minimum=64k",
            "blocksize-preferred=64k",
            "blocksize-maximum=64k",
            "blocksize-error-policy=error",
        ],
    ] {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("s");
        let _server = nbdkit(&socket, words);
        let file = open(&socket).unwrap();
        let mut model = vec![0; block_on(file.len()).unwrap() as usize];
        block_on(against_a_model(&file, &mut model, 150_000, 150));
        if !words.contains(&"--no-sr") {
            let _ = block_on(data(&file));
        }
    }
}

/// An encrypted export of nbdkit, the plain one, and what a host needs for it.
#[test]
fn an_encrypted_export_is_one_like_others() {
    let keys = Keys::new("/CN=client");
    let at = |name: &str| keys.at(name);
    let socket = at("s");
    let certificates = format!("--tls-certificates={}", at("server").display());
    let words = ["--tls=on", "--tls-verify-peer", &certificates, "memory", "3M"];
    let _server = nbdkit(&socket, &words);
    let (host, mistaken) = (NbdHost::default(), NbdHost::default());
    let plain = block_on(host.open(&name(&socket), WRITABLE)).unwrap();
    let _plain = block_on(mistaken.open(&name(&socket), WRITABLE)).unwrap();
    let export = ExportName::parse(name(&socket).to_str().unwrap()).unwrap();
    let encryption = |directory: &str, host_name: &str| {
        let credentials = ClientCredentials::read(&at(directory)).unwrap();
        Encryption { credentials, host: host_name.into() }
    };
    mistaken.encrypt(&export, encryption("client", "example.org")).unwrap();
    // The plain connection is not shared with whoever asks for an encrypted one.
    let refused = block_on(mistaken.open(&name(&socket), WRITABLE)).unwrap_err();
    assert!(refused.to_string().contains("example.org"), "{refused}");
    host.encrypt(&export, encryption("client", "localhost")).unwrap();
    let file = block_on(host.open(&name(&socket), WRITABLE)).unwrap();
    let mut model = vec![0; block_on(file.len()).unwrap() as usize];
    block_on(against_a_model(&file, &mut model, 400_000, 150));
    assert!(block_on(read(&plain, 0, model.len())) == model);

    // Whoever opens it with others would get this connection.
    host.encrypt(&export, encryption("client", "localhost")).unwrap();
    for other in [encryption("client", "example.org"), encryption("server", "localhost")] {
        let refused = host.encrypt(&export, other).unwrap_err();
        assert_eq!((&refused.directory, &*refused.host), (&at("client"), "localhost"));
    }
}

#[test]
fn the_length_is_fixed() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let _server = nbdkit(&socket, &["memory", "1000"]);
    let file = open(&socket).unwrap();
    block_on(async {
        let full = |error: StorageError| error.errno() == libc::ENOSPC;
        file.set_len(1000).await.unwrap();
        file.set_len(10).await.unwrap();
        file.set_len(1024).await.unwrap();
        assert!(full(file.set_len(1025).await.unwrap_err()));
        assert_eq!(file.len().await.unwrap(), 1000);
        // Zeroes in the rest of the last sector are what is read there.
        let end = [[5; 10], [0; 10]].concat();
        let back = file.write_at(990, IoBuf::copy_of(&end)).await.unwrap();
        assert_eq!(back[..], end);
        assert_eq!(read(&file, 985, 20).await, [&[0; 5][..], &[5; 10], &[0; 5]].concat());
        assert!(full(file.write_at(995, IoBuf::copy_of(&[1; 10])).await.unwrap_err()));
        assert!(full(file.write_at(1020, IoBuf::copy_of(&[0; 10])).await.unwrap_err()));
        file.write_zeroes(900, 124, ZeroMode::default()).await.unwrap();
        assert_eq!(read(&file, 985, 20).await, [0; 20]);
        assert_eq!(read(&file, 1 << 40, 3).await, [0; 3]);
        for offset in [u64::MAX, i64::MAX as u64] {
            assert!(file.read_at(offset, IoBuf::zeroed(2)).await.is_err());
            assert!(file.write_at(offset, IoBuf::zeroed(2)).await.is_err());
            assert!(file.discard(offset, 2).await.is_err());
        }
        assert_eq!(file.allocation(1000).await.unwrap().length, 0);
        assert_eq!(file.read_at(3, IoBuf::empty()).await.unwrap().len(), 0);
        assert!(file.write_vectored_at(7, Vec::new()).await.unwrap().is_empty());
    });
}

#[test]
fn holes_are_found() {
    let directory = tempfile::tempdir().unwrap();
    let (image, socket) = (directory.path().join("qcow2"), directory.path().join("s"));
    qemu::create(&image, "qcow2", 10 << 20, "");
    let _ = qemu::io(&image, "qcow2", &["write 2M 1M", "write -z 5M 1M"]).ok();
    let _server = qemu::nbd(&image, "qcow2", &socket, &[]);
    let file = open(&socket).unwrap();
    assert_eq!(block_on(data(&file)), [(2 << 20, 1 << 20)]);
}

#[test]
fn requests_of_many_threads_are_in_flight_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let _server = nbdkit(&socket, &["--filter=delay", "memory", "64M", "rdelay=5ms", "wdelay=5ms"]);
    let file = Arc::new(open(&socket).unwrap());
    let work = |number: u64| {
        let file = file.clone();
        thread::spawn(move || {
            Executor::new(&Config::default()).unwrap().block_on(async {
                let tasks: Vec<_> = (0..16)
                    .map(|task| {
                        let file = file.clone();
                        isobath_ring::spawn(async move {
                            let at = (number * 16 + task) << 20;
                            let bytes = pattern(300_000, at);
                            file.write_at(at, IoBuf::copy_of(&bytes)).await.unwrap();
                            assert!(read(&file, at, bytes.len()).await == bytes);
                        })
                    })
                    .collect();
                for task in tasks {
                    task.await.unwrap();
                }
            });
        })
    };
    let threads: Vec<_> = (0..4).map(work).collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

/// Polls a future once, and drops it.
fn begin_and_drop(future: impl Future) {
    let mut context = Context::from_waker(Waker::noop());
    assert!(pin!(future).poll(&mut context).is_pending());
}

#[test]
fn a_dropped_change_comes_before_later_ones() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let _server = nbdkit(&socket, &["--filter=delay", "memory", "1M", "wdelay=200ms"]);
    let file = open(&socket).unwrap();
    begin_and_drop(file.write_at(0, IoBuf::copy_of(&vec![1; 100_000])));
    begin_and_drop(file.read_at(0, IoBuf::zeroed(100_000)));
    assert_eq!(block_on(read(&file, 0, 3)), [1; 3]);
    begin_and_drop(file.write_at(0, IoBuf::copy_of(&vec![2; 100_000])));
    block_on(file.write_at(50_000, IoBuf::copy_of(&[3; 10]))).unwrap();
    assert_eq!(block_on(read(&file, 49_999, 12)), [&[2][..], &[3; 10], &[2]].concat());
    // Nothing waits for what is dropped with the file.
    begin_and_drop(file.write_at(0, IoBuf::copy_of(&[4; 10])));
    drop(file);
}

#[test]
fn a_failed_request_fails_alone() {
    let directory = tempfile::tempdir().unwrap();
    let (socket, fails) = (directory.path().join("s"), directory.path().join("fails"));
    let file_option = format!("error-file={}", fails.display());
    let words = ["--filter=error", "memory", "1M", "error=ENOSPC", "error-pwrite-rate=100%"];
    let _server = nbdkit(&socket, &[&words[..], &[&file_option]].concat());
    let file = open(&socket).unwrap();
    let write = || block_on(file.write_at(4096, IoBuf::copy_of(&[1; 512])));
    write().unwrap();
    fs::write(&fails, "").unwrap();
    let error = write().unwrap_err();
    assert_eq!((error.errno(), error.range), (libc::ENOSPC, Some((4096, 512))), "{error}");
    fs::remove_file(&fails).unwrap();
    write().unwrap();
    assert_eq!(block_on(read(&file, 4096, 2)), [1; 2]);
}

#[test]
fn a_lost_server_is_named_and_the_next_open_connects_anew() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let serve = || nbdkit(&socket, &["--filter=delay", "memory", "1M", "rdelay=100"]);
    let server = serve();
    let host = NbdHost::default();
    let file = Arc::new(block_on(host.open(&name(&socket), WRITABLE)).unwrap());
    let waiting = {
        let file = file.clone();
        thread::spawn(move || block_on(file.read_at(0, IoBuf::zeroed(512))).unwrap_err())
    };
    // Writes are not delayed: the read that was begun before is in flight.
    block_on(file.write_at(0, IoBuf::copy_of(&[1; 512]))).unwrap();
    let _ = server.kill();
    let error = waiting.join().unwrap();
    let shown = format!("nbd+unix://?socket={}", socket.display());
    assert!(error.to_string().contains(&shown), "{error}");
    for _ in 0..2 {
        let error = block_on(file.write_at(0, IoBuf::copy_of(&[1; 512]))).unwrap_err();
        assert!(error.to_string().contains(&shown), "{error}");
        assert!(block_on(file.flush()).is_err());
        assert!(block_on(file.allocation(0)).is_err());
    }
    let error = block_on(host.open(&name(&socket), WRITABLE)).unwrap_err();
    assert!(error.to_string().contains("Failed to connect"), "{error}");
    fs::remove_file(&socket).unwrap();
    fs::remove_file(socket.with_extension("pid")).unwrap();
    let _server = serve();
    let again = block_on(host.open(&name(&socket), WRITABLE)).unwrap();
    block_on(again.write_at(0, IoBuf::copy_of(&[2; 512]))).unwrap();
    assert!(block_on(file.flush()).is_err(), "a lost connection is not replaced silently");
}

#[test]
fn files_of_one_export_share_a_connection() {
    let directory = tempfile::tempdir().unwrap();
    let (image, socket) = (directory.path().join("raw"), directory.path().join("s"));
    fs::write(&image, vec![0; 1 << 20]).unwrap();
    // One client at a time, and none after it.
    let pid_file = directory.path().join("pid");
    let mut command = Command::new(qemu::program("qemu-nbd"));
    command.args(["--format", "raw", "--socket"]).arg(&socket).arg("--pid-file").arg(&pid_file);
    let server = Server::start(command.arg(&image), Ready::File(&pid_file));
    let host = NbdHost::default();
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let first = block_on(host.open(&name(&socket), WRITABLE)).unwrap();
    let second = block_on(host.open(Path::new(&uri), OpenMode::default())).unwrap();
    assert_eq!(first.id(), second.id());
    assert_eq!(isobath_nbd_client::identity(Path::new(&uri)).unwrap(), first.id());
    block_on(first.write_at(0, IoBuf::copy_of(b"seen"))).unwrap();
    assert_eq!(block_on(read(&second, 0, 4)), b"seen");
    assert!(second.is_read_only() && !first.is_read_only());
    assert_eq!(block_on(second.write_at(0, IoBuf::zeroed(1))).unwrap_err().errno(), libc::EBADF);
    assert!(block_on(second.discard(0, 1)).is_err());
    assert!(block_on(second.write_zeroes(0, 1, ZeroMode::default())).is_err());
    drop(first);
    assert_eq!(block_on(read(&second, 0, 4)), b"seen");
    drop(second);
    let _ = server.wait().ok();
}

#[test]
fn names_and_addresses_lead_to_the_export() {
    let directory = tempfile::tempdir().unwrap();
    let (image, socket) = (directory.path().join("raw"), directory.path().join("a b"));
    fs::write(&image, vec![7; 4096]).unwrap();
    let export = "an export/ü%";
    let _server = qemu::nbd(&image, "raw", &socket, &["--export-name", export, "--read-only"]);
    let host = NbdHost::default();
    let path = socket.display().to_string().replace(' ', "%20");
    for name in [
        format!("nbd:unix:{}:exportname={export}", socket.display()),
        format!("nbd+unix:///an%20export/%C3%BC%25?socket={path}"),
    ] {
        let name = Path::new(&name);
        let file = block_on(host.open(name, OpenMode::default())).unwrap();
        assert_eq!(block_on(read(&file, 4095, 2)), [7, 0]);
        let error = block_on(host.open(name, WRITABLE)).unwrap_err();
        assert_eq!(error.errno(), libc::EACCES, "the export is read-only");
        assert!(block_on(host.create(name, WRITABLE)).is_err());
        assert!(block_on(host.remove(name)).is_err());
    }
    let wrong = format!("nbd+unix:///none?socket={path}");
    let error = block_on(host.open(Path::new(&wrong), OpenMode::default())).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("Requested export not available") && text.contains("'none'"), "{text}");

    let number = std::net::TcpListener::bind("localhost:0").unwrap().local_addr().unwrap().port();
    let pid_file = directory.path().join("tcp");
    let port = number.to_string();
    let mut command = Command::new(isobath_testkit::tools::require("nbdkit"));
    command.args(["--foreground", "--port", &port, "--ipaddr", "127.0.0.1", "--pidfile"]);
    command.arg(&pid_file).args(["memory", "1M"]);
    let server = Server::start(&mut command, Ready::File(&pid_file));
    for name in [format!("nbd:localhost:{port}"), format!("nbd://127.0.0.1:{port}/x")] {
        let file = block_on(host.open(Path::new(&name), WRITABLE)).unwrap();
        block_on(file.write_at(0, IoBuf::copy_of(b"tcp"))).unwrap();
        assert_eq!(block_on(read(&file, 0, 3)), b"tcp");
    }
    let _ = server.kill();
    let name = format!("nbd:localhost:{port}");
    until("the port to be closed", || {
        let opened = block_on(host.open(Path::new(&name), WRITABLE));
        opened.is_err_and(|error| error.to_string().contains("Connection refused"))
    });
}

#[test]
fn creating_clears_the_first_sector() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let _server = nbdkit(&socket, &["data", "0xff*1000"]);
    let error = block_on(NbdHost::default().create(&name(&socket), WRITABLE)).err();
    assert!(error.is_none(), "{error:?}");
    let file = open(&socket).unwrap();
    assert_eq!(block_on(read(&file, 510, 4)), [0, 0, 0xff, 0xff]);
}
