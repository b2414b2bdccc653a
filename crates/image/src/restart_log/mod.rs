//! The restart log: completed writes survive a kill of the process.
//!
//! Writes in place are in the kernel's page cache, which a killed process leaves behind. Changes that are only in
//! memory until the next commit do not survive: new mappings, and small writes that are journaled for a record. So both
//! are also stored in [restart memory](isobath_storage::RestartMemory), a *log*, with plain stores before a request
//! completes. The next program that opens the image applies the journal and then the log
//! ([`recovery`](crate::recovery)).
//!
//! - A log belongs to one use of the journal, by its random id, and is valid as long as that lasts: any recovery ends
//!   it. It also contains the LSN of the journal's last record: an image whose last record is an earlier one was
//!   restored to an earlier state, and the log is not applied to it. So a log is never applied to an image that has
//!   changed since.
//! - A durable commit drops what it closed: mappings before the log's position when their batch was closed, journaled
//!   bytes before its position when theirs was.
//! - A change that is not in the log (it is full, or there is no journal at the moment) is a *debt*: from then on every
//!   request waits for a commit before it completes, until no debt is left.

mod found;

pub(crate) use found::{FoundLog, LogUse};

use crate::sabotage::{self, Sabotage};
use crate::{lock_order, violated};
use isobath_qcow2::{Crc32c, Lsn};
use isobath_storage::restart_memory::{Mark, RESTART_MEMORY_BYTES};
use isobath_storage::{MemoryUse, RestartMemory, Storage};
use isobath_sync::order::Rank;
use isobath_sync::{CheckedMutex, Invariants};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Identifies a log of this layout.
const MAGIC: u64 = u64::from_be_bytes(*b"isobath2");

/// Indexes of numbers in the memory. Positions count 64-bit words since the log began.
mod at {
    pub(super) const MAGIC: usize = 0;
    /// The journal's id.
    pub(super) const ID: usize = 1;
    /// The checksum of the numbers before.
    pub(super) const SUM: usize = 2;
    /// Not 0 while a change of the image is in progress that may leave refcounts too high.
    pub(super) const UNCLEAN: usize = 3;
    /// Mappings before this position are dropped.
    pub(super) const ENTRIES: usize = 4;
    /// Journaled writes before this position are dropped.
    pub(super) const BYTES: usize = 5;
    /// The position after the last item.
    pub(super) const END: usize = 6;
    /// The last durable record of the journal.
    pub(super) const LAST: usize = 7;
    /// Items from here on, at their positions modulo [`CAPACITY`](super::CAPACITY).
    pub(super) const ITEMS: usize = 8;
}

/// Words for items.
const CAPACITY: u64 = (RESTART_MEMORY_BYTES / 8 - at::ITEMS) as u64;

/// Kinds of items, in the lowest byte of an item's first word; its length in words follows, and its checksum is the
/// upper half.
const ENTRY: u64 = 1;
const KEPT: u64 = 2;

/// The checksum of an item: it depends on the journal and the position, so that no item passes for another.
fn sum(id: u64, position: u64, numbers: &[u64], bytes: &[u8]) -> u32 {
    let mut sum = Crc32c::default();
    for number in [id, position].iter().chain(numbers) {
        sum.update(&number.to_le_bytes());
    }
    sum.update(bytes);
    sum.finish()
}

/// How the log of the journal with this id begins: the words at [`at::MAGIC`], [`at::ID`] and [`at::SUM`].
fn mark(id: u64) -> Mark {
    [MAGIC, id, sum(id, MAGIC, &[], &[]).into()]
}

/// Up to eight bytes as a number.
fn number(chunk: &[u8]) -> u64 {
    let mut word = [0; 8];
    word.iter_mut().zip(chunk).for_each(|(to, from)| *to = *from);
    u64::from_le_bytes(word)
}

/// The log of one image's writer.
#[derive(Default)]
pub struct RestartLog {
    state: CheckedMutex<LogState>,
    /// There is a debt that requests must wait for.
    must_sync: AtomicBool,
    /// More than half is in use.
    much: AtomicBool,
    /// The log was requested.
    awake: AtomicBool,
}

