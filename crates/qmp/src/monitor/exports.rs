//! Exports that come and go.

use super::arguments::{Arguments, flag, integer, is_well_formed, optional_text, text};
use super::frontends::{Fuse, VhostUser};
use super::snapshot::check_root;
use super::{Drive, Monitor, Result};
use crate::error::QmpError;
use event_listener::Event;
use isobath_disk::LiveDisk;
use isobath_export::nbd::{Export, ExportError, RemoveError, RemoveMode, Server};
use isobath_export::{fuse, vhost_user};
use isobath_storage::Host;
use isobath_storage::ring::net::Listener;
use isobath_storage::ring::spawn;
use serde_json::{Value, json};
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

/// The longest id of an export.
const LONGEST: usize = 255;

/// The server whose exports a monitor manages.
pub type NbdServer<H> = Arc<Server<LiveDisk<H>>>;

/// An export as QMP knows it.
pub(super) struct ExportEntry<H: Host> {
    id: String,
    kind: Kind<H>,
    /// The device it serves, or the node, at the time when it was added.
    of: Of,
    ending: Rc<Cell<bool>>,
}

/// By what protocol an export is reached.
pub(super) enum Kind<H: Host> {
    /// The name by which NBD clients choose it.
    Nbd(String),
    VhostUser(VhostUser<H>),
    Fuse(Fuse<H>),
}

impl<H: Host> Kind<H> {
    /// QEMU's name.
    fn name(&self) -> &'static str {
        match self {
            Self::Nbd(_) => "nbd",
            Self::VhostUser(_) => "vhost-user-blk",
            Self::Fuse(_) => "fuse",
        }
    }
}

enum Of {
    Device(String),
    /// The index is that of a disk's address.
    Node(usize),
}

impl<H: Host> ExportEntry<H> {
    /// An export of a disk, by its device if it has one.
    pub(super) fn new(id: &str, kind: Kind<H>, drive: &Drive<H>) -> Self {
        let of = if drive.device().is_empty() {
            Of::Node(address_of(drive))
        } else {
            Of::Device(drive.device().to_owned())
        };
        Self { id: id.to_owned(), kind, of, ending: Rc::default() }
    }

    /// The NBD export of a device, which has its name.
    pub(super) fn of_device(drive: &Drive<H>) -> Self {
        Self::new(drive.device(), Kind::Nbd(drive.device().to_owned()), drive)
    }

    fn is_of(&self, drive: &Drive<H>) -> bool {
        match &self.of {
            Of::Device(device) => !device.is_empty() && device == drive.device(),
            Of::Node(address) => *address == address_of(drive),
        }
    }

    pub(super) const fn is_nbd(&self) -> bool {
        matches!(self.kind, Kind::Nbd(_))
    }
}

pub(super) fn address_of<H: Host>(drive: &Drive<H>) -> usize {
    Arc::as_ptr(drive.disk()).addr()
}

/// The exports there are.
pub(super) struct ExportList<H: Host> {
    entries: RefCell<Vec<ExportEntry<H>>>,
    removed: Event,
}

impl<H: Host> ExportList<H> {
    pub(super) fn new(entries: Vec<ExportEntry<H>>) -> Self {
        Self { entries: RefCell::new(entries), removed: Event::new() }
    }

    pub(super) fn add(&self, entry: ExportEntry<H>) {
        self.entries.borrow_mut().push(entry);
    }

    pub(super) fn remove(&self, id: &str) {
        self.entries.borrow_mut().retain(|export| export.id != id);
        self.removed.notify(usize::MAX);
    }

    /// Waits until there is none of a sort.
    pub(super) async fn without(&self, sort: impl Fn(&ExportEntry<H>) -> bool) {
        loop {
            let removed = self.removed.listen();
            if !self.entries.borrow().iter().any(&sort) {
                return;
            }
            removed.await;
        }
    }

    /// Has all end that serve one disk alone.
    pub(super) fn stop_all(&self) {
        for export in &*self.entries.borrow() {
            match &export.kind {
                Kind::Nbd(_) => {}
                Kind::VhostUser(server) => server.stop(),
                Kind::Fuse(mount) => mount.stop(),
            }
        }
    }

    /// Those that one client has for itself, and whether it is there.
    pub(super) fn clients(&self) -> Vec<(String, usize)> {
        let count = |export: &ExportEntry<H>| match &export.kind {
            Kind::VhostUser(server) => Some((export.id.clone(), usize::from(server.connected()))),
            Kind::Nbd(_) | Kind::Fuse(_) => None,
        };
        self.entries.borrow().iter().filter_map(count).collect()
    }
}

impl<H: Host + Clone> Monitor<H> {
    pub(super) fn query_block_exports(&self) -> Value {
        let drives = self.drives();
        let exports = self.exports.entries.borrow();
        let infos = exports.iter().map(|export| {
            let drive = drives.iter().find(|drive| export.is_of(drive));
            json!({
                "id": export.id,
                "type": export.kind.name(),
                "node-name": drive.map_or_else(String::new, |drive| self.root_name(drive)),
                "shutting-down": export.ending.get(),
            })
        });
        infos.collect()
    }

    /// The id of an export of a disk.
    pub(super) fn export_of(&self, drive: &Drive<H>) -> Option<String> {
        let exports = self.exports.entries.borrow();
        exports.iter().find(|export| export.is_of(drive)).map(|export| export.id.clone())
    }

    /// Refuses an id that cannot be an export's, or is one's.
    pub(super) fn check_export_id(&self, id: &str) -> Result<()> {
        if !is_well_formed(id, LONGEST) {
            return Err(QmpError::new("Invalid block export id"));
        }
        if self.exports.entries.borrow().iter().any(|export| export.id == id) {
            return Err(QmpError::new(format_args!("Block export id '{id}' is already in use")));
        }
        Ok(())
    }

