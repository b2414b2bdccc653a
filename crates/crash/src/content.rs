//! The contents of a file or a disk: sparse, and cheap to copy.

use isobath_testkit::bytes::{first_difference, first_other_than};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Bytes in a page.
pub const PAGE: u64 = 4096;

type Page = [u8; PAGE as usize];

/// Bytes up to a length; what was never written reads as zeroes. Copies share their pages.
#[derive(Clone, Default)]
pub struct Content {
    length: u64,
    pages: BTreeMap<u64, Arc<Page>>,
}

/// The parts of a range that fall into each page: page, and the range within it.
fn parts(range: Range<u64>) -> impl Iterator<Item = (u64, Range<usize>)> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        if at >= range.end {
            return None;
        }
        let (page, within) = (at / PAGE, (at % PAGE) as usize);
        let count = (PAGE - at % PAGE).min(range.end - at);
        at += count;
        Some((page, within..within + count as usize))
    })
}

impl Content {
    /// This many zeroes.
    pub fn zeroes(length: u64) -> Self {
        Self { length, pages: BTreeMap::new() }
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.length
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The pages there are in a range: the part of the range that each holds, counted from the range's start, and its
    /// bytes.
    fn held(&self, range: Range<u64>) -> impl Iterator<Item = (Range<usize>, &[u8])> {
        // An empty range within a page ends where it starts.
        let pages = range.start / PAGE..range.end.div_ceil(PAGE).max(range.start / PAGE);
        self.pages.range(pages).map(move |(page, data)| {
            let (start, end) = (range.start.max(page * PAGE), range.end.min((page + 1) * PAGE));
            let within = (start - page * PAGE) as usize..(end - page * PAGE) as usize;
            ((start - range.start) as usize..(end - range.start) as usize, &data[within])
        })
    }

    /// Reads from `offset` on, with zeroes past the end.
    pub fn read(&self, offset: u64, buf: &mut [u8]) {
        let mut done = 0;
        for (part, data) in self.held(offset..offset + buf.len() as u64) {
            buf[done..part.start].fill(0);
            buf[part.clone()].copy_from_slice(data);
            done = part.end;
        }
        buf[done..].fill(0);
    }

    /// The bytes of a range, with zeroes past the end.
    pub fn bytes(&self, range: Range<u64>) -> Vec<u8> {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        for (part, data) in self.held(range) {
            bytes[part].copy_from_slice(data);
        }
        bytes
    }

    /// All bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        self.bytes(0..self.length)
    }

    /// Whether a range holds these bytes.
    pub fn holds(&self, offset: u64, bytes: &[u8]) -> bool {
        let zero = |bytes: &[u8]| first_other_than(0, bytes).is_none();
        let mut done = 0;
        for (part, data) in self.held(offset..offset + bytes.len() as u64) {
            if !zero(&bytes[done..part.start]) || bytes[part.clone()] != *data {
                return false;
            }
            done = part.end;
        }
        zero(&bytes[done..])
    }

    fn page(&mut self, page: u64) -> &mut Page {
        Arc::make_mut(self.pages.entry(page).or_insert_with(|| Arc::new([0; PAGE as usize])))
    }

