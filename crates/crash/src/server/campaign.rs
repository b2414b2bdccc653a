//! Campaigns of server histories.

use super::history::{Happened, happen};
use super::judge::{Crashed, Death, judge};
use super::kind::Kind;
use crate::host::Memories;
use crate::outcome::{Failure, Settings, Totals, device, guarded, panicked};
use crate::record::{Files, NEVER, Tick, file};
use crate::recover::Way;
use crate::state::{Fate, Replay, random_grain};
use crate::trace;
use isobath_disk::sabotage::Sabotage;
use isobath_qcow2::IncompatibleFeatures;
use isobath_qcow2::journal::Journal;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs one history of a server with all its crashes; of any kind if none is given.
pub fn run_server(
    settings: &Settings,
    kind: Option<Kind>,
    seed: u64,
) -> Result<Totals, Box<Failure>> {
    let tested = guarded(seed, |totals, story| history(settings, kind, seed, totals, story));
    tested.map_err(|failure| Box::new(Failure { server: kind.map(Kind::name), ..*failure }))
}

fn history(
    settings: &Settings,
    kind: Option<Kind>,
    seed: u64,
    totals: &mut Totals,
    story: &mut Vec<String>,
) -> Result<(), String> {
    let mut rng = SmallRng::seed_from_u64(seed);
    let drawn = Kind::random(&mut rng);
    let kind = kind.or(Kind::instead(seed)).unwrap_or(drawn);
    story.push(format!("a server's history, {kind}"));
    let happened = happen(settings, kind, rng.random())?;
    story.push(happened.text.clone());
    totals.histories += 1;
    note(&happened);
    let record = &happened.record;
    let mut replay = Replay::new(record);
    let few = matches!(kind, Kind::Deep | Kind::Large);
    let most = if few { 12 } else { 40 };
    let mut ticks: Vec<Tick> =
        (0..rng.random_range(most / 4..most)).map(|_| rng.random_range(1..=record.end)).collect();
    // Most of the interesting moments are during an action.
    for act in &happened.chronicle.acts {
        let last = act.ended.min(record.end - 1) + 1;
        if act.began < last {
            ticks.extend((0..4).map(|_| rng.random_range(act.began + 1..=last)));
        }
    }
    ticks.push(record.end);
    ticks.truncate(settings.most_moments);
    ticks.sort_unstable();
    ticks.dedup();
    for tick in ticks {
        replay.advance(tick);
        for _ in 0..=replay.pending().min(1) {
            let fate = Fate::random(replay.pending(), &mut rng);
            let grain = random_grain(happened.host.atomic, &mut rng);
            let files = replay.build(&fate, grain, &mut rng).files;
            let state = Crashed { files, tick, death: Death::Power };
            one(settings, &happened, &state, &replay, &fate, &mut rng, totals, story)?;
        }
    }
    if happened.survives_from == NEVER {
        return Ok(());
    }
    kills(settings, &happened, &mut rng, totals, story)
}

/// Adds what storage, guest and operator saw to the digest.
fn note(happened: &Happened) {
    trace::note(happened.record.tell());
    trace::note(happened.log.tell(Tick::MAX));
    trace::note(happened.chronicle.tell(Tick::MAX));
}

/// The states that kills leave.
fn kills(
    settings: &Settings,
    happened: &Happened,
    rng: &mut SmallRng,
    totals: &mut Totals,
    story: &mut Vec<String>,
) -> Result<(), String> {
    let mut killed = happened.killed.clone();
    killed.retain(|killed| killed.at >= happened.survives_from);
    // The last are those that the history asked for.
    killed.drain(..killed.len().saturating_sub(settings.most_moments));
    killed.sort_by_key(|killed| killed.at);
    let mut replay = Replay::new(&happened.record);
    for killed in killed {
        trace::note((killed.at, &killed.memories));
        // The operation recorded with the memory had just begun.
        let tick = killed.at + 1;
        replay.advance(tick);
        if killed.memories.any() && killed.at > 2 && rng.random_bool(0.3) {
            let earlier = rng.random_range(1..=killed.at);
            let mut before = Replay::new(&happened.record);
            before.advance(earlier);
            let files = before.build(&Fate::Killed, 512, rng).files;
            let latest = replay.build(&Fate::Killed, 512, &mut SmallRng::seed_from_u64(0)).files;
            if is_told_apart(happened, earlier, &files, &latest) {
                let death = Death::RolledBack(killed.memories.clone());
                let state = Crashed { files, tick: earlier, death };
                one(settings, happened, &state, &before, &Fate::Killed, rng, totals, story)?;
            }
        }
        for _ in 0..2 {
            let files = replay.build(&Fate::Killed, 512, rng).files;
            if has_no_journal(happened, tick, &files, &killed.memories) {
                continue;
            }
            let death = Death::Killed(killed.memories.clone());
            let state = Crashed { files, tick, death };
            one(settings, happened, &state, &replay, &Fate::Killed, rng, totals, story)?;
        }
    }
    Ok(())
}

