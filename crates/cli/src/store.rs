//! Work on a store of chains, with its progress and the first signal.

use crate::failure::Failure;
use crate::workers::{self, Progress as Shown};
use isobath_remote::store::Limits;
use isobath_remote::{Error, Place, Progress, Store, open};
use isobath_ring::{Signals, sleep};
use std::cell::Cell;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// The help of an argument that names a chain.
pub(crate) const CHAIN: &str =
    "The chain: file:///DIRECTORY/NAME, s3://BUCKET/PREFIX/NAME, gs://... or az://...";

/// The help of an argument that names a store.
pub(crate) const STORE: &str =
    "The store: file:///DIRECTORY, s3://BUCKET/PREFIX, gs://... or az://...";

/// The default of `--remote-timeout`.
const DEFAULT_TIMEOUT: u64 = 300;

/// How a store is used.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct StoreOptions {
    /// Time limit in seconds for a request to the store, with all attempts
    #[arg(long, value_name = "SECONDS", default_value_t = DEFAULT_TIMEOUT)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1800))]
    remote_timeout: u64,
}

impl StoreOptions {
    /// The options that are not the default, for a command line.
    pub(crate) fn shown(&self) -> String {
        match self.remote_timeout {
            DEFAULT_TIMEOUT => String::new(),
            seconds => format!(" --remote-timeout {seconds}"),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::new(error)
    }
}

impl StoreOptions {
    /// Does `work` on a store, on a thread of its own, since it blocks. The first signal ends it.
    ///
    /// # Errors
    /// Those of the store and of the work; `interrupted` says how things are after a signal.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        place: &Place,
        shown: bool,
        interrupted: &str,
        work: impl FnOnce(&dyn Store, &Progress) -> isobath_remote::Result<T> + Send + 'static,
    ) -> Result<T, Failure> {
        let mut signals = Signals::new(&[libc::SIGINT, libc::SIGTERM])?;
        let progress = Arc::new(Progress::default());
        let limits = Limits::within(Duration::from_secs(self.remote_timeout));
        let worker = {
            let (place, progress) = (place.clone(), Arc::clone(&progress));
            let work = move || work(&*open(&place, limits, &progress)?, &progress);
            let started = thread::Builder::new().name("store".to_owned()).spawn(work);
            started.map_err(|error| Failure::new(format_args!("cannot start a thread: {error}")))?
        };
        let bar = Shown::show(shown, {
            let progress = Arc::clone(&progress);
            move || progress.bytes()
        });
        let signal = Cell::new(None);
        let ends = async {
            while !worker.is_finished() {
                sleep(Duration::from_millis(10)).await;
            }
        };
        workers::until_signal(ends, &mut signals, |number| {
            signal.set(Some(number));
            progress.cancel();
        })
        .await;
        let result = match worker.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        bar.end(result.is_ok());
        match (result, signal.get()) {
            (Err(Error::Interrupted), Some(signal)) => {
                let failure = Failure::new(format_args!("interrupted; {interrupted}"));
                Err(failure.with_code(128 + signal as u8))
            }
            (Err(error @ Error::Unsettled(_)), Some(signal)) => {
                Err(Failure::new(error).with_code(128 + signal as u8))
            }
            (result, _) => Ok(result?),
        }
    }
}
