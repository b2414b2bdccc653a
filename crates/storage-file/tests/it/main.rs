//! The tests of storage, in one program, except those of process-wide state.

#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod conformance;
mod descriptor_sets;
mod descriptors;
mod either;
mod files;
mod locks;
mod mappings;
mod mounted;
mod qemu;
mod reflinks;
mod restart_memory;
mod roles;
mod stamps;
mod written_at_once;
