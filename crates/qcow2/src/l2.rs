//! L2 table entries, standard and extended (sections "Cluster mapping" and "Extended L2 Entries").

use crate::bytes;
use crate::error::FormatError;
use crate::geometry::{Geometry, HOST_OFFSET_LIMIT};
use crate::offset::{GuestOffset, HostOffset};
use crate::table_entry::OFFSET_MASK;

const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const ZERO: u64 = 1;
const RESERVED_STANDARD: u64 = 0x3f00_0000_0000_01fe;
/// Compressed clusters are counted in sectors of this many bytes.
const SECTOR: u64 = 512;

/// An L2 table entry as it is on disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct L2Entry {
    /// The cluster descriptor with its flags: the first 64 bits.
    pub descriptor: u64,
    /// The subcluster allocation bitmap: the last 64 bits of an extended entry; 0 and not stored
    /// without extended L2 entries.
    pub subclusters: u64,
}

/// Where a compressed cluster's data is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompressedCluster {
    /// First byte of the data; aligned to nothing.
    pub offset: HostOffset,
    /// Bytes from `offset` to the end of the last sector: the data is at most this long, and what
    /// follows it in the last sector belongs to others. At most two clusters.
    pub length: u64,
}

impl CompressedCluster {
    /// One past the last byte. The range may lie across two host clusters or more, each of which
    /// it holds a reference to.
    pub const fn end(&self) -> HostOffset {
        // The offset is below 2^56 and the length at most 2^22: no overflow.
        HostOffset::new(self.offset.get() + self.length)
    }
}

/// The meaning of an L2 entry for its guest cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClusterKind {
    /// Read from the backing file, or as zeroes without one.
    Unallocated,
    /// Reads as zeroes; no host cluster.
    ZeroPlain,
    /// Reads as zeroes; a host cluster is kept for it.
    ZeroAllocated {
        /// The host cluster's start.
        offset: HostOffset,
        /// Its refcount is exactly one.
        copied: bool,
    },
    /// Stored in a host cluster.
    Data {
        /// The host cluster's start.
        offset: HostOffset,
        /// Its refcount is exactly one.
        copied: bool,
    },
    /// Stored compressed.
    Compressed(CompressedCluster),
    /// Any cluster of an image with extended L2 entries that is not compressed. Subclusters in
    /// neither bitmap are read from the backing file.
    Subclusters {
        /// The host cluster's start, if there is one.
        offset: Option<HostOffset>,
        /// Its refcount is exactly one.
        copied: bool,
        /// The subclusters stored in the host cluster, bit n for subcluster n; 0 without one.
        allocated: u32,
        /// The subclusters that read as zeroes; never one that is in `allocated`.
        zero: u32,
    },
}

impl ClusterKind {
    /// The host cluster that the entry holds, if it holds a whole one.
    pub const fn host_cluster(&self) -> Option<HostOffset> {
        match *self {
            Self::ZeroAllocated { offset, .. } | Self::Data { offset, .. } => Some(offset),
            Self::Subclusters { offset, .. } => offset,
            Self::Unallocated | Self::ZeroPlain | Self::Compressed(_) => None,
        }
    }

    /// Checks that guest data in an external data file lies at its guest offset, as the
    /// specification demands. Does nothing without a data file.
    ///
    /// # Errors
    /// If the host offset is not `guest`, the cluster's start.
    pub fn check_data_file(
        &self,
        guest: GuestOffset,
        geometry: &Geometry,
    ) -> Result<(), FormatError> {
        match self.host_cluster() {
            Some(host) if geometry.has_data_file() && host.get() != guest.get() => {
                Err(FormatError::invalid(
                    "L2 entry's offset",
                    host,
                    format!("must equal the guest offset {guest} in an external data file"),
                ))
            }
            _ => Ok(()),
        }
    }
}

impl L2Entry {
    /// The entry of an unallocated cluster.
    pub const fn unallocated() -> Self {
        Self { descriptor: 0, subclusters: 0 }
    }

    /// The entry of a data cluster at `offset` in an image without extended L2 entries.
    pub const fn data(offset: HostOffset, copied: bool) -> Self {
        Self { descriptor: Self::place(offset, copied), subclusters: 0 }
    }

