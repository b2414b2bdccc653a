//! First writes with mappings embedded in the data.

use super::Qcow2Writer;
use super::allocate::{CopiedPart, Target, reads_zero};
use crate::disk::Disk;
use isobath_image::durability::zones::{Embedded, Taken};
use isobath_image::{Result, invariant};
use isobath_qcow2::embedded::{LEAD, embed};
use isobath_qcow2::journal::Crc32c;
use isobath_storage::{Host, IoBuf};
use std::path::Path;

/// A cluster that contains its mapping.
pub(super) struct Embedding {
    pub(super) taken: Taken,
    pub(super) embedded: Embedded,
    /// The lead block as it is to be stored.
    pub(super) lead: IoBuf,
}

/// A part of a cluster: where it begins, its bytes unless they are zeroes, and how many there are.
type Part<'a> = (u64, Option<&'a [u8]>, u64);

/// Checks that parts make up a cluster: the record's checksum is of all of it.
fn check_parts(parts: &[Part], size: u64, name: &Path) -> Result<()> {
    let mut end = 0;
    for (at, bytes, length) in parts {
        let whole = bytes.is_none_or(|bytes| bytes.len() as u64 == *length);
        invariant(whole, name, "a part of an embedded cluster has all of its bytes")?;
        invariant(*at == end, name, "the parts of an embedded cluster follow one another")?;
        end += length;
    }
    invariant(end == size, name, "the parts of an embedded cluster make it up")
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
        let mut parts: Vec<Part> = copies
            .iter()
            .map(|copy| (copy.at, copy.bytes.as_deref(), copy.length))
            .chain([(target.written.start, Some(own), own.len() as u64)])
            .collect();
        parts.sort_unstable_by_key(|(at, ..)| *at);
        if let Err(error) = check_parts(&parts, size, self.name()) {
            zones.put_back(&taken);
            return Err(error);
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::must_violate;

    #[test]
    fn parts_make_up_a_cluster() {
        let check = |parts: &[Part]| check_parts(parts, 4096, Path::new("disk"));
        let bytes = [7; 512];
        check(&[(0, Some(&bytes), 512), (512, None, 3584)]).unwrap();
        let whole = "a part of an embedded cluster has all of its bytes";
        must_violate(check(&[(0, Some(&bytes), 513), (513, None, 3583)]), whole);
        let follow = "the parts of an embedded cluster follow one another";
        must_violate(check(&[(0, None, 512), (1024, None, 3072)]), follow);
        must_violate(check(&[(0, None, 512), (256, None, 3840)]), follow);
        must_violate(check(&[(0, None, 512)]), "the parts of an embedded cluster make it up");
    }
}
