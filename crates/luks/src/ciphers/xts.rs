//! What XTS (IEEE 1619-2007, section 5) does beside the block cipher. The cipher calls it where the compiler may use
//! the instructions that the cipher itself uses; only what is inlined there uses them.

#![allow(
    clippy::inline_always,
    reason = "a function that is not inlined uses the oldest processor's instructions"
)]

use super::blocks::{BLOCK, BLOCKS, Block, PARALLEL};
use aes::cipher::consts::U16;
use aes::cipher::{
    BlockCipherDecBackend, BlockCipherDecClosure, BlockCipherEncBackend, BlockCipherEncClosure,
    BlockSizeUser, InOut, ParBlocks,
};

/// Sectors with their encrypted tweaks.
pub(super) struct Part<'a> {
    pub(super) tweaks: &'a [Block],
    pub(super) sectors: &'a mut [u8],
}

impl Part<'_> {
    /// Calls `apply` for the blocks of several sectors at a time, between the two passes with their masks.
    #[inline(always)]
    fn masked(self, mut apply: impl FnMut(&mut [Block])) {
        let parts = self.sectors.chunks_mut(PARALLEL * BLOCK);
        for (part, tweaks) in parts.zip(self.tweaks.chunks(PARALLEL / BLOCKS)) {
            let mut masks = [[0; 2 * BLOCKS]; PARALLEL / BLOCKS];
            for (masks, tweak) in masks.iter_mut().zip(tweaks) {
                fill_masks(u128::from_le_bytes((*tweak).into()), masks);
            }
            let (blocks, _) = Block::slice_as_chunks_mut(part);
            xor(blocks, masks.as_flattened());
            apply(blocks);
            xor(blocks, masks.as_flattened());
        }
    }
}

impl BlockSizeUser for Part<'_> {
    type BlockSize = U16;
}

impl BlockCipherEncClosure for Part<'_> {
    #[inline(always)]
    fn call<B: BlockCipherEncBackend<BlockSize = U16>>(self, backend: &B) {
        self.masked(
            #[inline(always)]
            |blocks| {
                let (parts, rest) = ParBlocks::<B>::slice_as_chunks_mut(blocks);
                for part in parts {
                    backend.encrypt_par_blocks(InOut::from(part));
                }
                for block in rest {
                    backend.encrypt_block(InOut::from(block));
                }
            },
        );
    }
}

impl BlockCipherDecClosure for Part<'_> {
    #[inline(always)]
    fn call<B: BlockCipherDecBackend<BlockSize = U16>>(self, backend: &B) {
        self.masked(
            #[inline(always)]
            |blocks| {
                let (parts, rest) = ParBlocks::<B>::slice_as_chunks_mut(blocks);
                for part in parts {
                    backend.decrypt_par_blocks(InOut::from(part));
                }
                for block in rest {
                    backend.decrypt_block(InOut::from(block));
                }
            },
        );
    }
}

/// The masks of a sector's blocks: the tweak times 1, x, x², … in the field of 2¹²⁸ elements, as pairs of words, the
/// lower one first. Several at a time, independently of each other: the first ones one by one, then each from the one
/// that many places before it.
#[inline(always)]
fn fill_masks(tweak: u128, masks: &mut [u64; 2 * BLOCKS]) {
    const LANES: usize = 8;
    let (mut low, mut high) = ([0; LANES], [0; LANES]);
    let mut mask = tweak;
    for (low, high) in low.iter_mut().zip(&mut high) {
        (*low, *high) = (mask as u64, (mask >> 64) as u64);
        mask = (mask << 1) ^ (0x87 * (mask >> 127));
    }
    for step in masks.chunks_exact_mut(2 * LANES) {
        for lane in 0..LANES {
            (step[2 * lane], step[2 * lane + 1]) = (low[lane], high[lane]);
            // What leaves at the top returns times x⁷ + x² + x + 1.
            let top = high[lane] >> (64 - LANES);
            high[lane] = high[lane] << LANES | low[lane] >> (64 - LANES);
            low[lane] = low[lane] << LANES ^ top << 7 ^ top << 2 ^ top << 1 ^ top;
        }
    }
}

#[inline(always)]
fn xor(blocks: &mut [Block], masks: &[u64]) {
    for (block, mask) in blocks.iter_mut().zip(masks.chunks_exact(2)) {
        let mask = u128::from(mask[0]) | u128::from(mask[1]) << 64;
        *block = (u128::from_le_bytes((*block).into()) ^ mask).to_le_bytes().into();
    }
}
