//! CRC-32C (Castagnoli), with the processor's instructions if it has them.

use super::BLOCK;

/// Computes a CRC-32C incrementally.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Crc32c(u32);

impl Crc32c {
    /// The sum of `bytes`.
    pub fn of(bytes: &[u8]) -> u32 {
        crc32c::crc32c(bytes)
    }

    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0 = crc32c::crc32c_append(self.0, bytes);
    }

    /// The sum of everything added.
    pub fn finish(&self) -> u32 {
        self.0
    }
}

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
        let mut sum = Crc32c(*self.before.get(block)?);
        sum.update(self.area.get(block * BLOCK..to)?);
        Some(sum.finish())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_is_castagnolis_also_in_pieces() {
        // RFC 3720, B.4.
        assert_eq!(Crc32c::of(&[0; 32]), 0x8a91_36aa);
        assert_eq!(Crc32c::of(&[0xff; 32]), 0x62a8_ab43);
        let mut pieces = Crc32c::default();
        pieces.update(b"1234");
        pieces.update(b"");
        pieces.update(b"56789");
        assert_eq!(pieces.finish(), 0xe306_9283);
    }

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
