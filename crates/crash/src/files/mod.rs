//! Crashes of a real server on real files: the method of section 4.1 of the FAST '16 paper (Chen et
//! al., "Mitigating Sync Amplification for Copy-on-write Virtual Disk"), and then some.
//!
//! The code of `isobath serve`, with io_uring and its threads, serves an image over NBD while every change of the
//! image's file is recorded ([`serve`]). Clients, or a Linux guest, use the disk and record what they were promised
//! ([`workload`], [`guest`], [`oracle`]). Then a moment between two syncs is chosen; everything durable is applied to a
//! copy of the original image, and any part of the rest ([`trace`], and [`state`](crate::state), which the simulator
//! shares). Each of these images is checked by `qemu-img check`, recovered, checked again, and its contents compared
//! with the promises ([`judge`]).
//!
//! The requests and the choice of states come from a seed; how the server's threads interleave does
//! not, so another run with the same seed tests other states.

pub mod campaign;
pub mod client;
pub mod guest;
pub mod judge;
pub mod loss;
pub mod oracle;
pub mod serve;
pub mod trace;
pub mod workload;
