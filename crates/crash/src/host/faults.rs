//! What goes wrong with a simulated host.

use std::ops::Range;

/// What a flush does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushFault {
    /// It fails; the changes that it should have made durable stay in view, and no later flush
    /// knows of them.
    Forgets,
    /// It fails, and some of the changes are gone from view too.
    Drops,
    /// It succeeds and does nothing.
    Lies,
}

/// An operation of the storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Bytes are read.
    Read,
    /// Bytes are written.
    Write,
    /// A range becomes zeroes.
    Zeroes,
    /// A range is given back.
    Discard,
    /// All is made durable.
    Flush,
    /// The length is set.
    Length,
    /// Space is shared with another range.
    Clone,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Read,
        Self::Write,
        Self::Zeroes,
        Self::Discard,
        Self::Flush,
        Self::Length,
        Self::Clone,
    ];
}

/// What happens to an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It fails with this error number, and changes nothing.
    Fails(i32),
    /// It fails with this error number after a part of it has landed.
    Short(i32),
    /// It takes so many times as long.
    Slow(u32),
    /// Its task panics.
    Panics,
    /// Of a flush.
    Flush(FlushFault),
}

/// Operations that go wrong.
#[derive(Clone, Debug)]
pub struct Rule {
    /// Which operations.
    pub kind: Kind,
    /// Of this file only.
    pub file: Option<usize>,
    /// Only those that touch these bytes of a file.
    pub range: Option<Range<u64>>,
    /// So many of them go well before.
    pub after: u64,
    /// How many go wrong then.
    pub times: u64,
    /// What happens to them.
    pub effect: Effect,
}

impl Rule {
    fn is_about(&self, kind: Kind, file: usize, range: &Range<u64>) -> bool {
        let touches = |own: &Range<u64>| own.start < range.end && range.start < own.end;
        self.kind == kind
            && self.file.is_none_or(|own| own == file)
            && self.range.as_ref().is_none_or(touches)
    }
}

/// What goes wrong.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Of writes and zero-writes, this one fails (counted from 0), after a part of it has landed.
    pub write: Option<u64>,
    /// This read fails.
    pub read: Option<u64>,
    /// From this flush on, `flushes_failing` of them do as said.
    pub flush: Option<(u64, FlushFault)>,
    /// How many flushes from that one on.
    pub flushes_failing: u64,
    /// No file grows beyond this many bytes (`ENOSPC`).
    pub space: Option<u64>,
    /// So many attempts to grow beyond `space` fail, and then there is room again.
    pub space_ends: Option<u64>,
    /// More of them.
    pub rules: Vec<Rule>,
}

impl Faults {
    /// Whether anything goes wrong at all.
    pub fn any(&self) -> bool {
        self.write.is_some()
            || self.read.is_some()
            || self.flush.is_some()
            || self.space.is_some()
            || !self.rules.is_empty()
    }

    /// Whether a flush lies, so that nothing is promised.
    pub fn lies(&self) -> bool {
        self.has_flush(FlushFault::Lies)
    }

    /// Whether a flush that fails takes what it did not write from view.
    pub fn drops(&self) -> bool {
        self.has_flush(FlushFault::Drops)
    }

    fn has_flush(&self, fault: FlushFault) -> bool {
        self.flush.is_some_and(|(_, own)| own == fault)
            || self.rules.iter().any(|rule| rule.effect == Effect::Flush(fault))
    }

    /// What happens to an operation, the first rule that is about it first.
    pub(super) fn strike(&mut self, kind: Kind, file: usize, range: &Range<u64>) -> Option<Effect> {
        let mut struck = None;
        for rule in &mut self.rules {
            if !rule.is_about(kind, file, range) {
                continue;
            }
            if rule.after > 0 {
                rule.after -= 1;
            } else if rule.times > 0 && struck.is_none() {
                rule.times = if rule.times == u64::MAX { u64::MAX } else { rule.times - 1 };
                struck = Some(rule.effect);
            }
        }
        struck
    }
}
