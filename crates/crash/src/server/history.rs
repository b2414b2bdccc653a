//! One history of a server.

use super::chain::{self, Begin};
use super::chronicle::{Chronicle, Frozen, FrozenContent};
use super::faults;
use super::kind::Kind;
use super::operator::{NEW_IMAGES, Operator, names, new_image};
use super::schedule::{Patience, Schedule, endure};
use crate::clock::SimClock;
use crate::content::Content;
use crate::guest::{Before, Log};
use crate::history::Guest;
use crate::host::{Conduct, Faults, FlushFault, Killed, SimHost};
use crate::image;
use crate::outcome::{ATOMIC, Settings};
use crate::plan::{Disk as Shape, Request};
use crate::record::{NEVER, Record, Tick};
use isobath_disk::sabotage::Sabotage;
use isobath_disk::{Disk, LiveDisk, MetadataMode};
use isobath_storage_test::any::AnyHost;
use rand::rngs::SmallRng;
use rand::{Rng, RngExt, SeedableRng};
use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::Duration;

/// A history that was run.
pub struct Happened {
    /// Its kind.
    pub kind: Kind,
    /// Its initial state.
    pub begin: Begin,
    /// The properties of the host that stay.
    pub host: Conduct,
    /// The changes and flushes of the storage.
    pub record: Record,
    /// The guest's requests and results.
    pub log: Arc<Log>,
    /// The history of the chain.
    pub chronicle: Chronicle,
    /// The states that kills would have left.
    pub killed: Vec<Killed>,
    /// The moment from which completed writes survive a kill.
    pub survives_from: Tick,
    /// The faults.
    pub faults: Faults,
    /// A flush lies, so that nothing is guaranteed.
    pub lies: bool,
    /// A short description.
    pub text: String,
}

/// The most requests of a task that continues until others have ended.
const LONG: u32 = 60;

fn conduct(kind: Kind, begin: &Begin, settings: &Settings, rng: &mut SmallRng) -> Conduct {
    let mut faults = faults::random(kind, &begin.start.files, rng);
    if settings.faultless {
        faults = Faults::default();
    }
    if let Some(number) = settings.sabotage {
        faults = Faults::default();
        faults.flush = Some((number, FlushFault::Lies));
        faults.flushes_failing = 1;
    }
    let clones = kind == Kind::Reflinks || rng.random_bool(0.15);
    Conduct {
        seed: rng.random(),
        delay: rng.random_range(0..8),
        record: true,
        discarded: [Some(0), Some(0), None, Some(0xdd)][rng.random_range(0..4)],
        atomic: ATOMIC[rng.random_range(0..ATOMIC.len())],
        faults,
        clock: Some(SimClock::default()),
        fixed: begin.fixed,
        clones: clones.then_some([512, 4096][rng.random_range(0..2)]),
        ..Conduct::default()
    }
}

/// The requests of one task of a guest, until `ends` says to stop.
async fn requests(
    guest: &Guest<'_>,
    live: &LiveDisk<AnyHost>,
    clock: &SimClock,
    shape: Shape,
    often: f64,
    ends: Option<&Cell<bool>>,
    mut rng: SmallRng,
) -> Result<(), String> {
    let pause = [30, 100, 400][rng.random_range(0..3)];
    let most = if ends.is_some() { LONG } else { rng.random_range(4..24) };
    for _ in 0..most {
        if ends.is_some_and(Cell::get) {
            break;
        }
        clock.sleep(Duration::from_micros(rng.random_range(0..pause))).await;
        let mut request = shape.request(image::Kind::Plain, &mut rng);
        if let Request::Compressed(offset, length) = request {
            request = Request::Read(offset, length);
        }
        let given_up = rng.random_bool(often);
        let patience =
            if given_up { Patience::Polls(rng.random_range(1..8)) } else { Patience::Endless };
        match endure(patience, guest.request(live, request)).await {
            Some(done) => done?,
            None => guest.excuse(),
        }
    }
    Ok(())
}

