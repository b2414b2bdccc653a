//! A guest at work on a simulated disk.

use crate::guest::{Before, Log, Look, Seen};
use crate::host::SimHost;
use crate::hostile::Spy;
use crate::image::Start;
use crate::look::{SMALL, look};
use crate::mode::Mode;
use crate::plan::{Act, Plan, Request};
use crate::record::{NEVER, Tick};
use crate::value::{Given, Sort, Value};
use futures_util::future::join_all;
use isobath_disk::{BlockDevice, Disk, DiskError, ImageFormat, LiveDisk, Preallocation, ZeroFlags};
use isobath_storage::IoBuf;
use isobath_storage_test::any::AnyHost;
use isobath_storage_test::give_way;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::cell::{Cell, Ref, RefCell};
use std::fmt::Display;
use std::future::Future;
use std::ops::Range;
use std::sync::Arc;

/// The range of a guest's pattern numbers in each of its lives; lower ones are in the initial images.
const PATTERNS: u32 = 10_000;

/// A disk that a guest can use.
pub trait Target: BlockDevice {
    /// Writes one compressed cluster.
    fn write_compressed(
        &self,
        offset: u64,
        buf: IoBuf,
    ) -> impl Future<Output = isobath_disk::Result<IoBuf>>;

    /// Does some background work of idle moments.
    fn tidy(&self) -> impl Future<Output = isobath_disk::Result<bool>>;

    /// Sets the disk's size. Where it grows, space is preallocated.
    fn resize(
        &self,
        size: u64,
        preallocation: Preallocation,
    ) -> impl Future<Output = isobath_disk::Result<()>>;

    /// Brings the image into its final state.
    fn close(&self) -> impl Future<Output = isobath_disk::Result<()>>;

    /// Whether a raw image is the active one, or may be soon: there the host decides what a discard leaves.
    fn may_be_raw(&self) -> bool {
        false
    }
}

impl Target for Disk<AnyHost> {
    async fn write_compressed(&self, offset: u64, buf: IoBuf) -> isobath_disk::Result<IoBuf> {
        self.write_compressed(offset, buf).await
    }

    async fn tidy(&self) -> isobath_disk::Result<bool> {
        self.tidy().await
    }

    async fn resize(&self, size: u64, preallocation: Preallocation) -> isobath_disk::Result<()> {
        let grows = size > self.size();
        self.resize(size, if grows { preallocation } else { Preallocation::Off }, true).await
    }

    async fn close(&self) -> isobath_disk::Result<()> {
        self.close().await
    }
}

/// There, compressed clusters come from other programs, and the disk itself decides when to tidy.
impl Target for LiveDisk<AnyHost> {
    async fn write_compressed(&self, offset: u64, buf: IoBuf) -> isobath_disk::Result<IoBuf> {
        self.write(offset, buf).await
    }

    async fn tidy(&self) -> isobath_disk::Result<bool> {
        Ok(false)
    }

    async fn resize(&self, size: u64, preallocation: Preallocation) -> isobath_disk::Result<()> {
        let grows = size > self.size();
        self.resize(size, if grows { preallocation } else { Preallocation::Off }, true).await
    }

    async fn close(&self) -> isobath_disk::Result<()> {
        self.close().await
    }

    fn may_be_raw(&self) -> bool {
        self.layers().iter().any(|layer| layer.format() == ImageFormat::Raw)
    }
}

/// A guest, and its memory.
pub struct Guest<'a> {
    host: &'a SimHost,
    start: &'a Start,
    mode: &'a Mode,
    log: RefCell<Log>,
    next: Cell<u32>,
    spy: RefCell<Spy>,
    seed: u64,
    /// Something was cancelled, so that requests may fail.
    excused: Cell<bool>,
    /// The contents after a discard are unknown.
    vague: bool,
}

impl<'a> Guest<'a> {
    /// A guest in its `life`th life (from 1), with the disk that `start` describes, which contains `before`.
    pub fn new(
        host: &'a SimHost,
        start: &'a Start,
        mode: &'a Mode,
        before: Before,
        life: u32,
        seed: u64,
    ) -> Self {
        let (log, next) = (RefCell::new(Log::new(before)), Cell::new(life * PATTERNS));
        let excused = Cell::new(false);
        Self { host, start, mode, log, next, spy: RefCell::default(), seed, excused, vague: false }
    }

    /// The same guest, with a disk whose active image changes: a discard may leave the old contents.
    #[must_use]
    pub fn of_changing_chain(self) -> Self {
        Self { vague: true, ..self }
    }

    /// Notes that something was cancelled: requests may fail from now on.
    pub fn excuse(&self) {
        self.excused.set(true);
    }

