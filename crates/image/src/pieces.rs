//! Pieces of data that are not written in place yet.

use crate::{MOST_CHECKED, violated};
use isobath_qcow2::Lsn;
use isobath_sync::Invariants;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Bytes that are newer than those in place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournaledWrite {
    /// The first byte, in the host file.
    pub at: u64,
    /// The bytes to be written there.
    pub bytes: Vec<u8>,
}

/// Pieces by offset; they do not overlap. Each has a mark: the record that contains it.
#[derive(Default)]
pub(crate) struct Pieces(BTreeMap<u64, Piece>);

#[derive(Clone)]
struct Piece {
    bytes: Arc<[u8]>,
    part: Range<usize>,
    mark: Lsn,
}

impl Piece {
    fn length(&self) -> u64 {
        self.part.len() as u64
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[self.part.clone()]
    }
}

impl Invariants for Pieces {
    fn check_invariants(&self) {
        let mut end = 0;
        for (&at, piece) in self.0.iter().take(MOST_CHECKED) {
            if at < end {
                violated("journaled pieces do not overlap");
            }
            if piece.part.is_empty() {
                violated("a journaled piece has bytes");
            }
            if piece.part.end > piece.bytes.len() {
                violated("a journaled piece is a part of what was written");
            }
            end = at + piece.length();
        }
    }
}

