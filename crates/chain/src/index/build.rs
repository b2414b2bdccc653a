//! Building an index.
//!
//! A new overlay's index starts from the highest one below it. Only changes are written: the layer just frozen is added
//! to a page's list of newer layers, and when the list has grown long the page is folded, that is, rewritten over all
//! layers. Pages are folded in turn, a sixteenth of them at each snapshot, so that no snapshot pays for many. Unchanged
//! segments and chapters are referred to where they are.
//!
//! The first overlay of a short chain without an index does not wait until all tables are read if there are many: a
//! layer is listed wherever its L1 table has entries, and gets no digest. The lists are no longer than in any index.
//! Later overlays add the digests, some at a time, until a chapter takes the records.

use super::scan::{self, Scan};
use crate::chain::{Chain, LayerIndex};
use crate::chain_index::ChainIndex;
use crate::map::resolve::{no_writer, resolve};
use crate::map::{Slice, Source};
use futures_util::future::join_all;
use isobath_image::index_area::{has_stamp, read_head, recorded_stamp};
use isobath_image::layer::Layer;
use isobath_image::{Result, always, invariant};
use isobath_qcow2::index::{
    BlockHash, BlockPointer, CHAPTER_LAYERS, HeadsBlock, IndexExtension, LayerRecord, PAGE_UNITS,
    Page, PageEntry, PageRecord, RecordedFormat, Root, SEGMENT_PAGES, Segment, page_bits,
};
use isobath_qcow2::{Head, HostOffset};
use isobath_storage::Storage;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The number of newer layers from which a page is folded when it is its turn.
const FOLD_FROM: usize = 16;
/// The number of newer layers at which a page is folded out of turn.
const FOLD_AT: usize = 32;
/// Pages folded at once.
pub(super) const FOLDS_AT_ONCE: usize = 16;
/// No disk has more segments: 4 PiB in 64 KiB clusters.
pub(super) const MOST_SEGMENTS: u64 = 1 << 20;
/// The unit of the index of a disk whose layers are all raw.
pub(super) const RAW_UNIT_BITS: u32 = 16;

/// What the index of a new overlay may cost, while its creator waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexLimits {
    /// Of a chain without an index all tables are read if they have at most so many bytes. If they have more, this is
    /// left to later overlays where these can do it.
    pub most_at_once: u64,
    /// A layer with more bytes of L2 tables than this is not read in full.
    pub most_to_scan: u64,
    /// Bytes of L2 tables that an overlay reads for digests that were left to it.
    pub most_digested: u64,
    /// Pages that are folded.
    pub most_folds: usize,
    /// Layers that the pages folded may list, besides two for each page that the new layers own something in.
    pub most_folded: usize,
}

impl Default for IndexLimits {
    fn default() -> Self {
        Self {
            most_at_once: 4 << 20,
            most_to_scan: 256 << 20,
            most_digested: 16 << 20,
            most_folds: 1024,
            most_folded: 1024,
        }
    }
}

/// Which pages are folded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Folding {
    /// Those whose turn it is, within these limits.
    InTurn(IndexLimits),
    /// All of them.
    Whole,
}

/// An index that is not in a file yet.
pub struct Built {
    /// The bytes of its blocks, from the start of the area on.
    pub bytes: Vec<u8>,
    /// The extension for the header.
    pub extension: IndexExtension,
    /// Layers, of those whose records are not in a chapter of an earlier index, of which it has no digest.
    pub undigested: u32,
    /// Whether most tables were not read: the digests are left to later overlays, or to who rewrites it.
    pub deferred: bool,
}

/// Why there is no index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoIndex {
    /// The disk is too large or its layers' granularity is too fine for one, or a layer is of another program's format.
    Unsuited,
    /// So much was added without an index that a new overlay should not wait for it.
    Much,
    /// This layer's file has no stamp that counts, and its tables cannot be read in full: an index could never tell
    /// that it is unchanged.
    Unprovable(PathBuf),
}

type Outcome = std::result::Result<Built, NoIndex>;

/// The place of a new index.
#[derive(Clone, Copy)]
pub struct Place {
    /// First byte of the area in the file.
    pub at: HostOffset,
    /// Bytes in a cluster of the file.
    pub cluster_size: u64,
    /// Layers below the file's image.
    pub position: u32,
}

