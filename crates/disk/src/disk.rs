//! An open disk.

use crate::begun::Begun;
use crate::device::{BlockDevice, BlockStatus, ZeroFlags, block_device};
use crate::touched::Touched;
use event_listener::Event;
use futures_util::future::join;
use isobath_chain::chain::{Chain, LayerIndex};
use isobath_chain::create::Preallocation;
use isobath_chain::map::{Map, MapStats, SLICE_UNITS};
use isobath_chain::open::open_chain;
use isobath_image::layer::ImageFormat;
use isobath_image::layer::{Layer, Qcow2, Qcow2Layer};
use isobath_image::memory::{MemoryLimit, Reserved, refused};
use isobath_image::options::OpenOptions;
use isobath_image::readers::{CACHED_CLUSTERS, Readers};
use isobath_image::writer::{QCOW2_MEMORY, StopOnPanic, Writer};
use isobath_image::{DiskError, Result, invariant, lock_order};
use isobath_storage::{Host, IoBuf, Storage, StorageExt};
use isobath_sync::AsyncMutex;
use isobath_sync::order::in_order;
use parking_lot::RwLock;
use std::future::Future;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// The default memory limit of the map: enough for a disk of 1 TiB in 64 KiB clusters.
pub const DEFAULT_MAP_CACHE: usize = 132 << 20;

/// A map has at most this part of a memory limit.
const MAP_SHARE: u64 = 16;
/// Bytes that an open disk may take besides its map: tables that are merged (8 MiB), segments of its index (1.5 MiB),
/// slices of which a part was resolved (1 MiB).
const READING: u64 = 12 << 20;

/// Slices resolved at once, each with at most 64 tables' parts in memory.
const RESOLVERS: usize = 8;
/// Locks for slices that are resolved.
const RESOLVING: usize = 64;

/// A layer that accepts no more writes, whose writer still has changes that its file lacks.
pub struct Retiring<S> {
    /// Its index.
    pub layer: LayerIndex,
    /// Its writer.
    pub writer: Arc<Writer<S>>,
}

impl<S> Clone for Retiring<S> {
    fn clone(&self) -> Self {
        Self { layer: self.layer, writer: Arc::clone(&self.writer) }
    }
}

/// The parts of a disk that a flush needs. Not the disk itself, whose other layers may leave the chain, and be
/// reopened, during a sync.
pub struct Flushing<S> {
    writer: Option<Arc<Writer<S>>>,
    retiring: Option<Retiring<S>>,
    readers: Arc<Readers>,
}

impl<S: Storage> Flushing<S> {
    /// Makes everything durable that completed before this flush was created.
    pub async fn run(self) -> Result<()> {
        let Some(writer) = &self.writer else { return Ok(()) };
        let Some(retiring) = &self.retiring else {
            return writer.or_mark_corrupt(writer.commit(&self.readers).await).await;
        };
        let before = async {
            match retiring.writer.commit(&self.readers).await {
                // All of it is durable.
                Err(DiskError::Closed) => Ok(()),
                done => done,
            }
        };
        // Both run to the end, even if one fails: a cancelled commit would be half done.
        let now = writer.commit(&self.readers);
        let (before, now) = join(in_order(before), in_order(now)).await;
        before.and(writer.or_mark_corrupt(now).await)
    }
}

/// A virtual disk: an image and its backing chain.
///
/// All methods may be called concurrently. Dropping a disk that was written to loses unflushed data, like a crash;
/// [`close`](Self::close) flushes and leaves a plain qcow2 image, without a journal or leaked clusters.
pub struct Disk<H: Host> {
    /// Where the disk's files are.
    pub host: Arc<H>,
    /// Its layers.
    pub chain: Chain<H::File>,
    /// The map of extents.
    pub map: Arc<Map>,
    /// The map's limit follows the disk's size.
    map_fits: bool,
    /// What the disk takes of a memory limit, besides its layers. A change of the chain may add to it.
    memory: Vec<Arc<Reserved>>,
    /// The read requests in flight.
    pub readers: Arc<Readers>,
    /// Present when the disk was opened for writing.
    pub writer: Option<Arc<Writer<H::File>>>,
    /// The former active layer, until its file has all writes.
    retiring: RwLock<Option<Retiring<H::File>>>,
    /// Whether there is one.
    retires: AtomicBool,
    /// The parts for which a read-only disk has tables; determined once, when needed.
    pub touched: OnceLock<Touched>,
    /// Keeps two tasks from resolving the same slice; by slice number.
    pub resolving: Box<[AsyncMutex<Begun>]>,
    /// Held while a disk that is only read shows a virtual machine's state.
    pub(crate) showing: AsyncMutex<()>,
    /// Limits the slices resolved at once: each holds the tables of many layers in memory.
    pub resolvers: isobath_sync::Semaphore,
    /// Signalled when the size changes; it is kept across changes of the chain.
    pub resized: Arc<Event>,
}

