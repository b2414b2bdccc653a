//! Changes of a disk's size that concern the image alone: its L1 table, and what lies past its end.

use super::Writer;
use crate::alloc::TailCut;
use crate::l1_table::L1Table;
use crate::readers::Readers;
use crate::references::referenced;
use crate::tables::References;
use crate::{DiskError, Result, always, invariant};
use isobath_qcow2::header::field;
use isobath_qcow2::{ClusterIndex, ClusterKind, GuestOffset, HostCluster, L1Entry, L2Entry};
use isobath_storage::{IoBuf, Storage};
use std::path::Path;

/// Released references that accumulate before they are committed.
const RELEASES_AT_ONCE: usize = 64 << 10;

impl<S: Storage> Writer<S> {
    /// Ensures that the L1 table has at least `entries` entries.
    pub async fn grow_l1(&self, readers: &Readers, entries: u64) -> Result<()> {
        let qcow2 = self.qcow2.as_ref().ok_or(DiskError::ReadOnly)?;
        let (layer, image) = (&self.layer, qcow2.metadata.layer.qcow2());
        let name = layer.name();
        let geometry = image.geometry;
        let (old_size, old_offset) = {
            let header = image.header.read();
            (u64::from(header.l1_size), header.l1_table_offset)
        };
        if entries <= old_size {
            return Ok(());
        }
        let alloc = &qcow2.metadata.alloc;
        let needed = geometry.clusters_for(entries * 8);
        let run = alloc.allocate_adjacent(needed).await?;
        invariant(run.count == needed, name, "an L1 table gets the clusters that it needs")?;
        let Some(offset) = geometry.host_cluster_start(run.start) else {
            let reason = format!("host cluster {} has no offset", run.start);
            return Err(DiskError::Refused { image: name.to_owned(), reason });
        };
        let mut claim = qcow2.metadata.tables.claim();
        claim.add_run(&run);
        let storage = layer.storage();
        self.exclusively(|| async {
            alloc.publish(claim.clusters()).await?;
            claim.keep();
            alloc.mark_metadata(run.start.get()..run.start.get() + run.count);
            // This covers the new table's refcounts, and every L1 entry that will be copied.
            self.commit_alone(readers).await?;
            let length = (run.count << geometry.cluster_bits()) as usize;
            let table = table_of(&image.l1.read(), length, name)?;
            let table = storage.write_at(offset.get(), table).await?;
            storage.flush().await?;
            let mut fields = IoBuf::zeroed(12);
            fields[..4].copy_from_slice(&(entries as u32).to_be_bytes());
            fields[4..].copy_from_slice(&offset.get().to_be_bytes());
            storage.write_at(field::L1_SIZE as u64, fields).await?;
            storage.flush().await?;
            check_same(&image.l1.read(), &table, name)?;
            let mut header = image.header.write();
            let replaced = (u64::from(header.l1_size), header.l1_table_offset);
            check_stayed(&replaced, &(old_size, old_offset), name)?;
            header.l1_size = entries as u32;
            header.l1_table_offset = offset;
            image.l1.write().grow(entries as usize);
            Ok(())
        })
        .await?;
        let first = geometry.host_cluster_of(old_offset).get();
        let old = first..first + geometry.clusters_for(old_size * 8);
        alloc.unmark_metadata(old.clone());
        let old: Vec<_> = old.map(HostCluster::new).collect();
        alloc.release(&old).await?;
        Ok(())
    }

    /// Releases the clusters that are entirely past the end, and the tables that describe no others.
    pub async fn drop_past(&self, readers: &Readers, size: u64) -> Result<()> {
        let qcow2 = self.qcow2.as_ref().ok_or(DiskError::ReadOnly)?;
        let (layer, image) = (&self.layer, qcow2.metadata.layer.qcow2());
        let name = layer.name();
        let geometry = image.geometry;
        let ends = image.header.read().size == size && layer.visible() <= size;
        invariant(ends, name, "a disk ends before what is past its end is dropped")?;
        let tables = &qcow2.metadata.tables;
        let end = geometry.clusters_for(size);
        let (first_table, _) = geometry.table_position(ClusterIndex::new(end));
        let l1_size = image.l1.read().len() as u64;
        for l1_index in first_table..l1_size {
            let Some((table, owned)) = tables.table(l1_index)? else { continue };
            let Some(first) = geometry.first_cluster_of_l1(l1_index) else { break };
            let start = end.max(first.get());
            let count = first.get() + geometry.l2_entries() - start;
            let entries = tables.entries(ClusterIndex::new(start), count).await?;
            let mut releases = Vec::new();
            for (step, entry) in (0..).zip(&entries) {
                match entry.kind(&geometry) {
                    Ok(kind) if start == first.get() => {
                        releases.extend(referenced(&geometry, &kind));
                    }
                    Ok(ClusterKind::Unallocated) => {}
                    Ok(kind) => {
                        let cluster = start + step;
                        qcow2.ensure_tables(cluster..cluster + 1).await?;
                        let releases = referenced(&geometry, &kind);
                        qcow2.check_releases(&releases)?;
                        let none = L2Entry::unallocated();
                        let references = References::to_nothing_new(&releases);
                        tables.record(ClusterIndex::new(cluster), none, references)?;
                    }
                    // Its meaning is unknown: its space, if any, stays allocated.
                    Err(error) => {
                        let what = "an invalid L2 entry past the end of the disk is left as it is";
                        tracing::warn!(%error, "{what}");
                    }
                }
            }
            if start == first.get() {
                qcow2.check_releases(&releases)?;
                releases.push(geometry.host_cluster_of(table));
                if owned {
                    let cluster = geometry.host_cluster_of(table).get();
                    qcow2.metadata.alloc.unmark_metadata(cluster..cluster + 1);
                }
                check_past(geometry.cluster_start(first), size, name)?;
                tables.drop_table(l1_index, &releases);
            }
            tables.mark_discarded();
            if tables.pending() > RELEASES_AT_ONCE {
                self.commit_alone(readers).await?;
            }
        }
        Ok(())
    }

