//! The state that a simulated host's files share.

use super::memory::{Killed, RestartMemories};
use super::{Access, Conduct, FlushFault};
use crate::record::{Action, Change, Files, Flush, NEVER, Record, Tick};
use crate::state::{Fate, Replay};
use crate::trace;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::hash::Hash;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The users that have a file open, except those without locks.
#[derive(Clone, Copy, Default)]
pub(super) struct Users {
    pub(super) readers: u32,
    pub(super) writers: u32,
}

/// A change whose future was dropped; the kernel still executes it.
struct Orphan {
    due: Tick,
    file: usize,
    change: Option<usize>,
    action: Option<Action>,
}

pub(super) struct World {
    pub(super) conduct: Conduct,
    pub(super) rng: SmallRng,
    tick: Tick,
    start: Files,
    pub(super) files: Files,
    /// Files that do not exist yet.
    pub(super) absent: Vec<bool>,
    pub(super) users: Vec<Users>,
    pub(super) restart_memories: RestartMemories,
    changes: Vec<Change>,
    pub(super) flushes: Vec<Flush>,
    pub(super) writes: u64,
    pub(super) reads: u64,
    pub(super) flush_count: u64,
    pub(super) stamps: Vec<u64>,
    /// When the first fault struck.
    pub(super) struck: Tick,
    orphans: Vec<Orphan>,
    pub(super) killed: Vec<Killed>,
    /// Those that the history asked for, where an invariant is most likely to be violated.
    pub(super) killed_on_demand: Vec<Killed>,
}

impl World {
    pub(super) fn new(files: Files, conduct: Conduct) -> Self {
        let restart_memories = match &conduct.access {
            Access::Left(memories) | Access::Denied(memories, _) => {
                RestartMemories::restored(memories)
            }
            Access::None => RestartMemories::default(),
        };
        Self {
            rng: SmallRng::seed_from_u64(conduct.seed),
            tick: 0,
            start: if conduct.record { files.clone() } else { Vec::new() },
            absent: vec![false; files.len()],
            users: vec![Users::default(); files.len()],
            restart_memories,
            stamps: vec![1; files.len()],
            files,
            changes: Vec::new(),
            flushes: Vec::new(),
            writes: 0,
            reads: 0,
            flush_count: 0,
            struck: NEVER,
            orphans: Vec::new(),
            killed: Vec::new(),
            killed_on_demand: Vec::new(),
            conduct,
        }
    }

    /// Adds a file that does not exist yet.
    pub(super) fn reserve(&mut self, name: PathBuf) -> usize {
        self.files.push((name, Arc::default()));
        self.absent.push(true);
        self.users.push(Users::default());
        self.stamps.push(1);
        self.files.len() - 1
    }

    /// Adds an event to the history's digest.
    pub(super) fn note(&self, event: impl Hash) {
        trace::note((self.tick, event));
    }

    /// Restarts the record with the current files.
    pub(super) fn restart(&mut self) {
        self.start.clone_from(&self.files);
    }

    /// The number of the file with this name.
    pub(super) fn number(&self, name: &Path) -> Option<usize> {
        self.files.iter().position(|(file, _)| file == name)
    }

    pub(super) fn now(&mut self) -> Tick {
        self.tick += 1;
        let now = self.tick;
        while let Some(at) = self.orphans.iter().position(|orphan| orphan.due <= now) {
            let orphan = self.orphans.swap_remove(at);
            if let Some(action) = orphan.action {
                self.apply(orphan.file, orphan.change, &action);
            }
            self.complete(orphan.change);
        }
        self.remember(now);
        self.tick
    }

    /// Later operations on a file wait for those whose future was dropped.
    pub(super) fn land(&mut self, file: usize) {
        for orphan in self.orphans.iter_mut().filter(|orphan| orphan.file == file) {
            orphan.due = 0;
        }
        if self.orphans.iter().any(|orphan| orphan.due == 0) {
            self.now();
        }
    }

