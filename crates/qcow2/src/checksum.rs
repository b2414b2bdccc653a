//! CRC-32C (Castagnoli), with the processor's instructions if it has them.

/// Computes a CRC-32C incrementally.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Crc32c(u32);

impl Crc32c {
    /// The sum of `bytes`.
    pub fn of(bytes: &[u8]) -> u32 {
        crc32c::crc32c(bytes)
    }

    /// Continues from the sum of what has been added.
    pub(crate) fn after(sum: u32) -> Self {
        Self(sum)
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
}
