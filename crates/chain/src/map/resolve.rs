//! Resolving a slice: one pass over the layers, from the active one down, that ends as soon as every unit is decided.
//! Tables are read in batches, all reads of a batch concurrently. A [`Resolution`] can stop earlier, at the owners of a
//! few units, and go on from there.

use super::{SLICE_UNITS, Slice, Unit};
use crate::chain::{Chain, LayerIndex};
use crate::chain_index::ChainIndex;
use futures_util::future::try_join_all;
use isobath_image::entries::ActiveEntries;
use isobath_image::layer::{Layer, Qcow2};
use isobath_image::{DiskError, Result};
use isobath_qcow2::index::{Page, PageEntry};
use isobath_qcow2::{
    ClusterIndex, ClusterKind, CompressedCluster, GuestOffset, HostOffset, L2Entry,
};
use isobath_storage::{IoBuf, Storage};
use std::ops::Range;
use std::sync::Arc;

/// Tables that are read together when all units of a slice are wanted. The number doubles from batch to batch, since
/// most slices are decided near the top and some only at the base.
const FIRST_BATCH: usize = 4;
const LARGEST_BATCH: usize = 64;
/// When a few units are wanted, a batch is this part of the tables that were read before it, at least one. No more than
/// that part is then read in vain: a disk that turns takes as long for each of them as for one that is needed.
const PART_OF_READ: usize = 8;

/// Merges the guest bytes of `range`, a slice's, over the chain: the layers above its index one by one, the others
/// through the index. `writer` returns the source of entries that are newer than a layer's file.
pub async fn resolve<S: Storage, A: ActiveEntries>(
    chain: &Chain<S>,
    writer: impl Fn(LayerIndex) -> Option<A>,
    range: Range<u64>,
    unit_bits: u32,
) -> Result<Slice> {
    let mut resolution = Resolution::new(chain, range, unit_bits);
    resolution.finish(chain, writer).await?;
    Ok(resolution.into_slice())
}

/// Merges the guest bytes of `wanted`, a part of the slice at `start`, one table at a time: none that has nothing of
/// them, and none below the lowest of their owners. A table that cannot be read hides only what lies below it.
///
/// The other units of the slice that it returns are decided or absent. `writer` is that of [`resolve`].
pub async fn resolve_singly<S: Storage, A: ActiveEntries>(
    chain: &Chain<S>,
    writer: impl Fn(LayerIndex) -> Option<A>,
    start: u64,
    wanted: Range<u64>,
    unit_bits: u32,
) -> Result<Slice> {
    let mut resolution = Resolution::new(chain, start..start, unit_bits);
    resolution.merge.want(&wanted);
    resolution.range = wanted;
    resolution.merge_until_decided(chain, writer, Pace::Single).await?;
    Ok(resolution.into_slice())
}

/// A slice that is resolved down to some layer.
pub struct Resolution {
    merge: Merge,
    /// The slice's guest bytes.
    range: Range<u64>,
    /// Layers from the base that are still to be merged.
    below: usize,
}

impl Resolution {
    /// The slice of the guest bytes in `range`, of units of `1 << unit_bits` bytes, of which nothing is known.
    pub fn new<S: Storage>(chain: &Chain<S>, range: Range<u64>, unit_bits: u32) -> Self {
        let merge = Merge {
            start: range.start,
            unit_bits,
            units: Box::new([Unit::ABSENT; SLICE_UNITS]),
            decided: vec![false; SLICE_UNITS],
            left: SLICE_UNITS,
            wanted: 0..SLICE_UNITS,
            wanting: SLICE_UNITS,
            compressed: Vec::new(),
        };
        Self { merge, range, below: chain.depth() }
    }

