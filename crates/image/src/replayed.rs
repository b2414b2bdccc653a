//! The overlay of a journal in use on an image's file.

use crate::Result;
use isobath_qcow2::embedded::LEAD;
use isobath_qcow2::journal::Content;
use isobath_storage::{IoBuf, Storage, ZeroMode};
use std::collections::BTreeMap;
use std::ops::Range;

/// Bytes read or written at once.
pub(crate) const PIECE: u64 = 1 << 20;
/// Ranges with less between them are written together.
const NEAR: u64 = 4096;

/// The contents that a journal demands of a file, overlaid on what is read from it.
#[derive(Clone, Debug, Default)]
pub struct Replayed {
    /// By offset; they do not overlap.
    ranges: BTreeMap<u64, Content>,
    /// The plain contents of embedded lead blocks, by offset, which take precedence.
    leads: BTreeMap<u64, Box<[u8]>>,
}

impl Replayed {
    /// The contents of records, by offset.
    pub fn of(ranges: BTreeMap<u64, Content>) -> Self {
        Self { ranges, leads: BTreeMap::new() }
    }

    /// The number of ranges, and of lead blocks.
    pub fn counts(&self) -> (usize, usize) {
        (self.ranges.len(), self.leads.len())
    }

    /// The lead blocks, by offset.
    pub fn into_leads(self) -> Vec<(u64, Box<[u8]>)> {
        self.leads.into_iter().collect()
    }

    /// The end of the last range: the file is considered at least this long.
    pub fn end(&self) -> u64 {
        self.ranges.last_key_value().map_or(0, |(at, content)| at + length(content))
    }

    /// Whether any of it is in a range of the file.
    pub fn touches(&self, at: u64, length_of: u64) -> bool {
        let end = at.saturating_add(length_of);
        let before = self.ranges.range(..end).next_back();
        let lead = self.leads.range(..end).next_back();
        before.is_some_and(|(start, content)| start + length(content) > at)
            || lead.is_some_and(|(start, bytes)| start + bytes.len() as u64 > at)
    }

    /// Ranges within `range` that hold bytes, in order.
    pub fn bytes_in(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let before = self.ranges.range(..range.start).next_back();
        let inside = self.ranges.range(range.start..range.end.max(range.start));
        before.into_iter().chain(inside).filter_map(move |(&at, content)| {
            let Content::Bytes(bytes) = content else { return None };
            let part = at.max(range.start)..(at + bytes.len() as u64).min(range.end);
            (!part.is_empty()).then_some(part)
        })
    }

    /// Overlays `bytes`, which were read from `at`.
    pub fn put_over(&self, at: u64, bytes: &mut [u8]) {
        self.put_ranges(at, bytes);
        let end = at + bytes.len() as u64;
        for (&start, lead) in self.leads.range(at.saturating_sub(LEAD as u64)..end) {
            let (from, to) = (start.max(at), (start + lead.len() as u64).min(end));
            if from < to {
                bytes[(from - at) as usize..(to - at) as usize]
                    .copy_from_slice(&lead[(from - start) as usize..(to - start) as usize]);
            }
        }
    }

    /// Like [`put_over`](Self::put_over), with lead blocks as they are stored.
    fn put_ranges(&self, at: u64, bytes: &mut [u8]) {
        let end = at + bytes.len() as u64;
        for (&start, content) in self.ranges.range(..end).rev() {
            let until = start + length(content);
            if until <= at {
                break;
            }
            let (from, to) = (start.max(at), until.min(end));
            let place = &mut bytes[(from - at) as usize..(to - at) as usize];
            match content {
                Content::Bytes(new) => {
                    place.copy_from_slice(&new[(from - start) as usize..(to - start) as usize]);
                }
                Content::Zeroes(_) => place.fill(0),
            }
        }
    }

    /// Adds bytes, replacing existing contents.
    pub fn put(&mut self, at: u64, bytes: Vec<u8>) {
        self.put_content(at, Content::Bytes(bytes));
    }

    /// Adds zeroes, replacing existing contents.
    pub fn put_zeroes(&mut self, at: u64, length: u64) {
        self.put_content(at, Content::Zeroes(length));
    }

    fn put_content(&mut self, at: u64, content: Content) {
        let end = at + length(&content);
        while let Some((&start, _)) = self.ranges.range(..end).next_back() {
            let until = start + self.ranges.get(&start).map_or(0, length);
            if until <= at {
                break;
            }
            let Some(old) = self.ranges.remove(&start) else { break };
            if until > end {
                self.ranges.insert(end, part(&old, end - start..until - start));
            }
            if start < at {
                self.ranges.insert(start, part(&old, 0..at - start));
            }
        }
        self.ranges.insert(at, content);
    }

    /// Adds the plain contents of an embedded lead block.
    pub fn put_lead(&mut self, at: u64, plain: Box<[u8]>) {
        self.leads.insert(at, plain);
    }
}

impl Replayed {
    /// Ranges of the file that cover everything, each to be written at once; nearby ranges are merged.
    pub fn spans(&self) -> Vec<Range<u64>> {
        let mut spans: Vec<Range<u64>> = Vec::new();
        for (&at, content) in &self.ranges {
            let end = at + length(content);
            match spans.last_mut() {
                Some(span) if at - span.end < NEAR && end - span.start <= PIECE => span.end = end,
                _ => spans.push(at..end),
            }
        }
        spans
    }

    /// How many bytes become zeroes, in total.
    pub fn zeroes(&self) -> u64 {
        let zeroes = self.ranges.values().map(|content| match content {
            Content::Zeroes(length) => *length,
            Content::Bytes(_) => 0,
        });
        zeroes.fold(0, u64::saturating_add)
    }

    /// Writes a span in place. Zeroes alone take no space.
    pub async fn write<S: Storage>(&self, storage: &S, span: Range<u64>) -> Result<()> {
        let (at, length) = (span.start, span.end - span.start);
        match self.ranges.get(&at) {
            Some(Content::Zeroes(all)) if *all == length => {
                let mode = ZeroMode { may_unmap: true, only_fast: false };
                return Ok(storage.write_zeroes(at, length, mode).await?);
            }
            // They fit into the area.
            Some(Content::Bytes(bytes)) if bytes.len() as u64 == length => {
                storage.write_at(at, IoBuf::copy_of(bytes)).await?;
                return Ok(());
            }
            _ => {}
        }
        let mut bytes = storage.read_at(at, IoBuf::zeroed(length as usize)).await?;
        self.put_ranges(at, &mut bytes);
        storage.write_at(at, bytes).await?;
        Ok(())
    }
}

fn part(content: &Content, range: Range<u64>) -> Content {
    match content {
        Content::Bytes(bytes) => {
            Content::Bytes(bytes[range.start as usize..range.end as usize].to_vec())
        }
        Content::Zeroes(_) => Content::Zeroes(range.end - range.start),
    }
}

fn length(content: &Content) -> u64 {
    match content {
        Content::Bytes(bytes) => bytes.len() as u64,
        Content::Zeroes(length) => *length,
    }
}
