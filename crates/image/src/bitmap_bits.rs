//! The bits of a bitmap, in memory.

use crate::violated;
use isobath_qcow2::Bitmap;
use std::ops::Range;

/// The bits of a bitmap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BitmapBits {
    /// Guest bytes that the bitmap covers.
    size: u64,
    granularity_bits: u8,
    /// The least significant bit of a byte comes first.
    bits: Vec<u8>,
}

impl BitmapBits {
    /// The bits of a bitmap of a disk of `size` bytes, none of which is set. A bit stands for 2^`granularity_bits`
    /// bytes.
    pub fn new(size: u64, granularity_bits: u8) -> Self {
        let bytes = size.div_ceil(1 << granularity_bits).div_ceil(8);
        Self { size, granularity_bits, bits: vec![0; bytes as usize] }
    }

    /// The guest bytes that a bit stands for.
    pub fn granularity(&self) -> u64 {
        1 << self.granularity_bits
    }

    fn is_set(&self, bit: u64) -> bool {
        self.bits.get((bit / 8) as usize).is_some_and(|byte| byte >> (bit % 8) & 1 == 1)
    }

    /// The guest ranges of the bits that are set.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> {
        let (count, mut bit) = (self.bits.len() as u64 * 8, 0);
        std::iter::from_fn(move || {
            while bit < count && !self.is_set(bit) {
                // Bytes without a bit are many.
                let empty = bit % 8 == 0 && self.bits.get((bit / 8) as usize) == Some(&0);
                bit += if empty { 8 } else { 1 };
            }
            let start = bit;
            while bit < count && self.is_set(bit) {
                bit += 1;
            }
            let guest =
                start << self.granularity_bits..(bit << self.granularity_bits).min(self.size);
            (!guest.is_empty()).then_some(guest)
        })
    }

    /// Guest bytes that the bitmap covers.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// All bits, eight to a byte.
    pub(crate) fn bytes(&self) -> &[u8] {
        if self.bits.len() as u64 != self.size.div_ceil(self.granularity()).div_ceil(8) {
            violated("a bitmap has a bit for each part of its disk");
        }
        &self.bits
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bits
    }

    /// Sets the bits that describe any of these guest bytes.
    pub fn set(&mut self, guest: &Range<u64>) {
        let end = guest.end.min(self.size);
        if guest.start >= end {
            return;
        }
        let first = guest.start >> self.granularity_bits;
        let past = end.div_ceil(self.granularity());
        let (head, tail) = (0xff << (first % 8), 0xff_u8.checked_shr(8 - past as u32 % 8));
        // The bits of the last byte; all of them where the range ends with it.
        let tail = if past.is_multiple_of(8) { 0xff } else { tail.unwrap_or(0xff) };
        let bytes = (first / 8) as usize..past.div_ceil(8) as usize;
        let Some(bytes) = self.bits.get_mut(bytes) else {
            violated("the bits of a part of the disk are in its bitmap");
        };
        match bytes {
            [] => {}
            [only] => *only |= head & tail,
            [start, whole @ .., end] => {
                *start |= head;
                whole.fill(0xff);
                *end |= tail;
            }
        }
    }

    /// Makes the bitmap cover `size` bytes. Bits of what is new are not set.
    pub(crate) fn resize(&mut self, size: u64) {
        self.size = size;
        let bits = size.div_ceil(self.granularity());
        self.bits.resize(bits.div_ceil(8) as usize, 0);
        keep_bits(&mut self.bits, bits);
    }

    /// Sets the bits of another bitmap, too; its granularity may differ.
    pub(crate) fn merge(&mut self, other: &Self) -> std::result::Result<(), String> {
        if self.size != other.size {
            return Err(format!(
                "Bitmaps are of different sizes (destination size is {}, source size is {}) and \
                 can't be merged",
                self.size, other.size
            ));
        }
        if self.granularity_bits == other.granularity_bits {
            if self.bits.len() != other.bits.len() {
                violated("bitmaps of one size and granularity have as many bits");
            }
            for (byte, more) in self.bits.iter_mut().zip(&other.bits) {
                *byte |= more;
            }
        } else {
            other.ranges().for_each(|guest| self.set(&guest));
        }
        Ok(())
    }
}

