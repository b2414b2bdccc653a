//! A vhost-user-blk server in a process of its own, which a test can kill: this very program, told by its
//! environment to serve.

use isobath_disk::{DiskError, LiveDisk, OpenOptions};
use isobath_export::vhost_user::{Options, Server};
use isobath_ring::{Config, Executor, Signals, Worker, sleep, spawn};
use isobath_storage::Host;
use isobath_storage_file::FileHost;
use isobath_storage_test::slow::{SlowDisk, SlowHost};
use isobath_testkit::process::{Ready, Server as Process};
use isobath_testkit::qemu;
use std::env;
use std::fs;
use std::io;
use std::num::{NonZeroU64, NonZeroUsize};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// The test below, by its name.
const SELF: &str = "vhost_process::a_server_in_a_process_of_its_own";
/// What it is told: socket, image, and what else, apart by line feeds.
const TOLD: &str = "ISOBATH_TEST_VHOST";

/// Starts a server on an image. `slow` among `more` lets every access to the image take 4 ms,
/// `write-through` makes every write durable at once.
pub(crate) fn start(socket: &Path, image: &Path, more: &[&str]) -> Process {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args([SELF, "--exact", "--nocapture"]);
    let (socket, image) = (socket.to_str().unwrap(), image.to_str().unwrap());
    command.env(TOLD, [&[socket, image], more].concat().join("\n"));
    Process::start(&mut command, Ready::Line("serving"))
}

#[test]
fn a_server_in_a_process_of_its_own() {
    if let Ok(told) = env::var(TOLD) {
        let [socket, image, more @ ..] = &*told.split('\n').collect::<Vec<_>>() else {
            panic!("{told}");
        };
        return serve(Path::new(socket), Path::new(image), more);
    }
    let directory = tempfile::tempdir().unwrap();
    let (socket, image) = (directory.path().join("socket"), directory.path().join("image"));
    qemu::create(&image, "qcow2", 1 << 20, "");
    let _ = start(&socket, &image, &[]).stop().ok();
    qemu::assert_clean(&image);
}

fn serve(socket: &Path, image: &Path, more: &[&str]) {
    let slow = SlowDisk {
        bandwidth: NonZeroU64::MAX,
        latency: Duration::from_millis(4),
        depth: NonZeroUsize::MAX,
        flush: Duration::ZERO,
        mechanics: None,
    };
    let write_through = more.contains(&"write-through");
    let options = Options { serial: "isobath-test".into(), write_through, ..Options::default() };
    Executor::new(&Config::default()).unwrap().block_on(async {
        if more.contains(&"slow") {
            serve_on(SlowHost::new(FileHost, slow), socket, image, options).await;
        } else {
            serve_on(FileHost, socket, image, options).await;
        }
    });
}

async fn serve_on<H: Host + Clone>(host: H, socket: &Path, image: &Path, options: Options) {
    let worker = Worker::start("vring", &Config::default()).unwrap();
    let mut signals = Signals::new(&[libc::SIGTERM, libc::SIGINT]).unwrap();
    let open = OpenOptions::new().writable(true);
    // What a killed server had in the kernel may hold the image's lock for a moment longer.
    let mut patience = 100;
    let disk = loop {
        match LiveDisk::open(host.clone(), image, &open).await {
            Err(DiskError::Storage(error))
                if error.kind() == io::ErrorKind::ResourceBusy && patience > 0 =>
            {
                patience -= 1;
                sleep(Duration::from_millis(50)).await;
            }
            opened => break opened.unwrap(),
        }
    };
    let server = Server::new(disk.clone(), options).unwrap();
    // A server that was killed leaves its socket's file.
    let _ = fs::remove_file(socket);
    let listener = UnixListener::bind(socket).unwrap();
    println!("serving");
    let stopping = server.clone();
    let signal = spawn(async move {
        let _ = signals.recv().await;
        stopping.stop();
    });
    let upkeep = spawn({
        let disk = disk.clone();
        async move { disk.upkeep().await }
    });
    server.serve(listener, &[worker.handle().clone()]).await.unwrap();
    drop((signal, upkeep));
    disk.close().await.unwrap();
}
