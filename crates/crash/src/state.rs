//! The states in which a crash can leave the files.
//!
//! Every change that no flush covers has a fate of its own, down to grains of 512 or 4,096 bytes, only
//! the latter where the device writes so many whole: a grain holds what it held after any number of the changes made to it, from those that are durable
//! on. So changes are lost, reordered and torn in every way in which a page cache above a disk can do
//! it. The length of a file is one that it had at some moment since its last flush; what lies below it
//! and was never written reads as zeroes.

use crate::guest::SECTOR;
use crate::record::{Action, Files, Record, Tick};
use rand::RngExt;
use rand::rngs::SmallRng;
use rustc_hash::FxHasher;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// A size of grains on a device that writes `atomic` bytes whole.
pub fn random_grain(atomic: u64, rng: &mut SmallRng) -> u64 {
    if rng.random() { atomic.max(512) } else { 4096 }
}

/// What becomes of the changes that no flush covers, numbered as they took effect.
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
    /// The first so many are kept.
    First(usize),
    /// Those whose bit is set are kept.
    Subset(u64),
    /// Each is kept with this probability.
    Some(f64),
    /// Each grain holds any of its versions.
    Grains,
    /// One is torn: of its grains only the first half reaches the disk, or only the second.
    Torn {
        /// Which.
        change: usize,
        /// The first half.
        front: bool,
        /// What becomes of those before it.
        before: bool,
        /// What becomes of those after it.
        after: bool,
    },
}

impl Fate {
    /// All is lost.
    pub const ALL_LOST: Self = Self::Lost { but: None };
    /// All is kept.
    pub const ALL_KEPT: Self = Self::Kept { but: None };

    /// One of every kind, at random, for `changes` changes.
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

    /// The name of its kind, for totals.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Lost { but: None } => "all lost",
            Self::Lost { .. } => "one kept",
            Self::Kept { but: None } => "all kept",
            Self::Kept { .. } => "one lost",
            Self::First(_) => "a prefix kept",
            Self::Subset(_) => "every subset",
            Self::Some(_) => "a random subset",
            Self::Grains => "random versions of each grain",
            Self::Torn { .. } => "one torn",
        }
    }

    /// Whether grain number `grain` of the `grains` of a change is taken over.
    fn takes(&self, position: usize, grain: u64, grains: u64, drawn: &[bool]) -> bool {
        match *self {
            Self::Lost { but } => but == Some(position),
            Self::Kept { but } => but != Some(position),
            Self::First(count) => position < count,
            Self::Subset(mask) => position < 64 && mask >> position & 1 == 1,
            Self::Some(_) | Self::Grains => drawn[position],
            Self::Torn { change, before, .. } if position < change => before,
            Self::Torn { change, after, .. } if position > change => after,
            Self::Torn { front, .. } => (grain < grains.div_ceil(2)) == front,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Pending {
    change: usize,
    /// A flush covers it, but not all that came before it.
    durable: bool,
}

/// The files after a crash.
pub struct State {
    /// What they hold.
    pub files: Files,
    /// A digest of the choices made.
    pub print: u64,
}

/// Goes through a record and makes the states that a crash at each moment can leave.
pub struct Replay<'a> {
    record: &'a Record,
    /// The changes as they took effect.
    order: Vec<usize>,
    /// The earliest that any change from this place of the order on was asked for.
    earliest: Vec<Tick>,
    /// Places of the order that are part of `base`.
    done: Vec<bool>,
    done_count: usize,
    first: usize,
    /// What each file holds for certain.
    base: Files,
    /// Until when each file is flushed.
    flushed: Vec<Tick>,
    next_flush: usize,
    pending: Vec<Pending>,
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
            record,
            order,
            earliest,
        }
    }

    /// Goes on to the moment just before tick `now`, which is no earlier than the present one.
    pub fn advance(&mut self, now: Tick) {
        while let Some(flush) = self.record.flushes.get(self.next_flush)
            && flush.completed < now
        {
            let until = &mut self.flushed[flush.file];
            *until = flush.issued.max(*until);
            self.next_flush += 1;
        }
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

    /// How many changes have a fate.
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    /// A digest of what a crash would decide about.
    pub fn moment(&self) -> u64 {
        let mut hasher = FxHasher::default();
        self.done_count.hash(&mut hasher);
        for pending in &self.pending {
            (pending.change, pending.durable).hash(&mut hasher);
        }
        hasher.finish()
    }

    /// What is asked for at this moment: one line for each change that has a fate.
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
    pub fn build(&self, fate: &Fate, grain: u64, rng: &mut SmallRng) -> State {
        let drawn: Vec<bool> = match fate {
            Fate::Some(keep) => self.pending.iter().map(|_| rng.random_bool(*keep)).collect(),
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
        State { files, print: print.finish() }
    }

    #[allow(clippy::too_many_arguments, reason = "all of it is one choice")]
    fn build_file(
        &self,
        base: &[u8],
        pending: &[(usize, Pending)],
        fate: &Fate,
        drawn: &[bool],
        grain: u64,
        rng: &mut SmallRng,
        print: &mut FxHasher,
    ) -> Vec<u8> {
        let action = |pending: &Pending| &self.record.changes[pending.change].action;
        // The length before each change, and the greatest of all.
        let mut lengths = vec![base.len() as u64];
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
        let most = lengths.iter().copied().max().unwrap_or(0);
        // Which version each grain holds: how many of the file's changes it has seen.
        let mut cuts = vec![0_usize; most.div_ceil(grain) as usize];
        let mut versions = vec![1_u32; cuts.len()];
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
                let at = at as usize;
                let takes = change.durable
                    || if *fate == Fate::Grains {
                        versions[at] += 1;
                        rng.random_range(0..versions[at]) == 0
                    } else {
                        fate.takes(*position, ordinal as u64, count, drawn)
                    };
                if takes {
                    cuts[at] = place + 1;
                    kept = true;
                }
                if change.durable {
                    versions[at] = 1;
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
        // A sector is whole, also the last one of the file.
        while lengths[seen] % SECTOR != 0
            && cuts.get((lengths[seen] / grain) as usize).is_some_and(|cut| *cut > seen)
        {
            seen += 1;
        }
        let mut bytes = Vec::with_capacity(most as usize);
        bytes.extend_from_slice(base);
        bytes.resize(most as usize, 0);
        for (place, (_, change)) in pending.iter().enumerate() {
            if let Action::SetLength(new) = action(change)
                && *new < lengths[place]
                && place < seen
            {
                // A file system that has shortened a file shows nothing of what it cut off.
                for cut in &mut cuts[(*new / grain) as usize..] {
                    *cut = (*cut).max(place + 1);
                }
            }
        }
        for (place, (_, change)) in pending.iter().enumerate() {
            let (start, end) = action(change).range(lengths[place]);
            if let Action::SetLength(_) = action(change) {
                if lengths[place + 1] < lengths[place] && place < seen {
                    bytes[start as usize..end as usize].fill(0);
                }
                continue;
            }
            let mut at = start;
            while at < end {
                let next = (at / grain * grain + grain).min(end);
                if cuts[(at / grain) as usize] > place {
                    action(change).apply_part(&mut bytes, at, next);
                }
                at = next;
            }
        }
        bytes.resize(lengths[seen] as usize, 0);
        (cuts, seen, pending.len()).hash(print);
        bytes
    }
}