#[derive(Default)]
struct LogState {
    memory: Option<Arc<dyn RestartMemory>>,
    id: u64,
    /// The memory belongs to the journal in use.
    begun: bool,
    /// The number of guards that suspend logging.
    suspended: usize,
    /// The number of callers that promise nothing to clients.
    unpromised: usize,
    /// Clients rely on the log, whoever promises nothing: where there is none, changes are debts.
    required: bool,
    /// The last durable record of the journal.
    last: Lsn,
    entries: Part,
    bytes: Part,
    end: u64,
    /// Changes that were not put into the log so far.
    lost: u64,
    /// How many of those changes are durable.
    paid: u64,
    /// A change of the image is in progress that leaves refcounts too high if interrupted.
    unclean: bool,
}

/// The log's state for one kind of items.
#[derive(Default)]
struct Part {
    /// Items of this kind are logged.
    logged: bool,
    /// Items before this position are dropped.
    from: u64,
}

/// The log of a journal that is about to be put into use, if it was requested.
#[must_use = "the log begins with it"]
#[derive(Debug)]
pub(crate) struct Prepared {
    is_log: bool,
}

/// The mappings in the log that belong to the commit in progress.
#[must_use = "the commit drops them from the log once they are durable"]
#[derive(Debug)]
pub(crate) struct ClosedEntries {
    /// They end at this position.
    end: u64,
    /// The changes that were not put into the log until then.
    lost: u64,
}

/// Everything in the log that belongs to the commit in progress.
#[must_use = "the commit drops it from the log once it is durable"]
#[derive(Debug)]
pub(crate) struct ClosedLog {
    entries: ClosedEntries,
    /// Journaled writes end at this position.
    writes: u64,
}

/// Shows that what a commit made durable is no longer in the log: only then may its data change in place.
#[must_use = "clusters are reused with it"]
pub(crate) struct LogDropped(());

/// What a commit `closed` is durable: the log, if there is one, contains it no longer.
pub(crate) fn drop_closed(log: Option<&RestartLog>, closed: Option<ClosedLog>) -> LogDropped {
    if log.is_some() != closed.is_some() && !sabotage::is(Sabotage::LateLog) {
        violated("a commit drops from the log what it closed in it");
    }
    log.zip(closed).map_or(LogDropped(()), |(log, closed)| log.durable(closed))
}

/// A commit that has closed its mappings in the log, if there is one, closes the journaled data.
pub(crate) fn close_all(
    log: Option<&RestartLog>,
    entries: Option<ClosedEntries>,
) -> Option<ClosedLog> {
    if log.is_some() != entries.is_some() {
        violated("a commit closes its mappings in the log before its data");
    }
    log.zip(entries).map(|(log, entries)| log.close_writes(entries))
}

/// A change of the image that leaves refcounts too high if it does not end. If this is dropped, it has not.
#[must_use = "the change ends with it"]
pub(crate) struct Unclean(());

impl Invariants for LogState {
    const RANK: Option<Rank> = Some(lock_order::RESTART_LOG);

    fn check_invariants(&self) {
        for part in [&self.entries, &self.bytes] {
            if part.from > self.end {
                violated("what is dropped from the log was in it");
            }
            if part.logged && !self.is_usable() {
                violated("only a log in use takes items");
            }
        }
        if self.used() > CAPACITY {
            violated("no item is written over one that counts");
        }
        if self.paid > self.lost {
            violated("what is paid was owed");
        }
    }
}

impl LogState {
    fn used(&self) -> u64 {
        self.end - self.entries.from.min(self.bytes.from)
    }

    fn is_usable(&self) -> bool {
        self.begun && self.suspended == 0
    }

    fn set(&self, place: usize, value: u64) {
        if let Some(word) = self.memory.as_ref().and_then(|memory| memory.words().get(place)) {
            word.store(value, Ordering::Release);
        }
    }

