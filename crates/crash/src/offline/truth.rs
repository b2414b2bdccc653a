//! What a disk, its snapshots and its bitmaps are.

use crate::content::Content;
use crate::host::{Conduct, SimHost};
use crate::image::{IMAGE, Kept, show_snapshot};
use crate::look::look;
use crate::record::Files;
use crate::recover::header_of;
use isobath_disk::{Disk, DiskError, InfoOptions, OpenOptions, info, read_bitmap};
use isobath_image::snapshot_table::read_snapshots;
use isobath_storage::{Host, OpenMode, Storage};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// What the disk, its snapshots and its bitmaps are.
#[derive(Clone, Debug)]
pub(super) struct Truth {
    pub(super) disk: Arc<Content>,
    pub(super) snapshots: Vec<(String, Arc<Content>)>,
    pub(super) bitmaps: Vec<Marked>,
    /// What a command does that writes to the disk: enabled bitmaps may have more bits.
    pub(super) may_mark_more: bool,
    /// What a crash of such a command does: enabled bitmaps are lost, and say so.
    pub(super) may_lose_bitmaps: bool,
}

/// A bitmap.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Marked {
    pub(super) name: String,
    /// `None` if it is inconsistent.
    pub(super) ranges: Option<Vec<Range<u64>>>,
    pub(super) enabled: bool,
}

impl Marked {
    /// Whether the bitmap has all of the other's bits, and is consistent if that is.
    fn covers(&self, other: &Self) -> bool {
        let Some(ranges) = &self.ranges else { return false };
        let covered = |part: &Range<u64>| {
            ranges.iter().any(|range| range.start <= part.start && part.end <= range.end)
        };
        other.ranges.iter().flatten().all(covered)
    }
}

impl Truth {
    pub(super) fn snapshot(&self, name: &str) -> Option<&Arc<Content>> {
        self.snapshots.iter().find(|(other, _)| other == name).map(|(_, content)| content)
    }

    /// As files have it.
    pub(super) async fn read(files: &Files) -> Result<Self, String> {
        let (image, options) = (Path::new(IMAGE), OpenOptions::new());
        let disk = read_disk(files, image, &options).await?;
        let host = SimHost::new(files.clone(), Conduct::default());
        let found = async {
            let file = host.any().open(Path::new(IMAGE), OpenMode::default()).await?;
            let length = file.len().await?;
            let content = host.contents(IMAGE);
            let Some(header) = header_of(&content) else { return Ok(Vec::new()) };
            read_snapshots(&file, Path::new(IMAGE), &header, length).await
        };
        let found = found.await.map_err(|error| format!("the snapshot table: {error}"))?;
        let mut snapshots = Vec::new();
        for snapshot in found {
            let kept = Kept {
                l1_offset: snapshot.l1_table_offset.get(),
                l1_size: snapshot.l1_size,
                content: Arc::new(Content::zeroes(snapshot.disk_size.unwrap_or(disk.len()))),
            };
            let name = snapshot.name_text();
            let shown = show_snapshot(files, image, &kept);
            let content = read_disk(&shown, image, &options).await;
            snapshots.push((name.clone(), content.map_err(|error| format!("{name}: {error}"))?));
        }
        let bitmaps = read_bitmaps(&host).await.map_err(|error| format!("the bitmaps: {error}"))?;
        Ok(Self { disk, snapshots, bitmaps, may_mark_more: false, may_lose_bitmaps: false })
    }
}

async fn read_bitmaps(host: &SimHost) -> Result<Vec<Marked>, DiskError> {
    let (image, options) = (Path::new(IMAGE), OpenOptions::new());
    let found = info(&host.any(), image, &InfoOptions::default()).await?.qcow2;
    let mut bitmaps = Vec::new();
    for bitmap in found.into_iter().flat_map(|qcow2| qcow2.bitmaps) {
        let ranges = if bitmap.in_use {
            None
        } else {
            let bits = read_bitmap(&host.any(), image, &options, &bitmap.name).await?;
            Some(bits.ranges().collect())
        };
        bitmaps.push(Marked { name: bitmap.name, ranges, enabled: bitmap.auto });
    }
    Ok(bitmaps)
}

pub(super) async fn read_disk(
    files: &Files,
    image: &Path,
    options: &OpenOptions,
) -> Result<Arc<Content>, String> {
    let host = SimHost::new(files.clone(), Conduct::default());
    let disk = Disk::open(host.any(), image, options).await;
    let disk = disk.map_err(|error| format!("it could not be opened read-only: {error}"))?;
    let read = look(&disk, &[]).await;
    Ok(Arc::new(read.map_err(|error| format!("it could not be read: {error}"))?.content))
}

/// The first difference, as an error.
pub(super) fn differ(when: &str, found: &Truth, wanted: &Truth) -> Result<(), String> {
    if let Some(at) = found.disk.first_difference(&wanted.disk) {
        return Err(format!("{when}, the disk differs at byte {at}"));
    }
    let names = |truth: &Truth| truth.snapshots.iter().map(|(name, _)| name.clone()).collect();
    let (found_names, wanted_names): (Vec<_>, Vec<_>) = (names(found), names(wanted));
    if found_names != wanted_names {
        return Err(format!("{when}, there are {found_names:?} and not {wanted_names:?}"));
    }
    let (may_lose, wanted_may_mark) = (wanted.may_lose_bitmaps, wanted.may_mark_more);
    let lost = |found: &Marked, wanted: &Marked| {
        let lost = Marked { ranges: None, ..wanted.clone() };
        may_lose && wanted.enabled && *found == lost
    };
    let more = |found: &Marked, wanted: &Marked| {
        let more = Marked { ranges: found.ranges.clone(), ..wanted.clone() };
        wanted_may_mark && wanted.enabled && *found == more && found.covers(wanted)
    };
    let same = |(found, wanted): (&Marked, &Marked)| {
        found == wanted || lost(found, wanted) || more(found, wanted)
    };
    let count = found.bitmaps.len() == wanted.bitmaps.len();
    if !count || !found.bitmaps.iter().zip(&wanted.bitmaps).all(same) {
        let (found, wanted) = (&found.bitmaps, &wanted.bitmaps);
        return Err(format!("{when}, the bitmaps are {found:?} and not {wanted:?}"));
    }
    for ((name, found), (_, wanted)) in found.snapshots.iter().zip(&wanted.snapshots) {
        if let Some(at) = found.first_difference(wanted) {
            return Err(format!("{when}, the snapshot {name} differs at byte {at}"));
        }
    }
    Ok(())
}
