//! Running a future on this thread's ring.

use crate::descriptors;
use crate::failure::Failure;
use isobath_ring::{Config, Executor};

/// Runs `work` on an executor on this thread.
pub(crate) fn block_on<T>(work: impl AsyncFnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    descriptors::raise_limit();
    let executor = Executor::new(&Config::default()).map_err(|error| {
        Failure::new(format_args!(
            "cannot use io_uring: {error}; it requires Linux 5.11 or later, and must not be \
             disabled by kernel.io_uring_disabled or a container's seccomp profile"
        ))
    })?;
    executor.block_on(work())
}
