//! Random histories of commands on a chain of images: `isobath` on one copy of the chain, `qemu-img` on another. After
//! each command both copies hold the same: every disk, internal snapshot and bitmap, and what the headers say.
//!
//! `ISOBATH_HISTORIES` says how many histories (`make histories` sets it), `ISOBATH_SEED` which one is the first. A
//! failure prints its seed and the commands that led to it. With `ISOBATH_HISTORIES_KEEP` the images of a failure stay.

mod chain;
mod judge;
mod steps;

use chain::Chain;
use isobath_testkit::evidence::{Evidence, Run};
use isobath_testkit::seed::Seed;
use std::collections::BTreeMap;
use std::env;
use std::thread;
use std::time::Instant;

/// Histories of `make test`.
const SLICE: u64 = 4;
/// Commands of a history, after those that make the chain.
const STEPS: usize = 30;

/// The histories that passed, which are recorded where it ends, also if one fails and the test panics.
struct Passed {
    evidence: Option<Evidence>,
    first: u64,
    count: u64,
    commands: u64,
    begun: Instant,
}

impl Drop for Passed {
    fn drop(&mut self) {
        let Some(evidence) = &self.evidence else { return };
        let failed = thread::panicking();
        let next = self.first.wrapping_add(self.count);
        let last = if failed { next } else { next.wrapping_sub(1) };
        let recorded = evidence.add(&Run {
            campaign: "histories",
            count: self.count,
            also: &[("commands", self.commands)],
            seeds: format!("{:#x} to {last:#x}", self.first),
            failure: failed.then(|| {
                format!("ISOBATH_SEED={next:#x} ISOBATH_HISTORIES=1 cargo test histories_leave")
            }),
            seconds: self.begun.elapsed().as_secs_f64(),
            ..Run::default()
        });
        if let Err(error) = recorded {
            eprintln!("results are not recorded: {error}");
        }
    }
}

#[test]
fn histories_leave_the_same_disks_as_qemu_img() {
    let given = env::var("ISOBATH_HISTORIES").ok();
    let count = given.as_ref().map_or(SLICE, |count| count.parse().unwrap());
    let first = Seed::new().value();
    let evidence = if given.is_some() { Evidence::begin().unwrap() } else { None };
    let begun = Instant::now();
    let mut passed = Passed { evidence, first, count: 0, commands: 0, begun };
    let mut done: BTreeMap<String, u64> = BTreeMap::new();
    for number in 0..count {
        let seed = Seed::from(first.wrapping_add(number));
        let mut rng = seed.rng();
        let mut chain = Chain::random(&mut rng);
        for _ in 0..STEPS {
            chain.step(&mut rng);
        }
        for (what, times) in chain.done() {
            *done.entry(what.to_owned()).or_default() += times;
            passed.commands += times;
        }
        passed.count += 1;
        if given.is_some() {
            let seconds = begun.elapsed().as_secs();
            let next = first.wrapping_add(number + 1);
            println!("{} histories from seed {first:#x}, next {next:#x}, {seconds} s", number + 1);
        }
    }
    println!("{done:?}");
}
