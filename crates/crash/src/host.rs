//! Files in memory that take their time and remember everything.

use crate::executor::pause;
use crate::guest::SECTOR;
use crate::record::{Action, Change, Files, Flush, NEVER, Record, Tick};
use crate::state::{Fate, Replay};
use isobath_storage::survivor::{SURVIVOR_BYTES, Survivor};
use isobath_storage::{
    Allocation, FileId, Host, IoBuf, OpenMode, Operation, Result, Stamp, Storage, StorageError,
    ZeroMode,
};
use parking_lot::{Mutex, MutexGuard};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The greatest length of a simulated file in bytes: what is longer is a runaway.
const MAX_LENGTH: u64 = 64 << 20;

/// What a flush does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushFault {
    /// It fails; the changes that it should have made durable stay in view, and no later flush
    /// knows of them.
    Forgets,
    /// It fails, and some of the changes are gone from view too.
    Drops,
    /// It succeeds and does nothing.
    Lies,
}

/// What goes wrong.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Of writes and zero-writes, this one fails (counted from 0), after a part of it has landed.
    pub write: Option<u64>,
    /// This read fails.
    pub read: Option<u64>,
    /// From this flush on, `flushes_failing` of them do as said.
    pub flush: Option<(u64, FlushFault)>,
    /// How many flushes from that one on.
    pub flushes_failing: u64,
    /// No file grows beyond this many bytes (`ENOSPC`).
    pub space: Option<u64>,
}

impl Faults {
    /// Whether anything goes wrong at all.
    pub fn any(&self) -> bool {
        self.write.is_some() || self.read.is_some() || self.flush.is_some() || self.space.is_some()
    }

    /// Whether a flush lies, so that nothing is promised.
    pub fn lies(&self) -> bool {
        matches!(self.flush, Some((_, FlushFault::Lies)))
    }
}

/// How the host behaves.
#[derive(Clone, Debug)]
pub struct Conduct {
    /// Seed of everything that it draws.
    pub seed: u64,
    /// The most turns that an operation waits before it takes effect, and again before it is
    /// answered.
    pub delay: u32,
    /// Whether changes are recorded.
    pub record: bool,
    /// What a discarded range reads as: 0, another byte, or `None` for what it held before.
    pub discarded: Option<u8>,
    /// Bytes that the device writes whole or not at all, and says so.
    pub atomic: u64,
    /// What goes wrong.
    pub faults: Faults,
}

impl Default for Conduct {
    fn default() -> Self {
        Self {
            seed: 0,
            delay: 0,
            record: false,
            discarded: Some(0),
            atomic: SECTOR,
            faults: Faults::default(),
        }
    }
}

struct World {
    conduct: Conduct,
    rng: SmallRng,
    tick: Tick,
    start: Files,
    files: Files,
    changes: Vec<Change>,
    flushes: Vec<Flush>,
    writes: u64,
    reads: u64,
    flush_count: u64,
    stamps: Vec<u64>,
    /// When the first fault struck.
    struck: Tick,
}

impl World {
    fn now(&mut self) -> Tick {
        self.tick += 1;
        self.tick
    }

    fn turns(&mut self) -> u32 {
        match self.conduct.delay {
            0 => 0,
            // Most operations are quick, some are slow.
            most if self.rng.random_bool(0.15) => self.rng.random_range(0..=most * 6),
            most => self.rng.random_range(0..=most),
        }
    }

    fn strike(&mut self) {
        let now = self.now();
        self.struck = self.struck.min(now);
    }

    fn record(&self) -> Record {
        Record {
            start: self.start.clone(),
            changes: self.changes.clone(),
            flushes: self.flushes.clone(),
            end: self.tick + 1,
        }
    }

    fn issue(&mut self, file: usize, action: &Action) -> usize {
        let issued = self.now();
        self.changes.push(Change {
            file,
            issued,
            applied: NEVER,
            completed: NEVER,
            sync: true,
            action: action.clone(),
        });
        self.changes.len() - 1
    }

    fn apply(&mut self, file: usize, change: Option<usize>, action: &Action) {
        let now = self.now();
        if let Some(change) = change.and_then(|change| self.changes.get_mut(change)) {
            change.applied = now;
        }
        self.stamps[file] += 1;
        action.apply(Arc::make_mut(&mut self.files[file].1));
    }

