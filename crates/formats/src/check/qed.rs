//! The check of a QED, and its repair.

use super::used::Used;
use super::{Findings, entries};
use crate::error::{Error, Result};
use crate::files::File;
use crate::qed::Qed;
use isobath_storage::{IoBuf, Storage};

/// An entry of an L2 table that stands for zeroes.
const ZERO: u64 = 1;

impl Qed {
    /// Counts what refers to each of the file's clusters. With `repair`, entries that refer to no cluster of the file
    /// are cleared, and an image without errors is marked as closed.
    pub(super) async fn check<S: Storage>(
        &self,
        file: &File<S>,
        size: u64,
        repair: bool,
        findings: &mut Findings<'_>,
    ) -> Result<()> {
        let mut used = Used::default();
        let too_many = || -> Error {
            let reason = "its clusters are in too many pieces to be checked in memory";
            file.blame().unsupported("file", format!("{} bytes", file.length), reason)
        };
        let clusters = self.table_clusters();
        findings.found.total = size.div_ceil(self.cluster());
        self.take(&mut used, self.l1.offset, clusters, findings).ok_or_else(too_many)?;
        let mut tables = Vec::new();
        let mut wrong = Vec::new();
        entries(&*file.storage, self.l1.offset, self.entries, |number, entry: [u8; 8]| {
            let offset = u64::from_le_bytes(entry);
            if offset == 0 {
            } else if !self.holds(offset, clusters * self.cluster()) {
                wrong.push((self.l1.offset + number * 8, format!("L1 entry {number}"), offset));
            } else {
                tables.push((number, offset));
            }
            Ok(())
        })
        .await?;
        for (l1, table) in tables {
            // What another one is in is not one.
            if !self.take(&mut used, table, clusters, findings).ok_or_else(too_many)? {
                continue;
            }
            let mut last = None;
            entries(&*file.storage, table, self.entries, |number, entry: [u8; 8]| {
                let offset = u64::from_le_bytes(entry);
                if offset == 0 || offset == ZERO {
                    return Ok(());
                }
                findings.found.allocated += 1;
                if last.is_some_and(|last: u64| last.checked_add(self.cluster()) != Some(offset)) {
                    findings.found.fragmented += 1;
                }
                last = Some(offset);
                if !self.holds(offset, self.cluster()) {
                    let what = format!("entry {number} of the L2 table of L1 entry {l1}");
                    wrong.push((table + number * 8, what, offset));
                    return Ok(());
                }
                self.take(&mut used, offset, 1, findings).map(drop).ok_or_else(too_many)
            })
            .await?;
        }
        // What is in one place with something else may not be a table: nothing is written there.
        let repair = repair && findings.found.corruptions == 0;
        for (_, what, offset) in &wrong {
            if repair {
                findings.found.corruptions_fixed += 1;
            } else {
                findings.corruption(&format!(
                    "ERROR: {what} refers to offset {offset:#x}, where the file has no cluster"
                ));
            }
        }
        let (first, end) = (self.header / self.cluster(), self.end / self.cluster());
        findings.found.leaks = used.free(first, end);
        if repair {
            for (at, _, _) in &wrong {
                file.storage.write_at(*at, IoBuf::zeroed(8)).await?;
            }
            self.mark_closed(file, findings).await?;
        }
        Ok(())
    }

    /// Takes clusters of the file. Returns whether nothing else had them; `None` if they are in too many pieces.
    fn take(
        &self,
        used: &mut Used,
        offset: u64,
        clusters: u64,
        findings: &mut Findings<'_>,
    ) -> Option<bool> {
        let twice = used.take(offset / self.cluster(), clusters)?;
        for _ in 0..twice {
            findings.corruption(&format!(
                "ERROR: what is at offset {offset:#x} is referred to more than once"
            ));
        }
        Some(twice == 0)
    }

    async fn mark_closed<S: Storage>(&self, file: &File<S>, findings: &Findings<'_>) -> Result<()> {
        // What was repaired is durable before anybody relies on it.
        file.storage.flush().await?;
        if !self.is_dirty() || findings.found.corruptions > 0 {
            return Ok(());
        }
        let features = self.features_when_closed().to_le_bytes();
        file.storage.write_at(Self::FEATURES, IoBuf::copy_of(&features)).await?;
        Ok(file.storage.flush().await?)
    }
}
