//! What the fuzzers run: everything that reads bytes from an image or a peer, with the properties
//! that must hold whatever the bytes are. A target that returns has found nothing.
//!
//! `make fuzz` runs them under libFuzzer; the tests run them on damaged seeds.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a finding is a panic")]

mod embedded;
mod format;
mod formats;
mod fuse;
mod image;
mod journal;
mod luks;
mod nbd;
mod nbd_session;
mod qmp;
mod remote;
mod restart_log;
mod seeds;
mod tls;
mod tls_channel;
mod vhost_messages;
mod vhost_user;

pub use embedded::embedded;
pub use format::{bitmaps, compressed, extensions, header, index, l1_l2, refcount, snapshots};
pub use formats::formats;
pub use fuse::fuse;
pub use image::image;
pub use journal::journal;
pub use luks::luks;
pub use nbd::{nbd_handshake, nbd_request, nbd_starttls};
pub use nbd_session::nbd_session;
pub use qmp::{job_file, qmp};
pub use remote::remote;
pub use restart_log::restart_log;
pub use seeds::seeds;
pub use tls::tls_name;
pub use tls_channel::tls_channel;
pub use vhost_messages::vhost_messages;
pub use vhost_user::vhost_user;

/// A fuzz target.
pub type Target = fn(&[u8]);

/// Every target with its name, as in `fuzz_targets/`.
pub const TARGETS: &[(&str, Target)] = &[
    ("header", header),
    ("extensions", extensions),
    ("l1_l2", l1_l2),
    ("refcount", refcount),
    ("compressed", compressed),
    ("snapshots", snapshots),
    ("bitmaps", bitmaps),
    ("index", index),
    ("journal", journal),
    ("embedded", embedded),
    ("nbd_handshake", nbd_handshake),
    ("nbd_request", nbd_request),
    ("nbd_session", nbd_session),
    ("vhost_user", vhost_user),
    ("image", image),
    ("fuse", fuse),
    ("qmp", qmp),
    ("job_file", job_file),
    ("restart_log", restart_log),
    ("vhost_messages", vhost_messages),
    ("formats", formats),
    ("luks", luks),
    ("nbd_starttls", nbd_starttls),
    ("tls_name", tls_name),
    ("remote", remote),
    ("tls_channel", tls_channel),
];

/// Takes bytes for the target's own choices from the front of its input; zeroes when it runs out.
fn take<const N: usize>(input: &mut &[u8]) -> [u8; N] {
    let mut bytes = [0; N];
    let (taken, rest) = input.split_at(N.min(input.len()));
    bytes[..taken.len()].copy_from_slice(taken);
    *input = rest;
    bytes
}