    /// Merges layers until the units of the guest bytes in `wanted`, a part of the slice, are decided: no more than a
    /// few below the lowest of their owners. `writer` is that of [`resolve`], and the chain the one that it was made
    /// for.
    pub async fn advance<S: Storage, A: ActiveEntries>(
        &mut self,
        chain: &Chain<S>,
        writer: impl Fn(LayerIndex) -> Option<A>,
        wanted: Range<u64>,
    ) -> Result<()> {
        self.merge.want(&wanted);
        self.merge_until_decided(chain, writer, Pace::Careful { read: 0 }).await
    }

    /// Merges all layers that are left.
    pub async fn finish<S: Storage, A: ActiveEntries>(
        &mut self,
        chain: &Chain<S>,
        writer: impl Fn(LayerIndex) -> Option<A>,
    ) -> Result<()> {
        self.merge.want(&self.range);
        self.merge_until_decided(chain, writer, Pace::doubling()).await
    }

    async fn merge_until_decided<S: Storage, A: ActiveEntries>(
        &mut self,
        chain: &Chain<S>,
        writer: impl Fn(LayerIndex) -> Option<A>,
        mut pace: Pace,
    ) -> Result<()> {
        let Self { merge, range, below } = self;
        let index = chain.index();
        let described = index.as_ref().map_or(0, |index| index.covers());
        if *below > described {
            let above = chain.top_down().skip(chain.depth() - *below);
            let above = above.take_while(|(index, _)| index.get() as usize >= described);
            let end = merge_layers(merge, chain, above, &writer, range, &mut pace).await?;
            *below = match end {
                End::Decided(lowest) => lowest,
                End::Exhausted => described,
                End::Hidden => 0,
            };
        }
        if let Some(index) = index
            && (1..=described).contains(below)
            && merge.wanting > 0
        {
            // It decides all units at once.
            merge.want(range);
            // The index has smaller units than the map where it describes raw images alone, below one of large
            // clusters.
            let mut start = range.start;
            while merge.wanting > 0 && start < range.end {
                let page = start >> index.page_bits();
                let end = range.end.min((page + 1) << index.page_bits());
                merge_page(merge, chain, &index, &(start..end), pace.of_described()).await?;
                start = end;
            }
            *below = 0;
        }
        Ok(())
    }

    /// Whether all units are decided.
    pub fn is_whole(&self) -> bool {
        self.below == 0 || self.merge.left == 0
    }

    /// The slice as far as it is resolved: units that are not decided are absent in it.
    pub fn slice(&self) -> Slice {
        Slice::new(&self.merge.units, self.merge.compressed.clone())
    }

    /// The same, at the resolution's end.
    pub fn into_slice(self) -> Slice {
        Slice::new(&self.merge.units, self.merge.compressed)
    }
}

/// How many tables are read together.
enum Pace {
    /// All units are wanted: so many.
    Doubling { batch: usize },
    /// A few are, after so many tables.
    Careful { read: usize },
    /// None must be read that is not needed: one.
    Single,
}

impl Pace {
    fn doubling() -> Self {
        Self::Doubling { batch: FIRST_BATCH }
    }

    /// The pace for layers that an index describes, of which all units are wanted.
    fn of_described(&self) -> Self {
        match self {
            Self::Single => Self::Single,
            Self::Doubling { .. } | Self::Careful { .. } => Self::doubling(),
        }
    }

    fn batch(&self) -> usize {
        match *self {
            Self::Doubling { batch } => batch,
            Self::Careful { read } => (read / PART_OF_READ).clamp(1, LARGEST_BATCH),
            Self::Single => 1,
        }
    }

    /// So many were read together.
    fn advance(&mut self, tables: usize) {
        match self {
            Self::Doubling { batch } => *batch = (*batch * 2).min(LARGEST_BATCH),
            Self::Careful { read } => *read += tables,
            Self::Single => {}
        }
    }
}

/// Why layers are not merged further.
enum End {
    /// What is wanted is decided, by all layers from this number on.
    Decided(usize),
    /// There are no more of them.
    Exhausted,
    /// Nothing below is seen.
    Hidden,
}