/// Runs a history, and checks all data read during it.
///
/// # Errors
/// The failure, and the events that led to it.
pub fn happen(settings: &Settings, kind: Kind, seed: u64) -> Result<Happened, String> {
    let mut rng = SmallRng::seed_from_u64(seed);
    let begin = chain::make(kind, settings.mode, &mut rng)?;
    let mut conduct = conduct(kind, &begin, settings, &mut rng);
    let ordered = settings.mode.metadata == MetadataMode::Ordered;
    let mut options = settings.mode.options(true, rng.random());
    if kind == Kind::Kills || kind == Kind::DataFiles && rng.random() {
        options.restart_log = !ordered;
    }
    let survives = options.restart_log && !ordered && begin.start.new.version > 2;
    let kills = if kind == Kind::Kills { 12 } else { 4 };
    conduct.kills = if survives { kills } else { 0 };
    // It may be requested only when a frontend is opened.
    options.restart_log = survives && rng.random_bool(if kind == Kind::Kills { 0.5 } else { 0.7 });
    let survives_from = Cell::new(if options.restart_log { 0 } else { NEVER });
    let late = (survives && !options.restart_log).then_some(&survives_from);
    let clock = conduct.clock.clone().unwrap_or_default();
    let host = SimHost::new(begin.start.files.clone(), conduct.clone());
    let mut unused = Content::default();
    if begin.fixed {
        let longest = begin.start.files.iter().map(|(_, file)| file.len()).max();
        chain::to_device(&mut unused, longest.unwrap_or(0));
    }
    let new_images = (0..NEW_IMAGES).map(new_image);
    host.reserve(new_images.clone(), &Arc::new(unused));
    if kind == Kind::DataFiles {
        host.reserve(new_images.map(|image| chain::data_file(&image)), &Arc::default());
    }
    let before = Before::Bytes(Arc::clone(&begin.start.content));
    let guest = Guest::new(&host, &begin.start, settings.mode, before, 1, rng.random());
    let guest = guest.of_changing_chain();
    let chronicle = RefCell::new(first_chronicle(&begin));
    let broken = settings.defect.map(Sabotage::begin);
    let worked = work(kind, &begin, &options, &guest, &host, &clock, &chronicle, late, &mut rng);
    drop(broken);
    let chronicle = chronicle.into_inner();
    let log = Arc::new(guest.into_log());
    let record = host.record();
    let text = format!("{kind}: {}; {:?}", begin.text, conduct.faults);
    worked.and_then(|()| log.check_reads(NEVER)).map_err(|error| {
        let mut lines = log.tell(NEVER);
        if settings.trace {
            lines.extend(record.tell());
        }
        let chain = chronicle.tell(NEVER).join("\n    ");
        format!("{error}\n{text}\n    {chain}\n{}", lines.join("\n"))
    })?;
    let quiet = Conduct {
        fixed: conduct.fixed,
        clones: conduct.clones,
        atomic: conduct.atomic,
        ..Conduct::default()
    };
    Ok(Happened {
        kind,
        begin,
        host: quiet,
        record,
        log,
        chronicle,
        killed: host.killed(),
        survives_from: survives_from.get(),
        lies: conduct.faults.lies() && settings.sabotage.is_none(),
        faults: conduct.faults,
        text,
    })
}

fn first_chronicle(begin: &Begin) -> Chronicle {
    let chain: Vec<_> = begin.images.iter().rev().map(|image| image.name.clone()).collect();
    let below = begin.images.len().saturating_sub(1);
    let frozen = begin.images.iter().take(below).map(|image| Frozen {
        name: image.name.clone(),
        needs: image.needs.clone(),
        held: FrozenContent::Bytes(Arc::clone(&image.content)),
        until: NEVER,
    });
    Chronicle::new(chain, frozen.collect())
}

