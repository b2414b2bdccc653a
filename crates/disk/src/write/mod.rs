//! Writes: in place if the active layer alone owns the cluster, otherwise to newly allocated clusters.

mod allocate;
mod compressed;
mod detected;
mod discard;
mod embed;
mod entries;
mod plan;
mod pull;
mod sectors;
mod target;
mod zero;

use crate::disk::Disk;
use futures_util::future::join_all;
use isobath_chain::map::{Extent, Source};
use isobath_image::guest_io::GuestIo;
use isobath_image::writer::Qcow2Writer;
use isobath_image::{DiskError, Result, always, invariant};
use isobath_qcow2::FormatError;
use isobath_qcow2::probe::PROBE_BYTES;
use isobath_storage::{Host, IoBuf, Storage, StorageExt};
use isobath_sync::order::in_order;
use std::future::Future;
use std::ops::Range;

pub use pull::{Need, Pulled, Surplus};

/// Bytes of one write that may be journaled for the next record.
const MOST_JOURNALED: u64 = 256 << 10;
/// The number of records after which no earlier data is checksummed any more, unless it was written to meanwhile.
const RECORDS: u32 = 3;

/// The offset at which the extent may be written in place, if it may.
fn in_place(extent: &Extent) -> Option<u64> {
    match extent.source {
        Source::Data { host, in_place: true, .. } => Some(host),
        _ => None,
    }
}

/// Reports a cluster whose contents are not needed any more and whose entry is invalid: it is unknown which host
/// clusters are its own, so none is released.
fn warn_of_leak<S: Storage>(qcow2: &Qcow2Writer<S>, cluster: u64, error: &FormatError) {
    tracing::warn!(
        "{}: the space of guest cluster {cluster}, whose entry is invalid, is not released: {error}",
        isobath_storage::shown(qcow2.metadata.layer.name())
    );
}

/// Bytes of a write in place that would be journaled.
fn to_journal<S: Storage>(qcow2: &Qcow2Writer<S>, extents: &[Extent]) -> u64 {
    let places = extents.iter().filter_map(|e| Some((in_place(e)?, e.length)));
    places.map(|(host, length)| qcow2.metadata.guest_io().to_journal(&(host..host + length))).sum()
}

/// Waits for every write to end, even after one has failed: a cancelled write could still reach the file when its range
/// or cluster belongs to another request.
async fn finish_writes<T, F: Future<Output = Result<T>>>(
    writes: impl IntoIterator<Item = F>,
) -> Result<Vec<T>> {
    join_all(writes.into_iter().map(in_order)).await.into_iter().collect()
}

impl<H: Host> Disk<H> {
    pub(crate) async fn write_range(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        let writer = self.writer()?;
        if buf.is_empty() {
            return Ok(buf);
        }
        let end = offset + buf.len() as u64;
        let Some(qcow2) = writer.qcow2() else {
            // What is judged is what is written: a guest may change its memory in between.
            let judged = offset < PROBE_BYTES as u64 && writer.layer().is_detected_raw();
            let (buf, shared) = if judged { buf.into_stable() } else { (buf, None) };
            let _start = self.keep_detected_raw(writer, offset..end, Some(&buf)).await?;
            let _pass = self.readers.epoch.enter();
            self.check_visible(offset..end)?;
            let written = writer.layer().storage().write_at(offset, buf).await?;
            return Ok(shared.unwrap_or(written));
        };
        qcow2.note_write(offset..end).await?;
        if qcow2.metadata.layer.is_encrypted() && !sectors::are_whole(offset..end) {
            return Box::pin(self.write_parts_of_sectors(writer, qcow2, offset, buf)).await;
        }
        let mut records = 0;
        loop {
            {
                let _range = writer.ranges.lock(offset..end).await;
                let _pass = self.readers.epoch.enter();
                self.check_visible(offset..end)?;
                let extents = self.extents(offset..end).await?;
                if extents.iter().any(|extent| in_place(extent).is_none()) {
                    break;
                }
                let few = end - offset <= MOST_JOURNALED || records == RECORDS;
                if few || to_journal(qcow2, &extents) <= MOST_JOURNALED {
                    return self.write_in_place(qcow2, &extents, buf).await;
                }
            }
            // Much would be journaled in memory: after one more record the place may change.
            records += 1;
            Box::pin(writer.commit_with_record(&self.readers)).await?;
        }
        Box::pin(async {
            writer.commit_if_much(&self.readers).await?;
            self.write_allocating(writer, offset, buf).await
        })
        .await
    }

