//! How a file is named when it is opened anew.

use super::descriptors::Pool;
use isobath_storage::{FileId, OpenMode};
use std::path::PathBuf;
use std::sync::Arc;

/// The name by which a file is opened.
#[derive(Clone)]
pub(super) struct Named {
    /// The name given to the open, for messages.
    pub(super) name: PathBuf,
    /// The absolute path, which does not depend on the working directory; links are not followed.
    pub(super) path: PathBuf,
    pub(super) mode: OpenMode,
    pub(super) id: FileId,
    pub(super) pool: Arc<Pool>,
}
