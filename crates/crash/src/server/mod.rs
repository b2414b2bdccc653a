//! A whole server: a disk whose chain changes while it is used, with jobs, upkeep, a restart log, and faults, in
//! simulated time.
//!
//! The parts of a history are derived from its seed: images that are copies of one another with changes ([`chain`]),
//! several tasks of a guest, an operator who starts jobs and takes snapshots ([`operator`]), and faults ([`faults`]).
//! From its record come the states that a power loss, or a kill, leaves at any moment, each of which is checked as a
//! chain ([`judge`]).

pub mod bitmaps;
pub mod campaign;
pub mod chain;
pub mod chronicle;
pub mod faults;
pub mod history;
pub mod judge;
pub mod kind;
pub mod operator;
pub mod schedule;
