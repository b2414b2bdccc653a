//! The anti-forensic splitter (the specification's section 2.4): a key as many stripes, all of which are needed to
//! get it back.

use crate::algorithms::Hash;
use crate::error::Result;
use crate::secret::Random;
use sha2::Digest;
use zeroize::{Zeroize, Zeroizing};

/// Stripes of every key slot.
pub(crate) const STRIPES: usize = 4000;

/// Splits a key into [`STRIPES`] stripes: random ones, and one that makes the key from them.
pub(crate) fn split(hash: Hash, key: &[u8], random: &mut Random<'_>) -> Result<Zeroizing<Vec<u8>>> {
    let mut stripes = Zeroizing::new(vec![0; key.len() * STRIPES]);
    let (most, last) = stripes.split_at_mut(key.len() * (STRIPES - 1));
    random(most)?;
    let sum = chain(hash, most, key.len());
    for ((byte, key), sum) in last.iter_mut().zip(key).zip(sum.iter()) {
        *byte = key ^ sum;
    }
    Ok(stripes)
}

/// The key of `length` bytes that was split.
pub(crate) fn merge(hash: Hash, stripes: &[u8], length: usize) -> Zeroizing<Vec<u8>> {
    let (most, last) = stripes.split_at(stripes.len() - length);
    let mut key = chain(hash, most, length);
    xor(&mut key, last);
    key
}

/// All stripes but the last, each combined with the diffused ones before it.
fn chain(hash: Hash, stripes: &[u8], length: usize) -> Zeroizing<Vec<u8>> {
    let mut sum = Zeroizing::new(vec![0; length]);
    for stripe in stripes.chunks_exact(length) {
        xor(&mut sum, stripe);
        match hash {
            Hash::Sha1 => diffuse::<sha1::Sha1>(&mut sum),
            Hash::Sha224 => diffuse::<sha2::Sha224>(&mut sum),
            Hash::Sha256 => diffuse::<sha2::Sha256>(&mut sum),
            Hash::Sha384 => diffuse::<sha2::Sha384>(&mut sum),
            Hash::Sha512 => diffuse::<sha2::Sha512>(&mut sum),
            Hash::Ripemd160 => diffuse::<ripemd::Ripemd160>(&mut sum),
        }
    }
    sum
}

fn xor(to: &mut [u8], from: &[u8]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to ^= from;
    }
}

/// Replaces each part, of a hash's length, by the hash of its number and itself.
fn diffuse<H: Digest>(block: &mut [u8]) {
    for (number, part) in block.chunks_mut(<H as Digest>::output_size()).enumerate() {
        let mut digest = H::new_with_prefix((number as u32).to_be_bytes());
        digest.update(&*part);
        let mut digest = digest.finalize();
        part.copy_from_slice(&digest[..part.len()]);
        digest.as_mut_slice().zeroize();
    }
}