    /// The entry of a zero cluster that keeps no host cluster. Version 3 without extended L2 entries
    /// only.
    pub const fn zero_plain() -> Self {
        Self { descriptor: ZERO, subclusters: 0 }
    }

    /// The entry of a zero cluster that keeps the host cluster at `offset`. Version 3 without
    /// extended L2 entries only.
    pub const fn zero_allocated(offset: HostOffset, copied: bool) -> Self {
        Self { descriptor: Self::place(offset, copied) | ZERO, subclusters: 0 }
    }

    /// The entry of a cluster in an image with extended L2 entries. A subcluster in both bitmaps, or
    /// allocated without an offset, makes an entry that [`kind`](Self::kind) refuses.
    pub const fn subclustered(
        offset: Option<HostOffset>,
        copied: bool,
        allocated: u32,
        zero: u32,
    ) -> Self {
        let descriptor = match offset {
            Some(offset) => Self::place(offset, copied),
            None => 0,
        };
        Self { descriptor, subclusters: (zero as u64) << 32 | allocated as u64 }
    }

    /// The entry of a compressed cluster: `length` bytes of data at `offset`, which share their
    /// first and last sector with their neighbours.
    ///
    /// # Errors
    /// If the length is 0, or the offset or length exceed the bits that the cluster size leaves them.
    pub fn compressed(
        offset: HostOffset,
        length: u64,
        cluster_bits: u32,
    ) -> Result<Self, FormatError> {
        let shift = compressed_shift(cluster_bits);
        let error = |field, value: u64, why| FormatError::too_large(field, value, why);
        let end = match length.checked_sub(1).and_then(|rest| offset.get().checked_add(rest)) {
            Some(last) if offset.get() < (1 << shift).min(HOST_OFFSET_LIMIT) => last,
            _ => {
                return Err(error(
                    "compressed cluster's offset",
                    offset.get(),
                    "does not fit an L2 entry; the image file is too large for this cluster size",
                ));
            }
        };
        let sectors = end / SECTOR - offset.get() / SECTOR;
        if sectors >= 1 << (cluster_bits - 8) {
            return Err(error(
                "compressed cluster's length",
                length,
                "does not fit an L2 entry; store it uncompressed",
            ));
        }
        Ok(Self { descriptor: COMPRESSED | sectors << shift | offset.get(), subclusters: 0 })
    }

    const fn place(offset: HostOffset, copied: bool) -> u64 {
        (offset.get() & OFFSET_MASK) | if copied { COPIED } else { 0 }
    }

    /// The COPIED bit: the host cluster's refcount is exactly one. Accurate only below the active L1
    /// table.
    #[inline]
    pub const fn is_copied(self) -> bool {
        self.descriptor & COPIED != 0
    }

    /// The same entry with the COPIED bit set or clear.
    #[must_use]
    pub const fn with_copied(self, copied: bool) -> Self {
        let rest = self.descriptor & !COPIED;
        Self { descriptor: if copied { rest | COPIED } else { rest }, ..self }
    }

    /// Whether the descriptor is a compressed cluster's.
    #[inline]
    pub const fn is_compressed(self) -> bool {
        self.descriptor & COMPRESSED != 0
    }

    /// Reserved bits of the descriptor that are set, and of the subcluster bitmap for a compressed
    /// cluster; a check reports them.
    pub const fn reserved_bits(self, geometry: &Geometry) -> (u64, u64) {
        if self.is_compressed() {
            let shift = compressed_shift(geometry.cluster_bits());
            let offset = self.descriptor & ((1 << shift) - 1);
            // Nor is COPIED ever set for a compressed cluster.
            (offset & !(HOST_OFFSET_LIMIT - 1) | self.descriptor & COPIED, self.subclusters)
        } else {
            let zero = if geometry.extended_l2() { self.descriptor & ZERO } else { 0 };
            (self.descriptor & RESERVED_STANDARD | zero, 0)
        }
    }

