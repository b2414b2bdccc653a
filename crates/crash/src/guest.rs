//! The guest's requests, and the disk contents that they allow.
//!
//! Every request has a moment when it began and one when it completed. Of the requests that wrote a byte, one is ruled
//! out if a later one settled the byte: it began after the first one completed, and either a flush covers it (after a
//! crash) or it completed before the read began. The byte may hold what any other request wrote.

use crate::content::Content;
use crate::record::{NEVER, Tick};
use crate::value::{Value, interpret};
use rustc_hash::FxHashMap;
use std::fmt::Write as _;
use std::ops::Range;
use std::sync::Arc;

/// Bytes that reach a disk atomically.
pub const SECTOR: u64 = 512;

/// Sectors whose requests are listed together.
const GROUP: u64 = 64;
/// Requests that cover more groups than this are listed separately.
const WIDE: u64 = 32;

/// A request that changed the disk, or may have changed it.
#[derive(Clone, Debug)]
pub struct Written {
    /// The bytes.
    pub range: Range<u64>,
    /// The value written.
    pub value: Value,
    /// When it began.
    pub began: Tick,
    /// When it completed.
    pub ended: Tick,
    /// Whether it succeeded.
    pub done: bool,
    /// Whether success alone makes it durable.
    pub durable: bool,
    /// Its description for messages.
    pub name: &'static str,
}

/// A read and its result.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Where.
    pub offset: u64,
    /// What.
    pub bytes: Vec<u8>,
    /// When it began.
    pub began: Tick,
    /// When it completed.
    pub ended: Tick,
}

/// Everything that a guest did.
#[derive(Clone, Debug, Default)]
pub struct Log {
    /// The disk's initial contents; beyond them, zeroes.
    pub before: Before,
    /// Requests that wrote.
    pub written: Vec<Written>,
    /// When successful flushes began and completed.
    pub flushed: Vec<(Tick, Tick)>,
    /// Changes of the disk's size: when they began and completed, and the new size.
    pub sizes: Vec<(Tick, Tick, u64)>,
    /// Reads.
    pub seen: Vec<Seen>,
    /// The requests that wrote to a sector, by its group and its index in the group.
    by_group: FxHashMap<u64, Box<[Vec<u32>; GROUP as usize]>>,
    /// Requests too large to be listed in groups.
    wide: Vec<u32>,
}

/// The contents read from a disk: all of it, or the parts that may be nonzero.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Look {
    /// What it holds.
    pub content: Content,
    /// The ranges read, in order.
    pub parts: Vec<Range<u64>>,
}

impl Look {
    /// All bytes of a disk.
    pub fn whole(bytes: &[u8]) -> Self {
        let length = bytes.len() as u64;
        Self { content: Content::from(bytes), parts: std::iter::once(0..length).collect() }
    }
}

/// The initial contents of a disk.
#[derive(Clone, Debug)]
pub enum Before {
    /// Exactly these bytes.
    Bytes(Arc<Content>),
    /// Anything that an earlier crash may have left.
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
            Self::Bytes(before) => before.holds(offset, bytes),
            Self::Crash(oracle) => oracle.allows(offset, bytes),
        }
    }

    fn allows_byte(&self, offset: u64, byte: u8) -> bool {
        match self {
            Self::Bytes(before) => before.holds(offset, &[byte]),
            Self::Crash(oracle) => oracle.allows_byte(offset, byte),
        }
    }

    fn interest(&self) -> Vec<Range<u64>> {
        match self {
            Self::Bytes(before) => before.data().collect(),
            Self::Crash(oracle) => oracle.interest(),
        }
    }

    fn sizes(&self) -> Vec<u64> {
        match self {
            Self::Bytes(before) => vec![before.len()],
            Self::Crash(oracle) => oracle.sizes(),
        }
    }
}

impl Log {
    /// A log for a disk that contained `before`.
    pub fn new(before: Before) -> Self {
        Self { before, ..Self::default() }
    }

    /// The same log of a raw data file, which held at first what an oracle allows: after a crash it may differ from
    /// what the disk shows, which may have zeroes instead of what was being written.
    #[must_use]
    pub fn after(&self, oracle: &Arc<Oracle>) -> Self {
        Self { before: Before::Crash(Arc::clone(oracle)), ..self.clone() }
    }