impl<H: Host> Disk<H> {
    /// Opens the image `name` and its backing chain. The backing files are opened read-only.
    ///
    /// Opening for writing recovers an image that was not closed from its journal, or repairs its refcounts
    /// (`lazy_refcounts`), and marks bitmaps and unknown extensions in the image's header as no longer matching its
    /// data.
    ///
    /// # Errors
    /// If a file cannot be opened or locked, is not a valid image, is encrypted, has features
    /// unknown here, or the chain has a loop; or, for writing, if it is marked corrupt.
    pub async fn open(host: H, name: &Path, options: &OpenOptions) -> Result<Self> {
        let chain = open_chain(&host, name, options).await?;
        Self::of_chain(Arc::new(host), chain, options).await
    }

    /// The disk of an open chain, whose active layer was opened with `options`.
    pub async fn of_chain(
        host: Arc<H>,
        chain: Chain<H::File>,
        options: &OpenOptions,
    ) -> Result<Self> {
        let name = chain.active().name();
        invariant(options.recovers, name, "a disk has what its journal has")?;
        let unit_bits = chain.unit_bits();
        let wanted = whole_map(chain.active().size(), unit_bits);
        let most = options.memory.as_ref().map(|limit| (limit.bytes() / MAP_SHARE) as usize);
        let budget = options.map_cache.unwrap_or(wanted.min(most.unwrap_or(wanted)));
        let map = Map::new(unit_bits, budget, chain.active_index());
        let memory = Vec::from_iter(reserve(&chain, &map, options)?);
        let writer = match (options.writable, Qcow2Layer::of(chain.active())) {
            (true, Some(layer)) => {
                // This applies even if its backing file is not open: others will read the image with it.
                let alone = layer.qcow2().header.read().backing_file.is_none();
                Some(Arc::new(Writer::open(&layer, options, alone).await?))
            }
            (true, None) => Some(Arc::new(Writer::raw(chain.active()))),
            (false, _) => None,
        };
        Ok(Self {
            host,
            map: Arc::new(map),
            map_fits: options.map_cache.is_none() && options.memory.is_none(),
            memory,
            readers: Arc::default(),
            writer,
            retiring: RwLock::default(),
            retires: AtomicBool::new(false),
            touched: OnceLock::new(),
            resolving: resolving(),
            showing: AsyncMutex::ranked((), lock_order::RESIZING),
            resolvers: isobath_sync::Semaphore::ranked(RESOLVERS, lock_order::RESOLVERS),
            resized: Arc::default(),
            chain,
        })
    }

    /// The disk after a change of its chain: it takes over this one's state. `map` is this one's, if it is still valid.
    ///
    /// # Errors
    /// [`DiskError::Internal`] if its parts do not belong together.
    pub fn successor(
        &self,
        chain: Chain<H::File>,
        map: Arc<Map>,
        writer: Option<Arc<Writer<H::File>>>,
        retiring: Option<Retiring<H::File>>,
    ) -> Result<Self> {
        let settled = self.retiring.read().is_none();
        invariant(settled, self.name(), "a layer has retired before the chain changes again")?;
        let next = Self {
            host: Arc::clone(&self.host),
            map,
            map_fits: self.map_fits,
            memory: self.memory.clone(),
            readers: Arc::clone(&self.readers),
            writer,
            retires: AtomicBool::new(retiring.is_some()),
            retiring: RwLock::new(retiring),
            touched: OnceLock::new(),
            resolving: resolving(),
            showing: AsyncMutex::ranked((), lock_order::RESIZING),
            resolvers: isobath_sync::Semaphore::ranked(RESOLVERS, lock_order::RESOLVERS),
            resized: Arc::clone(&self.resized),
            chain,
        };
        next.check_parts()?;
        Ok(next)
    }

