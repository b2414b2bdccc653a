#![doc = include_str!("../README.md")]
//!
//! # Parts
//! - [`Disk::open`] opens an image and its backing chain; reads, writes, zero-writes, discards and flushes may then
//!   run concurrently. [`create()`] makes images.
//! - [`LiveDisk`] is a disk whose chain changes while it is used: it takes snapshots, and [jobs] stream, commit and
//!   mirror it.
//! - Files are reached only through [`Host`](storage::Host) and [`Storage`](storage::Storage), and the futures run on
//!   any executor. On that of [`ring`], a [`FileHost`](storage::file::FileHost) uses io_uring.
//! - A method's errors are named in its documentation; [`DiskError`] says what each of them means.

pub use isobath_disk::*;
pub use isobath_jobs as jobs;
pub use isobath_ring as ring;
pub use isobath_storage as storage;

/// The README of the repository: its Rust is compiled by `cargo test --doc`.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct RepositoryReadme;
