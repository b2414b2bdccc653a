//! The threads that serve clients.

use crate::failure::Failure;
use isobath_ring::{Config, Worker};
use std::num::NonZeroUsize;
use std::{io, thread};

/// The default maximum number of threads.
const THREADS: usize = 8;

/// Starts the threads for clients. A count of 1 starts none: an extra thread would gain nothing over this one.
pub(crate) fn start(wanted: Option<NonZeroUsize>) -> Result<Vec<Worker>, Failure> {
    let count = wanted.map_or_else(
        || thread::available_parallelism().map_or(1, NonZeroUsize::get).min(THREADS),
        NonZeroUsize::get,
    );
    let numbers = if count == 1 { 0..0 } else { 0..count };
    let start = |number| Worker::start(&format!("worker-{number}"), &Config::default());
    let workers = numbers.map(start).collect::<io::Result<_>>();
    workers.map_err(|error| Failure::new(error).context("cannot start a thread"))
}
