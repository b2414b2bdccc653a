//! A plain reader of whole images in memory, made of nothing but the format.

use isobath_qcow2::compress::decompress;
use isobath_qcow2::{
    ClusterKind, Geometry, GuestOffset, Header, HostCluster, HostOffset, L1Entry, L2Entry,
    RefcountTableEntry, Snapshot,
};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

/// An image file, read whole.
pub(crate) struct Image {
    pub(crate) bytes: Vec<u8>,
    pub(crate) header: Header,
    pub(crate) geometry: Geometry,
}

impl Image {
    pub(crate) fn read(path: &Path) -> Self {
        let bytes = fs::read(path).unwrap();
        let header = Header::parse(&bytes).unwrap();
        let geometry = header.geometry().unwrap();
        Self { bytes, header, geometry }
    }

    /// Bytes of the file; zeroes past its end.
    pub(crate) fn at(&self, offset: HostOffset, length: u64) -> Vec<u8> {
        let start = (offset.get() as usize).min(self.bytes.len());
        let end = (start + length as usize).min(self.bytes.len());
        let mut bytes = self.bytes[start..end].to_vec();
        bytes.resize(length as usize, 0);
        bytes
    }

    pub(crate) fn first_cluster(&self) -> &[u8] {
        &self.bytes[..self.geometry.cluster_size() as usize]
    }

    pub(crate) fn cluster(&self, offset: HostOffset) -> Vec<u8> {
        self.at(offset, self.geometry.cluster_size())
    }

    fn active_l1(&self) -> Vec<u8> {
        self.at(self.header.l1_table_offset, u64::from(self.header.l1_size) * 8)
    }

    pub(crate) fn snapshots(&self) -> Vec<Snapshot> {
        let table = &self.bytes[self.header.snapshots_offset.get() as usize..];
        Snapshot::parse_table(table, self.header.nb_snapshots).unwrap().0
    }

    /// The disk without its backing file: every byte, with `data_file` where the image has one.
    pub(crate) fn disk(&self, data_file: Option<&[u8]>) -> Vec<u8> {
        let size = self.header.disk_size();
        let mut disk = Vec::new();
        let l1 = self.active_l1();
        let mut offset = GuestOffset::new(0);
        while offset.get() < size {
            let kind = self.kind(&l1, offset);
            kind.check_data_file(offset, &self.geometry).unwrap();
            disk.extend(self.content(kind, data_file));
            offset = offset.checked_add(self.geometry.cluster_size()).unwrap();
        }
        disk.truncate(size as usize);
        disk
    }

    fn kind(&self, l1: &[u8], offset: GuestOffset) -> ClusterKind {
        let position = self.geometry.position(offset);
        let entry = L1Entry::read(l1, position.l1_index as usize).unwrap();
        assert_eq!(entry.reserved_bits(), 0);
        let Some(table) = entry.offset(&self.geometry).unwrap() else {
            return ClusterKind::Unallocated;
        };
        let table = self.cluster(table);
        let entry = L2Entry::read(&table, position.l2_index, &self.geometry).unwrap();
        assert_eq!(entry.reserved_bits(&self.geometry), (0, 0));
        entry.kind(&self.geometry).unwrap()
    }

    fn content(&self, kind: ClusterKind, data_file: Option<&[u8]>) -> Vec<u8> {
        let size = self.geometry.cluster_size();
        let stored = |offset: HostOffset| match data_file {
            Some(file) => {
                let start = (offset.get() as usize).min(file.len());
                let mut bytes = file[start..(start + size as usize).min(file.len())].to_vec();
                bytes.resize(size as usize, 0);
                bytes
            }
            None => self.cluster(offset),
        };
        let mut bytes = vec![0; size as usize];
        match kind {
            ClusterKind::Unallocated
            | ClusterKind::ZeroPlain
            | ClusterKind::ZeroAllocated { .. } => {}
            ClusterKind::Data { offset, .. } => bytes = stored(offset),
            ClusterKind::Compressed(c) => {
                let input = self.at(c.offset, c.length);
                decompress(self.header.compression_type, &input, &mut bytes).unwrap();
            }
            ClusterKind::Subclusters { offset, allocated, .. } => {
                let size = self.geometry.subcluster_size() as usize;
                for n in (0..32usize).filter(|n| allocated >> n & 1 != 0) {
                    let range = n * size..(n + 1) * size;
                    bytes[range.clone()].copy_from_slice(&stored(offset.unwrap())[range]);
                }
            }
        }
        bytes
    }