    /// The guest's log so far.
    pub fn log(&self) -> Ref<'_, Log> {
        self.log.borrow()
    }

    /// Ends the guest's life and returns its log.
    pub fn into_log(self) -> Log {
        self.log.into_inner()
    }

    /// Opens the disk.
    pub async fn open(&self) -> Result<Disk<AnyHost>, String> {
        let options = self.mode.options(true, self.seed);
        Disk::open(self.host.any(), &self.start.image, &options)
            .await
            .map_err(|error| format!("the disk was not opened: {error}"))
    }

    /// Whether anything may fail.
    pub fn faulty(&self) -> bool {
        self.excused.get() || self.host.struck() != NEVER
    }

    /// Whether `error` may result from a fault of the host, or from a cancelled operation. A violated invariant never
    /// does.
    pub fn excuses(&self, error: &impl Display) -> bool {
        self.faulty() && !error.to_string().contains("violated invariant")
    }

    /// An error without an excuse is a finding.
    ///
    /// # Errors
    /// The finding.
    pub fn judge<T>(&self, what: &str, done: Result<T, DiskError>) -> Result<Option<T>, String> {
        match done {
            Ok(value) => Ok(Some(value)),
            Err(error) if self.excuses(&error) => Ok(None),
            Err(error) if self.is_full(what, &error) => Ok(None),
            Err(error) => Err(format!("{what} failed: {error}")),
        }
    }

    /// Whether there is no room on a device. Making completed requests durable needs none.
    fn is_full(&self, what: &str, error: &DiskError) -> bool {
        let needs_none = matches!(what, "a flush" | "closing");
        self.host.is_fixed() && !needs_none && error.errno() == libc::ENOSPC
    }

    /// The value of a write.
    fn value(&self, offset: u64, length: u64, sort: Sort) -> Value {
        let number = self.next.get();
        self.next.set(number + 1);
        match sort {
            Sort::Zeroes => Value::Zero,
            Sort::Hostile | Sort::Copied if self.host.contents(&self.start.image).len() < SMALL => {
                let image = self.host.contents(&self.start.image).to_vec();
                let mut rng = SmallRng::seed_from_u64(self.seed ^ u64::from(number));
                let range = offset..offset + length;
                let cluster = self.start.new.cluster_size;
                let mut spy = self.spy.borrow_mut();
                let given = spy.bytes(sort, &image, &range, number, cluster, &mut rng);
                given.map_or(Value::Pattern(Sort::Random, number), Value::Given)
            }
            Sort::Hostile | Sort::Copied => Value::Pattern(Sort::Random, number),
            sort => Value::Pattern(sort, number),
        }
    }

    fn begin(&self, offset: u64, length: u64, value: Value, name: &'static str) -> usize {
        let began = self.host.tick();
        self.log.borrow_mut().begin(offset..offset + length, value, began, name)
    }

    fn end(&self, number: usize, done: bool) {
        let ended = self.host.tick();
        self.log.borrow_mut().end(number, ended, done);
    }

    /// The bytes that a discard turns into zeroes: whole clusters, and a partial one at the end of the disk. In a raw
    /// data file, all of them.
    fn discarded(&self, disk: &impl Target, offset: u64, length: u64) -> Option<(u64, u64)> {
        if self.vague || self.start.new.data_file_raw {
            return Some((offset, length));
        }
        if !self.start.discards() {
            return None;
        }
        let cluster = self.start.new.cluster_size;
        let first = offset.next_multiple_of(cluster);
        let end = offset + length;
        let last = if end == disk.size() { end } else { end / cluster * cluster };
        (first < last).then(|| (first, last - first))
    }

    /// After a discard of a raw image the contents are up to the host.
    fn may_leave_anything(&self, offset: u64, length: u64) {
        if let Some(byte @ 1..) = self.host.discarded() {
            let number = self.next.get();
            self.next.set(number + 1);
            let bytes = vec![byte; length as usize].into();
            let given = Given { sort: Sort::Copied, number, start: offset, bytes };
            self.begin(offset, length, Value::Given(given), "a discard in the host");
        }
    }

    /// Makes one request.
    pub async fn request(&self, disk: &impl Target, request: Request) -> Result<(), String> {
        match request {
            Request::Write(offset, length, sort) => {
                let value = self.value(offset, length, sort);
                let buf = IoBuf::from(value.bytes(offset..offset + length));
                let number = self.begin(offset, length, value, "a write");
                let done = self.judge("a write", disk.write(offset, buf).await)?;
                self.end(number, done.is_some());
            }
            Request::Compressed(offset, length) => {
                let value = self.value(offset, length, Sort::Plain);
                let buf = IoBuf::from(value.bytes(offset..offset + length));
                let number = self.begin(offset, length, value, "a compressed write");
                let done = disk.write_compressed(offset, buf).await;
                self.end(number, self.judge("a compressed write", done)?.is_some());
            }
            Request::Zero(offset, length, may_unmap) => {
                let number = self.begin(offset, length, Value::Zero, "a zero-write");
                let flags = ZeroFlags { may_unmap, only_fast: false };
                let done = disk.write_zeroes(offset, length, flags).await;
                self.end(number, self.judge("a zero-write", done)?.is_some());
            }
            Request::Discard(offset, length) => {
                let zeroed = self.discarded(disk, offset, length);
                let number = zeroed
                    .map(|(offset, length)| self.begin(offset, length, Value::Zero, "a discard"));
                if disk.may_be_raw() {
                    self.may_leave_anything(offset, length);
                }
                let done = self.judge("a discard", disk.discard(offset, length).await)?;
                if let Some(number) = number {
                    self.end(number, done.is_some() && !self.vague);
                }
            }
            Request::Read(offset, length) => {
                let began = self.host.tick();
                let read = disk.read(offset, IoBuf::zeroed(length as usize)).await;
                let ended = self.host.tick();
                if let Some(bytes) = self.judge("a read", read)? {
                    let bytes = bytes.to_vec();
                    self.log.borrow_mut().seen.push(Seen { offset, bytes, began, ended });
                }
            }
            Request::Tidy => {
                self.judge("tidying", disk.tidy().await)?;
            }
            Request::Flush => {
                let began = self.host.tick();
                let done = self.judge("a flush", disk.flush().await)?;
                if done.is_some() {
                    self.log.borrow_mut().flushed.push((began, self.host.tick()));
                }
            }
        }
        Ok(())
    }

    /// Runs several tasks at once, and an action on the disk beside them.
    pub async fn tasks(
        &self,
        disk: &Disk<AnyHost>,
        tasks: &[Vec<Request>],
        beside: Option<Act>,
    ) -> Result<(), String> {
        let working = tasks.iter().enumerate().map(|(number, task)| async move {
            let mut rng = SmallRng::seed_from_u64(self.seed ^ (number as u64) << 32);
            for request in task {
                if rng.random_bool(0.3) {
                    give_way(rng.random_range(0..20)).await;
                }
                self.request(disk, *request).await?;
            }
            Ok(())
        });
        let (worked, acted) = futures_util::join!(join_all(working), async {
            match beside {
                Some(act) => self.act(disk, act).await,
                None => Ok(()),
            }
        });
        worked.into_iter().collect::<Result<(), String>>().and(acted)
    }

    /// Performs an action on the disk as a whole.
    async fn act(&self, disk: &Disk<AnyHost>, act: Act) -> Result<(), String> {
        match act {
            Act::None | Act::Reopen => {}
            Act::Resize(size, mode) => self.resize(disk, size, mode).await?,
            Act::WriteIndex => {
                let done = disk.write_index(|_| ()).await;
                self.judge("writing an index", done)?;
            }
            Act::DropIndex => {
                self.judge("dropping an index", disk.drop_index().await)?;
            }
        }
        Ok(())
    }

    /// Changes the disk's size.
    pub async fn resize(
        &self,
        disk: &impl Target,
        size: u64,
        preallocation: Preallocation,
    ) -> Result<(), String> {
        let old = disk.size();
        let (low, high) = (old.min(size), old.max(size));
        let number = self.begin(low, high - low, Value::Zero, "a change of size");
        let sized = {
            let mut log = self.log.borrow_mut();
            let began = log.written[number].began;
            log.sizes.push((began, NEVER, size));
            log.sizes.len() - 1
        };
        let done = disk.resize(size, preallocation).await;
        let done = self.judge("a change of size", done)?.is_some();
        self.end(number, done);
        let mut log = self.log.borrow_mut();
        log.written[number].durable = true;
        if done {
            log.sizes[sized].1 = log.written[number].ended;
        }
        Ok(())
    }

    /// Closes the disk: then everything is guaranteed.
    pub async fn close(&self, disk: &impl Target) -> Result<(), String> {
        let began = self.host.tick();
        if self.judge("closing", disk.close().await)?.is_some() {
            self.log.borrow_mut().flushed.push((began, self.host.tick()));
        }
        Ok(())
    }

    /// Executes a plan.
    pub async fn work(&self, plan: &Plan) -> Result<(), String> {
        let mut disk = match self.open().await {
            Err(error) if self.excuses(&error) => return Ok(()),
            opened => opened?,
        };
        for phase in &plan.phases {
            self.tasks(&disk, &phase.tasks, phase.beside).await?;
            match phase.then {
                Some(Act::Reopen) => {
                    self.close(&disk).await?;
                    drop(disk);
                    if self.faulty() {
                        return Ok(());
                    }
                    disk = match self.open().await {
                        Err(error) if self.excuses(&error) => return Ok(()),
                        opened => opened?,
                    };
                }
                Some(act) => self.act(&disk, act).await?,
                None => {}
            }
        }
        if plan.close {
            self.close(&disk).await?;
        }
        Ok(())
    }

    /// Reads the whole disk; for a large one, the parts that may be nonzero, including `interest`.
    pub async fn look(
        &self,
        disk: &impl BlockDevice,
        interest: &[Range<u64>],
    ) -> Result<Look, String> {
        look(disk, interest).await.map_err(|error| format!("the disk could not be read: {error}"))
    }

    /// Where the disk may hold something other than zeroes, as far as the guest knows.
    pub fn interest(&self) -> Vec<Range<u64>> {
        self.log.borrow().interest()
    }

    /// Notes the disk's contents when the guest first read it.
    pub fn found(&self, look: Look) -> Tick {
        self.log.borrow_mut().before = Before::Bytes(Arc::new(look.content));
        self.host.tick()
    }
}
