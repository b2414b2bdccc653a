//! The contents of a disk after a sequence of operations.

use crate::bytes::first_other_than;
use crate::ops::Op;
use std::collections::BTreeMap;
use std::fmt;

const PAGE: usize = 64 << 10;

/// A disk's bytes, stored sparsely.
///
/// A discarded byte may read as before or as zero until it is written again or until [`adopt`](Model::adopt) accepts
/// the value read; from then on it must not change.
#[derive(Clone, Debug, Default)]
pub struct Model {
    size: u64,
    pages: BTreeMap<u64, Page>,
}

#[derive(Clone, Debug)]
struct Page {
    bytes: Vec<u8>,
    /// Marks the bytes that may also read as zero; empty if there are none.
    loose: Vec<bool>,
}

/// The first byte in which a disk differs from its [`Model`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mismatch {
    /// The disk's size differs.
    Size {
        /// The model's, in bytes.
        expected: u64,
        /// The disk's, in bytes.
        actual: u64,
    },
    /// A byte differs.
    Byte {
        /// Its offset in bytes.
        offset: u64,
        /// The model's byte.
        expected: u8,
        /// Whether 0 would have been correct too.
        or_zero: bool,
        /// The disk's byte.
        actual: u8,
        /// How many bytes differ in total.
        count: u64,
    },
}

impl fmt::Display for Mismatch {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Size { expected, actual } => {
                write!(out, "the disk has {actual} bytes instead of {expected}")
            }
            Self::Byte { offset, expected, or_zero, actual, count } => {
                let or_zero = if *or_zero { " (or 0, it was discarded)" } else { "" };
                write!(
                    out,
                    "byte {offset} ({offset:#x}) is {actual:#04x} instead of {expected:#04x}{or_zero}; \
                     {count} bytes differ"
                )
            }
        }
    }
}

impl std::error::Error for Mismatch {}

impl Model {
    /// A disk of zeroes.
    pub fn new(size: u64) -> Self {
        Self { size, pages: BTreeMap::new() }
    }

    /// A disk of the given bytes.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let mut model = Self::new(bytes.len() as u64);
        for (index, part) in bytes.chunks(PAGE).enumerate() {
            if first_other_than(0, part).is_some() {
                let mut page = Page::zero();
                page.bytes[..part.len()].copy_from_slice(part);
                model.pages.insert(index as u64, page);
            }
        }
        model
    }

    /// The disk's size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Applies the operation. Panics if it extends past the end of the disk.
    pub fn apply(&mut self, op: &Op) {
        match *op {
            Op::Write { offset, length, pattern } => self.fill(offset, length, pattern),
            Op::Zero { offset, length, .. } => self.fill(offset, length, 0),
            Op::Discard { offset, length } => self.discard(offset, length),
            Op::Flush => {}
            Op::Resize { size } => self.resize(size),
        }
    }

    /// Writes bytes.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        let mut rest = bytes;
        for (page, start, end) in self.parts(offset, bytes.len() as u64) {
            let (part, after) = rest.split_at(end - start);
            let page = self.pages.entry(page).or_insert_with(Page::zero);
            page.bytes[start..end].copy_from_slice(part);
            page.settle(start, end);
            rest = after;
        }
    }

    /// Fills a range with one byte.
    pub fn fill(&mut self, offset: u64, length: u64, byte: u8) {
        for (index, start, end) in self.parts(offset, length) {
            if byte == 0 && end - start == PAGE {
                self.pages.remove(&index);
            } else {
                let page = self.pages.entry(index).or_insert_with(Page::zero);
                page.bytes[start..end].fill(byte);
                page.settle(start, end);
            }
        }
    }

    /// Allows a range to read as before or as zeroes.
    pub fn discard(&mut self, offset: u64, length: u64) {
        for (index, start, end) in self.parts(offset, length) {
            // A missing page is already zero.
            if let Some(page) = self.pages.get_mut(&index) {
                page.loose.resize(PAGE, false);
                page.loose[start..end].fill(true);
            }
        }
    }

    /// Changes the size; new bytes read as zeroes.
    pub fn resize(&mut self, size: u64) {
        if size < self.size {
            self.fill(size, self.size - size, 0);
        }
        self.size = size;
    }

    /// The model's bytes in a range, with the old values of discarded bytes.
    pub fn read(&self, offset: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        let mut rest = bytes.as_mut_slice();
        for (page, start, end) in self.parts(offset, length as u64) {
            let (part, after) = rest.split_at_mut(end - start);
            if let Some(page) = self.pages.get(&page) {
                part.copy_from_slice(&page.bytes[start..end]);
            }
            rest = after;
        }
        bytes
    }

    /// Compares the whole disk.
    ///
    /// # Errors
    /// The first difference.
    pub fn check(&self, actual: &[u8]) -> Result<(), Mismatch> {
        if actual.len() as u64 != self.size {
            return Err(Mismatch::Size { expected: self.size, actual: actual.len() as u64 });
        }
        self.check_range(0, actual)
    }

    /// Compares bytes read at `offset`.
    ///
    /// # Errors
    /// The first difference.
    pub fn check_range(&self, offset: u64, actual: &[u8]) -> Result<(), Mismatch> {
        let mut first = None;
        let mut count = 0;
        let mut position = 0;
        for (index, start, end) in self.parts(offset, actual.len() as u64) {
            let part = &actual[position..position + (end - start)];
            let page = self.pages.get(&index);
            if page.is_some_and(|page| page.bytes[start..end] == *part)
                || page.is_none() && first_other_than(0, part).is_none()
            {
                position += part.len();
                continue;
            }
            for (at, byte) in (start..end).zip(part) {
                let (expected, or_zero) = page.map_or((0, false), |page| page.at(at));
                if *byte != expected && !(or_zero && *byte == 0) {
                    count += 1;
                    first.get_or_insert((offset + position as u64, expected, or_zero, *byte));
                }
                position += 1;
            }
        }
        match first {
            None => Ok(()),
            Some((offset, expected, or_zero, actual)) => {
                Err(Mismatch::Byte { offset, expected, or_zero, actual, count })
            }
        }
    }

    /// Compares the whole disk, and adopts its values of discarded bytes.
    ///
    /// # Errors
    /// The first difference; the model is then unchanged.
    pub fn adopt(&mut self, actual: &[u8]) -> Result<(), Mismatch> {
        self.check(actual)?;
        // Bytes that were not discarded are equal already.
        for (index, page) in self.pages.iter_mut().filter(|(_, page)| !page.loose.is_empty()) {
            let start = *index as usize * PAGE;
            // A disk that has shrunk may end before the page does.
            let part = actual.get(start..actual.len().min(start + PAGE)).unwrap_or_default();
            page.bytes[..part.len()].copy_from_slice(part);
            page.loose = Vec::new();
        }
        Ok(())
    }

    /// Compares bytes read at `offset`, and adopts those that were discarded.
    ///
    /// # Errors
    /// The first difference; the model is then unchanged.
    pub fn adopt_range(&mut self, offset: u64, actual: &[u8]) -> Result<(), Mismatch> {
        self.check_range(offset, actual)?;
        let mut rest = actual;
        for (index, start, end) in self.parts(offset, actual.len() as u64) {
            let (part, after) = rest.split_at(end - start);
            if let Some(page) = self.pages.get_mut(&index) {
                page.bytes[start..end].copy_from_slice(part);
                page.settle(start, end);
            }
            rest = after;
        }
        Ok(())
    }

    /// The pages that a range touches, each with the start and end of the range within it.
    fn parts(&self, offset: u64, length: u64) -> impl Iterator<Item = (u64, usize, usize)> + use<> {
        let end = offset.checked_add(length).filter(|end| *end <= self.size);
        let Some(end) = end else {
            panic!("{length} bytes at {offset} are not within a disk of {} bytes", self.size)
        };
        let page = PAGE as u64;
        (offset / page..end.div_ceil(page)).map(move |index| {
            let start = offset.max(index * page) - index * page;
            let stop = end.min((index + 1) * page) - index * page;
            (index, start as usize, stop as usize)
        })
    }
}

