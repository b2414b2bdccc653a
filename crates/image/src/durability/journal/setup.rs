//! Setting up the journal's area, and taking it out of use.

use super::{Active, Journal, JournalState, Ring};
use crate::alloc::{TailCut, write_zeroes};
use crate::durability::metadata::Metadata;
use crate::ids;
use crate::layer::Qcow2Layer;
use crate::{DiskError, Result};
use isobath_qcow2::header::field;
use isobath_qcow2::journal::{BLOCK, JournalExtension, MAX_AREA, MIN_AREA};
use isobath_qcow2::{FormatError, Header, HostOffset, IncompatibleFeatures, Lsn};
use isobath_storage::{IoBuf, Storage};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::Ordering;

impl Journal {
    /// Puts the area into use. Everything must be in place, and the data journal active. If the header or the file
    /// system has no room, or there is no memory for a restart log that is required, the image continues without a
    /// journal.
    pub(super) async fn set_up<S: Storage>(
        &self,
        state: &mut JournalState,
        metadata: &Metadata<S>,
    ) -> Result<()> {
        let Metadata { layer, alloc, data_journal, .. } = metadata;
        let size = metadata.cluster_size();
        if state.area.is_none()
            && let Err(error) = self.find_area(state, metadata).await
        {
            let image = isobath_storage::shown(layer.name());
            tracing::warn!(%image, %error, "cannot set up a journal; continuing without one");
            state.impossible = true;
            // Without a restart log, which belongs to a journal, requests wait for a commit. That is too slow to be
            // done for an image that has no room for a journal, unless a log is required; a failing device is slow in
            // any case.
            let no_room = matches!(error.errno(), libc::ENOSPC | libc::EDQUOT | libc::EFBIG);
            let failing = matches!(error, DiskError::Storage(_)) && !no_room;
            if let Some(log) = metadata.log.as_ref().filter(|_| !failing) {
                log.promise_nothing();
            }
        }
        let Some(area) = state.area.clone() else {
            data_journal.deactivate(None);
            return Ok(());
        };
        // Refcounts that the last commit released.
        alloc.write_blocks().await?;
        layer.storage().flush().await?;
        let id = ids::fresh();
        let last = metadata.sequence.last();
        let extension = extension(&area, size, id, last.next());
        let writes = edits(layer, Some(&extension)).await?.map_err(|e| layer.format_error(e))?;
        write_header(layer, &writes).await?;
        // A kill leaves no journal in use whose log is not there; nobody looks for that of one that is not.
        let mut prepared = None;
        if let Some(log) = &metadata.log {
            prepared = log.prepare(&**layer.storage(), id, last).await;
            if prepared.is_none() {
                let image = isobath_storage::shown(layer.name());
                tracing::warn!(%image, "without a restart log there is no journal");
                state.impossible = true;
                data_journal.deactivate(None);
                return Ok(());
            }
        }
        set_bits(layer, |bits| bits.with(IncompatibleFeatures::JOURNAL)).await?;
        alloc.begin_journal().await;
        if let Some((log, prepared)) = metadata.log.as_ref().zip(prepared) {
            log.begin(prepared);
        }
        let blocks = extension.area_length / BLOCK as u64;
        self.due.store(
            ((blocks / 8 * BLOCK as u64) as usize / super::build::BYTES_PER_CHANGE / 2).max(1),
            Ordering::Relaxed,
        );
        state.active = Some(Active {
            extension,
            ring: Ring::new(blocks),
            last,
            written: last,
            durable: last,
            last_operations: BTreeMap::new(),
            checkpoint_lsn: last,
        });
        Ok(())
    }

    /// Finds an area and fills it with zeroes: flushes are cheap only in space that was written before. Changes nothing
    /// else.
    async fn find_area<S: Storage>(
        &self,
        state: &mut JournalState,
        metadata: &Metadata<S>,
    ) -> Result<()> {
        let Metadata { layer, alloc, .. } = metadata;
        let size = metadata.cluster_size();
        let wanted = area_length(self.size, size) / size;
        let step = (BLOCK as u64).div_ceil(size);
        let spare = alloc.spare(wanted).await / step * step;
        if spare < wanted && spare * size < MIN_AREA {
            return Err(alloc.no_room());
        }
        let area = alloc.reserve_area(spare).await?;
        let bytes = area.start * size..area.end * size;
        let found = match edits(layer, Some(&extension(&area, size, 0, Lsn::default()))).await {
            Ok(Ok(_)) => write_zeroes(&**layer.storage(), bytes).await,
            Ok(Err(error)) => Err(layer.format_error(error)),
            Err(error) => Err(error),
        };
        match found {
            Ok(()) => {
                alloc.set_journal_area(area.clone());
                state.area = Some(area);
            }
            Err(_) => alloc.forget_area(&area).await,
        }
        found
    }

