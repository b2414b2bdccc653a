//! Reads and writes of embedded lead blocks.
//!
//! The [`data_journal`](crate::durability::data_journal)'s data is applied first: a lead block is extracted from the
//! file's contents overlaid with the journaled pieces.

use super::GuestIo;
use crate::durability::zones::{Embedded, LeadAt};
use crate::{Result, always};
use futures_util::future::join_all;
use isobath_qcow2::ClusterIndex;
use isobath_qcow2::embedded::{LEAD, Mapping, Span, embed_in, extract};
use isobath_storage::{IoBuf, Storage};
use isobath_sync::order::in_order;

/// Part of a write.
struct Segment {
    at: u64,
    /// What is stored there.
    stored: Stored,
    /// The request's bytes for the segment, which are returned whatever is stored.
    own: IoBuf,
}

enum Stored {
    /// The request's bytes, unchanged.
    Own,
    /// A lead block.
    Lead(IoBuf, Embedded),
    /// Nothing: the data journal keeps it.
    JournaledWrite,
}

impl<S: Storage> GuestIo<'_, S> {
    pub(super) async fn read_leads(
        &self,
        leads: Vec<LeadAt>,
        at: u64,
        buf: IoBuf,
    ) -> Result<IoBuf> {
        // A guest never sees an embedded record.
        let (own, theirs) =
            if buf.is_shared() { (IoBuf::zeroed(buf.len()), Some(buf)) } else { (buf, None) };
        let mut own = self.metadata.read_stored(at, own).await?;
        for lead in leads {
            self.extract_into(&lead, at, &mut own).await?;
        }
        let Some(mut theirs) = theirs else { return Ok(own) };
        theirs.copy_from_slice(&own);
        Ok(theirs)
    }

    /// Replaces the stored bytes of a lead block with the guest's, as far as the block lies in `buf`, which was read
    /// from `at`.
    async fn extract_into(&self, lead: &LeadAt, at: u64, buf: &mut IoBuf) -> Result<()> {
        let (block, end) = (lead.block(), at + buf.len() as u64);
        if at <= block.start && block.end <= end {
            let stored = &mut buf[(block.start - at) as usize..(block.end - at) as usize];
            // It may have become plain meanwhile, and its plain bytes may look like a record.
            if extract(stored, lead.id).is_some() && self.metadata.zones.embedded(lead.at).is_some()
            {
                return Ok(());
            }
        }
        let _lock = self.metadata.zones.locks.lock(block.clone()).await;
        let plain = self.metadata.plain_lead(lead).await?;
        let (from, to) = (block.start.max(at), block.end.min(end));
        buf[(from - at) as usize..(to - at) as usize]
            .copy_from_slice(&plain[(from - block.start) as usize..(to - block.start) as usize]);
        Ok(())
    }

    /// Writes guest data in place where some lead blocks are embedded. Returns the buffer.
    pub(super) async fn write_over_leads(&self, at: u64, buf: IoBuf) -> Result<IoBuf> {
        let (mut buf, shared) = buf.into_stable();
        let (size, end) = (self.metadata.cluster_size(), at + buf.len() as u64);
        let first = at / size * size;
        let locked = first..end.next_multiple_of(size);
        let _lock = self.metadata.zones.locks.lock(locked).await;
        let mut segments = Vec::new();
        let mut next = at;
        for lead in self.metadata.zones.leads_in(&(at..end)) {
            let span = lead.span();
            if next < span.start {
                let own = buf.split_to((span.start - next) as usize);
                segments.push(Segment { at: next, stored: Stored::Own, own });
                next = span.start;
            }
            let own = buf.split_to((span.end.min(end) - next) as usize);
            let stored = self.lead_for(&lead, next, &own).await?;
            segments.push(Segment { at: span.start, stored, own });
            next = span.end.min(end);
        }
        if next < end {
            segments.push(Segment { at: next, stored: Stored::Own, own: buf });
        }
        let written = self.write_segments(segments).await?;
        Ok(shared.unwrap_or(written))
    }

    /// The new stored form of a lead block to which `own` is written at `at`. The caller holds its lock.
    async fn lead_for(&self, lead: &LeadAt, at: u64, own: &IoBuf) -> Result<Stored> {
        let Embedded { cluster, span, rest, .. } = lead.embedded;
        let mut plain = if own.len() == span.bytes() {
            IoBuf::zeroed(LEAD)
        } else {
            self.metadata.plain_lead(lead).await?
        };
        let from = (at - lead.at) as usize;
        plain[from..from + own.len()].copy_from_slice(own);
        let (lsn, durable_lsn) = self.metadata.zones.next_lsn(&self.metadata.sequence);
        let cluster_index = ClusterIndex::new(cluster);
        let mapping = Mapping { cluster: cluster_index, lsn, durable_lsn, rest: None };
        let mut block = IoBuf::copy_of(&plain);
        // A torn block would be neither the old one nor the new one.
        let whole =
            span == Span::Sector || self.metadata.layer.storage().atomic_write() >= LEAD as u64;
        // The checksum is still needed.
        let checked = rest.is_some() && lead.embedded.lsn >= durable_lsn;
        // The span stays. A smaller one would leave a part of the block that is plain only once this write is durable,
        // and that nothing repeats in the next record, should it make the smaller span plain; the sectors behind a span
        // of one sector may be written without the lock.
        if whole && !checked && embed_in(span, &mut block, &mapping, lead.id) {
            let embedded = Embedded { cluster, lsn, span, rest: None };
            return Ok(Stored::Lead(block.split_to(span.bytes()), embedded));
        }
        self.metadata.keep_plain(lead, &plain[..span.bytes()]);
        Ok(Stored::JournaledWrite)
    }

    /// Writes consecutive segments; returns the request's bytes.
    async fn write_segments(&self, segments: Vec<Segment>) -> Result<IoBuf> {
        let mut runs: Vec<(u64, u64, Vec<IoBuf>)> = Vec::new();
        // For each segment, the request's bytes if they are not written.
        let mut apart = Vec::with_capacity(segments.len());
        let mut rewritten = Vec::new();
        for Segment { at, stored, own } in segments {
            let bytes = match stored {
                Stored::Own => {
                    apart.push(None);
                    own
                }
                Stored::Lead(block, embedded) => {
                    apart.push(Some((own, true)));
                    rewritten.push((at, embedded));
                    block
                }
                Stored::JournaledWrite => {
                    apart.push(Some((own, false)));
                    continue;
                }
            };
            let end = at + bytes.len() as u64;
            match runs.last_mut() {
                Some((_, last, bufs)) if *last == at => {
                    bufs.push(bytes);
                    *last = end;
                }
                _ => runs.push((at, end, vec![bytes])),
            }
        }
        let writes = runs.into_iter().map(|(at, _, bufs)| in_order(self.write_stored(at, bufs)));
        // Wait for all of them even if one fails: a cancelled write could still reach the file.
        let written: Result<Vec<Vec<IoBuf>>> = join_all(writes).await.into_iter().collect();
        let written = written?;
        for (at, embedded) in rewritten {
            self.metadata.zones.rewritten(at, embedded);
        }
        let mut written = written.into_iter().flatten();
        let mut whole = IoBuf::empty();
        for apart in apart {
            let own = match apart {
                None => written.next(),
                Some((own, stored)) => {
                    if stored {
                        written.next();
                    }
                    Some(own)
                }
            };
            let name = self.metadata.layer.name();
            whole.unsplit(always(own, name, "a write gives back every buffer")?);
        }
        Ok(whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broken::{host, layer_on, must_violate, qcow2, writer_of};
    use crate::options::OpenOptions;
    use futures_executor::block_on;
    use isobath_storage_test::careless::{CarelessHost, Slip};

    #[test]
    fn a_write_over_lead_blocks_gives_back_its_buffer() {
        let host = CarelessHost::around(host());
        let writer = writer_of(&layer_on(&host), &OpenOptions::new());
        let io = qcow2(&writer).metadata.guest_io();
        let write = || {
            let mut buf = IoBuf::zeroed(1024);
            let mut segment = |at| Segment { at, stored: Stored::Own, own: buf.split_to(512) };
            let segments = vec![segment(1 << 20), segment((1 << 20) + 512)];
            block_on(io.write_segments(segments)).map(|buf| buf.len())
        };
        assert_eq!(write().unwrap(), 1024);
        host.slips().set(Slip::LostBuffer);
        must_violate(write(), "a write gives back every buffer");
    }
}
