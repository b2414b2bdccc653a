//! Faults of a simulated host.

use std::ops::Range;

/// A fault of a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushFault {
    /// It fails; the changes that it should have made durable stay visible, but no later flush covers them.
    Forgets,
    /// It fails, and some of the changes are no longer visible either.
    Drops,
    /// It succeeds and does nothing.
    Lies,
}

/// An operation of the storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// A read.
    Read,
    /// A write.
    Write,
    /// Writing zeroes.
    Zeroes,
    /// A discard.
    Discard,
    /// A flush.
    Flush,
    /// Setting the length.
    Length,
    /// Cloning.
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

/// The effect of a fault on an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It fails with this error number, and changes nothing.
    Fails(i32),
    /// It fails with this error number after a part of it was done.
    Short(i32),
    /// It takes this many times as long.
    Slow(u32),
    /// Its task panics.
    Panics,
    /// The fault of a flush.
    Flush(FlushFault),
}

/// Operations that go wrong.
#[derive(Clone, Debug)]
pub struct Rule {
    /// Which operations.
    pub kind: Kind,
    /// Only operations on this file.
    pub file: Option<usize>,
    /// Only those that touch these bytes of a file.
    pub range: Option<Range<u64>>,
    /// This many of them succeed first.
    pub after: u64,
    /// How many fail then.
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

/// The faults of a history.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// This write or zero-write (counted from 0) fails after a part of it was done.
    pub write: Option<u64>,
    /// This read fails.
    pub read: Option<u64>,
    /// From this flush on, `flushes_failing` flushes have this fault.
    pub flush: Option<(u64, FlushFault)>,
    /// The number of flushes from that one on.
    pub flushes_failing: u64,
    /// No file grows beyond this many bytes (`ENOSPC`).
    pub space: Option<u64>,
    /// This many attempts to grow beyond `space` fail, and then there is room again.
    pub space_ends: Option<u64>,
    /// Further rules.
    pub rules: Vec<Rule>,
}

impl Faults {
    /// Whether there are any faults.
    pub fn any(&self) -> bool {
        self.write.is_some()
            || self.read.is_some()
            || self.flush.is_some()
            || self.space.is_some()
            || !self.rules.is_empty()
    }

    /// Whether a flush lies, so that nothing is guaranteed.
    pub fn lies(&self) -> bool {
        self.has_flush(FlushFault::Lies)
    }

    /// Whether data that a failed flush did not write disappears.
    pub fn drops(&self) -> bool {
        self.has_flush(FlushFault::Drops)
    }

    fn has_flush(&self, fault: FlushFault) -> bool {
        self.flush.is_some_and(|(_, own)| own == fault)
            || self.rules.iter().any(|rule| rule.effect == Effect::Flush(fault))
    }

    /// The effect on an operation, by the first rule that matches it.
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
