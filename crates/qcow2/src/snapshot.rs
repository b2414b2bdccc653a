//! The table of internal snapshots (section "Snapshots").

use crate::bytes;
use crate::error::{FormatError, printable};
use crate::geometry::{Geometry, MAX_L1_BYTES};
use crate::header::MAX_SNAPSHOTS;
use crate::offset::HostOffset;

/// Bytes at the start of an entry that give its length.
pub const ENTRY_HEAD_BYTES: usize = 40;
/// Most extra data in an entry, in bytes (QEMU's limit).
pub const MAX_EXTRA_DATA_BYTES: u32 = 1024;
/// Largest snapshot table, in bytes (QEMU's limit).
pub const MAX_TABLE_BYTES: usize = 64 << 20;

/// An internal snapshot: an entry of the snapshot table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Where the snapshot's L1 table starts.
    pub l1_table_offset: HostOffset,
    /// Entries of the snapshot's L1 table.
    pub l1_size: u32,
    /// The unique ID as stored; at most 65535 bytes. Hostile text: print [`id_text`](Self::id_text).
    pub id: Vec<u8>,
    /// The name as stored; at most 65535 bytes. Hostile text: print
    /// [`name_text`](Self::name_text).
    pub name: Vec<u8>,
    /// When it was taken: seconds since 1970-01-01 UTC.
    pub date_sec: u32,
    /// When it was taken: nanoseconds of the second.
    pub date_nsec: u32,
    /// How long the guest had been running, in nanoseconds.
    pub vm_clock_nsec: u64,
    /// Bytes of VM state, which lies past the disk's end; 0 without any.
    pub vm_state_size: u64,
    /// The disk's size in bytes at that time; `None` in old version 2 images, where it is the
    /// header's.
    pub disk_size: Option<u64>,
    /// The record/replay instruction count; `Some(u64::MAX)` says that there was none.
    pub icount: Option<u64>,
    /// Extra data of later versions, kept as it is.
    pub unknown_extra: Vec<u8>,
}

/// The lengths in an entry's head.
struct Lengths {
    extra: usize,
    id: usize,
    name: usize,
}

impl Lengths {
    fn parse(entry: &[u8]) -> Result<Self, FormatError> {
        let (Some(id), Some(name), Some(extra)) =
            (bytes::be16(entry, 12), bytes::be16(entry, 14), bytes::be32(entry, 36))
        else {
            return Err(truncated(entry.len(), ENTRY_HEAD_BYTES));
        };
        if extra > MAX_EXTRA_DATA_BYTES {
            return Err(FormatError::too_large(
                "snapshot table entry's extra data size",
                extra,
                format!("must not exceed {MAX_EXTRA_DATA_BYTES}; qemu-img check -r all removes it"),
            ));
        }
        Ok(Self { extra: extra as usize, id: id.into(), name: name.into() })
    }

    fn total(&self) -> usize {
        (ENTRY_HEAD_BYTES + self.extra + self.id + self.name).next_multiple_of(8)
    }
}

impl Snapshot {
    /// The length in bytes of the entry that starts with these (at least 40) bytes, padding
    /// included.
    ///
    /// # Errors
    /// If there are fewer bytes, or the extra data exceeds 1024.
    pub fn entry_length(entry: &[u8]) -> Result<usize, FormatError> {
        Lengths::parse(entry).map(|lengths| lengths.total())
    }

    /// The entry at the start of `entry`, and its length with padding. The padding of the table's
    /// last entry need not be there.
    ///
    /// # Errors
    /// If the entry is cut short, or its extra data exceeds 1024 bytes.
    pub fn parse(entry: &[u8]) -> Result<(Self, usize), FormatError> {
        let lengths = Lengths::parse(entry)?;
        let cut = || truncated(entry.len(), lengths.total());
        let (_, rest) = entry.split_at_checked(ENTRY_HEAD_BYTES).ok_or_else(cut)?;
        let (extra, rest) = rest.split_at_checked(lengths.extra).ok_or_else(cut)?;
        let (id, rest) = rest.split_at_checked(lengths.id).ok_or_else(cut)?;
        let name = rest.get(..lengths.name).ok_or_else(cut)?;
        let u32_at = |at| bytes::be32(entry, at).ok_or_else(cut);
        let u64_at = |at| bytes::be64(entry, at).ok_or_else(cut);
        let snapshot = Self {
            l1_table_offset: HostOffset::new(u64_at(0)?),
            l1_size: u32_at(8)?,
            id: id.to_vec(),
            name: name.to_vec(),
            date_sec: u32_at(16)?,
            date_nsec: u32_at(20)?,
            vm_clock_nsec: u64_at(24)?,
            vm_state_size: match bytes::be64(extra, 0) {
                Some(size) => size,
                None => u64::from(u32_at(32)?),
            },
            disk_size: bytes::be64(extra, 8),
            icount: bytes::be64(extra, 16),
            unknown_extra: extra.get(24..).unwrap_or_default().to_vec(),
        };
        Ok((snapshot, lengths.total()))
    }

