//! The encryption of sectors.

use super::blocks::{BLOCK, BLOCKS, Block, PARALLEL};
use super::xts;
use crate::algorithms::{CipherAlgorithm, CipherMode, CipherSpec, IvGenerator, SECTOR};
use crate::error::{Error, Result};
use aes::cipher::consts::U16;
use aes::cipher::{BlockCipherDecrypt, BlockCipherEncrypt, BlockSizeUser, KeyInit};
use aes::{Aes128, Aes256, Aes256Enc};
use sha2::{Digest, Sha256};
use std::fmt;
use std::sync::Arc;
use zeroize::Zeroize;

/// Encrypts and decrypts the sectors of a disk. Clones share the keys, which are zeroized when the last clone is
/// dropped.
#[derive(Clone)]
pub struct Cipher(Arc<Keys>);

impl fmt::Debug for Cipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cipher")
    }
}

struct Keys {
    vectors: Vectors,
    mode: Mode,
}

#[allow(clippy::large_enum_variant, reason = "a disk has one, behind a pointer")]
enum Vectors {
    Plain,
    Plain64,
    Essiv(Aes256Enc),
}

#[allow(clippy::large_enum_variant, reason = "a disk has one, behind a pointer")]
enum Mode {
    Xts128 { data: Aes128, tweak: Aes128 },
    Xts256 { data: Aes256, tweak: Aes256 },
    Cbc128(Aes128),
    Cbc256(Aes256),
}

impl Cipher {
    /// The cipher of a header, with its master key or the key of a key slot.
    pub(crate) fn new(spec: CipherSpec, key: &[u8]) -> Result<Self> {
        let wrong = |_| {
            let reason = format!("the header's cipher needs {} bytes", spec.key_bytes());
            Error::invalid("the key's length", key.len(), reason)
        };
        let (first, second) = key.split_at(key.len() / 2);
        let mode = match (spec.mode, spec.algorithm) {
            (CipherMode::Xts, CipherAlgorithm::Aes128) => Mode::Xts128 {
                data: Aes128::new_from_slice(first).map_err(wrong)?,
                tweak: Aes128::new_from_slice(second).map_err(wrong)?,
            },
            (CipherMode::Xts, CipherAlgorithm::Aes256) => Mode::Xts256 {
                data: Aes256::new_from_slice(first).map_err(wrong)?,
                tweak: Aes256::new_from_slice(second).map_err(wrong)?,
            },
            (CipherMode::Cbc, CipherAlgorithm::Aes128) => {
                Mode::Cbc128(Aes128::new_from_slice(key).map_err(wrong)?)
            }
            (CipherMode::Cbc, CipherAlgorithm::Aes256) => {
                Mode::Cbc256(Aes256::new_from_slice(key).map_err(wrong)?)
            }
        };
        let vectors = match spec.iv {
            IvGenerator::Plain => Vectors::Plain,
            IvGenerator::Plain64 => Vectors::Plain64,
            IvGenerator::Essiv => {
                let mut hash = Sha256::digest(key);
                let cipher = Aes256Enc::new(&hash);
                hash.as_mut_slice().zeroize();
                Vectors::Essiv(cipher)
            }
        };
        Ok(Self(Arc::new(Keys { vectors, mode })))
    }

    /// Encrypts whole sectors in place. `sector` is the number of the first one: in a qcow2 image, its offset in the
    /// file divided by 512.
    ///
    /// # Panics
    /// If the length of `data` is not a multiple of [`SECTOR`].
    pub fn encrypt(&self, sector: u64, data: &mut [u8]) {
        let keys = &*self.0;
        match &keys.mode {
            Mode::Xts128 { data: key, tweak } => {
                keys.xts(tweak, sector, data, |part| key.encrypt_with_backend(part));
            }
            Mode::Xts256 { data: key, tweak } => {
                keys.xts(tweak, sector, data, |part| key.encrypt_with_backend(part));
            }
            Mode::Cbc128(key) => keys.encrypt_cbc(key, sector, data),
            Mode::Cbc256(key) => keys.encrypt_cbc(key, sector, data),
        }
    }

