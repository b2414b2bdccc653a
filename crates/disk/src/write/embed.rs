//! First writes with mappings embedded in the data.

use super::Qcow2Writer;
use super::allocate::{CopiedPart, Target, reads_zero};
use crate::disk::Disk;
use isobath_image::Result;
use isobath_image::durability::zones::{Embedded, Taken};
use isobath_qcow2::embedded::{LEAD, embed};
use isobath_qcow2::journal::Crc32c;
use isobath_storage::{Host, IoBuf};

/// A cluster that contains its mapping.
pub(super) struct Embedding {
    pub(super) taken: Taken,
    pub(super) embedded: Embedded,
    /// The lead block as it is to be stored.
    pub(super) lead: IoBuf,
}

impl Embedding {
    /// Whether the record has a checksum of the rest.
    pub(super) fn is_checked(&self) -> bool {
        self.embedded.rest.is_some()
    }
}

impl<H: Host> Disk<H> {
    /// Embeds a new cluster's mapping in its data, of which `own` is the request's; `None` if that is not possible, or
    /// not worth it.
    pub(super) async fn embed(
        &self,
        qcow2: &Qcow2Writer<H::File>,
        target: &Target,
        copies: &[CopiedPart],
        own: &[u8],
    ) -> Result<Option<Embedding>> {
        let zones = &qcow2.metadata.zones;
        if !zones.any() || !target.plan.releases.is_empty() {
            return Ok(None);
        }
        // Most writes that would gain nothing return here, before anything is looked up for them.
        let Some(taken) = zones.take(&qcow2.metadata.sequence) else { return Ok(None) };
        let size = qcow2.geometry().cluster_size();
        let start = target.cluster.get() * size;
        let below = match self.extents(start..start + size).await {
            Ok(below) => below,
            Err(error) => {
                zones.put_back(&taken);
                return Err(error);
            }
        };
        let zero = reads_zero(&below);
        let mut parts: Vec<(u64, Option<&[u8]>, u64)> = copies
            .iter()
            .map(|copy| (copy.at, copy.bytes.as_deref(), copy.length))
            .chain([(target.written.start, Some(own), own.len() as u64)])
            .collect();
        parts.sort_unstable_by_key(|(at, ..)| *at);
        let mut lead = IoBuf::zeroed(LEAD);
        let mut sum = Crc32c::default();
        let checked = !(zero && taken.zeroed);
        for (at, bytes, length) in parts {
            let in_lead = (LEAD as u64).saturating_sub(at).min(length) as usize;
            match bytes {
                Some(bytes) => {
                    let (first, behind) = bytes.split_at(in_lead);
                    lead.iter_mut().skip(at as usize).zip(first).for_each(|(to, from)| *to = *from);
                    if checked {
                        sum.update(behind);
                    }
                }
                None if checked => sum.update(&IoBuf::zeroed(length as usize - in_lead)),
                None => {}
            }
        }
        let rest = checked.then(|| sum.finish());
        let mapping = taken.mapping(target.cluster, rest);
        let Some(span) = embed(&mut lead, &mapping, taken.id) else {
            zones.put_back(&taken);
            return Ok(None);
        };
        if let Err(error) = qcow2.metadata.alloc.take_kept(taken.host).await {
            zones.put_back(&taken);
            return Err(error);
        }
        let (cluster, lsn) = (target.cluster.get(), mapping.lsn);
        Ok(Some(Embedding { taken, embedded: Embedded { cluster, lsn, span, rest }, lead }))
    }
}
