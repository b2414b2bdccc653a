//! A layer in a store, as it is read.

use super::fetcher::{Fetcher, Inner};
use super::flight::{Flight, Outcome, Pilot, lock};
use super::patience::Patience;
use super::streams::Streams;
use super::wanted::{Awaited, Shared, Wanted, may_pass};
use crate::cache::{Cache, CachedLayer, Filled, LayerKey, Look, ObjectKind};
use crate::digest::{BLOCK, Digest, Table};
use crate::error::{Error, Result};
use crate::head::KnownHead;
use crate::keys;
use crate::manifest::Layer;
use crate::trace::Recorded;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// No block is marked.
const NO_MARK: u64 = u64::MAX;

/// What numbers layers.
static NUMBERS: AtomicU64 = AtomicU64::new(0);

/// What became of a table: the layer can be read.
type Tabled = Shared<()>;

/// What the layers of a chain share.
pub(crate) struct Common {
    fetcher: Fetcher,
    cache: Arc<Cache>,
}

impl Common {
    pub(crate) fn new(fetcher: Fetcher, cache: Arc<Cache>) -> Self {
        Self { fetcher, cache }
    }

    pub(super) fn fetcher(&self) -> &Fetcher {
        &self.fetcher
    }

    pub(super) fn cache(&self) -> &Arc<Cache> {
        &self.cache
    }
}

/// A layer of a chain in a store.
pub(crate) struct RemoteLayer {
    number: u64,
    /// The name of its object.
    key: String,
    described: Layer,
    head: KnownHead,
    common: Arc<Common>,
    /// Its table, if the heads have it; it was not compared with its digest.
    table: Option<Arc<[u8]>>,
    attached: OnceLock<Attached>,
    attaching: Mutex<Option<Arc<Flight<Tabled>>>>,
    streams: Mutex<Streams>,
    /// A read of this block is one that goes on.
    mark: AtomicU64,
    /// What notes its reads.
    recorded: OnceLock<Recorded>,
}

/// What is needed to read a layer.
struct Attached {
    /// The checksums of its blocks.
    table: Arc<[u8]>,
    /// Its file in the cache.
    cached: Arc<CachedLayer>,
}

impl RemoteLayer {
    /// A layer that is the object with this key.
    pub(crate) fn new(
        key: String,
        described: Layer,
        head: KnownHead,
        table: Option<Arc<[u8]>>,
        common: Arc<Common>,
    ) -> Self {
        Self {
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            key,
            described,
            head,
            common,
            table,
            attached: OnceLock::new(),
            attaching: Mutex::default(),
            streams: Mutex::default(),
            mark: AtomicU64::new(NO_MARK),
            recorded: OnceLock::new(),
        }
    }

    /// Notes its reads from now on.
    pub(crate) fn record(&self, recorded: Recorded) {
        // One recording of a chain is enough.
        let _ = self.recorded.set(recorded);
    }

    /// Notes a read of so many bytes, at least one, that its head does not have.
    pub(crate) fn note(&self, offset: u64, length: u64) {
        if let Some(recorded) = self.recorded.get() {
            recorded.note(offset / BLOCK..(offset + length).div_ceil(BLOCK));
        }
    }

    /// What distinguishes it from all others of this process.
    pub(crate) fn id(&self) -> u64 {
        self.number
    }

    /// Bytes of its file.
    pub(crate) fn length(&self) -> u64 {
        self.described.length
    }

    /// Whether its file has bytes at `offset`, so many and at least one.
    pub(crate) fn has(&self, offset: u64, length: u64) -> bool {
        length > 0 && offset.checked_add(length).is_some_and(|end| end <= self.described.length)
    }

    /// What the manifest says of it.
    pub(crate) fn described(&self) -> &Layer {
        &self.described
    }

    /// What is known of it without a request.
    pub(crate) fn head(&self) -> &KnownHead {
        &self.head
    }

