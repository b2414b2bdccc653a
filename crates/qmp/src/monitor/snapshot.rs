//! Snapshots: the active image becomes a backing file.

use super::arguments::{Arguments, optional_text, text};
use super::names::Found;
use super::{Drive, Monitor, Result};
use crate::error::QmpError;
use isobath_disk::{LiveDisk, OpenOptions, Overlay};
use isobath_storage::Host;
use isobath_storage::window::Part;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::rc::Rc;

impl<H: Host + Clone> Monitor<H> {
    pub(super) async fn snapshot_sync(&self, arguments: &Arguments) -> Result<()> {
        self.prune_names();
        let device = optional_text(arguments, "device");
        let node = optional_text(arguments, "node-name");
        let new_node = optional_text(arguments, "snapshot-node-name");
        let found = self.look_up(device.unwrap_or(""), node.unwrap_or(""))?;
        if node.is_some() && new_node.is_none() {
            return Err(QmpError::new("New overlay node-name missing"));
        }
        if let Some(name) = new_node {
            if self.find_node(name).is_some() {
                return Err(QmpError::new("New overlay node-name already in use"));
            }
            self.check_new_name(name)?;
        }
        let format = optional_text(arguments, "format").unwrap_or("qcow2");
        if format != "qcow2" {
            return Err(QmpError::new(format_args!(
                "overlay format '{format}' is not supported; use 'qcow2'"
            )));
        }
        let file = text(arguments, "snapshot-file");
        // One with a protocol is no file, as in QEMU: an export can be an overlay, and a layer in a store is refused.
        let is_part = Part::of_name(Path::new(file)).is_some();
        let is_named = !is_part && self.host.protocol_name(file);
        let path = if is_named { PathBuf::from(file) } else { self.path_of_file(file) };
        let overlay = match optional_text(arguments, "mode") {
            Some("existing") => Overlay::Existing(path),
            _ => Overlay::Create(path),
        };
        self.put_on_top(&found, &overlay).await?;
        if let (Some(name), Some(file)) = (new_node, found.drive.root()) {
            self.names.borrow_mut().give(file, name);
        }
        Ok(())
    }

    pub(super) async fn snapshot(&self, arguments: &Arguments) -> Result<()> {
        self.prune_names();
        let node = text(arguments, "node");
        // Jobs that have concluded let go of the overlay.
        self.pass_on();
        let found = self.look_up(node, node)?;
        let name = text(arguments, "overlay");
        let overlay = self.look_up(name, name)?;
        check_root(&found)?;
        if overlay.depth > 0 || !overlay.drive.device().is_empty() {
            return Err(QmpError::new(format_args!(
                "The overlay '{name}' is already in use; add another with blockdev-add, 'backing': null"
            )));
        }
        if Rc::ptr_eq(&overlay.drive, &found.drive) {
            return Err(QmpError::new("A node cannot be its own overlay"));
        }
        if let Some(export) = self.export_of(&overlay.drive) {
            return Err(QmpError::new(format_args!("The overlay is exported as '{export}'")));
        }
        self.check_no_job(&overlay.drive)?;
        if overlay.drive.disk().depth() > 1 {
            return Err(QmpError::new("The overlay already has a backing image"));
        }
        let Some(path) = overlay.drive.active_image() else {
            return Err(QmpError::new("The overlay has no image"));
        };
        let Found { drive, layer, .. } = overlay;
        drop(layer);
        let options = drive.disk().options_alone();
        // The node's own handle would keep the disk from opening the image.
        self.drives.borrow_mut().retain(|other| !Rc::ptr_eq(other, &drive));
        let closed = self.closing.close(&drive).await.map_err(QmpError::new);
        drop(drive);
        let done = match closed {
            Ok(()) => self.put_on_top(&found, &Overlay::Existing(path.clone())).await,
            Err(error) => Err(error),
        };
        let Err(failure) = done else { return Ok(()) };
        match self.bring_back(&path, &options, name).await {
            Ok(()) => Err(failure),
            Err(error) => Err(QmpError::new(format_args!(
                "{failure}; the overlay '{name}' was closed for it and could not be opened again: {error}; add it \
                 with blockdev-add"
            ))),
        }
    }

    /// Reopens a node that could not become an overlay.
    async fn bring_back(&self, path: &Path, options: &OpenOptions, name: &str) -> Result<()> {
        let disk = LiveDisk::open(self.host.clone(), path, options).await.map_err(QmpError::new)?;
        let drive = Drive::added(disk);
        self.attend(&drive);
        if let Some(file) = drive.root() {
            self.names.borrow_mut().give(file, name);
        }
        self.drives.borrow_mut().push(Rc::new(drive));
        Ok(())
    }

    /// Supports only a single snapshot: several disks cannot be changed atomically.
    pub(super) async fn transaction(&self, arguments: &Arguments) -> Result<()> {
        let actions = arguments.get("actions").and_then(Value::as_array);
        let actions = actions.map_or(&[][..], Vec::as_slice);
        if actions.len() > 1 {
            return Err(QmpError::new(format_args!(
                "A transaction of {} actions is not supported; use a single action",
                actions.len()
            )));
        }
        let Some(action) = actions.first() else { return Ok(()) };
        let data = action.get("data").and_then(Value::as_object).cloned().unwrap_or_default();
        match action.get("type").and_then(Value::as_str) {
            Some("blockdev-snapshot") => self.snapshot(&data).await,
            _ => self.snapshot_sync(&data).await,
        }
    }

    async fn put_on_top(&self, found: &Found<H>, overlay: &Overlay) -> Result<()> {
        check_root(found)?;
        found.drive.disk().snapshot(overlay).await.map_err(QmpError::new)
    }
}

/// Rejects a node that is below another.
pub(super) fn check_root<H: Host>(found: &Found<H>) -> Result<()> {
    if found.depth == 0 { Ok(()) } else { Err(QmpError::new("Need a root block node")) }
}