    /// Refuses an image whose header has no room for a journal.
    pub async fn refuse_without_room<S: Storage>(&self, layer: &Qcow2Layer<S>) -> Result<()> {
        let size = layer.qcow2().geometry.cluster_size();
        let anywhere = 1..1 + area_length(self.size, size) / size;
        match edits(layer, Some(&extension(&anywhere, size, 0, Lsn::default()))).await? {
            Ok(_) => Ok(()),
            Err(error) => Err(layer.format_error(error)),
        }
    }

    /// Deactivates the journal for good, and releases its area.
    pub async fn close<S: Storage>(&self, metadata: &Metadata<S>) -> Result<()> {
        let mut state = self.state.lock().await;
        self.deactivate_locked(&mut state, metadata, None).await?;
        let Some(area) = state.area.take() else { return Ok(()) };
        let Metadata { layer, alloc, .. } = metadata;
        let writes = edits(layer, None).await?.map_err(|error| layer.format_error(error))?;
        write_header(layer, &writes).await?;
        let size = metadata.cluster_size();
        layer.storage().discard(area.start * size, (area.end - area.start) * size).await?;
        alloc.set_journal_area(0..0);
        alloc.forget_area(&area).await;
        alloc.cut_tail(TailCut::KeepingData).await
    }
}

/// The area's length for a wanted one: whole clusters and blocks, within the format's limits.
fn area_length(wish: u64, cluster_size: u64) -> u64 {
    wish.clamp(MIN_AREA, MAX_AREA).next_multiple_of(cluster_size.max(BLOCK as u64)).min(MAX_AREA)
}

fn extension(area: &Range<u64>, size: u64, id: u64, first_lsn: Lsn) -> JournalExtension {
    JournalExtension {
        area_offset: HostOffset::new(area.start * size),
        area_length: (area.end - area.start) * size,
        id,
        first_lsn,
    }
}

type Edits = std::result::Result<Vec<(usize, Vec<u8>)>, FormatError>;

/// The writes, in order, that make the header point to a journal, or to none.
async fn edits<S: Storage>(
    layer: &Qcow2Layer<S>,
    journal: Option<&JournalExtension>,
) -> Result<Edits> {
    let size = layer.qcow2().geometry.cluster_size() as usize;
    let cluster = layer.storage().read_at(0, IoBuf::zeroed(size)).await?;
    Ok(Header::edit_journal(&cluster, journal))
}

/// Makes changes of the header, each durable before the next.
async fn write_header<S: Storage>(
    layer: &Qcow2Layer<S>,
    writes: &[(usize, Vec<u8>)],
) -> Result<()> {
    let storage = layer.storage();
    for (at, bytes) in writes {
        storage.write_at(*at as u64, IoBuf::copy_of(bytes)).await?;
        storage.flush().await?;
    }
    let size = layer.qcow2().geometry.cluster_size() as usize;
    let cluster = storage.read_at(0, IoBuf::zeroed(size)).await?;
    let header = Header::parse(&cluster).map_err(|error| layer.format_error(error))?;
    layer.qcow2().header.write().extensions = header.extensions;
    Ok(())
}

/// Clears the feature bit, durably.
pub(super) async fn clear_bit<S: Storage>(layer: &Qcow2Layer<S>) -> Result<()> {
    set_bits(layer, |bits| bits.without(IncompatibleFeatures::JOURNAL)).await
}

async fn set_bits<S: Storage>(
    layer: &Qcow2Layer<S>,
    change: impl Fn(IncompatibleFeatures) -> IncompatibleFeatures,
) -> Result<()> {
    let qcow2 = layer.qcow2();
    let bits = change(qcow2.header.read().incompatible);
    let bytes = IoBuf::copy_of(&bits.bits().to_be_bytes());
    layer.storage().write_at(field::INCOMPATIBLE_FEATURES as u64, bytes).await?;
    layer.storage().flush().await?;
    qcow2.header.write().incompatible = bits;
    Ok(())
}
