//! Hosts for tests and measurements.
//!
//! Each wraps another [`Host`](isobath_storage::Host): it makes operations fail ([`fault`]), writes down what
//! changes files ([`recorder`]), or takes the time of a slower disk ([`slow`]). All of them are hooks in one
//! [host around another](pass_through). [`conformance`] checks what every host must do.

pub mod conformance;
pub mod fault;
pub mod pass_through;
pub mod recorder;
pub mod slow;
