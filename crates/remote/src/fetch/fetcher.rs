//! The threads that fetch.

use super::flight::{Flight, Pilot, lock};
use super::patience::{Limits, Patience};
use super::queue::{Job, Next, Queue, Run};
use super::source::Source;
use super::wanted::{Awaited, Block, Fetched, Wanted};
use crate::digest::{BLOCK, Digest};
use crate::error::{Error, Result};
use crate::progress::Progress;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Threads that wait for the store, and how many of them may read ahead.
const THREADS: usize = 12;
const READING_AHEAD: usize = 6;

/// Threads that look into the cache.
const LOOKING: usize = 4;

/// The longest pause before a request is repeated that may be repeated for ever.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Pieces of it, after each of which it is looked whether it is still wanted.
const PIECE_OF_PAUSE: Duration = Duration::from_millis(50);

type Look = Box<dyn FnOnce() + Send>;

/// Fetches from one store.
pub(crate) struct Fetcher {
    shared: Arc<Inner>,
}

pub(super) struct Inner {
    source: Source,
    limits: Limits,
    progress: Arc<Progress>,
    queue: Mutex<Queue<Self>>,
    /// There is something to fetch.
    queued: Condvar,
    /// Everything that is wanted or read ahead is being fetched.
    calm: Condvar,
    looks: Mutex<(VecDeque<Look>, bool)>,
    looking: Condvar,
}

impl Fetcher {
    /// Starts the threads for a store, which is opened with the same limit.
    ///
    /// # Errors
    /// They cannot be started.
    pub(crate) fn start(
        source: Source,
        limit: Option<Duration>,
        progress: Arc<Progress>,
    ) -> Result<Self> {
        let shared = Arc::new(Inner {
            source,
            limits: Limits::new(limit),
            progress,
            queue: Mutex::default(),
            queued: Condvar::new(),
            calm: Condvar::new(),
            looks: Mutex::default(),
            looking: Condvar::new(),
        });
        let this = Self { shared: Arc::clone(&shared) };
        let begin = |name: &str, work: fn(&Arc<Inner>)| {
            let shared = Arc::clone(&shared);
            start(name, move || work(&shared)).map(drop)
        };
        for _ in 0..THREADS {
            begin("fetch", Inner::fetch)?;
        }
        for _ in 0..LOOKING {
            begin("fetch-look", Inner::look)?;
        }
        if limit.is_some() {
            begin("fetch-time", |shared| shared.limits.keep())?;
        }
        Ok(this)
    }

    /// The flights of these blocks of a layer, for a request that waits for them; none for those that have landed.
    pub(super) fn want(&self, layer: &Arc<dyn Wanted>, blocks: &[u64]) -> Vec<Awaited> {
        let shared = &self.shared;
        let mut queue = lock(&shared.queue);
        let found = blocks.iter().filter_map(|block| queue.want(layer, *block));
        let flights: Vec<Awaited> = found.collect();
        if queue.closed {
            for awaited in &flights {
                awaited.flight.end(Err(Arc::new(Error::Interrupted)));
            }
        }
        drop(queue);
        if flights.iter().any(|awaited| awaited.is_fresh) {
            shared.queued.notify_all();
        }
        flights
    }

