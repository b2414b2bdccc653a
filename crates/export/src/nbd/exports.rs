//! The exports of a server, which can be added and removed while it serves.

use super::bitmap::{ExportedBitmap, MAX_BITMAPS};
use super::handshake::ExportInfo;
use super::live::{Gone, Guard, Live};
use super::wire::MAX_STRING;
use crate::frontend::{Offered, RemoveMode};
use crate::stop::Stop;
use isobath_disk::BlockDevice;
use parking_lot::Mutex;
use std::sync::Arc;

/// A disk exported under a name.
#[derive(Debug)]
pub struct Export<D> {
    /// The name by which clients select it, at most 4096 bytes. The empty name also selects a server's first export.
    pub name: String,
    /// A human-readable description, at most 4096 bytes; may be empty.
    pub description: String,
    /// Whether writes are refused even if the disk is writable.
    pub read_only: bool,
    /// Whether `qemu:allocation-depth` is offered.
    pub allocation_depth: bool,
    /// Bitmaps that are offered as `qemu:dirty-bitmap:NAME`, at most [`MAX_BITMAPS`].
    pub bitmaps: Arc<[ExportedBitmap]>,
    /// The disk.
    pub device: Arc<D>,
}

impl<D> Clone for Export<D> {
    fn clone(&self) -> Self {
        Self {
            name: self.name.clone(),
            description: self.description.clone(),
            read_only: self.read_only,
            allocation_depth: self.allocation_depth,
            bitmaps: self.bitmaps.clone(),
            device: self.device.clone(),
        }
    }
}

impl<D: BlockDevice> Export<D> {
    fn info(&self, multi_conn: bool) -> ExportInfo {
        ExportInfo {
            name: self.name.clone(),
            description: self.description.clone(),
            size: self.device.size(),
            read_only: self.read_only || self.device.is_read_only(),
            preferred_block: self.device.preferred_block(),
            allocation_depth: self.allocation_depth,
            multi_conn,
            bitmaps: self.bitmaps.clone(),
        }
    }

    fn check(&self) -> Result<(), ExportError> {
        for (field, text) in [("name", &self.name), ("description", &self.description)] {
            if text.len() > MAX_STRING {
                return Err(ExportError::TooLong { field, length: text.len() });
            }
        }
        if self.bitmaps.len() > MAX_BITMAPS {
            return Err(ExportError::TooManyBitmaps(self.bitmaps.len()));
        }
        let longest = self.bitmaps.iter().map(|bitmap| bitmap.context().len()).max();
        if let Some(length) = longest.filter(|length| *length > MAX_STRING) {
            return Err(ExportError::TooLong { field: "metadata context", length });
        }
        Ok(())
    }
}

/// The state of an export at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportState {
    /// The information given to clients.
    pub info: ExportInfo,
    /// Clients that have chosen it.
    pub clients: usize,
}

/// Why an export cannot be added.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// There is already an export of that name.
    #[error("an export named '{0}' already exists; names must be unique")]
    DuplicateName(String),
    /// A name or description is too long.
    #[error("the export's {field} is {length} bytes long; the NBD protocol allows {MAX_STRING}")]
    TooLong {
        /// `name`, `description` or `metadata context`.
        field: &'static str,
        /// Its length in bytes.
        length: usize,
    },
    /// There are more than [`MAX_BITMAPS`] bitmaps.
    #[error("cannot export {0} bitmaps; the maximum is {MAX_BITMAPS}")]
    TooManyBitmaps(usize),
    /// The server has been told to stop.
    #[error("the server is shutting down")]
    Stopping,
}

/// Why an export is not removed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RemoveError {
    /// There is no export of that name.
    #[error("there is no export named '{0}'")]
    NotFound(String),
    /// Clients have chosen it.
    #[error(
        "export '{name}' is in use by {clients} client(s); disconnect them, or remove it with mode 'hard'"
    )]
    InUse {
        /// Its name.
        name: String,
        /// How many clients there are.
        clients: usize,
    },
}

/// One export, its clients, and the stop request for them.
pub(crate) struct Entry<D> {
    pub(crate) export: Export<D>,
    pub(crate) stop: Stop,
    clients: Arc<Live>,
}

/// A client that has chosen an export.
pub(crate) struct Client<D> {
    pub(crate) entry: Arc<Entry<D>>,
    /// Dropped last, so that the disk is no longer held when the export's removal is reported.
    _counted: Guard,
}