/// Merges the layers that an index describes in a part of one of its pages, by their own tables if the page cannot be
/// read.
async fn merge_page<S: Storage>(
    merge: &mut Merge,
    chain: &Chain<S>,
    index: &ChainIndex<S>,
    range: &Range<u64>,
    mut pace: Pace,
) -> Result<()> {
    let Some(owners) = index.owners(range.start).await else {
        let covers = index.covers();
        let below = chain.top_down().skip_while(|(index, _)| index.get() as usize >= covers);
        merge_layers(merge, chain, below, &no_writer, range, &mut pace).await?;
        return Ok(());
    };
    let newer = owners.newer.iter().rev().filter_map(|layer| {
        let layer = LayerIndex::new(*layer);
        Some((layer, chain.get(layer)?))
    });
    merge_layers(merge, chain, newer, &no_writer, range, &mut pace).await?;
    if let Some(page) = owners.page {
        let start = range.start >> index.page_bits() << index.page_bits();
        merge.apply_page(chain, &page, start, index.unit_bits());
    }
    Ok(())
}

/// Merges `layers`, from the top down, until what is wanted is decided.
async fn merge_layers<'a, S: Storage, A: ActiveEntries>(
    merge: &mut Merge,
    chain: &'a Chain<S>,
    layers: impl Iterator<Item = (LayerIndex, &'a Arc<Layer<S>>)>,
    writer: &impl Fn(LayerIndex) -> Option<A>,
    range: &Range<u64>,
    pace: &mut Pace,
) -> Result<End> {
    let active = chain.active_index();
    let mut end = End::Exhausted;
    let mut pending: Vec<(LayerIndex, &Arc<Layer<S>>, Portion)> = Vec::new();
    for (index, layer) in layers {
        if merge.wanting == 0 {
            end = End::Decided(index.get() as usize + 1);
            break;
        }
        let visible = range.start..range.end.min(layer.visible());
        if visible.is_empty() {
            end = End::Hidden;
            break;
        }
        let Some(qcow2) = layer.as_qcow2() else {
            merge_pending(merge, &mut pending).await?;
            let unit_bits = merge.unit_bits;
            merge.decide(visible, |guest| Unit::data(index, guest, unit_bits, index == active));
            end = End::Hidden;
            break;
        };
        let writer = writer(index);
        for portion in portions(qcow2, visible) {
            if let Some(writer) = &writer {
                // What is above comes first.
                merge_pending(merge, &mut pending).await?;
                layer.refresh_file_length().await?;
                let entries = writer.entries(portion.first, portion.count).await?;
                merge.apply(layer, index, Some(writer), portion.first, entries.into_iter());
            } else if portion.table != Table::Absent {
                pending.push((index, layer, portion));
            }
        }
        if pending.len() >= pace.batch() {
            pace.advance(pending.len());
            merge_pending(merge, &mut pending).await?;
        }
    }
    merge_pending(merge, &mut pending).await?;
    Ok(end)
}

/// Reads the tables of the layers in `pending` and merges them in order.
async fn merge_pending<S: Storage>(
    merge: &mut Merge,
    pending: &mut Vec<(LayerIndex, &Arc<Layer<S>>, Portion)>,
) -> Result<()> {
    if !pending.is_empty() {
        let reads = pending.iter().map(|(_, layer, portion)| read_portion(layer, portion));
        let tables = try_join_all(reads).await?;
        for ((index, layer, portion), table) in pending.iter().zip(&tables) {
            match (table, layer.as_qcow2()) {
                (Some(table), Some(qcow2)) => {
                    let entries = entries(table, qcow2);
                    merge.apply(layer, *index, None::<&NoWriter>, portion.first, entries);
                }
                _ => merge.invalid(layer, *index, portion),
            }
        }
    }
    pending.clear();
    Ok(())
}

/// Entries of one L2 table that fall into a slice.
struct Portion {
    first: ClusterIndex,
    count: u64,
    table: Table,
}

#[derive(PartialEq, Eq)]
enum Table {
    Absent,
    /// Byte offset of the first entry.
    At(u64),
    /// The L1 entry is not valid.
    Invalid,
}

