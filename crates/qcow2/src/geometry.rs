//! The sizes and the arithmetic that follow from a header.

use crate::error::FormatError;
use crate::offset::{ClusterIndex, GuestOffset, HostCluster, HostOffset};
use crate::refcount_order::RefcountOrder;

/// Smallest `cluster_bits`: 512-byte clusters.
pub const MIN_CLUSTER_BITS: u32 = 9;
/// Largest `cluster_bits`: 2 MiB clusters (QEMU's limit).
pub const MAX_CLUSTER_BITS: u32 = 21;
/// Smallest `cluster_bits` with extended L2 entries: 16 KiB clusters.
pub const MIN_CLUSTER_BITS_EXTENDED_L2: u32 = 14;
/// Subclusters in a cluster with extended L2 entries.
pub const SUBCLUSTERS: u32 = 32;
/// Largest L1 table, in bytes (QEMU's limit).
pub const MAX_L1_BYTES: u64 = 32 << 20;
/// Largest refcount table, in bytes (QEMU's limit).
pub const MAX_REFCOUNT_TABLE_BYTES: u64 = 8 << 20;
/// Host offsets in L1 and L2 entries are below this.
pub const HOST_OFFSET_LIMIT: u64 = 1 << 56;

/// The properties of an image's layout that follow from its header. Small and `Copy`, to be handed to everything that
/// reads tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    cluster_bits: u8,
    /// Bits of a guest cluster number that index an L2 table.
    l2_bits: u8,
    version: u8,
    extended_l2: bool,
    has_data_file: bool,
    refcount_order: RefcountOrder,
}

/// The table entry for a guest offset, and the position in its cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestPosition {
    /// Index into the L1 table. May be past its end.
    pub l1_index: u64,
    /// Index into the L2 table that the L1 entry names, in entries.
    pub l2_index: usize,
    /// Bytes from the cluster's start.
    pub in_cluster: u64,
}

impl Geometry {
    /// The layout of an image with these header fields.
    ///
    /// # Errors
    /// If the version is neither 2 nor 3, `cluster_bits` is not 9 to 21 (14 to 21 with extended L2
    /// entries), or `refcount_order` exceeds 6.
    pub fn new(
        version: u32,
        cluster_bits: u32,
        refcount_order: u32,
        extended_l2: bool,
        has_data_file: bool,
    ) -> Result<Self, FormatError> {
        if !(2..=3).contains(&version) {
            return Err(FormatError::unsupported(
                "version",
                version,
                "only qcow2 versions 2 and 3 are supported",
            ));
        }
        if !(MIN_CLUSTER_BITS..=MAX_CLUSTER_BITS).contains(&cluster_bits) {
            return Err(FormatError::unsupported(
                "cluster_bits",
                cluster_bits,
                "clusters must be 512 bytes (9 bits) to 2 MiB (21 bits)",
            ));
        }
        if extended_l2 && cluster_bits < MIN_CLUSTER_BITS_EXTENDED_L2 {
            return Err(FormatError::invalid(
                "cluster_bits",
                cluster_bits,
                "extended L2 entries need clusters of at least 16 KiB (14 bits)",
            ));
        }
        let refcount_order = RefcountOrder::new(refcount_order)?;
        let l2_bits = cluster_bits - if extended_l2 { 4 } else { 3 };
        Ok(Self {
            cluster_bits: cluster_bits as u8,
            l2_bits: l2_bits as u8,
            version: version as u8,
            extended_l2,
            has_data_file,
            refcount_order,
        })
    }

    /// The format version, 2 or 3.
    #[inline]
    pub const fn version(&self) -> u32 {
        self.version as u32
    }

    /// Base-2 logarithm of the cluster size, 9 to 21.
    #[inline]
    pub const fn cluster_bits(&self) -> u32 {
        self.cluster_bits as u32
    }

