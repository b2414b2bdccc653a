//! Small histories with every possible crash: at each moment, with each subset of the changes that no flush covers, and
//! with each of them torn.

use crate::campaign::{Crashes, happen};
use crate::guest::Oracle;
use crate::host::Conduct;
use crate::image::{self, KINDS, Kind};
use crate::outcome::{ATOMIC, Failure, Settings, Totals, device, guarded};
use crate::plan::{self, Act, Disk, Phase, Plan};
use crate::recover::Way;
use crate::state::{Fate, Replay};
use isobath_disk::Preallocation;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::sync::Arc;

/// Variants of images and execution orders for each small history.
const VARIANTS: u64 = 3;
/// Random subsets if there are too many to try all.
const RANDOM: usize = 64;

/// The number of small histories.
pub const COUNT: u64 = {
    let (mut patterns, mut kind) = (0, 0);
    while kind < KINDS.len() {
        patterns += Disk::patterns(KINDS[kind]);
        kind += 1;
    }
    patterns as u64 * VARIANTS
};

/// The kind and the pattern of a small history.
fn subject(number: u64) -> (Kind, u32) {
    let subjects = KINDS.into_iter();
    let mut subjects =
        subjects.flat_map(|kind| (0..Disk::patterns(kind)).map(move |pattern| (kind, pattern)));
    subjects.nth((number / VARIANTS) as usize).unwrap_or((Kind::Plain, 0))
}

/// Runs one small history, numbered from 0. All subsets of up to `bits` changes are tried; if there are more, those of
/// the first `bits` changes, and random ones.
pub fn run_small(settings: &Settings, number: u64, bits: u32) -> Result<Totals, Box<Failure>> {
    let tested = guarded(number, |totals, story| small(settings, number, bits, totals, story));
    tested.map_err(|failure| Box::new(Failure { bits: Some(bits), ..*failure }))
}

fn small(
    settings: &Settings,
    number: u64,
    bits: u32,
    totals: &mut Totals,
    story: &mut Vec<String>,
) -> Result<(), String> {
    let mut rng = SmallRng::seed_from_u64(number);
    let variant = number % VARIANTS;
    let (kind, pattern) = subject(number);
    if kind.version() < settings.mode.version {
        return Ok(());
    }
    let (of, requests) = kind.parts(&mut rng);
    let start = image::make(of, true, &mut rng)?;
    let requests = plan::fitting(requests, &start);
    let text = start.describe();
    story.push(format!(
        "{kind}, an image of {of}, requests of {requests}, pattern {pattern}: {text}"
    ));
    let tasks = Disk::of(&start).pattern(pattern, 2, &mut rng);
    let then = match requests {
        Kind::Resize => Some(Act::Resize(
            start.size() / 1024 * 512 + 512 * variant * 40,
            [Preallocation::Off, Preallocation::Metadata, Preallocation::Full]
                [variant as usize % 3],
        )),
        Kind::Index => Some(if variant == 2 { Act::DropIndex } else { Act::WriteIndex }),
        _ => None,
    };
    let plan = Plan { phases: vec![Phase { tasks, beside: None, then }], close: variant == 0 };
    let conduct = Conduct {
        seed: rng.random(),
        delay: variant as u32 * 2,
        record: true,
        atomic: ATOMIC[rng.random_range(0..ATOMIC.len())],
        ..Conduct::default()
    };
    story.push(device(conduct.atomic).into());
    let happened = happen(settings, (kind, requests), start, plan, conduct, rng.random())?;
    totals.histories += 1;
    let mut replay = Replay::new(&happened.record);
    let mut crashes = Crashes::new(settings, &happened, "none", false, totals, story);
    let mut last = None;
    for tick in 1..=happened.record.end {
        replay.advance(tick);
        let moment = (replay.moment(), happened.log.events_before(tick));
        if last.replace(moment) == Some(moment) {
            continue;
        }
        let oracle = Arc::new(Oracle::of_crash(&happened.log, tick));
        for fate in fates(replay.pending(), bits, &mut rng) {
            let way = match rng.random_range(0..8) {
                0 => Way::ReadFirst,
                1 => Way::Repair,
                2 => Way::Crash(2),
                _ => Way::Open,
            };
            crashes.judge(&replay, tick, &oracle, fate, happened.atomic, way, rng.random())?;
        }
    }
    Ok(())
}

fn fates(changes: usize, bits: u32, rng: &mut SmallRng) -> Vec<Fate> {
    let mut fates = vec![Fate::ALL_LOST, Fate::ALL_KEPT];
    let some = changes.min(bits as usize);
    fates.extend((0..1_u64 << some).map(Fate::Subset));
    if some < changes {
        fates.extend((0..changes).flat_map(|change| {
            [
                Fate::First(change),
                Fate::Kept { but: Some(change) },
                Fate::Lost { but: Some(change) },
            ]
        }));
        fates.extend((0..RANDOM).map(|_| Fate::Some(rng.random_range(0.1..0.9))));
    }
    for change in 0..changes {
        for choice in 0..8 {
            let (front, before, after) = (choice & 1 == 1, choice & 2 == 2, choice & 4 == 4);
            fates.push(Fate::Torn { change, front, before, after });
        }
    }
    fates
}
