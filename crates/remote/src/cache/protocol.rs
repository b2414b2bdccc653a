//! How a block of a layer appears in the file, is checked and disappears, whatever others do at the same time.
//!
//! Everything is a step on what processes share: a [`Word`](super::word::Word) per block, which changes by
//! compare-exchange, and the file. `docs/decisions/0050-a-cache-that-servers-share.md` shows why no order of steps, and
//! no death between two of them, lets a reader take wrong bytes for the layer's; the tests here run all orders.

use super::word::{State, Word};
use std::io;

/// How often a step that others interfere with is repeated.
const ATTEMPTS: usize = 8;

/// What the users of a layer's files share.
pub(super) trait Shared {
    /// The word of a block. What is read afterwards is not older.
    fn load(&self, block: u64) -> Word;

    /// The same, after everything that was read of the file before.
    fn load_after_reads(&self, block: u64) -> Word;

    /// Replaces a word if it is `from`. What was written before is seen by whoever sees the new word, and what is
    /// written afterwards only by those who see it.
    fn replace(&self, block: u64, from: Word, to: Word) -> bool;

    /// The generation of a word that is changed for the first time.
    fn first(&self) -> u64;

    /// Writes a block to the file.
    fn write(&self, block: u64, bytes: &[u8]) -> io::Result<()>;

    /// Reads a block of the file.
    fn read(&self, block: u64) -> io::Result<Vec<u8>>;

    /// Takes a block out of the file.
    fn punch(&self, block: u64) -> io::Result<()>;
}

/// What a reader may make of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// The file holds the layer's bytes, if it still does after they were read: see
    /// [`CachedLayer::still`](super::CachedLayer::still).
    Verified(Stamp),
    /// The file may hold them: see [`CachedLayer::verify`](super::CachedLayer::verify).
    Unverified,
    /// They are to be fetched.
    Absent,
}

/// A moment in the life of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp(u64);

impl Look {
    pub(super) fn at(word: Word) -> Self {
        match word.state() {
            State::Verified => Self::Verified(Stamp(word.generation())),
            State::Unverified => Self::Unverified,
            State::Absent | State::Evicting => Self::Absent,
        }
    }
}

/// Whether a block that was verified has been so ever since. What was read meanwhile is then the layer's.
pub(super) fn still(shared: &impl Shared, block: u64, stamp: Stamp) -> bool {
    Look::at(shared.load_after_reads(block)) == Look::Verified(stamp)
}

/// Puts a block's bytes, which were checked, into the file; `None` if others were in the way.
///
/// # Errors
/// They cannot be written. The block is absent, or what another filler has made of it.
pub(super) fn fill(
    shared: &impl Shared,
    block: u64,
    bytes: &[u8],
    now: u64,
) -> io::Result<Option<Stamp>> {
    for _ in 0..ATTEMPTS {
        let word = shared.load(block);
        match Look::at(word) {
            Look::Verified(stamp) => return Ok(Some(stamp)),
            Look::Absent if word.state() == State::Evicting => return Ok(None),
            Look::Absent | Look::Unverified => {}
        }
        shared.write(block, bytes)?;
        let filled = word.filled(now, shared.first());
        if shared.replace(block, word, filled) {
            return Ok(Some(Stamp(filled.generation())));
        }
        // Somebody has changed the block since, and may have taken out what was just written.
    }
    Ok(None)
}

/// Checks a block that is not verified. One that cannot be read, or does not match, is absent from then on.
pub(super) fn verify(shared: &impl Shared, block: u64, matches: impl Fn(&[u8]) -> bool) -> Look {
    for _ in 0..ATTEMPTS {
        let word = shared.load(block);
        let look = Look::at(word);
        if look != Look::Unverified {
            return look;
        }
        let good = shared.read(block).is_ok_and(|bytes| matches(&bytes));
        let state = if good { State::Verified } else { State::Absent };
        let checked = word.changed(state, shared.first());
        if shared.replace(block, word, checked) {
            return Look::at(checked);
        }
    }
    Look::Absent
}

/// Makes a verified block one that is to be checked again.
pub(super) fn doubt(shared: &impl Shared, block: u64) {
    loop {
        let word = shared.load(block);
        if word.state() != State::Verified {
            return;
        }
        if shared.replace(block, word, word.changed(State::Unverified, shared.first())) {
            return;
        }
    }
}

/// Takes a block out of the file if its word is still this one; whether it was. Whoever calls it has the lock of
/// evictions. An absent block may have bytes in the file, too, which a filler has left that was killed.
///
/// # Errors
/// The file system cannot take it out. It is absent nevertheless.
pub(super) fn evict(shared: &impl Shared, block: u64, word: Word, now: u64) -> io::Result<bool> {
    let evicting = word.changed(State::Evicting, shared.first());
    if !shared.replace(block, word, evicting) {
        return Ok(false);
    }
    let punched = shared.punch(block);
    let gone = match word.state() {
        State::Absent => evicting.changed(State::Absent, shared.first()),
        _ => evicting.evicted(now, shared.first()),
    };
    // Nobody else changes it, unless the map is no longer ours: then nobody looks at it, either.
    shared.replace(block, evicting, gone);
    punched.map(|()| true)
}

/// Ends what an evictor left that was killed. Whoever calls it has the lock of evictions.
///
/// # Errors
/// As of [`evict`].
pub(super) fn finish(shared: &impl Shared, block: u64, now: u64) -> io::Result<()> {
    let word = shared.load(block);
    if word.state() != State::Evicting {
        return Ok(());
    }
    let punched = shared.punch(block);
    shared.replace(block, word, word.evicted(now, shared.first()));
    punched
}