    /// The disk with more of a memory limit.
    pub(crate) fn taking(mut self, more: Option<Arc<Reserved>>) -> Self {
        self.memory.extend(more);
        self
    }

    /// Reserves what the disk may take more once `overlay`, a qcow2 image with clusters of `cluster` bytes, is its
    /// active layer.
    pub(crate) fn reserve_overlay(
        &self,
        limit: &Arc<MemoryLimit>,
        overlay: &Path,
        cluster: u64,
    ) -> Result<Option<Arc<Reserved>>> {
        let cluster = cluster.max(largest_cluster(&self.chain));
        let all = needs(self.map.stats().budget, cluster, true);
        let more = all.saturating_sub(self.memory.iter().map(|one| one.bytes()).sum());
        if more == 0 {
            return Ok(None);
        }
        let reserved = limit.reserve("the disk, once it is the active layer,", more);
        Ok(Some(Arc::new(reserved.map_err(|error| refused(overlay, error))?)))
    }

    /// Checks that the map and the writers are those of the chain.
    fn check_parts(&self) -> Result<()> {
        let name = self.name();
        if cfg!(debug_assertions) {
            let fits = self.map.unit_bits() <= self.chain.unit_bits();
            invariant(fits, name, "no unit of the map is larger than a layer's clusters")?;
        }
        let active = Arc::as_ptr(self.chain.active());
        let writes = self.writer.as_ref().is_none_or(|writer| std::ptr::eq(writer.layer(), active));
        invariant(writes, name, "a disk's writer writes its active layer")?;
        let retiring = self.retiring.read();
        let below = retiring.as_ref().is_none_or(|one| one.layer < self.active_index());
        invariant(below, name, "a layer that retires is below the active one")
    }

    /// The writer of a layer whose file does not have everything yet.
    pub fn writer_of(&self, layer: LayerIndex) -> Option<Arc<Writer<H::File>>> {
        if layer == self.active_index() {
            return self.writer.clone();
        }
        if !self.retires.load(Ordering::Acquire) {
            return None;
        }
        let retiring = self.retiring.read();
        retiring.as_ref().filter(|one| one.layer == layer).map(|one| Arc::clone(&one.writer))
    }

    /// The former active layer, while its file does not have everything.
    pub fn retiring(&self) -> Option<Retiring<H::File>> {
        self.retiring.read().clone()
    }

    /// A flush of everything completed so far.
    pub fn flushing(&self) -> Flushing<H::File> {
        Flushing {
            writer: self.writer.clone(),
            retiring: self.retiring(),
            readers: Arc::clone(&self.readers),
        }
    }

    /// Notes that the file of the former active layer has everything.
    ///
    /// # Errors
    /// [`DiskError::Internal`] if there is none.
    pub fn retired(&self) -> Result<()> {
        let retired = self.retiring.write().take();
        self.retires.store(false, Ordering::Release);
        invariant(retired.is_some(), self.name(), "a layer retires once")
    }

    /// The active image's name, for errors.
    #[inline]
    pub(crate) fn name(&self) -> &Path {
        self.chain.active().name()
    }

    /// Where the disk's files are.
    pub fn host(&self) -> &H {
        &self.host
    }

    /// The number of layers in the chain.
    pub fn depth(&self) -> usize {
        self.chain.depth()
    }

    /// The layers, from the active one down to the base.
    pub fn layers(&self) -> impl Iterator<Item = &Arc<Layer<H::File>>> {
        self.chain.top_down().map(|(_, layer)| layer)
    }

    /// Layers, from the base, that the direct-access index in use describes; 0 without one.
    pub fn indexed_layers(&self) -> usize {
        self.chain.index().map_or(0, |index| index.covers())
    }

    /// The map's counters.
    pub fn map_stats(&self) -> MapStats {
        self.map.stats()
    }

    /// Grows the map's limit with the disk, up to the default limit.
    pub fn refit_map(&self) {
        if self.map_fits {
            self.map.raise_budget(whole_map(self.size(), self.map.unit_bits()));
        }
    }

    /// The index of the active layer.
    pub fn active_index(&self) -> LayerIndex {
        self.chain.active_index()
    }

    /// The active layer, if it is a qcow2 image.
    pub fn active_qcow2(&self) -> Option<&Qcow2> {
        self.chain.active().as_qcow2()
    }

