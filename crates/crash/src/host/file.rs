//! Simulated files.

use super::faults::{Effect, FlushFault, Kind};
use super::world::{Users, World};
use super::{Access, SimHost, busy};
use crate::record::{Action, Flush};
use isobath_storage::{
    BoxFuture, Capabilities, Extensions, FileId, Hints, Identity, IoBuf, MemoryUse, Operation,
    Reflink, RestartMemories, RestartMemory, Result, Roles, Stamp, Stamps, Storage, StorageError,
    Usage, ZeroMode,
};
use isobath_storage_test::give_way;
use parking_lot::{Mutex, MutexGuard};
use rand::RngExt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The greatest length of a simulated file in bytes: a longer one indicates a bug.
const MAX_LENGTH: u64 = 128 << 30;

/// The duration of a turn if time is simulated.
const TURN: Duration = Duration::from_micros(10);

/// A panic that is part of a history.
#[derive(Clone, Copy, Debug)]
pub struct Planned;

/// The role of an open file among its users.
pub(super) struct Role {
    pub(super) locked: bool,
    /// Others may write.
    pub(super) admits: bool,
}

/// An open simulated file.
pub struct SimFile {
    pub(super) host: SimHost,
    pub(super) name: PathBuf,
    pub(super) number: usize,
    pub(super) writable: AtomicBool,
    pub(super) role: Mutex<Role>,
    /// The value of [`Capabilities::gains_from_written_space`].
    pub(super) gains: bool,
    /// The value of [`Capabilities::atomic_write`].
    pub(super) atomic: u64,
    /// A block device.
    pub(super) fixed: bool,
    /// The value of [`Capabilities::clone_alignment`] for a writable file.
    pub(super) clones: Option<u64>,
}

/// A change in progress. It still takes effect if it is cancelled.
struct UnderWay<'a> {
    file: &'a SimFile,
    change: Option<usize>,
    action: Option<Action>,
    ended: bool,
}

impl UnderWay<'_> {
    fn apply(&mut self) {
        if let Some(action) = self.action.take() {
            self.file.world().apply(self.file.number, self.change, &action);
        }
    }

    fn end(mut self) {
        self.ended = true;
        self.file.world().complete(self.change);
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        if !self.ended {
            let action = self.action.take();
            self.file.world().give_up(self.file.number, self.change, action);
        }
    }
}

/// A failure of an operation that changes a file.
struct Failure {
    code: i32,
    /// The share of its bytes that are written nevertheless.
    landed: f64,
}

impl SimFile {
    fn is_read_only(&self) -> bool {
        !self.writable.load(Ordering::Relaxed)
    }

    pub(super) fn world(&self) -> MutexGuard<'_, World> {
        self.host.0.lock()
    }

    fn error(&self, operation: Operation, range: (u64, u64), code: i32) -> StorageError {
        let cause = io::Error::from_raw_os_error(code);
        StorageError::at(operation, &self.name, range.0, range.1, cause)
    }

    /// The fault of an operation, and the factor by which it is slower.
    fn strike(&self, kind: Kind, start: u64, length: u64) -> (Option<Effect>, u32) {
        let mut world = self.world();
        world.land(self.number);
        world.note((self.number, kind, start, length));
        let range = start..start.saturating_add(length.max(1));
        let effect = world.conduct.faults.strike(kind, self.number, &range);
        match effect {
            None => (None, 1),
            Some(Effect::Slow(times)) => (None, times),
            Some(effect) => {
                world.strike();
                drop(world);
                if effect == Effect::Panics {
                    std::panic::resume_unwind(Box::new(Planned));
                }
                (Some(effect), 1)
            }
        }
    }

    /// The failure of a change, if any.
    fn fault(&self, kind: Kind, end: u64, effect: Option<Effect>) -> Option<Failure> {
        let mut world = self.world();
        let landed = if kind == Kind::Discard { 0.0 } else { world.rng.random() };
        match effect {
            Some(Effect::Fails(code)) => return Some(Failure { code, landed: 0.0 }),
            Some(Effect::Short(code)) => return Some(Failure { code, landed }),
            _ if kind == Kind::Discard => return None,
            _ => {}
        }
        let number = world.writes;
        world.writes += 1;
        let length = world.files[self.number].1.len();
        let faults = &mut world.conduct.faults;
        let short = faults.space.is_some_and(|space| end > space.max(length));
        let fault = if faults.write == Some(number) {
            Some(Failure { code: libc::EIO, landed })
        } else if short && faults.space_ends != Some(0) {
            faults.space_ends = faults.space_ends.map(|left| left - 1);
            Some(Failure { code: libc::ENOSPC, landed: 0.0 })
        } else {
            None
        };
        if fault.is_some() {
            world.strike();
        }
        fault
    }

    /// Yields for this many turns, or for as long as they take.
    async fn wait(&self, turns: u32) {
        let clock = self.world().conduct.clock.clone();
        match clock {
            Some(clock) if turns > 0 => {
                let part = self.world().rng.random_range(0..10_000);
                clock.sleep(TURN * turns + Duration::from_nanos(part)).await;
            }
            Some(_) => {}
            None => give_way(turns.into()).await,
        }
    }

    async fn change(&self, operation: Operation, kind: Kind, mut action: Action) -> Result<()> {
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
        if self.fixed {
            let length = self.world().files[self.number].1.len();
            if end > length {
                return Err(self.error(operation, range, libc::ENOSPC));
            }
            if kind == Kind::Length {
                return Ok(());
            }
        }
        let (effect, slower) = self.strike(kind, start, end - start);
        let fault = self.fault(kind, end, effect);
        if let Some(Failure { landed, .. }) = fault {
            // A unit that the device writes atomically is written entirely or not at all.
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
        let mut under_way = UnderWay { file: self, change, action: Some(action), ended: false };
        self.wait(before.saturating_mul(slower)).await;
        under_way.apply();
        self.wait(after.saturating_mul(slower)).await;
        under_way.end();
        match fault {
            Some(Failure { code, .. }) => Err(self.error(operation, range, code)),
            None => Ok(()),
        }
    }

    /// Changes the role under which the file's user is counted.
    fn set_role(&self, change: impl FnOnce(&mut Role)) {
        let mut role = self.role.lock();
        let mut world = self.world();
        let writable = !self.is_read_only();
        let users = &mut world.users[self.number];
        if let Some(count) = count(users, &role, writable) {
            *count -= 1;
        }
        change(&mut role);
        let writable = !self.is_read_only();
        if let Some(count) = count(users, &role, writable) {
            *count += 1;
        }
    }
}

