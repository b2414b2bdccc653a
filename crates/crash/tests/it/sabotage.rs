//! The simulator soon finds the defects that can be enabled in the engine.

use isobath_crash::campaign::run_history;
use isobath_crash::image;
use isobath_crash::mode::Mode;
use isobath_crash::offline::run_offline;
use isobath_crash::outcome::{Failure, Settings, Totals, history_seed};
use isobath_crash::server::campaign::run_server;
use isobath_crash::server::kind;
use isobath_disk::sabotage::Sabotage;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Each defect must be found within this many states. The seeds find theirs much sooner, but a change of the engine
/// changes their histories.
const MOST: u64 = 10_000;

/// Where a defect is found.
struct Found {
    defect: Sabotage,
    /// Histories of what.
    of: Of,
    mode: &'static str,
    /// The kind of the histories; `any` for a disk.
    kind: &'static str,
    /// The campaign's seed.
    seed: u64,
}

/// What histories are of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Of {
    Disk,
    Server,
    /// Commands on images that nobody uses.
    Commands,
}

const fn disk(defect: Sabotage, mode: &'static str, kind: &'static str, seed: u64) -> Found {
    Found { defect, of: Of::Disk, mode, kind, seed }
}

const fn server(defect: Sabotage, mode: &'static str, kind: &'static str, seed: u64) -> Found {
    Found { defect, of: Of::Server, mode, kind, seed }
}

const fn commands(defect: Sabotage, seed: u64) -> Found {
    Found { defect, of: Of::Commands, mode: "ordered", kind: "any", seed }
}

const FOUND: &[Found] = &[
    disk(Sabotage::UnflushedRecord, "journal", "any", 7),
    disk(Sabotage::NoFirstSync, "ordered", "any", 7),
    disk(Sabotage::NoSecondSync, "ordered", "any", 7),
    server(Sabotage::UnmarkedBitmaps, "ordered", "bitmaps", 7),
    server(Sabotage::UnnotedWrites, "ordered", "bitmaps", 7),
    server(Sabotage::EarlyUnmark, "ordered", "bitmaps", 8),
    disk(Sabotage::EarlyRelease, "ordered", "any", 7),
    disk(Sabotage::UncheckedCovers, "journal", "any", 7),
    disk(Sabotage::Unguarded, "journal", "any", 7),
    disk(Sabotage::EarlyCheckpoint, "journal", "flushes", 7),
    disk(Sabotage::StaleMap, "ordered", "any", 7),
    disk(Sabotage::StaleSlice, "ordered", "resize", 7),
    disk(Sabotage::EarlyReuse, "ordered", "any", 7),
    server(Sabotage::OpenGate, "ordered", "snapshots", 9),
    server(Sabotage::OldNumbers, "ordered", "streams", 7),
    server(Sabotage::UnflushedStream, "ordered", "streams", 7),
    server(Sabotage::UncopiedRest, "ordered", "pivots", 7),
    disk(Sabotage::UnclearedGrowth, "ordered", "resize", 7),
    disk(Sabotage::NoCopyOnWrite, "ordered", "any", 7),
    disk(Sabotage::NoRangeLocks, "ordered", "any", 7),
    disk(Sabotage::LostRecord, "journal", "any", 7),
    server(Sabotage::SharedOpening, "ordered", "twins", 7),
    server(Sabotage::IgnoredLog, "journal", "kills", 7),
    server(Sabotage::IgnoredDamage, "journal", "kills", 8),
    server(Sabotage::LateRestartLog, "journal", "kills", 102),
    server(Sabotage::NoRevoke, "journal", "kills", 7),
    server(Sabotage::ForeignLog, "journal", "kills", 7),
    server(Sabotage::UnmarkedClone, "ordered", "reflinks", 7),
    server(Sabotage::NoEnd, "ordered", "devices", 7),
    server(Sabotage::ForgottenCommit, "ordered", "drops", 7),
    server(Sabotage::NoNewLog, "journal", "kills", 215),
    server(Sabotage::SharedOldData, "journal", "reflinks", 223),
    server(Sabotage::HiddenLeftOut, "ordered", "commits", 220),
    disk(Sabotage::LostPlace, "ordered", "any", 7),
    commands(Sabotage::UnflushedRebase, 8),
    commands(Sabotage::NoDirtyBit, 7),
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

    /// Runs histories until one fails, which must pass without the defect.
    fn find(&self) {
        let name = self.defect.name();
        let sound = Settings {
            kind: image::Kind::from_name(self.kind).filter(|_| self.of == Of::Disk),
            qemu_every: 0,
            server: self.of == Of::Server,
            offline: self.of == Of::Commands,
            ..Settings::new(Mode::from_name(self.mode).unwrap())
        };
        let broken = Settings { defect: Some(self.defect), ..sound };
        let (mut states, mut number) = (0, 0);
        let failure = loop {
            let seed = history_seed(self.seed, number);
            match self.run(&broken, seed) {
                Ok(totals) => states += totals.states,
                Err(failure) => break failure,
            }
            number += 1;
            assert!(states <= MOST, "{name} is not found within {states} states");
        };
        states += failure.passed + 1;
        println!("{name}: found by state {states}, history {number}: {}", failure.what);
        assert!(states <= MOST, "{name} is found only by state {states}");
        if let Err(failure) = self.run(&sound, failure.seed) {
            panic!("{name} is not what was found: {}", failure.report(&sound));
        }
    }
}

#[test]
fn defects_are_found() {
    for defect in Sabotage::ALL {
        let found = FOUND.iter().filter(|found| found.defect == *defect).count();
        let not_found = NOT_FOUND.iter().filter(|other| *other == defect).count();
        assert_eq!(found + not_found, 1, "{}", defect.name());
    }
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(found) = FOUND.get(next.fetch_add(1, Ordering::Relaxed)) {
            found.find();
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