    /// Fails if the disk was shrunk since the request was admitted. The caller is inside the epoch, which a shrink
    /// waits for.
    fn check_visible(&self, range: Range<u64>) -> Result<()> {
        let size = self.chain.active().visible();
        if range.end > size {
            let length = range.end - range.start;
            return Err(DiskError::OutOfRange { offset: range.start, length, size });
        }
        Ok(())
    }

    async fn write_in_place(
        &self,
        qcow2: &Qcow2Writer<H::File>,
        extents: &[Extent],
        buf: IoBuf,
    ) -> Result<IoBuf> {
        let data = qcow2.metadata.guest_io();
        if let [Extent { source: Source::Data { layer, host, in_place }, .. }] = extents {
            let ours = *in_place && *layer == self.active_index();
            invariant(ours, self.name(), "a write in place goes to the active layer")?;
            return data.write(*host, buf).await;
        }
        Box::pin(self.write_several(&data, extents, buf)).await
    }

    async fn write_several(
        &self,
        data: &GuestIo<'_, H::File>,
        extents: &[Extent],
        mut buf: IoBuf,
    ) -> Result<IoBuf> {
        let active = Some(self.active_index());
        let mut writes = Vec::with_capacity(extents.len());
        for extent in extents {
            let place = in_place(extent).filter(|_| extent.source.layer() == active);
            let host = always(place, self.name(), "each part of a write in place has its place")?;
            let there = extent.length <= buf.len() as u64;
            invariant(there, self.name(), "the parts of a write in place are parts of it")?;
            writes.push(data.write(host, buf.split_to(extent.length as usize)));
        }
        invariant(buf.is_empty(), self.name(), "the parts of a write in place make it up")?;
        let mut whole = IoBuf::empty();
        for part in finish_writes(writes).await? {
            whole.unsplit(part);
        }
        Ok(whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{chain_of, must_violate, writers};
    use futures_executor::block_on;
    use futures_util::future::LocalBoxFuture;
    use isobath_chain::chain::LayerIndex;
    use isobath_image::sabotage::Sabotage;
    use isobath_storage::{Operation, StorageError};
    use std::cell::Cell;
    use std::future::poll_fn;
    use std::io;
    use std::path::Path;
    use std::task::Poll;

    fn place(layer: u16, host: u64, in_place: bool) -> Extent {
        let layer = LayerIndex::new(layer);
        Extent { guest: 0, length: 512, source: Source::Data { layer, host, in_place } }
    }

    #[test]
    fn what_is_written_in_place_is_in_the_active_layer() {
        let disk = chain_of(2);
        let (_, qcow2) = writers(&disk);
        let write = |extents: &[Extent], length| {
            let buf = IoBuf::zeroed(length);
            block_on(disk.write_in_place(qcow2, extents, buf)).map(|buf| buf.len())
        };
        let ours = "a write in place goes to the active layer";
        must_violate(write(&[place(0, 0, true)], 512), ours);
        must_violate(write(&[place(1, 0, false)], 512), ours);
        let end = 1 << 20;
        let good = place(1, end, true);
        assert_eq!(write(&[good, place(1, end + 1024, true)], 1024).unwrap(), 1024);
        let each = "each part of a write in place has its place";
        must_violate(write(&[good, place(0, end, true)], 1024), each);
        must_violate(write(&[good, place(1, end, false)], 1024), each);
        let zero = Extent { source: Source::Absent, ..good };
        must_violate(write(&[good, zero], 1024), each);
        let parts = "the parts of a write in place are parts of it";
        must_violate(write(&[good, good], 1023), parts);
        must_violate(write(&[good, good], 1025), "the parts of a write in place make it up");
    }

    #[test]
    fn a_write_that_fails_waits_for_those_under_way() {
        let ended = Cell::new(false);
        let failing = async {
            let error = io::Error::from_raw_os_error(libc::EIO);
            Err(StorageError::new(Operation::Write, Path::new("disk"), error).into())
        };
        let slow = async {
            let mut turns = 5;
            poll_fn(|context| {
                turns -= 1;
                context.waker().wake_by_ref();
                if turns == 0 { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
            ended.set(true);
            Ok(())
        };
        let writes: [LocalBoxFuture<'_, Result<()>>; 2] = [Box::pin(failing), Box::pin(slow)];
        let error = block_on(finish_writes(writes)).unwrap_err();
        assert_eq!(error.errno(), libc::EIO);
        assert!(ended.get());
    }

    #[test]
    #[cfg(debug_assertions)]
    fn a_write_gets_no_more_clusters_than_it_needs() {
        let disk = chain_of(1);
        let write = |at| block_on(Box::pin(disk.write(at, IoBuf::copy_of(&[1; 512])))).map(drop);
        write(0).unwrap();
        let _broken = Sabotage::LongRun.begin();
        must_violate(write(1 << 20), "no run is longer than what was asked for");
    }
}
