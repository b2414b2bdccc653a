//! The loop that keeps a queue filled, the same for every way to the data.

use crate::Result;
use crate::memory::Memory;
use crate::offsets::Offsets;
use crate::options::Load;
use crate::tally::Tally;
use crate::usage;
use serde_json::Value;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// Without any completion for so long the other side is taken for dead.
const PATIENCE: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_secs(1);

/// A queue of requests, each in a slot with a buffer of its own.
pub(crate) trait Port {
    /// Adds the request of a slot, at `offset` bytes.
    fn push(&mut self, slot: usize, offset: u64) -> Result<()>;

    /// Has the other side see what was added.
    fn submit(&mut self) -> Result<()>;

    /// Waits until requests have ended; adds their slots, and whether they succeeded.
    fn complete(&mut self, done: &mut Vec<(usize, bool)>) -> Result<()>;
}

/// Runs a load on `ports`, one a queue, of a device or file of `capacity` bytes.
///
/// # Errors
/// A queue fails, or nothing completes any more: the program then ends at once, since a queue that
/// waits cannot be ended otherwise.
pub(crate) fn run<P: Port + Send>(
    command: &str,
    load: &Load,
    capacity: u64,
    ports: Vec<P>,
) -> Result<Value> {
    let offsets = (0..load.queues)
        .map(|queue| Offsets::new(load, queue, capacity))
        .collect::<Result<Vec<_>>>()?;
    let progress = AtomicU64::new(0);
    let (tell, told) = mpsc::channel();
    let before = usage::cpu()?;
    let mut tally = Tally::default();
    thread::scope(|scope| {
        for (mut port, mut offsets) in ports.into_iter().zip(offsets) {
            let (tell, progress) = (tell.clone(), &progress);
            scope.spawn(move || {
                // The receiver outlives this thread.
                let _ = tell.send(drive(&mut port, &mut offsets, load, progress));
            });
        }
        let mut last = (0, Instant::now());
        let mut running = load.queues;
        while running > 0 {
            match told.recv_timeout(LOOK) {
                Ok(done) => {
                    tally.join(&done?);
                    running -= 1;
                }
                Err(RecvTimeoutError::Disconnected) => return Err("a queue's thread ended".into()),
                Err(RecvTimeoutError::Timeout) => {
                    let now = progress.load(Ordering::Relaxed);
                    if now != last.0 {
                        last = (now, Instant::now());
                    } else if last.1.elapsed() > PATIENCE {
                        eprintln!("isobath-load: nothing has completed for {PATIENCE:?}");
                        std::process::exit(1);
                    }
                }
            }
        }
        Result::Ok(())
    })?;
    Ok(tally.line(command, load, usage::cpu()?.saturating_sub(before)))
}

/// Keeps one queue filled until time is up or all places were used, then waits for what is in flight.
fn drive<P: Port>(
    port: &mut P,
    offsets: &mut Offsets,
    load: &Load,
    progress: &AtomicU64,
) -> Result<Tally> {
    let mut tally = Tally::default();
    let depth = usize::from(load.qd);
    let mut done = Vec::with_capacity(depth);
    let began = Instant::now();
    let mut started = vec![began; depth];
    let mut in_flight = 0;
    for slot in 0..depth {
        if let Some(offset) = offsets.next() {
            port.push(slot, offset)?;
            in_flight += 1;
        }
    }
    port.submit()?;
    while in_flight > 0 {
        done.clear();
        port.complete(&mut done)?;
        let now = Instant::now();
        let go_on = now - began < load.seconds;
        for &(slot, ok) in &done {
            tally.add(now - started[slot], ok);
            in_flight -= 1;
            if go_on && let Some(offset) = offsets.next() {
                port.push(slot, offset)?;
                started[slot] = now;
                in_flight += 1;
            }
        }
        port.submit()?;
        progress.fetch_add(done.len() as u64, Ordering::Relaxed);
    }
    tally.elapsed = began.elapsed();
    Ok(tally)
}

/// Buffers for all slots of all queues.
///
/// # Errors
/// There is not so much memory.
pub(crate) fn buffers(load: &Load) -> Result<Memory> {
    let slots = u64::from(load.qd) * u64::from(load.queues);
    let length = usize::try_from(slots.saturating_mul(load.bs))?;
    Ok(Memory::random(length, load.seed)?)
}

/// Where the buffers of a queue begin.
pub(crate) fn first_buffer(memory: &Memory, load: &Load, queue: u16) -> usize {
    memory.address() + usize::from(queue) * usize::from(load.qd) * load.bs as usize
}
