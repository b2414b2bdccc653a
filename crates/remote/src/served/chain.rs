//! A chain that is read from its store.

use super::pinned::{Pinned, pins};
use crate::address::Address;
use crate::cache::{Cache, ObjectKind};
use crate::digest::{BLOCK, Digest, Table};
use crate::error::{Error, Result};
use crate::fetch::{Common, Fetcher, RemoteLayer, Source, follow, object};
use crate::head::KnownHead;
use crate::heads::{Heads, IndexHead};
use crate::keys;
use crate::manifest::{Format, IndexObject, Layer, MAX_MANIFEST, Manifest, TraceObject};
use crate::progress::Progress;
use crate::store::{Limits, Store};
use crate::trace::Recording;
use isobath_storage::word;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Bytes of memory for each block, and for each layer, at most.
const OF_BLOCK: u64 = 16 + 8;
const OF_LAYER: u64 = 8192;

/// What names the index among the layers of a chain.
pub(super) const INDEX: &str = "index";

/// How long the manifest is asked for where requests wait for ever, if one is known.
const FIRST_LIMIT: Duration = Duration::from_secs(30);

/// Most bytes of all layers of a chain together: their tables have 1 GiB then, and the cache's maps half of that.
const MOST_BYTES: u64 = 16 << 40;

/// A chain in a store, whose layers are read when they are needed.
pub struct Chain {
    address: Address,
    /// From the base to the top.
    layers: Vec<Arc<RemoteLayer>>,
    index: Option<Index>,
    /// The [pin](Pinned) of each layer, from the base to the last that has one, and the number of the layer that has a
    /// pin.
    pins: Vec<Digest>,
    numbers: HashMap<Digest, usize>,
    /// What is to be fetched ahead, if that is known, and whether somebody has begun to.
    trace: Option<TraceObject>,
    is_followed: AtomicBool,
    common: Arc<Common>,
    /// The store did not answer, and the manifest is the one that was read last.
    last_known: Option<String>,
}

/// The index of all layers.
struct Index {
    root: Arc<[u8]>,
    /// The digest of the root, which has the hashes of all parts.
    digest: Digest,
    /// The object with its segments and pages, which is read as a layer is.
    object: Arc<RemoteLayer>,
}

impl std::fmt::Debug for Chain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Chain")
            .field("address", &self.address)
            .field("layers", &self.layers.len())
            .finish_non_exhaustive()
    }
}

impl Chain {
    /// Reads the manifest and the heads of a chain: two requests, or one if the cache has the heads. Requests to the
    /// store have the time limit `limit`; with `None` they wait until it answers.
    ///
    /// This blocks.
    ///
    /// # Errors
    /// There is no such chain; what the store holds of it is damaged; the store does not answer, and the cache has no
    /// manifest of it.
    pub fn open(
        address: &Address,
        cache: &Arc<Cache>,
        limit: Option<Duration>,
    ) -> Result<Arc<Self>> {
        let progress = Arc::<Progress>::default();
        let limits = Limits::of_reads(limit.unwrap_or(FIRST_LIMIT));
        let source = Source::new(&address.place, limits, &progress);
        Self::of_source(source, address, cache, limit, progress)
    }

