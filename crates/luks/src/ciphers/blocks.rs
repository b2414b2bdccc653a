//! The blocks of a cipher.

use crate::algorithms::SECTOR;
use aes::cipher::Array;
use aes::cipher::consts::U16;

/// The length of a cipher's block in bytes.
pub(super) const BLOCK: usize = 16;

/// The number of blocks in a sector.
pub(super) const BLOCKS: usize = SECTOR / BLOCK;

/// The number of blocks passed to the cipher at a time: as many as the widest instructions process in parallel.
pub(super) const PARALLEL: usize = 64;

pub(super) type Block = Array<u8, U16>;
