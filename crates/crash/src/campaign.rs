//! Campaigns: many random histories.

use crate::executor::run;
use crate::guest::{Before, Log, Oracle};
use crate::history::Guest;
use crate::host::{Conduct, Faults, FlushFault, SimHost};
use crate::image::{self, COMMON, KINDS, Kind, Start};
use crate::outcome::{ATOMIC, Failure, Settings, Totals, device, guarded, panicked};
use crate::plan::{self, Plan};
use crate::record::{NEVER, Record, Tick};
use crate::recover::{Case, Passed, SIZE_FOR_QEMU, Way, recover, recover_wild};
use crate::state::{Fate, Replay, random_grain};
use crate::trace;
use isobath_disk::sabotage::Sabotage;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rustc_hash::FxHashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

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
            faults.space = Some(longest + rng.random_range(0..start.size()));
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

/// A history that was run.
pub struct Happened {
    /// Its initial state.
    pub start: Start,
    /// Its kind.
    pub kind: Kind,
    /// The kind of its requests.
    pub requests: Kind,
    /// Its plan.
    pub plan: Plan,
    /// Bytes that the device writes atomically.
    pub atomic: u64,
    /// The changes and flushes of the storage.
    pub record: Record,
    /// The guest's requests and results.
    pub log: Arc<Log>,
}

/// Runs a history of a kind, with requests of a kind, and checks all data read during it.
pub fn happen(
    settings: &Settings,
    (kind, requests): (Kind, Kind),
    start: Start,
    plan: Plan,
    conduct: Conduct,
    seed: u64,
) -> Result<Happened, String> {
    let drops = conduct.faults.drops();
    let atomic = conduct.atomic;
    let host = SimHost::new(start.files.clone(), conduct);
    let before = Before::Bytes(Arc::clone(&start.content));
    let guest = Guest::new(&host, &start, settings.mode, before, 1, seed);
    let _broken = settings.defect.map(Sabotage::begin);
    let worked = run(guest.work(&plan)).and_then(|worked| worked);
    let log = Arc::new(guest.into_log());
    let record = host.record();
    // If the page cache has dropped data, reads return whatever the disk holds there.
    let until = if drops { host.struck() } else { NEVER };
    worked.and_then(|()| log.check_reads(until)).map_err(|error| {
        let mut lines = log.tell(NEVER);
        if settings.trace {
            lines.extend(record.tell());
        }
        format!("{error}\n{}\n{}", start.describe(), lines.join("\n"))
    })?;
    Ok(Happened { start, kind, requests, plan, atomic, record, log })
}

/// A moment of a crash: half of them are during a flush, when the changes that it covers have no order yet.
fn moment(record: &Record, rng: &mut SmallRng) -> Tick {
    if record.flushes.is_empty() || rng.random() {
        return rng.random_range(1..=record.end);
    }
    let flush = record.flushes[rng.random_range(0..record.flushes.len())];
    rng.random_range(flush.issued + 1..=flush.completed)
}

/// Runs one history with all its crashes.
pub fn run_history(settings: &Settings, seed: u64) -> Result<Totals, Box<Failure>> {
    guarded(seed, |totals, story| history(settings, seed, totals, story))
}

fn history(
    settings: &Settings,
    seed: u64,
    totals: &mut Totals,
    story: &mut Vec<String>,
) -> Result<(), String> {
    let mut rng = SmallRng::seed_from_u64(seed);
    let drawn = KINDS[rng.random_range(0..COMMON)];
    let favoured = settings.mode.favours.filter(|_| rng.random_range(0..3) == 0);
    let kind = settings.kind.or(Kind::instead(seed)).or(favoured).unwrap_or(drawn);
    if kind.version() < settings.mode.version {
        return Ok(());
    }
    let (of, requests) = kind.parts(&mut rng);
    let start = image::make(of, false, &mut rng)?;
    let requests = plan::fitting(requests, &start);
    story.push(format!("{kind}, an image of {of}, requests of {requests}: {}", start.describe()));
    let plan = plan::random(requests, &start, &mut rng);
    let (mut faults, mut fault) = faults(&mut rng, &start);
    if settings.faultless {
        (faults, fault) = (Faults::default(), "none");
    }
    if let Some(number) = settings.sabotage {
        faults = Faults::default();
        faults.flush = Some((number, FlushFault::Lies));
        faults.flushes_failing = 1;
        fault = "sabotage";
    }
    let lies = faults.lies() && settings.sabotage.is_none();
    story.push(format!("fault: {fault} {faults:?}"));
    let conduct = Conduct {
        seed: rng.random(),
        delay: rng.random_range(0..6),
        record: true,
        discarded: [Some(0), Some(0), None, Some(0xdd)][rng.random_range(0..4)],
        atomic: ATOMIC[rng.random_range(0..ATOMIC.len())],
        faults,
        ..Conduct::default()
    };
    story.push(device(conduct.atomic).into());
    let happened = happen(settings, (kind, requests), start, plan, conduct, rng.random())?;
    totals.histories += 1;
    trace::note(happened.record.tell());
    trace::note(happened.log.tell(NEVER));
    let record = &happened.record;
    let mut replay = Replay::new(record);
    let mut crashes = Crashes::new(settings, &happened, fault, lies, totals, story);
    let most = if of == Kind::LargeClusters { 12 } else { 60 };
    let mut ticks: Vec<Tick> =
        (0..rng.random_range(most / 3..most)).map(|_| moment(record, &mut rng)).collect();
    ticks.push(record.end);
    ticks.truncate(settings.most_moments);
    ticks.sort_unstable();
    ticks.dedup();
    for tick in ticks {
        replay.advance(tick);
        let oracle = Arc::new(Oracle::of_crash(&happened.log, tick));
        for _ in 0..=replay.pending().min(3) {
            let fate = if record.is_amid_flush(tick) {
                Fate::amid_flush(replay.pending(), &mut rng)
            } else {
                Fate::random(replay.pending(), &mut rng)
            };
            let grain = random_grain(happened.atomic, &mut rng);
            let way = Way::random(&mut rng);
            crashes.judge(&replay, tick, &oracle, fate, grain, way, rng.random())?;
        }
    }
    Ok(())
}

