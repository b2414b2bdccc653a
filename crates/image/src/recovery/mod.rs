//! What a crash or a kill has left of an image, and bringing it in: [`recover`], the one recovery.
//!
//! Opening an image, checking it, sealing it and reading it without a change all begin here. An image is
//! recovered where its incompatible feature bit `JOURNAL` is set: it was not closed. What its log holds is looked
//! for in the log's three places (see [`durability`](crate::durability)), in this order, each over what the one
//! before has found:
//!
//! | place | found | done | why |
//! |---|---|---|---|
//! | area | no whole record | nothing | when the bit was set, everything was in its place |
//! | area | a record that is torn | passed over, the one before is the last | it was not durable, so nobody was told that its commit was |
//! | area | the last record, whose checksums hold | replayed, with those before from its *tail* on | its data is there: the commit was durable, or is now |
//! | area | the last record, and a mapping in data notes that its commit was durable | replayed, checksums unseen | it was durable; its data may have been overwritten since |
//! | area | the last record, a checksum of which does not hold | left out, the one before is the last | the sync that both share has not ended; the one before was durable before it was written |
//! | area | a record missing that the last one needs, two with one LSN, an operation that is not known | refused, nothing changed | no writer leaves that: the file is damaged, or of a later version |
//! | data | an embedded mapping below the *checkpoint LSN* | no mapping is made; what the tables refer to becomes plain | records have it, or something newer |
//! | data | one from there on, below the *durable LSN* | into the tables, and plain | a later commit noted that it was durable |
//! | data | one behind that, whose cluster is as its checksum says, or needs none | into the tables, and plain | all of the write is there |
//! | data | one behind that, whose cluster is not | left alone | the write was not durable, so nobody was told that it was |
//! | memory | a restart log of this journal, up to its last durable record | area and data to their places, the journal emptied and left in use; then [`finish`] | what was answered is newer than both, and may need clusters |
//! | memory | one that ends elsewhere | dropped, with a warning | the image was put back to an earlier state |
//! | memory | one that is damaged or cannot be read | refused, nothing changed | to go on would lose what a guest was told is there |
//! | any | this recovery's own work, after a crash | done once more from the start | nothing that it reads is changed before what replaces it is durable |
//!
//! To [view](Purpose::View) an image, what area and data say is kept in memory and put over what is read; what
//! only a restart log has is not seen. To [write](Purpose::Write) it, it goes to its place, and the journal out of
//! use. `docs/format.md` specifies the first two places to the byte; `docs/log.md` tells of all three.

mod leads;
mod place;
mod records;
mod restart;
mod verify;

pub use restart::finish;

use crate::Result;
use crate::replayed::Replayed;
use crate::restart_log::FoundLog;
use isobath_qcow2::{Header, IncompatibleFeatures};
use isobath_storage::Storage;
use std::path::Path;

/// Ranges of the file read or written at once.
const AT_ONCE: usize = 32;

/// What an image is recovered for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// It is only read, and not changed.
    View,
    /// It is repaired, or opened for writing.
    Write,
}

/// What a recovery has found.
#[derive(Default)]
pub struct Recovered {
    /// What must be put over what is read; `None` if the file has everything.
    pub view: Option<Replayed>,
    /// What a killed process had answered, which its writer is to bring in by [`finish`]: until then the image's
    /// journal is in use, and empty.
    pub restart_log: Option<FoundLog>,
}

/// Recovers an image, of which `header` is what its file says. The header is to be read again afterwards, by way
/// of [`view`](Recovered::view) if there is one.
///
/// # Errors
/// If the journal or a restart log is damaged, or the storage fails; the image can then be recovered once more.
pub async fn recover<S: Storage>(
    storage: &S,
    name: &Path,
    header: &Header,
    purpose: Purpose,
) -> Result<Recovered> {
    if !header.incompatible.contains(IncompatibleFeatures::JOURNAL) {
        return Ok(Recovered::default());
    }
    if purpose == Purpose::View {
        let examined = records::examine(storage, name, header).await?;
        return Ok(Recovered { view: Some(examined.replayed), restart_log: None });
    }
    let found = FoundLog::find(storage, name, header).await?;
    let examined = records::examine(storage, name, header).await?;
    let restart_log = found.filter(|found| {
        let follows = found.follows(examined.durable.lsn, examined.durable.previous);
        if !follows {
            tracing::warn!(
                image = %isobath_storage::shown(name),
                "the image was restored to an earlier state after its server was killed; the writes acknowledged \
                 since are not replayed"
            );
        }
        follows
    });
    place::write(storage, name, &examined.replayed).await?;
    match &restart_log {
        Some(found) => {
            // The record that empties the journal comes next.
            found.goes_on_behind(examined.last);
            place::empty(storage, name, header, &examined).await?;
        }
        None => place::close(storage, name, header, examined).await?,
    }
    Ok(Recovered { view: None, restart_log })
}