/// The counter for a file.
fn count<'a>(users: &'a mut Users, role: &Role, writable: bool) -> Option<&'a mut u32> {
    match (role, writable) {
        (Role { locked: false, .. } | Role { admits: true, .. }, _) => None,
        (_, true) => Some(&mut users.writers),
        (_, false) => Some(&mut users.readers),
    }
}

impl Drop for SimFile {
    fn drop(&mut self) {
        let writable = !self.is_read_only();
        if let Some(count) =
            count(&mut self.host.0.lock().users[self.number], &self.role.lock(), writable)
        {
            *count -= 1;
        }
    }
}

impl Storage for SimFile {
    fn identity(&self) -> Identity<'_> {
        Identity { name: &self.name, id: FileId { device: 0, inode: self.number as u64 + 1 } }
    }

    fn capabilities(&self) -> Capabilities {
        let read_only = self.is_read_only();
        Capabilities {
            read_only,
            extends_with_zeroes: !self.fixed,
            // In half of the histories, so that the engine grows files ahead.
            gains_from_written_space: self.gains,
            extends_one_at_a_time: !self.fixed,
            atomic_write: self.atomic,
            clone_alignment: self.clones.filter(|_| !read_only),
            is_device: self.fixed,
            begins_at: 0,
        }
    }

    fn extensions(&self) -> Extensions<'_, Self> {
        Extensions {
            reflink: Some(self),
            roles: Some(self),
            stamps: Some(self),
            restart_memories: Some(self),
            usage: Some(self),
            hints: Some(self),
        }
    }

    async fn read_at(&self, offset: u64, mut buf: IoBuf) -> Result<IoBuf> {
        let turns = self.world().turns();
        let (effect, slower) = self.strike(Kind::Read, offset, buf.len() as u64);
        self.wait(turns.saturating_mul(slower)).await;
        let mut world = self.world();
        let number = world.reads;
        world.reads += 1;
        let mut code = None;
        if world.conduct.faults.read == Some(number) {
            world.strike();
            code = Some(libc::EIO);
        }
        if let Some(Effect::Fails(found) | Effect::Short(found)) = effect {
            code = Some(found);
        }
        if let Some(code) = code {
            drop(world);
            return Err(self.error(Operation::Read, (offset, buf.len() as u64), code));
        }
        world.files[self.number].1.read(offset, &mut buf);
        drop(world);
        Ok(buf)
    }

    async fn write_vectored_at(&self, offset: u64, bufs: Vec<IoBuf>) -> Result<Vec<IoBuf>> {
        let parts: Vec<&[u8]> = bufs.iter().map(|buf| &buf[..]).collect();
        let action = Action::Write(offset, parts.concat().into());
        self.change(Operation::Write, Kind::Write, action).await?;
        Ok(bufs)
    }

    async fn write_zeroes(&self, offset: u64, length: u64, _mode: ZeroMode) -> Result<()> {
        let action = Action::Fill { offset, length, byte: 0, extend: true };
        self.change(Operation::WriteZeroes, Kind::Zeroes, action).await
    }

    async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        let discarded = self.world().conduct.discarded;
        match discarded {
            Some(byte) => {
                let end = (offset + length).min(self.world().files[self.number].1.len());
                let length = end.saturating_sub(offset);
                let action = Action::Fill { offset, length, byte, extend: false };
                self.change(Operation::Discard, Kind::Discard, action).await
            }
            None => Ok(()),
        }
    }

    async fn flush(&self) -> Result<()> {
        let (effect, slower) = self.strike(Kind::Flush, 0, u64::MAX);
        let (issued, fault, turns) = {
            let mut world = self.world();
            let number = world.flush_count;
            world.flush_count += 1;
            let failing = world.conduct.faults.flushes_failing;
            let fault = world.conduct.faults.flush;
            let fault = fault.filter(|(at, _)| number >= *at && number - at < failing);
            (world.now(), fault.map(|(_, fault)| fault), world.turns())
        };
        let fault = match effect {
            Some(Effect::Flush(fault)) => Some(fault),
            Some(_) => Some(FlushFault::Forgets),
            None => fault,
        };
        self.wait(turns.saturating_mul(slower)).await;
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
                world.fail_flush(self.number, issued, fault);
                drop(world);
                Err(self.error(Operation::Flush, (0, 0), libc::EIO))
            }
        }
    }

    async fn len(&self) -> Result<u64> {
        Ok(self.world().files[self.number].1.len())
    }

    async fn set_len(&self, length: u64) -> Result<()> {
        self.change(Operation::SetLength, Kind::Length, Action::SetLength(length)).await
    }
}