    /// The `count` entries at the start of `table`, and their length.
    ///
    /// # Errors
    /// If there are more than 65536, the table ends before they do or exceeds 64 MiB, or an entry
    /// is wrong as in [`parse`](Self::parse).
    pub fn parse_table(table: &[u8], count: u32) -> Result<(Vec<Self>, usize), FormatError> {
        check_count(count as usize)?;
        let mut snapshots = Vec::new();
        let mut used = 0usize;
        for _ in 0..count {
            let (snapshot, length) = Self::parse(table.get(used..).unwrap_or_default())?;
            snapshots.push(snapshot);
            used += length;
            check_length(used)?;
        }
        Ok((snapshots, used))
    }

    /// The bytes of a snapshot table.
    ///
    /// # Errors
    /// If there are more than 65536 snapshots, the table exceeds 64 MiB, a name or ID 65535 bytes
    /// or extra data 1024 bytes, or extra data is there without what comes before it.
    pub fn encode_table(snapshots: &[Self]) -> Result<Vec<u8>, FormatError> {
        check_count(snapshots.len())?;
        let mut table = Vec::new();
        for snapshot in snapshots {
            snapshot.encode(&mut table)?;
            check_length(table.len())?;
        }
        Ok(table)
    }

    /// Appends the entry with its padding.
    fn encode(&self, out: &mut Vec<u8>) -> Result<(), FormatError> {
        let extra = self.encode_extra()?;
        let length = |field: &'static str, bytes: &[u8]| {
            u16::try_from(bytes.len()).map_err(|_| {
                FormatError::too_large(field, bytes.len(), "must not exceed 65535 bytes")
            })
        };
        out.extend(self.l1_table_offset.get().to_be_bytes());
        out.extend(self.l1_size.to_be_bytes());
        out.extend(length("snapshot ID's length", &self.id)?.to_be_bytes());
        out.extend(length("snapshot name's length", &self.name)?.to_be_bytes());
        out.extend(self.date_sec.to_be_bytes());
        out.extend(self.date_nsec.to_be_bytes());
        out.extend(self.vm_clock_nsec.to_be_bytes());
        // Where it does not fit, the extra data holds it and this is ignored.
        out.extend((self.vm_state_size as u32).to_be_bytes());
        out.extend((extra.len() as u32).to_be_bytes());
        out.extend(extra);
        out.extend(&self.id);
        out.extend(&self.name);
        out.resize(out.len().next_multiple_of(8), 0);
        Ok(())
    }

    fn encode_extra(&self) -> Result<Vec<u8>, FormatError> {
        let mut extra = Vec::new();
        let large = self.vm_state_size > u64::from(u32::MAX);
        if large || self.disk_size.is_some() {
            extra.extend(self.vm_state_size.to_be_bytes());
        }
        extra.extend(self.disk_size.map(u64::to_be_bytes).into_iter().flatten());
        extra.extend(self.icount.map(u64::to_be_bytes).into_iter().flatten());
        extra.extend(&self.unknown_extra);
        let gap = (self.icount.is_some() && self.disk_size.is_none())
            || (!self.unknown_extra.is_empty() && self.icount.is_none());
        if gap || extra.len() > MAX_EXTRA_DATA_BYTES as usize {
            return Err(FormatError::invalid(
                "snapshot's extra data",
                format_args!("{} bytes", extra.len()),
                format!("must not exceed {MAX_EXTRA_DATA_BYTES} and must have every earlier field"),
            ));
        }
        Ok(extra)
    }

    /// Checks the snapshot's L1 table: before it is read or made active.
    ///
    /// # Errors
    /// If it is misplaced, exceeds 32 MiB, or is too small for `disk_size` (where that is known).
    pub fn check(&self, geometry: &Geometry) -> Result<(), FormatError> {
        geometry.check_offset("snapshot's l1_table_offset", self.l1_table_offset)?;
        if self.l1_table_offset.get() == 0 && self.l1_size != 0 {
            return Err(FormatError::invalid(
                "snapshot's l1_table_offset",
                0,
                "the table overlaps the header",
            ));
        }
        if u64::from(self.l1_size) * 8 > MAX_L1_BYTES {
            return Err(FormatError::too_large(
                "snapshot's l1_size",
                self.l1_size,
                format!("must not exceed {} entries (32 MiB)", MAX_L1_BYTES / 8),
            ));
        }
        match self.disk_size.map(|size| geometry.l1_size_for(size)) {
            Some(needed) if needed > u64::from(self.l1_size) => Err(FormatError::invalid(
                "snapshot's l1_size",
                self.l1_size,
                format!("is too small for the snapshot's disk: needs {needed}"),
            )),
            _ => Ok(()),
        }
    }

    /// The ID made safe to print.
    pub fn id_text(&self) -> String {
        printable(&self.id)
    }

    /// The name made safe to print.
    pub fn name_text(&self) -> String {
        printable(&self.name)
    }
}

fn truncated(length: usize, needed: usize) -> FormatError {
    FormatError::truncated(
        "snapshot table",
        format_args!("{length} bytes long where an entry starts"),
        format!(
            "the entry needs at least {needed}; the file is truncated or nb_snapshots is wrong"
        ),
    )
}