    /// The same, of a store that is open, whatever its place is called in the address. Its own time limit is to be the
    /// same.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn open_in(
        store: Box<dyn Store>,
        address: &Address,
        cache: &Arc<Cache>,
        limit: Option<Duration>,
    ) -> Result<Arc<Self>> {
        Self::of_source(Source::Open(store.into()), address, cache, limit, Arc::default())
    }

    fn of_source(
        source: Source,
        address: &Address,
        cache: &Arc<Cache>,
        limit: Option<Duration>,
        progress: Arc<Progress>,
    ) -> Result<Arc<Self>> {
        let (manifest, last_known) = manifest(&source, address, cache, limit.is_none())?;
        check_tables(&manifest)?;
        let heads = heads(&source, &manifest, cache)?;
        let fetcher = Fetcher::start(source, limit, progress)?;
        let common = Arc::new(Common::new(fetcher, Arc::clone(cache)));
        let is_first = heads.is_first();
        let (heads, index_head) = heads.into_parts();
        let index = index(manifest.index.as_ref(), index_head, &common)?;
        let mut layers = Vec::new();
        for (layer, mut head) in manifest.layers.into_iter().zip(heads) {
            let table = std::mem::take(&mut head.table);
            let (key, head) = (keys::layer(&layer.digest), KnownHead::new(&layer, head)?);
            if !table.is_empty() && table.len() as u64 != Table::length(layer.length) {
                return Err(Error::damaged(format_args!(
                    "the chain's heads: layer '{}' has the checksums of another number of blocks; push the chain \
                     again from where it is whole",
                    layer.digest
                )));
            }
            let table = Some(table).filter(|table| !table.is_empty()).map(Arc::from);
            layers.push(Arc::new(RemoteLayer::new(key, layer, head, table, Arc::clone(&common))));
        }
        let known = layers.iter().map(|layer| (layer.described(), layer.head()));
        let pins: Vec<_> = if is_first { Vec::new() } else { pins(known).collect() };
        let numbers = pins.iter().enumerate().map(|(number, pin)| (*pin, number)).collect();
        Ok(Arc::new(Self {
            address: address.clone(),
            layers,
            index,
            pins,
            numbers,
            trace: manifest.trace,
            is_followed: AtomicBool::new(false),
            common,
            last_known,
        }))
    }

    /// All objects that are read in blocks: the layers from the base up, and the index.
    fn objects(&self) -> impl Iterator<Item = &Arc<RemoteLayer>> {
        self.layers.iter().chain(self.index.iter().map(|index| &index.object))
    }

    /// Records what is read of the chain from now on.
    pub fn record(&self) -> Recording {
        let digests = self.objects().map(|object| object.described().digest);
        let recording = Recording::new(digests.collect());
        for (number, object) in self.objects().enumerate() {
            object.record(recording.of_layer(number, object.length().div_ceil(BLOCK)));
        }
        recording
    }

    /// Fetches ahead what the chain's trace has, in its order and while nothing else waits to be fetched, as long as
    /// what is fetched of traces takes at most half of the cache. Returns the thread that does it, which nobody need
    /// wait for; `None` if the chain has no trace, or this was called before.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn follow_trace(&self) -> Result<Option<JoinHandle<()>>> {
        let Some(trace) = &self.trace else { return Ok(None) };
        if self.is_followed.swap(true, Ordering::Relaxed) {
            return Ok(None);
        }
        let objects: Vec<_> = self.objects().map(Arc::clone).collect();
        follow(&self.common, trace.clone(), &objects).map(Some)
    }

    /// Where it is.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Why the manifest is the one that was read last, and not the one that the store has now.
    pub fn last_known(&self) -> Option<&str> {
        self.last_known.as_deref()
    }

    /// Most bytes of memory that reading its layers takes: a checksum and a word of the cache's map for each block, and
    /// what is known of each layer without reading it.
    pub fn memory(&self) -> u64 {
        let of_layer = |layer: &Arc<RemoteLayer>| {
            let blocks = layer.described().length.div_ceil(BLOCK);
            blocks * OF_BLOCK + layer.head().memory() + OF_LAYER
        };
        let of_index =
            self.index.iter().map(|index| index.root.len() as u64 + of_layer(&index.object));
        // Its bytes, and what they say.
        let of_trace = self.trace.iter().map(|trace| trace.length * 2);
        self.layers.iter().map(of_layer).chain(of_index).chain(of_trace).sum()
    }

    /// Whether there is an index of all layers.
    pub fn has_index(&self) -> bool {
        self.index.is_some()
    }

    /// The number of layers.
    pub fn depth(&self) -> usize {
        self.layers.len()
    }

    /// The name under which each layer is opened, and its format, from the top to the base.
    pub fn layers(&self) -> impl Iterator<Item = (PathBuf, Format)> {
        let numbered = self.layers.iter().enumerate().rev();
        numbered.map(|(number, layer)| (self.name_of(number), layer.described().format))
    }

    /// Bytes of the disk.
    pub fn size(&self) -> u64 {
        self.layers.last().map_or(0, |top| top.described().size)
    }

    /// The name under which the index of all layers is opened, and its root, if there is an index.
    pub(super) fn index(&self) -> Option<(PathBuf, &Arc<[u8]>)> {
        let name = format!("{}#{INDEX}", self.address).into();
        self.index.as_ref().map(|index| (name, &index.root))
    }

    /// The object of the index.
    pub(super) fn index_object(&self) -> Option<&Arc<RemoteLayer>> {
        self.index.as_ref().map(|index| &index.object)
    }

    /// The name under which the layer with this number is opened.
    pub(super) fn name_of(&self, number: usize) -> PathBuf {
        if number + 1 == self.layers.len() {
            return self.address.to_string().into();
        }
        format!("{}#{number}", self.address).into()
    }

    /// The format of the top layer.
    pub fn format(&self) -> Format {
        let Some(top) = self.layers.last() else { unreachable!("a chain has a layer") };
        top.described().format
    }

    /// Whether there is a name for the header of an image above all layers.
    pub fn has_pins(&self) -> bool {
        self.pins.len() == self.layers.len()
    }

    /// The name of all layers as they are now, for the header of an image above them. It leads to the same layers when
    /// others have been pushed on top, and to none if one of them is replaced.
    ///
    /// # Errors
    /// The chain was pushed by an earlier version, whose heads have less than those of a push now.
    pub fn pinned(&self) -> Result<Pinned> {
        let top = self.layers.len().checked_sub(1).and_then(|top| self.pinned_at(top));
        let top = top.ok_or_else(|| Error::refused(self.old()))?;
        let index = self.index.as_ref().map(|index| index.digest);
        Ok(Pinned { index, ..top }.in_headers())
    }

    /// What is said of a chain whose layers have no names for headers.
    fn old(&self) -> String {
        format!(
            "'{}' was pushed by an earlier version, which recorded less of its layers than one now does, so that no \
             image above them can name them for good: push the chain again from where it is whole, with 'isobath push \
             IMAGE {}'; layers that are there are not sent again",
            self.address,
            word(&self.address.to_string())
        )
    }

    /// Checks that the chain has these layers as its lower ones.
    ///
    /// # Errors
    /// It has not.
    pub fn check(&self, pinned: &Pinned) -> Result<()> {
        self.number_of(pinned).map(|_| ()).ok_or_else(|| Error::refused(self.without(pinned)))
    }

    /// What is said of layers that the chain does not have.
    pub(super) fn without(&self, pinned: &Pinned) -> String {
        if !self.has_pins() {
            return self.old();
        }
        format!(
            "'{}' has no layers '{pinned}' now: the chain was replaced by another, or its heads or tables in the store \
             are damaged. Push these layers again under this name, from where they are whole",
            self.address
        )
    }

    /// The number of the highest of these layers.
    pub(super) fn number_of(&self, pinned: &Pinned) -> Option<usize> {
        let number = self.numbers.get(&pinned.digest).filter(|_| pinned.address == self.address);
        number.copied()
    }

    /// The name of the layer with this number, and of those below it, for the header of an image above them.
    pub(super) fn pinned_at(&self, number: usize) -> Option<Pinned> {
        let digest = *self.pins.get(number)?;
        Some(Pinned { address: self.address.clone(), digest, index: None })
    }

    /// Whether these are all layers of the chain, and its index is the one that was theirs when they were named.
    pub(super) fn has_index_of(&self, pinned: &Pinned) -> bool {
        let is_top = self.number_of(pinned).is_some_and(|number| number + 1 == self.layers.len());
        is_top && self.index.as_ref().is_some_and(|index| Some(index.digest) == pinned.index)
    }

    /// The layer with this number.
    pub(super) fn layer(&self, number: usize) -> Option<&Arc<RemoteLayer>> {
        self.layers.get(number)
    }
}