    /// Asks the host to begin to write back what was written.
    pub(crate) async fn begin_write_back(&self) {
        self.chain.active().data().begin_write_back().await;
    }

    /// Flushes and brings the image into its final state: no leaked clusters, bitmaps valid where
    /// they can be. Changes are refused from then on.
    ///
    /// # Errors
    /// As [`flush`](BlockDevice::flush); the image is then as after a crash.
    pub async fn close(&self) -> Result<()> {
        match &self.writer {
            Some(writer) => {
                in_order(async { self.or_mark_corrupt(writer.close(&self.readers).await).await })
                    .await
            }
            None => Ok(()),
        }
    }

    /// Does work in advance that makes flushes cheap, such as growing the file, until the disk is
    /// [closed](Self::close). Run it concurrently with the requests, as a separate task; without it some of the flushes
    /// do the same work.
    ///
    /// # Errors
    /// If the storage fails in a way that flushes will report too.
    pub async fn upkeep(&self) -> Result<()> {
        match &self.writer {
            Some(writer) => in_order(writer.attend(&self.readers, || true)).await,
            None => Ok(()),
        }
    }

    /// See [`LiveDisk::begin_restart_log`](crate::LiveDisk::begin_restart_log).
    pub async fn begin_restart_log(&self) -> Result<()> {
        match &self.writer {
            Some(writer) => writer.begin_restart_log(&self.readers).await,
            None => Ok(()),
        }
    }

    /// Does a part of the work of [`close`](Self::close): in mode [`Embedded`](crate::MetadataMode::Embedded), it
    /// brings some embedded mappings into their final form. Call it while the disk is idle. Returns `false` if there
    /// was nothing to do.
    ///
    /// # Errors
    /// As [`flush`](BlockDevice::flush).
    pub async fn tidy(&self) -> Result<bool> {
        match &self.writer {
            Some(writer) => in_order(writer.extract_some(true, &self.readers)).await,
            None => Ok(false),
        }
    }

    /// Refuses a range past the end of the disk.
    pub fn check_range(&self, offset: u64, length: u64) -> Result<()> {
        let size = self.size();
        if offset.checked_add(length).is_none_or(|end| end > size) {
            return Err(DiskError::OutOfRange { offset, length, size });
        }
        Ok(())
    }

    /// Returns once everything done so far survives a kill of this process, if that was requested.
    async fn outlive(&self) -> Result<()> {
        match &self.writer {
            Some(writer) => writer.outlive(&self.readers).await,
            None => Ok(()),
        }
    }

    /// The write side; an error if the disk is read-only.
    pub fn writer(&self) -> Result<&Writer<H::File>> {
        let writer = self.writer.as_deref().ok_or(DiskError::ReadOnly)?;
        writer.check()?;
        Ok(writer)
    }
}

/// Grows to `size` with `resize`, which is not started if `now` shows that the disk is already that long.
pub async fn grow_to(
    size: u64,
    now: impl Fn() -> u64,
    resize: impl Future<Output = Result<()>>,
) -> Result<()> {
    if size <= now() {
        return Ok(());
    }
    match resize.await {
        // Another request was faster.
        Err(_) if now() >= size => Ok(()),
        done => done,
    }
}

/// Waits until `size` differs from `known`, which `resized` signals.
pub async fn wait_for_size(resized: &Event, size: impl Fn() -> u64, known: u64) {
    loop {
        let changed = resized.listen();
        if size() != known {
            return;
        }
        changed.await;
    }
}

/// Reserves what a disk may take, besides its layers.
fn reserve<S: Storage>(
    chain: &Chain<S>,
    map: &Map,
    options: &OpenOptions,
) -> Result<Option<Arc<Reserved>>> {
    let Some(limit) = &options.memory else { return Ok(None) };
    let writes = options.writable && chain.active().as_qcow2().is_some();
    let bytes = needs(map.stats().budget, largest_cluster(chain), writes);
    let reserved = limit.reserve("its map with its other caches", bytes);
    let reserved = reserved.map_err(|error| refused(chain.active().name(), error))?;
    Ok(Some(Arc::new(reserved)))
}

