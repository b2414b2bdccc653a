//! Deliberate defects: what the crash simulator must find.
//!
//! Each variant of [`Sabotage`] breaks one mechanism, where that is. A thread [begins](Sabotage::begin) one for
//! itself. Only builds with debug assertions have them: in others nothing is ever broken.

use std::cell::Cell;

thread_local! {
    static CURRENT: Cell<Option<Sabotage>> = const { Cell::new(None) };
}

macro_rules! sabotages {
    ($($(#[$doc:meta])* $variant:ident => $name:literal,)*) => {
        /// A defect of the engine.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Sabotage {
            $($(#[$doc])* $variant,)*
        }

        impl Sabotage {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The name on the command line.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }
    };
}

sabotages! {
    /// A record of the journal is written, and not flushed.
    UnflushedRecord => "unflushed-record",
    /// An ordered commit does not make data and refcounts durable before the entries that refer to them.
    NoFirstSync => "no-first-sync",
    /// An ordered commit does not make its entries durable.
    NoSecondSync => "no-second-sync",
    /// A write does not mark the bitmaps that track writes.
    UnmarkedBitmaps => "unmarked-bitmaps",
    /// An ordered commit releases clusters before nothing durable refers to them any more.
    EarlyRelease => "early-release",
    /// A record does not revoke what earlier ones have of clusters that it frees.
    NoRevoke => "no-revoke",
    /// A recovery believes the last record, whatever its data is.
    UncheckedCovers => "unchecked-covers",
    /// A write goes to its place where a record has checksums of what is there.
    Unguarded => "unguarded",
    /// A checkpoint frees the journal's space before what it wrote is durable.
    EarlyCheckpoint => "early-checkpoint",
    /// A change of an entry is not shown in the map.
    StaleMap => "stale-map",
    /// A slice that was resolved is put into the map whatever has changed meanwhile.
    StaleSlice => "stale-slice",
    /// A cluster that is discarded may be given out again at once.
    EarlyReuse => "early-reuse",
    /// A change of the chain does not wait for the requests under way.
    OpenGate => "open-gate",
    /// Layers keep their numbers in the map when others below them leave the chain.
    OldNumbers => "old-numbers",
    /// A stream does not flush before the overlay names another backing file.
    UnflushedStream => "unflushed-stream",
    /// A disk goes on in another image without what has changed last.
    UncopiedRest => "uncopied-rest",
    /// A disk that grows shows what was behind its end.
    UnclearedGrowth => "uncleared-growth",
    /// A write to a part of a new cluster leaves zeroes beside it.
    NoCopyOnWrite => "no-copy-on-write",
    /// Requests do not wait for others that change the same range.
    NoRangeLocks => "no-range-locks",
    /// A recovery leaves the last record out.
    LostRecord => "lost-record",
    /// Decompressed clusters of all layers pass for one another's.
    SharedOpening => "shared-opening",
    /// The clusters of a write that failed are free at once.
    EarlyUnclaim => "early-unclaim",
    /// The log for a killed process hears of a commit in place when that has released its clusters, and not
    /// before.
    LateLog => "late-log",
    /// A log that cannot be had is taken for none.
    IgnoredLog => "ignored-log",
    /// A log that is damaged is taken for none.
    IgnoredDamage => "ignored-damage",
    /// A disk that goes on in another image begins no log there.
    NoNewLog => "no-new-log",
    /// A log that is begun in an image in use leaves out what was answered before.
    LateRestartLog => "late-restart-log",
    /// A log is applied to an image that was put back to what it was before.
    ForeignLog => "foreign-log",
    /// Drains of the read gate do not take turns, nor wait for what one that was given up has left.
    DrainsAtOnce => "drains-at-once",
    /// A clone of clusters does not mark the bitmaps that track writes.
    UnmarkedClone => "unmarked-clone",
    /// Clusters behind the end of a block device are given out.
    NoEnd => "no-end",
    /// A commit that was given up is forgotten.
    ForgottenCommit => "forgotten-commit",
    /// Bytes of a file are shared although its journal has newer ones.
    SharedOldData => "shared-old-data",
    /// A commit leaves out what the layers above hide of the top.
    HiddenLeftOut => "hidden-left-out",
    /// A cluster that is to be written gets no place.
    LostPlace => "lost-place",
    /// A unit of the map is changed where its slice has none.
    ForeignUnit => "foreign-unit",
}

impl Sabotage {
    /// The one of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|one| one.name() == name)
    }

    /// Breaks the engine on this thread, in this way and no other, until what is returned is dropped.
    #[must_use]
    pub fn begin(self) -> Broken {
        CURRENT.set(Some(self));
        Broken(())
    }
}

/// See [`Sabotage::begin`].
#[derive(Debug)]
pub struct Broken(());

impl Drop for Broken {
    fn drop(&mut self) {
        CURRENT.set(None);
    }
}

/// Whether the engine is to be broken in this way.
#[inline]
pub fn is(one: Sabotage) -> bool {
    cfg!(debug_assertions) && CURRENT.get() == Some(one)
}
