//! Finding the index of a chain, and deciding whether it is still valid.

use super::scan;
use crate::chain::{Chain, LayerIndex};
use crate::chain_index::ChainIndex;
use futures_util::future::join_all;
use isobath_image::index_area::{has_stamp, read_block, read_head, read_root, recorded_stamp};
use isobath_image::layer::Layer;
use isobath_image::open::Known;
use isobath_qcow2::head::MAX_HEADS_BYTES;
use isobath_qcow2::index::{
    BlockPointer, CHAPTER_LAYERS, HeadsBlock, LayerRecord, MAX_BLOCK_BYTES, Root,
};
use isobath_qcow2::{Head, HostOffset};
use isobath_storage::{Storage, shown};
use std::collections::VecDeque;
use std::sync::Arc;

/// The most bytes of L2 tables that opening a chain reads to verify layers whose files were touched.
const MOST_TO_COMPARE: u64 = 256 << 20;
/// The number of indexes compared with the layers, from the top down, before the chain is used without one.
const TRIES: usize = 8;
/// The number of invalid roots examined before that.
const LOOKS: usize = 64;
/// Layers whose stamps are queried at once.
const AT_ONCE: usize = 256;
/// Bytes of heads after which no more are read before their layers are open.
const MANY_HEADS: u64 = 4 << 20;
/// Why an index is not used whose chapters do not match its root.
const OVERWRITTEN: &str = "its list of layers was overwritten";

/// The names that an index gives to the layers below, so that these can be opened together.
pub struct Ahead {
    /// The index's root.
    pub root: Root,
    /// Records known so far: those of the last layers described.
    records: VecDeque<LayerRecord>,
    /// Heads that were read and not dropped: those of the layers from the lowest record's on.
    heads: VecDeque<Option<Head>>,
    /// Bytes that they took in their blocks.
    heads_length: u64,
}

impl Ahead {
    /// The names in the root itself.
    pub fn new(root: Root) -> Self {
        let records = root.tail.clone().into();
        Self { root, records, heads: VecDeque::new(), heads_length: 0 }
    }

    /// The lowest layer whose record is known.
    pub fn lowest(&self) -> usize {
        self.root.covers as usize - self.records.len()
    }

    /// The record of a layer, if it is known.
    pub fn record(&self, layer: usize) -> Option<&LayerRecord> {
        self.records.get(layer.checked_sub(self.lowest())?)
    }

    /// What is known of a layer whose record is, besides its record.
    pub fn known(&self, layer: usize) -> Option<Known<'_>> {
        let stamp = self.record(layer)?.stamp?;
        let head = self.heads.get(layer.checked_sub(self.lowest())?)?.as_ref()?;
        Some(Known { stamp, head })
    }

    /// The chapter to read next.
    pub fn next_chapter(&self) -> Option<&BlockPointer> {
        self.root.chapters.get((self.lowest() / CHAPTER_LAYERS).checked_sub(1)?)
    }

    /// Reads the next chapter from the layer that holds it; returns whether it was valid.
    pub async fn read_chapter<S: Storage>(&mut self, holder: &Layer<S>) -> bool {
        self.chapter(holder).await.is_some()
    }

    /// Like [`read_chapter`](Self::read_chapter), with the heads of its layers. If these are not valid, the layers are
    /// opened as others are.
    pub async fn read_chapter_and_heads<S: Storage>(&mut self, holder: &Layer<S>) -> bool {
        let Some(pointer) = self.chapter(holder).await else { return false };
        let heads = match &pointer {
            Some(pointer) => read_heads(holder, pointer).await,
            None => None,
        };
        self.heads_length += pointer.map_or(0, |pointer| u64::from(pointer.length));
        for head in heads.unwrap_or_else(|| vec![None; CHAPTER_LAYERS]).into_iter().rev() {
            self.heads.push_front(head);
        }
        true
    }

    /// Whether the heads that were read take so much memory that their layers should be opened before others are read.
    pub fn has_many_heads(&self) -> bool {
        self.heads_length >= MANY_HEADS
    }

    /// Drops the heads that were read: their layers are open.
    pub fn drop_heads(&mut self) {
        self.heads = VecDeque::new();
        self.heads_length = 0;
    }

    /// Reads the next chapter; returns where its heads are, if it has any.
    async fn chapter<S: Storage>(&mut self, holder: &Layer<S>) -> Option<Option<BlockPointer>> {
        let pointer = *self.next_chapter()?;
        let bytes = read_block(&**holder.storage(), &pointer, MAX_BLOCK_BYTES).await?;
        for record in LayerRecord::decode_chapter(&bytes, CHAPTER_LAYERS)?.into_iter().rev() {
            self.records.push_front(record);
        }
        let after = pointer.offset.get().checked_add(u64::from(pointer.length));
        let heads = HeadsBlock::of_chapter(&bytes, CHAPTER_LAYERS).zip(after);
        Some(heads.map(|(HeadsBlock { length, hash }, after)| {
            let (layer, offset) = (pointer.layer, HostOffset::new(after));
            BlockPointer { layer, offset, length, hash }
        }))
    }
}

