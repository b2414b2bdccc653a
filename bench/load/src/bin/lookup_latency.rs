//! Looks up 4 KiB at random places, every part of the disk being in the map, and prints how long that
//! took, alone and with a read of the place after each (which empties the processor's caches), as
//! JSON:
//!
//! ```sh
//! cargo run --release -p isobath-load --bin lookup_latency -- overlay.qcow2
//! ```

use isobath_disk::{Disk, MapStats, OpenOptions};
use isobath_ring::block_on;
use isobath_storage::IoBuf;
use isobath_storage_file::FileHost;
use std::error::Error;
use std::ffi::OsStr;
use std::path::Path;

const LOOKUPS: u64 = 400_000;
const LENGTH: u64 = 4096;

fn main() -> Result<(), Box<dyn Error>> {
    let name = std::env::args_os().nth(1).ok_or("usage: lookup_latency IMAGE")?;
    block_on(async {
        let alone = measure(&name, false).await?;
        let between = measure(&name, true).await?;
        println!(
            "{{\"median_ns\": {}, \"p99_ns\": {}, \"between_reads_median_ns\": {}, \
             \"between_reads_p99_ns\": {}}}",
            alone.lookup_median_ns,
            alone.lookup_p99_ns,
            between.lookup_median_ns,
            between.lookup_p99_ns
        );
        Ok(())
    })
}

/// Look-ups at random places, with a read after each or alone.
async fn measure(name: &OsStr, reads: bool) -> Result<MapStats, Box<dyn Error>> {
    let disk = Disk::open(FileHost, Path::new(name), &OpenOptions::default()).await?;
    disk.block_status(0, disk.size(), usize::MAX).await?;
    let places = (disk.size() / LENGTH).max(1);
    let mut buf = IoBuf::zeroed(LENGTH as usize);
    let mut place = 1_u64;
    for _ in 0..LOOKUPS {
        // A full-period generator is random enough.
        place = place.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let at = (place >> 20) % places * LENGTH;
        if reads {
            buf = disk.read(at, buf).await?;
        } else {
            disk.block_status(at, LENGTH, 1).await?;
        }
    }
    Ok(disk.map_stats())
}
