//! The size that an image would have.

use crate::chain_map::MapEntry;
use crate::device::BlockDevice;
use crate::disk::Disk;
use isobath_chain::create::{NewDisk, Preallocation, plan};
use isobath_image::layer::ImageFormat;
use isobath_image::{DiskError, Result};
use isobath_storage::Host;
use std::path::Path;

/// The size of an image file, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measure {
    /// With the current data and the tables of a full image: the maximum that a copy needs.
    pub required: u64,
    /// With every cluster allocated.
    pub fully_allocated: u64,
}

/// Why a size cannot be told.
#[derive(Debug)]
pub enum MeasureError {
    /// The new image cannot be: options exclude each other, or neither a source nor a size is given.
    New(DiskError),
    /// The source's tables cannot be read.
    Source(DiskError),
}

impl From<MeasureError> for DiskError {
    fn from(error: MeasureError) -> Self {
        match error {
            MeasureError::New(error) | MeasureError::Source(error) => error,
        }
    }
}

/// The size of the image `new` after a copy of `source`, or when empty if there is no source. The disk's size is that
/// of `source`, or given by `new`.
///
/// # Errors
/// See [`MeasureError`].
pub async fn measure<H: Host>(
    new: &NewDisk,
    source: Option<&Disk<H>>,
) -> std::result::Result<Measure, MeasureError> {
    let (mut measured, unknown) = empty(new, source).map_err(MeasureError::New)?;
    if let (Some(source), Some((clusters, cluster))) = (source, unknown) {
        let data = data_clusters(source, cluster).await.map_err(MeasureError::Source)?;
        measured.required += data.min(clusters) * cluster;
    }
    Ok(measured)
}

/// The size of the image `new`, without what the source has of data if that is to be counted: the number and the size
/// of its clusters are returned, too.
fn empty<H: Host>(
    new: &NewDisk,
    source: Option<&Disk<H>>,
) -> Result<(Measure, Option<(u64, u64)>)> {
    let unsupported = |reason: &str| DiskError::Unsupported(reason.into());
    let size = source.map(BlockDevice::size).or(new.size);
    let size = size.ok_or_else(|| unsupported("either an image or a size must be given"))?;
    let too_large = || unsupported("the size is too large for these options");
    let size = size.checked_next_multiple_of(512).ok_or_else(too_large)?;
    if !new.format.is_written() {
        let name = new.format.name();
        return Err(unsupported(&format!(
            "Block driver '{name}' does not support size measurement"
        )));
    }
    if new.format == ImageFormat::Raw {
        return Ok((Measure { required: size, fully_allocated: size }, None));
    }
    let keys = new.encryption.as_ref().map_or(0, |encryption| encryption.options.area_length());
    if new.format == ImageFormat::Luks {
        let all = size.checked_add(keys).ok_or_else(too_large)?;
        return Ok((Measure { required: all, fully_allocated: all }, None));
    }
    // Checks the options too.
    let name = Path::new("the new image");
    let error = |source| DiskError::Format { image: name.to_owned(), source };
    let geometry = plan(name, new, size, None)?.header().geometry().map_err(error)?;
    let cluster = geometry.cluster_size();
    let clusters = geometry.clusters_for(size);
    // Whole tables, as QEMU counts.
    let l2 = geometry.clusters_for(clusters * geometry.l2_entry_size() as u64);
    let l1 = geometry.clusters_for(l2 * 8);
    let counted = 1 + l2 + l1 + clusters;
    let (mut blocks, mut table) = (0, 0);
    loop {
        let total = counted + blocks + table;
        let next_blocks = total.div_ceil(geometry.refcount_block_entries());
        let next_table = geometry.clusters_for(next_blocks * 8);
        if (next_blocks, next_table) == (blocks, table) {
            break;
        }
        (blocks, table) = (next_blocks, next_table);
    }
    // The refcounts of an encryption header are not counted, as in QEMU.
    let fully_allocated = (counted + blocks + table + geometry.clusters_for(keys)) * cluster;
    let full = matches!(new.preallocation, Preallocation::Falloc | Preallocation::Full);
    // It is unknown how much of it the backing file will have.
    if full || (source.is_some() && new.backing_file.is_some()) {
        return Ok((Measure { required: fully_allocated, fully_allocated }, None));
    }
    let required = fully_allocated - clusters * cluster;
    Ok((Measure { required, fully_allocated }, Some((clusters, cluster))))
}

/// Clusters of `cluster` bytes that hold data, not only reserved space.
async fn data_clusters<H: Host>(source: &Disk<H>, cluster: u64) -> Result<u64> {
    let (mut count, mut counted) = (0, 0);
    let mut add = |entry: &MapEntry| {
        if entry.present && !entry.zero {
            let first = counted.max(entry.start / cluster);
            let last = (entry.start + entry.length).div_ceil(cluster);
            count += last.saturating_sub(first);
            counted = last.max(counted);
        }
    };
    source.chain_map(0..source.size(), &mut add).await?;
    Ok(count)
}