    /// What the entry says. Reserved bits of standard descriptors are ignored, as QEMU does; see
    /// [`reserved_bits`](Self::reserved_bits).
    ///
    /// # Errors
    /// If the offset is not aligned to a cluster; the zero flag is set in a version 2 image; the
    /// cluster is compressed in an image with an external data file; a compressed cluster's offset
    /// is not below 2^56; a subcluster is both allocated and zero, or allocated without a host
    /// cluster.
    #[inline]
    pub fn kind(&self, geometry: &Geometry) -> Result<ClusterKind, FormatError> {
        if self.is_compressed() {
            return self.compressed_kind(geometry);
        }
        let copied = self.is_copied();
        let raw = self.descriptor & OFFSET_MASK;
        let offset = match raw {
            0 if geometry.has_data_file() && copied => Some(HostOffset::new(0)),
            0 => None,
            raw => Some(geometry.check_offset("L2 entry's offset", HostOffset::new(raw))?),
        };
        if geometry.extended_l2() {
            let (allocated, zero) = (self.subclusters as u32, (self.subclusters >> 32) as u32);
            if allocated & zero != 0 || (offset.is_none() && allocated != 0) {
                return Err(FormatError::invalid(
                    "subcluster allocation bitmap",
                    format_args!("{:#018x}", self.subclusters),
                    if offset.is_none() {
                        "subclusters are allocated without a host cluster; run a check on the image"
                    } else {
                        "subclusters are both allocated and zero; run a check on the image"
                    },
                ));
            }
            return Ok(ClusterKind::Subclusters { offset, copied, allocated, zero });
        }
        if self.descriptor & ZERO != 0 {
            if geometry.version() < 3 {
                return Err(FormatError::invalid(
                    "L2 entry",
                    format_args!("{:#018x}", self.descriptor),
                    "zero clusters need version 3 (compat 1.1); run a check on the image",
                ));
            }
            // Offset 0 of a data file is told from none by COPIED for data only, as in QEMU.
            return Ok(match offset {
                Some(offset) if raw != 0 => ClusterKind::ZeroAllocated { offset, copied },
                _ => ClusterKind::ZeroPlain,
            });
        }
        Ok(match offset {
            Some(offset) => ClusterKind::Data { offset, copied },
            None => ClusterKind::Unallocated,
        })
    }

    fn compressed_kind(self, geometry: &Geometry) -> Result<ClusterKind, FormatError> {
        if geometry.has_data_file() {
            return Err(FormatError::invalid(
                "L2 entry",
                format_args!("{:#018x}", self.descriptor),
                "compressed clusters cannot be in an image with an external data file",
            ));
        }
        let shift = compressed_shift(geometry.cluster_bits());
        let offset = self.descriptor & ((1 << shift) - 1);
        if offset >= HOST_OFFSET_LIMIT {
            return Err(FormatError::invalid(
                "compressed cluster's offset",
                HostOffset::new(offset),
                "must be below 2^56; run a check on the image",
            ));
        }
        let sectors = (self.descriptor >> shift & ((1 << (geometry.cluster_bits() - 8)) - 1)) + 1;
        Ok(ClusterKind::Compressed(CompressedCluster {
            offset: HostOffset::new(offset),
            length: sectors * SECTOR - offset % SECTOR,
        }))
    }

    /// Entry `index` of an L2 table's bytes (or of a slice that starts at an entry); `None` past its
    /// end.
    #[inline]
    pub fn read(table: &[u8], index: usize, geometry: &Geometry) -> Option<Self> {
        if geometry.extended_l2() {
            let at = index.checked_mul(16)?;
            let both: [u8; 16] = bytes::array(table, at)?;
            let both = u128::from_be_bytes(both);
            Some(Self { descriptor: (both >> 64) as u64, subclusters: both as u64 })
        } else {
            Some(Self { descriptor: bytes::entry64(table, index)?, subclusters: 0 })
        }
    }

    /// The entry as a table has it: the first [`l2_entry_size`](Geometry::l2_entry_size) bytes, and then zeroes.
    pub fn bytes(self, geometry: &Geometry) -> [u8; 16] {
        let subclusters = if geometry.extended_l2() { self.subclusters } else { 0 };
        (u128::from(self.descriptor) << 64 | u128::from(subclusters)).to_be_bytes()
    }

    /// Puts the entry at `index` of an L2 table's bytes; `None`, and nothing written, past its end.
    #[inline]
    #[must_use = "nothing is written past the table's end"]
    pub fn write(self, table: &mut [u8], index: usize, geometry: &Geometry) -> Option<()> {
        if geometry.extended_l2() {
            let place = table.get_mut(index.checked_mul(16)?..)?.first_chunk_mut::<16>()?;
            *place = self.bytes(geometry);
            Some(())
        } else {
            bytes::put_entry64(table, index, self.descriptor)
        }
    }
}

