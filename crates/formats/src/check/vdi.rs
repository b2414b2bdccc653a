//! The check of a VDI.

use super::{Findings, entries};
use crate::error::Result;
use crate::files::File;
use crate::vdi::{BLOCK, FIRST_SPECIAL, Vdi};
use isobath_storage::Storage;

impl Vdi {
    /// Compares the block map's entries with each other, with the number of blocks and with the file's length, and
    /// counts them.
    pub(super) async fn check<S: Storage>(
        &self,
        file: &File<S>,
        size: u64,
        findings: &mut Findings<'_>,
    ) -> Result<()> {
        // The number of blocks has a limit.
        let mut used = vec![0_u64; self.blocks.div_ceil(64) as usize];
        let mut allocated = 0_u64;
        entries(&*file.storage, self.table.offset, self.blocks, |block, entry: [u8; 4]| {
            let entry = u64::from(u32::from_le_bytes(entry));
            if entry >= FIRST_SPECIAL {
                return Ok(());
            }
            let Some(word) = used.get_mut((entry / 64) as usize).filter(|_| entry < self.blocks)
            else {
                findings.corruption(format_args!("ERROR: block index {block} too large, is {entry}"));
                return Ok(());
            };
            allocated += 1;
            let bit = 1 << (entry % 64);
            if *word & bit != 0 {
                findings.corruption(format_args!("ERROR: block index {entry} also used by {entry}"));
            }
            *word |= bit;
            let offset = self.data + entry * BLOCK;
            if offset >= file.length {
                findings.corruption(format_args!(
                    "ERROR: block index {block} at offset {offset} points after end of file ({})",
                    file.length
                ));
                return Ok(());
            }
            // The disk may end within its last block.
            let end = offset + BLOCK.min(size.saturating_sub(block * BLOCK));
            if end > file.length {
                findings.corruption(format_args!(
                    "ERROR: block index {block} at offset {offset} ends at {end}, after end of file ({})",
                    file.length
                ));
            }
            Ok(())
        })
        .await?;
        if allocated != self.allocated {
            findings.corruption(format_args!(
                "ERROR: allocated blocks mismatch, is {allocated}, should be {}",
                self.allocated
            ));
        }
        Ok(())
    }
}
