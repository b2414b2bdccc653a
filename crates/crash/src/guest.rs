//! What the guest did, and what a disk may hold for it.
//!
//! Every request has a moment when it began and one when it was answered. Of the requests that wrote
//! a byte, one is out of the question when a later one settled the byte: one that began after the
//! first was answered, and that a flush has promised (after a crash) or that was itself answered
//! before the read began. The byte may hold what any other wrote.

use crate::record::{NEVER, Tick};
use crate::value::{Value, interpret};
use std::fmt::Write as _;
use std::ops::Range;
use std::sync::Arc;

/// Bytes that reach a disk as a whole or not at all.
pub const SECTOR: u64 = 512;

/// A request that changed the disk, or may have.
#[derive(Clone, Debug)]
pub struct Written {
    /// Which bytes.
    pub range: Range<u64>,
    /// To what.
    pub value: Value,
    /// When it began.
    pub began: Tick,
    /// When it was answered.
    pub ended: Tick,
    /// Whether it was answered with success.
    pub done: bool,
    /// Whether success alone makes it durable.
    pub durable: bool,
    /// What it was, for people.
    pub name: &'static str,
}

/// A read and what it saw.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Where.
    pub offset: u64,
    /// What.
    pub bytes: Vec<u8>,
    /// When it began.
    pub began: Tick,
    /// When it was answered.
    pub ended: Tick,
}

/// All that a guest did.
#[derive(Clone, Debug, Default)]
pub struct Log {
    /// What the disk held at first; beyond it, zeroes.
    pub before: Before,
    /// Requests that wrote.
    pub written: Vec<Written>,
    /// When flushes that succeeded began and were answered.
    pub flushed: Vec<(Tick, Tick)>,
    /// Changes of the disk's size: when they began and were answered, and to what.
    pub sizes: Vec<(Tick, Tick, u64)>,
    /// Reads.
    pub seen: Vec<Seen>,
    /// By sector, the requests that wrote to it.
    by_sector: Vec<Vec<u32>>,
}

/// What a disk held at first.
#[derive(Clone, Debug)]
pub enum Before {
    /// These bytes, for certain.
    Bytes(Arc<Vec<u8>>),
    /// What an earlier crash may have left.
    Crash(Arc<Oracle>),
}

impl Default for Before {
    fn default() -> Self {
        Self::Bytes(Arc::default())
    }
}

impl Before {
    fn allows(&self, offset: u64, bytes: &[u8]) -> bool {
        match self {
            Self::Bytes(before) => {
                let start = (offset as usize).min(before.len());
                let end = (offset as usize + bytes.len()).min(before.len());
                let there = end - start;
                bytes[..there] == before[start..end] && bytes[there..].iter().all(|byte| *byte == 0)
            }
            Self::Crash(oracle) => oracle.allows(offset, bytes),
        }
    }

    fn allows_byte(&self, offset: u64, byte: u8) -> bool {
        match self {
            Self::Bytes(before) => before.get(offset as usize).copied().unwrap_or(0) == byte,
            Self::Crash(oracle) => oracle.allows_byte(offset, byte),
        }
    }

    fn sizes(&self) -> Vec<u64> {
        match self {
            Self::Bytes(before) => vec![before.len() as u64],
            Self::Crash(oracle) => oracle.sizes(),
        }
    }
}

impl Log {
    /// A log of a disk that held `before`.
    pub fn new(before: Before) -> Self {
        Self { before, ..Self::default() }
    }

    /// A request that changes a range begins. Returns its number.
    pub fn begin(
        &mut self,
        range: Range<u64>,
        value: Value,
        began: Tick,
        name: &'static str,
    ) -> usize {
        let number = self.written.len();
        let sectors = range.start / SECTOR..range.end.div_ceil(SECTOR);
        if self.by_sector.len() < sectors.end as usize {
            self.by_sector.resize(sectors.end as usize, Vec::new());
        }
        for sector in sectors {
            self.by_sector[sector as usize].push(number as u32);
        }
        let (ended, done, durable) = (NEVER, false, false);
        self.written.push(Written { range, value, began, ended, done, durable, name });
        number
    }

