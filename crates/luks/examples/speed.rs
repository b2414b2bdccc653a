//! Measures the encryption of every cipher and mode, in MB/s on one core: `cargo run --release -p isobath-luks
//! --example speed`.

use isobath_luks::{CipherAlgorithm, CipherMode, CreateOptions, Secret, system_random};
use std::time::{Duration, Instant};

fn main() -> isobath_luks::Result<()> {
    println!(
        "{:8} {:4} {:>7} {:>14} {:>14}",
        "cipher", "mode", "bytes", "encrypt MB/s", "decrypt MB/s"
    );
    for &algorithm in CipherAlgorithm::ALL {
        for &mode in CipherMode::ALL {
            let iter_time = Duration::ZERO;
            let options = CreateOptions { algorithm, mode, iter_time, ..CreateOptions::default() };
            let made = options.create(&Secret::new(Vec::new())?, &mut system_random)?;
            let cipher = made.header.cipher(&made.key)?;
            for length in [512, 4096, 65536, 1 << 20] {
                let mut data = vec![0; length];
                let encrypt = rate(length, || cipher.encrypt(1 << 33, &mut data));
                let decrypt = rate(length, || cipher.decrypt(1 << 33, &mut data));
                println!("{algorithm:8} {mode:4} {length:>7} {encrypt:>14.0} {decrypt:>14.0}");
            }
        }
    }
    Ok(())
}

/// The best of ten runs of 256 MiB.
fn rate(length: usize, mut run: impl FnMut()) -> f64 {
    let bytes = 256 << 20;
    let mut best = Duration::MAX;
    for _ in 0..10 {
        let start = Instant::now();
        for _ in 0..bytes / length {
            run();
        }
        best = best.min(start.elapsed());
    }
    bytes as f64 / 1e6 / best.as_secs_f64()
}
