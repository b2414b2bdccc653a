//! Node names: one for each layer, keyed by the layer's file.

use super::arguments::is_well_formed;
use super::{Drive, Monitor, Result};
use crate::error::QmpError;
use isobath_disk::Layer;
use isobath_storage::{FileId, Host, StorageExt};
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::sync::Arc;

/// The longest node name (QEMU's `BDRV_NODENAME_LEN`, less its terminator).
const LONGEST: usize = 31;

/// Names given to files' nodes.
#[derive(Debug, Default)]
pub(super) struct Names {
    names: HashMap<FileId, String>,
    next: u32,
}

impl Names {
    /// The name of a file's node, which is generated if it has none yet.
    pub(super) fn of(&mut self, file: FileId) -> String {
        let next = &mut self.next;
        let name = self.names.entry(file).or_insert_with(|| {
            *next += 1;
            format!("#block{next:03}")
        });
        name.clone()
    }

    pub(super) fn give(&mut self, file: FileId, name: &str) {
        self.names.insert(file, name.to_owned());
    }

    /// Forgets the names of all other files.
    pub(super) fn keep(&mut self, files: &HashSet<FileId>) {
        self.names.retain(|file, _| files.contains(file));
    }

    fn file_of(&self, name: &str) -> Option<FileId> {
        self.names.iter().find(|(_, known)| *known == name).map(|(file, _)| *file)
    }
}

/// A layer of a drive's disk.
pub(super) struct Found<H: Host> {
    pub(super) drive: Rc<Drive<H>>,
    pub(super) layer: Arc<Layer<H::File>>,
    /// 0 is the active layer.
    pub(super) depth: usize,
}

impl<H: Host + Clone> Monitor<H> {
    /// The name of a layer's node.
    pub(super) fn node_name(&self, layer: &Layer<H::File>) -> String {
        self.names.borrow_mut().of(layer.storage().id())
    }

    /// The name of a disk's root node.
    pub(super) fn root_name(&self, drive: &Drive<H>) -> String {
        drive.root().map_or_else(String::new, |file| self.names.borrow_mut().of(file))
    }

    pub(super) fn find_device(&self, device: &str) -> Option<Rc<Drive<H>>> {
        let drives = self.drives.borrow();
        drives.iter().find(|drive| !device.is_empty() && drive.device() == device).cloned()
    }

    pub(super) fn find_node(&self, name: &str) -> Option<Found<H>> {
        // An image may have the name of the node that limits it, which stays its own when others come above it.
        let known = self.names.borrow().file_of(name);
        if let Some(found) = known.and_then(|file| self.find_file(file)) {
            return Some(found);
        }
        if let Some(drive) = self.limited_by(name) {
            let layer = drive.layers().first().map(Arc::clone)?;
            return Some(Found { drive, layer, depth: 0 });
        }
        self.find_file(self.name_all(name)?)
    }

    /// Names every layer, and returns the one that got `name`.
    fn name_all(&self, name: &str) -> Option<FileId> {
        for drive in self.drives.borrow().iter() {
            for layer in drive.layers() {
                self.node_name(&layer);
            }
        }
        self.names.borrow().file_of(name)
    }

    /// The layer stored in a file.
    pub(super) fn find_file(&self, file: FileId) -> Option<Found<H>> {
        self.drives.borrow().iter().find_map(|drive| {
            let layers = drive.layers();
            let mut layers = layers.iter().enumerate();
            let (depth, layer) = layers.find(|(_, layer)| layer.storage().id() == file)?;
            Some(Found { drive: Rc::clone(drive), layer: Arc::clone(layer), depth })
        })
    }

    /// Finds a node by a device's name or its own, either of which may be empty (QEMU's `bdrv_lookup_bs`).
    pub(super) fn look_up(&self, device: &str, node: &str) -> Result<Found<H>> {
        let found = self.find_device(device).and_then(|drive| {
            let layer = drive.layers().first().map(Arc::clone)?;
            Some(Found { drive, layer, depth: 0 })
        });
        let found = found.or_else(|| if node.is_empty() { None } else { self.find_node(node) });
        found.ok_or_else(|| {
            QmpError::new(format_args!("Cannot find device='{device}' nor node-name='{node}'"))
        })
    }

    /// Checks that a node can be given this name.
    pub(super) fn check_new_name(&self, name: &str) -> Result<()> {
        if !is_well_formed(name, LONGEST) {
            return Err(QmpError::new(format_args!("Invalid node-name: '{name}'")));
        }
        if self.find_device(name).is_some() {
            return Err(QmpError::new(format_args!(
                "node-name={name} is conflicting with a device id"
            )));
        }
        let is_file = self.files.borrow().iter().any(|file| file.name == name);
        if is_file || self.find_node(name).is_some() {
            return Err(QmpError::new(format_args!("Duplicate nodes with node-name='{name}'")));
        }
        Ok(())
    }
}
