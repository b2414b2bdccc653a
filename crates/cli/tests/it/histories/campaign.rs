//! How many histories, from which seeds, and what came of them.

use isobath_testkit::evidence::{Evidence, Run};
use isobath_testkit::seed::Seed;
use std::collections::BTreeMap;
use std::env;
use std::sync::Mutex;
use std::thread;
use std::time::Instant;

/// What was done, and how often.
pub(super) type Done = BTreeMap<String, u64>;

/// Histories with consecutive seeds.
pub(super) struct Campaign {
    kind: &'static str,
    test: &'static str,
    /// How many, if `ISOBATH_HISTORIES` says it, as `make histories` does.
    given: bool,
    count: u64,
    first: u64,
    begun: Instant,
    evidence: Option<Evidence>,
    progress: Mutex<Progress>,
}

#[derive(Default)]
struct Progress {
    begun: u64,
    passed: u64,
    steps: u64,
    done: Done,
    failed: Option<u64>,
}

impl Campaign {
    /// `slice` is the number of histories where none is given; `test` the name of the test that repeats one.
    pub(super) fn start(kind: &'static str, test: &'static str, slice: u64) -> Self {
        let given = env::var("ISOBATH_HISTORIES").ok();
        Self {
            kind,
            test,
            given: given.is_some(),
            count: given.as_ref().map_or(slice, |count| count.parse().unwrap()),
            first: Seed::new().value(),
            begun: Instant::now(),
            evidence: if given.is_some() { Evidence::begin().unwrap() } else { None },
            progress: Mutex::default(),
        }
    }

    /// Runs the histories, of this many steps each: in a campaign on all processors.
    pub(super) fn run(self, steps: usize, history: impl Fn(&Seed) -> Done + Sync) {
        let threads = thread::available_parallelism().map_or(1, usize::from);
        let threads = if self.given { threads } else { 1 };
        let name = thread::current().name().unwrap_or_default().to_owned();
        let work = || {
            while let Some(number) = self.next() {
                let failing = Failing { campaign: &self, number };
                let done = history(&Seed::from(number));
                self.passed(steps as u64, &done);
                std::mem::forget(failing);
            }
        };
        thread::scope(|scope| {
            for _ in 0..threads {
                let thread = thread::Builder::new().name(name.clone());
                thread.spawn_scoped(scope, work).unwrap();
            }
        });
        println!("{:?}", self.progress.lock().unwrap().done);
    }

    fn next(&self) -> Option<u64> {
        let mut progress = self.progress.lock().unwrap();
        if progress.begun == self.count || progress.failed.is_some() {
            return None;
        }
        progress.begun += 1;
        Some(self.first.wrapping_add(progress.begun - 1))
    }

    fn passed(&self, steps: u64, done: &Done) {
        let mut progress = self.progress.lock().unwrap();
        progress.passed += 1;
        progress.steps += steps;
        for (what, times) in done {
            *progress.done.entry(what.clone()).or_default() += times;
        }
        if self.given && progress.passed.is_multiple_of(10) {
            let seconds = self.begun.elapsed().as_secs();
            let (passed, steps) = (progress.passed, progress.steps);
            let (kind, first) = (self.kind, self.first);
            println!("{kind}: {passed} histories, {steps} steps from seed {first:#x}, {seconds} s");
        }
    }
}

/// A history that fails unless this is forgotten.
struct Failing<'a> {
    campaign: &'a Campaign,
    number: u64,
}

impl Drop for Failing<'_> {
    fn drop(&mut self) {
        self.campaign.progress.lock().unwrap().failed.get_or_insert(self.number);
    }
}

impl Drop for Campaign {
    /// Records the histories that passed, also if one failed.
    fn drop(&mut self) {
        let Some(evidence) = &self.evidence else { return };
        let progress = self.progress.get_mut().unwrap();
        let last = self.first.wrapping_add(progress.begun).wrapping_sub(1);
        let recorded = evidence.add(&Run {
            campaign: "histories",
            kind: self.kind,
            count: progress.passed,
            also: &[("commands", progress.steps)],
            seeds: format!("{:#x} to {last:#x}", self.first),
            failure: progress.failed.map(|seed| {
                let test = self.test;
                format!("ISOBATH_SEED={seed:#x} ISOBATH_HISTORIES=1 cargo test {test}")
            }),
            seconds: self.begun.elapsed().as_secs_f64(),
            ..Run::default()
        });
        if let Err(error) = recorded {
            eprintln!("results are not recorded: {error}");
        }
    }
}
