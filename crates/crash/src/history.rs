//! A guest at work on a simulated disk.

use crate::executor::pause;
use crate::guest::{Before, Log, Seen};
use crate::host::SimHost;
use crate::hostile::Spy;
use crate::image::{IMAGE, Start};
use crate::mode::Mode;
use crate::plan::{Act, Plan, Request};
use crate::record::{NEVER, Tick};
use crate::value::{Sort, Value};
use futures_util::future::join_all;
use isobath_disk::{BlockDevice, Disk, DiskError, Preallocation, ZeroFlags};
use isobath_storage::IoBuf;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::cell::{Cell, RefCell};
use std::path::Path;
use std::sync::Arc;

/// The numbers of a guest's patterns in each of its lives; lower ones are in the images from the
/// beginning.
const PATTERNS: u32 = 10_000;

/// A guest, and what it remembers.
pub struct Guest<'a> {
    host: &'a SimHost,
    start: &'a Start,
    mode: &'a Mode,
    log: RefCell<Log>,
    next: Cell<u32>,
    spy: RefCell<Spy>,
    seed: u64,
}

impl<'a> Guest<'a> {
    /// A guest in its `life`th life (from 1), of the disk that `start` describes and that holds
    /// `before`.
    pub fn new(
        host: &'a SimHost,
        start: &'a Start,
        mode: &'a Mode,
        before: Before,
        life: u32,
        seed: u64,
    ) -> Self {
        let (log, next) = (RefCell::new(Log::new(before)), Cell::new(life * PATTERNS));
        Self { host, start, mode, log, next, spy: RefCell::default(), seed }
    }

    /// Ends the guest's life; its memory remains.
    pub fn into_log(self) -> Log {
        self.log.into_inner()
    }

    /// Opens the disk.
    pub async fn open(&self) -> Result<Disk<SimHost>, String> {
        let options = self.mode.options(true, self.seed);
        Disk::open(self.host.clone(), Path::new(IMAGE), &options)
            .await
            .map_err(|error| format!("the disk was not opened: {error}"))
    }

    fn faulty(&self) -> bool {
        self.host.struck() != NEVER
    }

    /// An error without a fault is a finding.
    fn judge<T>(&self, what: &str, done: Result<T, DiskError>) -> Result<Option<T>, String> {
        match done {
            Ok(value) => Ok(Some(value)),
            Err(_) if self.faulty() => Ok(None),
            Err(error) => Err(format!("{what} failed: {error}")),
        }
    }

    /// What a write leaves.
    fn value(&self, offset: u64, length: u64, sort: Sort) -> Value {
        let number = self.next.get();
        self.next.set(number + 1);
        match sort {
            Sort::Zeroes => Value::Zero,
            Sort::Hostile | Sort::Copied => {
                let files = self.host.files();
                let image = files.iter().find(|(name, _)| *name == Path::new(IMAGE));
                let image = image.map_or(&[][..], |(_, bytes)| bytes);
                let mut rng = SmallRng::seed_from_u64(self.seed ^ u64::from(number));
                let range = offset..offset + length;
                let cluster = self.start.new.cluster_size;
                let mut spy = self.spy.borrow_mut();
                let given = spy.bytes(sort, image, &range, number, cluster, &mut rng);
                given.map_or(Value::Pattern(Sort::Random, number), Value::Given)
            }
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

    /// The bytes that a discard turns into zeroes: whole clusters, and what the disk has of its last
    /// one.
    fn discarded(&self, disk: &Disk<SimHost>, offset: u64, length: u64) -> Option<(u64, u64)> {
        if !self.start.discards() {
            return None;
        }
        let cluster = self.start.new.cluster_size;
        let first = offset.next_multiple_of(cluster);
        let end = offset + length;
        let last = if end == disk.size() { end } else { end / cluster * cluster };
        (first < last).then(|| (first, last - first))
    }

    async fn request(&self, disk: &Disk<SimHost>, request: Request) -> Result<(), String> {
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
                let done = self.judge("a discard", disk.discard(offset, length).await)?;
                if let Some(number) = number {
                    self.end(number, done.is_some());
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

    /// Several tasks at once, and what is done to the disk beside them.
    pub async fn tasks(
        &self,
        disk: &Disk<SimHost>,
        tasks: &[Vec<Request>],
        beside: Option<Act>,
    ) -> Result<(), String> {
        let working = tasks.iter().enumerate().map(|(number, task)| async move {
            let mut rng = SmallRng::seed_from_u64(self.seed ^ (number as u64) << 32);
            for request in task {
                if rng.random_bool(0.3) {
                    pause(rng.random_range(0..20)).await;
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

    /// Does something to the disk as a whole.
    async fn act(&self, disk: &Disk<SimHost>, act: Act) -> Result<(), String> {
        match act {
            Act::None | Act::Reopen => {}
            Act::Resize(size) => {
                let old = disk.size();
                let (low, high) = (old.min(size), old.max(size));
                let number = self.begin(low, high - low, Value::Zero, "a change of size");
                let sized = {
                    let mut log = self.log.borrow_mut();
                    let began = log.written[number].began;
                    log.sizes.push((began, NEVER, size));
                    log.sizes.len() - 1
                };
                let done = disk.resize(size, Preallocation::Off, true).await;
                let done = self.judge("a change of size", done)?.is_some();
                self.end(number, done);
                let mut log = self.log.borrow_mut();
                log.written[number].durable = true;
                if done {
                    log.sizes[sized].1 = log.written[number].ended;
                }
            }
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

    /// Closes the disk: all is promised then.
    pub async fn close(&self, disk: &Disk<SimHost>) -> Result<(), String> {
        let began = self.host.tick();
        if self.judge("closing", disk.close().await)?.is_some() {
            self.log.borrow_mut().flushed.push((began, self.host.tick()));
        }
        Ok(())
    }

    /// Everything of a plan.
    pub async fn work(&self, plan: &Plan) -> Result<(), String> {
        let mut disk = match self.open().await {
            Err(_) if self.faulty() => return Ok(()),
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
                        Err(_) if self.faulty() => return Ok(()),
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

    /// Reads the whole disk.
    pub async fn look(&self, disk: &Disk<SimHost>) -> Result<Vec<u8>, String> {
        let buf = IoBuf::zeroed(disk.size() as usize);
        match disk.read(0, buf).await {
            Ok(bytes) => Ok(bytes.to_vec()),
            Err(error) => Err(format!("the disk could not be read: {error}")),
        }
    }

    /// What the disk held when the guest first looked at it.
    pub fn found(&self, bytes: Vec<u8>) -> Tick {
        self.log.borrow_mut().before = Before::Bytes(Arc::new(bytes));
        self.host.tick()
    }
}
