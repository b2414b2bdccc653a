//! Threads that each run an executor.

use super::config::Config;
use super::executor::Executor;
use super::oneshot;
use super::remote::Handle;
use std::future::poll_fn;
use std::io;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};

/// A thread with its own executor, to which [`Handle::spawn_with`] gives work.
///
/// Dropping it stops the executor, drops its tasks, ends its operations, and joins the thread. Work that must complete
/// must be awaited first.
pub struct Worker {
    handle: Handle,
    /// Dropping it ends the executor's main future.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts a thread named `name` (at most 15 bytes are shown) and its executor.
    ///
    /// # Errors
    /// As [`Executor::new`], or if no thread can be started.
    pub fn start(name: &str, config: &Config) -> io::Result<Self> {
        let (stop, mut stopped) = oneshot::channel();
        let (report, started) = mpsc::channel();
        let config = *config;
        let thread =
            thread::Builder::new().name(name.to_owned()).spawn(move || {
                match Executor::new(&config) {
                    Ok(executor) => {
                        let _ = report.send(Ok(executor.handle()));
                        executor.block_on(poll_fn(|context| stopped.poll(context)));
                    }
                    Err(error) => drop(report.send(Err(error))),
                }
            })?;
        let handle =
            started.recv().map_err(|_| io::Error::other("the thread ended during startup"))??;
        Ok(Self { handle, stop: Some(stop), thread: Some(thread) })
    }

    /// The handle for giving work to the thread.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("a worker thread panicked");
        }
    }
}
