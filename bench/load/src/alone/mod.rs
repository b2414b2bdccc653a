//! Reads of cached data by an engine in this process: no frontend, no client, one thread.

pub(crate) mod engine;
pub(crate) mod imago;

use crate::Result;
use crate::options::size;
use crate::usage;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Bytes of a request of the pass that fills caches.
const WARM: usize = 1 << 20;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The active image of the chain
    image: PathBuf,
    /// Bytes of a read
    #[arg(long, value_parser = size, default_value = "4k")]
    bs: u64,
    /// Reads in flight; of imago, which waits in each, one
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=4096))]
    qd: u16,
    /// Reads that are measured
    #[arg(long, default_value_t = 1_000_000)]
    count: u64,
    /// Bytes from the disk's start that are read; all of it unless given
    #[arg(long, value_parser = size)]
    size: Option<u64>,
    /// Where the order of places comes from
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl Args {
    /// Places for reads on a disk of `capacity` bytes.
    fn places(&self, capacity: u64) -> Result<u64> {
        let places = self.size.unwrap_or(capacity).min(capacity).checked_div(self.bs);
        places.filter(|&places| places > 0).ok_or_else(|| "there is nothing to read".into())
    }
}

/// What was used when the measured reads began.
struct Start {
    cpu: Duration,
    time: Instant,
    allocations: u64,
}

impl Start {
    fn now() -> Result<Self> {
        Ok(Self { cpu: usage::cpu()?, time: Instant::now(), allocations: usage::allocations() })
    }

    /// The line of `count` reads since then.
    fn line(&self, command: &str, args: &Args, layers: Option<usize>) -> Result<Value> {
        let reads = args.count.max(1) as f64;
        let allocations = usage::allocations() - self.allocations;
        Ok(json!({
            "command": command,
            "block": args.bs,
            "depth": args.qd,
            "layers": layers,
            "requests": args.count,
            "ns_per_read": self.time.elapsed().as_nanos() as f64 / reads,
            "cpu_ns_per_read": (usage::cpu()?.saturating_sub(self.cpu)).as_nanos() as f64 / reads,
            "allocations_per_read": allocations as f64 / reads,
        }))
    }
}