/// The specification's x: the bits of a compressed cluster's offset.
const fn compressed_shift(cluster_bits: u32) -> u32 {
    62 - (cluster_bits - 8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn geometry(cluster_bits: u32, extended: bool, data_file: bool) -> Geometry {
        Geometry::new(3, cluster_bits, 4, extended, data_file).unwrap()
    }

    fn raw(descriptor: u64) -> L2Entry {
        L2Entry { descriptor, subclusters: 0 }
    }

    #[test]
    fn standard_entries() {
        let g = geometry(16, false, false);
        let at = HostOffset::new(0x50000);
        assert_eq!(L2Entry::data(at, true).descriptor, 0x8000_0000_0005_0000);
        let cases = [
            (L2Entry::unallocated(), ClusterKind::Unallocated),
            (L2Entry::zero_plain(), ClusterKind::ZeroPlain),
            (L2Entry::data(at, true), ClusterKind::Data { offset: at, copied: true }),
            (
                L2Entry::zero_allocated(at, false),
                ClusterKind::ZeroAllocated { offset: at, copied: false },
            ),
            (raw(COPIED), ClusterKind::Unallocated),
        ];
        for (entry, kind) in cases {
            assert_eq!(entry.kind(&g), Ok(kind));
        }
    }

    #[test]
    fn what_qemu_calls_corrupt_is_refused() {
        assert!(raw(0x50200).kind(&geometry(16, false, false)).is_err());
        assert!(raw(ZERO | 0x50200).kind(&geometry(16, false, false)).is_err());
        let v2 = Geometry::new(2, 16, 4, false, false).unwrap();
        assert!(L2Entry::zero_plain().kind(&v2).is_err());
        assert!(raw(COMPRESSED | 0x50000).kind(&geometry(16, false, true)).is_err());
        // 512-byte clusters leave 61 bits for a compressed offset; only 56 may be used.
        assert!(raw(COMPRESSED | 1 << 57).kind(&geometry(9, false, false)).is_err());
    }

    #[test]
    fn offset_0_of_a_data_file_is_allocated_by_copied() {
        let g = geometry(16, false, true);
        let data = ClusterKind::Data { offset: HostOffset::new(0), copied: true };
        assert_eq!(raw(COPIED).kind(&g), Ok(data));
        assert_eq!(raw(0).kind(&g), Ok(ClusterKind::Unallocated));
        assert_eq!(raw(COPIED | ZERO).kind(&g), Ok(ClusterKind::ZeroPlain));
        assert!(data.check_data_file(GuestOffset::new(0), &g).is_ok());
        assert!(data.check_data_file(GuestOffset::new(65536), &g).is_err());
        assert!(data.check_data_file(GuestOffset::new(65536), &geometry(16, false, false)).is_ok());
        let g = geometry(16, true, true);
        let entry = L2Entry::subclustered(Some(HostOffset::new(0)), true, 1, 2);
        let offset = Some(HostOffset::new(0));
        assert_eq!(
            entry.kind(&g),
            Ok(ClusterKind::Subclusters { offset, copied: true, allocated: 1, zero: 2 })
        );
    }

    #[test]
    fn compressed_descriptor_of_the_specification() {
        // 64 KiB clusters: x = 54, so 8 bits of additional sectors.
        let g = geometry(16, false, false);
        let entry = raw(COMPRESSED | 3 << 54 | 0x5_01f0);
        let expected = CompressedCluster { offset: HostOffset::new(0x501f0), length: 16 + 3 * 512 };
        assert_eq!(entry.kind(&g), Ok(ClusterKind::Compressed(expected)));
        let same = L2Entry::compressed(expected.offset, 17 + 2 * 512, 16).unwrap();
        assert_eq!(same, entry);
        assert!(L2Entry::compressed(HostOffset::new(1 << 54), 1, 16).is_err());
        assert!(L2Entry::compressed(HostOffset::new(0), 0, 16).is_err());
        assert!(L2Entry::compressed(HostOffset::new(0), 256 * 512, 16).is_ok());
        assert!(L2Entry::compressed(HostOffset::new(0), 256 * 512 + 1, 16).is_err());
    }

    #[test]
    fn subcluster_conflicts_are_refused() {
        let g = geometry(16, true, false);
        assert!(L2Entry::subclustered(Some(HostOffset::new(65536)), true, 3, 2).kind(&g).is_err());
        assert!(L2Entry::subclustered(None, false, 1, 0).kind(&g).is_err());
        let zero = L2Entry::subclustered(None, false, 0, u32::MAX);
        assert_eq!(zero.subclusters, 0xffff_ffff_0000_0000);
        assert!(zero.kind(&g).is_ok());
    }

    #[test]
    fn reserved_bits_are_found_where_check_looks() {
        let g = geometry(16, false, false);
        assert_eq!(raw(0x2000_0000_0005_0002).reserved_bits(&g), (0x2000_0000_0000_0002, 0));
        assert_eq!(raw(ZERO).reserved_bits(&g), (0, 0));
        let g = geometry(16, true, false);
        assert_eq!(raw(ZERO).reserved_bits(&g), (ZERO, 0));
        let packed = L2Entry { descriptor: COMPRESSED, subclusters: 5 };
        assert_eq!(packed.reserved_bits(&g), (0, 5));
    }

    #[test]
    fn tables_are_bounded() {
        for extended in [false, true] {
            let g = geometry(16, extended, false);
            let mut table = vec![0; 4 * g.l2_entry_size()];
            let entry = L2Entry { descriptor: 0x0102, subclusters: if extended { 3 } else { 0 } };
            entry.write(&mut table, 3, &g).unwrap();
            assert_eq!(L2Entry::read(&table, 3, &g), Some(entry));
            assert_eq!(L2Entry::read(&table, 2, &g), Some(L2Entry::unallocated()));
            assert_eq!(L2Entry::read(&table, 4, &g), None);
            assert_eq!(L2Entry::read(&table, usize::MAX / 8, &g), None);
            assert_eq!(entry.write(&mut table, 4, &g), None);
        }
    }

    fn geometries() -> impl Strategy<Value = Geometry> {
        (2u32..=3, 9u32..=21, any::<bool>(), any::<bool>()).prop_filter_map(
            "not a geometry",
            |(version, bits, extended, data_file)| {
                Geometry::new(version, bits, 4, extended, data_file).ok()
            },
        )
    }

    proptest! {
        #[test]
        fn any_bits_decode_or_fail_and_encode_back(
            g in geometries(), descriptor: u64, subclusters: u64,
        ) {
            let entry = L2Entry {
                descriptor, subclusters: if g.extended_l2() { subclusters } else { 0 },
            };
            let Ok(kind) = entry.kind(&g) else { return Ok(()) };
            let again = match kind {
                ClusterKind::Unallocated => L2Entry::unallocated(),
                ClusterKind::ZeroPlain => L2Entry::zero_plain(),
                ClusterKind::ZeroAllocated { offset, copied } => {
                    L2Entry::zero_allocated(offset, copied)
                }
                ClusterKind::Data { offset, copied } => L2Entry::data(offset, copied),
                ClusterKind::Compressed(c) => {
                    prop_assert!(c.length >= 1 && c.length <= 2 * g.cluster_size());
                    L2Entry::compressed(c.offset, c.length, g.cluster_bits()).unwrap()
                }
                ClusterKind::Subclusters { offset, copied, allocated, zero } => {
                    L2Entry::subclustered(offset, copied, allocated, zero)
                }
            };
            prop_assert_eq!(again.kind(&g), Ok(kind).map(|kind| match kind {
                // COPIED means nothing without a host cluster.
                ClusterKind::Subclusters { offset: None, allocated, zero, .. } => {
                    ClusterKind::Subclusters { offset: None, copied: false, allocated, zero }
                }
                kind => kind,
            }));
        }

        #[test]
        fn compressed_round_trip(bits in 9u32..=21, offset: u64, length: u64) {
            let g = geometry(bits, false, false);
            let offset = HostOffset::new(offset % (1 << compressed_shift(bits)).min(1 << 56));
            let length = length % g.cluster_size() + 1;
            let kind = L2Entry::compressed(offset, length, bits).unwrap().kind(&g).unwrap();
            let ClusterKind::Compressed(c) = kind else { panic!("{kind:?}") };
            prop_assert_eq!(c.offset, offset);
            prop_assert!(c.length >= length && c.length < length + SECTOR);
            prop_assert_eq!(c.end().get() % SECTOR, 0);
        }
    }
}
