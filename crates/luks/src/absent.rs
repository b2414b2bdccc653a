//! Replaces the ciphers in a build without the feature `ciphers`: headers can be neither unlocked nor created.

use crate::algorithms::{CipherSpec, Hash};
use crate::error::{Error, Result};
use std::convert::Infallible;
use std::ops::{Deref, DerefMut};

/// Encrypts and decrypts the sectors of a disk. A build without ciphers has none.
#[derive(Clone, Debug)]
pub struct Cipher(Infallible);

impl Cipher {
    pub(crate) fn new(_: CipherSpec, _: &[u8]) -> Result<Self> {
        Err(Error::Absent)
    }

    /// Encrypts whole sectors in place.
    pub fn encrypt(&self, _: u64, _: &mut [u8]) {
        match self.0 {}
    }

    /// Decrypts whole sectors in place.
    pub fn decrypt(&self, _: u64, _: &mut [u8]) {
        match self.0 {}
    }
}

/// Stands for bytes that are zeroized when dropped; in this build they are never a key.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Zeroizing<T>(T);

impl<T> Zeroizing<T> {
    pub(crate) const fn new(bytes: T) -> Self {
        Self(bytes)
    }
}

impl<T> Deref for Zeroizing<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for Zeroizing<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

pub(crate) trait Zeroize {
    fn zeroize(&mut self);
}

impl Zeroize for [u8] {
    fn zeroize(&mut self) {
        self.fill(0);
    }
}

pub(crate) fn derive(_: Hash, _: &[u8], _: &[u8], _: u32, _: usize) -> Result<Zeroizing<Vec<u8>>> {
    Err(Error::Absent)
}

pub(crate) fn chain(_: Hash, _: &[u8], _: usize) -> Result<Zeroizing<Vec<u8>>> {
    Err(Error::Absent)
}

pub(crate) fn fill_random(_: &mut [u8]) -> Result<()> {
    Err(Error::Absent)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithms::{CipherAlgorithm, CipherMode, IvGenerator};

    #[test]
    fn without_ciphers_nothing_is_made_and_the_error_says_why() {
        let (algorithm, mode) = (CipherAlgorithm::Aes256, CipherMode::Xts);
        let spec = CipherSpec { algorithm, mode, iv: IvGenerator::Plain64 };
        let errors = [
            Cipher::new(spec, &[0; 64]).err(),
            derive(Hash::Sha256, b"secret", &[1; 32], 1000, 20).err(),
            chain(Hash::Sha256, &[0; 4000], 1).err(),
            fill_random(&mut [0; 16]).err(),
        ];
        for error in errors {
            let error = error.unwrap();
            assert!(matches!(error, Error::Absent));
            assert!(error.to_string().contains("the feature 'encryption'"), "{error}");
        }
    }
}