    /// Notes the start of a request that changes a range. Returns its number.
    pub fn begin(
        &mut self,
        range: Range<u64>,
        value: Value,
        began: Tick,
        name: &'static str,
    ) -> usize {
        let number = self.written.len();
        let sectors = range.start / SECTOR..range.end.div_ceil(SECTOR);
        if sectors.end.div_ceil(GROUP) - sectors.start / GROUP > WIDE {
            self.wide.push(number as u32);
        } else {
            for sector in sectors {
                let group = self.by_group.entry(sector / GROUP);
                let group = group.or_insert_with(|| Box::new(std::array::from_fn(|_| Vec::new())));
                group[(sector % GROUP) as usize].push(number as u32);
            }
        }
        let (ended, done, durable) = (NEVER, false, false);
        self.written.push(Written { range, value, began, ended, done, durable, name });
        number
    }

    /// Notes the completion of a request.
    pub fn end(&mut self, number: usize, ended: Tick, done: bool) {
        if let Some(written) = self.written.get_mut(number) {
            (written.ended, written.done) = (ended, done);
        }
    }

    /// Checks every read that completed before `until`.
    ///
    /// # Errors
    /// A read returned impossible data.
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

    /// Where the disk may hold something other than zeroes, or recently did.
    pub fn interest(&self) -> Vec<Range<u64>> {
        let mut ranges = self.before.interest();
        for written in &self.written {
            sample(written.range.clone(), 2 * LOOKED_AT_ONCE, &mut ranges);
        }
        ranges
    }

    /// The moment before which every completed request is guaranteed at `now`.
    fn promised(&self, now: Tick) -> Tick {
        let promised = self.flushed.iter().filter(|(_, ended)| *ended < now);
        promised.map(|(began, _)| *began).max().unwrap_or(0)
    }

    /// The requests up to a moment, one per line.
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

    /// The number of events before `now`: the oracle does not change between two of them.
    pub fn events_before(&self, now: Tick) -> usize {
        let written = self.written.iter().flat_map(|written| [written.began, written.ended]);
        let flushed = self.flushed.iter().map(|(_, ended)| *ended);
        let sizes = self.sizes.iter().flat_map(|(began, ended, _)| [*began, *ended]);
        written.chain(flushed).chain(sizes).filter(|tick| *tick < now).count()
    }
}

/// Requests that wrote to a sector, and others.
#[derive(Clone, Copy)]
struct On<'a> {
    narrow: &'a [u32],
    wide: &'a [u32],
}

impl On<'_> {
    fn iter(&self) -> impl Iterator<Item = u32> {
        self.narrow.iter().chain(self.wide).copied()
    }

    /// What is there was most often written last.
    fn newest_first(&self) -> impl Iterator<Item = u32> {
        self.narrow.iter().rev().chain(self.wide.iter().rev()).copied()
    }

    fn any(&self, found: impl Fn(u32) -> bool) -> bool {
        self.iter().any(found)
    }
}

/// Bytes of a long range that are examined in one place.
const EDGE: u64 = 256 << 10;
/// Bytes of a disk that are checked at once.
const LOOKED_AT_ONCE: u64 = 1 << 20;

/// Adds a range, or of one longer than `most` bytes its ends and something in between.
pub(crate) fn sample(range: Range<u64>, most: u64, ranges: &mut Vec<Range<u64>>) {
    let Range { start, end } = range;
    if end - start <= most {
        ranges.push(start..end);
    } else {
        let middle = start + (end - start) / 2;
        ranges.extend([start, middle, end - EDGE].map(|at| at..at + EDGE));
    }
}

/// The contents that a disk may have at a moment.
#[derive(Clone, Debug)]
pub struct Oracle {
    log: Arc<Log>,
    /// Requests that had not begun then are ignored.
    now: Tick,
    /// Requests completed by then are settled.
    settled: Tick,
}

impl Oracle {
    /// The contents allowed after a crash just before `now`.
    pub fn of_crash(log: &Arc<Log>, now: Tick) -> Self {
        Self { log: Arc::clone(log), now, settled: log.promised(now) }
    }

    /// The contents allowed after a kill at `at`, which loses only requests in progress.
    pub fn of_kill(log: &Arc<Log>, at: Tick) -> Self {
        Self { log: Arc::clone(log), now: at + 1, settled: at }
    }

