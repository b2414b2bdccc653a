//! Hosts for tests and measurements.
//!
//! Each wraps another [`Host`](isobath_storage::Host): it makes operations fail ([`fault`]), writes down what
//! changes files ([`recorder`]), or takes the time of a slower disk ([`slow`]).

pub mod conformance;
pub mod fault;
pub mod recorder;
pub mod slow;