    /// The request is answered.
    pub fn end(&mut self, number: usize, ended: Tick, done: bool) {
        if let Some(written) = self.written.get_mut(number) {
            (written.ended, written.done) = (ended, done);
        }
    }

    /// Checks everything that was read and answered before `until`.
    ///
    /// # Errors
    /// A read saw what it could not.
    pub fn check_reads(self: &Arc<Self>, until: Tick) -> Result<(), String> {
        for seen in self.seen.iter().filter(|seen| seen.ended < until) {
            let oracle = Oracle { log: Arc::clone(self), now: seen.ended, settled: seen.began };
            oracle.check_range(seen.offset, &seen.bytes).map_err(|error| {
                format!(
                    "a read of {} bytes at {} (from {} to {}): {error}",
                    seen.bytes.len(),
                    seen.offset,
                    seen.began,
                    seen.ended
                )
            })?;
        }
        Ok(())
    }

    /// Until when everything answered was promised before `now`.
    fn promised(&self, now: Tick) -> Tick {
        let promised = self.flushed.iter().filter(|(_, ended)| *ended < now);
        promised.map(|(began, _)| *began).max().unwrap_or(0)
    }

    /// The requests up to a moment, one a line.
    pub fn tell(&self, now: Tick) -> Vec<String> {
        let mut lines: Vec<(Tick, String)> = Vec::new();
        let shown = |tick: Tick| if tick == NEVER { "never".into() } else { tick.to_string() };
        for written in self.written.iter().filter(|written| written.began < now) {
            let (start, end) = (written.range.start, written.range.end);
            let text = format!(
                "{:>6}..{:<6} {} of {:?} at {start}..{end}{}",
                written.began,
                shown(written.ended),
                written.name,
                written.value,
                if written.done { "" } else { " (failed)" }
            );
            lines.push((written.began, text));
        }
        for (began, ended) in self.flushed.iter().filter(|(began, _)| *began < now) {
            lines.push((*began, format!("{began:>6}..{ended:<6} a flush, successful")));
        }
        for (began, ended, size) in self.sizes.iter().filter(|(began, ..)| *began < now) {
            lines.push((*began, format!("{began:>6}..{:<6} size {size}", shown(*ended))));
        }
        lines.sort();
        lines.into_iter().map(|(_, line)| line).collect()
    }

    /// How many events came before `now`: the oracle is the same between two of them.
    pub fn events_before(&self, now: Tick) -> usize {
        let written = self.written.iter().flat_map(|written| [written.began, written.ended]);
        let flushed = self.flushed.iter().map(|(_, ended)| *ended);
        let sizes = self.sizes.iter().flat_map(|(began, ended, _)| [*began, *ended]);
        written.chain(flushed).chain(sizes).filter(|tick| *tick < now).count()
    }
}

/// What a disk may hold at a moment.
#[derive(Clone, Debug)]
pub struct Oracle {
    log: Arc<Log>,
    /// Requests that had not begun then are of no account.
    now: Tick,
    /// What was answered by then is settled.
    settled: Tick,
}

impl Oracle {
    /// What it may hold after a crash just before `now`.
    pub fn of_crash(log: &Arc<Log>, now: Tick) -> Self {
        Self { log: Arc::clone(log), now, settled: log.promised(now) }
    }

    /// What it holds at `now`, while it runs.
    pub fn of_present(log: &Arc<Log>, now: Tick) -> Self {
        Self { log: Arc::clone(log), now, settled: now }
    }

    fn settles(&self, written: &Written) -> bool {
        written.done
            && (written.ended <= self.settled || written.durable && written.ended < self.now)
    }