fn check_count(count: usize) -> Result<(), FormatError> {
    if count > MAX_SNAPSHOTS as usize {
        return Err(FormatError::too_large(
            "nb_snapshots",
            count,
            format!("must not exceed {MAX_SNAPSHOTS}"),
        ));
    }
    Ok(())
}

/// Checks the length of a snapshot table, or of a part of it, in bytes.
///
/// # Errors
/// If it exceeds 64 MiB, QEMU's limit.
pub fn check_length(length: usize) -> Result<(), FormatError> {
    if length > MAX_TABLE_BYTES {
        return Err(FormatError::too_large(
            "snapshot table's length",
            length,
            format!("must not exceed {MAX_TABLE_BYTES} bytes; delete snapshots"),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample() -> Snapshot {
        Snapshot {
            l1_table_offset: HostOffset::new(0x70000),
            l1_size: 2,
            id: b"1".to_vec(),
            name: b"before upgrade".to_vec(),
            date_sec: 1_700_000_000,
            date_nsec: 5,
            vm_clock_nsec: 6,
            vm_state_size: 7,
            disk_size: Some(1 << 30),
            icount: Some(u64::MAX),
            unknown_extra: vec![9; 5],
        }
    }

    #[test]
    fn table_round_trips_with_every_length_of_extra_data() {
        let plain = Snapshot { unknown_extra: Vec::new(), ..sample() };
        let v2 = Snapshot { disk_size: None, icount: None, ..plain.clone() };
        let all = vec![
            sample(),
            Snapshot { icount: None, ..plain.clone() },
            Snapshot { vm_state_size: 1 << 40, ..v2.clone() },
            v2,
            Snapshot { id: Vec::new(), name: Vec::new(), ..plain },
        ];
        let table = Snapshot::encode_table(&all).unwrap();
        assert_eq!(Snapshot::parse_table(&table, 5), Ok((all.clone(), table.len())));
        assert_eq!(Snapshot::entry_length(&table), Ok(40 + 29 + 1 + 14 + 4));
        let error = Snapshot::parse_table(&table, 6).unwrap_err();
        assert_eq!(error.kind(), crate::FormatErrorKind::Truncated);
        assert_eq!(Snapshot::parse_table(&[], 0), Ok((Vec::new(), 0)));
    }

    #[test]
    fn limits() {
        let check = |snapshot: Snapshot| Snapshot::encode_table(&[snapshot]);
        assert!(check(Snapshot { name: vec![0; 65535], ..sample() }).is_ok());
        assert!(check(Snapshot { name: vec![0; 65536], ..sample() }).is_err());
        assert!(check(Snapshot { unknown_extra: vec![0; 1000], ..sample() }).is_ok());
        assert!(check(Snapshot { unknown_extra: vec![0; 1001], ..sample() }).is_err());
        assert!(check(Snapshot { disk_size: None, ..sample() }).is_err());
        assert!(check(Snapshot { icount: None, ..sample() }).is_err());
        assert!(Snapshot::parse_table(&[], 65537).is_err());
        let mut entry = Snapshot::encode_table(&[sample()]).unwrap();
        entry[36..40].copy_from_slice(&1025u32.to_be_bytes());
        assert!(Snapshot::entry_length(&entry).is_err());
        let long = vec![Snapshot { name: vec![0; 65535], ..sample() }; 1025];
        assert!(Snapshot::encode_table(&long).is_err());
    }

    #[test]
    fn an_l1_table_that_cannot_be_is_refused() {
        let g = Geometry::new(3, 16, 4, false, false).unwrap();
        assert!(sample().check(&g).is_ok());
        assert!(Snapshot { l1_size: 1, ..sample() }.check(&g).is_err());
        assert!(Snapshot { l1_size: u32::MAX, ..sample() }.check(&g).is_err());
        assert!(Snapshot { l1_table_offset: HostOffset::new(512), ..sample() }.check(&g).is_err());
        assert!(Snapshot { l1_table_offset: HostOffset::new(0), ..sample() }.check(&g).is_err());
    }

    #[test]
    fn names_are_printed_safely() {
        let snapshot = Snapshot { name: b"a\nb\xff".to_vec(), ..sample() };
        assert_eq!(snapshot.name_text(), "a?b?");
        assert_eq!(snapshot.id_text(), "1");
    }

    proptest! {
        #[test]
        fn any_bytes_parse_or_fail_and_encode_back(
            mut table in prop::collection::vec(any::<u8>(), 0..400), count in 0u32..4, small: bool,
        ) {
            if small {
                for (at, byte) in table.iter_mut().enumerate() {
                    // Lengths small enough to be met.
                    match at % 40 { 12 | 14 | 36..=38 => *byte = 0, 13 | 15 | 39 => *byte %= 40, _ => {} }
                }
            }
            if let Ok((snapshots, _)) = Snapshot::parse_table(&table, count) {
                let again = Snapshot::encode_table(&snapshots).unwrap();
                prop_assert_eq!(Snapshot::parse_table(&again, count), Ok((snapshots, again.len())));
            }
        }
    }
}
