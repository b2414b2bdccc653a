//! The root of the index of a whole chain.

use super::SEGMENT_PAGES;
use super::block::{BlockPointer, Fields};

const MAGIC: [u8; 4] = *b"IALL";
const VERSION: u16 = 1;
const HEAD: usize = 24;
const MAX_LAYERS: u32 = 1 << 16;

/// The most bytes of a root of a whole chain: enough for a disk of 128 TiB with clusters of 64 KiB.
pub const MAX_WHOLE_ROOT_BYTES: usize = 1 << 20;

/// The most bytes of the segments and pages, which are made in memory: enough for 2 TiB in which no two clusters of 64
/// KiB continue each other.
pub const MAX_WHOLE_BYTES: usize = 256 << 20;

/// The root of an index of all layers of a chain, whose segments and pages are in a file of their own. It says nothing
/// of the layers that could tell whether they are the same: that is known by whoever keeps it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WholeRoot {
    /// log2 of the unit in bytes, 9 to 21.
    pub unit_bits: u32,
    /// Layers of the chain, all of which it describes; 1 to 65,536.
    pub layers: u32,
    /// Guest bytes described.
    pub size: u64,
    /// The segments that cover the guest bytes, where any layer owns something.
    pub segments: Vec<Option<BlockPointer>>,
}

impl WholeRoot {
    /// Bytes of a root with so many segments.
    pub const fn length(segments: usize) -> usize {
        HEAD + segments * BlockPointer::BYTES
    }

    /// Segments that cover so many guest bytes in units of this size.
    pub fn segments(size: u64, unit_bits: u32) -> u64 {
        size.div_ceil((SEGMENT_PAGES as u64) << super::page_bits(unit_bits))
    }

    /// The root's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(Self::length(self.segments.len()));
        out.extend(MAGIC);
        out.extend(VERSION.to_be_bytes());
        out.push(self.unit_bits as u8);
        out.push(0);
        out.extend(self.layers.to_be_bytes());
        out.extend((self.segments.len() as u32).to_be_bytes());
        out.extend(self.size.to_be_bytes());
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
        let layers = fields.u32()?;
        let count = fields.u32()?;
        let size = fields.u64()?;
        let valid = (9..=21).contains(&unit_bits)
            && (1..=MAX_LAYERS).contains(&layers)
            && i64::try_from(size).is_ok();
        if !valid || u64::from(count) != Self::segments(size, unit_bits) {
            return None;
        }
        let mut segments = Vec::new();
        for _ in 0..count {
            let mut segment: Option<BlockPointer> = None;
            fields.pointer(&mut segment)?;
            // All blocks are in the same file.
            if segment.is_some_and(|segment| segment.layer != 0) {
                return None;
            }
            segments.push(segment);
        }
        (fields.rest() == 0).then_some(Self { unit_bits, layers, size, segments })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::BlockHash;
    use crate::offset::HostOffset;
    use proptest::prelude::*;

    fn sample() -> WholeRoot {
        let pointer = |n: u64| BlockPointer {
            layer: 0,
            offset: HostOffset::new(n),
            length: 77,
            hash: BlockHash::of(&n.to_be_bytes()),
        };
        let segments = vec![Some(pointer(88)), None, Some(pointer(1 << 40))];
        WholeRoot { unit_bits: 16, layers: 1 << 16, size: (8 << 30) + 512, segments }
    }

    #[test]
    fn the_root_of_a_whole_chain_comes_back() {
        let bytes = sample().encode();
        assert_eq!(bytes.len(), WholeRoot::length(3));
        assert_eq!(WholeRoot::decode(&bytes), Some(sample()));
        assert_eq!(WholeRoot::segments(8 << 30, 16), 2);
        assert_eq!(WholeRoot::segments(0, 9), 0);
    }

    #[test]
    fn a_root_of_a_whole_chain_that_contradicts_itself_is_refused() {
        for change in [
            (|root| root.unit_bits = 8) as fn(&mut WholeRoot),
            |root| root.unit_bits = 22,
            |root| root.layers = 0,
            |root| root.layers += 1,
            |root| root.size = 1 << 63,
            |root| root.size = 1 << 40,
            |root| root.segments.truncate(2),
            |root| root.segments[0].as_mut().unwrap().layer = 1,
        ] {
            let mut root = sample();
            change(&mut root);
            assert_eq!(WholeRoot::decode(&root.encode()), None);
        }
        let bytes = sample().encode();
        for length in 0..bytes.len() {
            assert_eq!(WholeRoot::decode(&bytes[..length]), None, "{length}");
        }
        assert_eq!(WholeRoot::decode(&[&bytes[..], &[0]].concat()), None);
    }

    proptest! {
        #[test]
        fn any_change_of_a_whole_root_is_taken_or_refused(at in 0usize..120, value: u8) {
            let mut bytes = sample().encode();
            bytes[at] = value;
            let _ = WholeRoot::decode(&bytes);
        }
    }
}
