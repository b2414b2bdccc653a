//! PBKDF2: how many iterations take a given time, and how many are allowed.

use crate::algorithms::Hash;
use crate::ciphers::derive;
use crate::error::{Error, Result};
use std::time::{Duration, Instant};

/// The maximum number of steps of PBKDF2 (two hashes each) for trying a secret on all key slots of a header.
///
/// Machines do between one and twelve million per second, so no header keeps one busy for much longer than a quarter of
/// an hour. The iterations of a header are determined by the time that they take on the machine that creates it: the
/// fastest one needs a minute and a half for this many, 45 times the default, and a slow machine chooses fewer. A
/// header within the limit can thus be opened on any machine.
pub const MAX_STEPS: u64 = 1 << 30;

/// The default time for a key slot's PBKDF2, the same as that of QEMU's `iter-time`.
pub const DEFAULT_ITER_TIME: Duration = Duration::from_secs(2);

/// The length of the master key's digest in bytes.
pub(crate) const DIGEST: usize = 20;

/// The minimum number of iterations, for key slots and for the master key's digest.
const MIN_ITERATIONS: u64 = 1000;

/// The number of steps in an iteration of PBKDF2 for a key of `length` bytes: one for each part of a hash's length.
pub(crate) fn steps_per_iteration(hash: Hash, length: usize) -> u64 {
    length.div_ceil(hash.length()) as u64
}

/// The iterations that take `time` on this machine for a key of `length` bytes, at least 1000.
pub(crate) fn iterations(hash: Hash, length: usize, time: Duration) -> Result<u32> {
    let per_second = if time.is_zero() { 0.0 } else { rate(hash, length)? };
    scaled(per_second, time, steps_per_iteration(hash, length))
}

/// The iterations for the digest of the master key: as many as take an eighth of `time`, at least 1000.
pub(crate) fn digest_iterations(hash: Hash, time: Duration) -> Result<u32> {
    iterations(hash, DIGEST, time / 8)
}

/// A key slot may take a quarter of a header's limit, which leaves room for others.
fn scaled(per_second: f64, time: Duration, steps: u64) -> Result<u32> {
    let count = (per_second * time.as_secs_f64()) as u64;
    let most = MAX_STEPS / 4 / steps;
    if count > most {
        let most =
            format!("on this machine at most {} ms is", (most as f64 / per_second * 1e3) as u64);
        return Err(Error::unsupported("iter-time", format!("{} ms", time.as_millis()), most));
    }
    Ok(count.max(MIN_ITERATIONS) as u32)
}

/// Iterations per second, in the fastest of a few short runs: the others are slower only because of other programs.
fn rate(hash: Hash, length: usize) -> Result<f64> {
    const RUN: Duration = Duration::from_millis(5);
    const RUNS: u32 = 5;
    let run = |count: u32| {
        let start = Instant::now();
        derive(hash, b"password", &[0x5a; 32], count, length)?;
        Ok::<_, Error>(start.elapsed())
    };
    let (mut count, mut fastest) = (500, Duration::ZERO);
    while fastest < RUN && count < 1 << 24 {
        count *= 2;
        fastest = run(count)?;
    }
    for _ in 1..RUNS {
        fastest = fastest.min(run(count)?);
    }
    Ok(f64::from(count) / fastest.as_secs_f64().max(1e-9))
}
