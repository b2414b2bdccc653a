//! The index of all layers of a chain, for a file of its own beside them.
//!
//! Every page is folded, so that one block has the owners of all of its units, whatever the depth.

use super::build::{FOLDS_AT_ONCE, MOST_SEGMENTS, RAW_UNIT_BITS, page_of};
use crate::chain::Chain;
use crate::chain_index::ChainIndex;
use crate::map::resolve::{no_writer, resolve};
use futures_util::future::join_all;
use isobath_image::{Result, violated};
use isobath_qcow2::HostOffset;
use isobath_qcow2::index::{
    BlockHash, BlockPointer, MAX_WHOLE_BYTES, MAX_WHOLE_ROOT_BYTES, Page, PageRecord,
    SEGMENT_PAGES, Segment, WholeRoot, page_bits,
};
use isobath_storage::{Host, IndexFile, Locking, OpenMode, Storage, StorageExt, shown};
use std::collections::BTreeSet;
use std::sync::Arc;

/// The index of all layers of a chain.
pub struct WholeIndex {
    /// Its root.
    pub root: WholeRoot,
    /// The bytes of its file: the segments, and then the pages.
    pub bytes: Vec<u8>,
}

/// Builds the index of all layers of a chain, none of which may change meanwhile, from the layers' own tables.
/// `None` if there can be none: the disk is too large or too fragmented for it, a layer's tables are invalid somewhere,
/// or a layer is of another program's format.
///
/// # Errors
/// The storage fails.
pub async fn build_whole<S: Storage>(chain: &Chain<S>) -> Result<Option<WholeIndex>> {
    if chain.layers().any(|(_, layer)| layer.format().recorded().is_none()) {
        return Ok(None);
    }
    let Some(plain) = chain.below(chain.depth()) else { return Ok(None) };
    let unit = plain.top_down().filter_map(|(_, layer)| layer.unit_bits()).min();
    let unit_bits = unit.unwrap_or(RAW_UNIT_BITS);
    let size = plain.active().size();
    let count = WholeRoot::segments(size, unit_bits);
    if count > MOST_SEGMENTS || WholeRoot::length(count as usize) > MAX_WHOLE_ROOT_BYTES {
        return Ok(None);
    }
    let page_bits = page_bits(unit_bits);
    let owned: Vec<u64> = owned(&plain, page_bits).into_iter().collect();
    let mut pages: Vec<Placed> = Vec::new();
    let mut bytes = Vec::new();
    for batch in owned.chunks(FOLDS_AT_ONCE) {
        let resolved = batch.iter().map(async |number| {
            let range = number << page_bits..(number + 1) << page_bits;
            resolve(&plain, no_writer, range, unit_bits).await
        });
        for (number, slice) in batch.iter().zip(join_all(resolved).await) {
            let Some(page) = page_of(&slice?, *number as u32, unit_bits) else { return Ok(None) };
            if page.is_absent() {
                continue;
            }
            let Some(block) = encoded(&page, unit_bits) else { return Ok(None) };
            pages.push(Placed { number: *number, at: bytes.len(), hash: BlockHash::of(&block) });
            bytes.extend_from_slice(&block);
            if bytes.len() > MAX_WHOLE_BYTES {
                return Ok(None);
            }
        }
    }
    let layers = plain.depth() as u32;
    let mut root = WholeRoot { unit_bits, layers, size, segments: vec![None; count as usize] };
    let bytes = assemble(&mut root, &pages, &bytes);
    Ok((bytes.len() <= MAX_WHOLE_BYTES).then_some(WholeIndex { root, bytes }))
}

/// A page's bytes, if reading them gives the page again.
fn encoded(page: &Page, unit_bits: u32) -> Option<Vec<u8>> {
    let block = page.encode(unit_bits)?;
    let read = Page::decode(&block, page.number, unit_bits);
    if read.as_ref() != Some(page) {
        violated("a page is read as it was written");
    }
    Some(block)
}

/// A page that was written.
struct Placed {
    /// Its number on the disk.
    number: u64,
    /// Its first byte, counted from the first page.
    at: usize,
    hash: BlockHash,
}