impl<D> Entry<D> {
    /// Counts a client, unless the export is being removed.
    fn choose(self: Arc<Self>) -> Option<Client<D>> {
        let counted = self.clients.enter(usize::MAX)?;
        Some(Client { entry: self, _counted: counted })
    }

    /// Stops the clients, and drops the disk here.
    fn end(self: Arc<Self>, last: Guard) {
        self.stop.request();
        drop(self);
        drop(last);
    }
}

/// The exports in order, the default one first.
pub(crate) struct Exports<D> {
    state: Mutex<Entries<D>>,
    /// A client may have several connections.
    multi_conn: bool,
}

struct Entries<D> {
    entries: Vec<Arc<Entry<D>>>,
    stopping: bool,
}

impl<D> Entries<D> {
    /// Those that are offered, in the order in which they are.
    fn offered(&self, offered: &Offered) -> Vec<&Arc<Entry<D>>> {
        match offered {
            Offered::All => self.entries.iter().collect(),
            Offered::Named(names) => names
                .iter()
                .filter_map(|name| self.entries.iter().find(|entry| entry.export.name == *name))
                .collect(),
        }
    }
}

impl<D: BlockDevice> Exports<D> {
    pub(crate) fn new(multi_conn: bool) -> Self {
        let state = Mutex::new(Entries { entries: Vec::new(), stopping: false });
        Self { state, multi_conn }
    }

    pub(crate) fn add(&self, export: Export<D>) -> Result<Gone, ExportError> {
        export.check()?;
        let clients = Arc::<Live>::default();
        let gone = clients.clone().gone();
        let mut state = self.state.lock();
        if state.stopping {
            return Err(ExportError::Stopping);
        }
        if state.entries.iter().any(|entry| entry.export.name == export.name) {
            return Err(ExportError::DuplicateName(export.name));
        }
        state.entries.push(Arc::new(Entry { export, stop: Stop::default(), clients }));
        Ok(gone)
    }

    pub(crate) fn remove(&self, name: &str, mode: RemoveMode) -> Result<Gone, RemoveError> {
        let mut state = self.state.lock();
        let found = state.entries.iter().position(|entry| entry.export.name == name);
        let index = found.ok_or_else(|| RemoveError::NotFound(name.to_owned()))?;
        let Some(entry) = state.entries.get(index) else {
            return Err(RemoveError::NotFound(name.to_owned()));
        };
        let allowed = if mode == RemoveMode::Safe { 0 } else { usize::MAX };
        let last = entry.clients.close(allowed);
        let last = last.map_err(|clients| RemoveError::InUse { name: name.to_owned(), clients })?;
        let entry = state.entries.remove(index);
        drop(state);
        let gone = entry.clients.clone().gone();
        entry.end(last);
        Ok(gone)
    }

    /// Removes all exports, and prevents more from being added.
    pub(crate) fn end(&self) {
        let entries = {
            let mut state = self.state.lock();
            state.stopping = true;
            std::mem::take(&mut state.entries)
        };
        for entry in entries {
            if let Ok(last) = entry.clients.close(usize::MAX) {
                entry.end(last);
            }
        }
    }

    /// Passes `look` the current exports that are offered, as the handshake describes them, and chooses the one whose
    /// index it returns.
    ///
    /// This is one atomic step, so that the disk is never still held here after its export's removal was reported.
    pub(crate) fn choose<R>(
        &self,
        offered: &Offered,
        look: impl FnOnce(&[ExportInfo]) -> (R, Option<usize>),
    ) -> (R, Option<Client<D>>) {
        let state = self.state.lock();
        let entries = state.offered(offered);
        let infos: Vec<_> =
            entries.iter().map(|entry| entry.export.info(self.multi_conn)).collect();
        let (result, index) = look(&infos);
        let entry = index.and_then(|index| entries.get(index)).map(|entry| Arc::clone(entry));
        (result, entry.and_then(Entry::choose))
    }

    /// How many clients have chosen the export of this name.
    pub(crate) fn clients(&self, name: &str) -> Option<usize> {
        let state = self.state.lock();
        let entry = state.entries.iter().find(|entry| entry.export.name == name);
        entry.map(|entry| entry.clients.count())
    }

    pub(crate) fn states(&self) -> Vec<ExportState> {
        let state = |entry: &Arc<Entry<D>>| ExportState {
            info: entry.export.info(self.multi_conn),
            clients: entry.clients.count(),
        };
        self.state.lock().entries.iter().map(state).collect()
    }
}
