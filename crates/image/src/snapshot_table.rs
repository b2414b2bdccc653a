//! Reads the table of an image's internal snapshots.

use crate::{DiskError, Result};
use isobath_qcow2::snapshot::check_length;
use isobath_qcow2::{FormatError, Header, Snapshot};
use isobath_storage::{IoBuf, Storage};
use std::path::Path;

/// Bytes of the table read at once; more than the longest entry.
const READ_AT_ONCE: u64 = 1 << 20;

/// The snapshots of an image with this header.
///
/// # Errors
/// If the table cannot be read or used.
pub async fn read_snapshots<S: Storage>(
    storage: &S,
    name: &Path,
    header: &Header,
    length: u64,
) -> Result<Vec<Snapshot>> {
    let error = |source: FormatError| DiskError::Format { image: name.to_owned(), source };
    if header.nb_snapshots > 0 {
        let geometry = header.geometry().map_err(error)?;
        header.snapshot_table(&geometry).map_err(error)?;
    }
    let start = header.snapshots_offset.get();
    let mut snapshots = Vec::new();
    let (mut at, mut window, mut window_at) = (start, IoBuf::empty(), start);
    for _ in 0..header.nb_snapshots {
        let used = (at - window_at) as usize;
        // An entry takes at most 132,152 bytes.
        if window.len() < used + (1 << 18) && window_at + (window.len() as u64) < length {
            let there = length.saturating_sub(at).min(READ_AT_ONCE);
            window = storage.read_at(at, IoBuf::zeroed(there as usize)).await?;
            window_at = at;
        }
        let rest = window.get((at - window_at) as usize..).unwrap_or_default();
        let (snapshot, used) = Snapshot::parse(rest).map_err(error)?;
        snapshots.push(snapshot);
        at += used as u64;
        check_length((at - start) as usize).map_err(error)?;
    }
    Ok(snapshots)
}
