//! Deliberate defects: what the crash simulator must find.
//!
//! Each variant of [`Sabotage`] breaks one mechanism. A thread [enables](Sabotage::begin) one for itself, or a process
//! [one for all](Sabotage::begin_everywhere). Only builds with debug assertions contain them: in others nothing is ever
//! broken.

use std::cell::Cell;
use std::sync::OnceLock;

thread_local! {
    static CURRENT: Cell<Option<Sabotage>> = const { Cell::new(None) };
}

static PROCESS: OnceLock<Sabotage> = OnceLock::new();

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
    /// A write is not noted in the bitmaps that track writes.
    UnnotedWrites => "unnoted-writes",
    /// A zone ends while zeroes are still being written to it.
    ZonePreparedLate => "zone-prepared-late",
    /// A bitmap's mark is removed before its contents are durable.
    EarlyUnmark => "early-unmark",
    /// An ordered commit releases clusters while something durable still refers to them.
    EarlyRelease => "early-release",
    /// A commit in place erases clusters whose embedded mappings a recovery would still find.
    EarlyErase => "early-erase",
    /// A commit does not say that a mapping embedded since it began, whose cluster it frees, does not count.
    NewerLeads => "newer-leads",
    /// New refcount blocks are listed without waiting for those that count them.
    ListedAtOnce => "listed-at-once",
    /// A record does not revoke earlier records' changes to clusters that it frees.
    NoRevoke => "no-revoke",
    /// A recovery trusts the last record without verifying its data.
    UncheckedCovers => "unchecked-covers",
    /// A write goes in place although a record has a checksum of the old data.
    Unguarded => "unguarded",
    /// A checkpoint frees the journal's space before what it wrote is durable.
    EarlyCheckpoint => "early-checkpoint",
    /// A change of an entry is not shown in the map.
    StaleMap => "stale-map",
    /// A resolved slice is put into the map even if something changed meanwhile.
    StaleSlice => "stale-slice",
    /// A discarded cluster may be reallocated at once.
    EarlyReuse => "early-reuse",
    /// A change of the chain does not wait for requests in flight.
    OpenGate => "open-gate",
    /// Layers keep their numbers in the map when others below them leave the chain.
    OldNumbers => "old-numbers",
    /// A stream does not flush before the overlay names another backing file.
    UnflushedStream => "unflushed-stream",
    /// A disk switches to another image without the latest changes.
    UncopiedRest => "uncopied-rest",
    /// A disk that grows shows what was past its end.
    UnclearedGrowth => "uncleared-growth",
    /// A write to a part of a new cluster leaves zeroes in the rest.
    NoCopyOnWrite => "no-copy-on-write",
    /// Requests do not wait for others that change the same range.
    NoRangeLocks => "no-range-locks",
    /// A recovery omits the last record.
    LostRecord => "lost-record",
    /// Decompressed clusters of different layers are confused.
    SharedOpening => "shared-opening",
    /// The clusters of a failed write are free at once.
    EarlyUnclaim => "early-unclaim",
    /// The restart log learns of a commit in place only after its clusters were released.
    LateLog => "late-log",
    /// An inaccessible restart log is treated as missing.
    IgnoredLog => "ignored-log",
    /// Who only reads an image does not see a killed server's restart log.
    UnseenLog => "unseen-log",
    /// A damaged restart log is treated as missing.
    IgnoredDamage => "ignored-damage",
    /// A disk that switches to another image starts no restart log there.
    NoNewLog => "no-new-log",
    /// A restart log started in an image in use omits earlier completed writes.
    LateRestartLog => "late-restart-log",
    /// A restart log is applied to an image restored to an earlier state.
    ForeignLog => "foreign-log",
    /// Drains of the reader epoch do not take turns, nor wait for the epoch that a cancelled one left behind.
    DrainsAtOnce => "drains-at-once",
    /// Cloning clusters does not mark the bitmaps that track writes.
    UnmarkedClone => "unmarked-clone",
    /// Clusters past the end of a block device are allocated.
    NoEnd => "no-end",
    /// A cancelled commit is forgotten.
    ForgottenCommit => "forgotten-commit",
    /// Bytes of a file are cloned although its journal has newer ones.
    SharedOldData => "shared-old-data",
    /// A commit omits the parts of the top that layers above hide.
    HiddenLeftOut => "hidden-left-out",
    /// A cluster to be written gets no place.
    LostPlace => "lost-place",
    /// A rebase changes the backing file's name before what was copied is durable.
    UnflushedRebase => "unflushed-rebase",
    /// A change of snapshots or bitmaps does not say that refcounts may be wrong.
    NoDirtyBit => "no-dirty-bit",
    /// A unit of the map is changed outside its slice.
    ForeignUnit => "foreign-unit",
    /// A raw image whose format was detected takes any first sector.
    TrustedDetection => "trusted-detection",
    /// A merge changes what internal snapshots read.
    ChangedSnapshots => "changed-snapshots",
    /// A change of an image that fails keeps what it took.
    KeptTaken => "kept-taken",
    /// A merge writes absolute names.
    AbsoluteNames => "absolute-names",
    /// Images that name a layer in another form than a plain path are not found.
    PlainNames => "plain-names",
    /// A layer is deleted without a lock.
    UnlockedDeletion => "unlocked-deletion",
    /// A killed deletion is finished without a comparison.
    TrustedNote => "trusted-note",
    /// A commit gives up its locks before it empties the image.
    EmptiedLater => "emptied-later",
    /// More clusters are given out than were asked for.
    LongRun => "long-run",
    /// Of several entries, a write does not get the last.
    LostEntry => "lost-entry",
    /// A rebase does not look for loops.
    UnseenLoop => "unseen-loop",
}

impl Sabotage {
    /// The one of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|one| one.name() == name)
    }

    /// Breaks the engine in all threads of this process, in this way only.
    pub fn begin_everywhere(self) {
        let _ = PROCESS.set(self);
    }

    /// Breaks the engine on this thread, in this way only, until the returned guard is dropped.
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

/// Whether the engine is broken in this way.
#[inline]
pub fn is(one: Sabotage) -> bool {
    cfg!(debug_assertions) && (CURRENT.get() == Some(one) || PROCESS.get() == Some(&one))
}
