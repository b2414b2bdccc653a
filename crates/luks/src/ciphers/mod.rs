//! Ciphers, hashes and random bytes. A build without the feature `ciphers` uses `absent.rs` instead.

mod blocks;
mod hashes;
mod sectors;
mod xts;

pub(crate) use hashes::{chain, derive};
pub use sectors::Cipher;
pub(crate) use zeroize::{Zeroize, Zeroizing};

use crate::error::{Error, Result};
use std::io;

/// Fills the buffer with random bytes from the kernel.
pub(crate) fn fill_random(buffer: &mut [u8]) -> Result<()> {
    getrandom::fill(buffer).map_err(|error| Error::Random(io::Error::other(error)))
}