    /// Whether `written`, or what was before where it is `None`, may be in all of `range`.
    fn may_show(&self, written: Option<&Written>, range: &Range<u64>, on: &[u32]) -> bool {
        let ended = written.map_or(0, |written| written.ended);
        !on.iter().any(|number| {
            let later = &self.log.written[*number as usize];
            later.began > ended
                && later.range.start < range.end
                && range.start < later.range.end
                && self.settles(later)
        })
    }

    fn on(&self, offset: u64) -> &[u32] {
        self.log.by_sector.get((offset / SECTOR) as usize).map_or(&[], Vec::as_slice)
    }

    /// Whether a sector, or the part of it that the disk has, may hold these bytes.
    fn allows(&self, offset: u64, bytes: &[u8]) -> bool {
        let on = self.on(offset);
        let range = offset..offset + bytes.len() as u64;
        let started = |number: &&u32| self.log.written[**number as usize].began < self.now;
        let mut whole = true;
        for number in on.iter().filter(started) {
            let written = &self.log.written[*number as usize];
            if written.range.start > range.start || written.range.end < range.end {
                whole = false;
            } else if written.value.fills(offset, bytes) && self.may_show(Some(written), &range, on)
            {
                return true;
            }
        }
        if self.log.before.allows(offset, bytes) && self.may_show(None, &range, on) {
            return true;
        }
        !whole && bytes.iter().zip(offset..).all(|(byte, at)| self.allows_byte(at, *byte))
    }

    fn allows_byte(&self, offset: u64, byte: u8) -> bool {
        let on = self.on(offset);
        let range = offset..offset + 1;
        let shows = |number: &u32| {
            let written = &self.log.written[*number as usize];
            written.began < self.now
                && written.range.contains(&offset)
                && written.value.byte(offset) == byte
                && self.may_show(Some(written), &range, on)
        };
        on.iter().any(shows)
            || self.log.before.allows_byte(offset, byte) && self.may_show(None, &range, on)
    }

    /// The sizes that the disk may have.
    pub fn sizes(&self) -> Vec<u64> {
        let mut sizes = self.log.before.sizes();
        for (began, ended, size) in &self.log.sizes {
            if *ended < self.now {
                sizes.clear();
            }
            if *began < self.now {
                sizes.push(*size);
            }
        }
        sizes
    }

    /// Checks a whole disk.
    ///
    /// # Errors
    /// It has another size, or holds what it cannot.
    pub fn check(&self, bytes: &[u8]) -> Result<(), String> {
        let sizes = self.sizes();
        if !sizes.contains(&(bytes.len() as u64)) {
            return Err(format!("the disk has {} bytes instead of {sizes:?}", bytes.len()));
        }
        self.check_range(0, bytes)
    }

    /// Checks bytes of the disk from `offset` on.
    ///
    /// # Errors
    /// It holds what it cannot.
    pub fn check_range(&self, offset: u64, bytes: &[u8]) -> Result<(), String> {
        let end = offset + bytes.len() as u64;
        let mut at = offset;
        while at < end {
            let next = (at / SECTOR * SECTOR + SECTOR).min(end);
            let part = &bytes[(at - offset) as usize..(next - offset) as usize];
            let fits = if at.is_multiple_of(8) && next.is_multiple_of(8) {
                self.allows(at, part)
            } else {
                part.iter().zip(at..).all(|(byte, at)| self.allows_byte(at, *byte))
            };
            if !fits {
                return Err(self.explain(at, part));
            }
            at = next;
        }
        Ok(())
    }

