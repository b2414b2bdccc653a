//! `isobath-crash`: runs the crash simulator.

use clap::Parser;
use isobath_crash::campaign::run_history;
use isobath_crash::exhaustive::{COUNT, run_small};
use isobath_crash::image::Kind;
use isobath_crash::mode::{MODES, Mode};
use isobath_crash::offline::run_offline;
use isobath_crash::outcome::{Failure, Settings, Totals, history_seed};
use isobath_crash::progress::Progress;
use isobath_crash::server;
use isobath_crash::server::campaign::run_server;
use isobath_disk::sabotage::Sabotage;
use isobath_testkit::evidence::{Evidence, Run};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use std::{fs, io};

/// A history that takes longer may never end: a task that never waits is not noticed in it.
const LONG: Duration = Duration::from_mins(2);
/// Of small histories, the number of changes of which all subsets are tried.
const BITS: u32 = 12;

/// How a campaign in one mode has ended.
struct Ended {
    totals: Totals,
    /// Numbers of the histories that were begun.
    histories: Range<u64>,
    /// The first failure.
    failure: Option<Box<Failure>>,
    seconds: f64,
    threads: usize,
}

impl Ended {
    /// Records what this run did.
    fn record(
        &self,
        evidence: &Evidence,
        arguments: &Arguments,
        settings: &Settings,
    ) -> io::Result<()> {
        let Range { start, end } = self.histories;
        let histories = format!("histories {start} to {}", end.saturating_sub(1));
        let failure = self.failure.as_ref().map(|failure| {
            let what = failure.what.lines().next().unwrap_or_default();
            format!("{}: {what}", failure.repeat(settings))
        });
        evidence.add(&Run {
            campaign: if arguments.exhaustive { "crash-small" } else { "crash" },
            kind: &arguments.restriction(),
            mode: if arguments.offline { "" } else { settings.mode.name() },
            count: self.totals.states,
            also: &[("histories", self.totals.histories), ("judged by QEMU", self.totals.qemu)],
            seeds: if arguments.exhaustive {
                histories
            } else {
                format!("{}, {histories}", arguments.seed)
            },
            failure,
            seconds: self.seconds,
            threads: Some(self.threads),
        })
    }
}

/// Runs histories on simulated disks, crashes them, and checks their recovery.
#[derive(Parser)]
struct Arguments {
    /// Crash states to test.
    #[arg(long, default_value_t = 100_000)]
    states: u64,
    /// The metadata mode [default: all].
    #[arg(long)]
    mode: Option<String>,
    /// The campaign's seed.
    #[arg(long, default_value_t = 1, value_parser = number)]
    seed: u64,
    /// Threads [default: the number of processors].
    #[arg(long)]
    threads: Option<usize>,
    /// Only histories of this kind.
    #[arg(long)]
    kind: Option<String>,
    /// Runs histories of a whole server, with jobs and a chain that changes.
    #[arg(long, conflicts_with = "exhaustive")]
    server: bool,
    /// Runs commands on images that nobody else uses, whatever the mode.
    #[arg(long, conflicts_with_all = ["exhaustive", "server", "mode"])]
    offline: bool,
    /// Goes on after failures, and tells each.
    #[arg(long)]
    keep_going: bool,
    /// Runs small histories with every possible crash, instead of random ones.
    #[arg(long)]
    exhaustive: bool,
    /// The number of changes of which all subsets are tried.
    #[arg(long, default_value_t = BITS, value_parser = clap::value_parser!(u32).range(0..=20))]
    bits: u32,
    /// Runs one history again, by its own seed (a small one: by its number).
    #[arg(long, value_parser = number)]
    repeat: Option<u64>,
    /// Makes this flush of each history do nothing, to verify that this is detected.
    #[arg(long)]
    sabotage: Option<u64>,
    /// Enables this defect in the engine, to verify that it is detected; only in builds with debug assertions.
    #[arg(long)]
    defect: Option<String>,
    /// Reports all operations on the files after a failure.
    #[arg(long)]
    trace: bool,
    /// Omits storage faults.
    #[arg(long)]
    faultless: bool,
    /// Crashes and kills come at no more than this many moments of each history.
    #[arg(long, value_name = "COUNT")]
    moments: Option<usize>,
    /// Saves the progress of each campaign in this directory, and continues from there.
    #[arg(long, conflicts_with_all = ["exhaustive", "repeat"])]
    state: Option<PathBuf>,
}

