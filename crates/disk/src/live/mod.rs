//! A disk whose chain changes while it is used.
//!
//! Frontends serve a [`LiveDisk`] if snapshots are taken and jobs run. Beneath it is a [`Disk`] of the current chain. A
//! change prepares another `Disk`, keeps new requests out until those in flight have ended (`gate.rs`), and swaps it
//! in. Nothing else happens while requests wait: files are created before, and the former active image gets its final
//! state afterwards (`snapshot.rs`).

mod claim;
mod counts;
mod failure;
mod gate;
pub mod graph;
mod snapshot;
mod tracked;

pub use claim::{Claim, Occupant};
pub use counts::{Copying, GuestCounts, IoStats, LATENCY_BUCKETS, RequestStats, Sample};
pub use failure::{FailureListener, IoFailure};
pub use snapshot::{Overlay, backing_name};
pub use tracked::DirtyMap;

use crate::clock::{Clock, SystemClock};
use crate::device::{BlockDevice, BlockStatus, ZeroFlags, block_device};
use crate::disk::{Disk, grow_to};
use crate::parts::Parts;
use crate::pausing::Pausing;
use crate::resize::NewSize;
use crate::throttle::{Direction, Drained, Throttle};
use arc_swap::ArcSwap;
use claim::Claims;
use counts::{Counts, Kind};
use event_listener::Event;
use failure::Failures;
use futures_util::future::{Either, join, select};
use gate::Gate;
use isobath_chain::create::Preallocation;
use isobath_chain::map::MapStats;
use isobath_image::layer::Layer;
use isobath_image::options::OpenOptions;
use isobath_image::readers::Readers;
use isobath_image::writer::Writer;
use isobath_image::{DiskError, Result, invariant, lock_order};
use isobath_storage::{Host, IoBuf};
use isobath_sync::order::in_order;
use std::convert::Infallible;
use std::future::Future;
use std::path::Path;
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tracked::Tracked;

/// Bytes of a zero-write or discard between two chances for a change of the chain, since such requests may take long.
const STEP: u64 = 1 << 30;
/// The same for queries of the map.
const STATUS_STEP: u64 = 16 << 30;

/// How often to check that the restart memory still exists.
const LOOK_AFTER: Duration = Duration::from_secs(1);

/// A disk without requests for this long is idle.
const QUIET: Duration = Duration::from_millis(400);

/// A virtual disk whose chain can change while it is used. See [`Disk`].
pub struct LiveDisk<H: Host> {
    current: ArcSwap<Disk<H>>,
    options: ArcSwap<OpenOptions>,
    gate: Gate,
    /// Held while the chain changes.
    graph: isobath_sync::AsyncMutex<()>,
    counts: Counts,
    clock: Arc<dyn Clock>,
    tracked: Tracked,
    claims: Claims,
    failures: Failures,
    throttle: Throttle,
    pausing: Pausing,
    /// Held while embedded mappings are brought into their final form.
    tidying: isobath_sync::AsyncMutex<()>,
    /// Completed writes must survive a kill of the process from now on.
    woken: Event,
}

impl<H: Host> LiveDisk<H> {
    /// Opens the image `name` and its backing chain, as [`Disk::open`] does.
    ///
    /// # Errors
    /// As [`Disk::open`].
    pub async fn open(host: H, name: &Path, options: &OpenOptions) -> Result<Arc<Self>> {
        let disk = Disk::open(host, name, options).await?;
        Ok(Self::new(disk, options, Arc::new(SystemClock::default())))
    }

    /// The disk with the caller's clock. `options` are those that `disk` was opened with.
    pub fn new(disk: Disk<H>, options: &OpenOptions, clock: Arc<dyn Clock>) -> Arc<Self> {
        Arc::new(Self {
            current: ArcSwap::from_pointee(disk),
            options: ArcSwap::from_pointee(options.clone()),
            gate: Gate::default(),
            graph: isobath_sync::AsyncMutex::ranked((), lock_order::GRAPH),
            counts: Counts::default(),
            pausing: Pausing::new(Arc::clone(&clock)),
            tidying: isobath_sync::AsyncMutex::default(),
            clock,
            tracked: Tracked::default(),
            claims: Claims::default(),
            failures: Failures::default(),
            throttle: Throttle::default(),
            woken: Event::new(),
        })
    }