    /// Decrypts whole sectors in place; see [`encrypt`](Self::encrypt).
    ///
    /// # Panics
    /// If the length of `data` is not a multiple of [`SECTOR`].
    pub fn decrypt(&self, sector: u64, data: &mut [u8]) {
        let keys = &*self.0;
        match &keys.mode {
            Mode::Xts128 { data: key, tweak } => {
                keys.xts(tweak, sector, data, |part| key.decrypt_with_backend(part));
            }
            Mode::Xts256 { data: key, tweak } => {
                keys.xts(tweak, sector, data, |part| key.decrypt_with_backend(part));
            }
            Mode::Cbc128(key) => keys.decrypt_cbc(key, sector, data),
            Mode::Cbc256(key) => keys.decrypt_cbc(key, sector, data),
        }
    }
}

impl Keys {
    /// The initialization vectors of sectors from `first` on.
    fn vectors(&self, first: u64, into: &mut [Block]) {
        for (at, vector) in into.iter_mut().enumerate() {
            let mut number = first.wrapping_add(at as u64);
            if let Vectors::Plain = self.vectors {
                number &= u64::from(u32::MAX);
            }
            *vector = u128::from(number).to_le_bytes().into();
        }
        if let Vectors::Essiv(key) = &self.vectors {
            key.encrypt_blocks(into);
        }
    }

    /// XTS (IEEE 1619-2007, section 5) over whole sectors: `apply` encrypts or decrypts a part.
    fn xts<C>(&self, tweak: &C, sector: u64, data: &mut [u8], apply: impl Fn(xts::Part<'_>))
    where
        C: BlockCipherEncrypt + BlockSizeUser<BlockSize = U16>,
    {
        for (first, group) in groups(sector, data) {
            let mut tweaks = [Block::default(); PARALLEL];
            let tweaks = &mut tweaks[..group.len() / SECTOR];
            self.vectors(first, tweaks);
            tweak.encrypt_blocks(tweaks);
            apply(xts::Part { tweaks, sectors: group });
        }
    }

    /// In a sector, each block depends on the one before it, so one block of each sector is encrypted at a time.
    fn encrypt_cbc<C>(&self, key: &C, sector: u64, data: &mut [u8])
    where
        C: BlockCipherEncrypt + BlockSizeUser<BlockSize = U16>,
    {
        for (first, group) in groups(sector, data) {
            let mut chained = [Block::default(); PARALLEL];
            let chained = &mut chained[..group.len() / SECTOR];
            self.vectors(first, chained);
            let (blocks, _) = Block::slice_as_chunks_mut(group);
            for at in 0..BLOCKS {
                for (number, block) in chained.iter_mut().enumerate() {
                    *block = xored(block, &blocks[number * BLOCKS + at]);
                }
                key.encrypt_blocks(chained);
                for (number, block) in chained.iter().enumerate() {
                    blocks[number * BLOCKS + at] = *block;
                }
            }
        }
    }

    fn decrypt_cbc<C>(&self, key: &C, sector: u64, data: &mut [u8])
    where
        C: BlockCipherDecrypt + BlockSizeUser<BlockSize = U16>,
    {
        for (first, group) in groups(sector, data) {
            let mut vectors = [Block::default(); PARALLEL];
            let vectors = &mut vectors[..group.len() / SECTOR];
            self.vectors(first, vectors);
            let parts = group.chunks_mut(PARALLEL * BLOCK);
            for (part, vectors) in parts.zip(vectors.chunks(PARALLEL / BLOCKS)) {
                let (blocks, _) = Block::slice_as_chunks_mut(part);
                let mut encrypted = [Block::default(); PARALLEL];
                let encrypted = &mut encrypted[..blocks.len()];
                encrypted.copy_from_slice(blocks);
                key.decrypt_blocks(blocks);
                for (at, block) in blocks.iter_mut().enumerate() {
                    let before =
                        if at % BLOCKS == 0 { &vectors[at / BLOCKS] } else { &encrypted[at - 1] };
                    *block = xored(block, before);
                }
            }
        }
    }
}

/// Splits data into groups of at most [`PARALLEL`] sectors, each with the number of its first sector.
fn groups(sector: u64, data: &mut [u8]) -> impl Iterator<Item = (u64, &mut [u8])> {
    assert!(data.len().is_multiple_of(SECTOR), "{} bytes are not whole sectors", data.len());
    let groups = data.chunks_mut(PARALLEL * SECTOR).enumerate();
    groups.map(move |(at, group)| (sector.wrapping_add((at * PARALLEL) as u64), group))
}

fn xored(one: &Block, other: &Block) -> Block {
    let (one, other) = ((*one).into(), (*other).into());
    (u128::from_ne_bytes(one) ^ u128::from_ne_bytes(other)).to_ne_bytes().into()
}
