//! LUKS version 1 as QEMU uses it, within qcow2 images (`encrypt.format=luks`) and for whole files (`luks`): the header
//! with its key slots, and the encryption of sectors. No I/O: the caller reads and writes the bytes.
//!
//! * [`Header::parse`] checks a header, which is not trusted; [`Header::unlock`] returns the [`MasterKey`] for a
//!   [`Secret`], [`Header::info`] the header's fields.
//! * [`CreateOptions::create`] creates a header area; [`CreateOptions::area_length`] returns the length that it will
//!   have.
//! * [`Header::amend`] adds and erases key slots, like `qemu-img amend`. It returns writes whose order makes it safe
//!   against crashes.
//! * [`Cipher`] encrypts and decrypts sectors.
//!
//! The format is that of the LUKS1 On-Disk Format Specification 1.2.3 ("the specification"). In a qcow2 image, the
//! header extension "Full disk encryption header pointer" locates the header area. A sector's number is its offset in
//! the image file divided by 512; in a LUKS device it is relative to the payload offset. A file that is such a device
//! begins with the header area, and its data follows at the payload offset.
//!
//! | supported | values |
//! |---|---|
//! | cipher | AES with keys of 128 and 256 bits |
//! | mode | XTS, CBC |
//! | initialization vectors | plain, plain64, ESSIV with SHA-256 |
//! | hash | SHA-1, SHA-224, SHA-256, SHA-384, SHA-512, RIPEMD-160 |
//!
//! Secrets and keys are zeroized when dropped, and not shown by `Debug`.
//!
//! The feature `ciphers` adds the ciphers and hashes. Without it, headers can be parsed, but neither unlocked nor
//! created ([`Error::Absent`]).

mod af;
mod algorithms;
mod amend;
// Included so that its test runs in every build.
#[cfg(all(test, feature = "ciphers"))]
#[allow(dead_code, unreachable_pub)]
mod absent;
#[cfg_attr(not(feature = "ciphers"), path = "absent.rs")]
mod ciphers;
mod create;
mod error;
mod header;
mod kdf;
mod secret;

pub use algorithms::{CipherAlgorithm, CipherMode, Hash, IvGenerator, SECTOR};
pub use amend::{Amend, Change, SlotState, Write};
pub use ciphers::Cipher;
pub use create::{CreateOptions, Created};
pub use error::{Error, Result};
pub use header::{HEADER_LENGTH, Header, Info, SLOTS, SlotInfo};
pub use kdf::{DEFAULT_ITER_TIME, MAX_STEPS};
pub use secret::{MAX_SECRET, MasterKey, Random, Secret, system_random};
