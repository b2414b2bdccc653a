//! A disk under a monitor.

use isobath_disk::{Layer, LiveDisk};
use isobath_ring::{JoinHandle, spawn};
use isobath_storage::{FileId, Host, StorageExt};
use std::cell::{Cell, RefCell};
use std::path::PathBuf;
use std::sync::Arc;

/// A disk, and the name of the device in which it is.
pub struct Drive<H: Host> {
    device: String,
    disk: Arc<LiveDisk<H>>,
    /// The task that looks after a disk that was added.
    upkeep: RefCell<Option<JoinHandle<()>>>,
    added: bool,
    /// The disk goes on in another one.
    taken: Cell<bool>,
}

impl<H: Host> Drive<H> {
    /// A disk in a device. Its upkeep and end are the caller's.
    pub fn new(device: impl Into<String>, disk: Arc<LiveDisk<H>>) -> Self {
        let (upkeep, taken) = (RefCell::default(), Cell::new(false));
        Self { device: device.into(), disk, upkeep, added: false, taken }
    }

    /// A disk that was added, in no device.
    pub(super) fn added(disk: Arc<LiveDisk<H>>) -> Self {
        let kept = disk.clone();
        let upkeep = spawn(async move {
            if let Err(error) = kept.upkeep().await {
                tracing::warn!(%error, "upkeep ended");
            }
        });
        let upkeep = RefCell::new(Some(upkeep));
        Self { device: String::new(), disk, upkeep, added: true, taken: Cell::new(false) }
    }

    /// The name of its device; empty where it is in none.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// The disk.
    pub fn disk(&self) -> &Arc<LiveDisk<H>> {
        &self.disk
    }

    /// Whether it was added by a client.
    pub(super) fn is_added(&self) -> bool {
        self.added
    }

    /// Its layers, the active one first.
    pub(super) fn layers(&self) -> Vec<Arc<Layer<H::File>>> {
        self.disk.layers()
    }

    /// The files of all layers.
    pub(super) fn files(&self) -> Vec<FileId> {
        self.layers().iter().map(|layer| layer.storage().id()).collect()
    }

    /// The file of the active layer.
    pub(super) fn root(&self) -> Option<FileId> {
        self.layers().first().map(|layer| layer.storage().id())
    }

    /// The path of the active image.
    pub(super) fn active_image(&self) -> Option<PathBuf> {
        self.layers().first().map(|layer| layer.name().to_owned())
    }

    pub(super) fn is_read_only(&self) -> bool {
        self.disk.is_read_only()
    }

    /// Another disk goes on with this one's images: it is not to be closed here.
    pub(super) fn take(&self) {
        self.taken.set(true);
        self.stop_upkeep();
    }

    fn stop_upkeep(&self) {
        if let Some(upkeep) = self.upkeep.borrow_mut().take() {
            upkeep.abort();
        }
    }

    /// Closes a disk that was added.
    pub(super) async fn close(&self) -> isobath_disk::Result<()> {
        self.stop_upkeep();
        if self.taken.replace(true) { Ok(()) } else { self.disk.close().await }
    }
}
