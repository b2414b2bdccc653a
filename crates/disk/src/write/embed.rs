//! First writes with mappings embedded in the data.

use super::target::{CopiedPart, Embedding, Target, reads_zero};
use crate::disk::Disk;
use isobath_image::placement::Placement;
use isobath_image::writer::Qcow2Writer;
use isobath_image::{Result, invariant};
use isobath_qcow2::Crc32c;
use isobath_qcow2::embedded::LEAD;
use isobath_storage::{Host, IoBuf};
use std::path::Path;

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

impl<H: Host> Disk<H> {
    /// Embeds a new cluster's mapping in its data, of which `own` is the request's; `false` if that is not possible, or
    /// not worth it.
    pub(super) async fn embed(
        &self,
        qcow2: &Qcow2Writer<H::File>,
        placement: &mut Placement<'_, H::File>,
        target: &mut Target,
        copies: &[CopiedPart],
        own: &[u8],
    ) -> Result<bool> {
        if !target.plan.releases.is_empty() {
            return Ok(false);
        }
        // Most writes that would gain nothing return here, before anything is looked up for them.
        let Some(first) = placement.first_write() else { return Ok(false) };
        let geometry = qcow2.geometry();
        let size = geometry.cluster_size();
        let start = target.cluster.get() * size;
        let zero = reads_zero(&self.extents(start..start + size).await?);
        let mut parts: Vec<Part> = copies
            .iter()
            .map(|copy| (copy.at, copy.bytes.as_deref(), copy.length))
            .chain([(target.written.start, Some(own), own.len() as u64)])
            .collect();
        parts.sort_unstable_by_key(|(at, ..)| *at);
        check_parts(&parts, size, self.name())?;
        let mut lead = IoBuf::zeroed(LEAD);
        let mut sum = Crc32c::default();
        let checked = !(zero && first.is_zeroed());
        for (at, bytes, length) in parts {
            let in_lead = (LEAD as u64).saturating_sub(at).min(length) as usize;
            match bytes {
                Some(bytes) => {
                    let (front, behind) = bytes.split_at(in_lead);
                    lead.iter_mut().skip(at as usize).zip(front).for_each(|(to, from)| *to = *from);
                    if checked {
                        sum.update(behind);
                    }
                }
                None if checked => sum.update(&IoBuf::zeroed(length as usize - in_lead)),
                None => {}
            }
        }
        let rest = checked.then(|| sum.finish());
        let Some(write) = first.embed(target.cluster, rest, &mut lead) else { return Ok(false) };
        let host = write.host();
        placement.take_embedded(write).await?;
        target.host = geometry.host_cluster_start(host);
        target.zeroed = !checked;
        target.embedding = Some(Embedding { lead, checked });
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{CLUSTER, SIZE, must_violate, open_as, writers};
    use futures_executor::block_on;
    use isobath_chain::create::{NewDisk, create};
    use isobath_image::durability::MetadataMode;
    use isobath_image::options::OpenOptions;
    use isobath_qcow2::ClusterIndex;
    use isobath_storage::memory::MemoryHost;

    #[test]
    fn a_cluster_of_a_zone_goes_back_unless_a_write_takes_it() {
        let host = MemoryHost::new();
        block_on(Box::pin(create(&host, Path::new("0"), &NewDisk::new(SIZE)))).unwrap();
        let options = OpenOptions::new().writable(true).metadata(MetadataMode::Embedded);
        let disk = open_as(&host, "0", &options.zone_size(1 << 20));
        // The first commit sets up the journal, and the next opens a zone.
        for at in [0, CLUSTER] {
            block_on(disk.write(at, IoBuf::copy_of(&[1; 4096]))).unwrap();
            block_on(disk.flush()).unwrap();
        }
        let (_, qcow2) = writers(&disk);
        let mut placement = qcow2.metadata.placement();
        let take = || placement.first_write().unwrap();
        let first = take();
        let one = first.host();
        drop(first);
        let again = take();
        assert_eq!(again.host(), one, "dropped before it was embedded");
        let embedded = again.embed(ClusterIndex::new(2), None, &mut [0; LEAD]).unwrap();
        drop(embedded);
        let again = take();
        assert_eq!(again.host(), one, "dropped before it was taken");
        let embedded = again.embed(ClusterIndex::new(2), None, &mut [0; LEAD]).unwrap();
        block_on(placement.take_embedded(embedded)).unwrap();
        assert_eq!(placement.clusters(), [one]);
        drop(placement);
        let placement = qcow2.metadata.placement();
        assert_ne!(placement.first_write().unwrap().host(), one, "the next commit releases it");
        // What is written after all of this is there after another opening.
        drop(placement);
        block_on(disk.write(2 * CLUSTER, IoBuf::copy_of(&[2; 4096]))).unwrap();
        block_on(Box::pin(disk.close())).unwrap();
        drop(disk);
        let disk = open_as(&host, "0", &OpenOptions::new());
        let read = block_on(disk.read(2 * CLUSTER, IoBuf::zeroed(4096))).unwrap();
        assert_eq!(read[..], [2; 4096]);
    }

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
