//! Test support: QEMU as oracle, real guests, chains of images, and a model of their contents.
//!
//! For tests, benchmarks and the demo; no part of the program depends on it. Everything here panics if a test should
//! fail, with a message that contains the command and its output. A missing program fails the test and names the
//! package to install ([`tools::require`]); no test is skipped.
//!
//! * [`tools`] finds programs, [`process`] runs them, [`qemu`] runs QEMU's and checks images with them.
//! * [`daemon`] is a `qemu-storage-daemon` for any number of images, [`nbd`] is an NBD client.
//! * [`ops`] are the operations of a test, [`model`] predicts the contents of an image after them, [`bytes`] compares
//!   contents, [`chain`] builds backing chains by running operations with any mixture of programs.
//! * [`guest`] boots a Linux kernel on a disk and runs a script there, [`fs`] creates and checks the file systems for
//!   it, [`scenario`] is a guest's root disk on a long chain.
//! * [`certificates`] are for connections with TLS.
//! * [`descriptors`] are sent to other processes, [`loop_device`] makes a file a block device.
//! * [`forbidden`] runs a program to which the kernel refuses system calls.
//! * [`fuse`] recognizes the errors that follow the end of a FUSE server.
//! * [`seed`] makes random tests repeatable, [`evidence`] records what a campaign of them did.
//!
//! Environment variables: `ISOBATH_SEED` repeats a random test, `ISOBATH_QEMU_DIR` chooses another QEMU
//! (`scripts/qemu10` unpacks one), `ISOBATH_GUEST_DIR` and `ISOBATH_GUEST_UBLK_DIR` other kernels than `target/guest`
//! and `target/guest-ublk`, `ISOBATH_GUEST_ACCEL` another accelerator than `tcg,thread=single`; `ISOBATH_EVIDENCE`
//! names the file for the results of campaigns.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by a panic")]

pub mod bytes;
pub mod certificates;
pub mod chain;
pub mod daemon;
pub mod descriptors;
pub mod evidence;
pub mod forbidden;
pub mod fs;
pub mod fuse;
pub mod guest;
pub mod locks;
pub mod loop_device;
pub mod model;
pub mod nbd;
pub mod ops;
pub mod process;
pub mod qemu;
pub mod scenario;
pub mod seed;
pub mod tools;

use process::PATIENCE;
use std::hash::{DefaultHasher, Hasher};
use std::thread;
use std::time::{Duration, Instant};

/// Waits until `condition` holds; `what` describes it in the failure message.
///
/// # Panics
/// If it does not hold within [`PATIENCE`].
#[track_caller]
pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    until_some(what, || condition().then_some(()));
}

/// Waits until `look` finds something; `what` describes it in the failure message.
///
/// # Panics
/// If it does not find anything within [`PATIENCE`].
#[track_caller]
pub fn until_some<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "waited {PATIENCE:?} for {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// A hash that stands for bytes in a message that would be too long with them.
pub fn digest(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

/// Arguments of mixed types (`&str`, `String`, `&Path`, ...) as a `Vec<OsString>`.
///
/// ```
/// let image = std::path::Path::new("/tmp/a b.qcow2");
/// assert_eq!(isobath_testkit::args!["info", image].len(), 2);
/// ```
#[macro_export]
macro_rules! args {
    ($($argument:expr),* $(,)?) => {
        vec![$(::std::ffi::OsString::from($argument)),*]
    };
}