    /// Appends an item; `false` if there is no room.
    fn append(&mut self, kind: u64, numbers: &[u64], bytes: &[u8]) -> bool {
        let length = 1 + numbers.len() as u64 + bytes.len().div_ceil(8) as u64;
        if length > CAPACITY - self.used() {
            return false;
        }
        let Some(words) = self.memory.as_ref().and_then(|m| m.words().get(at::ITEMS..)) else {
            return false;
        };
        let sum = sum(self.id, self.end, numbers, bytes);
        let head = u64::from(sum) << 32 | length << 8 | kind;
        let content = numbers.iter().copied().chain(bytes.chunks(8).map(number));
        let mut place = (self.end % CAPACITY) as usize;
        for value in std::iter::once(head).chain(content) {
            if let Some(word) = words.get(place) {
                word.store(value, Ordering::Relaxed);
            }
            place = (place + 1) % CAPACITY as usize;
        }
        self.end += length;
        // A kill before this leaves the log unchanged.
        self.set(at::END, self.end);
        true
    }

    /// Stops logging, because an item would be missing.
    fn stop(&mut self) {
        self.entries.logged = false;
        self.bytes.logged = false;
    }
}

/// See [`RestartLog::suspend`].
pub struct Suspended(Arc<RestartLog>);

impl Drop for Suspended {
    fn drop(&mut self) {
        self.0.state.lock().suspended -= 1;
    }
}

impl RestartLog {
    /// From now on completed writes survive a kill of this process. Earlier ones do once a commit that begins after
    /// this call has ended.
    pub fn wake(&self) {
        self.awake.store(true, Ordering::SeqCst);
    }

    /// Whether completed writes must survive a kill of this process.
    pub fn is_awake(&self) -> bool {
        self.awake.load(Ordering::SeqCst)
    }

    /// From now on a change that cannot be logged is made durable before its request completes, also where there can
    /// be no log. Returns whether there can be one; nothing has been changed so far.
    ///
    /// # Errors
    /// The memory cannot be created.
    pub async fn require<S: Storage>(&self, storage: &S) -> isobath_storage::Result<bool> {
        let known = self.state.lock().memory.clone();
        let memory = match known.filter(|memory| memory.is_there()) {
            Some(memory) => Some(memory),
            None => storage.restart_memory(MemoryUse::Create).await?,
        };
        let Some(memory) = memory else { return Ok(false) };
        let mut state = self.state.lock();
        if !state.begun {
            state.memory = Some(memory);
        }
        state.required = true;
        Ok(true)
    }

    /// Logs the new entry of a cluster, in the form that its table has. The caller keeps its batch open.
    pub fn entry(&self, cluster: u64, entry: [u8; 16]) {
        if !self.is_awake() {
            return;
        }
        let [high, low] = [number(&entry[..8]), number(&entry[8..])];
        let mut state = self.state.lock();
        if !state.entries.logged || !state.append(ENTRY, &[cluster, high, low], &[]) {
            state.stop();
            state.lost += 1;
        }
        self.tell(&state);
    }

    /// Logs bytes that are journaled for the next record. The caller keeps that record from being begun.
    pub fn journaled(&self, place: u64, bytes: &[u8]) {
        if !self.is_awake() {
            return;
        }
        let mut state = self.state.lock();
        if !state.bytes.logged || !state.append(KEPT, &[place, bytes.len() as u64], bytes) {
            state.stop();
            state.lost += 1;
        }
        self.tell(&state);
    }

    /// A commit closes the batch of mappings.
    pub(crate) fn close_entries(&self) -> ClosedEntries {
        let state = &mut *self.state.lock();
        state.entries.logged = state.is_usable();
        ClosedEntries { end: state.end, lost: state.lost }
    }

    /// A commit that has closed its mappings closes the journaled data.
    pub(crate) fn close_writes(&self, entries: ClosedEntries) -> ClosedLog {
        let state = &mut *self.state.lock();
        state.bytes.logged = state.is_usable();
        ClosedLog { entries, writes: state.end }
    }

