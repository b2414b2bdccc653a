//! Writes to parts of sectors of an encrypted image, which can only be written whole.

use crate::disk::Disk;
use isobath_image::Result;
use isobath_image::encryption::SECTOR;
use isobath_image::writer::{Qcow2Writer, Writer};
use isobath_storage::{Host, IoBuf};
use std::ops::Range;

/// Whether a range consists of whole sectors.
pub(super) fn are_whole(range: Range<u64>) -> bool {
    range.start.is_multiple_of(SECTOR) && range.end.is_multiple_of(SECTOR)
}

impl<H: Host> Disk<H> {
    /// Reads the rest of the first and the last sector, and writes all of them.
    pub(super) async fn write_parts_of_sectors(
        &self,
        writer: &Writer<H::File>,
        qcow2: &Qcow2Writer<H::File>,
        offset: u64,
        buf: IoBuf,
    ) -> Result<IoBuf> {
        writer.commit_if_much(&self.readers).await?;
        let size = qcow2.geometry().cluster_size();
        let end = offset + buf.len() as u64;
        let _range = writer.ranges.lock(offset / size * size..end.next_multiple_of(size)).await;
        let _pass = self.readers.epoch.enter();
        self.check_visible(offset..end)?;
        // The disk is a whole number of sectors.
        let sectors = offset / SECTOR * SECTOR..end.next_multiple_of(SECTOR);
        let mut whole = IoBuf::zeroed((sectors.end - sectors.start) as usize);
        for at in [sectors.start, sectors.end - SECTOR] {
            let extents = self.extents(at..at + SECTOR).await?;
            let sector = self.read_extents(&extents, IoBuf::zeroed(SECTOR as usize)).await?;
            whole[(at - sectors.start) as usize..][..SECTOR as usize].copy_from_slice(&sector);
        }
        buf.copy_to(&mut whole[(offset - sectors.start) as usize..][..buf.len()]);
        self.write_clusters(qcow2, sectors.start, whole).await?;
        Ok(buf)
    }
}