    /// The refcount of every host cluster that the tables of active disk, snapshots and refcounts
    /// refer to.
    pub(crate) fn references(&self) -> BTreeMap<HostCluster, u64> {
        let g = &self.geometry;
        let mut references = BTreeMap::new();
        let mut add = |offset: HostOffset, length: u64| {
            let last = HostOffset::new(offset.get() + length.max(1) - 1);
            for cluster in g.host_cluster_of(offset).get()..=g.host_cluster_of(last).get() {
                if length > 0 {
                    *references.entry(HostCluster::new(cluster)).or_insert(0) += 1;
                }
            }
        };
        add(HostOffset::new(0), g.cluster_size());
        let length = u64::from(self.header.refcount_table_clusters) * g.cluster_size();
        add(self.header.refcount_table_offset, length);
        for block in self.refcount_blocks().into_iter().flatten() {
            add(block, g.cluster_size());
        }
        let mut l1_tables = vec![(self.header.l1_table_offset, self.header.l1_size)];
        if self.header.nb_snapshots > 0 {
            let snapshots = self.snapshots();
            let length = Snapshot::encode_table(&snapshots).unwrap().len();
            add(self.header.snapshots_offset, length as u64);
            l1_tables.extend(snapshots.iter().map(|s| (s.l1_table_offset, s.l1_size)));
        }
        for (offset, entries) in l1_tables {
            let bytes = self.at(offset, u64::from(entries) * 8);
            add(offset, bytes.len() as u64);
            for index in 0..entries as usize {
                let entry = L1Entry::read(&bytes, index).unwrap();
                let Some(table) = entry.offset(g).unwrap() else { continue };
                add(table, g.cluster_size());
                let table = self.cluster(table);
                for index in 0..g.l2_entries() as usize {
                    let entry = L2Entry::read(&table, index, g).unwrap();
                    match entry.kind(g).unwrap() {
                        ClusterKind::Compressed(c) => add(c.offset, c.length),
                        kind => {
                            if let Some(offset) = kind.host_cluster()
                                && !g.has_data_file()
                            {
                                add(offset, g.cluster_size());
                            }
                        }
                    }
                }
            }
        }
        references
    }

    fn refcount_blocks(&self) -> Vec<Option<HostOffset>> {
        let clusters = u64::from(self.header.refcount_table_clusters);
        let table =
            self.at(self.header.refcount_table_offset, clusters * self.geometry.cluster_size());
        (0..table.len() / 8)
            .map(|index| {
                let entry = RefcountTableEntry::read(&table, index).unwrap();
                assert_eq!(entry.reserved_bits(), 0);
                entry.offset(&self.geometry).unwrap()
            })
            .collect()
    }

    /// The refcounts stored in the image that are not 0.
    pub(crate) fn refcounts(&self) -> BTreeMap<HostCluster, u64> {
        let g = &self.geometry;
        let mut refcounts = BTreeMap::new();
        for (index, block) in self.refcount_blocks().into_iter().enumerate() {
            let Some(block) = block else { continue };
            let block = self.cluster(block);
            for at in 0..g.refcount_block_entries() {
                let count = g.refcount_order().read(&block, at as usize).unwrap();
                let cluster = HostCluster::new(index as u64 * g.refcount_block_entries() + at);
                assert_eq!(g.refcount_position(cluster), (index as u64, at as usize));
                if count != 0 {
                    refcounts.insert(cluster, count);
                }
            }
        }
        refcounts
    }
}

/// Writes pieces to a new sparse file of this length.
pub(crate) fn write_file(
    path: &Path,
    pieces: impl IntoIterator<Item = (HostOffset, Vec<u8>)>,
    length: u64,
) {
    let mut file = File::create(path).unwrap();
    for (offset, bytes) in pieces {
        file.seek(SeekFrom::Start(offset.get())).unwrap();
        file.write_all(&bytes).unwrap();
    }
    assert!(file.metadata().unwrap().len() <= length.max(4096));
    file.set_len(length).unwrap();
}

/// Overwrites bytes of a file.
pub(crate) fn patch(path: &Path, offset: u64, bytes: &[u8]) {
    let mut file = File::options().write(true).open(path).unwrap();
    file.seek(SeekFrom::Start(offset)).unwrap();
    file.write_all(bytes).unwrap();
}