    /// Cluster size in bytes, 512 to 2 MiB.
    #[inline]
    pub const fn cluster_size(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Whether L2 entries are 16 bytes long and describe subclusters.
    #[inline]
    pub const fn extended_l2(&self) -> bool {
        self.extended_l2
    }

    /// Whether guest data lies in an external data file.
    #[inline]
    pub const fn has_data_file(&self) -> bool {
        self.has_data_file
    }

    /// Width of the refcounts.
    #[inline]
    pub const fn refcount_order(&self) -> RefcountOrder {
        self.refcount_order
    }

    /// Width of the refcounts in bits, 1 to 64.
    #[inline]
    pub const fn refcount_bits(&self) -> u32 {
        self.refcount_order.bits()
    }

    /// Bytes of an L2 entry: 8, or 16 with extended L2 entries.
    #[inline]
    pub const fn l2_entry_size(&self) -> usize {
        if self.extended_l2 { 16 } else { 8 }
    }

    /// Entries of an L2 table.
    #[inline]
    pub const fn l2_entries(&self) -> u64 {
        1 << self.l2_bits
    }

    /// Subclusters of a cluster: 32, or 1 without extended L2 entries.
    #[inline]
    pub const fn subclusters_per_cluster(&self) -> u32 {
        if self.extended_l2 { SUBCLUSTERS } else { 1 }
    }

    /// Subcluster size in bytes; the cluster size without extended L2 entries.
    #[inline]
    pub const fn subcluster_size(&self) -> u64 {
        self.cluster_size() / self.subclusters_per_cluster() as u64
    }

    /// Refcounts in a refcount block.
    #[inline]
    pub const fn refcount_block_entries(&self) -> u64 {
        (self.cluster_size() * 8) >> self.refcount_order.get()
    }

    /// Guest bytes that one L1 entry covers.
    #[inline]
    pub const fn l1_entry_span(&self) -> u64 {
        1 << (self.cluster_bits + self.l2_bits)
    }

    /// The L1 entries that a disk of `size` bytes needs.
    pub const fn l1_size_for(&self, size: u64) -> u64 {
        size.div_ceil(self.l1_entry_span())
    }

    /// Where VM state is kept: the first guest offset that no L1 entry of a disk of `size` bytes
    /// covers. `None` past 2^64.
    pub const fn vm_state_start(&self, size: u64) -> Option<GuestOffset> {
        match self.l1_size_for(size).checked_mul(self.l1_entry_span()) {
            Some(offset) => Some(GuestOffset::new(offset)),
            None => None,
        }
    }

    /// The largest disk, in bytes, that the largest L1 table (32 MiB) can describe; at most 2^63 - 512.
    pub const fn max_disk_size(&self) -> u64 {
        // At most 2^22 entries of 2^39 bytes each: no overflow.
        let reach = (MAX_L1_BYTES / 8) * self.l1_entry_span();
        let signed = i64::MAX as u64 & !511;
        if reach < signed { reach } else { signed }
    }

    /// Clusters needed for `bytes` bytes.
    #[inline]
    pub const fn clusters_for(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.cluster_size())
    }

    /// The guest cluster that holds `offset`.
    #[inline]
    pub const fn cluster_of(&self, offset: GuestOffset) -> ClusterIndex {
        ClusterIndex::new(offset.get() >> self.cluster_bits)
    }

    /// Where a guest cluster starts; `None` past 2^64.
    #[inline]
    pub const fn cluster_start(&self, cluster: ClusterIndex) -> Option<GuestOffset> {
        match cluster.get().checked_mul(self.cluster_size()) {
            Some(offset) => Some(GuestOffset::new(offset)),
            None => None,
        }
    }

    /// Bytes from the start of its guest cluster to `offset`.
    #[inline]
    pub const fn in_cluster(&self, offset: GuestOffset) -> u64 {
        offset.get() & (self.cluster_size() - 1)
    }

    /// Where `offset` is described (section "Cluster mapping").
    #[inline]
    pub const fn position(&self, offset: GuestOffset) -> GuestPosition {
        let (l1_index, l2_index) = self.table_position(self.cluster_of(offset));
        GuestPosition { l1_index, l2_index, in_cluster: self.in_cluster(offset) }
    }

    /// The L1 index and L2 index that describe a guest cluster.
    #[inline]
    pub const fn table_position(&self, cluster: ClusterIndex) -> (u64, usize) {
        let cluster = cluster.get();
        (cluster >> self.l2_bits, (cluster & (self.l2_entries() - 1)) as usize)
    }

    /// The first guest cluster that an L1 entry covers; `None` past 2^64.
    #[inline]
    pub const fn first_cluster_of_l1(&self, l1_index: u64) -> Option<ClusterIndex> {
        match l1_index.checked_mul(self.l2_entries()) {
            Some(cluster) => Some(ClusterIndex::new(cluster)),
            None => None,
        }
    }

    /// Whether a host offset is at a cluster's start.
    #[inline]
    pub const fn is_aligned(&self, offset: HostOffset) -> bool {
        offset.get() & (self.cluster_size() - 1) == 0
    }

    /// The host cluster that holds `offset`.
    #[inline]
    pub const fn host_cluster_of(&self, offset: HostOffset) -> HostCluster {
        HostCluster::new(offset.get() >> self.cluster_bits)
    }