/// Builds an index of all layers of `chain`, none of which may change meanwhile. `above` is the name that the image
/// above gives to the last of them. `progress` is called with the layers and pages done, and how many
/// there are.
///
/// # Errors
/// The storage fails. An overlay does not need what earlier ones have left to it: that stays as it is then.
pub async fn build<S: Storage>(
    chain: &Chain<S>,
    above: &str,
    place: Place,
    folding: Folding,
    mut progress: impl FnMut(u64, u64),
) -> Result<Outcome> {
    if let Some(base) = chain.index().filter(|_| folding != Folding::Whole)
        && let Some(root) = base.root()
    {
        let built =
            build_on(Some((&*base, root)), chain, above, place, folding, &mut progress).await?;
        match built {
            // It is damaged, or of a larger disk.
            None | Some(Err(NoIndex::Unsuited)) => {}
            Some(outcome) => return Ok(outcome),
        }
    }
    let built = build_on(None, chain, above, place, folding, &mut progress).await?;
    Ok(built.unwrap_or(Err(NoIndex::Unsuited)))
}

/// Like [`build`], from an index of the lower layers; `None` if that is damaged.
async fn build_on<S: Storage>(
    base: Option<(&ChainIndex<S>, &Root)>,
    chain: &Chain<S>,
    above: &str,
    place: Place,
    folding: Folding,
    progress: &mut impl FnMut(u64, u64),
) -> Result<Option<Outcome>> {
    if chain.layers().any(|(_, layer)| layer.format().recorded().is_none()) {
        return Ok(Some(Err(NoIndex::Unsuited)));
    }
    let unit = chain.top_down().filter_map(|(_, layer)| layer.unit_bits()).min();
    let unit_bits = unit.unwrap_or(RAW_UNIT_BITS);
    let base = base.filter(|(_, below)| below.unit_bits <= unit_bits);
    let unit_bits = base.map_or(unit_bits, |(_, below)| below.unit_bits);
    let size = base.map_or(0, |(_, below)| below.size).max(chain.active().size());
    let mut root = Root {
        unit_bits,
        position: place.position,
        covers: chain.depth() as u32,
        size,
        chapters: base.map(|(_, below)| below.chapters.clone()).unwrap_or_default(),
        tail: base.map(|(_, below)| below.tail.clone()).unwrap_or_default(),
        segments: Vec::new(),
    };
    if size.div_ceil(1 << root.segment_bits()) > MOST_SEGMENTS || place.position >= 1 << 16 {
        return Ok(Some(Err(NoIndex::Unsuited)));
    }
    let first = base.map_or(0, |(base, _)| base.covers());
    let (mut limit, mut deferred) = (u64::MAX, false);
    if let Folding::InTurn(limits) = folding {
        let added = chain.layers().skip(first).map(|(_, layer)| scan::table_bytes(layer));
        let added = added.sum::<u64>();
        if chain.depth() - first > FOLD_AT && added > limits.most_to_scan {
            return Ok(Some(Err(NoIndex::Much)));
        }
        deferred = added > limits.most_at_once && may_defer(chain, &limits).await;
        limit = if deferred { 0 } else { limits.most_to_scan };
        add_digests(chain, &mut root, &limits).await;
    }
    let mut out = Out { bytes: Vec::new(), place };
    let mut owned = Owned::default();
    let pages = size.div_ceil(1 << root.page_bits());
    let (mut read, total) = (0, (chain.depth() - first) as u64 + pages);
    for (index, layer) in chain.layers().skip(first) {
        let name = match chain.get(LayerIndex::new(index.get().wrapping_add(1))) {
            Some(upper) if index != chain.active_index() => {
                upper.header().and_then(|header| header.backing_file).unwrap_or_default()
            }
            _ => above.to_owned(),
        };
        let (record, owns) = record(layer, name, root.page_bits(), limit).await?;
        if record.stamp.is_none() && record.digest.is_none() {
            return Ok(Some(Err(NoIndex::Unprovable(layer.name().to_owned()))));
        }
        root.tail.push(record);
        owned.add(index, owns);
        read += 1;
        progress(read, total);
    }
    let undigested = root.tail.iter().filter(|record| record.digest.is_none()).count() as u32;
    let folding = (!deferred).then_some(folding);
    let mut work = Work { chain, base, root: &root, folding, folds: 0, folded: 0, owned };
    let count = size.div_ceil(1 << root.segment_bits()) as u32;
    let mut segments = Vec::with_capacity(count as usize);
    for number in 0..count {
        match work.segment(number, &mut out).await? {
            Made::Segment(segment) => segments.push(segment),
            Made::Broken => return Ok(None),
        }
        progress(read + pages.min((u64::from(number) + 1) * SEGMENT_PAGES as u64), total);
    }
    root.segments = segments;
    while root.tail.len() >= CHAPTER_LAYERS {
        let rest = root.tail.split_off(CHAPTER_LAYERS);
        let chapter = std::mem::replace(&mut root.tail, rest);
        let heads = Head::encode_all(&heads(chain, root.chapters.len(), &chapter).await);
        let block = HeadsBlock { length: heads.len() as u32, hash: BlockHash::of(&heads) };
        root.chapters.push(out.put(&LayerRecord::encode_chapter(&chapter, Some(&block))));
        out.put(&heads);
    }
    let pointer = out.put(&root.encode());
    let extension = IndexExtension {
        area_offset: place.at,
        area_length: (out.bytes.len() as u64).next_multiple_of(place.cluster_size),
        root_offset: pointer.offset,
        root_length: pointer.length,
        root_hash: pointer.hash,
    };
    Ok(Some(Ok(Built { bytes: out.bytes, extension, undigested, deferred })))
}

