//! The CRC-32C of any part of an area.

use super::BLOCK;
use crate::checksum::Crc32c;

/// The sums of any parts of an area, each in a time independent of the part's length: an area may be full of long,
/// damaged records.
pub(super) struct Sums<'a> {
    area: &'a [u8],
    /// The sum of everything before each block.
    before: Vec<u32>,
}

impl<'a> Sums<'a> {
    pub(super) fn new(area: &'a [u8]) -> Self {
        let mut sum = Crc32c::default();
        let before = area.chunks(BLOCK).map(|block| {
            let before = sum.finish();
            sum.update(block);
            before
        });
        let before = before.collect();
        Self { area, before }
    }

    /// The sum of `area[from..to]`; `None` if that is not in the area.
    pub(super) fn of(&self, from: usize, to: usize) -> Option<u32> {
        let length = to.checked_sub(from)?;
        if length < 2 * BLOCK {
            return self.area.get(from..to).map(Crc32c::of);
        }
        // The sum of A and B together is the sum of A, shifted by B's length, xor the sum of B.
        Some(crc32c::crc32c_combine(self.up_to(from)?, 0, length) ^ self.up_to(to)?)
    }

    /// The sum of `area[..to]`.
    fn up_to(&self, to: usize) -> Option<u32> {
        // The end may be that of the last block.
        let block = (to / BLOCK).min(self.before.len().checked_sub(1)?);
        let mut sum = Crc32c::after(*self.before.get(block)?);
        sum.update(self.area.get(block * BLOCK..to)?);
        Some(sum.finish())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_of_any_part_is_found() {
        let area: Vec<u8> = (0..5 * BLOCK).map(|n| (n * n / 7) as u8).collect();
        let sums = Sums::new(&area);
        for from in [0, 1, 8, 4095, 4096, 4104, 8192, 20479, 20480] {
            for to in [0, 64, 8191, 8192, 8200, 12288, 12289, 20479, 20480] {
                let expected = (from <= to).then(|| Crc32c::of(&area[from.min(to)..to]));
                assert_eq!(sums.of(from, to), expected, "{from} {to}");
            }
        }
        assert_eq!(sums.of(0, 20481), None);
        assert_eq!(Sums::new(&[]).of(0, 0), Some(0));
        assert_eq!(Sums::new(&[]).of(0, 9000), None);
    }
}