    /// Writes at `offset`; the content grows where needed.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        let end = offset + bytes.len() as u64;
        let mut done = 0;
        for (page, within) in parts(offset..end) {
            let part = &bytes[done..done + within.len()];
            done += within.len();
            self.page(page)[within].copy_from_slice(part);
        }
        if !bytes.is_empty() {
            self.length = self.length.max(end);
        }
    }

    /// Fills a range with a byte; the content grows where needed.
    pub fn fill(&mut self, range: Range<u64>, byte: u8) {
        if range.is_empty() {
            return;
        }
        self.length = self.length.max(range.end);
        if byte == 0 {
            self.clear(range);
            return;
        }
        for (page, within) in parts(range) {
            self.page(page)[within].fill(byte);
        }
    }

    /// Makes a range zero, freeing whole pages.
    fn clear(&mut self, range: Range<u64>) {
        let pages = range.start / PAGE..range.end.div_ceil(PAGE);
        let touched: Vec<u64> = self.pages.range(pages).map(|(page, _)| *page).collect();
        for page in touched {
            let start = range.start.max(page * PAGE);
            let end = range.end.min((page + 1) * PAGE);
            if end - start == PAGE {
                self.pages.remove(&page);
            } else {
                self.page(page)[(start % PAGE) as usize..][..(end - start) as usize].fill(0);
            }
        }
    }

    /// Sets the length; added bytes read as zeroes.
    pub fn set_len(&mut self, length: u64) {
        if length < self.length {
            self.clear(length..self.length.next_multiple_of(PAGE));
        }
        self.length = length;
    }

    /// The parts that may hold something other than zeroes, in order, in whole pages.
    pub fn data(&self) -> impl Iterator<Item = Range<u64>> {
        self.pages.keys().map(|page| page * PAGE..((page + 1) * PAGE).min(self.length))
    }

    /// The first byte that differs from the other's, or the shorter length.
    pub fn first_difference(&self, other: &Self) -> Option<u64> {
        let mut pages: Vec<u64> = self.pages.keys().chain(other.pages.keys()).copied().collect();
        pages.sort_unstable();
        pages.dedup();
        for page in pages {
            let (mine, theirs) = (self.pages.get(&page), other.pages.get(&page));
            if let (Some(mine), Some(theirs)) = (mine, theirs)
                && Arc::ptr_eq(mine, theirs)
            {
                continue;
            }
            let zeroes = [0; PAGE as usize];
            let (mine, theirs) = (mine.map_or(&zeroes, |p| p), theirs.map_or(&zeroes, |p| p));
            if let Some(at) = first_difference(mine, theirs) {
                return Some((page * PAGE + at as u64).min(self.length).min(other.length));
            }
        }
        (self.length != other.length).then(|| self.length.min(other.length))
    }
}

impl PartialEq for Content {
    fn eq(&self, other: &Self) -> bool {
        self.first_difference(other).is_none()
    }
}

impl Eq for Content {}

impl From<&[u8]> for Content {
    fn from(bytes: &[u8]) -> Self {
        let mut content = Self::zeroes(bytes.len() as u64);
        for (page, part) in (0..).zip(bytes.chunks(PAGE as usize)) {
            if first_other_than(0, part).is_some() {
                content.write(page * PAGE, part);
            }
        }
        content
    }
}

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes, {} pages", self.length, self.pages.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::SmallRng;
    use rand::{RngExt, SeedableRng};

    #[test]
    fn it_holds_what_a_vector_would() {
        let mut rng = SmallRng::seed_from_u64(1);
        let (mut content, mut bytes) = (Content::default(), Vec::new());
        for _ in 0..2000 {
            let start = rng.random_range(0..40_000_usize);
            let end = start + rng.random_range(0..10_000);
            let byte: u8 = rng.random_range(0..3);
            match rng.random_range(0..4) {
                0 => {
                    bytes.resize(start, 0);
                    content.set_len(start as u64);
                }
                1 => {
                    bytes.resize(bytes.len().max(end), 0);
                    bytes[start..end].fill(byte);
                    content.write(start as u64, &vec![byte; end - start]);
                }
                _ if start == end => {}
                _ => {
                    bytes.resize(bytes.len().max(end), 0);
                    bytes[start..end].fill(byte);
                    content.fill(start as u64..end as u64, byte);
                }
            }
            if content.len() < bytes.len() as u64 {
                // Nothing was written past the end.
                assert_eq!(start, end);
                bytes.truncate(content.len() as usize);
            }
            assert_eq!(content.to_vec(), bytes);
            assert!(content.holds(0, &bytes));
            assert_eq!(content, Content::from(&bytes[..]));
            if let Some(last) = bytes.last() {
                let mut other = bytes.clone();
                *other.last_mut().unwrap() = last ^ 1;
                let other = Content::from(&other[..]);
                assert_eq!(content.first_difference(&other), Some(bytes.len() as u64 - 1));
            }
        }
    }
}
