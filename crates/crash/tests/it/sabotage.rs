//! The simulator soon finds the defects that can be enabled in the engine.

use isobath_crash::campaign::run_history;
use isobath_crash::image;
use isobath_crash::mode::Mode;
use isobath_crash::offline::run_offline;
use isobath_crash::outcome::{Failure, Settings, Totals, history_seed};
use isobath_crash::server::campaign::run_server;
use isobath_crash::server::kind;
use isobath_disk::sabotage::Sabotage;
use isobath_testkit::seed::Seed;
use std::env;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Each defect must be found within this many times the states that it takes on average: by chance, one takes longer in
/// less than 10^-8 of all cases, and the means are only measured.
const BUDGET: u64 = 20;

/// The least number of states that is multiplied.
const LEAST: u64 = 100;

/// Where a defect is found.
#[derive(Clone, Copy)]
struct Found {
    defect: Sabotage,
    /// Histories of what.
    of: Of,
    mode: &'static str,
    /// The kind of the histories, or of the image; `any` for all.
    kind: &'static str,
    /// At how many moments of each it crashes, or is killed.
    moments: usize,
    /// How many states it takes on average.
    mean: u64,
}

/// What histories are of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Of {
    Disk,
    Server,
    /// Commands on images that nobody uses.
    Commands,
}

const fn disk(
    defect: Sabotage,
    mode: &'static str,
    kind: &'static str,
    moments: usize,
    mean: u64,
) -> Found {
    Found { defect, of: Of::Disk, mode, kind, moments, mean }
}

const fn server(
    defect: Sabotage,
    mode: &'static str,
    kind: &'static str,
    moments: usize,
    mean: u64,
) -> Found {
    Found { defect, of: Of::Server, mode, kind, moments, mean }
}

const fn commands(defect: Sabotage, kind: &'static str, mean: u64) -> Found {
    Found { defect, of: Of::Commands, mode: "ordered", kind, moments: usize::MAX, mean }
}

const FOUND: &[Found] = &[
    disk(Sabotage::UnflushedRecord, "journal", "any", 4, 31),
    disk(Sabotage::NoFirstSync, "ordered", "any", 4, 10),
    disk(Sabotage::NoSecondSync, "ordered", "any", 4, 17),
    server(Sabotage::UnmarkedBitmaps, "ordered", "bitmaps", 1, 7),
    server(Sabotage::UnnotedWrites, "ordered", "bitmaps", 4, 42),
    server(Sabotage::EarlyUnmark, "ordered", "bitmaps", 4, 855),
    disk(Sabotage::EarlyRelease, "ordered", "any", 4, 35),
    disk(Sabotage::UncheckedCovers, "journal", "any", 16, 198),
    disk(Sabotage::Unguarded, "journal", "any", 4, 254),
    disk(Sabotage::EarlyCheckpoint, "journal", "flushes", 16, 985),
    disk(Sabotage::StaleMap, "ordered", "any", 1, 1),
    disk(Sabotage::StaleSlice, "ordered", "resize", 1, 1336),
    disk(Sabotage::EarlyReuse, "ordered", "any", 4, 65),
    server(Sabotage::OpenGate, "ordered", "snapshots", 1, 161),
    server(Sabotage::OldNumbers, "ordered", "streams", 1, 14),
    server(Sabotage::UnflushedStream, "ordered", "streams", 4, 121),
    server(Sabotage::UncopiedRest, "ordered", "pivots", 1, 138),
    disk(Sabotage::UnclearedGrowth, "ordered", "resize", 1, 173),
    disk(Sabotage::NoCopyOnWrite, "ordered", "any", 4, 46),
    disk(Sabotage::NoRangeLocks, "ordered", "any", 4, 183),
    disk(Sabotage::LostRecord, "journal", "any", 4, 28),
    server(Sabotage::SharedOpening, "ordered", "twins", 4, 90),
    server(Sabotage::IgnoredLog, "journal", "kills", 16, 106),
    server(Sabotage::IgnoredDamage, "journal", "kills", 8, 129),
    server(Sabotage::LateRestartLog, "journal", "kills", 4, 789),
    server(Sabotage::NoRevoke, "journal", "kills", 8, 750),
    server(Sabotage::ForeignLog, "journal", "kills", 8, 347),
    server(Sabotage::UnmarkedClone, "ordered", "reflinks", 4, 428),
    server(Sabotage::NoEnd, "ordered", "devices", 1, 76),
    server(Sabotage::ForgottenCommit, "ordered", "drops", 4, 27),
    server(Sabotage::NoNewLog, "journal", "kills", 4, 389),
    server(Sabotage::SharedOldData, "journal", "reflinks", 4, 497),
    server(Sabotage::HiddenLeftOut, "ordered", "commits", 1, 445),
    disk(Sabotage::LostPlace, "ordered", "any", 1, 2),
    commands(Sabotage::UnflushedRebase, "chain", 225),
    commands(Sabotage::NoDirtyBit, "any", 113),
];

