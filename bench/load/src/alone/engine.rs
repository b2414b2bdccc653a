//! Isobath's engine: what a frontend uses, on one executor.

use super::{Args, Start, WARM};
use crate::Result;
use isobath_disk::{LiveDisk, OpenOptions};
use isobath_ring::{Config, Executor};
use isobath_storage::IoBuf;
use isobath_storage_file::FileHost;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use serde_json::Value;
use std::sync::Arc;

/// The most bytes of images' files that are mapped at a time.
const MOST_MAPPED: u64 = 16 << 30;

/// Reads all of the range once, then `count` times at random places; gives the line.
///
/// # Errors
/// The image cannot be opened or read.
pub(crate) fn run(args: &Args) -> Result<Value> {
    // As servers do.
    FileHost.map_reads(MOST_MAPPED);
    Executor::new(&Config::default())?.block_on(async {
        let disk = LiveDisk::open(FileHost, &args.image, &OpenOptions::default()).await?;
        let places = args.places(disk.size())?;
        let end = places * args.bs;
        let (mut offset, mut buf) = (0, IoBuf::zeroed(WARM));
        while offset < end {
            let length = (end - offset).min(WARM as u64);
            if buf.len() as u64 > length {
                buf = buf.split_to(length as usize);
            }
            buf = disk.read(offset, buf).await?;
            offset += length;
        }
        let tasks = u64::from(args.qd).min(args.count.max(1));
        let start = Start::now()?;
        let readers: Vec<_> = (0..tasks)
            .map(|task| {
                let count = args.count / tasks + u64::from(task < args.count % tasks);
                let random = SmallRng::seed_from_u64(args.seed.wrapping_add(task));
                isobath_ring::spawn(read(disk.clone(), random, count, places, args.bs))
            })
            .collect();
        for reader in readers {
            reader.await.map_err(|error| error.to_string())??;
        }
        let line = start.line("engine", args, Some(disk.depth()))?;
        disk.close().await?;
        Ok(line)
    })
}

async fn read(
    disk: Arc<LiveDisk<FileHost>>,
    mut random: SmallRng,
    count: u64,
    places: u64,
    block: u64,
) -> isobath_disk::Result<()> {
    let mut buf = IoBuf::zeroed(block as usize);
    for _ in 0..count {
        buf = disk.read(random.random_range(0..places) * block, buf).await?;
    }
    Ok(())
}
