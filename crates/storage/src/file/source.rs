//! Where an open file's descriptor is, and how to get another one.

use super::descriptors::{Keep, Pool};
use super::shared::Shared;
use super::transfer::Target;
use crate::{FileId, OpenMode};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// What a file is opened by.
#[derive(Clone)]
pub(super) struct Named {
    /// The name given to the open, for messages.
    pub(super) name: PathBuf,
    /// The same from the root, whatever becomes of the working directory; links are not followed.
    pub(super) path: PathBuf,
    pub(super) mode: OpenMode,
    pub(super) id: FileId,
    pub(super) pool: Arc<Pool>,
}

/// An open file's descriptor.
pub(super) enum Source {
    /// It stays open. Of a file that is only read, because it is among the first of them.
    Kept(Arc<Target>, Option<Keep>),
    Shared(Arc<Shared>),
}

impl Source {
    /// The descriptor of a regular file that nobody changes from now on.
    pub(super) fn of_reader(file: &Named, target: Arc<Target>) -> io::Result<Self> {
        Ok(match file.pool.keep() {
            Some(keep) => Self::Kept(target, Some(keep)),
            None => Self::Shared(Shared::new(file, target)?),
        })
    }
}
