//! What a journal says the file must hold.

use super::irrecoverable;
use super::operation::Kind;
use super::record::View;
use crate::error::FormatError;
use crate::offset::HostOffset;
use std::collections::BTreeMap;
use std::iter::Peekable;
use std::ops::Bound;

/// Most ranges, before those that continue each other are put together. A writer leaves no more: it brings
/// records to their places once they take half of the area, and two more may come, of an eighth each,
/// until those are no longer needed; a range takes at least 24 bytes of the at most 64 MiB.
pub const MAX_PIECES: usize = 1 << 21;

/// Bytes or zeroes that a range must hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// These.
    Bytes(Vec<u8>),
    /// So many zeroes; the number is not bounded by the journal's size.
    Zeroes(u64),
}

/// A range of the file and what it must hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplayRange {
    /// Its first byte.
    pub offset: HostOffset,
    /// What it must hold; not empty.
    pub content: Content,
}

/// What the file must hold: ranges that neither overlap nor continue each other in kind.
#[derive(Clone, Debug, Default)]
pub struct Replay<'a> {
    pieces: BTreeMap<u64, Piece<'a>>,
}

/// Part of a range; not empty.
#[derive(Clone, Copy, Debug)]
enum Piece<'a> {
    Bytes(&'a [u8]),
    /// Ranges of one operation: below 4 GiB.
    Zeroes(u32),
}

impl Piece<'_> {
    fn length(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Zeroes(length) => u64::from(*length),
        }
    }

    /// What is left from `from` on, and at most `most` bytes of it, if there is anything.
    fn part(self, from: u64, most: u64) -> Option<Self> {
        let to = from.saturating_add(most).min(self.length());
        match self {
            _ if from >= to => None,
            Self::Bytes(bytes) => bytes.get(from as usize..to as usize).map(Self::Bytes),
            Self::Zeroes(_) => Some(Self::Zeroes((to - from) as u32)),
        }
    }
}

impl<'a> Replay<'a> {
    /// Adds a record later than those before; its data only `with_data`. Data that is in its place
    /// already, or was written there beside the record, is not to be overwritten by what is older.
    ///
    /// # Errors
    /// If there are more than [`MAX_PIECES`].
    pub(super) fn add(&mut self, record: &View<'a>, with_data: bool) -> Result<(), FormatError> {
        let items = || record.items().flatten();
        // These are about what came before the record, wherever in it they are.
        for item in items().filter(|item| matches!(item.kind, Kind::Revoke)) {
            self.cut(item.offset.get(), u64::from(item.length));
        }
        for item in items() {
            let piece = match item.kind {
                Kind::Patch(bytes) => Some(Piece::Bytes(bytes)),
                Kind::Data(bytes) => with_data.then_some(Piece::Bytes(bytes)),
                Kind::Zero => Some(Piece::Zeroes(item.length)),
                Kind::Checksum(_) | Kind::Revoke | Kind::Zones(_) => continue,
            };
            let start = item.offset.get();
            self.cut(start, u64::from(item.length));
            if let Some(piece) = piece.filter(|piece| piece.length() > 0) {
                self.pieces.insert(start, piece);
                if self.pieces.len() > MAX_PIECES {
                    return Err(irrecoverable(
                        "journal",
                        format_args!("with more than {MAX_PIECES} ranges to write"),
                        "more than any writer leaves",
                    ));
                }
            }
        }
        // Not even by the record itself: it would not hold when a replay is begun again.
        for item in items().filter(|item| matches!(item.kind, Kind::Checksum(_))) {
            self.cut(item.offset.get(), u64::from(item.length));
        }
        Ok(())
    }

    /// Removes a range. Ends do not overflow: the operations were checked.
    fn cut(&mut self, start: u64, length: u64) {
        let end = start + length;
        if length == 0 {
            return;
        }
        // The last that begins before the end, as long as it reaches into the range.
        while let Some((&at, &piece)) = self.pieces.range(..end).next_back() {
            let piece_end = at + piece.length();
            if piece_end <= start {
                break;
            }
            self.pieces.remove(&at);
            if let Some(behind) = piece.part(end.saturating_sub(at), u64::MAX) {
                self.pieces.insert(end, behind);
            }
            if let Some(before) = piece.part(0, start.saturating_sub(at)) {
                self.pieces.insert(at, before);
            }
        }
    }

    /// Whether there is nothing to write.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Where the last range ends: the file must be at least so long.
    pub fn end(&self) -> HostOffset {
        let last = self.pieces.last_key_value();
        HostOffset::new(last.map_or(0, |(start, piece)| start + piece.length()))
    }

    /// Whether a range touches `length` bytes at `offset`.
    pub fn touches(&self, offset: HostOffset, length: u64) -> bool {
        let start = offset.get();
        let before = (Bound::Unbounded, Bound::Excluded(start.saturating_add(length)));
        let last = self.pieces.range(before).next_back();
        length > 0 && last.is_some_and(|(at, piece)| at + piece.length() > start)
    }

    /// The ranges in order. Each is put together when it is asked for.
    pub fn ranges(&self) -> impl Iterator<Item = ReplayRange> {
        Ranges { pieces: self.pieces.iter().map(|(start, piece)| (*start, *piece)).peekable() }
    }
}

struct Ranges<I: Iterator> {
    pieces: Peekable<I>,
}

impl<'a, I: Iterator<Item = (u64, Piece<'a>)>> Iterator for Ranges<I> {
    type Item = ReplayRange;

    fn next(&mut self) -> Option<ReplayRange> {
        let (start, piece) = self.pieces.next()?;
        let mut end = start + piece.length();
        let mut content = match piece {
            Piece::Bytes(bytes) => Content::Bytes(bytes.to_vec()),
            Piece::Zeroes(length) => Content::Zeroes(u64::from(length)),
        };
        while let Some((next, piece)) = self.pieces.peek() {
            match (&mut content, piece) {
                _ if *next != end => break,
                (Content::Bytes(all), Piece::Bytes(bytes)) => all.extend(*bytes),
                (Content::Zeroes(all), Piece::Zeroes(length)) => *all += u64::from(*length),
                _ => break,
            }
            end += piece.length();
            self.pieces.next();
        }
        Some(ReplayRange { offset: HostOffset::new(start), content })
    }
}
