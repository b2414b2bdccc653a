//! Building a commit's record.

use crate::Result;
use crate::alloc::{Allocator, Staged};
use crate::durability::data_journal::ChecksummedRange;
use crate::pieces::JournaledWrite;
use crate::sabotage::{self, Sabotage};
use crate::tables::{ClosedBatch, StagedTables};
use futures_util::future::try_join_all;
use isobath_qcow2::journal::{HEAD_BYTES, Operation, Record, Zones};
use isobath_qcow2::{Crc32c, HostCluster, HostOffset, Lsn};
use isobath_storage::{IoBuf, Storage};
use std::collections::{BTreeMap, BTreeSet};

/// The most bytes that a change takes in a record: an entry, a checksum, and refcounts taken and released.
pub(super) const BYTES_PER_CHANGE: usize = 160;

/// An operation without its payload, and the most padding that it gets.
pub(super) const OPERATION: u64 = 16 + 8;

/// The most bytes that a record with all of this takes.
pub(super) async fn estimate<S: Storage>(
    tables: &StagedTables,
    alloc: &Allocator<S>,
    batch: &ClosedBatch,
    checksums: &[ChecksummedRange],
    writes: &[JournaledWrite],
) -> u64 {
    let patches: u64 = tables.patches.iter().map(|(_, bytes)| OPERATION + bytes.len() as u64).sum();
    let data: u64 = writes.iter().map(|write| OPERATION + write.bytes.len() as u64).sum();
    let small =
        tables.fresh.len() + batch.allocated.len() + 2 * batch.releases.len() + checksums.len();
    let refcounts = alloc.staged_bytes().await;
    HEAD_BYTES as u64 + patches + data + small as u64 * (OPERATION + 8) + refcounts
}

/// A record being built.
pub(super) struct Builder {
    cluster_size: u64,
    record: Record,
    clusters: BTreeSet<u64>,
}

impl Builder {
    pub(super) fn new(cluster_size: u64, lsn: Lsn, previous: Lsn, tail: Lsn) -> Self {
        let record = Record { lsn, previous, tail, data_from: tail, operations: Vec::new() };
        Self { cluster_size, record, clusters: BTreeSet::new() }
    }

    /// Revokes earlier records' operations on clusters that become free.
    pub(super) fn revoke<'a>(
        &mut self,
        last: &BTreeMap<u64, Lsn>,
        released: impl Iterator<Item = &'a HostCluster>,
    ) {
        let tail = self.record.tail;
        for cluster in released {
            let replayed = last.get(&cluster.get()).is_some_and(|last| *last >= tail);
            if replayed && !sabotage::is(Sabotage::NoRevoke) {
                self.record.operations.push(Operation::Revoke {
                    offset: HostOffset::new(cluster.get() * self.cluster_size),
                    length: self.cluster_size as u32,
                });
            }
        }
    }

    pub(super) fn tables(&mut self, staged: &StagedTables) {
        for &at in &staged.fresh {
            self.zero(at, self.cluster_size);
        }
        for (at, bytes) in &staged.patches {
            self.patch(*at, bytes.clone());
        }
    }

    pub(super) fn refcounts(&mut self, staged: &Staged) {
        for &(at, length) in &staged.fresh {
            self.zero(at, length);
        }
        for (at, bytes) in &staged.patches {
            self.patch(*at, bytes.to_vec());
        }
    }

    /// Adds data that is not in place.
    pub(super) fn data(&mut self, writes: &[JournaledWrite]) {
        for JournaledWrite { at, bytes } in writes {
            self.tell(*at, bytes.len() as u64);
            let offset = HostOffset::new(*at);
            self.record.operations.push(Operation::Data { offset, bytes: bytes.clone() });
        }
    }

    /// Adds checksums of data that is in place; data without a checksum is read back.
    pub(super) async fn add_checksums<S: Storage>(
        &mut self,
        data: &S,
        checksums: Vec<ChecksummedRange>,
    ) -> Result<()> {
        let sums = checksums.into_iter().map(|ChecksummedRange { range, crc, .. }| async move {
            let length = (range.end - range.start) as u32;
            let crc = match crc {
                Some(crc) => crc,
                None => {
                    Crc32c::of(&data.read_at(range.start, IoBuf::zeroed(length as usize)).await?)
                }
            };
            Ok::<_, crate::DiskError>(Operation::Checksum {
                offset: HostOffset::new(range.start),
                length,
                crc,
            })
        });
        self.record.operations.extend(try_join_all(sums).await?);
        Ok(())
    }

    /// Adds the list of zones, if there may be any.
    pub(super) fn zones(&mut self, zones: Option<Zones>) {
        self.record.operations.extend(zones.map(Operation::Zones));
    }

    /// The clusters that the record has operations on, and the record.
    pub(super) fn finish(self) -> (BTreeSet<u64>, Record) {
        (self.clusters, self.record)
    }

    fn zero(&mut self, at: u64, length: u64) {
        self.tell(at, length);
        let (mut at, end) = (at, at + length);
        while at < end {
            // A refcount table may be too long for one operation.
            let length = (end - at).min(1 << 30) as u32;
            self.record.operations.push(Operation::Zero { offset: HostOffset::new(at), length });
            at += u64::from(length);
        }
    }

    fn patch(&mut self, at: u64, bytes: Vec<u8>) {
        self.tell(at, bytes.len() as u64);
        self.record.operations.push(Operation::Patch { offset: HostOffset::new(at), bytes });
    }

    fn tell(&mut self, at: u64, length: u64) {
        let size = self.cluster_size;
        self.clusters.extend(at / size..(at + length).div_ceil(size));
    }
}