/// Puts the segments before the pages, so that the first read of the file has them and what a boot reads first, and has
/// the root point to them.
fn assemble(root: &mut WholeRoot, placed: &[Placed], bytes: &[u8]) -> Vec<u8> {
    let mut segments: Vec<Segment> = Vec::new();
    let ends = placed.iter().skip(1).map(|next| next.at).chain([bytes.len()]);
    for (page, end) in placed.iter().zip(ends) {
        let number = (page.number / SEGMENT_PAGES as u64) as u32;
        let place = (page.number % SEGMENT_PAGES as u64) as usize;
        if segments.last().is_none_or(|last| last.number != number) {
            segments.push(Segment { number, pages: Vec::new() });
        }
        let Some(segment) = segments.last_mut() else { unreachable!("one was added") };
        segment.pages.resize(place, PageRecord::default());
        let pointer = BlockPointer {
            layer: 0,
            // From the first page on, whose place is not known yet.
            offset: HostOffset::new(page.at as u64),
            length: (end - page.at) as u32,
            hash: page.hash,
        };
        let (page, folded, newer) = (Some(pointer), root.layers, Vec::new());
        segment.pages.push(PageRecord { page, folded, newer });
    }
    // Places change no lengths.
    let first: usize = segments.iter().map(|segment| segment.encode().len()).sum();
    let mut whole = Vec::with_capacity(first + bytes.len());
    for mut segment in segments {
        for pointer in segment.pages.iter_mut().filter_map(|record| record.page.as_mut()) {
            pointer.offset = HostOffset::new(first as u64 + pointer.offset.get());
        }
        let block = segment.encode();
        let pointer = BlockPointer {
            layer: 0,
            offset: HostOffset::new(whole.len() as u64),
            length: block.len() as u32,
            hash: BlockHash::of(&block),
        };
        match root.segments.get_mut(segment.number as usize) {
            Some(place) => *place = Some(pointer),
            None => violated("each page is in a segment of the disk"),
        }
        whole.extend_from_slice(&block);
    }
    whole.extend_from_slice(bytes);
    whole
}

/// The pages in which a layer may own something, by its first table.
fn owned<S: Storage>(chain: &Chain<S>, page_bits: u32) -> BTreeSet<u64> {
    let mut pages = BTreeSet::new();
    for (_, layer) in chain.layers() {
        let end = layer.visible();
        let mut add = |start: u64, length: u64| {
            let stop = start.saturating_add(length).min(end);
            if start < stop {
                pages.extend(start >> page_bits..=(stop - 1) >> page_bits);
            }
        };
        match layer.as_qcow2() {
            None => add(0, layer.size()),
            Some(qcow2) => {
                let span = qcow2.geometry.l1_entry_span();
                for (number, _) in qcow2.l1.read().allocated() {
                    add((number as u64).saturating_mul(span), span);
                }
            }
        }
    }
    pages
}

/// The index in a file of its own that `chain` uses, for another chain that has its lowest `same` layers as they are.
/// `None` if it describes more than these.
pub fn kept_beside<S: Storage>(chain: &Chain<S>, same: usize) -> Option<Arc<ChainIndex<S>>> {
    chain.index().filter(|index| index.root().is_none() && index.covers() <= same)
}

/// The index that the host has in a file of its own for the top of this chain, or for a layer below it, if the layers
/// below that are those that it describes.
///
/// # Errors
/// The file cannot be opened. One whose root is damaged is logged, and not used.
pub async fn find_whole<H: Host>(
    host: &H,
    chain: &Chain<H::File>,
) -> Result<Option<Arc<ChainIndex<H::File>>>> {
    let found = chain.top_down().find_map(|(at, layer)| Some((at, host.index_of(layer.name())?)));
    let Some((at, IndexFile { name, root, layers })) = found else { return Ok(None) };
    let lower =
        chain.layers().map(|(_, layer)| layer.storage().id()).take(usize::from(at.get()) + 1);
    if !lower.eq(layers) {
        return Ok(None);
    }
    let root = WholeRoot::decode(&root);
    let size = chain.get(at).map(|top| top.size());
    let is_its =
        |root: &WholeRoot| root.layers == u32::from(at.get()) + 1 && Some(root.size) == size;
    let Some(root) = root.filter(is_its) else {
        tracing::warn!(
            "the index '{}' is damaged; the layers' own tables are used in its place",
            shown(&name)
        );
        return Ok(None);
    };
    let mode = OpenMode { locking: Locking::Unlocked, ..OpenMode::default() };
    let file = host.open(&name, mode).await?;
    Ok(Some(Arc::new(ChainIndex::beside(file, root))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::must_panic::must_panic;
    use isobath_qcow2::index::PageEntry;

    #[test]
    fn pages_are_written_as_they_are_read_and_in_segments_of_the_disk() {
        // Half a unit is lost.
        let page =
            |host| Page::new(0, 16, [PageEntry::Data { layer: 0, host: HostOffset::new(host) }]);
        assert!(encoded(&page(1 << 16), 16).is_some());
        must_panic(|| encoded(&page(1 << 15), 16), "a page is read as it was written");
        let placed = |number| vec![Placed { number, at: 0, hash: BlockHash::of(b"page") }];
        let size = 1 << 30;
        let mut root = WholeRoot { unit_bits: 16, layers: 1, size, segments: vec![None] };
        assert!(assemble(&mut root, &placed(63), b"page").ends_with(b"page"));
        assert!(root.segments[0].is_some());
        must_panic(
            || assemble(&mut root, &placed(64), b"page"),
            "each page is in a segment of the disk",
        );
    }
}
