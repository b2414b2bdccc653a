//! Makes a chain of images in a directory, shows which layer each part of the disk comes from, and merges the chain
//! into its active image:
//!
//! ```sh
//! cargo run --release -p isobath --example chain -- /var/tmp/chain
//! ```

use isobath::file::FileHost;
use isobath::jobs::{JobOptions, StreamOptions};
use isobath::ring::{Config, Executor};
use isobath::storage::IoBuf;
use isobath::{Disk, NewDisk, OpenOptions, create};
use std::error::Error;
use std::path::Path;

const LAYERS: u64 = 5;
const MIB: u64 = 1 << 20;

pub(crate) fn run(directory: &Path) -> Result<(), Box<dyn Error>> {
    Executor::new(&Config::default())?.block_on(make_and_merge(directory))
}

async fn make_and_merge(directory: &Path) -> Result<(), Box<dyn Error>> {
    std::fs::create_dir_all(directory)?;
    let writable = OpenOptions::new().writable(true);
    for layer in 0..LAYERS {
        let new = match layer.checked_sub(1) {
            None => NewDisk::new(64 * MIB),
            // A relative name is relative to the overlay's directory.
            Some(below) => NewDisk::overlay(format!("layer{below}.qcow2"), "qcow2"),
        };
        let name = directory.join(format!("layer{layer}.qcow2"));
        create(&FileHost, &name, &new).await?;
        let disk = Disk::open(FileHost, &name, &writable).await?;
        disk.write(layer * MIB, pattern(layer as u8 + 1)).await?;
        disk.close().await?;
    }

    let active = directory.join(format!("layer{}.qcow2", LAYERS - 1));
    let disk = Disk::open(FileHost, &active, &writable).await?;
    show(&disk).await?;

    // Data of the layers below moves into the active one, while the disk stays in use.
    let (job, running) = disk.stream(StreamOptions::default(), JobOptions::new("merge"))?;
    running.await;
    job.result()?;
    show(&disk).await?;
    disk.close().await?;
    Ok(())
}

fn pattern(byte: u8) -> IoBuf {
    let mut buf = IoBuf::zeroed(MIB as usize);
    buf.fill(byte);
    buf
}

/// Prints which layer each part of the disk comes from; 0 is the active one.
async fn show(disk: &Disk<FileHost>) -> isobath::Result<()> {
    println!("layers: {}", disk.depth());
    let mut print = |run: &isobath::MapEntry| {
        if run.data {
            println!("{:>10} {:>10} layer {}", run.start, run.length, run.depth);
        }
    };
    disk.map(0..disk.size(), &mut print).await
}

fn main() -> Result<(), Box<dyn Error>> {
    let directory = std::env::args_os().nth(1).ok_or("usage: chain DIRECTORY")?;
    run(Path::new(&directory))
}