/// Not found so far within a test's time limit: `docs/reliability.md` gives the reason for each. The last one panics,
/// which ends the simulation too; `stopped.rs` of the library's tests has it.
const NOT_FOUND: &[Sabotage] = &[
    Sabotage::EarlyUnclaim,
    Sabotage::LateLog,
    Sabotage::DrainsAtOnce,
    Sabotage::ListedAtOnce,
    Sabotage::ForeignUnit,
];

impl Found {
    fn settings(&self) -> Settings {
        Settings {
            kind: image::Kind::from_name(self.kind).filter(|_| self.of != Of::Server),
            qemu_every: 0,
            server: self.of == Of::Server,
            offline: self.of == Of::Commands,
            most_moments: self.moments,
            ..Settings::new(Mode::from_name(self.mode).unwrap())
        }
    }

    fn run(&self, settings: &Settings, seed: u64) -> Result<Totals, Box<Failure>> {
        match self.of {
            Of::Disk => run_history(settings, seed),
            Of::Server => {
                let kind = kind::Kind::from_name(self.kind).unwrap();
                run_server(settings, Some(kind), seed)
            }
            Of::Commands => run_offline(settings, seed),
        }
    }

    /// Runs histories of the engine with the defect until one fails. Returns the states up to that, and the failure.
    fn find(&self, campaign: u64) -> (u64, Box<Failure>) {
        let name = self.defect.name();
        let broken = Settings { defect: Some(self.defect), ..self.settings() };
        let (budget, mut states, mut number) = (BUDGET * self.mean.max(LEAST), 0, 0);
        loop {
            match self.run(&broken, history_seed(campaign, number)) {
                // A history counts as a state, too: it takes as long.
                Ok(totals) => states += totals.states + 1,
                Err(failure) => return (states + failure.passed + 1, failure),
            }
            number += 1;
            assert!(
                states <= budget,
                "{name} is not found within {states} states of seed {campaign:#x}: {BUDGET} times as many as it takes \
                 on average"
            );
        }
    }

    /// Finds it once, in a history that passes without it.
    fn found(&self, campaign: u64) {
        let name = self.defect.name();
        let (states, failure) = self.find(campaign);
        println!("{name}: found by state {states}, {} on average: {}", self.mean, failure.what);
        let sound = self.settings();
        if let Err(failure) = self.run(&sound, failure.seed) {
            panic!("{name} is not what was found: {}", failure.report(&sound));
        }
    }

    /// Finds it with this many seeds, and prints how many states that takes.
    fn measure(&self, rounds: u64) {
        let mut states: Vec<u64> = (0..rounds).map(|round| self.find(round << 32).0).collect();
        states.sort_unstable();
        let mean = states.iter().sum::<u64>() / rounds;
        let (name, listed) = (self.defect.name(), self.mean);
        println!("{name}: {mean} states on average, listed with {listed}; {states:?}");
    }
}

/// Calls `each` for every defect that is found, on two threads.
fn for_each(each: impl Fn(&Found) + Sync) {
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(found) = FOUND.get(next.fetch_add(1, Ordering::Relaxed)) {
            each(found);
        }
    };
    thread::scope(|scope| {
        let threads = [scope.spawn(work), scope.spawn(work)];
        for thread in threads {
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        }
    });
}

#[test]
fn every_defect_is_listed_once() {
    for defect in Sabotage::ALL {
        let found = FOUND.iter().filter(|found| found.defect == *defect).count();
        let not_found = NOT_FOUND.iter().filter(|other| *other == defect).count();
        assert_eq!(found + not_found, 1, "{}", defect.name());
    }
}

/// With `ISOBATH_DEFECT_ROUNDS`, all are searched, each with as many seeds, and the means are printed;
/// `ISOBATH_DEFECTS` names some of them.
#[test]
fn defects_are_found() {
    let Ok(rounds) = env::var("ISOBATH_DEFECT_ROUNDS") else {
        let seed = Seed::new();
        return for_each(|found| found.found(seed.value()));
    };
    let rounds = rounds.parse().expect("ISOBATH_DEFECT_ROUNDS is a number");
    let only = env::var("ISOBATH_DEFECTS").unwrap_or_default();
    for_each(|found| {
        if only.is_empty() || only.split(',').any(|name| name == found.defect.name()) {
            found.measure(rounds);
        }
    });
}
