//! Persistent bitmaps, and whether they contain every change.

use crate::content::Content;
use crate::host::SimHost;
use crate::recover::{examine, header_of};
use isobath_disk::Repair;
use isobath_qcow2::extension::{BitmapsExtension, Extension};
use isobath_qcow2::{AutoclearFeatures, Bitmap, BitmapFlags, HostOffset};
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

/// Whether QEMU would trust the bitmaps of an image. Bitmaps created here have no bit set, and only QEMU sets any.
pub fn claims_no_change(file: &Content) -> bool {
    let Some(header) = header_of(file) else { return false };
    if !header.autoclear.contains(AutoclearFeatures::BITMAPS) {
        return false;
    }
    let Some(extension) = header.bitmaps() else { return false };
    let start = extension.directory_offset.get();
    let directory = file.bytes(start..start + extension.directory_size);
    let Ok(bitmaps) = Bitmap::parse_directory(&directory, extension.count) else { return false };
    bitmaps.iter().any(|bitmap| {
        bitmap.flags.contains(BitmapFlags::AUTO) && !bitmap.flags.contains(BitmapFlags::IN_USE)
    })
}
