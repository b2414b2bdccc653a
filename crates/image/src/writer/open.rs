//! Opening an image for writing, and the changes of its header.

use super::bitmaps::Bitmaps;
use super::{Qcow2Writer, Writer};
use crate::alloc::Allocator;
use crate::durability::zones::Zones;
use crate::durability::{CommitPolicy, Metadata, MetadataMode};
use crate::layer::{Layer, Qcow2, Qcow2Layer};
use crate::options::OpenOptions;
use crate::restart_log::RestartLog;
use crate::tables::Tables;
use crate::{DiskError, Result, index_area, recovery};
use isobath_qcow2::AutoclearFeatures;
use isobath_qcow2::header::field;
use isobath_storage::{IoBuf, MemoryUse, Storage};
use std::sync::Arc;

impl<S: Storage> Writer<S> {
    /// Prepares a qcow2 image for writes. `alone` says that nothing is below it.
    pub async fn open(layer: &Qcow2Layer<S>, options: &OpenOptions, alone: bool) -> Result<Self> {
        let qcow2 = layer.qcow2();
        let header = qcow2.header.read().clone();
        let length = layer.storage().len().await?;
        for (_, entry) in qcow2.l1.read().allocated() {
            qcow2.l2_table(entry).map_err(|error| layer.format_error(error))?;
        }
        let alloc = Allocator::open(layer.clone()).await?;
        if let Some(area) = header.index().and_then(|index| index_area::clusters(qcow2, index))
            && index_area::read_root(layer).await.is_some()
        {
            alloc.keep_area(area).await;
        }
        let bitmaps = Bitmaps::open(layer, &header).await?;
        clear_unknown_autoclear(layer, qcow2).await?;
        let policy = CommitPolicy::new(
            options.metadata,
            options.journal_size,
            layer.size(),
            options.restart_log,
        );
        let log = policy.journal().is_some().then(Arc::<RestartLog>::default);
        if let Some(log) = log.as_ref().filter(|_| options.restart_log) {
            log.wake();
        }
        let tables = Tables::new(layer.clone(), log.clone());
        let embedded = options.metadata == MetadataMode::Embedded;
        if embedded || options.metadata == MetadataMode::Journal {
            policy.refuse_without_journal(layer).await?;
        }
        if embedded && layer.is_encrypted() {
            return Err(DiskError::Refused {
                image: layer.name().to_owned(),
                reason: "it is encrypted, so its mappings cannot be embedded in its data; use \
                         another metadata mode, such as journal"
                    .into(),
            });
        }
        let embeds = embedded && !options.restart_log;
        let zones = if embeds {
            Zones::new(options.zone_size, options.zones, &qcow2.geometry)
        } else {
            Zones::none()
        };
        let metadata = Metadata::new(tables, alloc, zones, log, layer.clone());
        match layer.take_found_log() {
            Some(found_log) => recovery::finish(&metadata, &found_log).await?,
            // A log of a journal that is no longer in use.
            None => {
                if let Ok(Some(stale)) = layer.storage().restart_memory(MemoryUse::Stale).await {
                    stale.remove();
                }
            }
        }
        Ok(Self::new(
            layer.layer(),
            policy,
            Some(Qcow2Writer { metadata, alone: alone.into(), bitmaps, length }),
        ))
    }
}

/// Unknown autoclear features describe data that is about to change: their bits are cleared, as the specification
/// demands.
async fn clear_unknown_autoclear<S: Storage>(layer: &Layer<S>, qcow2: &Qcow2) -> Result<()> {
    let known = AutoclearFeatures::BITMAPS.with(AutoclearFeatures::DATA_FILE_RAW);
    let autoclear = qcow2.header.read().autoclear;
    if autoclear.unknown().is_empty() {
        return Ok(());
    }
    let kept = AutoclearFeatures::from_bits(autoclear.bits() & known.bits());
    let bytes = IoBuf::copy_of(&kept.bits().to_be_bytes());
    layer.storage().write_at(field::AUTOCLEAR_FEATURES as u64, bytes).await?;
    layer.storage().flush().await?;
    qcow2.header.write().autoclear = kept;
    Ok(())
}
