//! Writes a disk's content to the standard output, whatever its chain, leaving out nothing:
//!
//! ```sh
//! cargo run --release -p isobath --example read_disk -- overlay.qcow2 | sha256sum
//! ```

use isobath_disk::{Disk, OpenOptions};
use isobath_ring::block_on;
use isobath_storage::IoBuf;
use isobath_storage::file::FileHost;
use std::error::Error;
use std::io::Write;
use std::path::Path;

/// Bytes read at once.
const STEP: u64 = 1 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let name = std::env::args_os().nth(1).ok_or("usage: read_disk IMAGE")?;
    // Any executor will do; on a `ring::Executor`, reads go through io_uring.
    block_on(async {
        let disk = Disk::open(FileHost, Path::new(&name), &OpenOptions::default()).await?;
        let mut out = std::io::stdout().lock();
        let mut at = 0;
        while at < disk.size() {
            let length = STEP.min(disk.size() - at);
            let bytes = disk.read(at, IoBuf::zeroed(length as usize)).await?;
            out.write_all(&bytes)?;
            at += length;
        }
        Ok(())
    })
}
