//! A disk under a monitor.

use isobath_disk::{Layer, LiveDisk};
use isobath_ring::{JoinHandle, spawn};
use isobath_storage::{FileId, Host, StorageExt};
use std::cell::{Cell, RefCell};
use std::path::PathBuf;
use std::sync::Arc;

/// A disk, and the name of its device.
pub struct Drive<H: Host> {
    device: String,
    disk: Arc<LiveDisk<H>>,
    /// The upkeep task of a disk that was added.
    upkeep: RefCell<Option<JoinHandle<()>>>,
    added: bool,
    /// Whether another disk has taken over this one's images.
    taken: Cell<bool>,
}

impl<H: Host> Drive<H> {
    /// A disk in a device. The caller runs its upkeep and closes it.
    pub fn new(device: impl Into<String>, disk: Arc<LiveDisk<H>>) -> Self {
        let (upkeep, taken) = (RefCell::default(), Cell::new(false));
        Self { device: device.into(), disk, upkeep, added: false, taken }
    }

    /// A disk that was added, without a device.
    pub(super) fn added(disk: Arc<LiveDisk<H>>) -> Self {
        let kept = disk.clone();
        let upkeep = spawn(async move {
            if let Err(error) = kept.upkeep().await {
                tracing::warn!(%error, "background upkeep ended");
            }
        });
        let upkeep = RefCell::new(Some(upkeep));
        Self { device: String::new(), disk, upkeep, added: true, taken: Cell::new(false) }
    }

    /// The name of its device; empty if it has none.
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

    /// Notes that another disk takes over this one's images, so that it is not closed here.
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
