//! The states in which a crash can leave the files.
//!
//! Every change that no flush covers has a fate of its own, down to grains of 512 or 4,096 bytes, only the latter if
//! the device writes 4,096 bytes atomically: a grain has the contents that it had after any number of the changes made
//! to it, starting with the durable ones. So changes are lost, reordered and torn in every way that a page cache above
//! a disk allows. The length of a file is one that it had at some moment since its last flush; bytes below it that were
//! never written read as zeroes.

use crate::content::Content;
use crate::guest::SECTOR;
use crate::record::{Action, Files, Record, Tick};
use rand::RngExt;
use rand::rngs::SmallRng;
use rustc_hash::FxHasher;
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// A random size of grains on a device that writes `atomic` bytes atomically.
pub fn random_grain(atomic: u64, rng: &mut SmallRng) -> u64 {
    if rng.random() { atomic.max(512) } else { 4096 }
}

/// The fate of the changes that no flush covers, numbered in the order in which they took effect.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fate {
    /// All are lost, or all but one.
    Lost {
        /// The one.
        but: Option<usize>,
    },
    /// All are kept, or all but one.
    Kept {
        /// The one.
        but: Option<usize>,
    },
    /// The first changes are kept, this many.
    First(usize),
    /// Those from this one on are kept, without earlier ones.
    From(usize),
    /// Those whose bit is set are kept.
    Subset(u64),
    /// Each is kept with this probability.
    Some(f64),
    /// Each grain holds any of its versions.
    Grains,
    /// The machine keeps running: everything in the page cache is kept, and any part of the operations in flight.
    Killed,
    /// One is torn: of its grains only the first half reaches the disk, or only the second.
    Torn {
        /// Which.
        change: usize,
        /// The first half.
        front: bool,
        /// Whether those before it are kept.
        before: bool,
        /// Whether those after it are kept.
        after: bool,
    },
}

impl Fate {
    /// All is lost.
    pub const ALL_LOST: Self = Self::Lost { but: None };
    /// All is kept.
    pub const ALL_KEPT: Self = Self::Kept { but: None };

    /// A random fate of any kind for `changes` changes.
    pub fn random(changes: usize, rng: &mut SmallRng) -> Self {
        let any = |rng: &mut SmallRng| rng.random_range(0..changes.max(1));
        match rng.random_range(0..20) {
            0 => Self::ALL_LOST,
            1 => Self::ALL_KEPT,
            2 | 3 => Self::Lost { but: Some(any(rng)) },
            4 | 5 => Self::Kept { but: Some(any(rng)) },
            6..9 => Self::First(any(rng)),
            9..12 => Self::Torn {
                change: any(rng),
                front: rng.random(),
                before: rng.random_bool(0.7),
                after: rng.random_bool(0.3),
            },
            12..16 => Self::Some(rng.random_range(0.05..0.95)),
            _ => Self::Grains,
        }
    }

    /// A random fate of changes that a flush was about to cover: often, only the latest are kept.
    pub fn amid_flush(changes: usize, rng: &mut SmallRng) -> Self {
        if changes > 1 && rng.random_bool(0.4) {
            return Self::From(rng.random_range(1..changes));
        }
        Self::random(changes, rng)
    }