    /// The contents allowed at `now`, while the disk is in use.
    pub fn of_present(log: &Arc<Log>, now: Tick) -> Self {
        Self { log: Arc::clone(log), now, settled: now }
    }

    fn settles(&self, written: &Written) -> bool {
        written.done
            && (written.ended <= self.settled || written.durable && written.ended < self.now)
    }

    /// Whether `written`, or the initial contents if it is `None`, may be in all of `range`.
    fn may_show(&self, written: Option<&Written>, range: &Range<u64>, on: On<'_>) -> bool {
        let ended = written.map_or(0, |written| written.ended);
        !on.any(|number| {
            let later = &self.log.written[number as usize];
            later.began > ended
                && later.range.start < range.end
                && range.start < later.range.end
                && self.settles(later)
        })
    }

    fn on(&self, offset: u64) -> On<'_> {
        let sector = offset / SECTOR;
        let group = self.log.by_group.get(&(sector / GROUP));
        let narrow = group.map_or(&[][..], |group| &group[(sector % GROUP) as usize]);
        On { narrow, wide: &self.log.wide }
    }

    /// Whether a sector, or the part of it that the disk has, may hold these bytes.
    fn allows(&self, offset: u64, bytes: &[u8]) -> bool {
        let on = self.on(offset);
        let range = offset..offset + bytes.len() as u64;
        let mut whole = true;
        for number in on.newest_first() {
            let written = &self.log.written[number as usize];
            let (start, end) = (written.range.start, written.range.end);
            if written.began >= self.now || start >= range.end || end <= range.start {
                continue;
            }
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
        let shows = |number: u32| {
            let written = &self.log.written[number as usize];
            written.began < self.now
                && written.range.contains(&offset)
                && written.value.byte(offset) == byte
                && self.may_show(Some(written), &range, on)
        };
        on.any(shows)
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
    /// It has another size, or has impossible contents.
    pub fn check(&self, look: &Look) -> Result<(), String> {
        let (sizes, size) = (self.sizes(), look.content.len());
        if !sizes.contains(&size) {
            return Err(format!("the disk has {size} bytes instead of {sizes:?}"));
        }
        for part in &look.parts {
            let mut at = part.start;
            while at < part.end {
                let next = part.end.min(at + LOOKED_AT_ONCE);
                self.check_range(at, &look.content.bytes(at..next))?;
                at = next;
            }
        }
        Ok(())
    }

    /// Where the disk may hold something other than zeroes, or recently did.
    pub fn interest(&self) -> Vec<Range<u64>> {
        self.log.interest()
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
        for number in self.on(offset).iter() {
            let written = &self.log.written[number as usize];
            let (start, end) = (written.range.start, written.range.end);
            let apart = start >= offset + bytes.len() as u64 || end <= offset;
            if written.began >= self.now || apart {
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
            let old = before.bytes(offset..offset + bytes.len() as u64);
            let _ = write!(text, "\n    before all that it held {}", interpret(offset, &old));
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
        let mut log =
            Log::new(Before::Bytes(Arc::new(Content::from(&pattern(1).bytes(0..1024)[..]))));
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
        Oracle::of_crash(log, now).check(&Look::whole(&bytes)).is_ok()
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
        assert!(Oracle::of_crash(&log, 2).check(&Look::whole(&bytes)).is_ok());
        assert!(Oracle::of_crash(&log, 5).check(&Look::whole(&bytes)).is_err());
        bytes[100..612].copy_from_slice(&pattern(2).bytes(100..612));
        assert!(Oracle::of_crash(&log, 2).check(&Look::whole(&bytes)).is_ok());
        assert!(Oracle::of_crash(&log, 5).check(&Look::whole(&bytes)).is_ok());
        bytes[99] ^= 1;
        assert!(Oracle::of_crash(&log, 2).check(&Look::whole(&bytes)).is_err());
    }

    #[test]
    fn a_pattern_out_of_place_is_wrong() {
        let log = log(&[(0..1024, 2, 1, NEVER)], &[]);
        let mut bytes = pattern(2).bytes(0..1024);
        assert!(Oracle::of_crash(&log, 5).check(&Look::whole(&bytes)).is_ok());
        bytes.copy_within(512..1024, 0);
        let error = Oracle::of_crash(&log, 5).check(&Look::whole(&bytes)).unwrap_err();
        assert!(error.contains("pattern 2 as it belongs at 512"), "{error}");
    }
}