/// The crashes of one history.
pub struct Crashes<'a> {
    settings: &'a Settings,
    happened: &'a Happened,
    fault: &'static str,
    /// A flush lied, so nothing is guaranteed.
    lies: bool,
    seen: FxHashSet<u64>,
    totals: &'a mut Totals,
    story: &'a mut Vec<String>,
}

impl<'a> Crashes<'a> {
    /// No crashes so far.
    pub fn new(
        settings: &'a Settings,
        happened: &'a Happened,
        fault: &'static str,
        lies: bool,
        totals: &'a mut Totals,
        story: &'a mut Vec<String>,
    ) -> Self {
        Self { settings, happened, fault, lies, seen: FxHashSet::default(), totals, story }
    }

    /// Recovers and checks the state that one fate leaves after a crash at `tick`, which `replay` has reached and which
    /// `oracle` describes, unless that was already done.
    #[allow(clippy::too_many_arguments, reason = "all of it makes one state")]
    pub fn judge(
        &mut self,
        replay: &Replay<'_>,
        tick: Tick,
        oracle: &Arc<Oracle>,
        fate: Fate,
        grain: u64,
        way: Way,
        seed: u64,
    ) -> Result<(), String> {
        let mut rng = SmallRng::seed_from_u64(seed);
        let state = replay.build(&fate, grain, &mut rng);
        let events = self.happened.log.events_before(tick) as u64;
        if !self.seen.insert(state.print ^ events.wrapping_mul(0x9E37_79B9_7F4A_7C15)) {
            return Ok(());
        }
        let every = self.settings.qemu_every;
        let case = Case {
            mode: self.settings.mode,
            start: &self.happened.start,
            kind: self.happened.requests,
            atomic: self.happened.atomic,
            oracle: Arc::clone(oracle),
            alone: self.happened.start.new.data_file_raw.then(|| Arc::clone(oracle)),
            lives: 1,
            leaked: 0,
            qemu: every > 0
                && seed.is_multiple_of(every)
                && self.happened.start.size() < SIZE_FOR_QEMU,
            host: Conduct::default(),
            may_leak: false,
        };
        let mut passed = Vec::new();
        let _broken = self.settings.defect.map(Sabotage::begin);
        let judged = catch_unwind(AssertUnwindSafe(|| {
            if self.lies {
                passed.push(Passed { way: Way::Wild, qemu: false });
                return recover_wild(state.files, &case, rng.random());
            }
            recover(state.files, &case, way, rng.random(), &mut passed)
        }));
        let judged = judged.unwrap_or_else(|panic| Err(panicked(&*panic)));
        if let Err(error) = judged {
            self.tell(replay, tick, &fate, grain);
            return Err(format!("crash at {tick}, {}, {}: {error}", fate.name(), way.name()));
        }
        let count = passed.len() as u64;
        self.totals.states += count;
        self.totals.count("history", self.happened.kind.name(), count);
        self.totals.count("device", device(self.happened.atomic), count);
        self.totals.count("fate", fate.name(), count);
        self.totals.count("fault", self.fault, count);
        for passed in passed {
            self.totals.count("recovery", passed.way.name(), 1);
            self.totals.qemu += u64::from(passed.qemu);
        }
        Ok(())
    }

    /// Describes how a failure came about.
    fn tell(&mut self, replay: &Replay<'_>, tick: Tick, fate: &Fate, grain: u64) {
        self.story.push(format!("the guest's requests up to the crash at {tick}:"));
        let requests = self.happened.log.tell(tick);
        self.story.extend(requests.into_iter().map(|line| format!("  {line}")));
        if self.settings.trace {
            self.story.push("what was done to the files:".into());
            self.story.extend(self.happened.record.tell());
        }
        self.story.push(format!("{fate:?} in grains of {grain} bytes, of these changes:"));
        self.story.extend(replay.describe().into_iter().map(|line| format!("  {line}")));
    }
}