impl Arguments {
    /// What the histories are of.
    const fn histories(&self) -> &'static str {
        match (self.server, self.offline) {
            (true, _) => "server",
            (_, true) => "offline",
            _ => "disk",
        }
    }

    /// Where the campaign's results are recorded, if they are. What is to fail, or is one history, is no campaign.
    fn evidence(&self) -> io::Result<Option<Evidence>> {
        let recorded = self.repeat.is_none() && self.sabotage.is_none() && self.defect.is_none();
        if recorded { Evidence::begin() } else { Ok(None) }
    }

    /// What the histories are restricted to.
    fn restriction(&self) -> String {
        let mut text = String::from(self.histories());
        for (name, value) in [
            ("kind", self.kind.clone()),
            ("moments", self.moments.map(|count| count.to_string())),
            ("bits", Some(self.bits.to_string()).filter(|_| self.exhaustive && self.bits != BITS)),
        ] {
            text.extend(value.map(|value| format!(", {name} {value}")));
        }
        if self.faultless { text + ", faultless" } else { text }
    }

    /// The file that says how far a campaign has come.
    fn progress(&self, settings: &Settings) -> io::Result<Progress> {
        let Some(directory) = &self.state else { return Ok(Progress::new()) };
        fs::create_dir_all(directory)?;
        let histories = self.histories();
        let kind = self.kind.as_deref().unwrap_or("all");
        let faults = if self.faultless { "-faultless" } else { "" };
        let (mode, seed) = (settings.mode.name(), self.seed);
        Progress::resume(&directory.join(format!("{histories}-{mode}-{kind}{faults}-{seed:x}")))
    }
}