    /// The time that somebody who begins to wait now waits for the store.
    pub(crate) fn patience(&self) -> Patience<'_> {
        self.common.fetcher.patience()
    }

    /// The name of its object.
    pub(crate) fn key(&self) -> &str {
        &self.key
    }

    /// Its file in the cache, once its table is known.
    pub(crate) async fn cached(
        self: &Arc<Self>,
        patience: &mut Patience<'_>,
    ) -> Shared<&Arc<CachedLayer>> {
        let mut has_joined = false;
        loop {
            if let Some(attached) = self.attached.get() {
                return Ok(&attached.cached);
            }
            let (flight, is_fresh) = {
                let mut attaching = lock(&self.attaching);
                match &*attaching {
                    Some(flight) if !flight.has_ended() => (Arc::clone(flight), false),
                    _ if self.attached.get().is_some() => continue,
                    _ => {
                        let flight = Arc::<Flight<Tabled>>::default();
                        *attaching = Some(Arc::clone(&flight));
                        self.begin_to_attach(&flight);
                        (flight, true)
                    }
                }
            };
            match patience.wait(&self.key, flight.outcome()).await? {
                Err(error) if is_fresh || has_joined || !may_pass(&error) => return Err(error),
                _ => has_joined = true,
            }
        }
    }

    /// Finds the table, in the cache or in the store, and ends the flight when the layer can be read.
    fn begin_to_attach(self: &Arc<Self>, flight: &Arc<Flight<Tabled>>) {
        let (layer, flight) = (Arc::clone(self), Arc::clone(flight));
        self.common.fetcher.look_up(move || {
            let landing = Landing { layer, flight };
            let layer = &landing.layer;
            if let Some(attached) = layer.attach_without_store() {
                return landing.end(attached);
            }
            let common = Arc::clone(&layer.common);
            common.fetcher.begin(Box::new(move |inner| {
                let attached = match inner {
                    Some(inner) => landing.layer.attach_by_store(inner),
                    None => Err(Error::Interrupted),
                };
                landing.end(attached);
            }));
        });
    }

    /// Takes the table into use that the heads or the cache have, if they have it.
    fn attach_without_store(&self) -> Option<Result<()>> {
        if let Some(table) = &self.table {
            return Some(self.attach_known(table));
        }
        let table = self.common.cache.object(ObjectKind::Table, &self.described.table)?;
        Some(self.attach(table.bytes()))
    }

    /// Fetches the table and takes it into use. Blocks.
    fn attach_by_store(&self, inner: &Inner) -> Result<()> {
        let Layer { table: digest, length, .. } = &self.described;
        let bytes = inner.object(&keys::table(digest), Table::length(*length), digest)?;
        let table = self.common.cache.keep(ObjectKind::Table, digest, &bytes)?;
        self.attach(table.bytes())
    }

    /// Finds the table, unless it is known, and returns whether the cache keeps what is fetched of the layer. It does
    /// not if the layer was not read yet and others took so many descriptors that it might miss them later. Blocks.
    pub(super) fn attach_ahead(&self, inner: &Inner) -> Result<bool> {
        if self.attached.get().is_none() {
            if !self.common.cache.has_descriptors() {
                return Ok(false);
            }
            self.attach_without_store().unwrap_or_else(|| self.attach_by_store(inner))?;
        }
        Ok(self.attached.get().is_some_and(|attached| attached.cached.is_attached()))
    }

    /// Takes the table that the heads have into use. What is in the cache is told by its digest, and other chains,
    /// which whoever wrote these heads may not write, have the same layer there.
    ///
    /// # Errors
    /// It is not the one that the manifest names; as for [`attach`](Self::attach).
    fn attach_known(&self, table: &Arc<[u8]>) -> Result<()> {
        if Digest::of(table) != self.described.table {
            return Err(Error::damaged(format_args!(
                "the chain's heads: '{}' has other checksums than its table; push the chain again from where it is \
                 whole",
                self.key
            )));
        }
        self.attach(table)
    }

    /// Takes the table into use.
    ///
    /// # Errors
    /// What is in the cache of the layer is another thing than what its head says.
    fn attach(&self, table: &Arc<[u8]>) -> Result<()> {
        let Layer { digest, length, table: digest_of_table, .. } = self.described;
        let key = LayerKey { digest, length, table: digest_of_table };
        let table = Arc::clone(table);
        let cached = self.common.cache.layer(&key, Arc::clone(&table))?;
        self.compare_with(&cached)?;
        // Whoever else did it found the same.
        let _ = self.attached.set(Attached { table, cached });
        Ok(())
    }

    /// Compares what is cached with the head.
    fn compare_with(&self, cached: &CachedLayer) -> Result<()> {
        for block in self.head.blocks() {
            loop {
                let look = match cached.look(block) {
                    Look::Unverified => cached.verify(block),
                    look => look,
                };
                let Look::Verified(stamp) = look else { break };
                let (offset, length) = self.range(block);
                let mut bytes = vec![0; length];
                // What cannot be read now will say so when it is read.
                if cached.file().read_exact_at(&mut bytes, offset).is_err() {
                    break;
                }
                if cached.still(block, stamp) {
                    self.agrees(block, &bytes)?;
                    break;
                }
            }
        }
        Ok(())
    }

    /// Compares a block with the head.
    fn agrees(&self, block: u64, bytes: &[u8]) -> Result<()> {
        self.head.agrees(&self.described, block * BLOCK, bytes).map_err(|what| {
            Error::damaged(format_args!(
                "'{}' in the store has another {what} than the heads or the manifest of the chain say; push the chain \
                 again from where it is whole",
                self.key
            ))
        })
    }

    /// Fetches these blocks; each of the flights gives one of them. Those that have landed by now have none.
    pub(crate) fn want(self: &Arc<Self>, blocks: &[u64]) -> Vec<Awaited> {
        let this: Arc<dyn Wanted> = Arc::<Self>::clone(self);
        self.common.fetcher.want(&this, blocks)
    }

    /// Verifies a block that is in the cache from before the machine was started.
    pub(crate) fn verify(self: &Arc<Self>, block: u64) -> Outcome<()> {
        let flight = Arc::<Flight<()>>::default();
        let (layer, looked) = (Arc::clone(self), Looked(Arc::clone(&flight)));
        self.common.fetcher.look_up(move || {
            if let Some(attached) = layer.attached.get() {
                attached.cached.verify(block);
            }
            drop(looked);
        });
        flight.outcome()
    }

    /// Whether a read of these blocks is one that goes on, of which [`reads`](Self::reads) wants to know.
    pub(crate) fn is_marked(&self, blocks: &Range<u64>) -> bool {
        blocks.contains(&self.mark.load(Ordering::Relaxed))
    }

    /// Notes a read of these blocks, of which some are missing or one was marked, and reads ahead.
    pub(crate) fn reads(self: &Arc<Self>, blocks: &Range<u64>) {
        let Some(Attached { cached, .. }) = self.attached.get() else { return };
        if !cached.is_attached() {
            return;
        }
        let count = self.length().div_ceil(BLOCK);
        let advice = {
            let mut streams = lock(&self.streams);
            let advice = streams.read(blocks, count);
            if advice.mark.is_some() || self.is_marked(blocks) {
                self.mark.store(advice.mark.unwrap_or(NO_MARK), Ordering::Relaxed);
            }
            advice
        };
        if advice.ahead.is_empty() && advice.left.is_empty() {
            return;
        }
        let this: Arc<dyn Wanted> = Arc::<Self>::clone(self);
        self.common.fetcher.read_ahead(&this, advice.ahead, advice.left);
    }

    /// Nobody has it open any more: nothing is read ahead.
    pub(crate) fn leave(&self) {
        self.common.fetcher.leave(self.number);
    }
}

