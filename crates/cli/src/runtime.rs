//! Running a future on this thread's executor.

use crate::descriptors;
use crate::failure::Failure;
use isobath_ring::{Config, Executor};

/// Runs `work` on an executor on this thread.
pub(crate) fn block_on<T>(work: impl AsyncFnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    descriptors::raise_limit();
    let executor = Executor::new(&Config::default()).map_err(Failure::new)?;
    executor.block_on(work())
}

/// Why this thread's executor does without io_uring, if not because somebody asked for that.
pub(crate) fn why_no_ring() -> Option<String> {
    isobath_ring::current()?.why_no_ring().map(str::to_owned)
}
