//! The check of a VHDX.

use super::{Findings, entries};
use crate::error::Result;
use crate::files::File;
use crate::vhdx::{MIB, Vhdx};
use isobath_storage::Storage;

/// A block's state: all of it is in the file.
const PRESENT: u64 = 6;

impl Vhdx {
    /// Compares the blocks with the file's length, its regions and each other. The headers and tables were checked when
    /// the image was opened, and so was that its log is empty.
    pub(super) async fn check<S: Storage>(
        &self,
        file: &File<S>,
        findings: &mut Findings<'_>,
    ) -> Result<()> {
        let (block, length) = (self.block(), file.length);
        for (number, (start, size)) in self.regions.iter().enumerate() {
            let end = start.saturating_add(*size);
            let others = self.regions.iter().skip(number + 1);
            for (other, size) in
                others.filter(|(other, size)| *other < end && *start < other.saturating_add(*size))
            {
                findings.corruption(format_args!(
                    "VHDX region {start}-{end} overlaps with region {other}-{}",
                    other.saturating_add(*size)
                ));
            }
        }
        let taken = self.taken();
        let mut present = Vec::new();
        let check = |number: u64, entry: [u8; 8]| {
            let entry = u64::from_le_bytes(entry);
            let (state, offset) = (entry & 7, entry & !(MIB - 1));
            let is_bitmap = number % (self.chunk + 1) == self.chunk;
            if state != PRESENT {
                if !is_bitmap && matches!(state, 4 | 7) {
                    findings.corruption(format_args!(
                        "VHDX BAT entry {number} has state {state}, which only an image with a parent may have"
                    ));
                }
                return Ok(());
            }
            let end = offset.checked_add(block);
            if end.is_none() {
                findings.corruption(format_args!("VHDX BAT entry {number} offset overflow."));
            }
            let mut past = |what: &str, at: u64| {
                findings.corruption(format_args!(
                    "VHDX BAT entry {number} {what} offset {at} points after end of file ({length}). Image has \
                     probably been truncated."
                ));
            };
            let end = end.unwrap_or(u64::MAX);
            if offset >= length {
                past("start", offset);
            } else if end > length {
                past("end", end - 1);
            }
            if is_bitmap {
                return Ok(());
            }
            if offset < MIB {
                findings.corruption(format_args!(
                    "VHDX BAT entry {number} offset {offset} is that of the image's headers"
                ));
            }
            // Up to the first range that ends after its start.
            let before = taken.partition_point(|(_, to)| *to <= offset);
            if taken.get(before).is_some_and(|(from, _)| *from < end) {
                let overlapped = |region: &&(u64, u64)| {
                    offset < region.0.saturating_add(region.1) && region.0 < end
                };
                // An image may have 2,047 regions, and in each of many blocks the last one.
                if !findings.tells() {
                    findings.only_counted(1);
                } else if let Some((start, size)) = self.regions.iter().find(overlapped) {
                    findings.corruption(format_args!(
                        "VHDX region {offset}-{end} overlaps with region {start}-{}",
                        start.saturating_add(*size)
                    ));
                }
            }
            present.push(offset);
            Ok(())
        };
        entries(&*file.storage, self.table.offset, self.entries, check).await?;
        present.sort_unstable();
        for pair in present.windows(2) {
            if let [one, other] = *pair
                && other - one < block
            {
                findings.corruption(format_args!(
                    "VHDX blocks at offsets {one} and {other} have {block} bytes each, and overlap"
                ));
            }
        }
        Ok(())
    }

    /// What the regions take of the file: ranges in order that do not touch.
    fn taken(&self) -> Vec<(u64, u64)> {
        let ranges = self.regions.iter().filter(|(_, size)| *size > 0);
        let mut ranges: Vec<_> =
            ranges.map(|(start, size)| (*start, start.saturating_add(*size))).collect();
        ranges.sort_unstable();
        ranges.dedup_by(|next, last| {
            let touches = next.0 <= last.1;
            if touches {
                last.1 = last.1.max(next.1);
            }
            touches
        });
        ranges
    }
}
