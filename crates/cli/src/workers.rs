//! Work shared by several tasks on several threads, with its progress on the terminal.

use crate::failure::Failure;
use isobath_ring::{Config, JoinError, JoinHandle, Signals, Worker, sleep, spawn};
use std::future::{Future, poll_fn};
use std::io::{self, IsTerminal, Write};
use std::pin::pin;
use std::task::Poll;
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

/// Runs `tasks` futures created by `make` concurrently, on as many threads as there are processors (including this
/// one), and returns their results.
///
/// # Errors
/// If a thread cannot be started, or a task panics.
pub(crate) async fn run<T, F, M>(tasks: usize, make: M) -> Result<Vec<T>, Failure>
where
    T: Send + 'static,
    F: Future<Output = T> + 'static,
    M: Fn() -> F + Clone + Send + 'static,
{
    let threads = available_parallelism().map_or(1, usize::from).min(tasks.max(1));
    let mut workers = Vec::new();
    for number in 1..threads {
        let worker = Worker::start(&format!("work-{number}"), &Config::default())
            .map_err(|error| Failure::new(format_args!("cannot start a thread: {error}")))?;
        workers.push(worker);
    }
    let mut here = Vec::new();
    let mut there = Vec::new();
    for task in 0..tasks.max(1) {
        match (task % threads).checked_sub(1).and_then(|number| workers.get(number)) {
            Some(worker) => {
                let make = make.clone();
                there.push(worker.handle().spawn_with(make));
            }
            None => here.push(spawn(make())),
        }
    }
    let mut results = Vec::with_capacity(tasks);
    for task in here {
        results.push(task.await.map_err(panicked)?);
    }
    for task in there {
        results.push(task.await.map_err(panicked)?);
    }
    Ok(results)
}

/// Resumes the panic of a task, or returns that it was cancelled.
pub(crate) fn panicked(error: JoinError) -> Failure {
    if error.is_panic() {
        error.resume();
    }
    Failure::new("the work was cancelled")
}

/// Shows progress, as `qemu-img -p` does, until dropped; on a terminal, also the estimated time left.
pub(crate) struct Progress {
    ticker: Option<JoinHandle<()>>,
}

impl Progress {
    /// `progress` returns the work done and the total.
    pub(crate) fn show(wanted: bool, progress: impl Fn() -> (u64, u64) + 'static) -> Self {
        let ticker = wanted.then(|| {
            let begin = Instant::now();
            spawn(async move {
                loop {
                    let (done, total) = progress();
                    let share = if total == 0 { 0.0 } else { done as f64 / total as f64 };
                    print(share.min(1.0), begin.elapsed());
                    sleep(Duration::from_millis(200)).await;
                }
            })
        });
        Self { ticker }
    }

    /// Ends the line, with 100 % if all is done.
    pub(crate) fn end(self, complete: bool) {
        if let Some(ticker) = &self.ticker {
            ticker.abort();
            if complete {
                print(1.0, Duration::ZERO);
            }
            // An error of standard output cannot be reported here.
            let _ = writeln!(io::stdout());
        }
    }
}

fn print(share: f64, elapsed: Duration) {
    let mut out = io::stdout();
    let mut line = format!("    ({:.2}/100%)", share * 100.0);
    if out.is_terminal() {
        let left = elapsed.as_secs_f64() * (1.0 - share) / share.max(1e-9);
        let estimate = if elapsed.as_secs() > 0 && share < 1.0 && share > 0.0 {
            format!(" {left:.0} s left")
        } else {
            String::new()
        };
        line = format!("{line}{estimate:<16}");
    }
    let _ = write!(out, "{line}\r").and_then(|()| out.flush());
}

/// Waits for `work`. The first signal meanwhile is passed to `stop`; `work` is awaited even then.
pub(crate) async fn until_signal<T>(
    work: impl Future<Output = T>,
    signals: &mut Signals,
    stop: impl Fn(i32),
) -> T {
    let mut work = pin!(work);
    match unless_signal(work.as_mut(), signals).await {
        Ok(output) => output,
        Err(signal) => {
            stop(signal);
            work.await
        }
    }
}

/// Waits for `work`, or for a signal.
///
/// # Errors
/// The signal, if it comes first.
pub(crate) async fn unless_signal<T>(
    work: impl Future<Output = T>,
    signals: &mut Signals,
) -> Result<T, i32> {
    let mut work = pin!(work);
    let signal = {
        let mut next = pin!(signals.recv());
        let first = poll_fn(|context| match work.as_mut().poll(context) {
            Poll::Ready(output) => Poll::Ready(Ok(output)),
            Poll::Pending => next.as_mut().poll(context).map(Err),
        });
        match first.await {
            Ok(output) => return Ok(output),
            Err(signal) => signal,
        }
    };
    match signal {
        Ok(signal) => Err(signal),
        // Without signals there is nothing else to wait for.
        Err(_) => Ok(work.await),
    }
}
