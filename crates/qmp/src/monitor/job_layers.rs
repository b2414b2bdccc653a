//! The layers that a job works on.

use isobath_disk::Layer;
use isobath_storage::{FileId, Storage};
use std::sync::Arc;

/// The layers of a job.
#[derive(Default)]
pub(super) struct JobLayers<S> {
    /// The upper one; `None`: the active layer.
    pub(super) top: Option<Arc<Layer<S>>>,
    /// The lower one; `None`: the default of the command.
    pub(super) base: Option<Arc<Layer<S>>>,
}

impl<S: Storage> JobLayers<S> {
    /// The layers' files, the upper one first.
    pub(super) fn ids(&self) -> (Option<FileId>, Option<FileId>) {
        let id = |layer: &Option<Arc<Layer<S>>>| layer.as_ref().map(|layer| layer.storage().id());
        (id(&self.top), id(&self.base))
    }
}