    fn complete(&mut self, change: Option<usize>) {
        let now = self.now();
        if let Some(change) = change.and_then(|change| self.changes.get_mut(change)) {
            change.completed = now;
        }
    }

    /// A flush fails: of what it should have made durable no later one knows.
    fn fail_flush(&mut self, file: usize, issued: Tick, drops: bool) {
        self.strike();
        let mut lost = self.record();
        lost.flushes.retain(|flush| flush.file == file);
        let flushed = lost.flushes.iter().map(|flush| flush.issued).max().unwrap_or(0);
        for change in &mut self.changes {
            if change.file == file && change.completed <= issued && change.completed > flushed {
                change.sync = false;
            }
        }
        if !drops {
            return;
        }
        // What the disk holds comes back into view, here and there.
        let mut replay = Replay::new(&lost);
        replay.advance(lost.end);
        let durable = replay.build(&Fate::ALL_LOST, 4096, &mut self.rng).files;
        let Some((_, old)) = durable.get(file) else { return };
        let old = old.clone();
        for start in (0..self.files[file].1.len()).step_by(4096) {
            let end = (start + 4096).min(self.files[file].1.len());
            let mut page = vec![0; end - start];
            let there = end.min(old.len()).saturating_sub(start);
            if there > 0 {
                page[..there].copy_from_slice(&old[start..start + there]);
            }
            if page != self.files[file].1[start..end] && self.rng.random_bool(0.5) {
                let action = Action::Write(start as u64, page.into());
                let change = self.issue(file, &action);
                self.apply(file, Some(change), &action);
                self.complete(Some(change));
            }
        }
    }
}

/// A host of simulated files. Clones share them.
#[derive(Clone)]
pub struct SimHost(Arc<Mutex<World>>);

impl SimHost {
    /// A host of these files.
    pub fn new(files: Files, conduct: Conduct) -> Self {
        let stamps = vec![1; files.len()];
        Self(Arc::new(Mutex::new(World {
            rng: SmallRng::seed_from_u64(conduct.seed),
            tick: 0,
            start: if conduct.record { files.clone() } else { Vec::new() },
            files,
            changes: Vec::new(),
            flushes: Vec::new(),
            writes: 0,
            reads: 0,
            flush_count: 0,
            stamps,
            struck: NEVER,
            conduct,
        })))
    }

    /// A new event, of the guest for example.
    pub fn tick(&self) -> Tick {
        self.0.lock().now()
    }

    /// When the first fault struck, or [`NEVER`].
    pub fn struck(&self) -> Tick {
        self.0.lock().struck
    }

    /// From now on nothing goes wrong.
    pub fn heal(&self) {
        self.0.lock().conduct.faults = Faults::default();
    }

    /// The files as reads see them now.
    pub fn files(&self) -> Files {
        self.0.lock().files.clone()
    }

    /// All that has happened.
    pub fn record(&self) -> Record {
        self.0.lock().record()
    }
}

impl Host for SimHost {
    type File = SimFile;

    async fn open(&self, name: &Path, mode: OpenMode) -> Result<SimFile> {
        let number = self.0.lock().files.iter().position(|(file, _)| file == name);
        let number = number.ok_or_else(|| {
            let cause = io::Error::from_raw_os_error(libc::ENOENT);
            StorageError::new(Operation::Open, name, cause)
        })?;
        let host = self.clone();
        let (gains, atomic) = {
            let conduct = &host.0.lock().conduct;
            (conduct.seed & 2 > 0, conduct.atomic)
        };
        let (name, writable) = (name.to_owned(), mode.writable.into());
        Ok(SimFile { host, name, number, writable, gains, atomic })
    }

    async fn create(&self, name: &Path, _mode: OpenMode) -> Result<SimFile> {
        // Files are made before a history begins.
        let cause = io::Error::from_raw_os_error(libc::EROFS);
        Err(StorageError::new(Operation::Create, name, cause))
    }

    async fn remove(&self, name: &Path) -> Result<()> {
        let cause = io::Error::from_raw_os_error(libc::EROFS);
        Err(StorageError::new(Operation::Remove, name, cause))
    }
}