    /// The current disk. A change of the chain replaces it.
    pub fn current(&self) -> Arc<Disk<H>> {
        self.current.load_full()
    }

    /// The layers, from the active one down to the base.
    pub fn layers(&self) -> Vec<Arc<Layer<H::File>>> {
        self.current.load().layers().map(Arc::clone).collect()
    }

    /// The number of layers in the chain.
    pub fn depth(&self) -> usize {
        self.current.load().depth()
    }

    /// Layers, from the base, that the direct-access index in use describes; 0 without one.
    pub fn indexed_layers(&self) -> usize {
        self.current.load().indexed_layers()
    }

    /// The map's counters.
    pub fn map_stats(&self) -> MapStats {
        self.current.load().map_stats()
    }

    /// The requests since the disk was opened.
    pub fn io_stats(&self) -> IoStats {
        self.counts.stats()
    }

    /// The flushes of the guest so far.
    pub fn flushes(&self) -> u64 {
        self.counts.flushes()
    }

    /// The counters that pacing uses.
    pub fn guest(&self) -> GuestCounts {
        self.counts.guest()
    }

    /// Counts a job's copy as in flight until the returned guard is dropped.
    pub fn copying(&self) -> Copying<'_> {
        self.counts.copying()
    }

    /// The clock of the disk and its jobs.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    /// The limits of its clients' requests. Frontends ask it; [`read`](Self::read), [`write`](Self::write) and the
    /// others do not, nor do jobs.
    pub fn throttle(&self) -> &Throttle {
        &self.throttle
    }

    /// What becomes of its clients' requests when the storage fails. Frontends ask it; [`read`](Self::read),
    /// [`write`](Self::write) and the others fail, also for jobs.
    pub fn pausing(&self) -> &Pausing {
        &self.pausing
    }

    /// Waits until what clients have in flight on a disk that has been [stopped](Pausing::stop) has ended, and makes it
    /// durable. From then on nothing changes the image until the disk goes on, except jobs, snapshots, and changes of
    /// its size.
    ///
    /// # Errors
    /// As for [`flush`](Self::flush).
    pub async fn settle(&self) -> Result<()> {
        self.pausing.quiet().await;
        let writer = self.current.load().writer.clone();
        if let Some(writer) = writer {
            // Work that begins later sees that the disk is stopped.
            writer.finish_upkeep().await;
        }
        drop(self.tidying.lock().await);
        self.flush().await
    }

    /// Reports requests that fail because of the storage to `listener`, at most one per second, except failures that
    /// [pause](Self::pausing) the disk. The first listener stays.
    pub fn on_failure(&self, listener: FailureListener) {
        self.failures.listen(listener);
    }

    /// The options with which the disk was opened, and with which further layers are.
    pub fn options(&self) -> Arc<OpenOptions> {
        self.options.load_full()
    }

    /// How to open the active image once more, without what is below it. Jobs may have put another image in the place
    /// of the one that was opened, and taken out what was below that.
    pub fn options_alone(&self) -> OpenOptions {
        let disk = self.current();
        let layer = disk.chain.active();
        let mut options = (*self.options()).clone();
        if let Some(secret) = layer.secret() {
            options.secrets.set(0, Arc::clone(secret));
        }
        let format = (!layer.is_detected_raw()).then(|| layer.format());
        let data_file = layer.given_data_file().map(Path::to_owned);
        options.format(format).data_file(data_file).backing(false).backing_files(Vec::new())
    }

    /// From now on completed writes, including earlier ones, survive a kill of this process, as if the disk had been
    /// opened with [`OpenOptions::restart_log`].
    ///
    /// # Errors
    /// As [`flush`](BlockDevice::flush).
    pub async fn begin_restart_log(&self) -> Result<()> {
        let _graph = self.graph.lock().await;
        self.options.store(Arc::new((*self.options()).clone().restart_log(true)));
        self.current().begin_restart_log().await?;
        self.woken.notify(usize::MAX);
        Ok(())
    }

    /// Takes the disk for a job.
    ///
    /// # Errors
    /// If another job has it, or has left it in a state that excludes other jobs.
    pub fn claim(&self, job: Arc<dyn Occupant>) -> Result<Claim> {
        self.claims.claim(&self.current(), job)
    }

    /// Changes the disk's size, as [`Disk::resize`] does.
    ///
    /// # Errors
    /// As there.
    pub async fn resize(
        &self,
        size: impl Into<NewSize>,
        preallocation: Preallocation,
        shrink: bool,
    ) -> Result<()> {
        let _graph = self.graph.lock().await;
        self.claims.check(&self.current())?;
        self.current().resize(size, preallocation, shrink).await
    }

    /// Cancels the running job, flushes, and brings the image into its final state, as
    /// [`Disk::close`] does.
    ///
    /// # Errors
    /// As there.
    pub async fn close(&self) -> Result<()> {
        self.claims.end().await;
        let _graph = self.graph.lock().await;
        let disk = self.current();
        let settled = self.finish_retiring(&disk).await;
        settled.and(disk.close().await)
    }

    /// As [`Disk::upkeep`], over every change of the chain; and [`Disk::tidy`] while the disk is idle.
    ///
    /// # Errors
    /// As there.
    pub async fn upkeep(&self) -> Result<()> {
        loop {
            // Do not hold the disk: that would keep layers open that leave the chain while its writer stays. Hold the
            // writer only while attending it: its layer may belong to another disk afterwards.
            let (writer, readers) = {
                let disk = self.current.load();
                (disk.writer.clone(), Arc::clone(&disk.readers))
            };
            let Some(writer) = writer else { return Ok(()) };
            let known = Arc::downgrade(&writer);
            let attended = async {
                // Dropped with this.
                let writer = writer;
                writer.attend(&readers, || !self.pausing.is_stopped()).await
            };
            let work = join(in_order(attended), in_order(self.tidy_when_quiet(&known, &readers)));
            let (attended, tidied) = match select(pin!(work), pin!(self.watch(&known))).await {
                Either::Left((done, _)) => done,
                Either::Right((never, _)) => match never {},
            };
            attended.and(tidied)?;
            let now = self.current.load();
            if now.writer.as_ref().is_some_and(|now| Arc::as_ptr(now) == known.as_ptr()) {
                return Ok(());
            }
        }
    }

    /// Brings embedded mappings into their final form while the disk is idle, until it accepts no more writes.
    async fn tidy_when_quiet(
        &self,
        writer: &Weak<Writer<H::File>>,
        readers: &Readers,
    ) -> Result<()> {
        loop {
            let now = self.clock.now();
            {
                let Some(writer) = writer.upgrade() else { return Ok(()) };
                if !writer.embeds() || writer.check().is_err() {
                    return Ok(());
                }
                let quiet = now > QUIET && self.counts.quiet_since(now.saturating_sub(QUIET));
                let _tidying = self.tidying.lock().await;
                let may = quiet && !self.pausing.is_stopped();
                if may && writer.extract_some(true, readers).await? {
                    continue;
                }
            }
            self.clock.sleep_until(now + QUIET / 4).await;
        }
    }

    /// Maintains the restart memory.
    async fn watch(&self, writer: &Weak<Writer<H::File>>) -> Infallible {
        loop {
            let woken = self.woken.listen();
            if self.options.load().restart_log {
                if let Some(writer) = writer.upgrade() {
                    writer.check_log().await;
                }
                self.clock.sleep_until(self.clock.now() + LOOK_AFTER).await;
            } else {
                woken.await;
            }
        }
    }

    /// Tracks every change in `map` from now on.
    pub fn track(&self, map: &Arc<DirtyMap>) {
        self.tracked.add(map);
    }

    /// Stops tracking changes in `map`.
    pub fn untrack(&self, map: &Arc<DirtyMap>) {
        self.tracked.remove(map);
    }

    /// Runs a request: counted, and never during a change of the chain.
    async fn request<T, F: Future<Output = Result<T>>>(
        &self,
        kind: Kind,
        bytes: u64,
        run: impl FnOnce(Arc<Disk<H>>) -> F,
    ) -> Result<T> {
        let request = self.counts.begin(kind, bytes, self.clock.now());
        let result = {
            let work = async {
                let _pass = self.gate.enter().await;
                run(self.current()).await
            };
            in_order(work).await
        };
        let now = self.clock.now();
        if let Err(error) = &result {
            self.tell_failure(kind, error, now);
        }
        request.end(result.is_ok(), now);
        result
    }

    /// Reports a failure, unless it pauses the disk, which is reported then.
    fn tell_failure(&self, kind: Kind, error: &DiskError, now: Duration) {
        let direction = if kind == Kind::Read { Direction::Read } else { Direction::Write };
        if !self.pausing.would_pause(direction, error) {
            self.failures.tell(kind, error, now);
        }
    }

    /// Runs a change of the disk's contents, which is [tracked](Self::track).
    async fn change<T, F: Future<Output = Result<T>>>(
        &self,
        kind: Kind,
        range: (u64, u64),
        run: impl FnOnce(Arc<Disk<H>>) -> F,
    ) -> Result<T> {
        let (offset, length) = range;
        let tracked = &self.tracked;
        self.request(kind, length, |disk| async move {
            if kind == Kind::Write {
                disk.chain.active().note_guest_write(offset.saturating_add(length));
            }
            let _marked = tracked.mark_after(offset, length);
            run(disk).await
        })
        .await
    }

    /// Runs a change of a long range in steps, between which the chain may change.
    async fn in_steps<F: Future<Output = Result<()>>>(
        &self,
        offset: u64,
        length: u64,
        run: impl Fn(Arc<Disk<H>>, u64, u64) -> F,
    ) -> Result<()> {
        let name = {
            // As for the upkeep: between steps nothing holds the disk.
            let disk = self.current.load();
            disk.check_range(offset, length)?;
            disk.name().to_owned()
        };
        let mut done = Parts::of(offset..offset + length, &name);
        for (at, length) in steps(offset, length, STEP) {
            done.add(at, length)?;
            self.change(Kind::Unmap, (at, length), |disk| run(disk, at, length)).await?;
        }
        done.end()
    }

    /// Replaces `old` by the disk of a changed chain. The caller holds the graph, and no request is inside the gate.
    fn replace(&self, old: &Arc<Disk<H>>, next: Arc<Disk<H>>) -> Result<()> {
        let current = Arc::ptr_eq(&self.current.load(), old);
        invariant(current, old.name(), "a chain changes only while its change holds the graph")?;
        next.map.set_active(next.active_index());
        self.current.store(next);
        // Who waits for another size listens to the next one from here on.
        old.resized.notify(usize::MAX);
        Ok(())
    }

    /// Passes on the result of a change of the chain, after which the disk accepts no more writes if an invariant was
    /// violated.
    fn or_stop<T>(&self, done: Result<T>) -> Result<T> {
        done.map_err(|error| self.current.load().stop_on_internal(error))
    }

    /// Runs a piece of a job's work, never during a change of the chain.
    pub async fn inside<T, F: Future<Output = T>>(&self, run: impl FnOnce(Arc<Disk<H>>) -> F) -> T {
        let work = async {
            let _pass = self.gate.enter().await;
            run(self.current()).await
        };
        in_order(work).await
    }
}

