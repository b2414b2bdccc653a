//! Serves an image as a file: `cargo run --release --example fuse -- IMAGE FILE [THREADS]`.
//!
//! FILE must exist; until SIGINT or SIGTERM, or until somebody unmounts it, it is the disk. With THREADS
//! given (0: all in one), requests are spread over so many threads.

use isobath_disk::{LiveDisk, OpenOptions};
use isobath_export::fuse::{Mount, Options};
use isobath_ring::{Config, Executor, Signals, Worker, spawn};
use isobath_storage_file::FileHost;
use std::error::Error;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (image, file, threads) = match arguments.as_slice() {
        [image, file] => (image, file, 1),
        [image, file, threads] => (image, file, threads.parse()?),
        _ => return Err("usage: fuse IMAGE FILE [THREADS]".into()),
    };
    let start = |number: usize| Worker::start(&format!("fuse-{number}"), &Config::default());
    let workers = (0..threads).map(start).collect::<Result<Vec<_>, _>>()?;
    let handles: Vec<_> = workers.iter().map(|worker| worker.handle().clone()).collect();
    Executor::new(&Config::default())?.block_on(async {
        let options = OpenOptions::new().writable(true);
        let disk = LiveDisk::open(FileHost, Path::new(image), &options).await?;
        let options = Options { writable: true, growable: true, ..Options::default() };
        let mount = Mount::new(disk.clone(), Path::new(file), options)?;
        let mut signals = Signals::new(&[libc::SIGTERM, libc::SIGINT])?;
        let stopping = mount.clone();
        spawn(async move {
            let _ = signals.recv().await;
            stopping.stop();
        });
        let (keeping, kept) = (disk.clone(), mount.clone());
        spawn(async move {
            if let Err(error) = keeping.upkeep().await {
                eprintln!("{error}");
                kept.stop();
            }
        });
        mount.serve(&handles).await?;
        disk.close().await?;
        Ok(())
    })
}
