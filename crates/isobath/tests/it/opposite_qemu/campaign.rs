//! Which seeds are tried, and what came of them.

use crate::opposite_qemu::replay::Totals;
use isobath_testkit::evidence::{Evidence, Run};
use isobath_testkit::seed::Seed;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How often what was done is told and kept.
const EVERY: Duration = Duration::from_secs(20);
/// Histories of `make test`.
const SLICE: u64 = 12;

/// What the next run goes on with.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct State {
    first: u64,
    next: u64,
    /// Seeds that were begun.
    open: BTreeSet<u64>,
    totals: Totals,
    seconds: f64,
}

struct Progress {
    state: State,
    /// Seeds that an earlier run had begun.
    again: Vec<u64>,
    /// Histories that this run has begun.
    begun: u64,
    told: Instant,
    failure: Option<String>,
}

pub(crate) struct Campaign {
    progress: Mutex<Progress>,
    file: Option<PathBuf>,
    begun: Instant,
    /// What earlier runs had done.
    before: State,
    /// Where this run is recorded, if it is limited by time or operations, as `make soak` is.
    evidence: Option<Evidence>,
    histories: u64,
    limit: Duration,
    operations: u64,
}

fn number(name: &str) -> Option<u64> {
    env::var(name).ok().map(|text| text.parse().unwrap())
}

impl Campaign {
    /// Begins, or goes on where the file of an earlier run ends. A seed that is given begins anew.
    pub(crate) fn start() -> Self {
        let given = env::var_os("ISOBATH_SEED").is_some();
        let file = env::var_os("ISOBATH_DIFF_STATE").map(PathBuf::from).filter(|_| !given);
        let kept = file.as_ref().and_then(|file| fs::read(file).ok());
        let state: State = if let Some(bytes) = kept {
            serde_json::from_slice(&bytes).unwrap()
        } else {
            let first = Seed::new().value();
            State { first, next: first, ..State::default() }
        };
        let (now, again) = (Instant::now(), state.open.iter().copied().collect());
        let before = state.clone();
        let seconds = number("ISOBATH_DIFF_SECONDS");
        let operations = number("ISOBATH_DIFF_OPERATIONS");
        let limited = seconds.is_some() || operations.is_some();
        let otherwise = if limited { u64::MAX } else { SLICE };
        let evidence = if limited { Evidence::begin().unwrap() } else { None };
        Self {
            progress: Mutex::new(Progress { state, again, begun: 0, told: now, failure: None }),
            file,
            begun: now,
            before,
            evidence,
            histories: number("ISOBATH_DIFF_HISTORIES").unwrap_or(otherwise),
            limit: seconds.map_or(Duration::MAX, Duration::from_secs),
            operations: operations.unwrap_or(u64::MAX),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap()
    }

    /// The seed of the next history, unless there were enough, or one has failed. There is one at least, however low
    /// the limits. Which ones are tried follows from the first and from the number of histories, whatever the threads
    /// and their order.
    pub(crate) fn next_seed(&self) -> Option<u64> {
        let mut progress = self.lock();
        let enough = progress.begun >= self.histories
            || self.begun.elapsed() > self.limit
            || progress.state.totals.operations() >= self.operations;
        if (enough && progress.begun > 0) || progress.failure.is_some() {
            return None;
        }
        progress.begun += 1;
        if let Some(seed) = progress.again.pop() {
            return Some(seed);
        }
        let seed = progress.state.next;
        progress.state.next = seed.wrapping_add(1);
        progress.state.open.insert(seed);
        Some(seed)
    }

    pub(crate) fn passed(&self, seed: u64, done: Totals) {
        let mut progress = self.lock();
        progress.state.open.remove(&seed);
        progress.state.totals += done;
        if progress.told.elapsed() > EVERY {
            progress.told = Instant::now();
            self.tell(&mut progress.state);
        }
    }

    /// Keeps the first failure only.
    pub(crate) fn failed(&self, explain: impl FnOnce() -> String) {
        let first = {
            let mut progress = self.lock();
            let first = progress.failure.is_none();
            progress.failure.get_or_insert_default();
            first
        };
        if first {
            let text = explain();
            self.lock().failure = Some(text);
        }
    }

    fn tell(&self, state: &mut State) {
        let seconds = self.begun.elapsed().as_secs_f64();
        state.seconds = self.before.seconds + seconds;
        let done = &state.totals;
        println!(
            "{} operations ({} by isobath, {} by qemu, {} jobs) in {} sessions on {} layers of {} \
             histories; {} MiB compared; from seed {:#x}, next {:#x}; {:.0} operations a second, {:.0} s \
             in all",
            done.operations(),
            done.isobath,
            done.qemu,
            done.jobs,
            done.sessions,
            done.layers,
            done.histories,
            done.bytes_compared >> 20,
            state.first,
            state.next,
            (done.operations() - self.before.totals.operations()) as f64 / seconds,
            state.seconds
        );
        if let Some(file) = &self.file {
            let new = file.with_extension("new");
            fs::write(&new, serde_json::to_vec_pretty(state).unwrap()).unwrap();
            fs::rename(new, file).unwrap();
        }
    }

    /// Records what this run did.
    fn record(&self, evidence: &Evidence, progress: &Progress) {
        let (done, before) = (&progress.state.totals, &self.before.totals);
        let (next, last) = (self.before.next, progress.state.next.wrapping_sub(1));
        // It ends with the command to repeat it.
        let failure = progress.failure.as_ref().map(|text| {
            let what: Vec<&str> = text.lines().take(2).collect();
            format!("{}: {}", text.lines().last().unwrap_or_default(), what.join(" "))
        });
        evidence
            .add(&Run {
                campaign: "soak",
                count: done.operations() - before.operations(),
                also: &[
                    ("histories", done.histories - before.histories),
                    ("jobs", done.jobs - before.jobs),
                    ("MiB compared", (done.bytes_compared - before.bytes_compared) >> 20),
                ],
                seeds: format!("{next:#x} to {last:#x}"),
                failure,
                seconds: self.begun.elapsed().as_secs_f64(),
                ..Run::default()
            })
            .unwrap();
    }

    /// Tells what was done; fails the test where something failed.
    pub(crate) fn end(&self) {
        let mut progress = self.lock();
        self.tell(&mut progress.state);
        if let Some(evidence) = &self.evidence {
            self.record(evidence, &progress);
        }
        if let Some(text) = progress.failure.take() {
            panic!("{text}");
        }
    }
}
