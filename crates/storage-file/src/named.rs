//! How a file is named when it is opened anew.

use super::descriptors::Pool;
use isobath_storage::{FileId, OpenMode};
use std::io;
use std::path::{self, Path};
use std::sync::Arc;

/// The name by which a file is opened.
#[derive(Clone)]
pub(super) struct Named {
    /// The name given to the open, for messages.
    pub(super) name: Arc<Path>,
    /// The absolute path, which does not depend on the working directory; links are not followed.
    pub(super) path: Arc<Path>,
    pub(super) mode: OpenMode,
    pub(super) id: FileId,
    pub(super) pool: Arc<Pool>,
}

impl Named {
    /// A file that was opened by this name.
    pub(super) fn new(
        name: &Path,
        mode: OpenMode,
        id: FileId,
        pool: Arc<Pool>,
    ) -> io::Result<Self> {
        let path = path::absolute(name)?;
        let name = Arc::from(name);
        // There may be thousands of files.
        let path = if *path == *name { Arc::clone(&name) } else { path.into() };
        Ok(Self { name, path, mode, id, pool })
    }
}
