//! Every fuzz target on valid inputs, and on the same with bytes changed, cut out and put in.

use isobath_fuzz::{TARGETS, seeds};
use isobath_testkit::seed::Seed;
use rand::rngs::SmallRng;
use rand::{Rng, RngExt, SeedableRng};
use std::thread;

/// Tries of each target; of the one that starts a server for each there are fewer.
fn tries(name: &str) -> usize {
    if name == "vhost_user" { 200 } else { 1000 }
}

#[test]
fn nothing_panics_or_hangs() {
    let seed = Seed::new();
    thread::scope(|scope| {
        for (number, (name, target)) in TARGETS.iter().enumerate() {
            let mut rng = SmallRng::seed_from_u64(seed.value() ^ number as u64);
            scope.spawn(move || {
                let seeds = seeds(name);
                assert!(!seeds.is_empty(), "{name} has no seeds");
                for seed in &seeds {
                    target(seed);
                }
                for _ in 0..tries(name) {
                    let mut input = seeds[rng.random_range(0..seeds.len())].clone();
                    for _ in 0..rng.random_range(1..6) {
                        damage(&mut input, &mut rng);
                    }
                    target(&input);
                }
            });
        }
    });
}

#[test]
fn every_target_has_its_program() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz_targets");
    let mut files: Vec<_> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned())
        .collect();
    let mut names: Vec<_> = TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect();
    files.sort();
    names.sort();
    assert_eq!(files, names);
}

fn damage<R: Rng>(input: &mut Vec<u8>, rng: &mut R) {
    if input.is_empty() {
        return;
    }
    // Headers and tables are where it matters: half of the damage is near the start.
    let range = if rng.random() { input.len().min(128) } else { input.len() };
    let at = rng.random_range(0..range);
    match rng.random_range(0..6) {
        0 => input[at] ^= 1 << rng.random_range(0..8),
        1 => input[at] = rng.random(),
        2 => {
            let end = (at + rng.random_range(1..=8)).min(input.len());
            input[at..end].fill(if rng.random() { 0xff } else { 0 });
        }
        3 => input.truncate(at),
        4 => {
            let from = rng.random_range(0..input.len());
            let length = rng.random_range(1..=64).min(input.len() - from.max(at));
            input.copy_within(from..from + length, at);
        }
        _ => input.insert(at, rng.random()),
    }
}
