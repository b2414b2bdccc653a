//! `isobath map`, `compare`, `convert` and `resize` beside `qemu-img`'s, on random chains that QEMU
//! made.

mod chains;
mod compare;
mod convert;
mod map;
mod resize;
