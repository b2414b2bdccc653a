//! The descriptor of an open file.

use super::descriptors::Keep;
use super::named::Named;
use super::shared::Shared;
use super::transfer::Target;
use std::io;
use std::sync::Arc;

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
