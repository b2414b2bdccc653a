//! So many requests of 4 KiB on a chain of three images in memory, one after another, for counting instructions:
//! `bench/instructions` runs it. Takes `read` or `write`, and how many.

use isobath_disk::{Disk, NewDisk, OpenOptions, create};
use isobath_storage::{IoBuf, memory::MemoryHost};
use std::path::Path;

const SIZE: u64 = 64 << 20;
const BLOCK: u64 = 4096;

async fn run(write: bool, count: u64) -> Result<(), Box<dyn std::error::Error>> {
    let host = MemoryHost::new();
    let options = OpenOptions::new().writable(true);
    let names = ["base.qcow2", "middle.qcow2", "active.qcow2"];
    for (layer, name) in names.into_iter().enumerate() {
        let mut new = NewDisk::new(SIZE);
        if let Some(below) = layer.checked_sub(1) {
            new = new.backing_file(names[below], "qcow2");
        }
        create(&host, Path::new(name), &new).await?;
        let disk = Disk::open(host.clone(), Path::new(name), &options).await?;
        // Every third cluster is another layer's; all of them are the active layer's where it is written to.
        for cluster in 0..SIZE >> 16 {
            if cluster as usize % names.len() == layer || write && layer + 1 == names.len() {
                disk.write(cluster << 16, IoBuf::zeroed(1 << 16)).await?;
            }
        }
        disk.close().await?;
    }
    let disk = Disk::open(host, Path::new("active.qcow2"), &options).await?;
    let mut buf = IoBuf::zeroed(BLOCK as usize);
    for request in 0..count {
        let offset = request * 7919 % (SIZE / BLOCK) * BLOCK;
        if write {
            disk.write(offset, IoBuf::zeroed(BLOCK as usize)).await?;
        } else {
            buf = disk.read(offset, buf).await?;
        }
    }
    disk.close().await?;
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [what, count] = &*arguments else { return Err("usage: requests read|write COUNT".into()) };
    futures_executor::block_on(run(what == "write", count.parse()?))
}
