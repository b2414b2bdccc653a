//! The anti-forensic splitter (the specification's section 2.4): splits a key into many stripes, all of which are
//! needed to recover it.

use crate::algorithms::Hash;
use crate::ciphers::{Zeroizing, chain};
use crate::error::Result;
use crate::secret::Random;

/// The number of stripes in every key slot.
pub(crate) const STRIPES: usize = 4000;

/// Splits a key into [`STRIPES`] stripes: random ones, and a last one that combines with them to the key.
pub(crate) fn split(hash: Hash, key: &[u8], random: &mut Random<'_>) -> Result<Zeroizing<Vec<u8>>> {
    let mut stripes = Zeroizing::new(vec![0; key.len() * STRIPES]);
    let (most, last) = stripes.split_at_mut(key.len() * (STRIPES - 1));
    random(most)?;
    let sum = chain(hash, most, key.len())?;
    for ((byte, key), sum) in last.iter_mut().zip(key).zip(sum.iter()) {
        *byte = key ^ sum;
    }
    Ok(stripes)
}

/// Recovers the key of `length` bytes from its stripes.
pub(crate) fn merge(hash: Hash, stripes: &[u8], length: usize) -> Result<Zeroizing<Vec<u8>>> {
    let (most, last) = stripes.split_at(stripes.len() - length);
    let mut key = chain(hash, most, length)?;
    xor(&mut key, last);
    Ok(key)
}

fn xor(to: &mut [u8], from: &[u8]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to ^= from;
    }
}
