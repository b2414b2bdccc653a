//! Fault injection at planned operations.
//!
//! A [`FaultHost`] wraps another host. Its [`Plan`] determines the faults of every file opened through it: the same
//! plan and the same operations give the same faults.

use isobath_storage::{
    Allocation, FileId, Host, IoBuf, OpenMode, Operation, RestartMemory, Result, Stamp, Storage,
    StorageError, ZeroMode,
};
use parking_lot::Mutex;
use std::future::poll_fn;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::task::Poll;

/// One planned fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The operation that fails.
    pub operation: Operation,
    /// The file's name; `None` for any file.
    pub file: Option<PathBuf>,
    /// How many such operations succeed before.
    pub after: u64,
    /// How many fail then; `u64::MAX` for all that follow.
    pub times: u64,
    /// The error number with which they fail, `libc::EIO` for example.
    pub errno: i32,
    /// Of a failing write, how many bytes reach the file all the same.
    pub torn: usize,
}

impl Fault {
    /// The fault of one operation on any file, with `EIO`, after `after` successes.
    pub fn new(operation: Operation, after: u64) -> Self {
        Self { operation, file: None, after, times: 1, errno: libc::EIO, torn: 0 }
    }

    /// The same fault, with another error number.
    #[must_use]
    pub fn errno(self, errno: i32) -> Self {
        Self { errno, ..self }
    }

    /// The same fault, of all operations that follow too.
    #[must_use]
    pub fn forever(self) -> Self {
        Self { times: u64::MAX, ..self }
    }

    /// The same fault, on one file only.
    #[must_use]
    pub fn of(self, file: impl Into<PathBuf>) -> Self {
        Self { file: Some(file.into()), ..self }
    }
}

#[derive(Default)]
struct State {
    /// Each fault and the number of operations that it has seen.
    faults: Vec<(Fault, u64)>,
    /// State of the generator of delays; 0 for none.
    delays: u64,
    injected: u64,
}

/// What goes wrong, shared by a host and its files.
#[derive(Clone, Default)]
pub struct Plan(Arc<Mutex<State>>);

impl Plan {
    /// A plan without faults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a fault; its operations are counted from now on.
    pub fn add(&self, fault: Fault) {
        self.0.lock().faults.push((fault, 0));
    }

    /// Drops all faults, so that everything succeeds again.
    pub fn clear(&self) {
        self.0.lock().faults.clear();
    }

    /// Has each operation yield a number of times from 0 to 3, drawn from `seed`, before it starts,
    /// so that operations in flight together end in another order.
    pub fn delay(&self, seed: u64) {
        self.0.lock().delays = seed | 1;
    }

    /// The number of faults that have happened.
    pub fn injected(&self) -> u64 {
        self.0.lock().injected
    }

    /// The fault of this operation, if it has one.
    fn strike(&self, operation: Operation, file: &Path) -> Option<Fault> {
        let mut state = self.0.lock();
        let mut found = None;
        for (fault, seen) in &mut state.faults {
            if fault.operation != operation
                || fault.file.as_deref().is_some_and(|name| name != file)
            {
                continue;
            }
            let number = *seen;
            *seen += 1;
            if number >= fault.after && number - fault.after < fault.times && found.is_none() {
                found = Some(fault.clone());
            }
        }
        state.injected += u64::from(found.is_some());
        found
    }