    /// Where a host cluster starts; `None` past 2^64.
    #[inline]
    pub const fn host_cluster_start(&self, cluster: HostCluster) -> Option<HostOffset> {
        match cluster.get().checked_mul(self.cluster_size()) {
            Some(offset) => Some(HostOffset::new(offset)),
            None => None,
        }
    }

    /// Where a host cluster's refcount is: the index into the refcount table, and the index into
    /// that refcount block (section "Host cluster management").
    #[inline]
    pub const fn refcount_position(&self, cluster: HostCluster) -> (u64, usize) {
        let entries = self.refcount_block_entries();
        (cluster.get() / entries, (cluster.get() % entries) as usize)
    }

    /// Checks that `offset` is aligned to a cluster and below 2^56.
    pub(crate) fn check_offset(
        &self,
        field: &'static str,
        offset: HostOffset,
    ) -> Result<HostOffset, FormatError> {
        if !self.is_aligned(offset) {
            return Err(FormatError::invalid(
                field,
                offset,
                format!(
                    "must be a multiple of the cluster size, {}; run a check on the image",
                    self.cluster_size()
                ),
            ));
        }
        if offset.get() >= HOST_OFFSET_LIMIT {
            return Err(FormatError::invalid(field, offset, "must be below 2^56"));
        }
        Ok(offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn plain(cluster_bits: u32) -> Geometry {
        Geometry::new(3, cluster_bits, 4, false, false).unwrap()
    }

    #[test]
    fn default_image() {
        let g = plain(16);
        assert_eq!(g.cluster_size(), 65536);
        assert_eq!(g.l2_entries(), 8192);
        assert_eq!(g.l1_entry_span(), 512 << 20);
        assert_eq!(g.refcount_block_entries(), 32768);
        assert_eq!(g.l1_size_for(1 << 30), 2);
        assert_eq!(g.l1_size_for((1 << 30) + 512), 3);
        assert_eq!(g.l1_size_for(0), 0);
        assert_eq!(g.vm_state_start((1 << 30) + 512), Some(GuestOffset::new(3 << 29)));
        assert_eq!(g.vm_state_start(u64::MAX), None);
        assert_eq!(g.subcluster_size(), 65536);
        assert_eq!(
            g.position(GuestOffset::new((512 << 20) + 65536 + 7)),
            GuestPosition { l1_index: 1, l2_index: 1, in_cluster: 7 }
        );
        assert_eq!(g.refcount_position(HostCluster::new(32769)), (1, 1));
    }

    #[test]
    fn limits_of_the_specification() {
        // Section "Header": 2 MiB clusters reach 2 EiB, 512-byte clusters 128 GiB.
        assert_eq!(plain(21).max_disk_size(), 1 << 61);
        assert_eq!(plain(9).max_disk_size(), 128 << 30);
        let e = Geometry::new(3, 16, 4, true, false).unwrap();
        assert_eq!((e.l2_entries(), e.subcluster_size()), (4096, 2048));
    }

    #[test]
    fn refuses_what_qemu_refuses() {
        assert!(Geometry::new(1, 16, 4, false, false).is_err());
        assert!(Geometry::new(4, 16, 4, false, false).is_err());
        assert!(Geometry::new(3, 8, 4, false, false).is_err());
        assert!(Geometry::new(3, 22, 4, false, false).is_err());
        assert!(Geometry::new(3, 13, 4, true, false).is_err());
        assert!(Geometry::new(3, 16, 7, false, false).is_err());
    }

    proptest! {
        #[test]
        fn position_and_back(offset in any::<u64>(), bits in 14u32..=21, extended: bool) {
            let g = Geometry::new(3, bits, 4, extended, false).unwrap();
            let p = g.position(GuestOffset::new(offset));
            let first = g.first_cluster_of_l1(p.l1_index).unwrap();
            let cluster = first.checked_add(p.l2_index as u64).unwrap();
            let start = g.cluster_start(cluster).unwrap();
            prop_assert_eq!(start.checked_add(p.in_cluster), Some(GuestOffset::new(offset)));
            prop_assert!((p.l2_index as u64) < g.l2_entries());
        }

        #[test]
        fn refcount_position_and_back(cluster in any::<u64>(), bits in 9u32..=21, order in 0u32..=6) {
            let g = Geometry::new(3, bits, order, false, false).unwrap();
            let (table, block) = g.refcount_position(HostCluster::new(cluster));
            prop_assert_eq!(table * g.refcount_block_entries() + block as u64, cluster);
        }
    }
}