/// The blocks written so far.
struct Out {
    bytes: Vec<u8>,
    place: Place,
}

impl Out {
    fn put(&mut self, block: &[u8]) -> BlockPointer {
        let pointer = BlockPointer {
            layer: self.place.position as u16,
            offset: HostOffset::new(self.place.at.get() + self.bytes.len() as u64),
            length: block.len() as u32,
            hash: BlockHash::of(block),
        };
        self.bytes.extend_from_slice(block);
        pointer
    }
}

/// The record of a layer, and the pages in which it may own something.
async fn record<S: Storage>(
    layer: &Layer<S>,
    name: String,
    page_bits: u32,
    limit: u64,
) -> Result<(LayerRecord, Vec<std::ops::Range<u64>>)> {
    // A write at the same moment as the stamp would not change it, so it is queried twice.
    let before = layer.storage().settled_stamp().await?;
    let Scan { digest, pages } = scan::scan(layer, page_bits, limit).await?;
    let after = layer.storage().stamp().await?;
    let record = LayerRecord {
        name,
        format: always(layer.format().recorded(), layer.name(), "an index covers this format")?,
        stamp: before.filter(|_| before == after).map(recorded_stamp),
        digest,
    };
    Ok((record, pages))
}

/// Whether the digests of a chain can be left to later overlays. These must be able to make all of them before the 64th
/// layer closes a chapter, a layer at least each; a page must not list more layers than in any index; and until then
/// the stamps alone must tell that the layers are unchanged. An index that there is loses nothing.
async fn may_defer<S: Storage>(chain: &Chain<S>, limits: &IndexLimits) -> bool {
    if chain.index().is_some() || chain.depth() >= FOLD_AT {
        return false;
    }
    for (_, layer) in chain.layers() {
        match scan::table_bytes(layer) {
            0 => {}
            bytes if bytes > limits.most_digested => return false,
            _ if matches!(layer.storage().settled_stamp().await, Ok(Some(_))) => {}
            _ => return false,
        }
    }
    true
}

/// Adds digests that were left to later overlays: of as many layers as the limits allow, or of all whose records a
/// chapter is about to take, since nothing is added to them there.
async fn add_digests<S: Storage>(chain: &Chain<S>, root: &mut Root, limits: &IndexLimits) {
    let first = root.chapters.len() * CHAPTER_LAYERS;
    let closes = chain.depth() >= first + CHAPTER_LAYERS;
    let mut left = if closes { u64::MAX } else { limits.most_digested };
    for ((_, layer), record) in chain.layers().skip(first).zip(&mut root.tail) {
        let (None, Some(stamp)) = (record.digest, record.stamp) else { continue };
        let bytes = scan::table_bytes(layer);
        if bytes > left.min(limits.most_to_scan) {
            continue;
        }
        match scan::digest(layer).await {
            Ok(Some(digest)) if has_stamp(&**layer.storage(), stamp).await => {
                record.digest = Some(digest);
                left -= bytes;
            }
            Ok(_) => {}
            Err(error) => tracing::debug!("a digest is left to a later overlay: {error}"),
        }
    }
}

/// The heads of the layers in chapter `number`, whose records these are.
async fn heads<S: Storage>(
    chain: &Chain<S>,
    number: usize,
    records: &[LayerRecord],
) -> Vec<Option<Head>> {
    let layers = chain.layers().skip(number * CHAPTER_LAYERS).zip(records);
    let heads = layers.map(async |((_, layer), record)| match (record.format, record.stamp) {
        (RecordedFormat::Qcow2, Some(stamp)) => read_head(&**layer.storage(), stamp).await,
        _ => None,
    });
    join_all(heads).await
}

