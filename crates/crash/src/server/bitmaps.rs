//! Persistent bitmaps, and whether they contain every change.

use crate::content::Content;
use crate::host::SimHost;
use crate::recover::{examine, header_of};
use isobath_disk::Repair;
use isobath_qcow2::extension::{BitmapsExtension, Extension};
use isobath_qcow2::{
    AutoclearFeatures, Bitmap, BitmapCluster, BitmapFlags, FormatError, HostOffset,
};
use rand::RngExt;
use rand::rngs::SmallRng;
use std::path::Path;

/// Adds a bitmap to an image, which tracks writes and is still empty.
///
/// # Errors
/// The image cannot have one.
pub async fn add(host: &SimHost, image: &Path, rng: &mut SmallRng) -> Result<(), String> {
    let shown =
        |error: &dyn std::fmt::Display| format!("the bitmap of {}: {error}", image.display());
    let mut content = (*host.contents(image)).clone();
    let mut header = header_of(&content).ok_or_else(|| shown(&"there is no header"))?;
    let geometry = header.geometry().map_err(|error| shown(&error))?;
    let cluster = geometry.cluster_size();
    let table_offset = content.len().next_multiple_of(cluster);
    let mut bitmap = Bitmap {
        table_offset: HostOffset::new(table_offset),
        table_size: 0,
        flags: BitmapFlags::AUTO,
        kind: isobath_qcow2::bitmap::DIRTY_TRACKING,
        granularity_bits: rng.random_range(9..=16),
        extra_data: Vec::new(),
        name: b"changes".to_vec(),
    };
    let entries = bitmap.table_size_for(&geometry, header.size);
    bitmap.table_size = u32::try_from(entries).map_err(|error| shown(&error))?;
    let directory_offset = (table_offset + entries * 8).next_multiple_of(cluster);
    let directory = Bitmap::encode_directory(&[bitmap]).map_err(|error| shown(&error))?;
    content.write(directory_offset, &directory);
    content.set_len(content.len().next_multiple_of(cluster));
    header.extensions.push(Extension::Bitmaps(BitmapsExtension {
        count: 1,
        directory_size: directory.len() as u64,
        directory_offset: HostOffset::new(directory_offset),
        reserved: 0,
    }));
    header.autoclear = header.autoclear.with(AutoclearFeatures::BITMAPS);
    // There may be no room for it, with small clusters.
    let Ok(first) = header.encode() else { return Ok(()) };
    content.write(0, &first);
    host.insert(image, content);
    // The new references are counted by a repair.
    let (report, findings) = examine(host, image, Repair::All).await?;
    if report.is_clean() { Ok(()) } else { Err(shown(&findings.join("; "))) }
}

/// What QEMU would conclude from the bitmaps of an image, which tracked writes from the moment when the disk held
/// `was`: the disk as it is, with what a bitmap says has changed as it was. `None` if QEMU would trust none.
///
/// # Errors
/// A bitmap cannot be read.
pub fn unchanged(
    file: &Content,
    now: &Content,
    was: &Content,
) -> Result<Option<Content>, FormatError> {
    let Some(header) = header_of(file) else { return Ok(None) };
    if !header.autoclear.contains(AutoclearFeatures::BITMAPS) {
        return Ok(None);
    }
    let Some(extension) = header.bitmaps() else { return Ok(None) };
    let start = extension.directory_offset.get();
    let directory = file.bytes(start..start + extension.directory_size);
    let bitmaps = Bitmap::parse_directory(&directory, extension.count)?;
    let geometry = header.geometry()?;
    let mut rest = None;
    for bitmap in bitmaps {
        let flags = bitmap.flags;
        if !flags.contains(BitmapFlags::AUTO) || flags.contains(BitmapFlags::IN_USE) {
            continue;
        }
        bitmap.validate(&geometry, header.size)?;
        let rest = rest.get_or_insert_with(|| now.clone());
        let at = bitmap.table_offset.get();
        let table = file.bytes(at..at + u64::from(bitmap.table_size) * 8);
        let cluster = geometry.cluster_size();
        let granularity = 1 << bitmap.granularity_bits;
        let is_set = |bit: u64| -> Result<bool, FormatError> {
            let index = (bit / 8 / cluster) as usize;
            let entry = BitmapCluster::read(&table, index, &geometry).transpose()?;
            Ok(match entry.unwrap_or(BitmapCluster::Zeroes) {
                BitmapCluster::Zeroes => false,
                BitmapCluster::Ones => true,
                BitmapCluster::Data(at) => {
                    let byte = at.get() + bit / 8 % cluster;
                    file.bytes(byte..byte + 1).iter().any(|byte| byte >> (bit % 8) & 1 == 1)
                }
            })
        };
        let parts: Vec<_> = now.data().chain(was.data()).collect();
        for part in parts {
            let mut at = part.start;
            while at < part.end {
                let next = part.end.min((at / granularity + 1) * granularity);
                if is_set(at / granularity)? {
                    rest.write(at, &was.bytes(at..next));
                }
                at = next;
            }
        }
    }
    Ok(rest)
}