    /// May keep the state that a kill would leave now, such that in the end every moment is equally likely.
    fn remember(&mut self, now: Tick) {
        let most = self.conduct.kills;
        if most == 0 {
            return;
        }
        let place = self.rng.random_range(0..now.max(most as u64)) as usize;
        if self.killed.len() < most {
            self.killed.push(Killed { at: now, memories: self.restart_memories.copy() });
        } else if let Some(killed) = self.killed.get_mut(place) {
            *killed = Killed { at: now, memories: self.restart_memories.copy() };
        }
    }

    /// Keeps the state that a kill would leave now, in addition to others. Returns the moment.
    pub(super) fn keep_killed(&mut self) -> Tick {
        let at = self.now();
        if self.conduct.kills > 0 {
            let memories = self.restart_memories.copy();
            self.killed_on_demand.push(Killed { at, memories });
        }
        at
    }

    pub(super) fn turns(&mut self) -> u32 {
        match self.conduct.delay {
            0 => 0,
            // Most operations are quick, some are slow.
            most if self.rng.random_bool(0.15) => self.rng.random_range(0..=most * 6),
            most => self.rng.random_range(0..=most),
        }
    }

    pub(super) fn strike(&mut self) {
        let now = self.now();
        self.struck = self.struck.min(now);
    }

    pub(super) fn record(&self) -> Record {
        Record {
            start: self.start.clone(),
            changes: self.changes.clone(),
            flushes: self.flushes.clone(),
            end: self.tick + 1,
        }
    }

    pub(super) fn issue(&mut self, file: usize, action: &Action) -> usize {
        let issued = self.now();
        self.changes.push(Change {
            file,
            issued,
            applied: NEVER,
            completed: NEVER,
            sync: true,
            action: action.clone(),
        });
        self.changes.len() - 1
    }

    pub(super) fn apply(&mut self, file: usize, change: Option<usize>, action: &Action) {
        let now = self.now();
        if let Some(change) = change.and_then(|change| self.changes.get_mut(change)) {
            change.applied = now;
        }
        self.stamps[file] += 1;
        self.note((file, action));
        action.apply(Arc::make_mut(&mut self.files[file].1));
    }

    pub(super) fn complete(&mut self, change: Option<usize>) {
        let now = self.now();
        if let Some(change) = change.and_then(|change| self.changes.get_mut(change)) {
            change.completed = now;
        }
    }

    /// A change's future was dropped, but it still takes effect: at once, or, if time is simulated, after a while.
    pub(super) fn give_up(&mut self, file: usize, change: Option<usize>, action: Option<Action>) {
        if self.conduct.clock.is_some() && self.rng.random_bool(0.7) {
            let due = self.tick + self.rng.random_range(1..200);
            self.orphans.push(Orphan { due, file, change, action });
            return;
        }
        if let Some(action) = action {
            self.apply(file, change, &action);
        }
        self.complete(change);
    }

    /// Makes a flush fail: no later flush covers what it should have made durable.
    pub(super) fn fail_flush(&mut self, file: usize, issued: Tick, fault: FlushFault) {
        self.strike();
        let mut lost = self.record();
        lost.flushes.retain(|flush| flush.file == file);
        let flushed = lost.flushes.iter().map(|flush| flush.issued).max().unwrap_or(0);
        for change in &mut self.changes {
            if change.file == file && change.completed <= issued && change.completed > flushed {
                change.sync = false;
            }
        }
        if fault != FlushFault::Drops {
            return;
        }
        // The disk's contents become visible again in some places.
        let mut replay = Replay::new(&lost);
        replay.advance(lost.end);
        let durable = replay.build(&Fate::ALL_LOST, 4096, &mut self.rng).files;
        let Some((_, old)) = durable.get(file) else { return };
        let present = Arc::clone(&self.files[file].1);
        let mut pages: Vec<u64> = old.data().chain(present.data()).map(|page| page.start).collect();
        pages.sort_unstable();
        pages.dedup();
        for start in pages.into_iter().filter(|start| *start < present.len()) {
            let page = old.bytes(start..(start + 4096).min(present.len()));
            if !present.holds(start, &page) && self.rng.random_bool(0.5) {
                let action = Action::Write(start, page.into());
                let change = self.issue(file, &action);
                self.apply(file, Some(change), &action);
                self.complete(Some(change));
            }
        }
    }
}