/// The bytes in the largest cluster of a chain's qcow2 images; 0 without one.
fn largest_cluster<S: Storage>(chain: &Chain<S>) -> u64 {
    let images = chain.layers().filter_map(|(_, layer)| layer.as_qcow2());
    images.map(|qcow2| qcow2.geometry.cluster_size()).max().unwrap_or(0)
}

/// Bytes that a disk may take, besides its layers: with a map of `map` bytes and clusters of at most `cluster` bytes,
/// and if it `writes` to a qcow2 image.
fn needs(map: u64, cluster: u64, writes: bool) -> u64 {
    map + READING + CACHED_CLUSTERS as u64 * cluster + if writes { QCOW2_MEMORY } else { 0 }
}

/// The locks for the slices of a disk, none of which was resolved.
fn resolving() -> Box<[AsyncMutex<Begun>]> {
    (0..RESOLVING).map(|_| AsyncMutex::ranked(Begun::default(), lock_order::RESOLVING)).collect()
}

/// The memory for the map of a whole disk of `size` bytes, up to the default limit.
fn whole_map(size: u64, unit_bits: u32) -> usize {
    let slices = size.div_ceil((SLICE_UNITS as u64) << unit_bits);
    slices.saturating_mul(9 << 10).min(DEFAULT_MAP_CACHE as u64) as usize
}

impl<H: Host> Disk<H> {
    /// An error that names the active layer: a request is refused for `reason`.
    pub fn refused(&self, reason: impl Into<String>) -> DiskError {
        DiskError::Refused { image: self.name().to_owned(), reason: reason.into() }
    }

    /// The disk's size in bytes.
    pub fn size(&self) -> u64 {
        self.chain.active().size()
    }

    /// Whether writes are refused.
    pub fn is_read_only(&self) -> bool {
        self.writer.is_none()
    }

    /// The optimal alignment of requests in bytes (the cluster or subcluster size).
    pub fn preferred_block(&self) -> u32 {
        1 << self.chain.active().unit_bits().unwrap_or(12)
    }

    /// Reads `buf.len()` bytes at `offset`, and returns the buffer.
    ///
    /// # Errors
    /// If the range reaches past the end of the disk, the storage fails, or the tables are not valid there.
    pub async fn read(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        self.check_range(offset, buf.len() as u64)?;
        match in_order(self.read_range(offset, buf)).await {
            Ok(buf) => Ok(buf),
            Err(error) => Err(self.stop_on_internal(error)),
        }
    }

    /// Writes `buf` at `offset`, and returns the buffer. It is durable after a [`flush`](Self::flush).
    ///
    /// # Errors
    /// If the disk is read-only or [accepts no more writes](DiskError::Poisoned), the range reaches past its end, the
    /// storage fails, or the tables turn out to be inconsistent.
    pub async fn write(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        self.check_range(offset, buf.len() as u64)?;
        let _stop = self.stop_on_panic();
        in_order(async {
            let buf = self.or_mark_corrupt(self.write_range(offset, buf).await).await?;
            self.outlive().await?;
            Ok(buf)
        })
        .await
    }

    /// Makes a range read as zeroes.
    ///
    /// # Errors
    /// As for [`write`](Self::write); [`DiskError::Unsupported`] if it must be fast and is not.
    pub async fn write_zeroes(&self, offset: u64, length: u64, flags: ZeroFlags) -> Result<()> {
        self.check_range(offset, length)?;
        let _stop = self.stop_on_panic();
        in_order(async {
            self.or_mark_corrupt(self.zero_range(offset, length, flags).await).await?;
            self.outlive().await
        })
        .await
    }

