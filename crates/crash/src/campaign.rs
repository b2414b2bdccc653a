//! Histories by the thousand.

use crate::executor::run;
use crate::guest::{Before, Log, Oracle};
use crate::history::Guest;
use crate::host::{Conduct, Faults, FlushFault, SimHost};
use crate::image::{self, KINDS, Kind, Start};
use crate::mode::Mode;
use crate::plan::{self, Plan};
use crate::record::{NEVER, Record, Tick};
use crate::recover::{Case, Passed, Way, recover, recover_wild};
use crate::state::{Fate, Replay};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rustc_hash::FxHashSet;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// One state of so many is judged by QEMU too.
const QEMU_EVERY: u64 = 1000;

/// What passed, counted by its sort.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    /// Histories.
    pub histories: u64,
    /// States of crashes that were recovered and judged.
    pub states: u64,
    /// Of those, how many QEMU has judged too.
    pub qemu: u64,
    /// States by what their history was about, by their fate, by their recovery, by faults.
    pub sorts: BTreeMap<(&'static str, &'static str), u64>,
}

impl Totals {
    fn count(&mut self, sort: &'static str, name: &'static str, states: u64) {
        *self.sorts.entry((sort, name)).or_default() += states;
    }

    /// Adds others.
    pub fn add(&mut self, other: &Self) {
        self.histories += other.histories;
        self.states += other.states;
        self.qemu += other.qemu;
        for ((sort, name), states) in &other.sorts {
            self.count(sort, name, *states);
        }
    }

    /// As a table of text.
    pub fn table(&self) -> String {
        let mut text = String::new();
        let mut last = "";
        for ((sort, name), states) in &self.sorts {
            if *sort != last {
                let _ = writeln!(text, "{sort}:");
                last = sort;
            }
            let _ = writeln!(text, "  {states:>10}  {name}");
        }
        text
    }
}

/// What is wrong, and with which history.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The history's seed.
    pub seed: u64,
    /// What was found.
    pub what: String,
    /// How it came to that.
    pub story: Vec<String>,
}

/// The choices of a campaign.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// How metadata is kept.
    pub mode: &'static Mode,
    /// Only histories of this kind.
    pub kind: Option<Kind>,
    /// Flushes from this one on do nothing, silently: the simulator must notice.
    pub sabotage: Option<u64>,
    /// Faults are left out.
    pub faultless: bool,
    /// One state of so many is judged by QEMU; 0 for none.
    pub qemu_every: u64,
}

impl Settings {
    /// All kinds of histories, with faults.
    pub const fn new(mode: &'static Mode) -> Self {
        Self { mode, kind: None, sabotage: None, faultless: false, qemu_every: QEMU_EVERY }
    }
}

/// The seed of a campaign's history.
pub fn history_seed(campaign: u64, number: u64) -> u64 {
    SmallRng::seed_from_u64(campaign ^ number.wrapping_mul(0x9E37_79B9_7F4A_7C15)).random()
}

/// A fault, or none.
fn faults(rng: &mut SmallRng, start: &Start) -> (Faults, &'static str) {
    let mut faults = Faults::default();
    let name = match rng.random_range(0..40) {
        0 | 1 => {
            faults.write = Some(rng.random_range(0..60));
            "a write fails"
        }
        2 => {
            faults.read = Some(rng.random_range(0..60));
            "a read fails"
        }
        3 | 4 => {
            let fault = if rng.random() { FlushFault::Forgets } else { FlushFault::Drops };
            faults.flush = Some((rng.random_range(0..20), fault));
            faults.flushes_failing = rng.random_range(1..3);
            "a flush fails"
        }
        5 => {
            let longest = start.files.iter().map(|(_, bytes)| bytes.len()).max().unwrap_or(0);
            faults.space = Some(longest as u64 + rng.random_range(0..start.size()));
            "no space is left"
        }
        6 => {
            faults.flush = Some((rng.random_range(0..20), FlushFault::Lies));
            faults.flushes_failing = rng.random_range(1..6);
            "a flush lies"
        }
        _ => "none",
    };
    (faults, name)
}

/// A history that has happened.
pub struct Happened {
    /// What it began from.
    pub start: Start,
    /// What it was about.
    pub kind: Kind,
    /// What was to be done.
    pub plan: Plan,
    /// What the storage saw.
    pub record: Record,
    /// What the guest saw.
    pub log: Arc<Log>,
}

/// Lets a history happen, and checks what was read while it did.
pub fn happen(
    settings: &Settings,
    kind: Kind,
    start: Start,
    plan: Plan,
    conduct: Conduct,
    seed: u64,
) -> Result<Happened, String> {
    let drops = matches!(conduct.faults.flush, Some((_, FlushFault::Drops)));
    let host = SimHost::new(start.files.clone(), conduct);
    let before = Before::Bytes(Arc::clone(&start.content));
    let guest = Guest::new(&host, &start, settings.mode, before, 1, seed);
    let worked = run(guest.work(&plan)).and_then(|worked| worked);
    let log = Arc::new(guest.into_log());
    let record = host.record();
    // Where the page cache has dropped data, reads show whatever the disk holds there.
    let until = if drops { host.struck() } else { NEVER };
    worked.and_then(|()| log.check_reads(until)).map_err(|error| {
        let requests = log.tell(NEVER);
        format!("{error}\n{}\n{}", start.describe(), requests.join("\n"))
    })?;
    Ok(Happened { start, kind, plan, record, log })
}