/// Memory that outlives a process, and no crash of the machine.
struct Fleeting(Box<[AtomicU64]>);

impl Survivor for Fleeting {
    fn words(&self) -> &[AtomicU64] {
        &self.0
    }

    fn remove(&self) {}
}

/// An open simulated file.
pub struct SimFile {
    host: SimHost,
    name: PathBuf,
    number: usize,
    writable: AtomicBool,
    /// What [`Storage::gains_from_written_space`] says.
    gains: bool,
    /// What [`Storage::atomic_write`] says.
    atomic: u64,
}

/// A change under way. Given up, it still takes effect.
struct UnderWay<'a> {
    file: &'a SimFile,
    change: Option<usize>,
    action: Option<Action>,
}

impl UnderWay<'_> {
    fn apply(&mut self) {
        if let Some(action) = self.action.take() {
            self.file.world().apply(self.file.number, self.change, &action);
        }
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.apply();
        self.file.world().complete(self.change);
    }
}

impl SimFile {
    fn world(&self) -> MutexGuard<'_, World> {
        self.host.0.lock()
    }

    fn error(&self, operation: Operation, range: (u64, u64), code: i32) -> StorageError {
        let cause = io::Error::from_raw_os_error(code);
        StorageError::at(operation, &self.name, range.0, range.1, cause)
    }

    /// What goes wrong with a change: an error number, and how many bytes land all the same.
    fn fault(&self, operation: Operation, end: u64) -> Option<(i32, f64)> {
        let mut world = self.world();
        if operation == Operation::Discard {
            return None;
        }
        let number = world.writes;
        world.writes += 1;
        let landed = world.rng.random();
        let length = world.files[self.number].1.len() as u64;
        let fault = if world.conduct.faults.write == Some(number) {
            Some((libc::EIO, landed))
        } else if world.conduct.faults.space.is_some_and(|space| end > space.max(length)) {
            Some((libc::ENOSPC, 0.0))
        } else {
            None
        };
        if fault.is_some() {
            world.strike();
        }
        fault
    }

    async fn change(&self, operation: Operation, mut action: Action) -> Result<()> {
        let (start, end) = match &action {
            Action::SetLength(length) => (*length, *length),
            action => action.range(MAX_LENGTH),
        };
        let range = (start, end - start);
        if self.is_read_only() {
            return Err(self.error(operation, range, libc::EBADF));
        }
        if end > MAX_LENGTH {
            return Err(self.error(operation, range, libc::EFBIG));
        }
        let fault = self.fault(operation, end);
        if let Some((_, landed)) = fault {
            // Of what the device writes whole, all or nothing lands.
            let reached = start + ((end - start) as f64 * landed) as u64;
            let part = (reached / self.atomic * self.atomic).saturating_sub(start);
            action = match action {
                Action::Write(offset, bytes) => {
                    Action::Write(offset, bytes[..part as usize].into())
                }
                Action::Fill { offset, byte, extend, .. } => {
                    Action::Fill { offset, length: part, byte, extend }
                }
                Action::SetLength(_) => {
                    Action::Fill { offset: 0, length: 0, byte: 0, extend: false }
                }
            };
        }
        let (change, before, after) = {
            let mut world = self.world();
            let record = world.conduct.record;
            let change = record.then(|| world.issue(self.number, &action));
            (change, world.turns(), world.turns())
        };
        let mut under_way = UnderWay { file: self, change, action: Some(action) };
        pause(before).await;
        under_way.apply();
        pause(after).await;
        drop(under_way);
        match fault {
            Some((code, _)) => Err(self.error(operation, range, code)),
            None => Ok(()),
        }
    }

    async fn read_turns(&self) {
        let turns = self.world().turns();
        pause(turns).await;
    }
}

impl Storage for SimFile {
    fn name(&self) -> &Path {
        &self.name
    }

    fn id(&self) -> FileId {
        FileId { device: 0, inode: self.number as u64 + 1 }
    }

