//! Writes a disk's content to the standard output, whatever its chain, leaving out nothing:
//!
//! ```sh
//! cargo run --release -p isobath --example read_disk -- overlay.qcow2 | sha256sum
//! ```

use isobath::OpenOptions;
use isobath::blocking::Disk;
use std::error::Error;
use std::ffi::OsStr;
use std::io::Write;

/// Bytes read at once.
const STEP: u64 = 1 << 20;

pub(crate) fn run(name: &OsStr, out: &mut dyn Write) -> Result<(), Box<dyn Error>> {
    let disk = Disk::open(name, &OpenOptions::new())?;
    let mut bytes = vec![0; STEP.min(disk.size()) as usize];
    let mut at = 0;
    while at < disk.size() {
        bytes.truncate((disk.size() - at) as usize);
        disk.read_at(at, &mut bytes)?;
        out.write_all(&bytes)?;
        at += bytes.len() as u64;
    }
    Ok(disk.close()?)
}

fn main() -> Result<(), Box<dyn Error>> {
    let name = std::env::args_os().nth(1).ok_or("usage: read_disk IMAGE")?;
    run(&name, &mut std::io::stdout().lock())
}
