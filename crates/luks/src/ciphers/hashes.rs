//! Derivation of keys with hashes.

use crate::algorithms::Hash;
use crate::error::Result;
use pbkdf2::pbkdf2_hmac;
use sha2::Digest;
use zeroize::{Zeroize, Zeroizing};

/// PBKDF2 with HMAC (RFC 8018, section 5.2). `iterations` must be at least 1.
#[allow(clippy::unnecessary_wraps, reason = "without ciphers it fails")]
pub(crate) fn derive(
    hash: Hash,
    secret: &[u8],
    salt: &[u8],
    iterations: u32,
    length: usize,
) -> Result<Zeroizing<Vec<u8>>> {
    let mut key = Zeroizing::new(vec![0; length]);
    let function = match hash {
        Hash::Sha1 => pbkdf2_hmac::<sha1::Sha1>,
        Hash::Sha224 => pbkdf2_hmac::<sha2::Sha224>,
        Hash::Sha256 => pbkdf2_hmac::<sha2::Sha256>,
        Hash::Sha384 => pbkdf2_hmac::<sha2::Sha384>,
        Hash::Sha512 => pbkdf2_hmac::<sha2::Sha512>,
        Hash::Ripemd160 => pbkdf2_hmac::<ripemd::Ripemd160>,
    };
    function(secret, salt, iterations, &mut key);
    Ok(key)
}

/// Combines all stripes but the last: each is combined with the result so far, which is then diffused.
#[allow(clippy::unnecessary_wraps, reason = "without ciphers it fails")]
pub(crate) fn chain(hash: Hash, stripes: &[u8], length: usize) -> Result<Zeroizing<Vec<u8>>> {
    let mut sum = Zeroizing::new(vec![0; length]);
    for stripe in stripes.chunks_exact(length) {
        sum.iter_mut().zip(stripe).for_each(|(to, from)| *to ^= from);
        match hash {
            Hash::Sha1 => diffuse::<sha1::Sha1>(&mut sum),
            Hash::Sha224 => diffuse::<sha2::Sha224>(&mut sum),
            Hash::Sha256 => diffuse::<sha2::Sha256>(&mut sum),
            Hash::Sha384 => diffuse::<sha2::Sha384>(&mut sum),
            Hash::Sha512 => diffuse::<sha2::Sha512>(&mut sum),
            Hash::Ripemd160 => diffuse::<ripemd::Ripemd160>(&mut sum),
        }
    }
    Ok(sum)
}

/// Replaces each part of a hash's length with the hash of its number and its contents.
fn diffuse<H: Digest>(block: &mut [u8]) {
    for (number, part) in block.chunks_mut(<H as Digest>::output_size()).enumerate() {
        let mut digest = H::new_with_prefix((number as u32).to_be_bytes());
        digest.update(&*part);
        let mut digest = digest.finalize();
        part.copy_from_slice(&digest[..part.len()]);
        digest.as_mut_slice().zeroize();
    }
}
