//! A server that is killed at any moment, while its chain is changed under load, loses nothing that was
//! flushed, nor what was answered to a client that outlives it, and leaves every earlier snapshot as it was.
//!
//! There are some kills in each run of the tests; `make kills` asks for more.

mod campaign;
mod change;
mod field;
mod judge;

use crate::live::load::{Log, SECTOR, Shared, Stamps, Window, judge};
use crate::live::{DEVICE, Live};
use campaign::Campaign;
use field::Field;
use isobath_testkit::nbd::Nbd;
use isobath_testkit::qemu;
use isobath_testkit::seed::Seed;

const SIZE: usize = 16 << 20;
const SECTORS: u32 = (SIZE / SECTOR) as u32;
const NEVER: u64 = u64::MAX;
/// Kills of one chain, and in each run of the tests.
const ROUNDS: usize = 10;
const KILLS: u64 = 20;

/// What the server does when it is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doing {
    Snapshots,
    StreamIntoActive,
    StreamBelow,
    CommitActive,
    CommitBelow,
    Mirror,
    Resize,
    /// An export is added, and a client uses it.
    Export,
    /// Nothing but what clients ask for.
    Load,
    /// The server ends well; who writes the index of its chain is killed.
    Index,
}

const ALL: [Doing; 10] = [
    Doing::Snapshots,
    Doing::StreamIntoActive,
    Doing::Mirror,
    Doing::StreamBelow,
    Doing::Export,
    Doing::CommitActive,
    Doing::Resize,
    Doing::CommitBelow,
    Doing::Load,
    Doing::Index,
];

#[test]
fn what_was_promised_is_there_after_a_kill() {
    let mut campaign = Campaign::start(KILLS);
    while let Some(number) = campaign.next() {
        let seed = Seed::from(number);
        let mut field = Field::new(&seed);
        let mut kills = Vec::new();
        for round in 0..ROUNDS {
            let doing = ALL[(number as usize).wrapping_add(round) % ALL.len()];
            println!("{}", field.round(doing));
            kills.push(format!("{doing:?}"));
        }
        // A server that is not killed finishes what is left.
        field.end();
        campaign.passed(kills);
    }
}

#[test]
fn what_was_flushed_and_is_not_there_is_told() {
    let directory = tempfile::tempdir().unwrap();
    qemu::create(&directory.path().join("base"), "qcow2", SIZE as u64, "");
    let live = Live::start(directory.path(), "base", &[]);
    let (shared, mut log) = (Shared::default(), Log::default());
    let mut client = Nbd::connect(&live.nbd(), DEVICE).unwrap();
    for stamp in 1..=3 {
        log.put(&mut client, &shared.clock, stamp).unwrap();
    }
    let _ = live.stop();
    let now = Stamps::of(&qemu::read_disk(&directory.path().join("base"), "qcow2")).unwrap();
    let none = Stamps::none(SECTORS as usize);
    let logs = [log];
    // Three moments for each write: it was sent, answered, flushed.
    let window = |from, until| Window { from, until, flushed: true };
    assert_eq!(judge(&none, &logs, window(9, NEVER), &now), Ok(()));
    assert_eq!(judge(&none, &logs, window(0, NEVER), &none), Ok(()));
    assert!(judge(&none, &logs, window(3, NEVER), &none).is_err());
    assert!(judge(&none, &logs, window(3, 6), &now).is_err());
    assert_eq!(judge(&none, &logs, window(3, 7), &now), Ok(()));
}
