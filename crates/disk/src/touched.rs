//! Parts of a disk for which no layer has a table, so that a query of a large, empty disk need not examine each layer.

use isobath_chain::chain::Chain;
use isobath_image::violated;
use isobath_storage::Storage;

/// The parts of a disk for which any layer has an L2 table.
pub struct Touched {
    /// log2 of the bytes in a part.
    bits: u32,
    /// A bit for each part.
    parts: Vec<u64>,
}

impl Touched {
    /// The maximum number of parts.
    const MOST_PARTS: u64 = 1 << 22;

    /// Reads the L1 tables of all layers once.
    pub fn new<S: Storage>(chain: &Chain<S>) -> Self {
        let size = chain.active().size();
        let spans = chain.layers().filter_map(|(_, layer)| layer.as_qcow2());
        let least = spans.map(|qcow2| qcow2.geometry.l1_entry_span()).min().unwrap_or(1 << 30);
        let mut bits = least.trailing_zeros();
        while size >> bits >= Self::MOST_PARTS {
            bits += 1;
        }
        let count = size.div_ceil(1 << bits);
        let mut touched = Self { bits, parts: vec![0; count.div_ceil(64) as usize] };
        for (_, layer) in chain.layers() {
            let visible = layer.visible();
            let Some(qcow2) = layer.as_qcow2() else {
                touched.touch(0, visible);
                continue;
            };
            let span = qcow2.geometry.l1_entry_span();
            for (index, _) in qcow2.l1.read().allocated() {
                let start = (index as u64).saturating_mul(span);
                touched.touch(start, start.saturating_add(span).min(visible));
            }
        }
        touched.check(size);
        touched
    }

    /// Checks that its parts are those of a disk of `size` bytes.
    fn check(&self, size: u64) {
        let parts = self.parts.len() as u64 * 64;
        if parts < size.div_ceil(1 << self.bits) {
            violated("the parts of a disk cover it");
        }
        if parts > Self::MOST_PARTS + 64 {
            violated("a disk has a limited number of parts");
        }
    }

    fn touch(&mut self, start: u64, end: u64) {
        let most = self.parts.len() as u64 * 64;
        for part in start >> self.bits..end.div_ceil(1 << self.bits).min(most) {
            if let Some(word) = self.parts.get_mut((part / 64) as usize) {
                *word |= 1 << (part % 64);
            }
        }
    }

    /// The start of the first touched part at or after `at`; past the end if there is none.
    pub fn next(&self, at: u64) -> u64 {
        let first = at >> self.bits;
        let mut mask = u64::MAX << (first % 64);
        for (index, word) in self.parts.iter().enumerate().skip((first / 64) as usize) {
            let found = word & mask;
            if found != 0 {
                return (index as u64 * 64 + u64::from(found.trailing_zeros())) << self.bits;
            }
            mask = u64::MAX;
        }
        u64::MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::must_panic;

    #[test]
    fn parts_cover_the_disk() {
        let touched = |bits, words| Touched { bits, parts: vec![0; words] };
        touched(4, 3).check(16 * 192);
        must_panic(|| touched(4, 3).check(16 * 192 + 1), "the parts of a disk cover it");
        let many = (Touched::MOST_PARTS / 64 + 2) as usize;
        must_panic(|| touched(4, many).check(1), "a disk has a limited number of parts");
    }

    #[test]
    fn the_next_touched_part_is_found() {
        let mut touched = Touched { bits: 4, parts: vec![0; 3] };
        assert_eq!(touched.next(0), u64::MAX);
        touched.touch(16 * 70 + 3, 16 * 71 + 1);
        assert_eq!(touched.next(0), 16 * 70);
        assert_eq!(touched.next(16 * 70 + 9), 16 * 70);
        assert_eq!(touched.next(16 * 71), 16 * 71);
        assert_eq!(touched.next(16 * 72), u64::MAX);
        touched.touch(16 * 191, u64::MAX);
        assert_eq!(touched.next(16 * 72), 16 * 191);
        assert_eq!(touched.next(1 << 20), u64::MAX);
    }
}
