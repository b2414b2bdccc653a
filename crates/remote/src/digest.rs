//! Digests of objects, and the checksums of a layer's blocks.

use crate::error::{Error, Result};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use sha2::{Digest as _, Sha256};
use std::fmt::{self, Write as _};

/// Bytes of a block, of which a layer's table has a checksum. The last block of a layer may be shorter.
pub const BLOCK: u64 = 256 << 10;

/// Bytes of a block's checksum.
pub(crate) const CHECKSUM: usize = 16;

/// The SHA-256 of an object; its name in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        let mut hasher = Hasher::default();
        hasher.update(bytes);
        hasher.finish()
    }

    /// The digest that is written so: 64 digits, without capitals.
    pub fn parse(text: &str) -> Option<Self> {
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Some(byte - b'0'),
            b'a'..=b'f' => Some(byte - b'a' + 10),
            _ => None,
        };
        let mut bytes = [0; 32];
        if text.len() != 64 {
            return None;
        }
        for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let &[high, low] = pair else { return None };
            *byte = digit(high)? << 4 | digit(low)?;
        }
        Some(Self(bytes))
    }

    /// The digest with these bytes.
    pub(crate) fn of_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    pub(crate) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        Self::parse(&text).ok_or_else(|| de::Error::custom("a digest has 64 digits, 0-9 and a-f"))
    }
}

/// Computes a digest piece by piece.
#[derive(Clone, Default)]
pub(crate) struct Hasher(Sha256);

impl Hasher {
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(crate) fn finish(self) -> Digest {
        Digest(self.0.finalize().into())
    }
}

/// The checksums of blocks, one after the other: a layer's table, or a part of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Table(Vec<u8>);

impl Table {
    /// Bytes of the table of a layer of this length.
    pub(crate) fn length(layer: u64) -> u64 {
        layer.div_ceil(BLOCK) * CHECKSUM as u64
    }

    pub(crate) fn new() -> Self {
        Self(Vec::new())
    }

    /// The checksums of some blocks, one after the other.
    pub(crate) fn of(checksums: Vec<u8>) -> Self {
        Self(checksums)
    }

    /// Adds the blocks of `bytes`: whole ones, or the last.
    pub(crate) fn extend(&mut self, bytes: &[u8]) {
        for block in bytes.chunks(BLOCK as usize) {
            self.0.extend_from_slice(&checksum(block));
        }
    }

    /// The first block of `bytes` that does not match, by its number from `first` on, the number of the first of them.
    pub(crate) fn mismatch(&self, first: u64, bytes: &[u8]) -> Option<u64> {
        let mut numbered = (first..).zip(bytes.chunks(BLOCK as usize));
        numbered.find(|(number, block)| !Self::matches(&self.0, *number, block)).map(|(n, _)| n)
    }

    /// Whether a block is the one that a table's bytes have at this number.
    pub(crate) fn matches(table: &[u8], number: u64, block: &[u8]) -> bool {
        let at = usize::try_from(number).ok().and_then(|number| number.checked_mul(CHECKSUM));
        let recorded = at.and_then(|at| table.get(at..at.checked_add(CHECKSUM)?));
        recorded == Some(&checksum(block)[..])
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

fn checksum(block: &[u8]) -> [u8; CHECKSUM] {
    let mut short = [0; CHECKSUM];
    for (to, from) in short.iter_mut().zip(blake3::hash(block).as_bytes()) {
        *to = *from;
    }
    short
}

/// A name that nobody else has chosen.
///
/// # Errors
/// The system has no random numbers.
pub(crate) fn unique() -> Result<String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)
        .map_err(|error| Error::Local(format!("cannot get random numbers: {error}")))?;
    let mut text = String::new();
    for byte in bytes {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_read_as_it_is_written_and_in_no_other_way() {
        let digest = Digest::of(b"abc");
        let text = digest.to_string();
        assert_eq!(text, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(Digest::parse(&text), Some(digest));
        for wrong in [&text[1..], &text.to_uppercase(), &format!("{text}0"), &"g".repeat(64), ""] {
            assert_eq!(Digest::parse(wrong), None, "{wrong}");
        }
        assert_eq!(Digest::parse(&"é".repeat(32)), None);
    }

    #[test]
    fn a_table_finds_the_block_that_differs() {
        let mut layer: Vec<u8> = (0..BLOCK * 2 + 5).map(|n| (n % 251) as u8).collect();
        let mut table = Table::new();
        table.extend(&layer);
        assert_eq!(table.bytes().len() as u64, Table::length(layer.len() as u64));
        assert_eq!(table.mismatch(0, &layer), None);
        assert_eq!(table.mismatch(2, &layer[BLOCK as usize * 2..]), None);
        layer[BLOCK as usize + 1] ^= 1;
        assert_eq!(table.mismatch(0, &layer), Some(1));
        assert_eq!(table.mismatch(3, b"more"), Some(3));
    }
}
