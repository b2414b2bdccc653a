//! The descriptor of an open file, and how to reopen it.

use super::descriptors::{Keep, Pool};
use super::shared::Shared;
use super::transfer::Target;
use crate::{FileId, OpenMode};
use std::io;
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

/// An open file's descriptor.
pub(super) enum Source {
    /// It stays open. A file that is only read keeps its descriptor if it is among the first.
    Kept(Arc<Target>, Option<Keep>),
    Shared(Arc<Shared>),
}

impl Source {
    /// The descriptor of a regular file that is not changed from now on.
    pub(super) fn of_reader(file: &Named, target: Arc<Target>) -> io::Result<Self> {
        Ok(match file.pool.keep() {
            Some(keep) => Self::Kept(target, Some(keep)),
            None => Self::Shared(Shared::new(file, target)?),
        })
    }
}