    /// The time that somebody who begins to wait now waits for the store.
    pub(super) fn patience(&self) -> Patience<'_> {
        Patience::new(&self.shared.limits)
    }

    /// Reads ahead, and gives up what was read ahead for another.
    pub(super) fn read_ahead(
        &self,
        layer: &Arc<dyn Wanted>,
        ahead: impl Iterator<Item = u64>,
        left: Range<u64>,
    ) {
        let mut queue = lock(&self.shared.queue);
        queue.leave(layer.number(), left);
        if !queue.closed {
            ahead.for_each(|block| queue.read_ahead(layer, block));
        }
        if queue.is_calm() {
            self.shared.calm.notify_all();
        }
        drop(queue);
        self.shared.queued.notify_all();
    }

    /// Gives up everything that is read ahead of a layer.
    pub(super) fn leave(&self, layer: u64) {
        lock(&self.shared.queue).leave(layer, 0..u64::MAX);
        self.shared.calm.notify_all();
    }

    /// Does `work`, which may wait for a disk, on a thread.
    pub(super) fn look_up(&self, work: impl FnOnce() + Send + 'static) {
        let mut looks = lock(&self.shared.looks);
        if !looks.1 {
            looks.0.push_back(Box::new(work));
        }
        drop(looks);
        self.shared.looking.notify_one();
    }

    /// What its threads share.
    pub(super) fn shared(&self) -> &Arc<Inner> {
        &self.shared
    }

    /// Does other work that waits for the store. It is told if nobody does it any more.
    pub(super) fn begin(&self, job: Job<Inner>) {
        let mut queue = lock(&self.shared.queue);
        if queue.closed {
            drop(queue);
            job(None);
            return;
        }
        queue.job(job);
        drop(queue);
        self.shared.queued.notify_one();
    }
}

/// Does work on a thread of its own.
///
/// # Errors
/// It cannot be started.
pub(super) fn start(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    let started = thread::Builder::new().name(name.to_owned()).spawn(work);
    started.map_err(|error| Error::Local(format!("cannot start a thread: {error}")))
}

impl Drop for Fetcher {
    fn drop(&mut self) {
        let shared = &self.shared;
        shared.progress.cancel();
        let (flights, jobs) = lock(&shared.queue).close();
        let interrupted = || Arc::new(Error::Interrupted);
        for flight in flights {
            flight.end(Err(interrupted()));
        }
        for job in jobs {
            job(None);
        }
        lock(&shared.looks).1 = true;
        shared.limits.close();
        shared.queued.notify_all();
        shared.calm.notify_all();
        shared.looking.notify_all();
    }
}

impl Inner {
    /// A thread that waits for the store.
    fn fetch(self: &Arc<Self>) {
        loop {
            let next = {
                let mut queue = lock(&self.queue);
                loop {
                    if queue.closed {
                        return;
                    }
                    let next = queue.next(READING_AHEAD);
                    if queue.is_calm() {
                        self.calm.notify_all();
                    }
                    if let Some(next) = next {
                        break next;
                    }
                    queue = self.queued.wait(queue).unwrap_or_else(PoisonError::into_inner);
                }
            };
            match next {
                Next::Job(job) => job(Some(self)),
                Next::Blocks(run) => self.blocks(&run),
            }
        }
    }

    /// A thread that looks into the cache.
    fn look(self: &Arc<Self>) {
        loop {
            let work = {
                let mut looks = lock(&self.looks);
                loop {
                    if let Some(work) = looks.0.pop_front() {
                        break work;
                    }
                    if looks.1 {
                        return;
                    }
                    looks = self.looking.wait(looks).unwrap_or_else(PoisonError::into_inner);
                }
            };
            work();
        }
    }

    /// Reads from the store; without a limit, until it answers.
    fn read(&self, key: &str, offset: u64, length: usize) -> Result<Vec<u8>> {
        self.patiently(|| self.source.read(key, offset, length))
    }

    /// An object in one request, which must have this length and digest.
    pub(super) fn object(&self, key: &str, length: u64, digest: &Digest) -> Result<Vec<u8>> {
        self.patiently(|| object(&self.source, key, length, digest))
    }