/// The portions of `range` in a layer's tables, in order.
fn portions(qcow2: &Qcow2, range: Range<u64>) -> Vec<Portion> {
    let geometry = &qcow2.geometry;
    let mut list = Vec::new();
    let last = geometry.cluster_of(GuestOffset::new(range.end - 1)).get();
    let mut first = geometry.cluster_of(GuestOffset::new(range.start)).get();
    while first <= last {
        let (l1_index, l2_index) = geometry.table_position(ClusterIndex::new(first));
        let count = (geometry.l2_entries() - l2_index as u64).min(last - first + 1);
        let table = match qcow2.l2_table(qcow2.l1_entry(l1_index)) {
            Ok(None) => Table::Absent,
            Ok(Some(offset)) => {
                Table::At(offset.get() + (l2_index * geometry.l2_entry_size()) as u64)
            }
            Err(_) => Table::Invalid,
        };
        list.push(Portion { first: ClusterIndex::new(first), count, table });
        first += count;
    }
    list
}

/// The portion's part of its table; `None` if the L1 entry is invalid.
async fn read_portion<S: Storage>(layer: &Layer<S>, portion: &Portion) -> Result<Option<IoBuf>> {
    let (Some(qcow2), Table::At(offset)) = (layer.as_qcow2(), &portion.table) else {
        return Ok(None);
    };
    let length = portion.count as usize * qcow2.geometry.l2_entry_size();
    Ok(Some(layer.read_at(*offset, IoBuf::zeroed(length)).await?))
}

/// The entries in a part of a table.
fn entries<'a>(table: &'a [u8], qcow2: &'a Qcow2) -> impl Iterator<Item = L2Entry> + 'a {
    let count = table.len() / qcow2.geometry.l2_entry_size();
    (0..count).filter_map(|index| L2Entry::read(table, index, &qcow2.geometry))
}

/// The error for a byte at `guest` for which an index leads out of a layer.
fn elsewhere<S: Storage>(layer: &Layer<S>, guest: u64) -> DiskError {
    let reason = format!(
        "the index of the chain leads out of the file for guest offset {guest}, and the layer does not"
    );
    DiskError::Corrupt { image: layer.name().to_owned(), reason }
}

/// The error for a byte at `guest` for which a layer's tables are invalid.
pub async fn explain_invalid<S: Storage>(layer: &Layer<S>, guest: u64) -> DiskError {
    let Some(qcow2) = layer.as_qcow2() else {
        return elsewhere(layer, guest);
    };
    let geometry = &qcow2.geometry;
    let (l1_index, _) = geometry.table_position(geometry.cluster_of(GuestOffset::new(guest)));
    let entry = qcow2.l1_entry(l1_index);
    if let Err(error) = entry.offset(geometry) {
        return layer.format_error(error);
    }
    // A table created since the image was opened may be past its former end.
    if let Err(error) = qcow2.l2_table(entry)
        && entry.offset(geometry).ok().flatten().is_some_and(|at| at.get() >= layer.file_length())
    {
        return layer.format_error(error);
    }
    for portion in portions(qcow2, guest..guest + 1) {
        let entry = match read_portion(layer, &portion).await {
            Err(error) => return error,
            Ok(table) => table.and_then(|table| entries(&table, qcow2).next()),
        };
        match entry.map(|entry| entry.kind(geometry)) {
            Some(Err(error)) => return layer.format_error(error),
            Some(Ok(kind)) => {
                let start = GuestOffset::new(guest - geometry.in_cluster(GuestOffset::new(guest)));
                if let Err(error) = kind.check_data_file(start, geometry) {
                    return layer.format_error(error);
                }
                if matches!(kind, ClusterKind::Data { offset, .. } if offset.get() < layer.data_end())
                {
                    return elsewhere(layer, guest);
                }
                return DiskError::Corrupt {
                    image: layer.name().to_owned(),
                    reason: format!(
                        "the L2 entry of guest offset {guest} is {kind:?}, past the end of the \
                         file ({} bytes), which may be truncated",
                        layer.file_length()
                    ),
                };
            }
            None => {}
        }
    }
    DiskError::Corrupt {
        image: layer.name().to_owned(),
        reason: format!("the L2 entry of guest offset {guest} is not valid"),
    }
}