impl Wanted for RemoteLayer {
    fn number(&self) -> u64 {
        self.number
    }

    fn key(&self) -> &str {
        &self.key
    }

    fn range(&self, block: u64) -> (u64, usize) {
        let offset = block * BLOCK;
        (offset, self.length().saturating_sub(offset).min(BLOCK) as usize)
    }

    fn is_missing(&self, block: u64) -> bool {
        let look = self.attached.get().map(|attached| attached.cached.look(block));
        !matches!(look, Some(Look::Verified(_)))
    }

    fn is_absent(&self, block: u64) -> bool {
        let look = self.attached.get().map(|attached| attached.cached.look(block));
        !matches!(look, Some(Look::Verified(_) | Look::Unverified))
    }

    fn accept(&self, block: u64, bytes: &[u8]) -> Result<bool> {
        let Some(Attached { table, cached }) = self.attached.get() else {
            unreachable!("blocks are wanted of layers that can be read")
        };
        // Before anybody can see it in the cache.
        if self.head.is_in(block) {
            if !Table::matches(table, block, bytes) {
                return Ok(false);
            }
            self.agrees(block, bytes)?;
        }
        Ok(cached.fill(block, bytes) != Filled::Wrong)
    }
}

/// An attempt to find a layer's table, which ends even if its thread panics.
struct Landing {
    layer: Arc<RemoteLayer>,
    flight: Arc<Flight<Tabled>>,
}

impl Landing {
    fn end(self, attached: Result<()>) {
        {
            let mut attaching = lock(&self.layer.attaching);
            if attaching.as_ref().is_some_and(|now| Arc::ptr_eq(now, &self.flight)) {
                *attaching = None;
            }
        }
        self.flight.end(attached.map_err(Arc::new));
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        drop(Pilot(&self.flight));
    }
}

/// Ends a flight when it is dropped.
struct Looked(Arc<Flight<()>>);

impl Drop for Looked {
    fn drop(&mut self) {
        self.0.end(());
    }
}
