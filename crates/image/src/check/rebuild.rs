//! Writing a new refcount structure.

use super::counts::Counts;
use super::image::Image;
use super::survey::Survey;
use crate::Result;
use isobath_qcow2::HostOffset;
use isobath_qcow2::geometry::MAX_REFCOUNT_TABLE_BYTES;
use isobath_qcow2::header::field;
use isobath_storage::Storage;
use std::collections::BTreeSet;

/// Writes a refcount table and blocks that match the counts after everything that is in use, and then makes the header
/// refer to them. The counts are updated: the old structure is free.
pub(crate) async fn rebuild<S: Storage>(image: &mut Image<S>, survey: &mut Survey) -> Result<()> {
    let geometry = image.geometry;
    let bits = geometry.cluster_bits();
    let entries = geometry.refcount_block_entries();
    let counts = &mut survey.counts;
    forget_old(image, counts, &survey.structure.ranges);

    // Neither the old structure nor anything that the counting may have missed is overwritten.
    let start = image.clusters().max(counts.highest().map_or(0, |last| last + 1));
    let mut numbers: BTreeSet<u64> = counts.nonzero().map(|cluster| cluster / entries).collect();
    let mut table_clusters = 1;
    loop {
        let end = start + table_clusters + numbers.len() as u64;
        let before = (table_clusters, numbers.len());
        numbers.extend(start / entries..=(end - 1) / entries);
        let length = numbers.last().map_or(0, |last| (last + 1) * 8);
        table_clusters = table_clusters.max(geometry.clusters_for(length));
        if before == (table_clusters, numbers.len()) {
            break;
        }
    }
    if table_clusters << bits > MAX_REFCOUNT_TABLE_BYTES {
        return Err(image.refused(format!(
            "a new refcount table would exceed {MAX_REFCOUNT_TABLE_BYTES} bytes; convert the image \
             to one with larger clusters"
        )));
    }
    let end = start + table_clusters + numbers.len() as u64;
    for cluster in start..end {
        counts.set(cluster, 1);
    }

    let mut table = vec![0; (table_clusters << bits) as usize];
    let order = geometry.refcount_order();
    for (number, at) in numbers.iter().zip(start + table_clusters..) {
        let mut block = vec![0; geometry.cluster_size() as usize];
        for index in 0..entries {
            let count = counts.get(number * entries + index).min(order.max());
            if count > 0 {
                order
                    .write(&mut block, index as usize, count)
                    .map_err(|error| image.refused(error.to_string()))?;
            }
        }
        image.write(at << bits, &block).await?;
        let slot = table.get_mut(*number as usize * 8..).and_then(|rest| rest.first_chunk_mut());
        if let Some(slot) = slot {
            *slot = (at << bits).to_be_bytes();
        }
    }
    image.write(start << bits, &table).await?;
    image.flush().await?;

    let offset = HostOffset::new(start << bits);
    // Offset, size and the refcounts' width change together: they are in one sector.
    let mut fields = vec![
        (field::REFCOUNT_TABLE_OFFSET, offset.get().to_be_bytes().to_vec()),
        (field::REFCOUNT_TABLE_CLUSTERS, (table_clusters as u32).to_be_bytes().to_vec()),
    ];
    if image.header.version >= 3 {
        fields.push((field::REFCOUNT_ORDER, image.header.refcount_order.to_be_bytes().to_vec()));
    }
    image.write_fields(fields).await?;
    image.header.refcount_table_offset = offset;
    image.header.refcount_table_clusters = table_clusters as u32;
    image.length = image.length.max(end << bits);
    Ok(())
}

/// Subtracts the references to the old structure from the counts.
fn forget_old<S: Storage>(image: &Image<S>, counts: &mut Counts, ranges: &[(u64, u64)]) {
    let bits = image.geometry.cluster_bits();
    for &(offset, length) in ranges {
        let Some(last) = offset.checked_add(length - 1) else { continue };
        for cluster in offset >> bits..=last >> bits {
            // References past the end of the file were not counted.
            let count = counts.get(cluster);
            if count > 0 {
                counts.set(cluster, count - 1);
            }
        }
    }
}
