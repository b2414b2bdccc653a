//! CPU time of a cached 4 KiB random read through a ring, for comparison with `fio`.
//!
//! `cargo run --release --example read_cost -- FILE [READS] [DEPTH] [direct]` prints microseconds of CPU
//! time per read and reads per second. FILE is best of a size that fits the page cache, on ext4 or XFS.

use isobath_storage::file::FileHost;
use isobath_storage::ring::{Config, Executor, spawn};
use isobath_storage::{Host, IoBuf, OpenMode, Storage};
use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

const BLOCK: u64 = 4096;

fn cpu_seconds() -> f64 {
    // SAFETY: the kernel fills the structure, for which zeroes are valid.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

async fn reader<S: Storage>(file: Arc<S>, reads: u64, seed: u64) -> isobath_storage::Result<()> {
    let blocks = file.len().await? / BLOCK;
    let mut buf = IoBuf::zeroed(BLOCK as usize);
    let mut state = seed;
    for _ in 0..reads {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        buf = file.read_at((state >> 33) % blocks * BLOCK, buf).await?;
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let path = arguments.first().ok_or("usage: read_cost FILE [READS] [DEPTH] [direct]")?;
    let reads: u64 = arguments.get(1).map_or(Ok(2_000_000), |text| text.parse())?;
    let depth: u64 = arguments.get(2).map_or(Ok(32), |text| text.parse())?;
    let direct = arguments.get(3).is_some_and(|text| text == "direct");
    let executor = Executor::new(&Config::default())?;
    executor.block_on(async {
        let mode = OpenMode { direct, ..OpenMode::default() };
        let file = Arc::new(FileHost.open(Path::new(path), mode).await?);
        let (start, cpu) = (Instant::now(), cpu_seconds());
        let tasks: Vec<_> =
            (0..depth).map(|seed| spawn(reader(file.clone(), reads / depth, seed))).collect();
        for task in tasks {
            task.await??;
        }
        let done = (reads / depth * depth) as f64;
        let (cpu, wall) = (cpu_seconds() - cpu, start.elapsed().as_secs_f64());
        println!("{:.3} us CPU per read, {:.0} reads/s", cpu * 1e6 / done, done / wall);
        Ok(())
    })
}
