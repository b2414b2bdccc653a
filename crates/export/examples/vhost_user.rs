//! Serves an image as a vhost-user-blk device until SIGTERM or SIGINT:
//!
//! ```sh
//! cargo run -p isobath-export --example vhost_user -- /tmp/disk.sock disk.qcow2 2
//! ```
//!
//! The third argument is the number of threads for queues; with 0 one thread does everything. After it,
//! `write-through` makes every write durable at once, `slow` lets every access to the image take 4 ms, and
//! `poll=` sets for how long queues look for requests before they sleep.

use isobath_disk::{DiskError, LiveDisk, OpenOptions};
use isobath_export::vhost_user::{Options, Server};
use isobath_storage::Host;
use isobath_storage::file::FileHost;
use isobath_storage::ring::{Config, Executor, Signals, Worker, sleep, spawn};
use isobath_storage::slow::{SlowDisk, SlowHost};
use std::error::Error;
use std::fs;
use std::io;
use std::num::{NonZeroU64, NonZeroUsize};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [socket, image, threads, more @ ..] = arguments.as_slice() else {
        return Err(
            "usage: vhost_user SOCKET IMAGE THREADS [write-through] [slow] [poll=MICROSECONDS]"
                .into(),
        );
    };
    let has = |name: &str| more.iter().any(|argument| argument == name);
    let mut options = Options {
        serial: "isobath-example".into(),
        write_through: has("write-through"),
        ..Options::default()
    };
    if let Some(poll) = more.iter().find_map(|argument| argument.strip_prefix("poll=")) {
        options.poll = Duration::from_micros(poll.parse()?);
    }
    let slow = SlowDisk {
        bandwidth: NonZeroU64::MAX,
        latency: Duration::from_millis(4),
        depth: NonZeroUsize::MAX,
        flush: Duration::ZERO,
        mechanics: None,
    };
    let workers = (0..threads.parse()?)
        .map(|number: usize| Worker::start(&format!("vring-{number}"), &Config::default()))
        .collect::<io::Result<Vec<Worker>>>()?;
    Executor::new(&Config::default())?.block_on(async {
        let (socket, image) = (Path::new(socket), Path::new(image));
        if has("slow") {
            serve(SlowHost::new(FileHost, slow), socket, image, options, &workers).await
        } else {
            serve(FileHost, socket, image, options, &workers).await
        }
    })
}

async fn serve<H: Host + Clone>(
    host: H,
    socket: &Path,
    image: &Path,
    options: Options,
    workers: &[Worker],
) -> Result<(), Box<dyn Error>> {
    let handles: Vec<_> = workers.iter().map(|worker| worker.handle().clone()).collect();
    let mut signals = Signals::new(&[libc::SIGTERM, libc::SIGINT])?;
    let open = OpenOptions { writable: true, ..OpenOptions::default() };
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
            opened => break opened?,
        }
    };
    let server = Server::new(disk.clone(), options)?;
    // A server that was killed leaves its socket's file.
    match fs::remove_file(socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    let listener = UnixListener::bind(socket)?;
    println!("serving {} on {}", image.display(), socket.display());
    let stopping = server.clone();
    let signal = spawn(async move {
        let _ = signals.recv().await;
        stopping.stop();
    });
    let upkeep = spawn({
        let disk = disk.clone();
        async move { disk.upkeep().await }
    });
    let served = server.serve(listener, &handles).await;
    drop((signal, upkeep));
    disk.close().await?;
    fs::remove_file(socket)?;
    Ok(served?)
}