/// A number, decimal or hexadecimal with `0x`.
fn number(text: &str) -> Result<u64, std::num::ParseIntError> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let named = arguments.kind.as_deref();
    let kind = named.filter(|_| !arguments.server).and_then(Kind::from_name);
    let served = named.filter(|_| arguments.server).and_then(server::kind::Kind::from_name);
    if let Some(name) = named.filter(|_| kind.is_none() && served.is_none()) {
        eprintln!("there is no kind '{name}'");
        return ExitCode::from(2);
    }
    let modes: Vec<&'static Mode> = match &arguments.mode {
        None => MODES.iter().take(if arguments.offline { 1 } else { MODES.len() }).collect(),
        Some(name) => Mode::from_name(name).into_iter().collect(),
    };
    if modes.is_empty() {
        eprintln!("there is no such mode");
        return ExitCode::from(2);
    }
    let defect = match arguments.defect.as_deref().map(|name| (name, Sabotage::from_name(name))) {
        None => None,
        Some((name, None)) => {
            let names: Vec<_> = Sabotage::ALL.iter().map(|one| one.name()).collect();
            eprintln!("there is no defect '{name}'; there are {}", names.join(", "));
            return ExitCode::from(2);
        }
        Some(_) if !cfg!(debug_assertions) => {
            eprintln!("this program was built without debug assertions, and has no defects");
            return ExitCode::from(2);
        }
        Some((_, defect)) => defect,
    };
    let evidence = match arguments.evidence() {
        Ok(evidence) => evidence,
        Err(error) => {
            eprintln!("results cannot be recorded: {error}");
            return ExitCode::from(2);
        }
    };
    let mut failed = false;
    for mode in modes {
        if kind.is_some_and(|kind| kind.version() < mode.version) {
            println!("{}: takes no images of version 2", mode.name());
            continue;
        }
        let settings = Settings {
            kind,
            sabotage: arguments.sabotage,
            defect,
            faultless: arguments.faultless,
            most_moments: arguments.moments.unwrap_or(usize::MAX),
            trace: arguments.trace,
            server: arguments.server,
            offline: arguments.offline,
            ..Settings::new(mode)
        };
        let progress = match arguments.progress(&settings) {
            Ok(progress) => progress,
            Err(error) => {
                eprintln!("how far the campaign has come is not known: {error}");
                return ExitCode::from(2);
            }
        };
        if let Some(seed) = arguments.repeat {
            match one(&arguments, &settings, served, seed) {
                Ok(totals) => println!("{}: {} states passed", mode.name(), totals.states),
                Err(failure) => {
                    println!("{}", failure.report(&settings));
                    return ExitCode::FAILURE;
                }
            }
            continue;
        }
        let Some(ended) = campaign(&arguments, &settings, served, progress) else { continue };
        if let Some(evidence) = &evidence
            && let Err(error) = ended.record(evidence, &arguments, &settings)
        {
            eprintln!("results are not recorded: {error}");
            return ExitCode::from(2);
        }
        if let Some(failure) = ended.failure {
            failed = true;
            if !arguments.keep_going {
                println!("{}", failure.report(&settings));
                break;
            }
        }
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Runs one history.
fn one(
    arguments: &Arguments,
    settings: &Settings,
    kind: Option<server::kind::Kind>,
    seed: u64,
) -> Result<Totals, Box<Failure>> {
    if arguments.server {
        return run_server(settings, kind, seed);
    }
    if arguments.offline {
        return run_offline(settings, seed);
    }
    if arguments.exhaustive {
        return run_small(settings, seed, arguments.bits);
    }
    run_history(settings, seed)
}

/// Runs histories, unless there were enough. Failures are reported at once if it goes on after them.
fn campaign(
    arguments: &Arguments,
    settings: &Settings,
    kind: Option<server::kind::Kind>,
    progress: Progress,
) -> Option<Ended> {
    let failures = AtomicU64::new(0);
    let threads =
        arguments.threads.unwrap_or_else(|| thread::available_parallelism().map_or(1, usize::from));
    let (first, earlier) = (progress.first(), progress.states());
    let (next, stop) = (AtomicU64::new(first), AtomicBool::new(false));
    let (histories, name) = (arguments.histories(), settings.mode.name());
    if earlier > 0 {
        println!("{name}, {histories}: goes on after {earlier} states of {first} histories");
    }
    if earlier >= arguments.states && !arguments.exhaustive {
        return None;
    }
    let progress = Mutex::new(progress);
    let advance = |number: u64, states: u64| {
        let mut progress = progress.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        progress.end(number, states);
        progress.states()
    };
    let keep = || {
        let progress = progress.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Err(error) = progress.keep() {
            eprintln!("how far the campaign has come is not kept: {error}");
        }
    };
    let totals = Mutex::new(Totals::default());
    let failure: Mutex<Option<Box<Failure>>> = Mutex::new(None);
    let begun = Instant::now();
    let lock = |totals: &Mutex<Totals>, more: &Totals| {
        let mut totals = totals.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        totals.add(more);
        totals.states
    };
    let begun_at = Mutex::new(BTreeMap::new());
    let running = || begun_at.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    std::panic::set_hook(Box::new(|_| ()));
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let seed = if arguments.exhaustive {
                        number
                    } else {
                        history_seed(arguments.seed, number)
                    };
                    if arguments.exhaustive && number >= COUNT {
                        stop.store(true, Ordering::Relaxed);
                        break;
                    }
                    running().insert(seed, Instant::now());
                    let ended = one(arguments, settings, kind, seed);
                    running().remove(&seed);
                    match ended {
                        Ok(more) => {
                            lock(&totals, &more);
                            let states = advance(number, more.states);
                            if states >= arguments.states && !arguments.exhaustive {
                                stop.store(true, Ordering::Relaxed);
                            }
                        }
                        Err(found) => {
                            if arguments.keep_going {
                                println!("{}\n", found.report(settings));
                                advance(number, 0);
                            } else {
                                stop.store(true, Ordering::Relaxed);
                                let passed = Totals { states: found.passed, ..Totals::default() };
                                lock(&totals, &passed);
                            }
                            failures.fetch_add(1, Ordering::Relaxed);
                            let mut failure =
                                failure.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                            failure.get_or_insert(found);
                        }
                    }
                }
            });
        }
        let mut told = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(50));
            if told.elapsed() < Duration::from_secs(10) {
                continue;
            }
            told = Instant::now();
            keep();
            for (seed, since) in running().iter().filter(|(_, since)| since.elapsed() > LONG) {
                let seconds = since.elapsed().as_secs();
                eprintln!("the history of seed {seed:#x} has not ended for {seconds} s");
            }
            let done = lock(&totals, &Totals::default());
            let seconds = begun.elapsed().as_secs_f64();
            let rate = done as f64 / seconds;
            let wanted = arguments.states.saturating_sub(earlier);
            let left = (wanted.saturating_sub(done)) as f64 / rate.max(1.0);
            let mode = format!("{name}, {histories}");
            if arguments.exhaustive {
                let number = next.load(Ordering::Relaxed).min(COUNT);
                eprintln!(
                    "{mode}: {number} of {COUNT} histories, {done} states, {rate:.0} a second"
                );
            } else {
                eprintln!(
                    "{mode}: {done} of {wanted} states, {rate:.0} a second, {left:.0} s left"
                );
            }
        }
    });
    keep();
    let totals = totals.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    let seconds = begun.elapsed().as_secs_f64();
    let failed = match failures.into_inner() {
        0 => String::new(),
        failures => format!(", {failures} histories FAILED"),
    };
    println!(
        "{name}, {histories}: {} states of {} histories passed in {seconds:.0} s ({:.0} a second), {} judged by \
         QEMU{failed}",
        totals.states,
        totals.histories,
        totals.states as f64 / seconds,
        totals.qemu
    );
    print!("{}", totals.table());
    let end = next.into_inner();
    Some(Ended {
        totals,
        histories: first..if arguments.exhaustive { end.min(COUNT) } else { end },
        failure: failure.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner),
        seconds,
        threads,
    })
}