/// The steps of a long range.
fn steps(offset: u64, length: u64, step: u64) -> impl Iterator<Item = (u64, u64)> {
    let end = offset.saturating_add(length);
    let mut at = offset;
    std::iter::from_fn(move || {
        let next = end.min((at - at % step).saturating_add(step));
        let found = (at, next - at);
        at = next;
        (found.1 > 0).then_some(found)
    })
}

impl<H: Host> LiveDisk<H> {
    /// The disk's size in bytes.
    pub fn size(&self) -> u64 {
        self.current.load().size()
    }

    /// Whether writes are refused.
    pub fn is_read_only(&self) -> bool {
        self.current.load().is_read_only()
    }

    /// The optimal alignment of requests in bytes (the cluster or subcluster size).
    pub fn preferred_block(&self) -> u32 {
        self.current.load().preferred_block()
    }

    /// Reads `buf.len()` bytes at `offset`, and returns the buffer.
    ///
    /// # Errors
    /// If the range reaches past the end of the disk, the storage fails, or the tables are not valid there.
    pub async fn read(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        let length = buf.len() as u64;
        self.request(Kind::Read, length, |disk| async move { disk.read(offset, buf).await }).await
    }

    /// Writes `buf` at `offset`, and returns the buffer. It is durable after a [`flush`](Self::flush).
    ///
    /// # Errors
    /// If the disk is read-only or [accepts no more writes](DiskError::Poisoned), the range reaches past its end, the
    /// storage fails, or the tables turn out to be inconsistent.
    pub async fn write(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        let range = (offset, buf.len() as u64);
        self.change(Kind::Write, range, |disk| async move { disk.write(offset, buf).await }).await
    }

