//! A seed gives the same history and the same recoveries each time, to the byte and to the step of a task: whatever the
//! clock says, whichever thread runs it, however often its hash tables are seeded anew.

use crate::clock;
use isobath_crash::campaign::run_history;
use isobath_crash::exhaustive::run_small;
use isobath_crash::image;
use isobath_crash::mode::MODES;
use isobath_crash::offline::run_offline;
use isobath_crash::outcome::{Failure, Settings, Totals, history_seed};
use isobath_crash::server::campaign::run_server;
use isobath_crash::server::kind;
use rustc_hash::FxHasher;
use std::hash::{Hash, Hasher};
use std::thread;
use std::time::Duration;

/// How much the clock advances at each reading: histories read none, so two are enough.
const JUMPS: [Duration; 2] = [Duration::ZERO, Duration::from_millis(1)];

/// Runs `history` on a thread of its own, under a clock that advances by `jump` at each reading. Returns all that it
/// counted, with the digest, and how often it has read the clock.
fn run(
    settings: &Settings,
    jump: Duration,
    history: impl FnOnce(&Settings) -> Result<Totals, Box<Failure>> + Send,
) -> (Totals, u64) {
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            clock::jump(jump);
            let totals =
                history(settings).unwrap_or_else(|failure| panic!("{}", failure.report(settings)));
            (totals, clock::readings())
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Runs it under each clock. Adds its digest to the others'.
fn repeat(
    what: &str,
    settings: &Settings,
    digests: &mut FxHasher,
    history: impl Fn(&Settings) -> Result<Totals, Box<Failure>> + Send + Sync,
) {
    let settings = Settings { qemu_every: 0, most_moments: 3, ..*settings };
    let runs = JUMPS.map(|jump| run(&settings, jump, &history));
    for ((totals, readings), jump) in runs.iter().zip(JUMPS) {
        assert_eq!(*readings, 0, "{what} in mode {}: it reads the clock", settings.mode.name());
        assert_eq!(
            totals,
            &runs[0].0,
            "{what} in mode {}, +{jump:?} a reading",
            settings.mode.name()
        );
    }
    (runs[0].0.states, runs[0].0.digest).hash(digests);
}

fn print(what: &str, digests: &FxHasher) {
    println!("{what}: {:016x}", digests.finish());
}

#[test]
fn a_disks_history_can_be_repeated() {
    let mut digests = FxHasher::default();
    for mode in MODES {
        for (number, kind) in image::KINDS.into_iter().enumerate() {
            let settings = Settings { kind: Some(kind), ..Settings::new(mode) };
            let seed = history_seed(3, number as u64);
            repeat(kind.name(), &settings, &mut digests, |settings| run_history(settings, seed));
        }
        let settings = Settings::new(mode);
        repeat("small", &settings, &mut digests, |settings| run_small(settings, 1000, 3));
    }
    print("disks", &digests);
}

fn repeat_servers(mode: usize) {
    let mut digests = FxHasher::default();
    let mode = &MODES[mode];
    for (number, kind) in kind::KINDS.into_iter().enumerate() {
        let settings = Settings { server: true, ..Settings::new(mode) };
        let seed = history_seed(11, number as u64);
        repeat(kind.name(), &settings, &mut digests, |settings| {
            run_server(settings, Some(kind), seed)
        });
    }
    print(&format!("servers, {}", mode.name()), &digests);
}

/// A test for each mode, so that they run side by side.
macro_rules! servers {
    ($($name:ident: $mode:literal,)*) => {
        mod a_servers_history_can_be_repeated {
            $(#[test]
            fn $name() {
                assert_eq!(super::MODES[$mode].name(), stringify!($name));
                super::repeat_servers($mode);
            })*

            #[test]
            fn in_every_mode() {
                assert!([$($mode),*].into_iter().eq(0..super::MODES.len()));
            }
        }
    };
}

servers! {
    ordered: 0,
    journal: 1,
    auto: 2,
    embedded: 3,
}

#[test]
fn a_history_of_commands_can_be_repeated() {
    let mut digests = FxHasher::default();
    // Commands have no mode.
    let settings = Settings { offline: true, ..Settings::new(&MODES[0]) };
    for number in 0..8 {
        let seed = history_seed(5, number);
        repeat("commands", &settings, &mut digests, |settings| run_offline(settings, seed));
    }
    print("commands", &digests);
}