    fn explain(&self, offset: u64, bytes: &[u8]) -> String {
        let mut text =
            format!("the sector at {offset} holds {}; it was written by", interpret(offset, bytes));
        let mut any = false;
        for number in self.on(offset) {
            let written = &self.log.written[*number as usize];
            if written.began >= self.now {
                continue;
            }
            any = true;
            let state = match (self.settles(written), written.done) {
                (true, _) => "settled",
                (false, true) => "not settled",
                (false, false) => "failed or unfinished",
            };
            let same = written.range.start <= offset
                && written.range.end >= offset + bytes.len() as u64
                && written.value.fills(offset, bytes);
            let state = if same { format!("{state}; these bytes") } else { state.into() };
            let _ = write!(
                text,
                "\n    {} of {:?} at {}..{} from {} to {} ({state})",
                written.name,
                written.value,
                written.range.start,
                written.range.end,
                written.began,
                if written.ended == NEVER { "never".into() } else { written.ended.to_string() }
            );
        }
        if !any {
            text.push_str(" nobody");
        }
        let _ = write!(text, "\n    (what was answered by {} is settled)", self.settled);
        if let Before::Bytes(before) = &self.log.before {
            let end = (offset as usize + bytes.len()).min(before.len());
            let old = before.get(offset as usize..end).unwrap_or_default();
            let _ = write!(text, "\n    before all that it held {}", interpret(offset, old));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::value::Sort;

    const fn pattern(number: u32) -> Value {
        Value::Pattern(Sort::Plain, number)
    }

    fn log(requests: &[(Range<u64>, u32, Tick, Tick)], flushed: &[(Tick, Tick)]) -> Arc<Log> {
        let mut log = Log::new(Before::Bytes(Arc::new(pattern(1).bytes(0..1024))));
        for (range, number, began, ended) in requests {
            let request = log.begin(range.clone(), pattern(*number), *began, "write");
            log.end(request, *ended, *ended != NEVER);
        }
        log.flushed = flushed.to_vec();
        Arc::new(log)
    }

    fn holds(log: &Arc<Log>, now: Tick, number: u32) -> bool {
        let mut bytes = pattern(1).bytes(0..1024);
        bytes[..512].copy_from_slice(&pattern(number).bytes(0..512));
        Oracle::of_crash(log, now).check(&bytes).is_ok()
    }

    #[test]
    fn what_is_promised_outlives_a_crash_and_what_is_not_may() {
        let log = log(
            &[(0..512, 2, 1, 2), (0..512, 3, 10, 12), (0..512, 4, 11, 13), (0..512, 5, 30, NEVER)],
            &[(5, 6), (20, 22)],
        );
        assert!([1, 2].iter().all(|pattern| holds(&log, 3, *pattern)));
        assert!(!holds(&log, 7, 1), "it was overwritten and flushed");
        assert!([2, 3, 4].iter().all(|pattern| holds(&log, 21, *pattern)));
        assert!(!holds(&log, 21, 5), "it has not begun");
        assert!(!holds(&log, 23, 2) && holds(&log, 23, 3) && holds(&log, 23, 4));
        assert!(holds(&log, 31, 5));
        assert!(!holds(&log, 31, 1));
    }

    #[test]
    fn parts_of_a_sector_are_judged_byte_by_byte() {
        let log = log(&[(100..612, 2, 1, 2)], &[(3, 4)]);
        let mut bytes = pattern(1).bytes(0..1024);
        assert!(Oracle::of_crash(&log, 2).check(&bytes).is_ok());
        assert!(Oracle::of_crash(&log, 5).check(&bytes).is_err());
        bytes[100..612].copy_from_slice(&pattern(2).bytes(100..612));
        assert!(Oracle::of_crash(&log, 2).check(&bytes).is_ok());
        assert!(Oracle::of_crash(&log, 5).check(&bytes).is_ok());
        bytes[99] ^= 1;
        assert!(Oracle::of_crash(&log, 2).check(&bytes).is_err());
    }

    #[test]
    fn a_pattern_out_of_place_is_wrong() {
        let log = log(&[(0..1024, 2, 1, NEVER)], &[]);
        let mut bytes = pattern(2).bytes(0..1024);
        assert!(Oracle::of_crash(&log, 5).check(&bytes).is_ok());
        bytes.copy_within(512..1024, 0);
        let error = Oracle::of_crash(&log, 5).check(&bytes).unwrap_err();
        assert!(error.contains("pattern 2 as it belongs at 512"), "{error}");
    }
}
