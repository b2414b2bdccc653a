//! Reads: resolve to extents, then issue the I/O of all of them at once.

use crate::begun::Partial;
use crate::disk::Disk;
use futures_util::future::try_join_all;
use isobath_chain::chain::LayerIndex;
use isobath_chain::map::resolve::{Resolution, explain_invalid, resolve_singly};
use isobath_chain::map::{Extent, Extents, Lookup, Source, guest_range};
use isobath_image::writer::{Entries, Writer};
use isobath_image::{Result, always, invariant};
use isobath_storage::{Host, IoBuf};
use isobath_sync::order::in_order;
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
                    if cfg!(debug_assertions) {
                        self.check_extents(&extents, &range)?;
                    }
                    return Ok(extents);
                }
                Lookup::Missing(slice) => {
                    // The extents found so far stay valid, because the caller is inside the epoch. The map may be too
                    // small for all slices of the range at once.
                    at = at.max(slice << self.map.slice_bits());
                    let end = range.end.min((slice + 1) << self.map.slice_bits());
                    if Box::pin(self.resolve_slice(slice, at..end, &mut extents)).await? {
                        at = end;
                    }
                }
            }
        }
    }

    /// Checks that extents are those of a range.
    fn check_extents(&self, extents: &[Extent], range: &Range<u64>) -> Result<()> {
        let cover = range.is_empty() || guest_range(extents) == *range;
        invariant(cover, self.name(), "the extents of a range begin and end with it")?;
        let joined = |pair: &[Extent]| pair[0].guest + pair[0].length == pair[1].guest;
        let joined = extents.windows(2).all(joined);
        invariant(joined, self.name(), "an extent begins where the one before it ends")?;
        let empty = extents.iter().any(|extent| extent.length == 0);
        invariant(!empty, self.name(), "an extent has bytes")
    }

    /// Puts a slice into the map and returns `false`, or appends the extents of `wanted`, a part of it, and returns
    /// `true`.
    async fn resolve_slice(
        &self,
        slice: u64,
        wanted: Range<u64>,
        extents: &mut Extents,
    ) -> Result<bool> {
        let bits = self.map.slice_bits();
        let number = slice as usize % self.resolving.len();
        let mut begun = self.resolving[number].lock().await;
        let (start, round) = (slice << bits, slice / self.resolving.len() as u64);
        let mut singly = begun.is_spared(slice);
        let small = wanted.end - wanted.start <= 1 << (bits - 2);
        let mut in_part = small && self.is_unindexed() && !begun.see(round);
        loop {
            let generation = self.map.generation(slice);
            let mut present = Extents::new();
            if matches!(self.map.lookup(start..start + 1, &mut present), Lookup::Found) {
                return Ok(false);
            }
            let _permit = self.resolvers.acquire().await;
            let writer = |layer| self.writer_of(layer).and_then(Entries::of);
            if singly {
                let (chain, unit_bits) = (&self.chain, self.map.unit_bits());
                let part = resolve_singly(chain, writer, start, wanted.clone(), unit_bits).await?;
                if self.map.lookup_once(slice, generation, &part, wanted.clone(), extents) {
                    return Ok(true);
                }
                continue;
            }
            let range = start..start + (1 << bits);
            let mut resolution = match begun.take(slice, generation) {
                Some(resolution) => resolution,
                None => Resolution::new(&self.chain, range, self.map.unit_bits()),
            };
            let resolved = if in_part {
                resolution.advance(&self.chain, writer, wanted.clone()).await
            } else {
                resolution.finish(&self.chain, writer).await
            };
            if resolved.is_err() {
                // What is wanted may need nothing of what cannot be read.
                begun.spare(slice);
                singly = true;
                continue;
            }
            if resolution.is_whole() {
                if self.map.insert(slice, generation, resolution.into_slice()) {
                    return Ok(false);
                }
                continue;
            }
            let part = resolution.slice();
            if self.map.lookup_once(slice, generation, &part, wanted.clone(), extents) {
                begun.keep(Partial { slice, generation, resolution });
                return Ok(true);
            }
            // The whole takes fewer steps, which writes are less likely to overtake.
            in_part = false;
        }
    }

    /// Whether there are layers below the active one that no index describes.
    fn is_unindexed(&self) -> bool {
        let described = self.chain.index().map_or(0, |index| index.covers());
        self.chain.depth() > described + 1
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
        // No layer shows more than one above it, so what the lowest shows need not be asked of thousands of others.
        let shown = self.chain.layers().next().map_or(0, |(_, base)| base.visible());
        let is_visible = |extent: &Extent| {
            let end = extent.guest + extent.length;
            end <= shown || end <= self.visible(extent)
        };
        if extents.iter().all(is_visible) {
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
        let _pass = self.readers.epoch.enter();
        let extents = self.extents(offset..offset + buf.len() as u64).await?;
        self.read_extents(&extents, buf).await
    }

    /// Fills `buf` from extents that cover exactly its length. The caller is inside the epoch.
    pub async fn read_extents(&self, extents: &[Extent], buf: IoBuf) -> Result<IoBuf> {
        if let [extent] = extents {
            self.check_length(extent.length, &buf)?;
            return self.read_extent(extent, buf).await;
        }
        Box::pin(self.read_several(extents, buf)).await
    }

    /// Checks that a buffer has as many bytes as are to be read into it.
    #[inline]
    fn check_length(&self, length: u64, buf: &IoBuf) -> Result<()> {
        let fits = buf.len() as u64 == length;
        invariant(fits, self.name(), "a buffer has as many bytes as the extents that fill it")
    }

    async fn read_several(&self, extents: &[Extent], mut buf: IoBuf) -> Result<IoBuf> {
        let range = guest_range(extents);
        let length = buf.len();
        self.check_length(range.end - range.start, &buf)?;
        let read = |extent| self.read_extent(extent, buf.split_to(extent.length as usize));
        let reads: Vec<_> = extents.iter().map(read).map(in_order).collect();
        let mut whole = IoBuf::empty();
        for part in try_join_all(reads).await? {
            whole.unsplit(part);
        }
        invariant(
            whole.len() == length,
            self.name(),
            "a read gives back the buffer that it fills",
        )?;
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
                    Some(qcow2) => qcow2.metadata.guest_io().read(host, buf).await,
                    None => self.layer(index)?.read_data_at(host, buf).await,
                }
            }
            Source::Compressed { layer, cluster } => {
                let owner = self.layer(layer)?;
                let bytes = Box::pin(self.readers.decompressed(owner, cluster)).await?;
                let size = bytes.len();
                let mut within = (extent.guest % size as u64) as usize;
                // Adjacent guest clusters may share one compressed cluster.
                let mut rest = &mut buf[..];
                while !rest.is_empty() {
                    let (part, next) = rest.split_at_mut(rest.len().min(size - within));
                    part.copy_from_slice(&bytes[within..within + part.len()]);
                    (rest, within) = (next, 0);
                }
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
        let layer = self.chain.get(index);
        always(layer, self.name(), "the chain has every layer that its map names")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{CLUSTER, careless_disk, disk, must_violate};
    use futures_executor::block_on;
    use isobath_storage_test::careless::Slip;

    fn absent(guest: u64, length: u64) -> Extent {
        Extent { guest, length, source: Source::Absent }
    }

    #[test]
    fn extents_are_those_of_the_range() {
        let disk = disk();
        let check = |extents: &[Extent]| disk.check_extents(extents, &(512..2048));
        check(&[absent(512, 512), absent(1024, 1024)]).unwrap();
        let cover = "the extents of a range begin and end with it";
        must_violate(check(&[]), cover);
        must_violate(check(&[absent(512, 512)]), cover);
        must_violate(check(&[absent(0, 2048)]), cover);
        disk.check_extents(&[], &(7..7)).unwrap();
    }

    #[test]
    fn extents_join() {
        let disk = disk();
        let check = |extents: &[Extent]| disk.check_extents(extents, &(512..2048));
        let joined = "an extent begins where the one before it ends";
        must_violate(check(&[absent(512, 1), absent(1024, 1024)]), joined);
        must_violate(check(&[absent(512, 1024), absent(1024, 1024)]), joined);
        let empty = [absent(512, 1536), absent(2048, 0)];
        must_violate(check(&empty), "an extent has bytes");
    }

    #[test]
    fn extents_fill_their_buffer() {
        let disk = disk();
        let read = |extents: &[Extent], length| {
            block_on(disk.read_extents(extents, IoBuf::zeroed(length))).map(|buf| buf.len())
        };
        assert_eq!(read(&[absent(0, 5), absent(5, 6)], 11).unwrap(), 11);
        let fits = "a buffer has as many bytes as the extents that fill it";
        must_violate(read(&[absent(0, 5), absent(5, 6)], 12), fits);
        must_violate(read(&[absent(0, 5)], 4), fits);
        let layer = LayerIndex::new(1);
        let missing = Extent { source: Source::Invalid(layer), ..absent(0, 5) };
        let has = "the chain has every layer that its map names";
        must_violate(read(&[missing], 5), has);
    }

    #[test]
    fn a_read_fills_its_buffer() {
        let (disk, slips) = careless_disk();
        let write = |at, length| {
            block_on(Box::pin(disk.write(at, IoBuf::copy_of(&vec![1; length])))).unwrap();
        };
        write(0, CLUSTER as usize);
        let read = || {
            let read = disk.read(CLUSTER - 512, IoBuf::zeroed(1024));
            block_on(Box::pin(read)).map(|buf| buf.len())
        };
        assert_eq!(read().unwrap(), 1024);
        slips.set(Slip::ShortRead);
        must_violate(read(), "a read gives back the buffer that it fills");
    }
}