/// Clears the bits from number `count` on.
pub(crate) fn keep_bits(bytes: &mut [u8], count: u64) {
    let whole = (count / 8) as usize;
    if let Some(rest) = bytes.get_mut(whole..) {
        if let [first, ..] = rest {
            *first &= !(0xff << (count % 8));
        }
        rest.iter_mut().skip(1).for_each(|byte| *byte = 0);
    }
}

/// Why a bitmap is not used.
pub(crate) fn inconsistent(bitmap: &Bitmap) -> String {
    format!(
        "Bitmap '{}' is inconsistent and cannot be used\nTry block-dirty-bitmap-remove to delete \
         this bitmap from disk",
        bitmap.name_text()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_of_one_granularity_become_those_of_another() {
        let mut fine = BitmapBits::new(1 << 20, 9);
        fine.set(&(1000..1001));
        fine.set(&((1 << 19) - 1..(1 << 19) + 1));
        let ranges: Vec<_> = fine.ranges().collect();
        assert_eq!(ranges, [512..1024, (1 << 19) - 512..(1 << 19) + 512]);
        let mut coarse = BitmapBits::new(1 << 20, 16);
        coarse.merge(&fine).unwrap();
        let ranges: Vec<_> = coarse.ranges().collect();
        assert_eq!(ranges, [0..1 << 16, (7 << 16)..(9 << 16)]);
        let mut back = BitmapBits::new(1 << 20, 9);
        back.merge(&coarse).unwrap();
        assert_eq!(back.ranges().collect::<Vec<_>>(), ranges);
        assert!(back.merge(&BitmapBits::new(1 << 21, 9)).is_err());
    }

    #[test]
    fn the_bits_of_a_range_are_set_and_no_others() {
        for size in [511, 4096, 9 * 4096 + 1, 64 << 10] {
            for start in (0..size + 700).step_by(300) {
                for length in [0, 1, 512, 513, 4095, 4096, 5000, 20_000, 70_000] {
                    let mut bits = BitmapBits::new(size, 9);
                    bits.set(&(start..start + length));
                    let wanted: Vec<_> = (0..size.div_ceil(512))
                        .map(|bit| {
                            length > 0 && bit * 512 < start + length && start < (bit + 1) * 512
                        })
                        .map(|set| set && start < size)
                        .collect();
                    let all = size.div_ceil(512).next_multiple_of(8);
                    let found: Vec<_> = (0..all).map(|bit| bits.is_set(bit)).collect();
                    assert_eq!(found[..wanted.len()], wanted, "{start} + {length} of {size}");
                    assert!(!found[wanted.len()..].contains(&true), "{start} + {length} of {size}");
                }
            }
        }
    }

    #[test]
    fn a_bitmap_that_grows_again_has_no_bit_from_before() {
        let mut bits = BitmapBits::new(100 << 10, 9);
        bits.set(&(0..100 << 10));
        bits.resize(10 << 10);
        bits.resize(100 << 10);
        assert!(bits.ranges().eq(std::iter::once(0..10 << 10)));
        bits.resize(0);
        assert_eq!(bits.ranges().next(), None);
    }

    #[test]
    fn the_last_range_ends_with_the_disk() {
        let mut bits = BitmapBits::new(1000, 9);
        bits.set(&(999..1000));
        assert_eq!(bits.ranges().next(), Some(512..1000));
        bits.bits.fill(0xff);
        assert_eq!(bits.ranges().next(), Some(0..1000));
    }

    #[test]
    #[should_panic(expected = "a bitmap has a bit for each part of its disk")]
    fn a_bitmap_of_another_size_is_noticed() {
        let bits = BitmapBits { size: 2 << 20, ..BitmapBits::new(1 << 20, 9) };
        let _ = bits.bytes();
    }

    #[test]
    #[should_panic(expected = "the bits of a part of the disk are in its bitmap")]
    fn a_bitmap_without_some_bits_is_noticed() {
        BitmapBits { size: 2 << 20, ..BitmapBits::new(1 << 20, 9) }.set(&(1 << 20..2 << 20));
    }

    #[test]
    #[should_panic(expected = "bitmaps of one size and granularity have as many bits")]
    fn bitmaps_with_other_numbers_of_bits_are_noticed() {
        let other = BitmapBits { size: 1 << 20, ..BitmapBits::new(2 << 20, 9) };
        BitmapBits::new(1 << 20, 9).merge(&other).unwrap();
    }
}
