//! Secrets, keys and random bytes.

use crate::ciphers::{Zeroize, Zeroizing, fill_random};
use crate::error::{Error, Result};
use std::fmt;

/// The maximum length of a [`Secret`] in bytes.
pub const MAX_SECRET: usize = 64 << 10;

/// A passphrase, exactly as given, including a final newline. Zeroized when dropped.
pub struct Secret(Zeroizing<Vec<u8>>);

impl Secret {
    /// A passphrase with these bytes, which are zeroized if they are refused.
    ///
    /// # Errors
    /// If it is longer than [`MAX_SECRET`], is not UTF-8 or contains a NUL byte. QEMU refuses the latter two as well,
    /// and could not open an image that needs such a passphrase.
    pub fn new(bytes: Vec<u8>) -> Result<Self> {
        let bytes = Zeroizing::new(bytes);
        if bytes.len() > MAX_SECRET {
            return Err(Error::Secret("the secret is longer than 64 KiB"));
        }
        if bytes.contains(&0) || std::str::from_utf8(&bytes).is_err() {
            return Err(Error::Secret("the secret is not valid UTF-8 without NUL bytes"));
        }
        Ok(Self(bytes))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// The key that encrypts a disk's data; each key slot holds a copy. Zeroized when dropped.
pub struct MasterKey(Zeroizing<Vec<u8>>);

impl MasterKey {
    pub(crate) fn new(bytes: Zeroizing<Vec<u8>>) -> Self {
        Self(bytes)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for MasterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MasterKey")
    }
}

/// A source of random bytes for keys and salts, which fills the buffer. Outside tests, this is [`system_random`].
pub type Random<'a> = dyn FnMut(&mut [u8]) -> Result<()> + 'a;

/// Random bytes from the kernel.
///
/// # Errors
/// If the kernel returns an error.
pub fn system_random(buffer: &mut [u8]) -> Result<()> {
    fill_random(buffer).inspect_err(|_| buffer.zeroize())
}

/// Random bytes that must be kept secret.
pub(crate) fn random_secret(length: usize, random: &mut Random<'_>) -> Result<Zeroizing<Vec<u8>>> {
    let mut bytes = Zeroizing::new(vec![0; length]);
    random(&mut bytes)?;
    Ok(bytes)
}
