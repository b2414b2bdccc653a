//! The control socket of live disks, which speaks QMP, the QEMU Machine Protocol.
//!
//! [`server`] implements the protocol: JSON requests and replies, error classes, events. [`schema`] is the table of
//! commands, arguments and replies, which checks requests and answers `query-qmp-schema`. [`monitor`] executes the
//! commands on live disks, with the [secrets](secret) of encrypted ones; [`metrics`] serves their metrics to
//! Prometheus. [`client`] is a client, for the command line.
//!
//! Source: QEMU's "QEMU Machine Protocol Specification" (docs/interop/qmp-spec) and "QEMU QMP Reference
//! Manual".

pub mod client;
pub mod encryption;
mod error;
pub mod json;
pub mod metrics;
pub mod monitor;
pub mod schema;
pub mod secret;
pub mod server;
pub mod tables;

pub use error::{ErrorClass, QmpError};