/// No layer has a writer.
pub fn no_writer(_: LayerIndex) -> Option<NoWriter> {
    None
}

/// Stands for the writer of a layer that has none.
pub enum NoWriter {}

impl ActiveEntries for NoWriter {
    async fn entries(&self, _: ClusterIndex, _: u64) -> Result<Vec<L2Entry>> {
        match *self {}
    }

    fn is_metadata(&self, _: HostOffset) -> bool {
        match *self {}
    }
}

/// A slice being merged.
struct Merge {
    start: u64,
    unit_bits: u32,
    units: Box<[Unit; SLICE_UNITS]>,
    decided: Vec<bool>,
    /// Units that are not decided.
    left: usize,
    wanted: Range<usize>,
    /// Those that are not decided of the wanted ones.
    wanting: usize,
    compressed: Vec<CompressedCluster>,
}

impl Merge {
    /// Has layers merged until the units of the guest bytes in `range` are decided.
    fn want(&mut self, range: &Range<u64>) {
        let first = (range.start - self.start) >> self.unit_bits;
        let end = (range.end - self.start).div_ceil(1 << self.unit_bits);
        self.wanted = first as usize..(end as usize).min(SLICE_UNITS);
        let wanted = self.decided.get(self.wanted.clone()).unwrap_or_default();
        self.wanting = wanted.iter().filter(|decided| !**decided).count();
    }

    /// Decides the units in `range` that no layer above has: `unit` is called with the guest offset of each. Units that
    /// should be left to the layers below must not be in `range`. `None` stands for an offset that the map cannot hold.
    fn decide(&mut self, range: Range<u64>, unit: impl Fn(u64) -> Option<Unit>) {
        let limit = self.start + ((SLICE_UNITS as u64) << self.unit_bits);
        let begin = range.start.max(self.start);
        let end = range.end.min(limit);
        if begin >= end {
            return;
        }
        let first = ((begin - self.start) >> self.unit_bits) as usize;
        let last = ((end - 1 - self.start) >> self.unit_bits) as usize;
        for index in first..=last {
            if !self.decided[index] {
                let guest = self.start + ((index as u64) << self.unit_bits);
                self.decided[index] = true;
                self.left -= 1;
                self.wanting -= usize::from(self.wanted.contains(&index));
                self.units[index] = unit(guest).unwrap_or(Unit::invalid(LayerIndex::new(0)));
            }
        }
    }

    /// Decides the units in `range` that no layer above has by a compressed cluster, which is kept only for them.
    fn decide_compressed(
        &mut self,
        range: Range<u64>,
        index: LayerIndex,
        cluster: CompressedCluster,
    ) {
        let (left, at) = (self.left, self.compressed.len() as u32);
        self.decide(range, |_| Some(Unit::compressed(index, at)));
        if self.left < left {
            self.compressed.push(cluster);
        }
    }

