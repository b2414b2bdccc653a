//! A campaign's settings and results.

use crate::image::Kind;
use crate::mode::Mode;
use crate::trace;
use isobath_disk::sabotage::Sabotage;
use isobath_image::ids;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::any::Any;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// One state in this many is checked by QEMU too.
const QEMU_EVERY: u64 = 1000;

/// Counts of what passed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Histories.
    pub histories: u64,
    /// Crash states that were recovered and checked.
    pub states: u64,
    /// How many of those QEMU has checked too.
    pub qemu: u64,
    /// A digest of everything that happened, so that two runs can be compared.
    pub digest: u64,
    /// States by the kind of history, by fate, by recovery, and by faults.
    pub sorts: BTreeMap<(&'static str, &'static str), u64>,
}

impl Totals {
    pub(crate) fn count(&mut self, sort: &'static str, name: &'static str, states: u64) {
        *self.sorts.entry((sort, name)).or_default() += states;
    }

    /// Adds others.
    pub fn add(&mut self, other: &Self) {
        self.histories += other.histories;
        self.states += other.states;
        self.qemu += other.qemu;
        self.digest ^= other.digest;
        for ((sort, name), states) in &other.sorts {
            self.count(sort, name, *states);
        }
    }

    /// The counts as a text table.
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

/// A failure, and its history.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The history's seed.
    pub seed: u64,
    /// The finding.
    pub what: String,
    /// The events that led to it.
    pub story: Vec<String>,
    /// For a small history: the number of changes of which all subsets were tried.
    pub bits: Option<u32>,
    /// For a server's history: the requested kind.
    pub server: Option<&'static str>,
    /// States of the history that had passed before it.
    pub passed: u64,
}

impl Failure {
    /// A full report, with the command to repeat it.
    pub fn report(&self, settings: &Settings) -> String {
        format!(
            "FAILED: {}\n{}\nto repeat: cargo run --profile simulate -p isobath-crash --bin isobath-crash -- {}",
            self.what,
            self.story.join("\n"),
            self.repeat(settings)
        )
    }

    /// The arguments that repeat it.
    pub fn repeat(&self, settings: &Settings) -> String {
        let mut text = format!("--repeat {:#x}", self.seed);
        // Commands take no mode.
        if !settings.offline {
            text.insert_str(0, &format!("--mode {} ", settings.mode.name()));
        }
        if let Some(bits) = self.bits {
            let _ = write!(text, " --exhaustive --bits {bits}");
        }
        if settings.server {
            text.push_str(" --server");
        }
        if settings.offline {
            text.push_str(" --offline");
        }
        if let Some(kind) = settings.kind {
            let _ = write!(text, " --kind {kind}");
        }
        if let Some(kind) = self.server {
            let _ = write!(text, " --kind {kind}");
        }
        if let Some(number) = settings.sabotage {
            let _ = write!(text, " --sabotage {number}");
        }
        if let Some(defect) = settings.defect {
            let _ = write!(text, " --defect {}", defect.name());
        }
        if settings.faultless {
            text.push_str(" --faultless");
        }
        if settings.most_moments < usize::MAX {
            let _ = write!(text, " --moments {}", settings.most_moments);
        }
        text
    }
}

/// The settings of a campaign.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The metadata mode.
    pub mode: &'static Mode,
    /// Only histories of this kind.
    pub kind: Option<Kind>,
    /// This flush of each history silently does nothing: the simulator must detect that.
    pub sabotage: Option<u64>,
    /// The engine has this defect: the simulator must detect it.
    pub defect: Option<Sabotage>,
    /// Without faults.
    pub faultless: bool,
    /// Crashes and kills come at no more than this many moments of each history.
    pub most_moments: usize,
    /// One state in this many is checked by QEMU; 0 for none.
    pub qemu_every: u64,
    /// A failure tells all that was done to the files.
    pub trace: bool,
    /// Histories are of a server.
    pub server: bool,
    /// Histories are of commands.
    pub offline: bool,
}

impl Settings {
    /// All kinds of histories, with faults.
    pub const fn new(mode: &'static Mode) -> Self {
        Self {
            mode,
            kind: None,
            sabotage: None,
            defect: None,
            faultless: false,
            most_moments: usize::MAX,
            qemu_every: QEMU_EVERY,
            trace: false,
            server: false,
            offline: false,
        }
    }
}

/// Sizes of devices' atomic writes.
pub const ATOMIC: [u64; 2] = [512, 4096];

/// The name of a device with atomic writes of this size.
pub const fn device(atomic: u64) -> &'static str {
    if atomic == 4096 { "atomic-4096" } else { "atomic-512" }
}

/// The seed of a campaign's history.
pub fn history_seed(campaign: u64, number: u64) -> u64 {
    SmallRng::seed_from_u64(campaign ^ number.wrapping_mul(0x9E37_79B9_7F4A_7C15)).random()
}

/// Runs a history's test, and turns errors and panics into a failure of that seed.
pub(crate) fn guarded(
    seed: u64,
    test: impl FnOnce(&mut Totals, &mut Vec<String>) -> Result<(), String>,
) -> Result<Totals, Box<Failure>> {
    let (mut totals, mut story) = (Totals::default(), Vec::new());
    ids::seed(Some(seed));
    trace::begin();
    let tested = catch_unwind(AssertUnwindSafe(|| test(&mut totals, &mut story)));
    match tested.unwrap_or_else(|panic| Err(panicked(&*panic))) {
        Ok(()) => {
            totals.digest = trace::digest();
            Ok(totals)
        }
        Err(what) => {
            let passed = totals.states;
            Err(Box::new(Failure { seed, what, story, bits: None, server: None, passed }))
        }
    }
}

/// The message of a panic.
pub(crate) fn panicked(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    format!("the engine panicked: {}", text.unwrap_or("(no message)"))
}