/// The heads of a chapter; `None` if they are not valid.
async fn read_heads<S: Storage>(
    holder: &Layer<S>,
    pointer: &BlockPointer,
) -> Option<Vec<Option<Head>>> {
    let bytes = read_block(&**holder.storage(), pointer, MAX_HEADS_BYTES).await?;
    Head::decode_all(&bytes, CHAPTER_LAYERS)
}

/// Why an index does not describe the chain that it is in.
struct Stale {
    /// No layer below this one was found to differ.
    layer: usize,
    reason: String,
}

/// The highest valid index in the chain. Invalid ones are logged.
pub async fn find<S: Storage>(chain: &Chain<S>) -> Option<Arc<ChainIndex<S>>> {
    look_for(chain, false).await
}

/// Like [`find`], in a chain that this process changed: it is expected that an index is no longer valid.
pub async fn find_again<S: Storage>(chain: &Chain<S>) -> Option<Arc<ChainIndex<S>>> {
    look_for(chain, true).await
}

async fn look_for<S: Storage>(chain: &Chain<S>, mut said: bool) -> Option<Arc<ChainIndex<S>>> {
    let mut limit = usize::MAX;
    let (mut tries, mut looks) = (0, 0);
    for (position, layer) in chain.top_down() {
        if tries == TRIES || looks == LOOKS {
            break;
        }
        let position = position.get() as usize;
        let announced = layer.as_qcow2().is_some_and(|qcow2| qcow2.header.read().index().is_some());
        if !announced || position == 0 {
            continue;
        }
        looks += 1;
        let checked = match read_root(layer).await {
            None => Err(Stale { layer: limit, reason: "its root was overwritten".into() }),
            Some(root) if root.covers as usize > limit || root.covers == 0 => continue,
            Some(root) => {
                tries += 1;
                check(chain, position, root).await
            }
        };
        match checked {
            Ok(ahead) => return Some(chain.indexed_by(ahead.root)),
            Err(stale) => {
                limit = limit.min(stale.layer);
                if !said {
                    said = true;
                    tracing::info!(
                        "the index of '{}' is out of date and not used: {}. 'isobath index' \
                         rewrites it",
                        shown(layer.name()),
                        stale.reason
                    );
                }
            }
        }
    }
    None
}

/// An index that is valid.
pub struct Examined {
    /// Its root.
    pub root: Root,
    /// Layers of which it has no digest: once the file of one is copied or touched, the index is not used.
    pub undigested: u32,
}

/// The index of a chain's active layer, or why it is not used, if it has one.
pub async fn examine<S: Storage>(chain: &Chain<S>) -> Result<Examined, String> {
    let Some(root) = read_root(chain.active()).await else {
        return Err("its root was overwritten".into());
    };
    let checked = check(chain, chain.depth() - 1, root).await;
    let ahead = checked.map_err(|stale| stale.reason)?;
    let undigested = ahead.records.iter().filter(|record| record.digest.is_none()).count();
    Ok(Examined { undigested: undigested as u32, root: ahead.root })
}