impl Page {
    fn zero() -> Self {
        Self { bytes: vec![0; PAGE], loose: Vec::new() }
    }

    fn at(&self, position: usize) -> (u8, bool) {
        (self.bytes[position], self.loose.get(position).copied().unwrap_or(false))
    }

    fn settle(&mut self, start: usize, end: usize) {
        if let Some(loose) = self.loose.get_mut(start..end) {
            loose.fill(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Shape;
    use crate::seed::Seed;

    #[test]
    fn it_agrees_with_a_plain_vector() {
        let seed = Seed::new();
        let mut rng = seed.rng();
        let shape = Shape { size: 300_000, longest: 150_000, unit: PAGE as u64 };
        let mut model = Model::new(shape.size);
        let mut plain = vec![0; shape.size as usize];
        for op in shape.ops(&mut rng, 300) {
            model.apply(&op);
            match op {
                Op::Write { offset, length, pattern } => {
                    plain[offset as usize..(offset + length) as usize].fill(pattern);
                }
                Op::Zero { offset, length, .. } => {
                    plain[offset as usize..(offset + length) as usize].fill(0);
                }
                _ => {}
            }
            assert_eq!(model.check(&plain), Ok(()), "{op}");
        }
        assert_eq!(model.read(1, 299_999), plain[1..]);
    }

    #[test]
    fn a_discarded_byte_is_old_or_zero_and_then_stays_so() {
        let mut model = Model::new(100);
        model.fill(0, 100, 7);
        model.discard(10, 2);
        let mut disk = vec![7; 100];
        assert_eq!(model.check(&disk), Ok(()));
        disk[10] = 0;
        assert_eq!(model.adopt(&disk), Ok(()));
        disk[10] = 7;
        let wrong = Mismatch::Byte { offset: 10, expected: 0, or_zero: false, actual: 7, count: 1 };
        assert_eq!(model.check(&disk), Err(wrong));
        model.discard(12, 2);
        disk[13] = 0;
        assert_eq!(model.adopt_range(12, &disk[12..14]), Ok(()));
        assert_eq!(model.read(12, 2), [7, 0]);
        disk[12] = 0;
        assert!(model.check_range(12, &disk[12..14]).is_err());
        disk[12] = 7;
        disk[10] = 3;
        model.discard(11, 1);
        disk[11] = 9;
        let Err(Mismatch::Byte { offset: 10, count: 2, .. }) = model.check(&disk) else {
            panic!("two bytes differ")
        };
    }

    #[test]
    fn growing_after_shrinking_shows_zeroes() {
        let mut model = Model::from_bytes(&vec![5; 70_000]);
        model.resize(66_000);
        model.resize(70_000);
        let mut disk = vec![5; 70_000];
        disk[66_000..].fill(0);
        assert_eq!(model.check(&disk), Ok(()));
        assert_eq!(
            model.check(&disk[1..]),
            Err(Mismatch::Size { expected: 70_000, actual: 69_999 })
        );
    }
}