impl Pieces {
    /// The number of pieces.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// Their bytes in total.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.values().map(Piece::length).sum()
    }

    /// Adds a piece, replacing existing pieces in its range.
    pub(crate) fn put(&mut self, at: u64, bytes: Arc<[u8]>, mark: Lsn) {
        let part = 0..bytes.len();
        self.put_piece(at, Piece { bytes, part, mark });
    }

    fn put_piece(&mut self, at: u64, piece: Piece) {
        self.cut_out(&(at..at + piece.length()));
        self.0.insert(at, piece);
    }

    /// Adds all of `newer`, replacing existing pieces in their ranges.
    pub(crate) fn put_all(&mut self, newer: Self) {
        for (at, piece) in newer.0 {
            self.put_piece(at, piece);
        }
    }

    /// Sets the mark of everything in a range, or everywhere.
    pub(crate) fn mark(&mut self, range: Option<&Range<u64>>, mark: Lsn) {
        if let Some(range) = range {
            self.split(range.start);
            self.split(range.end);
            self.0.range_mut(range.clone()).for_each(|(_, piece)| piece.mark = mark);
        } else {
            self.0.values_mut().for_each(|piece| piece.mark = mark);
        }
    }

    /// Drops pieces whose mark does not satisfy `keep`.
    pub(crate) fn retain(&mut self, keep: impl Fn(Lsn) -> bool) {
        self.0.retain(|_, piece| keep(piece.mark));
    }

    /// Whether any piece has such a mark.
    pub(crate) fn any(&self, wanted: impl Fn(Lsn) -> bool) -> bool {
        self.0.values().any(|piece| wanted(piece.mark))
    }

    /// Copies of the pieces whose mark is `wanted`.
    pub(crate) fn list(&self, wanted: impl Fn(Lsn) -> bool) -> Vec<JournaledWrite> {
        let pieces = self.0.iter().filter(|(_, piece)| wanted(piece.mark));
        pieces.map(|(&at, piece)| JournaledWrite { at, bytes: piece.bytes().to_vec() }).collect()
    }

    /// Drops a piece if it is unchanged.
    pub(crate) fn remove(&mut self, piece: &JournaledWrite) {
        if self.0.get(&piece.at).is_some_and(|found| found.bytes() == piece.bytes) {
            self.0.remove(&piece.at);
        }
    }

    /// The parts of a range that are covered by pieces.
    pub(crate) fn parts_of(&self, range: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let parts = self.overlapping(range).into_iter();
        parts.map(|(at, piece)| at.max(range.start)..(at + piece.length()).min(range.end))
    }

    /// Copies of the pieces, or parts of them, in a range.
    pub(crate) fn copies_of(&self, range: &Range<u64>) -> impl Iterator<Item = JournaledWrite> {
        let found = self.overlapping(range).into_iter();
        found.map(|(at, piece)| {
            let (start, end) = (at.max(range.start), range.end.min(at + piece.length()));
            let bytes = &piece.bytes()[(start - at) as usize..(end - at) as usize];
            JournaledWrite { at: start, bytes: bytes.to_vec() }
        })
    }

    fn overlapping(&self, range: &Range<u64>) -> Vec<(u64, &Piece)> {
        let before = self.0.range(..range.start).next_back();
        let before = before.filter(|(at, piece)| **at + piece.length() > range.start);
        let inside = self.0.range(range.clone());
        before.into_iter().chain(inside).map(|(at, piece)| (*at, piece)).collect()
    }

    /// Drops the pieces in a range; the parts of pieces outside it stay.
    pub(crate) fn cut_out(&mut self, range: &Range<u64>) {
        self.split(range.start);
        self.split(range.end);
        let inside: Vec<u64> = self.0.range(range.clone()).map(|(at, _)| *at).collect();
        for at in inside {
            self.0.remove(&at);
        }
    }

    /// Splits a piece that extends across `place` into two.
    fn split(&mut self, place: u64) {
        let Some((&at, piece)) = self.0.range_mut(..place).next_back() else { return };
        if at + piece.length() <= place {
            return;
        }
        let middle = piece.part.start + (place - at) as usize;
        let second = Piece { part: middle..piece.part.end, ..piece.clone() };
        piece.part.end = middle;
        self.0.insert(place, second);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broken::assert_violated;

    #[test]
    fn pieces_are_as_a_model_of_every_byte() {
        let mut state = 7_u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        let mut pieces = Pieces::default();
        let mut model: Vec<Option<(u8, Lsn)>> = vec![None; 256];
        for tag in 0..4000_u64 {
            let start = random(256);
            let range = start..start + 1 + random(256 - start);
            let places = range.start as usize..range.end as usize;
            match random(4) {
                0 => {
                    pieces.cut_out(&range);
                    model[places].fill(None);
                }
                1 => {
                    pieces.mark(Some(&range), Lsn::new(tag));
                    model[places].iter_mut().flatten().for_each(|byte| byte.1 = Lsn::new(tag));
                }
                _ => {
                    let bytes = vec![tag as u8; places.len()];
                    pieces.put(range.start, bytes.into(), Lsn::default());
                    model[places].fill(Some((tag as u8, Lsn::default())));
                }
            }
            let mut found: Vec<Option<(u8, Lsn)>> = vec![None; 256];
            for (at, piece) in &pieces.0 {
                for (place, byte) in (*at as usize..).zip(piece.bytes()) {
                    assert_eq!(found[place].replace((*byte, piece.mark)), None, "overlapping");
                }
            }
            assert_eq!(found, model);
            let asked = random(200)..256;
            let mut bytes = vec![None; 256];
            for copy in pieces.copies_of(&asked) {
                for (place, byte) in (copy.at as usize..).zip(copy.bytes) {
                    bytes[place] = Some(byte);
                }
            }
            let from = asked.start as usize;
            let expected: Vec<_> = model[from..].iter().map(|byte| byte.map(|b| b.0)).collect();
            assert_eq!(bytes[from..], expected);
            let checksummed: u64 = pieces.parts_of(&asked).map(|part| part.end - part.start).sum();
            assert_eq!(checksummed as usize, expected.iter().flatten().count());
        }
    }

    #[test]
    fn broken_pieces_are_noticed() {
        let pieces = || {
            let mut pieces = Pieces::default();
            pieces.put(0, vec![1; 8].into(), Lsn::default());
            pieces.put(8, vec![2; 8].into(), Lsn::default());
            pieces
        };
        let of = |at: u64, part: Range<usize>| {
            move |pieces: &mut Pieces| {
                let bytes = vec![3; 8].into();
                pieces.0.insert(at, Piece { bytes, part, mark: Lsn::default() });
            }
        };
        assert_violated("journaled pieces do not overlap", pieces(), of(4, 0..8));
        assert_violated("a journaled piece has bytes", pieces(), of(16, 3..3));
        assert_violated("is a part of what was written", pieces(), of(16, 0..9));
    }
}
