//! The format against QEMU's images, in one program.

#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod common;
mod created_images_satisfy_qemu;
mod headers_of_qemu_images;
mod journals_keep_qemu_out;
mod tables_of_qemu_images;