    /// What the commit in progress closed is durable.
    pub(crate) fn durable(
        &self,
        ClosedLog { entries: ClosedEntries { end, lost }, writes }: ClosedLog,
    ) -> LogDropped {
        let state = &mut *self.state.lock();
        if end < state.entries.from || writes < state.bytes.from.max(end) {
            violated("a commit closes what follows the one before");
        }
        (state.entries.from, state.bytes.from) = (end, writes);
        if state.begun {
            state.set(at::ENTRIES, end);
            state.set(at::BYTES, writes);
        }
        state.paid = lost;
        self.tell(state);
        LogDropped(())
    }

    /// A record of the journal is durable.
    pub(crate) fn recorded(&self, lsn: Lsn) {
        let state = &mut *self.state.lock();
        if state.begun && lsn <= state.last {
            violated("a record follows the log's last one");
        }
        state.last = lsn;
        if state.begun {
            state.set(at::LAST, lsn.get());
        }
    }

    /// Prepares the log of the journal `id` of the file, which is about to be put into use: its next record comes after
    /// `last`. From now on the next program that opens the image finds this log, which is empty. `None` if there is no
    /// memory for it although it is [required](Self::require): the journal must not be used then.
    pub(crate) async fn prepare<S: Storage>(
        &self,
        storage: &S,
        id: u64,
        last: Lsn,
    ) -> Option<Prepared> {
        if !self.is_awake() {
            return Some(Prepared { is_log: false });
        }
        let known = self.state.lock().memory.clone();
        let memory = match known.filter(|memory| memory.is_there()) {
            Some(memory) => Some(memory),
            None => self.new_memory(storage).await,
        };
        let state = &mut *self.state.lock();
        state.memory = memory;
        if state.memory.is_none() {
            if state.required {
                return None;
            }
            state.unpromised += 1;
        }
        state.stop();
        (state.begun, state.id, state.end, state.last) = (false, id, 0, last);
        (state.entries.from, state.bytes.from) = (0, 0);
        for place in [at::ID, at::SUM, at::UNCLEAN, at::ENTRIES, at::BYTES, at::END] {
            state.set(place, 0);
        }
        state.set(at::LAST, last.get());
        state.set(at::MAGIC, MAGIC);
        state.set(at::SUM, sum(id, MAGIC, &[], &[]).into());
        state.set(at::ID, id);
        Some(Prepared { is_log: true })
    }

    /// Begins the log: the journal that it was prepared for is in use and empty. A commit that closed everything earlier
    /// has just ended. Does nothing if the log was not requested then.
    pub(crate) fn begin(&self, Prepared { is_log }: Prepared) {
        if !is_log {
            return;
        }
        let state = &mut *self.state.lock();
        state.begun = state.memory.is_some();
        let complete = state.is_usable() && state.lost == state.paid;
        (state.entries.logged, state.bytes.logged) = (complete, complete);
        self.tell(state);
    }

    /// Ensures that the next program that opens the image finds the log: its memory may have been removed, as a login
    /// manager does when its user has logged out. The log then continues in new memory, or needs a commit for each
    /// change. Returns whether the journal may stay in use: not if the log is [required](Self::require) and there is no
    /// memory, since the next program would then look for it.
    #[must_use = "the journal may have to be taken out of use"]
    pub async fn check_memory<S: Storage>(&self, storage: &S) -> bool {
        let memory = {
            let state = self.state.lock();
            if state.memory.is_none() {
                return !(state.required && state.begun);
            }
            state.memory.clone()
        };
        let Some(lost) = memory.filter(|memory| !memory.is_there()) else { return true };
        tracing::warn!(
            image = %isobath_storage::shown(storage.name()),
            "the restart memory was removed; continuing in new restart memory"
        );
        let memory = self.new_memory(storage).await;
        let state = &mut *self.state.lock();
        if !state.memory.as_ref().is_some_and(|now| Arc::ptr_eq(now, &lost)) {
            // The log has ended meanwhile, and may have begun again.
            return true;
        }
        if let Some(memory) = &memory {
            // Nothing is appended meanwhile. The magic number is stored last, and makes it a log.
            for (to, from) in memory.words().iter().zip(lost.words()).skip(1) {
                to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
            }
            state.memory = Some(Arc::clone(memory));
            state.set(at::MAGIC, load(lost.words(), at::MAGIC));
        } else {
            state.memory = None;
            state.stop();
            // Changes that are not in it are debts.
            state.lost += 1;
        }
        self.tell(state);
        !(state.required && state.begun && state.memory.is_none())
    }