/// The layers added that own something, by page.
#[derive(Default)]
struct Owned {
    /// Runs of pages with the layer that owns something there, by the layer.
    layers: Vec<(LayerIndex, Vec<std::ops::Range<u64>>)>,
    /// Pages of all layers.
    pages: usize,
}

impl Owned {
    fn add(&mut self, layer: LayerIndex, pages: Vec<std::ops::Range<u64>>) {
        self.pages += pages.iter().map(|run| (run.end - run.start) as usize).sum::<usize>();
        self.layers.push((layer, pages));
    }

    /// The layers, ascending, of each page of a segment that has any.
    fn of_segment(&self, number: u32) -> BTreeMap<usize, Vec<u16>> {
        let first = u64::from(number) * SEGMENT_PAGES as u64;
        let end = first + SEGMENT_PAGES as u64;
        let mut found: BTreeMap<usize, Vec<u16>> = BTreeMap::new();
        for (layer, runs) in &self.layers {
            let from = runs.partition_point(|run| run.end <= first);
            for run in runs.iter().skip(from).take_while(|run| run.start < end) {
                for page in run.start.max(first)..run.end.min(end) {
                    found.entry((page - first) as usize).or_default().push(layer.get());
                }
            }
        }
        found
    }
}

/// The result of building a segment.
enum Made {
    /// A pointer to it, if it exists.
    Segment(Option<BlockPointer>),
    /// The index below is damaged.
    Broken,
}

struct Work<'a, S> {
    chain: &'a Chain<S>,
    base: Option<(&'a ChainIndex<S>, &'a Root)>,
    root: &'a Root,
    /// `None` if no table is read.
    folding: Option<Folding>,
    /// Pages folded so far.
    folds: usize,
    /// Layers that they listed.
    folded: usize,
    owned: Owned,
}

impl<S: Storage> Work<'_, S> {
    async fn segment(&mut self, number: u32, out: &mut Out) -> Result<Made> {
        let before = self.base.and_then(|(_, below)| below.segments.get(number as usize).copied());
        let before = before.flatten();
        let owned = self.owned.of_segment(number);
        if owned.is_empty() {
            return Ok(Made::Segment(before));
        }
        let mut pages = match (self.base, &before) {
            (Some((base, _)), Some(pointer)) => match base.segment(number, pointer).await {
                Some(segment) => segment.pages.clone(),
                None => return Ok(Made::Broken),
            },
            _ => Vec::new(),
        };
        for (page, layers) in &owned {
            if pages.len() <= *page {
                pages.resize(page + 1, PageRecord::default());
            }
            if let Some(record) = pages.get_mut(*page) {
                record.newer.extend(layers);
            }
        }
        let first = u64::from(number) * SEGMENT_PAGES as u64;
        let mut due = Vec::new();
        for (page, record) in pages.iter().enumerate() {
            if self.is_due(first + page as u64, record) && self.may_fold(record.newer.len()) {
                due.push(page);
            }
        }
        for batch in due.chunks(FOLDS_AT_ONCE) {
            let folded = batch
                .iter()
                .map(|number| page(self.chain, self.root.unit_bits, first + *number as u64));
            for (number, folded) in batch.iter().zip(join_all(folded).await) {
                let Some(record) = pages.get_mut(*number) else { continue };
                let folded = match folded {
                    Err(error) if self.folding != Some(Folding::Whole) => {
                        tracing::debug!("a page is left to a later overlay: {error}");
                        None
                    }
                    folded => folded?,
                };
                let Some(folded) = folded else {
                    // Others may be folded instead.
                    self.folded -= record.newer.len();
                    continue;
                };
                let mut place = None;
                if !folded.is_absent() {
                    let Some(bytes) = folded.encode(self.root.unit_bits) else { continue };
                    place = Some(out.put(&bytes));
                }
                *record = PageRecord {
                    page: place,
                    folded: self.chain.depth() as u32,
                    newer: Vec::new(),
                };
            }
        }
        check_lists(&pages, self.chain.active().name())?;
        let block = Segment { number, pages }.encode();
        Ok(Made::Segment(Some(out.put(&block))))
    }

    fn is_due(&self, page: u64, record: &PageRecord) -> bool {
        match self.folding {
            None => false,
            Some(Folding::Whole) => !record.newer.is_empty(),
            Some(Folding::InTurn(_)) => {
                let turn = (page + self.chain.depth() as u64).is_multiple_of(FOLD_FROM as u64);
                let length = record.newer.len();
                length >= FOLD_AT || (turn && length >= FOLD_FROM)
            }
        }
    }

    /// Whether a page that lists so many layers may be folded besides those that were; then it counts as folded. The
    /// first one always may. An overlay that adds more to the lists may also fold more, so that they do not grow on.
    fn may_fold(&mut self, listed: usize) -> bool {
        if let Some(Folding::InTurn(limits)) = self.folding {
            let most = limits.most_folded + 2 * self.owned.pages;
            let fits = self.folded == 0 || self.folded + listed <= most;
            if !fits || self.folds >= limits.most_folds {
                return false;
            }
        }
        self.folds += 1;
        self.folded += listed;
        true
    }
}

