//! Tens of thousands of crash states, in every mode.

use isobath_crash::campaign::run_history;
use isobath_crash::exhaustive::{COUNT, run_small};
use isobath_crash::image::{COMMON, KINDS, Kind};
use isobath_crash::mode::MODES;
use isobath_crash::outcome::{Failure, Settings, Totals, history_seed};
use isobath_crash::plan::Disk;
use isobath_crash::server::campaign::run_server;
use isobath_crash::server::kind;
use isobath_testkit::seed::Seed;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

/// States of random histories, for all modes together.
const STATES: u64 = 5_000;
/// The same of a server.
const SERVER_STATES: u64 = 2_400;

/// Runs histories on two threads until there are enough states, or no more histories.
fn run(
    settings: &Settings,
    states: u64,
    history: impl Fn(u64) -> Option<Result<Totals, Box<Failure>>> + Sync,
) -> Totals {
    let next = AtomicU64::new(0);
    let totals = Mutex::new(Totals::default());
    thread::scope(|scope| {
        let work = || {
            while let Some(tested) = history(next.fetch_add(1, Ordering::Relaxed)) {
                let tested =
                    tested.unwrap_or_else(|failure| panic!("{}", failure.report(settings)));
                let mut totals = totals.lock().unwrap();
                totals.add(&tested);
                if totals.states >= states {
                    break;
                }
            }
        };
        let threads = [scope.spawn(work), scope.spawn(work)];
        for thread in threads {
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        }
    });
    totals.into_inner().unwrap()
}

#[test]
fn random_histories_survive_random_crashes() {
    let seed = Seed::new();
    for mode in MODES {
        let settings = Settings { qemu_every: 200, ..Settings::new(mode) };
        let wanted = STATES / MODES.len() as u64;
        let totals = run(&settings, wanted, |number| {
            Some(run_history(&settings, history_seed(seed.value(), number)))
        });
        println!("{}: {totals:?}", mode.name());
        assert!(totals.states >= wanted && totals.qemu > 0);
    }
}

#[test]
fn servers_survive_crashes_and_kills() {
    let seed = Seed::new();
    for mode in MODES {
        let settings = Settings { qemu_every: 500, server: true, ..Settings::new(mode) };
        let wanted = SERVER_STATES / MODES.len() as u64;
        let totals = run(&settings, wanted, |number| {
            Some(run_server(&settings, None, history_seed(seed.value(), number)))
        });
        println!("{}: {totals:?}", mode.name());
        assert!(totals.states >= wanted);
    }
}

/// Campaigns have little of these kinds.
#[test]
fn histories_of_rare_kinds_survive_random_crashes() {
    let seed = Seed::new();
    for mode in MODES {
        for kind in KINDS.into_iter().skip(COMMON) {
            let settings = Settings {
                kind: Some(kind),
                most_moments: 6,
                qemu_every: 200,
                ..Settings::new(mode)
            };
            // One of these states takes as long as many others.
            let wanted = if kind == Kind::LargeClusters { 20 } else { 150 };
            let totals = run(&settings, wanted, |number| {
                Some(run_history(&settings, history_seed(seed.value(), number)))
            });
            println!("{}, {kind}: {totals:?}", mode.name());
            assert!(totals.states >= wanted);
        }
    }
}

#[test]
fn servers_with_data_files_survive_crashes_and_kills() {
    let seed = Seed::new();
    for mode in MODES {
        let settings =
            Settings { most_moments: 6, qemu_every: 200, server: true, ..Settings::new(mode) };
        let totals = run(&settings, 150, |number| {
            let seed = history_seed(seed.value(), number);
            Some(run_server(&settings, Some(kind::Kind::DataFiles), seed))
        });
        println!("{}: {totals:?}", mode.name());
        assert!(totals.states >= 150);
    }
}

/// Those of the kind about embedded mappings: a share of their numbers.
#[test]
fn small_histories_of_mappings_in_data_survive_every_crash() {
    let modes = MODES.iter().filter(|mode| mode.favours == Some(Kind::Embedded));
    for mode in modes {
        let settings = Settings { qemu_every: 1000, ..Settings::new(mode) };
        let before = KINDS.into_iter().take_while(|kind| *kind != Kind::Embedded);
        let first = 3 * before.map(Disk::patterns).map(u64::from).sum::<u64>();
        let end = first + 3 * u64::from(Disk::patterns(Kind::Embedded));
        let totals = run(&settings, u64::MAX, |number| {
            let number = first + number * 7;
            (number < end).then(|| run_small(&settings, number, 3))
        });
        println!("{}: {totals:?}", mode.name());
        assert_eq!(totals.sorts.get(&("history", "embedded")), Some(&totals.states));
        assert!(totals.histories > 0);
    }
}

#[test]
fn small_histories_survive_every_crash() {
    for (shift, mode) in MODES.iter().enumerate() {
        let settings = Settings { qemu_every: 1000, ..Settings::new(mode) };
        // Only a share, since all of them take minutes.
        let step = 22 * MODES.len() as u64;
        let totals = run(&settings, u64::MAX, |number| {
            let number = number * step + shift as u64;
            (number < COUNT).then(|| run_small(&settings, number, 4))
        });
        println!("{}: {totals:?}", mode.name());
        // Modes with a journal skip version 2.
        assert!(totals.states > 0 && totals.histories > COUNT / step / 2);
    }
}
