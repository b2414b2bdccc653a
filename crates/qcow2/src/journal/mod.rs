//! The metadata journal: changes that must be written to the image's file before it is used after a crash.
//!
//! While the incompatible feature bit [`JOURNAL`](crate::IncompatibleFeatures::JOURNAL) is set, the header extension
//! [`JournalExtension`] says where the journal's *area* is: [blocks](BLOCK) that hold [`Record`]s. After a crash
//! [`Journal::scan`] finds the valid ones, and [`Journal::replay`] returns what the file must contain. `docs/format.md`
//! specifies it to the byte.

mod area;
mod extension;
mod operation;
mod record;
mod replay;
mod sums;
#[cfg(test)]
mod tests;
mod zones;

pub use area::{Found, Journal};
pub use extension::{JournalExtension, MAX_AREA, MIN_AREA};
pub use operation::Operation;
pub use record::{HEAD_BYTES, Record};
pub use replay::{Content, MAX_PIECES, Replay, ReplayRange};
pub use zones::{MAX_ZONE_CLUSTERS, MAX_ZONES, Zone, Zones};

use crate::error::FormatError;
use std::fmt;

/// Bytes of a block: each record begins at a multiple of this from the area's start.
pub const BLOCK: usize = 4096;

/// An error of a journal that cannot be replayed.
pub(crate) fn irrecoverable(
    field: impl Into<std::borrow::Cow<'static, str>>,
    value: impl fmt::Display,
    reason: impl fmt::Display,
) -> FormatError {
    let reason = format!(
        "{reason}; the image cannot be recovered automatically: restore it from a backup, or have it \
         checked by hand"
    );
    FormatError::invalid(field, value, reason)
}
