//! Reads: resolve to extents, then issue the I/O of all of them at once.

use crate::chain::OpeningId;
use crate::disk::Disk;
use crate::map::resolve::{explain_invalid, resolve};
use crate::map::{Extent, Extents, Lookup, Source};
use crate::read_gate::ReadGate;
use crate::write::{Entries, Writer};
use crate::{DiskError, LayerIndex, Result};
use futures_util::future::try_join_all;
use isobath_qcow2::{CompressedCluster, compress::decompress};
use isobath_storage::{Host, IoBuf};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Decompressed clusters kept, since readers of a compressed image come back for the rest of one.
const CACHED_CLUSTERS: usize = 8;

/// Where a compressed cluster lies. A layer's number would not do: it changes when others leave the chain.
type Place = (OpeningId, CompressedCluster);

/// The most recently decompressed clusters.
#[derive(Default)]
struct ClusterCache {
    recent: Mutex<VecDeque<(Place, Arc<IoBuf>)>>,
}

impl ClusterCache {
    fn get(&self, place: Place) -> Option<Arc<IoBuf>> {
        let recent = self.recent.lock();
        recent.iter().find(|(known, _)| *known == place).map(|(_, bytes)| Arc::clone(bytes))
    }

    fn put(&self, place: Place, bytes: Arc<IoBuf>) {
        let mut recent = self.recent.lock();
        if recent.len() == CACHED_CLUSTERS {
            recent.pop_front();
        }
        recent.push_back((place, bytes));
    }

    fn clear(&self) {
        self.recent.lock().clear();
    }
}

/// Those who read, and what they may still be looking at.
#[derive(Default)]
pub(crate) struct Readers {
    pub(crate) gate: ReadGate,
    decompressed: ClusterCache,
}

impl Readers {
    /// Waits until nobody uses a mapping that was replaced before the call, and forgets what was
    /// decompressed through one: then host space can be reused.
    pub(crate) async fn drain(&self) {
        self.gate.drain().await;
        self.decompressed.clear();
    }
}

impl<H: Host> Disk<H> {
    /// The extents of a guest range, resolving slices as needed. Bytes that the layers above their
    /// owner cut off count as absent.
    pub(crate) async fn extents(&self, range: Range<u64>) -> Result<Extents> {
        let mut extents = Extents::new();
        let mut at = range.start;
        loop {
            match self.map.lookup(at..range.end, &mut extents) {
                Lookup::Found => return Ok(self.clipped(extents)),
                Lookup::Missing(slice) => {
                    // What was found stays good: the caller is inside the gate. The map may be too
                    // small for all slices of the range at once.
                    at = at.max(slice << self.map.slice_bits());
                    Box::pin(self.resolve_slice(slice)).await?;
                }
            }
        }
    }

    async fn resolve_slice(&self, slice: u64) -> Result<()> {
        let bits = self.map.slice_bits();
        let _turn = self.resolving[slice as usize % self.resolving.len()].lock().await;
        let start = slice << bits;
        loop {
            let generation = self.map.generation(slice);
            let mut present = Extents::new();
            if matches!(self.map.lookup(start..start + 1, &mut present), Lookup::Found) {
                return Ok(());
            }
            let _permit = self.resolvers.acquire().await;
            let writer = |layer| self.writer_of(layer).and_then(Entries::of);
            let range = start..start + (1 << bits);
            let resolved = resolve(&self.chain, writer, range, self.map.unit_bits());
            if self.map.insert(slice, generation, resolved.await?) {
                return Ok(());
            }
        }
    }

    /// Turns the part of an extent past its layer's visible end into an absent one.
    fn clipped(&self, extents: Extents) -> Extents {
        let visible = |extent: &Extent| match extent.source {
            Source::Data { layer, .. } | Source::Compressed { layer, .. } | Source::Zero(layer) => {
                self.chain.get(layer).map_or(u64::MAX, |layer| layer.visible())
            }
            _ => u64::MAX,
        };
        if extents.iter().all(|extent| extent.guest + extent.length <= visible(extent)) {
            return extents;
        }
        let mut clipped = Extents::new();
        for extent in extents {
            let end = extent.guest + extent.length;
            let seen = visible(&extent).clamp(extent.guest, end);
            if seen > extent.guest {
                clipped.push(Extent { length: seen - extent.guest, ..extent });
            }
            if end > seen {
                clipped.push(Extent { guest: seen, length: end - seen, source: Source::Absent });
            }
        }
        clipped
    }

