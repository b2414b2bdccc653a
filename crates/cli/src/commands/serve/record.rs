//! Recording what is read of a chain in a store.

use super::args::Args;
use crate::failure::Failure;
use crate::host::is_stored;
use isobath_remote::Recording;
use isobath_remote::served::Chain;
use isobath_ring::place::{Identity, Place, identity_of};
use std::cell::OnceCell;
use std::fs::File;
use std::io::Write;

/// The file's permissions, less the umask. It has nothing of what was read.
const MODE: u32 = 0o644;

/// A new file for what is read of a chain. It is removed again if the server does not start.
pub(super) struct Record {
    file: File,
    place: Place,
    made: Identity,
    recording: OnceCell<Recording>,
    is_written: bool,
}

impl Record {
    /// Makes the file that the command line names.
    ///
    /// # Errors
    /// It exists, or cannot be made. Not one image is a chain in a store.
    pub(super) fn create(args: &Args) -> Result<Option<Self>, Failure> {
        let Some(path) = &args.record_trace else { return Ok(None) };
        if args.images().iter().filter(|image| is_stored(image)).count() != 1 {
            return Err(Failure::new(
                "--record-trace records what is read of one chain in a store: name one, and no more",
            ));
        }
        let failed = |error: std::io::Error| {
            Failure::new(isobath_storage::cause(&error))
                .context(format_args!("cannot create the trace '{}'", isobath_storage::shown(path)))
        };
        let place = Place::of(path).map_err(failed)?;
        let file = place.create_new(MODE).map_err(failed)?;
        let made = identity_of(&file).map_err(failed)?;
        Ok(Some(Self { file, place, made, recording: OnceCell::new(), is_written: false }))
    }

    /// Begins to record.
    pub(super) fn begin(&self, chain: &Chain) {
        self.recording.get_or_init(|| chain.record());
    }

    /// Writes what was read.
    ///
    /// # Errors
    /// Those of the file system.
    pub(super) fn end(mut self) -> Result<(), Failure> {
        let Some(recording) = self.recording.get() else { return Ok(()) };
        let written = (&self.file).write_all(&recording.trace().encode());
        self.is_written = true;
        written.and_then(|()| self.file.sync_all()).map_err(|error| {
            Failure::new(isobath_storage::cause(&error)).context(format_args!(
                "cannot write the trace '{}'",
                isobath_storage::shown(self.place.path())
            ))
        })
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        if !self.is_written {
            // A confined server cannot remove it; an empty file is no trace.
            let _ = self.place.remove(self.made);
        }
    }
}
