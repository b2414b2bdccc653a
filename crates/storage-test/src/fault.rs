//! Fault injection at planned operations.
//!
//! A [`FaultHost`] wraps another host. Its [`Plan`] determines the faults of every file opened through it: the same
//! plan and the same operations give the same faults.

use crate::give_way;
use crate::pass_through::{Call, Hooks, HostCall, HostHooks, PassThrough};
use isobath_storage::{Host, IoBuf, Operation, Result, Storage, StorageError};
use parking_lot::Mutex;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// One planned fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The operation that fails.
    pub operation: Operation,
    /// The file's name; `None` for any file.
    pub file: Option<PathBuf>,
    /// Only reads and writes of some of these bytes fail; `None` for all.
    pub bytes: Option<Range<u64>>,
    /// How many such operations succeed first.
    pub after: u64,
    /// How many fail after that; `u64::MAX` for all.
    pub times: u64,
    /// The error number with which they fail, such as `libc::EIO`.
    pub errno: i32,
    /// How many bytes of a failing write still reach the file.
    pub torn: usize,
}

impl Fault {
    /// A single failure of an operation on any file, with `EIO`, after `after` successes.
    pub fn new(operation: Operation, after: u64) -> Self {
        Self { operation, file: None, bytes: None, after, times: 1, errno: libc::EIO, torn: 0 }
    }

    /// The same fault, with another error number.
    #[must_use]
    pub fn errno(self, errno: i32) -> Self {
        Self { errno, ..self }
    }

    /// The same fault, for all following operations too.
    #[must_use]
    pub fn forever(self) -> Self {
        Self { times: u64::MAX, ..self }
    }

    /// The same fault, on one file only.
    #[must_use]
    pub fn of(self, file: impl Into<PathBuf>) -> Self {
        Self { file: Some(file.into()), ..self }
    }

    /// The same fault, for reads and writes of some of these bytes only.
    #[must_use]
    pub fn at(self, bytes: Range<u64>) -> Self {
        Self { bytes: Some(bytes), ..self }
    }

    /// Whether it is a fault of this operation, on these bytes of a file.
    fn is_of(&self, operation: Operation, file: &Path, bytes: &Range<u64>) -> bool {
        let touches = |place: &Range<u64>| place.start < bytes.end && bytes.start < place.end;
        self.operation == operation
            && self.file.as_deref().is_none_or(|name| name == file)
            && self.bytes.as_ref().is_none_or(touches)
    }
}

#[derive(Default)]
struct Schedule {
    /// Each fault, and the number of matching operations so far.
    faults: Vec<(Fault, u64)>,
    /// The state of the generator of delays; 0 for no delays.
    delays: u64,
    injected: u64,
}

/// The faults, shared by a host and its files.
#[derive(Clone, Default)]
pub struct Plan(Arc<Mutex<Schedule>>);

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

    /// Makes each operation yield 0 to 3 times before it starts, at random from `seed`, so that concurrent operations
    /// end in a different order.
    pub fn delay(&self, seed: u64) {
        self.0.lock().delays = seed | 1;
    }

    /// The number of faults injected so far.
    pub fn injected(&self) -> u64 {
        self.0.lock().injected
    }

    /// The fault of this operation, if it has one. `bytes` are those that it reads or writes.
    fn strike(&self, operation: Operation, file: &Path, bytes: &Range<u64>) -> Option<Fault> {
        let mut state = self.0.lock();
        let mut found = None;
        for (fault, seen) in &mut state.faults {
            if !fault.is_of(operation, file, bytes) {
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
        let turns = {
            let mut state = self.0.lock();
            if state.delays == 0 {
                return;
            }
            state.delays = random(state.delays);
            state.delays >> 62
        };
        give_way(turns).await;
    }

    /// Fails a write as planned, after writing the part of it that reaches the file.
    async fn tear(&self, file: &impl Storage, offset: u64, bufs: &[IoBuf]) -> Result<()> {
        self.wait().await;
        let length = bufs.iter().map(IoBuf::len).sum::<usize>();
        let written = offset..offset.saturating_add(length as u64);
        let Some(fault) = self.strike(Operation::Write, file.name(), &written) else {
            return Ok(());
        };
        let bytes: Vec<u8> = bufs.iter().flat_map(|buf| buf.iter().copied()).collect();
        let torn = &bytes[..fault.torn.min(length)];
        if !torn.is_empty() {
            file.write_at(offset, IoBuf::copy_of(torn)).await?;
        }
        let length = length as u64;
        Err(StorageError::at(Operation::Write, file.name(), offset, length, cause(&fault)))
    }

    async fn apply(&self, operation: Operation, file: &Path, bytes: Range<u64>) -> Result<()> {
        self.wait().await;
        match self.strike(operation, file, &bytes) {
            Some(fault) => Err(StorageError::new(operation, file, cause(&fault))),
            None => Ok(()),
        }
    }
}

/// The next number from a xorshift generator.
fn random(mut state: u64) -> u64 {
    state ^= state << 13;
    state ^= state >> 7;
    state ^ state << 17
}

fn cause(fault: &Fault) -> io::Error {
    io::Error::from_raw_os_error(fault.errno)
}

/// A host whose operations fail as planned.
pub type FaultHost<H> = PassThrough<H, Plan>;

impl<H: Host> FaultHost<H> {
    /// Wraps a host.
    pub fn new(inner: H, plan: Plan) -> Self {
        Self::around(inner, plan)
    }
}

impl HostHooks for Plan {
    type File = Self;
    type Begun = ();

    async fn begin(&self, request: HostCall, name: &Path) -> Result<()> {
        let operation = match request {
            HostCall::Open => Operation::Open,
            HostCall::Create => Operation::Create,
            HostCall::Remove => Operation::Remove,
        };
        self.apply(operation, name, 0..0).await
    }

    fn end(&self, _request: HostCall, _name: &Path, (): ()) {}

    fn file(&self, _file: &impl Storage) -> Self {
        self.clone()
    }
}

impl Hooks for Plan {
    type Begun = ();

    async fn begin(&self, file: &impl Storage, request: Call<'_>) -> Result<()> {
        let operation = match request {
            Call::Read { offset, length } => {
                let read = offset..offset.saturating_add(length);
                return self.apply(Operation::Read, file.name(), read).await;
            }
            Call::Write { offset, bufs } => return self.tear(file, offset, bufs).await,
            Call::WriteZeroes { .. } => Operation::WriteZeroes,
            Call::Discard { .. } => Operation::Discard,
            Call::Flush => Operation::Flush,
            // One that fails does nothing, and is not reported.
            Call::ExpectLength(_) => return Ok(()),
            Call::SetLength(_) => Operation::SetLength,
            Call::Query => Operation::Query,
            Call::Clone { .. } => Operation::Clone,
            Call::Retire => Operation::Retire,
            Call::AdmitWriter => Operation::Lock,
        };
        self.apply(operation, file.name(), 0..0).await
    }

    async fn end(&self, _: &impl Storage, (): (), _: Option<Call<'_>>) -> Result<()> {
        Ok(())
    }
}