#[allow(clippy::too_many_arguments, reason = "all of it is one history")]
fn work(
    kind: Kind,
    begin: &Begin,
    options: &isobath_disk::OpenOptions,
    guest: &Guest<'_>,
    host: &SimHost,
    clock: &SimClock,
    chronicle: &RefCell<Chronicle>,
    survives_late: Option<&Cell<Tick>>,
    rng: &mut SmallRng,
) -> Result<(), String> {
    let live: RefCell<Option<Arc<LiveDisk<AnyHost>>>> = RefCell::new(None);
    // The disk is opened first, while time passes.
    let mut opening = Schedule::new(clock.clone(), rng.random());
    opening.add(async {
        let opening = Disk::open(host.any(), &begin.start.image, options);
        if let Some(opened) = endure(Patience::Endless, opening).await
            && let Some(disk) = guest.judge("opening the disk", opened)?
        {
            let clock = Arc::new(clock.clone());
            *live.borrow_mut() = Some(LiveDisk::new(disk, options, clock));
        }
        Ok(())
    });
    opening.run(|| ())?;
    let Some(live) = live.into_inner() else { return Ok(()) };
    let shape =
        Shape { size: begin.busy, cluster: begin.start.new.cluster_size, compresses: false };
    let drops = kind == Kind::Drops || rng.random_bool(0.05);
    let often = if drops { 0.15 } else { 0.0 };
    let operator = Operator {
        live: &live,
        host,
        guest,
        chronicle,
        clock,
        options,
        begin,
        kind,
        made: Cell::new(0),
        impatient: drops,
    };
    let mut tasks = Schedule::new(clock.clone(), rng.random());
    for _ in 0..rng.random_range(1..=3) {
        let rng = SmallRng::seed_from_u64(rng.next_u64());
        tasks.add(requests(guest, &live, clock, shape, often, None, rng));
    }
    let ended = Cell::new(false);
    if rng.random() {
        // Also after the last change of the chain.
        let rng = SmallRng::seed_from_u64(rng.next_u64());
        tasks.add(requests(guest, &live, clock, shape, often, Some(&ended), rng));
    }
    let deeds = if kind == Kind::Deep { 2 } else { rng.random_range(1..=5) };
    let mut own = SmallRng::seed_from_u64(rng.next_u64());
    let rest = Duration::from_micros(rng.random_range(0..1500));
    tasks.add(async {
        let done = operator.work(deeds, &mut own).await;
        clock.sleep(rest).await;
        ended.set(true);
        done
    });
    let moment = Duration::from_micros(rng.random_range(0..1500));
    if let Some(since) = survives_late {
        tasks.add(async {
            clock.sleep(moment).await;
            if let Some(done) = endure(Patience::Endless, live.begin_restart_log()).await
                && guest.judge("making what is answered outlive a kill", done)?.is_some()
            {
                since.set(host.keep_killed());
            }
            Ok(())
        });
    }
    // A program that embeds the engine may omit it.
    let upkeep = rng.random_bool(0.5);
    tasks.add_background(async {
        if !upkeep {
            return Ok(());
        }
        let done = endure(Patience::Endless, live.upkeep()).await;
        match done {
            Some(Err(error)) if !guest.excuses(&error) => Err(format!("upkeep failed: {error}")),
            _ => Ok(()),
        }
    });
    let look = || {
        let chain = names(&live);
        let mut chronicle = chronicle.borrow_mut();
        if chronicle.chains.last().is_none_or(|(_, last)| *last != chain) {
            let now = host.tick();
            chronicle.chains.push((now, chain));
        }
    };
    tasks.run(look)?;
    if rng.random_bool(0.5) {
        let mut closing = Schedule::new(clock.clone(), rng.random());
        closing.add(async {
            match endure(Patience::Endless, guest.close(&*live)).await {
                Some(closed) => closed,
                None => Ok(()),
            }
        });
        closing.run(|| ())?;
    }
    Ok(())
}
