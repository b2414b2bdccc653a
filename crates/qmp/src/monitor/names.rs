//! Node names: one for each layer, keyed by the layer's file; those that options give to the images below a disk are of
//! that disk alone.

use super::arguments::is_well_formed;
use super::{Drive, Monitor, Result};
use crate::error::QmpError;
use isobath_disk::Layer;
use isobath_storage::{FileId, Host, StorageExt};
use std::collections::{HashMap, HashSet};
use std::rc::{Rc, Weak};
use std::sync::Arc;

/// The longest node name (QEMU's `BDRV_NODENAME_LEN`, less its terminator).
const LONGEST: usize = 31;

/// Names given to files' nodes.
pub(super) struct Names<H: Host> {
    of_files: HashMap<FileId, String>,
    /// The names of images that options put below a disk. Other disks may have the same files, as other nodes.
    below: Vec<NameBelow<H>>,
    next: u32,
}

/// The name of an image below a disk.
struct NameBelow<H: Host> {
    drive: Weak<Drive<H>>,
    file: FileId,
    name: String,
}

impl<H: Host> NameBelow<H> {
    fn is_of(&self, drive: &Drive<H>) -> bool {
        std::ptr::eq(self.drive.as_ptr(), drive)
    }
}

impl<H: Host> Default for Names<H> {
    fn default() -> Self {
        Self { of_files: HashMap::new(), below: Vec::new(), next: 0 }
    }
}

impl<H: Host> Names<H> {
    /// The name of a file's node in a disk, which is generated if it has none yet.
    pub(super) fn of(&mut self, drive: &Drive<H>, file: FileId) -> String {
        if let Some(own) = self.own(drive, file) {
            return own.name.clone();
        }
        let next = &mut self.next;
        let name = self.of_files.entry(file).or_insert_with(|| {
            *next += 1;
            format!("#block{next:03}")
        });
        name.clone()
    }

    /// Names a file's node, in all disks but those in which it has another name of its own.
    pub(super) fn give(&mut self, file: FileId, name: &str) {
        self.of_files.insert(file, name.to_owned());
    }

    /// Names an image below a disk, in this disk alone.
    pub(super) fn give_below(&mut self, drive: &Rc<Drive<H>>, file: FileId, name: String) {
        self.below.push(NameBelow { drive: Rc::downgrade(drive), file, name });
    }

    /// Has one disk's own names be another's, which has taken over its images.
    pub(super) fn hand_over(&mut self, from: &Drive<H>, to: &Rc<Drive<H>>) {
        for named in self.below.iter_mut().filter(|named| named.is_of(from)) {
            named.drive = Rc::downgrade(to);
        }
    }

    /// Forgets the names of all files but those of these disks.
    pub(super) fn keep(&mut self, drives: &[Rc<Drive<H>>]) {
        let files: HashSet<FileId> = drives.iter().flat_map(|drive| drive.files()).collect();
        self.of_files.retain(|file, _| files.contains(file));
        self.below.retain(|named| {
            let drive = drives.iter().find(|drive| named.is_of(drive));
            drive.is_some_and(|drive| drive.files().contains(&named.file))
        });
    }

    fn own(&self, drive: &Drive<H>, file: FileId) -> Option<&NameBelow<H>> {
        self.below.iter().find(|named| named.file == file && named.is_of(drive))
    }

    fn is_named(&self, name: &str, drive: &Drive<H>, file: FileId) -> bool {
        match self.own(drive, file) {
            Some(own) => own.name == name,
            None => self.of_files.get(&file).is_some_and(|known| known == name),
        }
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
    /// The name of the node of a disk's layer.
    pub(super) fn node_name(&self, drive: &Drive<H>, layer: &Layer<H::File>) -> String {
        self.names.borrow_mut().of(drive, layer.storage().id())
    }

    /// The name of a disk's root node.
    pub(super) fn root_name(&self, drive: &Drive<H>) -> String {
        drive.root().map_or_else(String::new, |file| self.names.borrow_mut().of(drive, file))
    }

    pub(super) fn find_device(&self, device: &str) -> Option<Rc<Drive<H>>> {
        let drives = self.drives.borrow();
        drives.iter().find(|drive| !device.is_empty() && drive.device() == device).cloned()
    }

    pub(super) fn find_node(&self, name: &str) -> Option<Found<H>> {
        // An image may have the name of the node that limits it, which stays its own when others come above it.
        if let Some(found) = self.find_named(name) {
            return Some(found);
        }
        if let Some(drive) = self.limited_by(name) {
            let layer = drive.layers().first().map(Arc::clone)?;
            return Some(Found { drive, layer, depth: 0 });
        }
        self.name_all();
        self.find_named(name)
    }

    /// Names every layer.
    fn name_all(&self) {
        for drive in self.drives.borrow().iter() {
            for layer in drive.layers() {
                self.node_name(drive, &layer);
            }
        }
    }

    /// The layer that has this name already.
    fn find_named(&self, name: &str) -> Option<Found<H>> {
        let names = self.names.borrow();
        self.drives.borrow().iter().find_map(|drive| {
            let layers = drive.layers();
            let mut layers = layers.iter().enumerate();
            let (depth, layer) =
                layers.find(|(_, layer)| names.is_named(name, drive, layer.storage().id()))?;
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
            return Err(duplicate(name));
        }
        Ok(())
    }
}

pub(super) fn duplicate(name: &str) -> QmpError {
    QmpError::new(format_args!("Duplicate nodes with node-name='{name}'"))
}