    pub(super) async fn block_export_add(&self, arguments: &Arguments) -> Result<()> {
        let id = text(arguments, "id");
        self.check_export_id(id)?;
        let kind = text(arguments, "type");
        if kind == "nbd" && self.nbd.is_none() {
            return Err(QmpError::new("NBD server not running"));
        }
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
        match kind {
            "vhost-user-blk" => {
                if writable {
                    // The machine goes on when this server is killed and started again.
                    found.drive.disk().begin_restart_log().await.map_err(QmpError::new)?;
                }
                self.add_vhost_user(id, &found.drive, writable, arguments)
            }
            "fuse" => self.add_fuse(id, &found.drive, writable, arguments),
            _ => self.add_nbd(id, &found.drive, writable, arguments),
        }
    }

    fn add_vhost_user(
        &self,
        id: &str,
        drive: &Drive<H>,
        writable: bool,
        arguments: &Arguments,
    ) -> Result<()> {
        let addr = arguments.get("addr").and_then(Value::as_object);
        let Some(path) = addr.and_then(|addr| optional_text(addr, "path")) else {
            return Err(QmpError::new("'addr' must be a unix socket for vhost-user-blk"));
        };
        let mut options = vhost_user::Options { writable, ..vhost_user::Options::default() };
        let out_of_range = |what| QmpError::new(format_args!("Parameter '{what}' is out of range"));
        if let Some(queues) = integer(arguments, "num-queues") {
            options.queues = u16::try_from(queues).map_err(|_| out_of_range("num-queues"))?;
        }
        if let Some(size) = integer(arguments, "logical-block-size") {
            options.logical_block_size =
                u32::try_from(size).map_err(|_| out_of_range("logical-block-size"))?;
        }
        let listener = Listener::bind_unix(Path::new(path))
            .map_err(|error| QmpError::new(format_args!("cannot listen on '{path}': {error}")))?;
        self.serve_vhost_user(id, drive, listener, options)
    }

    fn add_fuse(
        &self,
        id: &str,
        drive: &Drive<H>,
        writable: bool,
        arguments: &Arguments,
    ) -> Result<()> {
        let allow_other = match optional_text(arguments, "allow-other") {
            Some("on") => fuse::AllowOther::On,
            Some("off") => fuse::AllowOther::Off,
            _ => fuse::AllowOther::Auto,
        };
        let growable = flag(arguments, "growable").unwrap_or(false);
        let options = fuse::Options { writable, growable, allow_other };
        self.mount(id, drive, Path::new(text(arguments, "mountpoint")), options)
    }

    fn add_nbd(
        &self,
        id: &str,
        drive: &Drive<H>,
        writable: bool,
        arguments: &Arguments,
    ) -> Result<()> {
        let Some(server) = &self.nbd else {
            return Err(QmpError::new("NBD server not running"));
        };
        let node = text(arguments, "node-name");
        let name = optional_text(arguments, "name").unwrap_or(node).to_owned();
        let gone = server.add(Export {
            name: name.clone(),
            description: text(arguments, "description").to_owned(),
            read_only: !writable,
            device: drive.disk().clone(),
        });
        gone.map_err(|error| match error {
            ExportError::DuplicateName(name) => {
                QmpError::new(format_args!("NBD server already has export named '{name}'"))
            }
            error => QmpError::new(error),
        })?;
        self.exports.add(ExportEntry::new(id, Kind::Nbd(name), drive));
        Ok(())
    }

    pub(super) fn block_export_del(&self, arguments: &Arguments) -> Result<()> {
        let id = text(arguments, "id");
        let exports = self.exports.entries.borrow();
        let export = exports.iter().find(|export| export.id == id);
        let export =
            export.ok_or_else(|| QmpError::new(format_args!("Export '{id}' is not found")))?;
        if export.ending.get() {
            return Err(QmpError::new(format_args!("export '{id}' is already shutting down")));
        }
        let hard = optional_text(arguments, "mode") == Some("hard");
        let in_use = |clients| {
            QmpError::new(format_args!(
                "export '{id}' still in use by {clients} clients; mode 'hard' disconnects them"
            ))
        };
        match &export.kind {
            Kind::VhostUser(server) if !hard && server.connected() => return Err(in_use(1)),
            Kind::VhostUser(server) => server.stop(),
            Kind::Fuse(mount) => mount.stop(),
            Kind::Nbd(name) => self.remove_nbd(id, name, hard, in_use)?,
        }
        export.ending.set(true);
        Ok(())
    }

    /// Takes an export out of the list once it is gone, and tells so.
    pub(super) fn remove_after(&self, id: &str, gone: impl Future<Output = ()> + 'static) {
        let (exports, events, id) = (Rc::clone(&self.exports), self.events.clone(), id.to_owned());
        drop(spawn(async move {
            gone.await;
            exports.remove(&id);
            events.emit("BLOCK_EXPORT_DELETED", json!({"id": id}));
        }));
    }

    fn remove_nbd(
        &self,
        id: &str,
        name: &str,
        hard: bool,
        in_use: impl Fn(usize) -> QmpError,
    ) -> Result<()> {
        let Some(server) = &self.nbd else {
            return Err(QmpError::new("NBD server not running"));
        };
        let mode = if hard { RemoveMode::Hard } else { RemoveMode::Safe };
        let gone = server.remove(name, mode).map_err(|error| match error {
            RemoveError::InUse { clients, .. } => in_use(clients),
            error => QmpError::new(error),
        })?;
        self.remove_after(id, gone);
        Ok(())
    }
}
