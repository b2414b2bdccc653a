//! Adding and removing exports.

use super::arguments::{Arguments, flag, is_well_formed, optional_text, text};
use super::snapshot::check_root;
use super::{Drive, Monitor, Result};
use crate::error::QmpError;
use crate::server::ClientFiles;
use event_listener::Event;
use isobath_disk::{Layer, LiveDisk};
use isobath_export::frontend::{
    DiskFile, Export, ExportControl, ExportedDisk, Frontend, Outlive, Parameter, Place, Presence,
    Protocol, RemoveError, RemoveMode, Setting, Settings, Shown, Takes,
};
use isobath_export::registry::PROTOCOLS;
use isobath_ring::net::Listener;
use isobath_ring::{JoinHandle, spawn, unblock};
use isobath_storage::{Host, Storage};
use serde_json::{Value, json};
use std::cell::{Cell, RefCell};
use std::io;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

/// The longest export id.
const LONGEST: usize = 255;

/// An export as QMP knows it.
pub(super) struct ExportEntry {
    id: String,
    protocol: &'static Protocol,
    control: Box<dyn ExportControl>,
    /// The device that it serves, or the node at the time it was added.
    of: Of,
    /// The name of the device or node that it was added by.
    chosen_by: String,
    ending: Cell<bool>,
    /// Serves it, removes it from the list, and sends the event.
    serving: JoinHandle<()>,
}

enum Of {
    Device(String),
    /// A node, by its disk's address.
    Node(usize),
}

impl Of {
    /// A disk, by its device if it has one.
    fn drive<H: Host>(drive: &Drive<H>) -> Self {
        match drive.device() {
            "" => Self::Node(address_of(drive)),
            device => Self::Device(device.to_owned()),
        }
    }
}

impl ExportEntry {
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

/// The current exports.
#[derive(Default)]
pub(super) struct ExportList {
    entries: RefCell<Vec<ExportEntry>>,
    /// The id of the first export that failed.
    failed: RefCell<Option<String>>,
    removed: Event,
}

impl ExportList {
    fn remove(&self, id: &str) {
        self.entries.borrow_mut().retain(|export| export.id != id);
        self.removed.notify(usize::MAX);
    }

    /// Waits until no export has its own server.
    async fn without_own_servers(&self) {
        self.without(|protocol| !protocol.shared).await;
    }

    /// Waits until no export is of such a protocol.
    async fn without(&self, is_meant: impl Fn(&Protocol) -> bool) {
        loop {
            let removed = self.removed.listen();
            if !self.entries.borrow().iter().any(|export| is_meant(export.protocol)) {
                return;
            }
            removed.await;
        }
    }

    /// Removes the exports that end only once nobody uses them, and waits for that.
    async fn until_unused(&self) {
        for export in &*self.entries.borrow() {
            if export.protocol.ends_unused {
                export.ending.set(true);
                if let Err(error) = export.control.remove(RemoveMode::Safe) {
                    tracing::error!(%error, id = export.id, "cannot remove an export");
                }
            }
        }
        self.without(|protocol| protocol.ends_unused).await;
    }

    /// Stops exports with their own server; shared ones end, without events, with theirs.
    fn stop_own_servers(&self) {
        for export in &*self.entries.borrow() {
            if export.protocol.shared {
                export.serving.abort();
            } else if let Err(error) = export.control.remove(RemoveMode::Hard) {
                tracing::error!(%error, id = export.id, "cannot stop an export");
            }
        }
    }
}

/// The files of a layer: the image, and its data file if it has one.
fn files_of<S: Storage>(layer: &Layer<S>) -> Vec<DiskFile> {
    let file = |storage: &S| DiskFile { name: storage.name().to_owned(), id: storage.id() };
    let mut files = vec![file(layer.storage())];
    if layer.data().id() != layer.storage().id() {
        files.push(file(layer.data()));
    }
    files
}

impl<H: Host + Clone> Monitor<H> {
    /// Exports a disk through a frontend, under an id, until the export is deleted, the frontend ends by itself, or the
    /// monitor [ends](Self::end); if the frontend's server is [shared](Protocol::shared), until that is stopped.
    /// Clients may write if the disk is writable.
    ///
    /// # Errors
    /// If the id is in use, or the frontend rejects the disk or a setting.
    pub fn export(
        &self,
        frontend: &dyn Frontend<LiveDisk<H>>,
        id: &str,
        drive: &Drive<H>,
        settings: Settings,
    ) -> Result<()> {
        self.check_unused(id)?;
        self.open_export(frontend, id, drive, drive.device(), true, settings)
    }