    /// Writes one cluster, compressed if that makes it smaller, as [`Disk::write_compressed`] does.
    ///
    /// # Errors
    /// As there.
    pub async fn write_compressed(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        let range = (offset, buf.len() as u64);
        let write =
            |disk: Arc<Disk<H>>| async move { Box::pin(disk.write_compressed(offset, buf)).await };
        self.change(Kind::Write, range, write).await
    }

    /// Makes a range read as zeroes.
    ///
    /// # Errors
    /// As for [`write`](Self::write); [`DiskError::Unsupported`] if it must be fast and is not.
    pub async fn write_zeroes(&self, offset: u64, length: u64, flags: ZeroFlags) -> Result<()> {
        self.in_steps(offset, length, |disk, at, length| async move {
            disk.chain.active().note_guest_write(at.saturating_add(length));
            Box::pin(disk.write_zeroes(at, length, flags)).await
        })
        .await
    }

    /// Releases a range's space where possible; it then reads as zeroes or as before, never as something older.
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    pub async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        self.in_steps(offset, length, |disk, at, length| async move {
            Box::pin(disk.discard(at, length)).await
        })
        .await
    }

    /// Makes everything that completed before this call durable.
    ///
    /// # Errors
    /// If the storage fails: it is then unknown what is durable, and the disk accepts no more writes.
    pub async fn flush(&self) -> Result<()> {
        let request = self.counts.begin(Kind::Flush, 0, self.clock.now());
        let result = loop {
            // Not inside the gate, because a sync may take long. Everything completed before went to this disk, or to
            // one whose writes this one makes durable as well.
            let (disk, flushing) = {
                let disk = self.current.load();
                (Arc::downgrade(&disk), disk.flushing())
            };
            match Box::pin(in_order(flushing.run())).await {
                Err(DiskError::Closed) if disk.as_ptr() != Arc::as_ptr(&self.current.load()) => {}
                done => break done,
            }
        };
        let now = self.clock.now();
        if let Err(error) = &result {
            self.tell_failure(Kind::Flush, error, now);
        }
        request.end(result.is_ok(), now);
        result
    }

    /// Describes the range in runs, in order and without gaps, at most `max_runs` of them; the runs
    /// returned may end before the range does, or be the whole of it.
    ///
    /// # Errors
    /// If the range reaches past the end of the disk, or the storage fails.
    pub async fn block_status(
        &self,
        offset: u64,
        length: u64,
        max_runs: usize,
    ) -> Result<Vec<BlockStatus>> {
        self.current.load().check_range(offset, length)?;
        let length = steps(offset, length, STATUS_STEP).next().map_or(0, |(_, length)| length);
        self.inside(
            |disk| async move { Box::pin(disk.block_status(offset, length, max_runs)).await },
        )
        .await
    }

    /// Makes the disk `size` bytes long if it is shorter; new bytes read as zeroes.
    ///
    /// # Errors
    /// If the disk is read-only, or a larger one would not fit the image.
    pub async fn grow(&self, size: u64) -> Result<()> {
        let how = self.current().preallocation_of_zeroes();
        grow_to(size, || self.size(), self.resize(size, how, false)).await
    }

    /// Waits until the size differs from `known`.
    pub async fn resized(&self, known: u64) {
        loop {
            let resized = Arc::clone(&self.current.load().resized);
            let changed = resized.listen();
            if self.size() != known {
                return;
            }
            // Another image that has taken the disk's place has an event of its own.
            if Arc::ptr_eq(&resized, &self.current.load().resized) {
                changed.await;
            }
        }
    }
}

block_device!(LiveDisk
    fn admit(&self, direction: Direction, bytes: u64) -> impl Future<Output = ()> {
        self.throttle.admit(direction, bytes)
    }

    fn drain(&self) -> Drained {
        self.throttle.drain()
    }

    fn pausing(&self) -> Option<&Pausing> {
        Some(&self.pausing)
    }
);