    pub(crate) async fn read_range(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        if buf.is_empty() {
            return Ok(buf);
        }
        let _pass = self.readers.gate.enter();
        let extents = self.extents(offset..offset + buf.len() as u64).await?;
        self.read_extents(&extents, buf).await
    }

    /// Fills `buf` from extents that cover exactly its length. The caller is inside the gate.
    pub(crate) async fn read_extents(&self, extents: &[Extent], buf: IoBuf) -> Result<IoBuf> {
        if let [extent] = extents {
            return self.read_extent(extent, buf).await;
        }
        Box::pin(self.read_several(extents, buf)).await
    }

    async fn read_several(&self, extents: &[Extent], mut buf: IoBuf) -> Result<IoBuf> {
        let read = |extent| self.read_extent(extent, buf.split_to(extent.length as usize));
        let reads: Vec<_> = extents.iter().map(read).collect();
        let mut whole = IoBuf::empty();
        for part in try_join_all(reads).await? {
            whole.unsplit(part);
        }
        Ok(whole)
    }

    async fn read_extent(&self, extent: &Extent, mut buf: IoBuf) -> Result<IoBuf> {
        match extent.source {
            Source::Absent | Source::Zero(_) => {
                buf.fill(0);
                Ok(buf)
            }
            Source::Data { layer: index, host, .. } => {
                let newer;
                let writer = if index == self.active_index() {
                    self.writer.as_deref()
                } else {
                    newer = self.writer_of(index);
                    newer.as_deref()
                };
                match writer.and_then(Writer::qcow2) {
                    Some(qcow2) => qcow2.metadata.read(host, buf).await,
                    None => self.layer(index)?.read_data_at(host, buf).await,
                }
            }
            Source::Compressed { layer, cluster } => {
                let bytes = Box::pin(self.decompressed(layer, cluster)).await?;
                let size = bytes.len() as u64;
                let within = (extent.guest % size) as usize;
                let Some(part) = bytes.get(within..within + buf.len()) else {
                    return Err(Box::pin(explain_invalid(self.layer(layer)?, extent.guest)).await);
                };
                buf.copy_from_slice(part);
                Ok(buf)
            }
            Source::Invalid(layer) => {
                Err(Box::pin(explain_invalid(self.layer(layer)?, extent.guest)).await)
            }
        }
    }

    fn layer(&self, index: LayerIndex) -> Result<&Arc<crate::Layer<H::File>>> {
        self.chain.get(index).ok_or_else(|| self.no_layer(index))
    }

    pub(crate) fn no_layer(&self, index: LayerIndex) -> DiskError {
        DiskError::Corrupt {
            image: self.chain.active().name().to_owned(),
            reason: format!("layer {} is asked for, which the chain does not have", index.get()),
        }
    }

    /// The content of a compressed cluster.
    async fn decompressed(
        &self,
        index: LayerIndex,
        cluster: CompressedCluster,
    ) -> Result<Arc<IoBuf>> {
        let layer = self.layer(index)?;
        let Some(qcow2) = layer.as_qcow2() else {
            return Err(explain_invalid(layer, 0).await);
        };
        let place = (qcow2.opening, cluster);
        if let Some(bytes) = self.readers.decompressed.get(place) {
            return Ok(bytes);
        }
        let compression = qcow2.header.read().compression_type;
        let input =
            layer.read_at(cluster.offset.get(), IoBuf::zeroed(cluster.length as usize)).await?;
        let mut output = IoBuf::zeroed(qcow2.geometry.cluster_size() as usize);
        decompress(compression, &input, &mut output).map_err(|error| DiskError::Corrupt {
            image: layer.name().to_owned(),
            reason: format!("the compressed cluster at host offset {}: {error}", cluster.offset),
        })?;
        let bytes = Arc::new(output);
        self.readers.decompressed.put(place, Arc::clone(&bytes));
        Ok(bytes)
    }
}
