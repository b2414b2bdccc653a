//! Serves an image as a vhost-user-blk device until SIGTERM or SIGINT:
//!
//! ```sh
//! cargo run -p isobath-export --example vhost_user -- /tmp/disk.sock disk.qcow2 2
//! ```
//!
//! The third argument is the number of threads for queues; with 0 one thread does everything. A fourth,
//! `write-through`, makes every write durable at once.

use isobath_disk::{LiveDisk, OpenOptions};
use isobath_export::vhost_user::{Options, Server};
use isobath_storage::file::FileHost;
use isobath_storage::ring::{Config, Executor, Signals, Worker, spawn};
use std::error::Error;
use std::fs;
use std::io;
use std::os::unix::net::UnixListener;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (socket, image, threads, write_through) = match arguments.as_slice() {
        [socket, image, threads] => (socket, image, threads, false),
        [socket, image, threads, option] if option == "write-through" => {
            (socket, image, threads, true)
        }
        _ => return Err("usage: vhost_user SOCKET IMAGE THREADS [write-through]".into()),
    };
    let workers = (0..threads.parse()?)
        .map(|number: usize| Worker::start(&format!("vring-{number}"), &Config::default()))
        .collect::<io::Result<Vec<Worker>>>()?;
    let handles: Vec<_> = workers.iter().map(|worker| worker.handle().clone()).collect();
    Executor::new(&Config::default())?.block_on(async {
        let mut signals = Signals::new(&[libc::SIGTERM, libc::SIGINT])?;
        let open = OpenOptions { writable: true, ..OpenOptions::default() };
        let disk = LiveDisk::open(FileHost, Path::new(image), &open).await?;
        let serial = "isobath-example".into();
        let options = Options { serial, write_through, ..Options::default() };
        let server = Server::new(disk.clone(), options)?;
        // A server that was killed leaves its socket's file.
        match fs::remove_file(socket) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
        let listener = UnixListener::bind(socket)?;
        println!("serving {image} on {socket}");
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
        served.map_err(Into::into)
    })
}
