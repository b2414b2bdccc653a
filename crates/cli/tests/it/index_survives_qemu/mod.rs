//! The direct-access index beside QEMU: whatever a stock QEMU does to an image of a chain that has
//! one, QEMU finds the image sound, and `isobath` reads the bytes that QEMU reads.

#![allow(clippy::useless_vec, reason = "`args!` makes vectors")]

mod both_ways;
mod chains;
mod damage;
mod files;
mod judge;
mod live;
mod operations;
mod sound;
