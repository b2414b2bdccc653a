//! Recording what is read of a chain in a store.

use super::args::Args;
use crate::failure::Failure;
use crate::host::is_stored;
use crate::server::claimed::{Claimed, reason};
use isobath_remote::Recording;
use isobath_remote::served::Chain;
use std::cell::OnceCell;
use std::fmt::Display;
use std::io::Write;
use std::path::Path;

/// The file's permissions, less the umask. It has nothing of what was read.
const MODE: u32 = 0o644;

/// A file for what is read of a chain. One that was made is removed again if the server does not start.
pub(super) struct Record {
    claimed: Claimed,
    recording: OnceCell<Recording>,
    is_written: bool,
}

fn failed(what: &str, path: &Path, reason: impl Display) -> Failure {
    let path = isobath_storage::shown(path);
    Failure::new(reason).context(format_args!("cannot {what} the trace '{path}'"))
}

impl Record {
    /// Makes the file that the command line names. An empty one may be there: a server that was killed has left it.
    ///
    /// # Errors
    /// There is another one, another server has it, or it cannot be made. Not one image is a chain in a store.
    pub(super) fn create(args: &Args) -> Result<Option<Self>, Failure> {
        let Some(path) = &args.record_trace else { return Ok(None) };
        if args.images().iter().filter(|image| is_stored(image)).count() != 1 {
            return Err(Failure::new(
                "--record-trace records what is read of one chain in a store: name one, and no more",
            ));
        }
        let claimed = Claimed::claim(path, MODE, args.sandbox.becomes());
        let claimed = claimed.map_err(|error| failed("create", path, reason(&error)))?;
        let this = Self { claimed, recording: OnceCell::new(), is_written: false };
        let found = this.claimed.file.metadata();
        let length = found.map_err(|error| failed("create", path, reason(&error)))?.len();
        if length > 0 {
            let reason =
                format_args!("there is a file of {length} bytes; remove it, or name another");
            return Err(failed("create", path, reason));
        }
        Ok(Some(this))
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
        let mut file = &self.claimed.file;
        let written = file.write_all(&recording.trace().encode()).and_then(|()| file.sync_all());
        if written.is_err() {
            // An empty one is in nobody's way.
            let _ = file.set_len(0);
        }
        self.is_written = true;
        written.map_err(|error| failed("write", self.claimed.path(), reason(&error)))
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        if self.claimed.is_new && !self.is_written {
            // A confined server cannot remove it; an empty file is no trace.
            self.claimed.remove();
        }
    }
}
