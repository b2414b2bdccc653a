//! Opening an image for writing: what its header must say from then on.

use super::bitmaps::Bitmaps;
use super::{Qcow2Writer, Writer};
use crate::alloc::Allocator;
use crate::chain::{Layer, Qcow2};
use crate::durability::guard::Guard;
use crate::durability::survive::Log;
use crate::durability::zones::Zones;
use crate::durability::{Metadata, Mode, Upkeep};
use crate::index;
use crate::tables::Tables;
use crate::{DiskError, MetadataMode, OpenOptions, Result};
use isobath_qcow2::header::field;
use isobath_qcow2::{AutoclearFeatures, Header, Snapshot};
use isobath_storage::{IoBuf, Storage};
use std::collections::HashSet;
use std::sync::Arc;

/// Read of the snapshot table at once.
const SNAPSHOT_READ: u64 = 1 << 20;

/// No entry of a snapshot table is longer: its head, extra data, ID and name.
const LONGEST_ENTRY: usize = 256 << 10;

/// More clusters of tables than this are not kept in memory. Each snapshot of a disk of 2 TiB in
/// 64 KiB clusters has an L1 table of one.
const MAX_OWN_CLUSTERS: usize = 4 << 20;

impl<S: Storage> Writer<S> {
    /// Prepares a qcow2 image for writes. `alone` says that nothing is below it.
    pub(crate) async fn open(
        layer: &Arc<Layer<S>>,
        qcow2: &Qcow2,
        options: &OpenOptions,
        alone: bool,
    ) -> Result<Self> {
        let header = qcow2.header.read().clone();
        for entry in qcow2.l1.read().iter() {
            qcow2.l2_table(*entry).map_err(|error| layer.format_error(error))?;
        }
        let metadata = own_clusters(layer, qcow2, &header).await?;
        let alloc = Allocator::open(Arc::clone(layer), qcow2, metadata).await?;
        if let Some(area) = header.index().and_then(|index| index::clusters(qcow2, index))
            && index::read_root(layer).await.is_some()
        {
            alloc.keep_area(area).await;
        }
        let bitmaps = Bitmaps::open(layer, &header).await?;
        clear_unknown_autoclear(layer, qcow2).await?;
        let mode = Mode::new(options.metadata, options.journal_size, layer.size(), options.survive);
        let log = (options.survive && mode.journal().is_some()).then(Arc::<Log>::default);
        let tables = Tables::new(Arc::clone(layer), qcow2, log.clone());
        let embedded = options.metadata == MetadataMode::Embedded;
        if embedded || options.metadata == MetadataMode::Journal {
            mode.refuse_without_journal(layer).await?;
        }
        let embeds = embedded && log.is_none();
        let zones = if embeds { Zones::new(options, &qcow2.geometry) } else { Zones::none() };
        let metadata = Metadata {
            layer: Arc::clone(layer),
            tables,
            alloc,
            guard: Guard::new(log.clone()),
            upkeep: Upkeep::default(),
            zones,
            log,
        };
        match layer.take_survived() {
            Some(survived) => metadata.replay(&survived).await?,
            None => {
                if let Some(stale) = layer.storage().survivor(false) {
                    stale.remove();
                }
            }
        }
        Ok(Self::new(layer, mode, Some(Qcow2Writer { metadata, alone: alone.into(), bitmaps })))
    }
}

/// Autoclear features unknown here describe data that is about to change: their bits go, as the
/// specification asks.
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

/// The host clusters that hold the image's own tables, but for its refcounts'.
async fn own_clusters<S: Storage>(
    layer: &Layer<S>,
    qcow2: &Qcow2,
    header: &Header,
) -> Result<HashSet<u64>> {
    let geometry = &qcow2.geometry;
    let bits = geometry.cluster_bits();
    let mut own = HashSet::from([0]);
    let mut add = |offset: u64, length: u64| {
        if length > 0 {
            own.extend(offset >> bits..=offset.saturating_add(length - 1) >> bits);
        }
        own.len()
    };
    add(header.l1_table_offset.get(), u64::from(header.l1_size) * 8);
    for entry in qcow2.l1.read().iter() {
        if let Ok(Some(offset)) = entry.offset(geometry) {
            add(offset.get(), 1);
        }
    }
    let corrupt = |reason: String| DiskError::Corrupt { image: layer.name().to_owned(), reason };
    let file_length = layer.storage().len().await?;
    let count = header.nb_snapshots;
    let mut at = header.snapshots_offset.get();
    let mut window = IoBuf::empty();
    let mut window_start = at;
    for number in 0..count {
        let mut rest = window.get((at - window_start) as usize..).unwrap_or_default();
        if rest.len() < LONGEST_ENTRY {
            let length = SNAPSHOT_READ.min(file_length.saturating_sub(at));
            window = layer.storage().read_at(at, IoBuf::zeroed(length as usize)).await?;
            window_start = at;
            rest = &window;
        }
        let (snapshot, length) = Snapshot::parse(rest).map_err(|error| {
            corrupt(format!(
                "entry {number} of its snapshot table (snapshots_offset {}, nb_snapshots {count}), \
                 at {at} of {file_length} bytes: {error}",
                header.snapshots_offset
            ))
        })?;
        snapshot.check(geometry).map_err(|error| layer.format_error(error))?;
        let (l1, l1_bytes) = (snapshot.l1_table_offset.get(), u64::from(snapshot.l1_size) * 8);
        if l1.saturating_add(l1_bytes) > file_length {
            return Err(corrupt(format!(
                "the L1 table of snapshot {number} (l1_table_offset {l1:#x}, l1_size {}) reaches \
                 past the end of the file ({file_length} bytes)",
                snapshot.l1_size
            )));
        }
        add(at, length as u64);
        if add(l1, l1_bytes) > MAX_OWN_CLUSTERS {
            return Err(corrupt(format!(
                "the L1 tables of its first {number} snapshots take {MAX_OWN_CLUSTERS} clusters"
            )));
        }
        at = at.saturating_add(length as u64).next_multiple_of(8);
    }
    Ok(own)
}
