//! LUKS version 1 as QEMU uses it, within qcow2 images (`encrypt.format=luks`) and for whole files (`luks`): the header
//! with its key slots, and the encryption of sectors. No I/O: the caller reads and writes the bytes.
//!
//! * [`Header::parse`] checks a header, which is hostile until proved otherwise; [`Header::unlock`] gives the
//!   [`MasterKey`] for a [`Secret`], [`Header::info`] what the header says.
//! * [`CreateOptions::create`] makes a header area; [`CreateOptions::area_length`] tells its length without making one.
//! * [`Header::amend`] adds and erases key slots, like `qemu-img amend`, as writes in an order that a crash cannot
//!   harm.
//! * [`Cipher`] encrypts and decrypts sectors.
//!
//! The format is that of the LUKS1 On-Disk Format Specification 1.2.3 ("the specification"). In a qcow2 image the
//! header area is where the header extension "Full disk encryption header pointer" says; the number of a sector is its
//! offset in the image file, divided by 512, and not, as in a LUKS device, relative to the payload offset. In a file
//! that is such a device the area is its beginning, and the data follows at the payload offset.
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
//! The ciphers and hashes are the feature `ciphers`. Without it headers are parsed, and nothing is unlocked or made
//! ([`Error::Absent`]).

mod af;
mod algorithms;
mod amend;
// So that its test runs in every build.
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