    /// Truncates the file where its tail is free.
    pub async fn cut_tail(&self) -> Result<()> {
        match &self.qcow2 {
            Some(qcow2) => qcow2.metadata.alloc.cut_tail(TailCut::AllFree).await,
            None => Ok(()),
        }
    }
}

/// The bytes of an L1 table in a place of `length` bytes.
fn table_of(entries: &L1Table, length: usize, name: &Path) -> Result<IoBuf> {
    let mut table = IoBuf::zeroed(length);
    for (index, entry) in entries.iter().enumerate() {
        let written = entry.write(&mut table, index);
        always(written, name, "a longer L1 table has a place for each entry")?;
    }
    Ok(table)
}

/// Checks that a longer L1 table has the entries that are in use now.
fn check_same(entries: &L1Table, table: &[u8], name: &Path) -> Result<()> {
    if cfg!(debug_assertions) {
        let mut now = entries.iter().enumerate();
        let same = now.all(|(index, entry)| L1Entry::read(table, index) == Some(entry));
        invariant(same, name, "the L1 table does not change while a longer one is written")?;
    }
    Ok(())
}

/// Checks that the L1 table that is replaced, its size and offset, is still the one that was copied.
fn check_stayed<T: PartialEq>(replaced: &T, copied: &T, name: &Path) -> Result<()> {
    invariant(replaced == copied, name, "an L1 table stays until a longer one replaces it")
}

/// Checks that a table that is dropped, whose first guest byte is `first`, describes nothing of a disk of `size` bytes.
fn check_past(first: Option<GuestOffset>, size: u64, name: &Path) -> Result<()> {
    let past = first.is_none_or(|first| first.get() >= size);
    invariant(past, name, "a table that is dropped lies past the disk's end")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broken::{must_violate, writer};
    use crate::options::OpenOptions;
    use crate::sabotage::Sabotage;
    use futures_executor::block_on;

    fn table_with(entries: &[L1Entry]) -> L1Table {
        entries.iter().copied().collect()
    }

    #[test]
    fn a_longer_table_has_every_entry() {
        let name = Path::new("disk");
        let entries = [L1Entry::from_raw(1 << 16), L1Entry::from_raw(2 << 16)];
        let table = table_of(&table_with(&entries), 24, name).unwrap();
        check_same(&table_with(&entries), &table, name).unwrap();
        let place = "a longer L1 table has a place for each entry";
        must_violate(table_of(&table_with(&entries), 8, name).map(drop), place);
    }

    #[test]
    #[cfg(debug_assertions)]
    fn a_table_that_changes_meanwhile_is_found() {
        let (name, entry) = (Path::new("disk"), L1Entry::from_raw(1 << 16));
        let table = table_of(&table_with(&[entry]), 16, name).unwrap();
        let same = "the L1 table does not change while a longer one is written";
        must_violate(check_same(&table_with(&[L1Entry::unallocated()]), &table, name), same);
        must_violate(check_same(&table_with(&[entry, entry]), &table, name), same);
    }

    #[test]
    fn only_what_is_past_the_end_is_dropped() {
        let writer = writer(&OpenOptions::new());
        let drop_past = |size| block_on(Box::pin(writer.drop_past(&Readers::default(), size)));
        drop_past(1 << 30).unwrap();
        let ends = "a disk ends before what is past its end is dropped";
        must_violate(drop_past(1 << 20), ends);
    }

    #[test]
    #[cfg(debug_assertions)]
    fn a_longer_table_gets_its_clusters() {
        let writer = writer(&OpenOptions::new());
        let _broken = Sabotage::LongRun.begin();
        let grown = block_on(Box::pin(writer.grow_l1(&Readers::default(), 1 << 16)));
        must_violate(grown, "an L1 table gets the clusters that it needs");
    }

    #[test]
    fn a_table_is_replaced_or_dropped_only_if_it_is_the_one_that_is_meant() {
        let name = Path::new("disk");
        check_stayed(&(1, 2), &(1, 2), name).unwrap();
        let stayed = "an L1 table stays until a longer one replaces it";
        must_violate(check_stayed(&(1, 2), &(1, 3), name), stayed);
        check_past(Some(GuestOffset::new(512)), 512, name).unwrap();
        check_past(None, 512, name).unwrap();
        let past = "a table that is dropped lies past the disk's end";
        must_violate(check_past(Some(GuestOffset::new(511)), 512, name), past);
    }
}
