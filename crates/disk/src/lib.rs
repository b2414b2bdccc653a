//! A virtual disk over a chain of qcow2 images.
pub mod device;
pub mod error;
pub use device::{BlockDevice, BlockStatus, ZeroFlags};
pub use error::{DiskError, Result};
