//! The width of refcounts.

use crate::bytes;
use crate::error::FormatError;

/// The width of a refcount as the header gives it: the base-2 logarithm of its bits, 0 to 6.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RefcountOrder(u8);

impl RefcountOrder {
    /// 16 bits: the width of version 2 images and QEMU's default.
    pub const BITS_16: Self = Self(4);

    /// The width with this `refcount_order`.
    ///
    /// # Errors
    /// If it exceeds 6 (64 bits).
    pub fn new(order: u32) -> Result<Self, FormatError> {
        if order > 6 {
            return Err(FormatError::invalid(
                "refcount_order",
                order,
                "must not exceed 6 (64-bit refcounts)",
            ));
        }
        Ok(Self(order as u8))
    }

    /// The order, 0 to 6.
    #[inline]
    pub const fn get(self) -> u32 {
        self.0 as u32
    }

    /// The width in bits, 1 to 64.
    #[inline]
    pub const fn bits(self) -> u32 {
        1 << self.0
    }

    /// The largest refcount of this width.
    #[inline]
    pub const fn max(self) -> u64 {
        u64::MAX >> (64 - self.bits())
    }

    /// Refcount `index` of a refcount block's bytes; `None` past its end.
    #[inline]
    pub fn read(self, block: &[u8], index: usize) -> Option<u64> {
        match self.0 {
            0..=2 => {
                let (byte, shift) = self.place(index);
                Some(u64::from(block.get(byte)? >> shift) & self.max())
            }
            3 => block.get(index).map(|&byte| u64::from(byte)),
            4 => bytes::be16(block, index.checked_mul(2)?).map(u64::from),
            5 => bytes::be32(block, index.checked_mul(4)?).map(u64::from),
            _ => bytes::be64(block, index.checked_mul(8)?),
        }
    }

    /// Puts refcount `index` into a refcount block's bytes.
    ///
    /// # Errors
    /// If the value exceeds [`max`](Self::max), or the index is past the block's end. Nothing is
    /// written then.
    #[inline]
    pub fn write(self, block: &mut [u8], index: usize, value: u64) -> Result<(), FormatError> {
        if value > self.max() {
            return Err(FormatError::too_large(
                "refcount",
                value,
                format!("does not fit {} bits", self.bits()),
            ));
        }
        let done = match self.0 {
            0..=2 => {
                let (byte, shift) = self.place(index);
                block.get_mut(byte).map(|byte| {
                    *byte = *byte & !((self.max() as u8) << shift) | (value as u8) << shift;
                })
            }
            3 => block.get_mut(index).map(|byte| *byte = value as u8),
            4 => Self::put(block, index, (value as u16).to_be_bytes()),
            5 => Self::put(block, index, (value as u32).to_be_bytes()),
            _ => Self::put(block, index, value.to_be_bytes()),
        };
        done.ok_or_else(|| FormatError::invalid("refcount index", index, "is past the block's end"))
    }

    /// The byte and the shift of a refcount narrower than a byte: the least significant bits first.
    #[inline]
    const fn place(self, index: usize) -> (usize, u32) {
        let per_byte = 3 - self.0 as u32;
        (index >> per_byte, ((index & ((1 << per_byte) - 1)) as u32) << self.0)
    }

    fn put<const N: usize>(block: &mut [u8], index: usize, value: [u8; N]) -> Option<()> {
        *block.get_mut(index.checked_mul(N)?..)?.first_chunk_mut::<N>()? = value;
        Some(())
    }
}