    fn open_export(
        &self,
        frontend: &dyn Frontend<LiveDisk<H>>,
        id: &str,
        drive: &Drive<H>,
        chosen_by: &str,
        writable: bool,
        settings: Settings,
    ) -> Result<()> {
        let layers = drive.layers();
        let mut files = layers.iter().map(|layer| files_of(layer));
        let disk = ExportedDisk {
            files: files.next().unwrap_or_default(),
            below: files.flatten().map(|file| file.id).collect(),
            device: drive.disk().clone(),
            name: self.name_of(drive),
            chosen_by: chosen_by.to_owned(),
            writable,
            images: layers.iter().map(|layer| layer.name().to_owned()).collect(),
        };
        let Export { control, serving } = frontend.export(disk, settings).map_err(QmpError::new)?;
        let (exports, events, name) =
            (Rc::clone(&self.exports), self.events.clone(), id.to_owned());
        let serving = spawn(async move {
            if let Err(error) = serving.await {
                tracing::error!(%error, id = name, "an export failed");
                exports.failed.borrow_mut().get_or_insert_with(|| name.clone());
            }
            exports.remove(&name);
            events.emit("BLOCK_EXPORT_DELETED", json!({"id": name}));
        });
        self.exports.entries.borrow_mut().push(ExportEntry {
            id: id.to_owned(),
            protocol: frontend.protocol(),
            control,
            of: Of::drive(drive),
            chosen_by: chosen_by.to_owned(),
            ending: Cell::new(false),
            serving,
        });
        Ok(())
    }

    /// The locations of all exports of a disk.
    pub fn places(&self, drive: &Drive<H>, shown: Shown) -> Vec<Place> {
        let exports = self.exports.entries.borrow();
        let own = exports.iter().filter(|export| export.is_of(drive));
        own.flat_map(|export| export.control.places(shown)).collect()
    }

    /// Waits until there are no exports except those of shared servers.
    pub async fn exports_closed(&self) {
        self.exports.without_own_servers().await;
    }

    /// Waits until clients can use all exports.
    ///
    /// # Errors
    /// They never can use one.
    pub async fn exports_started(&self) -> io::Result<()> {
        let starting: Vec<_> = {
            let exports = self.exports.entries.borrow();
            exports.iter().map(|export| export.control.started()).collect()
        };
        for started in starting {
            started.await?;
        }
        Ok(())
    }

    /// Whether there are exports that end only once nobody uses them.
    pub fn has_exports_in_use(&self) -> bool {
        self.exports.entries.borrow().iter().any(|export| export.protocol.ends_unused)
    }

    /// Removes the exports that end only once nobody uses them, and waits for that: everything else goes on meanwhile.
    pub async fn exports_unused(&self) {
        self.exports.until_unused().await;
    }

    /// The id of an export that has failed, if one has.
    pub fn failed_export(&self) -> Option<String> {
        self.exports.failed.borrow().clone()
    }

    /// Closes every export except those of shared servers.
    pub(super) async fn close_exports(&self) {
        self.exports.stop_own_servers();
        self.exports_closed().await;
    }

    /// The exports that clients can choose or connect to, and the number of their clients, grouped by frontend.
    pub(crate) fn export_clients(&self) -> Vec<(String, usize)> {
        let exports = self.exports.entries.borrow();
        let clients = |export: &ExportEntry| {
            let name = export.control.name().unwrap_or(&export.id);
            export.control.clients().map(|clients| (name.to_owned(), clients))
        };
        let of = |protocol: &'static Protocol| {
            exports.iter().filter(move |export| export.protocol.name == protocol.name)
        };
        PROTOCOLS.iter().flat_map(|protocol| of(protocol)).filter_map(clients).collect()
    }

    pub(super) fn query_block_exports(&self) -> Value {
        let drives = self.drives();
        let exports = self.exports.entries.borrow();
        let infos = exports.iter().map(|export| {
            let drive = drives.iter().find(|drive| export.is_of(drive));
            json!({
                "id": export.id,
                "type": export.protocol.name,
                "node-name": drive.map_or_else(String::new, |drive| self.exported_node(export, drive)),
                "shutting-down": export.ending.get(),
            })
        });
        infos.collect()
    }

