//! The descriptors that a client sends beside its requests (`SCM_RIGHTS`).

use crate::error::QmpError;
use isobath_storage_file::HandedIn;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

/// The most that a client can send at once.
pub(super) const MOST_AT_ONCE: usize = 4;
/// The most that a client can keep by names.
const MOST_NAMED: usize = 16;
/// The longest text that is kept with a descriptor, in bytes.
const LONGEST: usize = 4 << 10;

/// Refuses a text that is too long to be kept with a descriptor.
///
/// # Errors
/// It is.
pub(crate) fn check_length(parameter: &str, text: &str) -> Result<(), QmpError> {
    if text.len() <= LONGEST {
        return Ok(());
    }
    Err(QmpError::new(format_args!(
        "Parameter '{parameter}' has {} bytes; it can have {LONGEST}",
        text.len()
    )))
}

/// Some of the descriptors that were sent at once did not arrive.
fn incomplete(arrived: usize) -> QmpError {
    if arrived < MOST_AT_ONCE {
        return QmpError::new(
            "File descriptors were lost, since the server can open no more files; close some, or \
             raise its limit",
        );
    }
    QmpError::new(format_args!(
        "More than {MOST_AT_ONCE} file descriptors were sent at once, and all were closed; send \
         one with each command that uses one"
    ))
}

/// A client's descriptors; they are closed when it leaves.
#[derive(Debug, Default)]
pub struct ClientFiles {
    /// Those that arrived last, and that no command has used yet.
    arrived: RefCell<Option<Result<Vec<HandedIn>, QmpError>>>,
    /// Those that `getfd` has named.
    named: RefCell<BTreeMap<String, HandedIn>>,
}

impl ClientFiles {
    /// Keeps descriptors for the next command that uses one, as QEMU does: those that arrived before are closed. If
    /// others were lost, none is kept, and that command fails.
    pub(super) fn arrive(&self, files: Vec<OwnedFd>, lost: bool) {
        if files.is_empty() && !lost {
            return;
        }
        self.close_arrived();
        let kept = if lost {
            let error = incomplete(files.len());
            tracing::warn!(%error, "file descriptors of a QMP client were closed");
            Err(error)
        } else {
            files.into_iter().map(HandedIn::new).collect::<Result<_, _>>().map_err(QmpError::new)
        };
        *self.arrived.borrow_mut() = Some(kept);
    }

    /// Closes those that no command has used.
    pub(super) fn close_arrived(&self) {
        drop(self.arrived.take());
    }

    /// Takes the first of those that arrived last; the others are closed.
    ///
    /// # Errors
    /// None has arrived, or there are too many.
    pub(crate) fn take(&self) -> Result<HandedIn, QmpError> {
        let arrived = self.arrived.take().transpose()?;
        let first = arrived.and_then(|files| files.into_iter().next());
        first.ok_or_else(|| QmpError::new("No file descriptor supplied via SCM_RIGHTS"))
    }

    /// `getfd`: names it; one that had the name is closed.
    ///
    /// # Errors
    /// None has arrived, the name is none, or there are too many.
    pub(super) fn keep(&self, name: &str) -> Result<(), QmpError> {
        let file = self.take()?;
        if name.starts_with(|first: char| first.is_ascii_digit()) {
            return Err(QmpError::new(
                "Parameter 'fdname' expects a name not starting with a digit",
            ));
        }
        check_length("fdname", name)?;
        let mut named = self.named.borrow_mut();
        if named.len() >= MOST_NAMED && !named.contains_key(name) {
            return Err(QmpError::new(format_args!(
                "{MOST_NAMED} file descriptors have names already; use them, or close some with closefd"
            )));
        }
        named.insert(name.to_owned(), file);
        Ok(())
    }

    /// `closefd`
    ///
    /// # Errors
    /// None has the name.
    pub(super) fn close(&self, name: &str) -> Result<(), QmpError> {
        self.named
            .borrow_mut()
            .remove(name)
            .map(drop)
            .ok_or_else(|| QmpError::new(format_args!("File descriptor named '{name}' not found")))
    }

    /// Takes the one that `getfd` has given this name.
    ///
    /// # Errors
    /// None has it.
    pub(crate) fn take_named(&self, name: &str) -> Result<OwnedFd, QmpError> {
        self.named.borrow_mut().remove(name).map(HandedIn::into_file).ok_or_else(|| {
            QmpError::new(format_args!("File descriptor named '{name}' has not been found"))
        })
    }
}
