//! Serves an image as a vhost-user-blk device until SIGTERM or SIGINT:
//!
//! ```sh
//! cargo run -p isobath-export --example vhost_user -- /tmp/disk.sock disk.qcow2
//! ```

use isobath_disk::{LiveDisk, OpenOptions};
use isobath_export::vhost_user::{Options, Server};
use isobath_ring::{Config, Executor, Signals, Worker, spawn};
use isobath_storage_file::FileHost;
use std::error::Error;
use std::fs;
use std::os::unix::net::UnixListener;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [socket, image] = arguments.as_slice() else {
        return Err("usage: vhost_user SOCKET IMAGE".into());
    };
    // Queues are spread over these threads; without any they share this one.
    let worker = Worker::start("vring-0", &Config::default())?;
    Executor::new(&Config::default())?.block_on(serve(Path::new(socket), Path::new(image), &worker))
}

async fn serve(socket: &Path, image: &Path, worker: &Worker) -> Result<(), Box<dyn Error>> {
    let mut signals = Signals::new(&[libc::SIGTERM, libc::SIGINT])?;
    let open = OpenOptions::new().writable(true);
    let disk = LiveDisk::open(FileHost, image, &open).await?;
    let options = Options { serial: "isobath-example".into(), ..Options::default() };
    let server = Server::new(disk.clone(), options)?;
    let listener = UnixListener::bind(socket)?;
    println!("serving {} on {}", image.display(), socket.display());
    let stopping = server.clone();
    spawn(async move {
        let _ = signals.recv().await;
        stopping.stop();
    });
    // Flushes and closing are cheap where what they need is done before.
    let upkeep = disk.clone();
    spawn(async move { upkeep.upkeep().await });
    let served = server.serve(listener, &[worker.handle().clone()]).await;
    disk.close().await?;
    fs::remove_file(socket)?;
    Ok(served?)
}
