//! LUKS headers and encryption, compared with QEMU and with published vectors.

#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod amend;
mod create;
mod damage;
mod qemu;
mod support;
mod vectors;
