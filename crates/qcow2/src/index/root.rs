//! The root: what an index describes, and the places of its parts.

use super::block::{BlockPointer, Fields};
use super::{CHAPTER_LAYERS, LayerRecord, SEGMENT_PAGES};

const MAGIC: [u8; 4] = *b"IROT";
const VERSION: u16 = 1;
/// The most layers in a chain.
const MAX_LAYERS: u32 = 1 << 16;

/// The root of an index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Root {
    /// log2 of the bytes in a unit, the granularity of entries.
    pub unit_bits: u32,
    /// Layers below the image that holds the root.
    pub position: u32,
    /// Layers that the index describes, counted from the base; at most `position`.
    pub covers: u32,
    /// Guest bytes that it describes.
    pub size: u64,
    /// Chapters of layer records, 64 layers each, from the base.
    pub chapters: Vec<BlockPointer>,
    /// The records of the layers after the last chapter.
    pub tail: Vec<LayerRecord>,
    /// The segments, from the start of the disk; `None` where no layer owns anything.
    pub segments: Vec<Option<BlockPointer>>,
}

impl Root {
    /// log2 of the guest bytes that a page describes.
    pub fn page_bits(&self) -> u32 {
        super::page_bits(self.unit_bits)
    }

    /// log2 of the guest bytes that a segment describes.
    pub fn segment_bits(&self) -> u32 {
        self.page_bits() + SEGMENT_PAGES.trailing_zeros()
    }

    /// The root's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend(MAGIC);
        out.extend(VERSION.to_be_bytes());
        out.push(self.unit_bits as u8);
        out.push(0);
        out.extend(self.position.to_be_bytes());
        out.extend(self.covers.to_be_bytes());
        out.extend(self.size.to_be_bytes());
        out.extend((self.chapters.len() as u32).to_be_bytes());
        out.extend((self.segments.len() as u32).to_be_bytes());
        for chapter in &self.chapters {
            BlockPointer::write(Some(chapter), &mut out);
        }
        for record in &self.tail {
            record.write(0, &mut out);
        }
        for segment in &self.segments {
            BlockPointer::write(segment.as_ref(), &mut out);
        }
        out
    }

    /// The root in `bytes`; `None` if it is not valid.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut fields = Fields::after(MAGIC, bytes)?;
        if fields.u16()? != VERSION {
            return None;
        }
        let unit_bits = u32::from(fields.u8()?);
        fields.take(1)?;
        let position = fields.u32()?;
        let covers = fields.u32()?;
        let size = fields.u64()?;
        let chapter_count = fields.u32()? as usize;
        let segment_count = fields.u32()?;
        let valid = (9..=21).contains(&unit_bits)
            && covers <= position
            && position < MAX_LAYERS
            && i64::try_from(size).is_ok()
            && chapter_count == covers as usize / CHAPTER_LAYERS;
        let mut root = Self {
            unit_bits,
            position,
            covers,
            size,
            chapters: Vec::new(),
            tail: Vec::new(),
            segments: Vec::new(),
        };
        if !valid || u64::from(segment_count) != size.div_ceil(1 << root.segment_bits()) {
            return None;
        }
        for _ in 0..chapter_count {
            let mut chapter = None;
            fields.pointer(&mut chapter)?;
            root.chapters.push(chapter?);
        }
        root.tail = LayerRecord::read_all(&mut fields, covers as usize % CHAPTER_LAYERS)?;
        for _ in 0..segment_count {
            let mut segment = None;
            fields.pointer(&mut segment)?;
            root.segments.push(segment);
        }
        (fields.rest() == 0).then_some(root)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::{BlockHash, LayerStamp, PageRecord, RecordedFormat, Segment};
    use crate::offset::HostOffset;
    use proptest::prelude::*;

    fn pointer(layer: u16) -> BlockPointer {
        BlockPointer {
            layer,
            offset: HostOffset::new(0x10_0000),
            length: 77,
            hash: BlockHash::of(&[1, 2]),
        }
    }

    fn record(n: u32) -> LayerRecord {
        LayerRecord {
            name: format!("layer-{n}.qcow2"),
            format: if n == 0 { RecordedFormat::Raw } else { RecordedFormat::Qcow2 },
            stamp: (!n.is_multiple_of(3)).then_some(LayerStamp {
                length: 1 << 20,
                modified: -5,
                changed: i64::MAX,
                inode: 9,
            }),
            digest: n.is_multiple_of(2).then_some(BlockHash::of(b"x")),
        }
    }

    fn sample() -> Root {
        Root {
            unit_bits: 16,
            position: 131,
            covers: 130,
            size: (4 << 30) + 512,
            chapters: vec![pointer(64), pointer(128)],
            tail: vec![record(128), record(129)],
            segments: vec![Some(pointer(3)), None],
        }
    }

    #[test]
    fn a_root_and_its_parts_come_back() {
        let root = sample();
        assert_eq!(Root::decode(&root.encode()), Some(root));
        let records: Vec<_> = (0..64).map(record).collect();
        let bytes = LayerRecord::encode_chapter(&records, None);
        assert_eq!(LayerRecord::decode_chapter(&bytes, 64), Some(records));
        assert_eq!(LayerRecord::decode_chapter(&bytes, 63), None);
        let segment = Segment {
            number: 5,
            pages: vec![
                PageRecord { page: None, folded: 0, newer: vec![1, 7] },
                PageRecord { page: Some(pointer(6)), folded: 7, newer: Vec::new() },
            ],
        };
        assert_eq!(Segment::decode(&segment.encode(), 5, 130), Some(segment.clone()));
        assert_eq!(Segment::decode(&segment.encode(), 4, 130), None);
        // Lists only layers that the index describes, in order, and above the page.
        for newer in [vec![130], vec![7, 1], vec![1, 1]] {
            let pages = vec![PageRecord { page: None, folded: 0, newer }];
            assert_eq!(Segment::decode(&Segment { number: 5, pages }.encode(), 5, 130), None);
        }
        let below = vec![PageRecord { page: Some(pointer(6)), folded: 7, newer: vec![6] }];
        assert_eq!(Segment::decode(&Segment { number: 5, pages: below }.encode(), 5, 130), None);
    }

    #[test]
    fn roots_that_contradict_themselves_are_refused() {
        for change in [
            (|root| root.covers = 132) as fn(&mut Root),
            |root| root.unit_bits = 8,
            |root| root.position = 1 << 16,
            |root| root.size = 1 << 40,
            |root| root.chapters.truncate(1),
            |root| root.tail.truncate(1),
        ] {
            let mut root = sample();
            change(&mut root);
            assert_eq!(Root::decode(&root.encode()), None);
        }
    }

    proptest! {
        #[test]
        fn any_change_is_taken_or_refused(at in 0usize..400, value: u8) {
            let mut bytes = sample().encode();
            let at = at % bytes.len();
            bytes[at] = value;
            let _ = Root::decode(&bytes);
        }
    }
}
