//! The check of a QED, and its repair.

use super::used::Used;
use super::{Findings, MOST_TOLD, entries, piece};
use crate::error::{Error, Result};
use crate::files::File;
use crate::qed::Qed;
use isobath_storage::{IoBuf, Storage};

/// An entry of an L2 table that stands for zeroes.
const ZERO: u64 = 1;

/// Entries that refer to no cluster of the file.
#[derive(Default)]
struct Wrong {
    count: u64,
    /// The first ones: the L1 entry if it is of an L2 table, its number and its value.
    told: Vec<(Option<u64>, u64, u64)>,
}

impl Wrong {
    fn note(&mut self, l1: Option<u64>, number: u64, offset: u64) {
        self.count += 1;
        if self.count <= MOST_TOLD {
            self.told.push((l1, number, offset));
        }
    }

    fn tell(&self, findings: &mut Findings<'_>) {
        for (l1, number, offset) in &self.told {
            let wrong = format_args!("refers to offset {offset:#x}, where the file has no cluster");
            match l1 {
                None => findings.corruption(format_args!("ERROR: L1 entry {number} {wrong}")),
                Some(l1) => findings.corruption(format_args!(
                    "ERROR: entry {number} of the L2 table of L1 entry {l1} {wrong}"
                )),
            }
        }
        findings.only_counted(self.count - self.told.len() as u64);
    }
}

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
        let mut wrong = Wrong::default();
        let mut first = 0;
        while first < self.entries {
            let bytes = piece::<S, 8>(&file.storage, self.l1.offset, first, self.entries).await?;
            let (all, _) = bytes.as_chunks::<8>();
            for (l1, entry) in (first..).zip(all) {
                let table = u64::from_le_bytes(*entry);
                if table == 0 {
                    continue;
                }
                if !self.holds_table(table) {
                    wrong.note(None, l1, table);
                    continue;
                }
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
                    let follows = |last: u64| last.checked_add(self.cluster()) == Some(offset);
                    if last.is_some_and(|last| !follows(last)) {
                        findings.found.fragmented += 1;
                    }
                    last = Some(offset);
                    if !self.holds(offset, self.cluster()) {
                        wrong.note(Some(l1), number, offset);
                        return Ok(());
                    }
                    self.take(&mut used, offset, 1, findings).map(drop).ok_or_else(too_many)
                })
                .await?;
            }
            first += all.len() as u64;
        }
        let (first, end) = (self.header / self.cluster(), self.end / self.cluster());
        findings.found.leaks = used.free(first, end);
        // What is in one place with something else may not be a table: nothing is written there.
        if !repair || findings.found.corruptions > 0 {
            wrong.tell(findings);
            return Ok(());
        }
        if self.is_to_be_cleared() {
            let none = IoBuf::zeroed(8);
            file.storage.write_at(Self::AUTOCLEAR_FEATURES, none).await?;
            file.storage.flush().await?;
        }
        if wrong.count > 0 {
            self.clear_wrong(file, findings).await?;
        }
        self.mark_closed(file, findings).await
    }

    /// Clears the entries that refer to no cluster of the file. No table is in one place with anything else.
    async fn clear_wrong<S: Storage>(
        &self,
        file: &File<S>,
        findings: &mut Findings<'_>,
    ) -> Result<()> {
        let mut first = 0;
        while first < self.entries {
            let is_wrong = |entry| entry != 0 && !self.holds_table(entry);
            let at = self.l1.offset;
            let bytes = self.clear_in_piece(file, at, first, findings, is_wrong).await?;
            let (all, _) = bytes.as_chunks::<8>();
            for entry in all {
                let table = u64::from_le_bytes(*entry);
                let mut first = 0;
                while table != 0 && first < self.entries {
                    let is_wrong =
                        |entry| entry != 0 && entry != ZERO && !self.holds(entry, self.cluster());
                    let bytes = self.clear_in_piece(file, table, first, findings, is_wrong).await?;
                    first += bytes.len() as u64 / 8;
                }
            }
            first += all.len() as u64;
        }
        Ok(())
    }

    /// Clears the entries that are wrong in a piece of a table. Returns the piece as it is then.
    async fn clear_in_piece<S: Storage>(
        &self,
        file: &File<S>,
        table: u64,
        first: u64,
        findings: &mut Findings<'_>,
        is_wrong: impl Fn(u64) -> bool,
    ) -> Result<IoBuf> {
        let mut bytes = piece::<S, 8>(&file.storage, table, first, self.entries).await?;
        let mut cleared = 0;
        let (all, _) = bytes.as_chunks_mut::<8>();
        for entry in all {
            if is_wrong(u64::from_le_bytes(*entry)) {
                *entry = [0; 8];
                cleared += 1;
            }
        }
        if cleared > 0 {
            file.storage.write_at(table + first * 8, IoBuf::copy_of(&bytes)).await?;
            findings.found.corruptions_fixed += cleared;
        }
        Ok(bytes)
    }

    /// Whether a table may begin at this offset.
    fn holds_table(&self, offset: u64) -> bool {
        self.holds(offset, self.table_clusters() * self.cluster())
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
            findings.corruption(format_args!(
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
