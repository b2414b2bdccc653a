//! Reads: resolve to extents, then issue the I/O of all of them at once.

use crate::disk::Disk;
use futures_util::future::try_join_all;
use isobath_chain::chain::LayerIndex;
use isobath_chain::map::resolve::{explain_invalid, resolve};
use isobath_chain::map::{Extent, Extents, Lookup, Source};
use isobath_image::writer::{Entries, Writer};
use isobath_image::{Result, always};
use isobath_storage::{Host, IoBuf};
use std::ops::Range;
use std::sync::Arc;

impl<H: Host> Disk<H> {
    /// The extents of a guest range, resolving slices as needed. Bytes that are hidden by the size of a layer above
    /// their owner count as absent.
    pub async fn extents(&self, range: Range<u64>) -> Result<Extents> {
        let mut extents = Extents::new();
        let mut at = range.start;
        loop {
            match self.map.lookup(at..range.end, &mut extents) {
                Lookup::Found => {
                    self.clip(&mut extents);
                    return Ok(extents);
                }
                Lookup::Missing(slice) => {
                    // The extents found so far stay valid, because the caller is inside the gate. The map may be too
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

    /// How far an extent's source is visible.
    fn visible(&self, extent: &Extent) -> u64 {
        match extent.source {
            Source::Data { layer, .. } | Source::Compressed { layer, .. } | Source::Zero(layer) => {
                self.chain.get(layer).map_or(u64::MAX, |layer| layer.visible())
            }
            _ => u64::MAX,
        }
    }

    /// Turns the part of an extent past its layer's visible end into an absent one.
    fn clip(&self, extents: &mut Extents) {
        if extents.iter().all(|extent| extent.guest + extent.length <= self.visible(extent)) {
            return;
        }
        for extent in std::mem::take(extents) {
            let end = extent.guest + extent.length;
            let seen = self.visible(&extent).clamp(extent.guest, end);
            if seen > extent.guest {
                extents.push(Extent { length: seen - extent.guest, ..extent });
            }
            if end > seen {
                extents.push(Extent { guest: seen, length: end - seen, source: Source::Absent });
            }
        }
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
    pub async fn read_extents(&self, extents: &[Extent], buf: IoBuf) -> Result<IoBuf> {
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
                let owner = self.layer(layer)?;
                let bytes = Box::pin(self.readers.decompressed(owner, cluster)).await?;
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

    /// A layer of the chain.
    ///
    /// # Errors
    /// [`DiskError::Internal`](crate::DiskError::Internal), if the chain does not have it.
    pub fn layer(&self, index: LayerIndex) -> Result<&Arc<crate::Layer<H::File>>> {
        let name = self.chain.active().name();
        always(self.chain.get(index), name, "the chain has every layer that its map names")
    }
}