/// The index of a chain, which is read as a layer is.
fn index(
    object: Option<&IndexObject>,
    head: Option<IndexHead>,
    common: &Arc<Common>,
) -> Result<Option<Index>> {
    let (IndexObject { digest, length }, IndexHead { root, table }) = match (object, head) {
        (None, None) => return Ok(None),
        (Some(object), Some(head)) if head.table.len() as u64 == Table::length(object.length) => {
            (object, head)
        }
        _ => {
            return Err(Error::damaged(
                "the chain's heads have another index than its manifest; push the chain again from where it is whole",
            ));
        }
    };
    let described = Layer {
        digest: *digest,
        length: *length,
        format: Format::Raw,
        size: *length,
        file: INDEX.to_owned(),
        backing: None,
        backing_format: None,
        table: Digest::of(&table),
    };
    let (key, head) = (keys::index(digest), KnownHead::default());
    let object = RemoteLayer::new(key, described, head, Some(table.into()), Arc::clone(common));
    let digest = Digest::of(&root);
    Ok(Some(Index { root: root.into(), digest, object: Arc::new(object) }))
}

/// Refuses a chain whose tables would take too much memory.
fn check_tables(manifest: &Manifest) -> Result<()> {
    let lengths = manifest.layers.iter().map(|layer| layer.length);
    let length = lengths.fold(0_u64, u64::saturating_add);
    if length <= MOST_BYTES {
        return Ok(());
    }
    Err(Error::refused(format_args!(
        "the layers of the chain have {length} bytes together; from a store, at most {MOST_BYTES} are served: pull it"
    )))
}

/// The manifest of a chain, and why it is not the one that the store has now.
fn manifest(
    source: &Source,
    address: &Address,
    cache: &Cache,
    patient: bool,
) -> Result<(Manifest, Option<String>)> {
    let (name, shown) = (&address.name, address.to_string());
    loop {
        let away = match source.get(&keys::manifest(name), MAX_MANIFEST) {
            Ok(Some((bytes, version))) => {
                let manifest = Manifest::decode(name, &bytes)?;
                cache.keep_manifest(&shown, &bytes, &version);
                return Ok((manifest, None));
            }
            Ok(None) => {
                return Err(Error::refused(format_args!(
                    "the store has no chain '{name}'; a file is named by its path, without 'file://'"
                )));
            }
            Err(error @ (Error::Store(_) | Error::Local(_))) => error,
            Err(error) => return Err(error),
        };
        match cache.manifest(&shown) {
            Some(known) => {
                return Ok((Manifest::decode(name, known.bytes())?, Some(away.to_string())));
            }
            None if patient => {
                tracing::warn!("{away}; trying again");
                std::thread::sleep(Duration::from_secs(1));
            }
            None => return Err(away),
        }
    }
}

/// The heads of a chain's layers.
fn heads(source: &Source, manifest: &Manifest, cache: &Cache) -> Result<Heads> {
    let digest = &manifest.heads.digest;
    if let Some(held) = cache.object(ObjectKind::Heads, digest) {
        return Heads::decode(held.bytes(), manifest.layers.len());
    }
    let bytes = object(source, &keys::heads(digest), manifest.heads.length, digest)?;
    let held = cache.keep(ObjectKind::Heads, digest, &bytes)?;
    Heads::decode(held.bytes(), manifest.layers.len())
}