    /// The name of its kind, for totals.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Lost { but: None } => "all lost",
            Self::Lost { .. } => "one kept",
            Self::Kept { but: None } => "all kept",
            Self::Kept { .. } => "one lost",
            Self::First(_) => "a prefix kept",
            Self::From(_) => "a suffix kept",
            Self::Subset(_) => "every subset",
            Self::Some(_) => "a random subset",
            Self::Grains => "random versions of each grain",
            Self::Killed => "what the page cache has",
            Self::Torn { .. } => "one torn",
        }
    }

    /// Whether grain number `grain` of the `grains` of a change is written.
    fn takes(&self, position: usize, grain: u64, grains: u64, drawn: &[bool]) -> bool {
        match *self {
            Self::Lost { but } => but == Some(position),
            Self::Kept { but } => but != Some(position),
            Self::First(count) => position < count,
            Self::From(first) => position >= first,
            Self::Subset(mask) => position < 64 && mask >> position & 1 == 1,
            Self::Some(_) | Self::Grains | Self::Killed => drawn[position],
            Self::Torn { change, before, .. } if position < change => before,
            Self::Torn { change, after, .. } if position > change => after,
            Self::Torn { front, .. } => (grain < grains.div_ceil(2)) == front,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Pending {
    change: usize,
    /// A flush covers it, but not everything before it.
    durable: bool,
}

/// The files after a crash.
pub struct Crashed {
    /// Their contents.
    pub files: Files,
    /// A digest of the choices made.
    pub print: u64,
}

/// Steps through a record and builds the states that a crash at each moment can leave.
pub struct Replay<'a> {
    record: &'a Record,
    /// The changes in the order in which they took effect.
    order: Vec<usize>,
    /// The earliest submission of any change from this position in the order on.
    earliest: Vec<Tick>,
    /// Positions in the order that are part of `base`.
    done: Vec<bool>,
    done_count: usize,
    first: usize,
    /// The durable contents of each file.
    base: Files,
    /// The moment up to which each file is flushed.
    flushed: Vec<Tick>,
    next_flush: usize,
    pending: Vec<Pending>,
    /// The present moment.
    now: Tick,
}

impl<'a> Replay<'a> {
    /// Starts at the record's beginning.
    pub fn new(record: &'a Record) -> Self {
        let mut order: Vec<usize> = (0..record.changes.len()).collect();
        order.sort_by_key(|change| record.changes[*change].applied);
        let mut earliest = vec![Tick::MAX; order.len() + 1];
        for (place, change) in order.iter().enumerate().rev() {
            earliest[place] = earliest[place + 1].min(record.changes[*change].issued);
        }
        Self {
            done: vec![false; order.len()],
            done_count: 0,
            first: 0,
            base: record.start.clone(),
            flushed: vec![0; record.start.len()],
            next_flush: 0,
            pending: Vec::new(),
            now: 0,
            record,
            order,
            earliest,
        }
    }

    /// Advances to the moment just before tick `now`, which must not be earlier than the current one.
    pub fn advance(&mut self, now: Tick) {
        while let Some(flush) = self.record.flushes.get(self.next_flush)
            && flush.completed < now
        {
            let until = &mut self.flushed[flush.file];
            *until = flush.issued.max(*until);
            self.next_flush += 1;
        }
        self.now = now;
        self.pending.clear();
        let mut blocked = vec![false; self.base.len()];
        for place in self.first..self.order.len() {
            if self.earliest[place] >= now {
                break;
            }
            let number = self.order[place];
            let change = &self.record.changes[number];
            if self.done[place] || change.issued >= now {
                continue;
            }
            let durable = change.sync && change.completed <= self.flushed[change.file];
            if durable && !blocked[change.file] {
                change.action.apply(Arc::make_mut(&mut self.base[change.file].1));
                self.done[place] = true;
                self.done_count += 1;
            } else {
                blocked[change.file] = true;
                self.pending.push(Pending { change: number, durable });
            }
        }
        while self.done.get(self.first) == Some(&true) {
            self.first += 1;
        }
    }

    /// The number of changes that have a fate.
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    /// A digest of the changes that a crash would decide about.
    pub fn moment(&self) -> u64 {
        let mut hasher = FxHasher::default();
        self.done_count.hash(&mut hasher);
        for pending in &self.pending {
            (pending.change, pending.durable).hash(&mut hasher);
        }
        hasher.finish()
    }

    /// The pending changes: one line for each change that has a fate.
    pub fn describe(&self) -> Vec<String> {
        self.pending
            .iter()
            .enumerate()
            .map(|(position, pending)| {
                let change = self.record.changes[pending.change].tell(&self.base);
                let durable = if pending.durable { " (durable)" } else { "" };
                format!("#{position} {change}{durable}")
            })
            .collect()
    }

    /// The files that this fate leaves.
    pub fn build(&self, fate: &Fate, grain: u64, rng: &mut SmallRng) -> Crashed {
        let drawn: Vec<bool> = match fate {
            Fate::Some(keep) => self.pending.iter().map(|_| rng.random_bool(*keep)).collect(),
            Fate::Killed => {
                let applied = |pending: &Pending| self.record.changes[pending.change].applied;
                let mut lands = |pending| applied(pending) < self.now || rng.random_bool(0.5);
                self.pending.iter().map(&mut lands).collect()
            }
            _ => vec![true; self.pending.len()],
        };
        let mut files = self.base.clone();
        let mut print = FxHasher::default();
        self.done_count.hash(&mut print);
        for (number, (_, bytes)) in files.iter_mut().enumerate() {
            let pending: Vec<(usize, Pending)> = self
                .pending
                .iter()
                .copied()
                .enumerate()
                .filter(|(_, pending)| self.record.changes[pending.change].file == number)
                .collect();
            if !pending.is_empty() {
                let built = self.build_file(bytes, &pending, fate, &drawn, grain, rng, &mut print);
                *bytes = Arc::new(built);
            }
        }
        Crashed { files, print: print.finish() }
    }

    #[allow(clippy::too_many_arguments, reason = "all of it is one choice")]
    fn build_file(
        &self,
        base: &Content,
        pending: &[(usize, Pending)],
        fate: &Fate,
        drawn: &[bool],
        grain: u64,
        rng: &mut SmallRng,
        print: &mut FxHasher,
    ) -> Content {
        let action = |pending: &Pending| &self.record.changes[pending.change].action;
        // The length before each change, and the greatest of all.
        let mut lengths = vec![base.len()];
        let mut durable_length = 0;
        for (place, (_, change)) in pending.iter().enumerate() {
            let before = lengths[place];
            let after = action(change).length_after(before);
            lengths.push(after);
            // Durable data lies within the file.
            let needs = action(change).range(before).1 > lengths[durable_length];
            if change.durable && (after != before || needs) {
                durable_length = place + 1;
            }
        }
        // The grains that changes touch.
        let mut cuts: BTreeMap<u64, Cut> = BTreeMap::new();
        let mut last_kept = 0;
        for (place, (position, change)) in pending.iter().enumerate() {
            let (start, end) = match action(change) {
                Action::SetLength(_) => (0, 0),
                action => action.range(lengths[place]),
            };
            let grains = start / grain..end.div_ceil(grain).max(start / grain);
            let count = grains.end - grains.start;
            let mut kept = change.durable || (count == 0 && fate.takes(*position, 0, 1, drawn));
            for (ordinal, at) in grains.enumerate() {
                let cut = cuts.entry(at).or_default();
                let takes = change.durable
                    || if *fate == Fate::Grains {
                        cut.versions += 1;
                        rng.random_range(0..=cut.versions) == 0
                    } else {
                        fate.takes(*position, ordinal as u64, count, drawn)
                    };
                if takes {
                    cut.seen = place + 1;
                    kept = true;
                }
                if change.durable {
                    cut.versions = 0;
                }
            }
            if kept {
                last_kept = place + 1;
            }
        }
        let mut seen = match fate {
            Fate::Lost { but: None } => durable_length,
            Fate::Kept { but: None } => pending.len(),
            Fate::Some(_) | Fate::Grains if rng.random_bool(0.5) => {
                rng.random_range(durable_length..=pending.len())
            }
            _ => last_kept.max(durable_length),
        };
        // Sectors are atomic, including the last one of the file.
        while lengths[seen] % SECTOR != 0
            && cuts.get(&(lengths[seen] / grain)).is_some_and(|cut| cut.seen > seen)
        {
            seen += 1;
        }
        for (place, (_, change)) in pending.iter().enumerate() {
            if let Action::SetLength(new) = action(change)
                && *new < lengths[place]
                && place < seen
            {
                // A file system that has truncated a file never shows the removed part.
                for cut in cuts.range_mut(*new / grain..).map(|(_, cut)| cut) {
                    cut.seen = cut.seen.max(place + 1);
                }
            }
        }
        let mut content = base.clone();
        for (place, (_, change)) in pending.iter().enumerate() {
            let (start, end) = action(change).range(lengths[place]);
            if let Action::SetLength(_) = action(change) {
                if lengths[place + 1] < lengths[place] && place < seen {
                    content.fill(start..end, 0);
                }
                continue;
            }
            for at in start / grain..end.div_ceil(grain) {
                if cuts.get(&at).is_some_and(|cut| cut.seen > place) {
                    let (first, last) = ((at * grain).max(start), ((at + 1) * grain).min(end));
                    action(change).apply_part(&mut content, first, last);
                }
            }
        }
        content.set_len(lengths[seen]);
        (seen, pending.len()).hash(print);
        for (at, cut) in &cuts {
            (at, cut.seen).hash(print);
        }
        content
    }
}

/// The contents of a grain of a file.
#[derive(Clone, Copy, Default)]
struct Cut {
    /// How many of the file's changes it has seen.
    seen: usize,
    /// Changes of it since the last one that is durable.
    versions: u32,
}