/// Runs one history with all its crashes.
pub fn run_history(settings: &Settings, seed: u64) -> Result<Totals, Box<Failure>> {
    let mut totals = Totals::default();
    let mut story = Vec::new();
    let ran = catch_unwind(AssertUnwindSafe(|| history(settings, seed, &mut totals, &mut story)));
    let what = match ran {
        Ok(Ok(())) => return Ok(totals),
        Ok(Err(what)) => what,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            format!("the engine panicked: {}", text.unwrap_or("(no message)"))
        }
    };
    Err(Box::new(Failure { seed, what, story }))
}

fn history(
    settings: &Settings,
    seed: u64,
    totals: &mut Totals,
    story: &mut Vec<String>,
) -> Result<(), String> {
    let mut rng = SmallRng::seed_from_u64(seed);
    let drawn = KINDS[rng.random_range(0..KINDS.len())];
    let kind = settings.kind.unwrap_or(drawn);
    let start = image::make(kind, &mut rng)?;
    story.push(format!("{kind}: {}", start.describe()));
    let plan = plan::random(kind, &start, &mut rng);
    let (mut faults, mut fault) = faults(&mut rng, &start);
    if settings.faultless {
        (faults, fault) = (Faults::default(), "none");
    }
    if let Some(number) = settings.sabotage {
        faults = Faults::default();
        faults.flush = Some((number, FlushFault::Lies));
        faults.flushes_failing = u64::MAX;
        fault = "sabotage";
    }
    let lies = faults.lies() && settings.sabotage.is_none();
    story.push(format!("fault: {fault} {faults:?}"));
    let conduct = Conduct {
        seed: rng.random(),
        delay: rng.random_range(0..6),
        record: true,
        discarded: [Some(0), Some(0), None, Some(0xdd)][rng.random_range(0..4)],
        faults,
    };
    let happened = happen(settings, kind, start, plan, conduct, rng.random())?;
    totals.histories += 1;
    let record = &happened.record;
    let mut replay = Replay::new(record);
    let mut seen = FxHashSet::default();
    let mut ticks: Vec<Tick> =
        (0..rng.random_range(20..60)).map(|_| rng.random_range(1..=record.end)).collect();
    ticks.push(record.end);
    ticks.sort_unstable();
    ticks.dedup();
    for tick in ticks {
        replay.advance(tick);
        let events = happened.log.events_before(tick) as u64;
        let oracle = Arc::new(Oracle::of_crash(&happened.log, tick));
        let fates = 1 + replay.pending().min(3);
        for _ in 0..fates {
            let fate = Fate::random(replay.pending(), &mut rng);
            let grain = if rng.random() { 512 } else { 4096 };
            let state_seed: u64 = rng.random();
            let mut state_rng = SmallRng::seed_from_u64(state_seed);
            let state = replay.build(&fate, grain, &mut state_rng);
            if !seen.insert(state.print ^ events.wrapping_mul(0x9E37_79B9_7F4A_7C15)) {
                continue;
            }
            let number = totals.states;
            let case = Case {
                mode: settings.mode,
                start: &happened.start,
                kind,
                oracle: Arc::clone(&oracle),
                lives: 1,
                qemu: settings.qemu_every > 0
                    && (seed ^ number).is_multiple_of(settings.qemu_every),
            };
            let mut passed = Vec::new();
            let way = Way::random(&mut state_rng);
            let judged = catch_unwind(AssertUnwindSafe(|| {
                if lies {
                    passed.push(Passed { way: Way::Repair, qemu: false });
                    return recover_wild(state.files, &case, state_rng.random());
                }
                recover(state.files, &case, way, state_rng.random(), &mut passed)
            }));
            let judged = judged.unwrap_or_else(|panic| {
                let text = panic.downcast_ref::<String>().map(String::as_str);
                let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
                Err(format!("the engine panicked: {}", text.unwrap_or("(no message)")))
            });
            if let Err(error) = judged {
                tell(story, &happened, &replay, tick, &fate, grain);
                return Err(format!("crash at {tick}, {}, {way:?}: {error}", fate.name()));
            }
            let count = passed.len() as u64;
            totals.states += count;
            totals.count("history", kind.name(), count);
            totals.count("fate", fate.name(), count);
            totals.count("fault", fault, count);
            for passed in passed {
                totals.count("recovery", passed.way.name(), 1);
                totals.qemu += u64::from(passed.qemu);
            }
        }
    }
    Ok(())
}

/// Tells how it came to a failure.
pub fn tell(
    story: &mut Vec<String>,
    happened: &Happened,
    replay: &Replay<'_>,
    tick: Tick,
    fate: &Fate,
    grain: u64,
) {
    story.push(format!("the guest's requests up to the crash at {tick}:"));
    let requests = happened.log.tell(tick);
    story.extend(requests.into_iter().map(|line| format!("  {line}")));
    story.push(format!("{fate:?} in grains of {grain} bytes, of these changes:"));
    story.extend(replay.describe().into_iter().map(|line| format!("  {line}")));
}