    async fn read_at(&self, offset: u64, mut buf: IoBuf) -> Result<IoBuf> {
        self.read_turns().await;
        let mut world = self.world();
        let number = world.reads;
        world.reads += 1;
        if world.conduct.faults.read == Some(number) {
            world.strike();
            drop(world);
            return Err(self.error(Operation::Read, (offset, buf.len() as u64), libc::EIO));
        }
        let bytes = &world.files[self.number].1;
        let there = (bytes.len() as u64).saturating_sub(offset).min(buf.len() as u64) as usize;
        if there > 0 {
            buf[..there].copy_from_slice(&bytes[offset as usize..offset as usize + there]);
        }
        buf[there..].fill(0);
        drop(world);
        Ok(buf)
    }

    async fn write_at(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        self.change(Operation::Write, Action::Write(offset, Arc::from(&*buf))).await?;
        Ok(buf)
    }

    async fn write_vectored_at(&self, offset: u64, bufs: Vec<IoBuf>) -> Result<Vec<IoBuf>> {
        let bytes: Vec<u8> = bufs.iter().flat_map(|buf| buf.iter().copied()).collect();
        self.change(Operation::Write, Action::Write(offset, bytes.into())).await?;
        Ok(bufs)
    }

    async fn write_zeroes(&self, offset: u64, length: u64, _mode: ZeroMode) -> Result<()> {
        let action = Action::Fill { offset, length, byte: 0, extend: true };
        self.change(Operation::WriteZeroes, action).await
    }

    async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        let discarded = self.world().conduct.discarded;
        match discarded {
            Some(byte) => {
                let action = Action::Fill { offset, length, byte, extend: false };
                self.change(Operation::Discard, action).await
            }
            None => Ok(()),
        }
    }

    async fn flush(&self) -> Result<()> {
        let (issued, fault, turns) = {
            let mut world = self.world();
            let number = world.flush_count;
            world.flush_count += 1;
            let failing = world.conduct.faults.flushes_failing;
            let fault = world.conduct.faults.flush;
            let fault = fault.filter(|(at, _)| number >= *at && number - at < failing);
            (world.now(), fault.map(|(_, fault)| fault), world.turns())
        };
        pause(turns).await;
        let mut world = self.world();
        match fault {
            None => {
                let completed = world.now();
                if world.conduct.record {
                    world.flushes.push(Flush { file: self.number, issued, completed });
                }
                Ok(())
            }
            Some(FlushFault::Lies) => {
                world.strike();
                Ok(())
            }
            Some(fault) => {
                world.fail_flush(self.number, issued, fault == FlushFault::Drops);
                drop(world);
                Err(self.error(Operation::Flush, (0, 0), libc::EIO))
            }
        }
    }

    async fn len(&self) -> Result<u64> {
        Ok(self.world().files[self.number].1.len() as u64)
    }

    async fn set_len(&self, length: u64) -> Result<()> {
        self.change(Operation::SetLength, Action::SetLength(length)).await
    }

    async fn allocation(&self, offset: u64) -> Result<Allocation> {
        let length = self.len().await?.saturating_sub(offset);
        Ok(Allocation { length, data: length > 0 })
    }

    async fn stamp(&self) -> Result<Option<Stamp>> {
        let world = self.world();
        Ok(Some(Stamp {
            length: world.files[self.number].1.len() as u64,
            modified: world.stamps[self.number] as i64,
            changed: world.stamps[self.number] as i64,
            inode: self.number as u64 + 1,
        }))
    }

    async fn settled_stamp(&self) -> Result<Option<Stamp>> {
        self.stamp().await
    }

    fn is_read_only(&self) -> bool {
        !self.writable.load(Ordering::Relaxed)
    }

    async fn retire(&self) -> Result<()> {
        if self.writable.swap(false, Ordering::Relaxed) { self.flush().await } else { Ok(()) }
    }

    fn extends_with_zeroes(&self) -> bool {
        true
    }

    /// In half of the histories, so that the engine grows files ahead.
    fn gains_from_written_space(&self) -> bool {
        self.gains
    }

    fn atomic_write(&self) -> u64 {
        self.atomic
    }

    fn survivor(&self, create: bool) -> Option<Arc<dyn Survivor>> {
        let words = (0..SURVIVOR_BYTES / 8).map(|_| AtomicU64::new(0));
        create.then(|| Arc::new(Fleeting(words.collect())) as Arc<dyn Survivor>)
    }
}
