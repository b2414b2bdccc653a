//! Images of every sort, damaged by structure, beside QEMU: both programs read, check, repair and write
//! copies of each.
//!
//! - What could be read before a repair reads the same after it.
//! - What Isobath calls clean, before or after a repair, QEMU calls clean.
//! - What both read is the same. A write changes what it is for, and nothing else.
//! - Nothing panics, and nothing takes much memory.
//!
//! Where the programs disagree otherwise it is an accepted [kind](kinds::Kind), or a failure.
//!
//! `ISOBATH_DAMAGE_IMAGES` says how many images (`make damage` sets it), `ISOBATH_SEED` which ones. Such a
//! campaign notes how far it came, and goes on from there the next time. `ISOBATH_DAMAGE_ONLY` repeats the
//! image of that number alone.

mod inflict;
mod judge;
mod kinds;
mod pool;
mod sides;

use isobath_testkit::evidence::{Evidence, Run};
use isobath_testkit::seed::Seed;
use judge::{Verdict, judge};
use kinds::Kind;
use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::panic;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Images of `make test`.
const SLICE: u64 = 120;
/// Memory of this test at most, in KiB: damaged images claim terabytes.
const MOST_MEMORY: u64 = 2 << 20;
/// Of each accepted disagreement, told at the end of a campaign.
const EXAMPLES: usize = 20;
/// An image that takes longer hangs.
const PATIENCE: Duration = Duration::from_mins(5);

/// How far a campaign has come.
struct Progress {
    file: PathBuf,
    begin: u64,
}

impl Progress {
    /// Where the campaign of this seed ended; a slice begins anew.
    fn of(seed: u64, campaign: bool) -> Self {
        let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("damage-{seed:x}"));
        let noted = fs::read_to_string(&file).ok().filter(|_| campaign);
        let begin = noted.and_then(|text| text.trim().parse().ok()).unwrap_or(0);
        Self { file, begin }
    }

    fn note(&self, done: u64) {
        fs::write(&self.file, done.to_string()).unwrap();
    }
}

#[derive(Default)]
struct Totals {
    kinds: BTreeMap<Kind, (u64, Vec<String>)>,
    failures: Vec<String>,
    judged: u64,
    /// Images without a failure.
    passed: u64,
}

impl Totals {
    fn add(&mut self, verdict: Verdict) {
        self.judged += 1;
        let Verdict { what, accepted, violations } = verdict;
        self.passed += u64::from(violations.is_empty());
        for (kind, why) in accepted {
            let (count, examples) = self.kinds.entry(kind).or_default();
            *count += 1;
            if examples.len() < EXAMPLES {
                let why: String = why.trim().chars().take(300).collect();
                examples.push(format!("{what}\n      {why}"));
            }
        }
        for violation in violations {
            eprintln!("FAILED {what}\n  {violation}");
            self.failures.push(format!("{what}\n  {violation}"));
        }
    }
}

fn memory_peak() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn damaged_images_are_judged_as_qemu_judges_them() {
    let seed = Seed::new();
    let images = env::var("ISOBATH_DAMAGE_IMAGES").ok();
    let campaign = images.is_some();
    let images: u64 = images.map_or(SLICE, |text| text.parse().unwrap());
    let only = env::var("ISOBATH_DAMAGE_ONLY").ok().map(|text| text.parse::<u64>().unwrap());
    let evidence = if campaign && only.is_none() { Evidence::begin().unwrap() } else { None };
    let directory = tempfile::tempdir().unwrap();
    let pool = pool::make(&mut seed.rng(), directory.path());
    let progress = Progress::of(seed.value(), campaign);
    let (first, end) = only.map_or((progress.begin, images), |one| (one, one + 1));
    let next = AtomicU64::new(first);
    let totals = Mutex::new(Totals::default());
    let begin = Instant::now();
    let work = |worker: usize| {
        let own = directory.path().join(worker.to_string());
        fs::create_dir(&own).unwrap();
        loop {
            let number = next.fetch_add(1, Ordering::SeqCst);
            if number >= end {
                return;
            }
            let started = Instant::now();
            // Images of one seed have numbers that follow one another.
            let of_image = seed.value().wrapping_add(number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let verdict = panic::catch_unwind(|| judge(&pool, of_image, &own));
            let verdict = verdict.unwrap_or_else(|_| Verdict {
                what: format!("image {of_image:#x}"),
                accepted: Vec::new(),
                violations: vec!["it made the program panic".into()],
            });
            let mut totals = totals.lock().unwrap();
            let Verdict { what, accepted, mut violations } = verdict;
            if started.elapsed() > PATIENCE {
                violations.push(format!("it took {:?}", started.elapsed()));
            }
            let what = format!("number {number}, {what}");
            totals.add(Verdict { what, accepted, violations });
            if campaign && totals.judged.is_multiple_of(100) {
                // Others may still be at images before this one.
                progress.note(number.saturating_sub(8));
                let rate = totals.judged as f64 / begin.elapsed().as_secs_f64();
                let failed = totals.failures.len();
                eprintln!("{number} of {end}: {rate:.1} images a second, {failed} failures");
            }
        }
    };
    thread::scope(|scope| {
        let work = &work;
        // So many may take most of the memory at a time, each for an image of its own.
        for worker in 0..thread::available_parallelism().map_or(2, usize::from).min(8) {
            scope.spawn(move || work(worker));
        }
    });
    let totals = totals.into_inner().unwrap();
    if campaign && only.is_none() {
        progress.note(end.max(progress.begin));
    }
    for (kind, (count, examples)) in &totals.kinds {
        println!("{kind}: {count}");
        for example in examples.iter().filter(|_| campaign) {
            println!("    {example}");
        }
    }
    let peak = memory_peak();
    if let Some(evidence) = evidence.filter(|_| first < end) {
        let accepted = totals.kinds.values().map(|(count, _)| count).sum();
        let hog = (peak >= MOST_MEMORY).then(|| format!("{peak} KiB of memory"));
        evidence
            .add(&Run {
                campaign: "damage",
                count: totals.passed,
                also: &[("accepted disagreements", accepted)],
                seeds: format!("{:#x}, images {first} to {}", seed.value(), end - 1),
                failure: totals.failures.first().map(|text| text.replace('\n', "; ")).or(hog),
                seconds: begin.elapsed().as_secs_f64(),
                ..Run::default()
            })
            .unwrap();
    }
    println!(
        "{} images of seed {:#x} in {:.0} s, at most {} MiB of memory",
        totals.judged,
        seed.value(),
        begin.elapsed().as_secs_f64(),
        peak >> 10
    );
    assert!(peak < MOST_MEMORY, "{peak} KiB of memory");
    assert!(totals.failures.is_empty(), "{}", totals.failures.join("\n"));
}