    /// The journal is not in use any more.
    pub fn end(&self) {
        let mut state = self.state.lock();
        state.stop();
        state.begun = false;
        state.set(at::ID, 0);
    }

    /// Whether the log belongs to the journal in use.
    pub fn is_begun(&self) -> bool {
        self.state.lock().begun
    }

    /// A change of the image begins that leaves refcounts too high if interrupted.
    pub(crate) fn begin_unclean(&self) -> Unclean {
        let state = &mut *self.state.lock();
        if std::mem::replace(&mut state.unclean, true) {
            violated("one change that leaves refcounts too high ends before the next begins");
        }
        state.set(at::UNCLEAN, 1);
        Unclean(())
    }

    /// The change has ended, and is durable.
    pub(crate) fn end_unclean(&self, Unclean(()): Unclean) {
        let state = &mut *self.state.lock();
        state.unclean = false;
        state.set(at::UNCLEAN, 0);
    }

    /// Suspends logging until the returned guard is dropped: after a commit, nothing needs the log.
    pub fn suspend(self: &Arc<Self>) -> Suspended {
        let mut state = self.state.lock();
        state.stop();
        state.suspended += 1;
        Suspended(Arc::clone(self))
    }

    /// Notes that completed writes need not survive, for good or until [`promise`](Self::promise).
    pub fn promise_nothing(&self) {
        let mut state = self.state.lock();
        state.unpromised += 1;
        self.tell(&state);
    }

    /// Ends what [`promise_nothing`](Self::promise_nothing) began.
    pub fn promise(&self) {
        let mut state = self.state.lock();
        state.unpromised = match state.unpromised.checked_sub(1) {
            Some(left) => left,
            None => violated("what is promised was not promised before"),
        };
        self.tell(&state);
    }

    /// Whether requests must wait for a commit before they complete.
    pub fn must_sync(&self) -> bool {
        self.must_sync.load(Ordering::SeqCst)
    }

    /// Whether a commit should make room.
    pub fn has_much(&self) -> bool {
        self.much.load(Ordering::Relaxed)
    }

    /// Removes the memory: the image is up to date.
    pub fn remove(&self) {
        self.end();
        if let Some(memory) = self.state.lock().memory.take() {
            memory.remove();
        }
    }

    /// New memory for the log; if there is none, the reason is logged.
    async fn new_memory<S: Storage>(&self, storage: &S) -> Option<Arc<dyn RestartMemory>> {
        let found = storage.restart_memory(MemoryUse::Create).await.unwrap_or_else(|error| {
            tracing::warn!("{error}");
            None
        });
        if found.is_none() {
            let then = if self.state.lock().required {
                "each change waits until it is durable"
            } else {
                "unflushed writes will be lost if this process is killed"
            };
            let image = isobath_storage::shown(storage.name());
            tracing::warn!(%image, "no restart memory; {then}");
        }
        found
    }

    fn tell(&self, state: &LogState) {
        let promised = state.required || state.unpromised == 0;
        let must_sync = state.lost != state.paid && promised;
        if must_sync != self.must_sync.load(Ordering::Relaxed) {
            self.must_sync.store(must_sync, Ordering::SeqCst);
        }
        let much = state.used() > CAPACITY / 2;
        if much != self.much.load(Ordering::Relaxed) {
            self.much.store(much, Ordering::Relaxed);
        }
    }
}

/// The value of a number in the memory.
fn load(words: &[AtomicU64], place: usize) -> u64 {
    words.get(place).map_or(0, |word| word.load(Ordering::Acquire))
}

#[cfg(test)]
pub(crate) mod tests;