    async fn wait(&self) {
        let mut turns = {
            let mut state = self.0.lock();
            if state.delays == 0 {
                return;
            }
            state.delays = random(state.delays);
            state.delays >> 62
        };
        poll_fn(|context| {
            if turns == 0 {
                return Poll::Ready(());
            }
            turns -= 1;
            context.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }

    async fn apply(&self, operation: Operation, file: &Path) -> Result<()> {
        self.wait().await;
        match self.strike(operation, file) {
            Some(fault) => Err(StorageError::new(operation, file, cause(&fault))),
            None => Ok(()),
        }
    }
}

/// The next number of a xorshift generator.
fn random(mut state: u64) -> u64 {
    state ^= state << 13;
    state ^= state >> 7;
    state ^ state << 17
}

fn cause(fault: &Fault) -> io::Error {
    io::Error::from_raw_os_error(fault.errno)
}

/// A host whose operations fail as planned.
#[derive(Clone)]
pub struct FaultHost<H> {
    inner: H,
    plan: Plan,
}

impl<H: Host> FaultHost<H> {
    /// Wraps a host.
    pub fn new(inner: H, plan: Plan) -> Self {
        Self { inner, plan }
    }
}

impl<H: Host> Host for FaultHost<H> {
    type File = FaultFile<H::File>;

    async fn open(&self, name: &Path, mode: OpenMode) -> Result<Self::File> {
        self.plan.apply(Operation::Open, name).await?;
        let inner = self.inner.open(name, mode).await?;
        Ok(FaultFile { inner, plan: self.plan.clone() })
    }

    async fn create(&self, name: &Path, mode: OpenMode) -> Result<Self::File> {
        self.plan.apply(Operation::Create, name).await?;
        let inner = self.inner.create(name, mode).await?;
        Ok(FaultFile { inner, plan: self.plan.clone() })
    }

    async fn remove(&self, name: &Path) -> Result<()> {
        self.plan.apply(Operation::Remove, name).await?;
        self.inner.remove(name).await
    }

    fn canonical(&self, name: &Path) -> Result<PathBuf> {
        self.inner.canonical(name)
    }

    fn resolve(&self, referrer: &Path, name: &str) -> PathBuf {
        self.inner.resolve(referrer, name)
    }
}

/// A file whose operations fail as planned.
pub struct FaultFile<S> {
    inner: S,
    plan: Plan,
}

impl<S: Storage> FaultFile<S> {
    async fn apply(&self, operation: Operation) -> Result<()> {
        self.plan.apply(operation, self.inner.name()).await
    }

    /// Fails a write as planned, after the part of it that reaches the file.
    async fn tear(&self, offset: u64, bufs: &[IoBuf]) -> Result<()> {
        self.plan.wait().await;
        let Some(fault) = self.plan.strike(Operation::Write, self.inner.name()) else {
            return Ok(());
        };
        let length = bufs.iter().map(IoBuf::len).sum::<usize>();
        let bytes: Vec<u8> = bufs.iter().flat_map(|buf| buf.iter().copied()).collect();
        let torn = &bytes[..fault.torn.min(length)];
        if !torn.is_empty() {
            self.inner.write_at(offset, IoBuf::copy_of(torn)).await?;
        }
        let (name, length) = (self.inner.name(), length as u64);
        Err(StorageError::at(Operation::Write, name, offset, length, cause(&fault)))
    }
}

impl<S: Storage> Storage for FaultFile<S> {
    fn name(&self) -> &Path {
        self.inner.name()
    }

    fn id(&self) -> FileId {
        self.inner.id()
    }

    async fn read_at(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        self.apply(Operation::Read).await?;
        self.inner.read_at(offset, buf).await
    }

    async fn write_at(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        self.tear(offset, std::slice::from_ref(&buf)).await?;
        self.inner.write_at(offset, buf).await
    }

    async fn write_vectored_at(&self, offset: u64, bufs: Vec<IoBuf>) -> Result<Vec<IoBuf>> {
        self.tear(offset, &bufs).await?;
        self.inner.write_vectored_at(offset, bufs).await
    }

    async fn write_zeroes(&self, offset: u64, length: u64, mode: ZeroMode) -> Result<()> {
        self.apply(Operation::WriteZeroes).await?;
        self.inner.write_zeroes(offset, length, mode).await
    }

    async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        self.apply(Operation::Discard).await?;
        self.inner.discard(offset, length).await
    }

    async fn flush(&self) -> Result<()> {
        self.apply(Operation::Flush).await?;
        self.inner.flush().await
    }

    async fn len(&self) -> Result<u64> {
        self.apply(Operation::Query).await?;
        self.inner.len().await
    }

    async fn set_len(&self, length: u64) -> Result<()> {
        self.apply(Operation::SetLength).await?;
        self.inner.set_len(length).await
    }

    async fn allocation(&self, offset: u64) -> Result<Allocation> {
        self.apply(Operation::Query).await?;
        self.inner.allocation(offset).await
    }

    async fn stamp(&self) -> Result<Option<Stamp>> {
        self.apply(Operation::Query).await?;
        self.inner.stamp().await
    }

    async fn settled_stamp(&self) -> Result<Option<Stamp>> {
        self.apply(Operation::Query).await?;
        self.inner.settled_stamp().await
    }

    fn is_read_only(&self) -> bool {
        self.inner.is_read_only()
    }

    async fn retire(&self) -> Result<()> {
        self.apply(Operation::Retire).await?;
        self.inner.retire().await
    }

    async fn admit_writer(&self, admit: bool) -> Result<()> {
        self.apply(Operation::Lock).await?;
        self.inner.admit_writer(admit).await
    }

    async fn clone_range(
        &self,
        from: &Self,
        from_offset: u64,
        to_offset: u64,
        length: u64,
    ) -> Result<bool> {
        self.apply(Operation::Clone).await?;
        self.inner.clone_range(&from.inner, from_offset, to_offset, length).await
    }

    fn clone_alignment(&self) -> Option<u64> {
        self.inner.clone_alignment()
    }

    fn extends_with_zeroes(&self) -> bool {
        self.inner.extends_with_zeroes()
    }

    fn free_space(&self) -> Option<u64> {
        self.inner.free_space()
    }

    fn gains_from_written_space(&self) -> bool {
        self.inner.gains_from_written_space()
    }

    fn atomic_write(&self) -> u64 {
        self.inner.atomic_write()
    }

    async fn restart_memory(&self, create: bool) -> Result<Option<Arc<dyn RestartMemory>>> {
        self.inner.restart_memory(create).await
    }
}