/// What is wrong with the heads of a valid index of a chain, if anything.
pub async fn examine_heads<S: Storage>(chain: &Chain<S>, root: &Root) -> Result<(), String> {
    let mut ahead = Ahead::new(root.clone());
    while let Some(chapter) = ahead.next_chapter() {
        let holder = chain.get(LayerIndex::new(chapter.layer));
        let Some(holder) = holder else { return Err(OVERWRITTEN.into()) };
        let place = ahead.chapter(holder).await.ok_or(OVERWRITTEN)?;
        let Some(place) = place else { continue };
        let heads = read_heads(holder, &place).await;
        let heads = heads.ok_or("what it says of the layers' headers was overwritten")?;
        let first = ahead.lowest();
        for (number, head) in heads.iter().enumerate() {
            let stamp = ahead.record(first + number).and_then(|record| record.stamp);
            let (Some(head), Some(stamp)) = (head, stamp) else { continue };
            let layer = chain.get(LayerIndex::new((first + number) as u16));
            let Some(layer) = layer else { return Err(OVERWRITTEN.into()) };
            let storage = &**layer.storage();
            let same = read_head(storage, stamp).await.as_ref() == Some(head);
            // If the file has another stamp, its head is not used.
            if !same && has_stamp(storage, stamp).await {
                let name = shown(layer.name());
                return Err(format!("'{name}' begins otherwise, although its times are the same"));
            }
        }
    }
    Ok(())
}

/// Checks whether the root at `position` matches the layers below it; returns it with all records.
async fn check<S: Storage>(chain: &Chain<S>, position: usize, root: Root) -> Result<Ahead, Stale> {
    if root.position as usize != position {
        let reason = format!(
            "it was written over {} layers, but the chain has {position} below it",
            root.position
        );
        return Err(Stale { layer: root.covers.min(root.position) as usize, reason });
    }
    let covers = root.covers as usize;
    let mut ahead = Ahead::new(root);
    while ahead.lowest() > 0 {
        let holder =
            ahead.next_chapter().and_then(|chapter| chain.get(LayerIndex::new(chapter.layer)));
        let read = match holder {
            Some(holder) => ahead.read_chapter(holder).await,
            None => false,
        };
        if !read {
            return Err(Stale { layer: covers, reason: OVERWRITTEN.into() });
        }
    }
    let mut touched = Vec::new();
    let numbers: Vec<usize> = (0..covers).collect();
    for batch in numbers.chunks(AT_ONCE) {
        let stamps = batch.iter().map(|number| async {
            let layer = chain.get(LayerIndex::new(*number as u16))?;
            layer.storage().stamp().await.ok().flatten()
        });
        for (number, stamp) in batch.iter().zip(join_all(stamps).await) {
            let recorded = ahead.record(*number).and_then(|record| record.stamp);
            if recorded.is_none() || recorded != stamp.map(recorded_stamp) {
                touched.push(*number);
            }
        }
    }
    let mut budget = MOST_TO_COMPARE;
    for number in touched {
        compare(chain, number, &ahead, &mut budget).await?;
    }
    Ok(ahead)
}

/// Compares a layer whose stamp is not conclusive with its record's digest.
async fn compare<S: Storage>(
    chain: &Chain<S>,
    number: usize,
    ahead: &Ahead,
    budget: &mut u64,
) -> Result<(), Stale> {
    let (Some(layer), Some(record)) =
        (chain.get(LayerIndex::new(number as u16)), ahead.record(number))
    else {
        let reason = "the chain was longer when the index was written".into();
        return Err(Stale { layer: number, reason });
    };
    let name = shown(layer.name());
    let stale = |reason: String| Err(Stale { layer: number, reason });
    if layer.format() != record.format.into() {
        return stale(format!("'{name}' has another format"));
    }
    let Some(digest) = record.digest else {
        return stale(match record.stamp {
            Some(_) => format!(
                "'{name}' was copied or touched since, and cannot be compared: its tables were not \
                 read when the index was written"
            ),
            None => format!("it says nothing of '{name}' that could be compared"),
        });
    };
    let bytes = scan::table_bytes(layer);
    if bytes > *budget {
        return stale(format!(
            "too many layers were copied or touched since (such as '{name}') to compare them \
             quickly"
        ));
    }
    *budget -= bytes;
    match scan::digest(layer).await {
        Ok(Some(found)) if found == digest => Ok(()),
        Ok(_) => stale(format!("'{name}' was changed since")),
        Err(error) => stale(error.to_string()),
    }
}