    fn patiently<T>(&self, read: impl Fn() -> Result<T>) -> Result<T> {
        let mut pause = Duration::from_millis(200);
        loop {
            match read() {
                Err(Error::Store(_) | Error::Local(_))
                    if self.limits.limit().is_none() && !self.progress.is_cancelled() =>
                {
                    let begin = Instant::now();
                    while begin.elapsed() < pause && !self.progress.is_cancelled() {
                        thread::sleep(PIECE_OF_PAUSE);
                    }
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
                read => return read,
            }
        }
    }

    /// Waits until something holds, but no longer than this.
    ///
    /// # Errors
    /// Nobody needs what is fetched any more.
    pub(super) fn wait_until(&self, most: Duration, holds: impl Fn() -> bool) -> Result<()> {
        let begin = Instant::now();
        while !holds() && begin.elapsed() < most {
            if self.progress.is_cancelled() {
                return Err(Error::Interrupted);
            }
            thread::sleep(PIECE_OF_PAUSE);
        }
        Ok(())
    }

    /// Takes blocks of these that nobody fetches, once all others that are wanted or read ahead are being fetched.
    /// `None` if there are none.
    pub(super) fn take_when_calm(
        &self,
        layer: &Arc<dyn Wanted>,
        blocks: Range<u64>,
    ) -> Result<Option<Run>> {
        let mut queue = lock(&self.queue);
        while !queue.is_calm() && !queue.closed {
            queue = self.calm.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        if queue.closed {
            return Err(Error::Interrupted);
        }
        Ok(queue.take(layer, blocks))
    }

    /// Fetches neighbouring blocks. Each flight tells what became of it.
    pub(super) fn blocks(self: &Arc<Self>, run: &Run) {
        let _pilots: Vec<_> = run.flights.iter().map(|flight| Pilot(flight)).collect();
        let (layer, key) = (&run.layer, run.layer.key());
        let done = |block: u64, flight: &Arc<Flight<Fetched>>, fetched: Fetched| {
            lock(&self.queue).ended(layer.number(), block, flight);
            flight.end(fetched);
        };
        let numbered = || (run.first..).zip(&run.flights);
        let offset = run.first * BLOCK;
        let length = numbered().map(|(block, _)| layer.range(block).1).sum();
        match self.read(key, offset, length).map(Arc::new) {
            Ok(bytes) => {
                for (block, flight) in numbered() {
                    let begin = ((block - run.first) * BLOCK) as usize;
                    let end = (begin + BLOCK as usize).min(bytes.len());
                    let found = Block::new(&bytes, begin..end);
                    done(block, flight, self.accept(layer, block, found).map_err(Arc::new));
                }
            }
            Err(error) => {
                let error = Arc::new(error);
                for (block, flight) in numbered() {
                    done(block, flight, Err(Arc::clone(&error)));
                }
            }
        }
        if run.ahead {
            lock(&self.queue).ended_ahead();
            self.queued.notify_one();
        }
    }

    /// Verifies a block and puts it into the cache. A wrong one is fetched once more.
    fn accept(
        self: &Arc<Self>,
        layer: &Arc<dyn Wanted>,
        block: u64,
        found: Block,
    ) -> Result<Block> {
        if layer.accept(block, found.bytes())? {
            return Ok(found);
        }
        let (offset, length) = layer.range(block);
        let bytes = Arc::new(self.read(layer.key(), offset, length)?);
        let found = Block::new(&bytes, 0..length);
        if layer.accept(block, found.bytes())? {
            return Ok(found);
        }
        Err(Error::damaged(format_args!(
            "'{}' in the store does not match its checksum at byte {offset} ({length} bytes), twice; 'isobath remote \
             verify' examines the whole chain",
            layer.key()
        )))
    }
}

/// An object in one request, which must have this length and digest. A wrong one is fetched once more.
pub(crate) fn object(source: &Source, key: &str, length: u64, digest: &Digest) -> Result<Vec<u8>> {
    for _ in 0..2 {
        let Some((bytes, _)) = source.get(key, length)? else {
            return Err(Error::damaged(format_args!(
                "'{key}' is missing in the store; push the chain again from where it is whole"
            )));
        };
        if bytes.len() as u64 == length && Digest::of(&bytes) == *digest {
            return Ok(bytes);
        }
    }
    Err(Error::damaged(format_args!(
        "'{key}' in the store does not match its digest; push the chain again from where it is whole"
    )))
}