impl Hints for SimFile {
    fn advise(&self, _: isobath_storage::Access) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }

    fn expect_length(&self, length: u64) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            // Space that is short is counted by the length.
            if self.fixed || self.world().conduct.faults.space.is_some() {
                return;
            }
            let action = Action::Fill { offset: length, length: 0, byte: 0, extend: true };
            self.change(Operation::SetLength, Kind::Length, action).await.ok();
        })
    }
}

impl Stamps for SimFile {
    fn stamp(&self) -> BoxFuture<'_, Result<Option<Stamp>>> {
        Box::pin(async {
            if self.fixed {
                return Ok(None);
            }
            let world = self.world();
            Ok(Some(Stamp {
                length: world.files[self.number].1.len(),
                modified: world.stamps[self.number] as i64,
                changed: world.stamps[self.number] as i64,
                inode: self.number as u64 + 1,
            }))
        })
    }

    fn settled_stamp(&self) -> BoxFuture<'_, Result<Option<Stamp>>> {
        self.stamp()
    }

    fn sync_stamp(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.flush())
    }
}

impl Roles for SimFile {
    fn retire(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async {
            if self.is_read_only() {
                return Ok(());
            }
            self.set_role(|_| self.writable.store(false, Ordering::Relaxed));
            self.flush().await
        })
    }

    fn admit_writer(&self, admit: bool) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            if !self.is_read_only() {
                return Err(self.error(Operation::Lock, (0, 0), libc::EINVAL));
            }
            let (locked, admits) = {
                let role = self.role.lock();
                (role.locked, role.admits)
            };
            if locked && admits && !admit && self.world().users[self.number].writers > 0 {
                return Err(busy(&self.name));
            }
            self.set_role(|role| role.admits = admit);
            Ok(())
        })
    }
}

impl Reflink<Self> for SimFile {
    fn clone_range<'a>(
        &'a self,
        from: &'a Self,
        from_offset: u64,
        to_offset: u64,
        length: u64,
    ) -> BoxFuture<'a, Result<bool>> {
        Box::pin(async move {
            let Some(align) = self.capabilities().clone_alignment else { return Ok(false) };
            let content = Arc::clone(&self.world().files[from.number].1);
            let end = from_offset + length;
            let whole = |value: u64| value.is_multiple_of(align);
            let ends = whole(length) || end == content.len();
            if !whole(from_offset) || !whole(to_offset) || !ends || end > content.len() {
                return Ok(false);
            }
            let bytes = content.bytes(from_offset..end);
            let action = Action::Write(to_offset, bytes.into());
            self.change(Operation::Clone, Kind::Clone, action).await?;
            Ok(true)
        })
    }
}

impl Usage for SimFile {
    fn free_space(&self) -> Option<u64> {
        let world = self.world();
        let length = world.files[self.number].1.len();
        let faults = &world.conduct.faults;
        let space = faults.space.filter(|_| !self.fixed && faults.space_ends != Some(0));
        space.map(|space| space.saturating_sub(length))
    }
}

impl RestartMemories for SimFile {
    fn restart_memory(
        &self,
        how: MemoryUse,
    ) -> BoxFuture<'_, Result<Option<Arc<dyn RestartMemory>>>> {
        Box::pin(async move {
            let mut world = self.world();
            if let Access::Denied(_, code) = world.conduct.access
                && world.restart_memories.has(self.number)
            {
                drop(world);
                return Err(self.error(Operation::Lock, (0, 0), code));
            }
            Ok(world.restart_memories.of(self.number, how))
        })
    }
}
