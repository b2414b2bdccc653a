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

/// The defects that are found, with a test for each.
macro_rules! found {
    ($($name:ident: $of:ident($defect:ident, $($where:expr),+);)+) => {
        const FOUND: &[Found] = &[$($of(Sabotage::$defect, $($where),+)),+];

        mod found {
            use super::{Sabotage, search};

            $(
                #[test]
                fn $name() {
                    search(Sabotage::$defect);
                }
            )+
        }
    };
}

found! {
    unflushed_record: disk(UnflushedRecord, "journal", "any", 4, 31);
    no_first_sync: disk(NoFirstSync, "ordered", "any", 4, 10);
    no_second_sync: disk(NoSecondSync, "ordered", "any", 4, 17);
    unmarked_bitmaps: server(UnmarkedBitmaps, "ordered", "bitmaps", 1, 7);
    unnoted_writes: server(UnnotedWrites, "ordered", "bitmaps", 4, 42);
    early_unmark: server(EarlyUnmark, "ordered", "bitmaps", 4, 855);
    early_release: disk(EarlyRelease, "ordered", "any", 4, 35);
    unchecked_covers: disk(UncheckedCovers, "journal", "any", 16, 198);
    unguarded: disk(Unguarded, "journal", "any", 4, 254);
    early_checkpoint: disk(EarlyCheckpoint, "journal", "flushes", 16, 985);
    stale_map: disk(StaleMap, "ordered", "any", 1, 1);
    stale_slice: disk(StaleSlice, "ordered", "resize", 1, 1336);
    early_reuse: disk(EarlyReuse, "ordered", "any", 4, 65);
    open_gate: server(OpenGate, "ordered", "snapshots", 1, 161);
    old_numbers: server(OldNumbers, "ordered", "streams", 1, 14);
    unflushed_stream: server(UnflushedStream, "ordered", "streams", 4, 121);
    uncopied_rest: server(UncopiedRest, "ordered", "pivots", 1, 138);
    uncleared_growth: disk(UnclearedGrowth, "ordered", "resize", 1, 173);
    no_copy_on_write: disk(NoCopyOnWrite, "ordered", "any", 4, 46);
    no_range_locks: disk(NoRangeLocks, "ordered", "any", 4, 183);
    lost_record: disk(LostRecord, "journal", "any", 4, 28);
    shared_opening: server(SharedOpening, "ordered", "twins", 4, 90);
    ignored_log: server(IgnoredLog, "journal", "kills", 16, 106);
    unseen_log: server(UnseenLog, "journal", "kills", 8, 69);
    ignored_damage: server(IgnoredDamage, "journal", "kills", 8, 129);
    late_restart_log: server(LateRestartLog, "journal", "kills", 4, 789);
    no_revoke: server(NoRevoke, "journal", "kills", 8, 750);
    foreign_log: server(ForeignLog, "journal", "kills", 8, 347);
    unmarked_clone: server(UnmarkedClone, "ordered", "reflinks", 4, 428);
    no_end: server(NoEnd, "ordered", "devices", 1, 76);
    forgotten_commit: server(ForgottenCommit, "ordered", "drops", 4, 27);
    no_new_log: server(NoNewLog, "journal", "kills", 4, 389);
    shared_old_data: server(SharedOldData, "journal", "reflinks", 4, 497);
    hidden_left_out: server(HiddenLeftOut, "ordered", "commits", 1, 445);
    newer_leads: disk(NewerLeads, "embedded", "embedded", 1, 867);
    lost_place: disk(LostPlace, "ordered", "any", 1, 2);
    long_run: disk(LongRun, "ordered", "any", 1, 2);
    lost_entry: disk(LostEntry, "ordered", "any", 1, 1);
    unflushed_rebase: commands(UnflushedRebase, "chain", 225);
    no_dirty_bit: commands(NoDirtyBit, "any", 113);
}

/// Defects that are found by kinds of which campaigns have little, too: what these kinds add can fail.
macro_rules! rare {
    ($($name:ident: $of:ident($defect:ident, $($where:expr),+);)+) => {
        const RARE: &[Found] = &[$($of(Sabotage::$defect, $($where),+)),+];

        mod rare_kinds {
            use super::{Sabotage, disk, server};

            $(
                #[test]
                fn $name() {
                    $of(Sabotage::$defect, $($where),+).search();
                }
            )+
        }
    };
}

rare! {
    raw_data_file_no_first_sync: disk(NoFirstSync, "ordered", "raw-data-file", 4, 31);
    raw_data_file_lost_record: disk(LostRecord, "journal", "raw-data-file", 4, 133);
    large_clusters_no_first_sync: disk(NoFirstSync, "ordered", "large-clusters", 4, 12);
    large_clusters_lost_record: disk(LostRecord, "journal", "large-clusters", 4, 24);
    combined_early_release: disk(EarlyRelease, "ordered", "combined", 4, 24);
    data_files_no_first_sync: server(NoFirstSync, "ordered", "data-files", 4, 42);
    data_files_ignored_damage: server(IgnoredDamage, "journal", "data-files", 4, 238);
}

/// Not found so far within a test's time limit: `docs/reliability.md` gives the reason for each. The last one panics,
/// which ends the simulation too; `stopped.rs` of the library's tests has it.
const NOT_FOUND: &[Sabotage] = &[
    Sabotage::EarlyErase,
    Sabotage::EarlyUnclaim,
    Sabotage::LateLog,
    Sabotage::DrainsAtOnce,
    Sabotage::ListedAtOnce,
    Sabotage::ZonePreparedLate,
    Sabotage::ForeignUnit,
];

/// Those of commands, which the tests of the program and of the library find: `it_can_fail.rs` there, and
/// `snapshots_stay.rs` here.
const BY_TESTS_OF_COMMANDS: &[Sabotage] = &[
    Sabotage::TrustedDetection,
    Sabotage::ChangedSnapshots,
    Sabotage::KeptTaken,
    Sabotage::AbsoluteNames,
    Sabotage::PlainNames,
    Sabotage::UnlockedDeletion,
    Sabotage::TrustedNote,
    Sabotage::EmptiedLater,
    Sabotage::UnseenLoop,
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

    /// Finds the defect. With `ISOBATH_DEFECT_ROUNDS`, as often with as many seeds, and prints how many states that
    /// takes.
    fn search(&self) {
        match env::var("ISOBATH_DEFECT_ROUNDS") {
            Ok(rounds) => self.measure(rounds.parse().unwrap()),
            Err(_) => self.found(Seed::new().value()),
        }
    }
}

fn search(defect: Sabotage) {
    FOUND.iter().find(|found| found.defect == defect).unwrap().search();
}

#[test]
fn every_rare_kind_finds_a_defect() {
    let disks = image::KINDS.into_iter().skip(image::COMMON).map(|kind| (Of::Disk, kind.name()));
    let servers = kind::KINDS.into_iter().skip(kind::COMMON);
    let servers = servers.map(|kind| (Of::Server, kind.name()));
    for (of, name) in disks.chain(servers) {
        assert!(RARE.iter().any(|found| found.of == of && found.kind == name), "{name}");
    }
}

#[test]
fn every_defect_is_listed_once() {
    for defect in Sabotage::ALL {
        let found = FOUND.iter().filter(|found| found.defect == *defect).count();
        let others = NOT_FOUND.iter().chain(BY_TESTS_OF_COMMANDS);
        let not_found = others.filter(|other| *other == defect).count();
        assert_eq!(found + not_found, 1, "{}", defect.name());
    }
}