/// Whether the journal, without which nothing survives a kill, was not in use because there may have been no room for
/// it, in the file or in its header.
fn has_no_journal(happened: &Happened, tick: Tick, files: &Files, memories: &Memories) -> bool {
    let scarce = happened.faults.space.is_some() || happened.host.fixed || !memories.any();
    let active = happened.chronicle.chain_at(tick).first();
    let journal = IncompatibleFeatures::JOURNAL;
    scarce && active.is_some_and(|active| !happened.begin.has_bit(files, active, journal))
}

/// Whether the memory of a server that was killed with the `latest` files can be distinguished from that of the
/// `earlier` ones: a record of the journal distinguishes them. Between two records nothing does (decision 0012).
fn is_told_apart(happened: &Happened, tick: Tick, earlier: &Files, latest: &Files) -> bool {
    let Some(active) = happened.chronicle.chain_at(tick).first() else { return false };
    let last = |files: &Files| {
        let content = file(files, active)?;
        let journal = *happened.begin.header(files, active)?.journal()?;
        let (at, length) = (journal.area_offset.get(), journal.area_length);
        let area = content.bytes(at..at + length);
        let last = Journal::scan(&area, &journal).ok()?.last();
        Some(match last {
            None => (journal.id, journal.first_lsn.before(), None),
            Some(last) => (journal.id, last.lsn, Some(last.previous)),
        })
    };
    match (last(earlier), last(latest)) {
        // A kill may come between a record and the memory's update for it.
        (Some((id, earlier, _)), Some((other, latest, previous))) => {
            id != other || latest != earlier && previous != Some(earlier)
        }
        _ => true,
    }
}

#[allow(clippy::too_many_arguments, reason = "all of it makes one state")]
fn one(
    settings: &Settings,
    happened: &Happened,
    state: &Crashed,
    replay: &Replay<'_>,
    fate: &Fate,
    rng: &mut SmallRng,
    totals: &mut Totals,
    story: &mut Vec<String>,
) -> Result<(), String> {
    let seed: u64 = rng.random();
    let way = match state.death {
        Death::Power => Way::random(rng),
        _ => match rng.random_range(0..20) {
            0..3 => Way::Repair,
            3..7 => Way::ReadFirst,
            _ => Way::Open,
        },
    };
    let every = settings.qemu_every;
    let qemu = every > 0 && seed.is_multiple_of(every);
    let mut passed = Vec::new();
    let _broken = settings.defect.map(Sabotage::begin);
    let judged = catch_unwind(AssertUnwindSafe(|| {
        judge(happened, settings.mode, state, way, qemu, seed, &mut passed)
    }));
    let judged = judged.unwrap_or_else(|panic| Err(panicked(&*panic)));
    let tick = state.tick;
    if let Err(error) = judged {
        story.push(format!("what became of the chain up to {tick}:"));
        story.extend(happened.chronicle.tell(tick).into_iter().map(|line| format!("  {line}")));
        story.push("the guest's requests up to then:".into());
        story.extend(happened.log.tell(tick).into_iter().map(|line| format!("  {line}")));
        if settings.trace {
            story.push("what was done to the files:".into());
            story.extend(happened.record.tell());
        }
        story.push(format!("{fate:?} of these changes:"));
        story.extend(replay.describe().into_iter().map(|line| format!("  {line}")));
        let (death, fate, way) = (state.death.name(), fate.name(), way.name());
        return Err(format!("{death} at {tick}, {fate}, {way}: {error}"));
    }
    let count = passed.len().max(1) as u64;
    totals.states += count;
    totals.count("server", happened.kind.name(), count);
    totals.count("end", state.death.name(), count);
    totals.count("device", device(happened.host.atomic), count);
    totals.count("fate", fate.name(), count);
    let amid = if happened.chronicle.is_amid(tick) { "amid a job" } else { "between jobs" };
    totals.count("moment", amid, count);
    totals.count("fault", if happened.faults.any() { "some" } else { "none" }, count);
    for passed in passed {
        totals.count("recovery", passed.way.name(), 1);
        totals.qemu += u64::from(passed.qemu);
    }
    Ok(())
}
