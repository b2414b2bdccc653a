//! Exports that come and go.

use super::arguments::{Arguments, flag, is_well_formed, optional_text, text};
use super::snapshot::check_root;
use super::{Drive, Monitor, Result};
use crate::error::QmpError;
use isobath_disk::LiveDisk;
use isobath_export::nbd::{Export, ExportError, RemoveError, RemoveMode, Server};
use isobath_storage::Host;
use isobath_storage::ring::spawn;
use serde_json::{Value, json};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

/// The longest id of an export.
const LONGEST: usize = 255;

/// The server whose exports a monitor manages.
pub type NbdServer<H> = Arc<Server<LiveDisk<H>>>;

/// An export as QMP knows it.
pub(super) struct ExportEntry {
    id: String,
    /// The name by which NBD clients choose it.
    name: String,
    /// The device it serves, or the node, at the time when it was added.
    of: Of,
    ending: Rc<Cell<bool>>,
}

enum Of {
    Device(String),
    /// The index is that of a disk's address.
    Node(usize),
}

impl ExportEntry {
    /// The export of a device, which has its name.
    pub(super) fn of_device(device: &str) -> Self {
        let of = Of::Device(device.to_owned());
        let ending = Rc::new(Cell::new(false));
        Self { id: device.to_owned(), name: device.to_owned(), of, ending }
    }

    fn is_of<H: Host>(&self, drive: &Drive<H>) -> bool {
        match &self.of {
            Of::Device(device) => !device.is_empty() && device == drive.device(),
            Of::Node(address) => *address == address_of(drive),
        }
    }
}

pub(super) fn address_of<H: Host>(drive: &Drive<H>) -> usize {
    Arc::as_ptr(drive.disk()).addr()
}

impl<H: Host + Clone> Monitor<H> {
    pub(super) fn query_block_exports(&self) -> Value {
        let drives = self.drives();
        let exports = self.exports.borrow();
        let infos = exports.iter().map(|export| {
            let drive = drives.iter().find(|drive| export.is_of(drive));
            json!({
                "id": export.id,
                "type": "nbd",
                "node-name": drive.map_or_else(String::new, |drive| self.root_name(drive)),
                "shutting-down": export.ending.get(),
            })
        });
        infos.collect()
    }

    /// The id of an export of a disk.
    pub(super) fn export_of(&self, drive: &Drive<H>) -> Option<String> {
        let exports = self.exports.borrow();
        exports.iter().find(|export| export.is_of(drive)).map(|export| export.id.clone())
    }

    pub(super) fn block_export_add(&self, arguments: &Arguments) -> Result<()> {
        let id = text(arguments, "id");
        if !is_well_formed(id, LONGEST) {
            return Err(QmpError::new("Invalid block export id"));
        }
        if self.exports.borrow().iter().any(|export| export.id == id) {
            return Err(QmpError::new(format_args!("Block export id '{id}' is already in use")));
        }
        let Some(server) = &self.nbd else {
            return Err(QmpError::new("NBD server not running"));
        };
        let node = text(arguments, "node-name");
        let found = self.look_up("", node)?;
        check_root(&found)?;
        let writable = flag(arguments, "writable").unwrap_or(false);
        if writable && found.drive.is_read_only() {
            return Err(QmpError::new(format_args!("Block node is read-only: '{node}'")));
        }
        if flag(arguments, "writethrough").unwrap_or(false) {
            return Err(QmpError::new("'writethrough' is not supported; clients can flush"));
        }
        let name = optional_text(arguments, "name").unwrap_or(node).to_owned();
        let gone = server.add(Export {
            name: name.clone(),
            description: text(arguments, "description").to_owned(),
            read_only: !writable,
            device: found.drive.disk().clone(),
        });
        gone.map_err(|error| match error {
            ExportError::DuplicateName(name) => {
                QmpError::new(format_args!("NBD server already has export named '{name}'"))
            }
            error => QmpError::new(error),
        })?;
        self.exports.borrow_mut().push(ExportEntry {
            id: id.to_owned(),
            name,
            of: if found.drive.device().is_empty() {
                Of::Node(address_of(&found.drive))
            } else {
                Of::Device(found.drive.device().to_owned())
            },
            ending: Rc::default(),
        });
        Ok(())
    }

    pub(super) fn block_export_del(&self, arguments: &Arguments) -> Result<()> {
        let id = text(arguments, "id");
        let exports = self.exports.borrow();
        let export = exports.iter().find(|export| export.id == id);
        let export =
            export.ok_or_else(|| QmpError::new(format_args!("Export '{id}' is not found")))?;
        if export.ending.get() {
            return Err(QmpError::new(format_args!("export '{id}' is already shutting down")));
        }
        let Some(server) = &self.nbd else {
            return Err(QmpError::new("NBD server not running"));
        };
        let mode = match optional_text(arguments, "mode") {
            Some("hard") => RemoveMode::Hard,
            _ => RemoveMode::Safe,
        };
        let gone = server.remove(&export.name, mode).map_err(|error| match error {
            RemoveError::InUse { clients, .. } => QmpError::new(format_args!(
                "export '{id}' still in use by {clients} clients; mode 'hard' disconnects them"
            )),
            error => QmpError::new(error),
        })?;
        export.ending.set(true);
        let (exports, events, id) = (Rc::clone(&self.exports), self.events.clone(), id.to_owned());
        drop(spawn(async move {
            gone.await;
            exports.borrow_mut().retain(|export| export.id != id);
            events.emit("BLOCK_EXPORT_DELETED", json!({"id": id}));
        }));
        Ok(())
    }
}
