//! Segments: for each of 64 pages, its place and the layers added since.

use super::SEGMENT_PAGES;
use super::block::{BlockPointer, Fields, pad};

const MAGIC: [u8; 4] = *b"ISEG";

/// How to find the owners of a page's units.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageRecord {
    /// The page, over the layers below `folded`; `None` if they own nothing.
    pub page: Option<BlockPointer>,
    /// Layers, from the base, that the page covers.
    pub folded: u32,
    /// Later layers that may own something here, ascending; their own tables decide.
    pub newer: Vec<u16>,
}

/// A segment of an index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The segment's number on the disk.
    pub number: u32,
    /// Its pages, at most 64; those after the last own nothing.
    pub pages: Vec<PageRecord>,
}

impl Segment {
    /// The segment's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend(MAGIC);
        out.extend(self.number.to_be_bytes());
        out.extend((self.pages.len() as u32).to_be_bytes());
        out.extend([0; 4]);
        for record in &self.pages {
            BlockPointer::write(record.page.as_ref(), &mut out);
            out.extend(record.folded.to_be_bytes());
            out.extend((record.newer.len() as u32).to_be_bytes());
            for layer in &record.newer {
                out.extend(layer.to_be_bytes());
            }
            pad(&mut out);
        }
        out
    }

    /// The segment in `bytes`, of an index over `covers` layers; `None` if it is not valid or not
    /// segment `number`.
    pub fn decode(bytes: &[u8], number: u32, covers: u32) -> Option<Self> {
        let mut fields = Fields::after(MAGIC, bytes)?;
        let found = fields.u32()?;
        let count = fields.u32()? as usize;
        fields.take(4)?;
        if found != number || count > SEGMENT_PAGES {
            return None;
        }
        let mut pages = Vec::with_capacity(count);
        for _ in 0..count {
            let mut page = None;
            fields.pointer(&mut page)?;
            let folded = fields.u32()?;
            let length = fields.u32()? as usize;
            let mut list = Fields::new(fields.take(length.checked_mul(2)?)?);
            let mut newer = Vec::with_capacity(length);
            let mut least = folded;
            for _ in 0..length {
                let layer = list.u16()?;
                if u32::from(layer) < least || u32::from(layer) >= covers {
                    return None;
                }
                least = u32::from(layer) + 1;
                newer.push(layer);
            }
            if folded > covers {
                return None;
            }
            fields.align()?;
            pages.push(PageRecord { page, folded, newer });
        }
        (fields.rest() == 0).then_some(Self { number, pages })
    }
}
