//! Recovery of an image after a crash or a kill: [`recover`], which is used everywhere.
//!
//! Opening, checking, sealing and viewing an image all begin here. An image is recovered if its incompatible feature
//! bit `JOURNAL` is set: it was not closed. The log's three places (see [`durability`](crate::durability)) are examined
//! in this order, each applied over the results of the one before:
//!
//! | place | found | done | why |
//! |---|---|---|---|
//! | area | no whole record | nothing | when the bit was set, everything was in place |
//! | area | a record that is torn | skipped, the one before is the last | it was not durable, so its commit was never reported as durable |
//! | area | the last record, whose checksums match | replayed, with those before it from its *tail* on | its data is there: the commit was durable, or is now |
//! | area | the last record, and an embedded mapping shows that its commit was durable | replayed, checksums not verified | it was durable; its data may have been overwritten since |
//! | area | the last record, one of whose checksums does not match | left out, the one before is the last | the sync of record and data had not ended; the one before was durable before this one was written |
//! | area | a record missing that the last one needs, two with one LSN, an unknown operation | refused, nothing changed | no writer leaves that: the file is damaged, or of a later version |
//! | data | an embedded mapping below the *checkpoint LSN* | no mapping is made; lead blocks that the tables refer to become plain | records contain it, or something newer |
//! | data | one from there on, below the *durable LSN* | added to the tables, and made plain | a later record shows that it was durable |
//! | data | one after that, whose cluster matches its checksum, or needs none | added to the tables, and made plain | all of the write is there |
//! | data | one after that, whose cluster does not match | ignored | the write was not durable, and was never reported as durable |
//! | memory | a restart log of this journal, up to its last durable record | area and data written in place, the journal emptied and left in use; then [`finish`] | completed writes are newer than both, and may need clusters |
//! | memory | one that ends at another record, or does not match the tables | set aside under another name, with a warning | the image was restored to an earlier state, or changed by another program |
//! | memory | none or one that does not match, while clients of the killed process [go on](Purpose::Continue) | refused, nothing changed that the image did not have | they would lose writes that they were told had completed |
//! | memory | one that is damaged or cannot be read | refused, nothing changed | continuing would lose writes that a guest was told had completed |
//! | any | this recovery's own work, after a crash | done again from the start | nothing that it reads is changed before its replacement is durable |
//!
//! To [view](Purpose::View) an image, the changes from all three places are kept in memory and overlaid on everything
//! that is read. Before anything is written above an image in a chain, a restart log is brought into the image: what a
//! guest flushes to the overlay makes durable what it wrote before, too. To [write](Purpose::Write) it, the changes are
//! written in place, and the journal is taken out of use. `docs/format.md` specifies the first two places to the byte;
//! `docs/log.md` describes all three.

mod leads;
mod place;
mod records;
mod restart;
mod verify;

pub(crate) use restart::{finish, overlay};

use crate::replayed::Replayed;
use crate::restart_log::{FoundLog, LogUse};
use crate::{DiskError, Result};
use isobath_qcow2::{Header, IncompatibleFeatures};
use isobath_storage::Storage;
use std::path::Path;

/// Ranges of the file read or written at once.
const AT_ONCE: usize = 32;

/// The purpose of a recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The image's tables are examined as they are in the file and its journal: it is not changed, and a restart log
    /// is left alone.
    Examine,
    /// The disk is read, with everything that a restart log has, and the image is not changed. The memory of the log is
    /// used as given.
    View(LogUse),
    /// The image is repaired, or opened for writing.
    Write,
    /// The image is opened for writing, and [goes on](crate::options::OpenOptions::continues) for clients of a killed
    /// process.
    Continue,
}

impl Purpose {
    /// Whether the image is written to.
    fn writes(self) -> bool {
        matches!(self, Self::Write | Self::Continue)
    }
}

/// Why an image cannot go on for clients of a killed process.
fn discontinued(name: &Path, log: &str) -> DiskError {
    DiskError::Refused {
        image: name.to_owned(),
        reason: format!(
            "its server was killed, and the log of its unflushed writes {log}: those who still use the disk would lose \
             what they were told had completed"
        ),
    }
}

/// The result of a recovery.
#[derive(Default)]
pub(crate) struct Recovered {
    /// The overlay for everything that is read; `None` if the file has everything.
    pub view: Option<Replayed>,
    /// The restart log of a killed process. The image's writer must apply it with [`finish`]: until then the image's
    /// journal is in use, and empty. Who only reads the image [overlays](overlay) it.
    pub restart_log: Option<FoundLog>,
    /// There is or was one that does not match the image, which is as after a power failure.
    pub unfit: bool,
}

/// Recovers an image whose file contains `header`. The header must be read again afterwards, through
/// [`view`](Recovered::view) if there is one.
///
/// # Errors
/// If the journal or a restart log is damaged, or the storage fails; recovery can then be tried again.
pub(crate) async fn recover<S: Storage>(
    storage: &S,
    name: &Path,
    header: &Header,
    purpose: Purpose,
) -> Result<Recovered> {
    if !header.incompatible.contains(IncompatibleFeatures::JOURNAL) {
        return Ok(Recovered::default());
    }
    let found = match purpose {
        Purpose::Examine => None,
        Purpose::View(how) => FoundLog::find(storage, name, header, how).await?,
        Purpose::Write => FoundLog::find(storage, name, header, LogUse::Take).await?,
        Purpose::Continue => FoundLog::find(storage, name, header, LogUse::Rely).await?,
    };
    if purpose == Purpose::Continue && found.is_none() {
        return Err(discontinued(name, "is not there"));
    }
    let examined = records::examine(storage, name, header).await?;
    let mut restart_log = found;
    let mut unfit = false;
    if let Some(found) = &restart_log
        && !found.follows(examined.durable.lsn, examined.durable.previous)
    {
        let reason = "the image was restored to an earlier state after its server was killed; the writes acknowledged \
             since are not replayed";
        if purpose == Purpose::Continue {
            return Err(discontinued(name, "is of a later state of the image"));
        }
        if purpose == Purpose::Write {
            found.set_aside(name, reason)?;
        } else {
            tracing::warn!(image = %isobath_storage::shown(name), "{reason}");
        }
        unfit = !found.is_empty();
        restart_log = None;
    }
    if restart_log.is_some() {
        place::refuse_zones(name, &examined)?;
    }
    if !purpose.writes() {
        return Ok(Recovered { view: Some(examined.replayed), restart_log, unfit });
    }
    place::write(storage, name, header, &examined.replayed).await?;
    match &restart_log {
        Some(found) => {
            // The record that empties the journal comes next.
            found.goes_on_behind(name, examined.last)?;
            place::empty(storage, name, header, &examined).await?;
        }
        None => place::close(storage, name, header, examined).await?,
    }
    Ok(Recovered { view: None, restart_log, unfit })
}