/// Checks that a reader takes the lists of newer layers.
fn check_lists(pages: &[PageRecord], name: &Path) -> Result<()> {
    let sound = pages.iter().all(|record| {
        let above = record.newer.first().is_none_or(|first| u32::from(*first) >= record.folded);
        above && record.newer.is_sorted_by(|lower, upper| lower < upper)
    });
    invariant(sound, name, "a page lists the layers above those that it is folded from, in order")
}

/// A page of a chain; `None` if a table is invalid, which only a read may report.
pub async fn page<S: Storage>(
    chain: &Chain<S>,
    unit_bits: u32,
    number: u64,
) -> Result<Option<Page>> {
    let page_bits = page_bits(unit_bits);
    let range = number << page_bits..(number + 1) << page_bits;
    let slice = resolve(chain, no_writer, range, unit_bits).await?;
    Ok(page_of(&slice, number as u32, unit_bits))
}

/// A resolved slice as a page; `None` if a unit is invalid.
pub(super) fn page_of(slice: &Slice, number: u32, unit_bits: u32) -> Option<Page> {
    let mut entries = Vec::with_capacity(PAGE_UNITS);
    for index in 0..PAGE_UNITS {
        entries.push(match slice.unit_source(index, unit_bits) {
            Source::Absent => PageEntry::Absent,
            Source::Zero(layer) => PageEntry::Zero { layer: layer.get() },
            Source::Data { layer, host, .. } => {
                PageEntry::Data { layer: layer.get(), host: HostOffset::new(host) }
            }
            Source::Compressed { layer, cluster } => {
                PageEntry::Compressed { layer: layer.get(), cluster }
            }
            Source::Invalid(_) => return None,
        });
    }
    Some(Page::new(number, unit_bits, entries))
}

const _: () = assert!(PAGE_UNITS == crate::map::SLICE_UNITS || cfg!(loom));

#[cfg(test)]
mod tests {
    use super::*;
    use futures_executor::block_on;
    use isobath_formats::{Error, Format, Image, VdiOptions, Writer};
    use isobath_image::DiskError;
    use isobath_storage::memory::{MemoryFile, MemoryHost};
    use isobath_storage::{Host, OpenMode};
    use std::sync::Arc;

    #[test]
    fn lists_of_newer_layers_are_in_order() {
        let check = |folded, newer: &[u16]| {
            let record = PageRecord { page: None, folded, newer: newer.to_vec() };
            check_lists(&[PageRecord::default(), record], Path::new("image"))
        };
        check(3, &[3, 5]).unwrap();
        for (folded, newer) in [(4, [3, 5]), (3, [5, 3]), (3, [3, 3])] {
            match check(folded, &newer) {
                Err(DiskError::Internal { violated, .. }) => assert_eq!(
                    violated,
                    "a page lists the layers above those that it is folded from, in order"
                ),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn an_index_is_of_layers_whose_format_it_can_name() {
        let (host, name) = (MemoryHost::new(), Path::new("vdi"));
        let recorded = block_on(async {
            let file = Arc::new(host.create(name, OpenMode::default()).await.unwrap());
            let options = VdiOptions { fixed: false, ids: [1, 2] };
            Writer::vdi(Arc::clone(&file), 512, options).unwrap().finish().await.unwrap();
            let none = async |_: &str| -> std::result::Result<(PathBuf, Arc<MemoryFile>), Error> {
                panic!("a VDI is one file")
            };
            let image = Image::open(Format::Vdi, name, Arc::clone(&file), none).await.unwrap();
            let layer = Layer::foreign(name.to_owned(), file, image);
            record(&layer, "vdi".into(), 26, u64::MAX).await
        });
        match recorded {
            Err(DiskError::Internal { violated, .. }) => {
                assert_eq!(violated, "an index covers this format");
            }
            other => panic!("{:?}", other.map(|(record, _)| record)),
        }
    }
}