    /// Merges a layer's entries of consecutive clusters.
    fn apply<S: Storage, A: ActiveEntries>(
        &mut self,
        layer: &Layer<S>,
        index: LayerIndex,
        writer: Option<&A>,
        first: ClusterIndex,
        entries: impl Iterator<Item = L2Entry>,
    ) {
        let Some(qcow2) = layer.as_qcow2() else { return };
        let geometry = &qcow2.geometry;
        let size = geometry.cluster_size();
        let past_end = layer.data_end();
        for (step, entry) in entries.enumerate() {
            let start = (first.get() + step as u64) << geometry.cluster_bits();
            let range = start..(start + size).min(layer.visible());
            let unit_bits = self.unit_bits;
            let data = |host: HostOffset, copied: bool| {
                let misplaced = geometry.has_data_file() && host.get() != start;
                let wrong = host.get() >= past_end
                    || misplaced
                    || writer.is_some_and(|w| w.is_metadata(host));
                move |guest: u64| {
                    if wrong {
                        return Some(Unit::invalid(index));
                    }
                    let in_place = copied && writer.is_some();
                    let unit = Unit::data(index, host.get() + (guest - start), unit_bits, in_place);
                    unit.or(Some(Unit::invalid(index)))
                }
            };
            match entry.kind(geometry) {
                Ok(ClusterKind::Unallocated) => {}
                Ok(ClusterKind::ZeroPlain | ClusterKind::ZeroAllocated { .. }) => {
                    self.decide(range, |_| Some(Unit::zero(index)));
                }
                Ok(ClusterKind::Data { offset, copied }) => {
                    self.decide(range, data(offset, copied));
                }
                Ok(ClusterKind::Compressed(cluster)) => {
                    self.decide_compressed(range, index, cluster);
                }
                Ok(ClusterKind::Subclusters { offset, copied, allocated, zero }) => {
                    let sub = geometry.subcluster_size();
                    for n in 0..u64::from(geometry.subclusters_per_cluster()) {
                        let from = start + n * sub;
                        let range = from..(from + sub).min(layer.visible());
                        if zero >> n & 1 == 1 {
                            self.decide(range, |_| Some(Unit::zero(index)));
                        } else if allocated >> n & 1 == 1
                            && let Some(offset) = offset
                        {
                            self.decide(range, data(offset, copied));
                        }
                    }
                }
                Err(_) => self.decide(range, |_| Some(Unit::invalid(index))),
            }
        }
    }

    /// Merges a page of an index that starts at guest byte `page_start`.
    fn apply_page<S: Storage>(
        &mut self,
        chain: &Chain<S>,
        page: &Page,
        page_start: u64,
        page_unit_bits: u32,
    ) {
        let unit_bits = self.unit_bits;
        for run in &page.runs {
            let Some(number) = run.entry.layer() else { continue };
            let index = LayerIndex::new(number);
            let Some(layer) = chain.get(index) else { continue };
            let start = page_start + ((run.first as u64) << page_unit_bits);
            let end = start + ((run.count as u64) << page_unit_bits);
            let range = start..end.min(layer.visible());
            match run.entry {
                PageEntry::Absent => {}
                PageEntry::Zero { .. } => self.decide(range, |_| Some(Unit::zero(index))),
                PageEntry::Data { host, .. } => {
                    let past_end = layer.data_end();
                    let moves = layer.as_qcow2().is_some();
                    self.decide(range, |guest| {
                        // A unit of the map may begin before a run of an index with smaller ones.
                        let host = (host.get() + guest).checked_sub(start);
                        let can_be = |host: &u64| *host < past_end && (moves || *host == guest);
                        let host = host.filter(can_be);
                        let unit = host.and_then(|host| Unit::data(index, host, unit_bits, false));
                        unit.or(Some(Unit::invalid(index)))
                    });
                }
                // Only a qcow2 layer has one.
                PageEntry::Compressed { .. } if layer.as_qcow2().is_none() => {
                    self.decide(range, |_| Some(Unit::invalid(index)));
                }
                PageEntry::Compressed { cluster, .. } => {
                    self.decide_compressed(range, index, cluster);
                }
            }
        }
    }

    /// Marks what an invalid L1 entry covers.
    fn invalid<S: Storage>(&mut self, layer: &Layer<S>, index: LayerIndex, portion: &Portion) {
        if let Some(qcow2) = layer.as_qcow2() {
            let start = portion.first.get() << qcow2.geometry.cluster_bits();
            let end = start + (portion.count << qcow2.geometry.cluster_bits());
            self.decide(start..end.min(layer.visible()), |_| Some(Unit::invalid(index)));
        }
    }
}