    /// The name of the node that an export serves: the one that limits the disk, if the export was added by its name.
    fn exported_node(&self, export: &ExportEntry, drive: &Rc<Drive<H>>) -> String {
        let filter = self.filter_of(drive).filter(|filter| *filter == export.chosen_by);
        filter.unwrap_or_else(|| self.root_name(drive))
    }

    /// The id of an export of a disk.
    pub(super) fn export_of(&self, drive: &Drive<H>) -> Option<String> {
        let exports = self.exports.entries.borrow();
        exports.iter().find(|export| export.is_of(drive)).map(|export| export.id.clone())
    }

    /// Rejects an id that an export already uses.
    fn check_unused(&self, id: &str) -> Result<()> {
        if self.exports.entries.borrow().iter().any(|export| export.id == id) {
            return Err(QmpError::new(format_args!("Block export id '{id}' is already in use")));
        }
        Ok(())
    }

    pub(super) async fn block_export_add(
        &self,
        arguments: &Arguments,
        client: &ClientFiles,
    ) -> Result<()> {
        let id = text(arguments, "id");
        if !is_well_formed(id, LONGEST) {
            return Err(QmpError::new("Invalid block export id"));
        }
        self.check_unused(id)?;
        let kind = text(arguments, "type");
        let frontend = self.frontends.of(kind);
        let frontend =
            frontend.ok_or_else(|| QmpError::new(format_args!("there is no frontend '{kind}'")))?;
        frontend.ready().map_err(QmpError::new)?;
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
        if writable && frontend.protocol().clients_outlive == Outlive::Always {
            found.drive.disk().begin_restart_log().await.map_err(QmpError::new)?;
        }
        let settings = settings(frontend.protocol(), arguments, client).await?;
        self.open_export(frontend, id, &found.drive, node, writable, settings)
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
        let mode = if hard { RemoveMode::Hard } else { RemoveMode::Safe };
        export.control.remove(mode).map_err(|error| match error {
            RemoveError::InUse(clients) => QmpError::new(format_args!(
                "export '{id}' still in use by {clients} client(s); mode 'hard' disconnects them"
            )),
            error => QmpError::new(error),
        })?;
        export.ending.set(true);
        Ok(())
    }
}

/// The settings of a protocol's parameters, from the arguments of `block-export-add`. Sockets are bound last, once
/// everything else is known to be valid.
async fn settings(
    protocol: &Protocol,
    arguments: &Arguments,
    client: &ClientFiles,
) -> Result<Settings> {
    let mut settings = Settings::default();
    let all = protocol.parameters.iter().chain([&protocol.location]);
    for parameter in all.filter(|parameter| parameter.qmp != Presence::Absent) {
        if let Some(value) = arguments.get(parameter.name) {
            settings.set(parameter, setting(parameter, value, client).await?);
        }
    }
    Ok(settings)
}

/// The value of a parameter, which has the type given by the schema.
async fn setting(parameter: &Parameter, value: &Value, client: &ClientFiles) -> Result<Setting> {
    let name = parameter.name;
    let unexpected = || QmpError::new(format_args!("Invalid parameter type for '{name}'"));
    let text = || value.as_str().ok_or_else(unexpected);
    match parameter.takes {
        Takes::UblkDevice => Err(unexpected()),
        Takes::Text | Takes::Choice(_) => Ok(Setting::Text(text()?.to_owned())),
        Takes::Path => Ok(Setting::Path(text()?.into())),
        Takes::Flag => value.as_bool().map(Setting::Flag).ok_or_else(unexpected),
        Takes::Number { most } | Takes::Bytes { most } => {
            let number = value.as_u64().filter(|number| *number <= most);
            number
                .map(Setting::Number)
                .ok_or_else(|| QmpError::new(format_args!("Parameter '{name}' is out of range")))
        }
        Takes::UnixSocket | Takes::Socket if value["type"] == "fd" => {
            let name = value.get("str").and_then(Value::as_str).ok_or_else(unexpected)?;
            let listener = Listener::handed_in(client.take_named(name)?);
            listener.map(Setting::Listener).map_err(|error| {
                QmpError::new(format_args!("cannot listen on file descriptor '{name}': {error}"))
            })
        }
        Takes::UnixSocket | Takes::Socket => {
            let path = value.get("path").and_then(Value::as_str).ok_or_else(unexpected)?;
            let socket = PathBuf::from(path);
            // Others that bind there are waited for.
            let listener = unblock(move || Listener::bind_unix(&socket)).await;
            listener
                .map(Setting::Listener)
                .map_err(|error| QmpError::new(format_args!("cannot listen on '{path}': {error}")))
        }
    }
}