    /// Releases a range's space where possible; it then reads as zeroes or as before, never as something older.
    ///
    /// # Errors
    /// As for [`write`](Self::write).
    pub async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        self.check_range(offset, length)?;
        let _stop = self.stop_on_panic();
        in_order(async {
            self.or_mark_corrupt(self.discard_range(offset, length).await).await?;
            self.outlive().await
        })
        .await
    }

    /// Makes everything that completed before this call durable.
    ///
    /// # Errors
    /// If the storage fails: it is then unknown what is durable, and the disk accepts no more writes.
    pub async fn flush(&self) -> Result<()> {
        in_order(self.flushing().run()).await
    }

    /// Describes the range in runs, in order and without gaps, at most `max_runs` of them; the runs
    /// returned may end before the range does, or be the whole of it.
    ///
    /// # Errors
    /// If the range reaches past the end of the disk, or the storage fails.
    pub async fn block_status(
        &self,
        offset: u64,
        length: u64,
        max_runs: usize,
    ) -> Result<Vec<BlockStatus>> {
        self.check_range(offset, length)?;
        match in_order(self.status_of(offset, length, max_runs)).await {
            Ok(runs) => Ok(runs),
            Err(error) => Err(self.stop_on_internal(error)),
        }
    }

    /// Makes the disk `size` bytes long if it is shorter; new bytes read as zeroes.
    ///
    /// # Errors
    /// If the disk is read-only, or a larger one would not fit the image.
    pub async fn grow(&self, size: u64) -> Result<()> {
        grow_to(size, || self.size(), self.resize(size, self.preallocation_of_zeroes(), false))
            .await
    }

    /// The preallocation with which a disk that [grows](Self::resize) reads as zeroes in its new part.
    pub fn preallocation_of_zeroes(&self) -> Preallocation {
        match self.chain.active().format() {
            ImageFormat::Luks => Preallocation::Full,
            _ => Preallocation::Off,
        }
    }

    /// Waits until the size differs from `known`.
    pub async fn resized(&self, known: u64) {
        wait_for_size(&self.resized, || self.size(), known).await;
    }
}

block_device!(Disk);

impl<H: Host> Disk<H> {
    /// Accepts no more writes if `error`, from a request that changes nothing, says that an invariant is violated.
    #[cold]
    pub(crate) fn stop_on_internal(&self, error: DiskError) -> DiskError {
        if let Some(writer) = &self.writer {
            writer.stop_on_internal(&error);
        }
        error
    }

    /// If a request panics before the returned guard is dropped, the disk accepts no more writes.
    pub fn stop_on_panic(&self) -> Option<StopOnPanic<'_, H::File>> {
        self.writer.as_deref().map(Writer::stop_on_panic)
    }

    /// Passes on the result of a change. If it found the active image's tables inconsistent, it is the last one, and
    /// the image is marked corrupt.
    pub async fn or_mark_corrupt<T>(&self, done: Result<T>) -> Result<T> {
        match &self.writer {
            Some(writer) => writer.or_mark_corrupt(done).await,
            None => done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{chain_of, disk, must_violate, writers};

    fn writer<H: Host>(disk: &Disk<H>) -> Option<Arc<Writer<H::File>>> {
        disk.writer.clone()
    }

    #[test]
    fn a_disk_that_follows_another_has_parts_that_belong_together() {
        let (one, other) = (disk(), disk());
        let chain = || Chain::of(vec![Arc::clone(one.chain.active())]);
        let map = || Arc::clone(&one.map);
        assert!(one.successor(chain(), map(), writer(&one), None).is_ok());
        let large = Arc::new(Map::new(30, 0, one.active_index()));
        let next = one.successor(chain(), large, writer(&one), None);
        must_violate(next.map(drop), "no unit of the map is larger than a layer's clusters");
        let next = one.successor(chain(), map(), writer(&other), None);
        must_violate(next.map(drop), "a disk's writer writes its active layer");
        let retiring = || writer(&one).map(|writer| Retiring { layer: one.active_index(), writer });
        let next = one.successor(chain(), map(), writer(&one), retiring());
        must_violate(next.map(drop), "a layer that retires is below the active one");
        *one.retiring.write() = retiring();
        let next = one.successor(chain(), map(), writer(&one), None);
        must_violate(next.map(drop), "a layer has retired before the chain changes again");
    }

    #[test]
    fn futures_of_requests_stay_small() {
        let disk = disk();
        let sizes = [
            size_of_val(&disk.read(0, IoBuf::empty())),
            size_of_val(&disk.write(0, IoBuf::empty())),
            size_of_val(&disk.write_zeroes(0, 0, ZeroFlags::default())),
            size_of_val(&disk.discard(0, 0)),
        ];
        assert!(sizes.iter().all(|size| *size <= 3072), "{sizes:?}");
    }

    #[test]
    fn a_layer_retires_once() {
        let disk = chain_of(2);
        must_violate(disk.retired(), "a layer retires once");
        let layer = LayerIndex::new(0);
        *disk.retiring.write() = writer(&disk).map(|writer| Retiring { layer, writer });
        disk.retired().unwrap();
        assert!(writers(&disk).0.check().is_ok());
    }
}
