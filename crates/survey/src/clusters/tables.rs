//! Reading an image's L1 and L2 tables.

use crate::fleet::Fleet;
use crate::probe::{self, Id, Kind, Summary};
use isobath_qcow2::{ClusterKind, GuestOffset, L1Entry, L2Entry};
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;

/// The properties of an L2 entry that counting needs.
pub(super) struct Cluster {
    /// The first guest byte.
    guest: u64,
    /// The number of guest bytes.
    length: u64,
    /// The base-2 logarithm of the number of bytes that a bit of `allocated` stands for.
    bits: u32,
    /// The parts that are allocated here, including zeroes.
    allocated: u32,
    /// Bytes that it occupies in the file.
    pub(super) bytes: u64,
    /// Whether nothing else in the file uses those bytes.
    pub(super) exclusive: bool,
}

impl Cluster {
    /// The units of the disk that it covers.
    pub(super) fn units(&self, unit_bits: u32) -> Range<u64> {
        self.guest >> unit_bits..self.guest.saturating_add(self.length) >> unit_bits
    }

    /// The units that it hides in the image below.
    pub(super) fn own_units(&self, unit_bits: u32) -> impl Iterator<Item = u64> {
        let (bits, allocated, start) = (self.bits, self.allocated, self.guest);
        self.units(unit_bits).filter(move |unit| {
            let part = ((unit << unit_bits) - start) >> bits;
            part < 32 && allocated >> part & 1 == 1
        })
    }
}

/// Why tables cannot be read.
pub(super) enum Error {
    Io(io::Error),
    Corrupt(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => error.fmt(f),
            Self::Corrupt(what) => f.write_str(what),
        }
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Passes every allocated cluster of the image's disk to `each`; returns the number of L2 tables. Invalid entries are
/// skipped, and then reported as an error at the end.
pub(super) fn read(
    fleet: &Fleet,
    number: u32,
    each: &mut dyn FnMut(&Cluster),
) -> Result<u32, Error> {
    let path = fleet.path(number);
    let (file, data) = probe::open(&path)?;
    let Kind::Qcow2(summary) = probe::header(&file, &path, data.len())? else {
        return Err(Error::Corrupt("the image changed while it was read".into()));
    };
    if Id::of(&data) != fleet.id(number) {
        return Err(Error::Corrupt("the image changed while it was read".into()));
    }
    walk(&file, data.len(), &summary, each)
}

fn walk(
    file: &File,
    length: u64,
    summary: &Summary,
    each: &mut dyn FnMut(&Cluster),
) -> Result<u32, Error> {
    let geometry = &summary.geometry;
    let entries = geometry.l1_size_for(summary.disk).min(u64::from(summary.l1_size));
    let wanted = entries * 8;
    if wanted > length {
        return Err(Error::Corrupt(format!(
            "l1_size is {}, but the file is shorter",
            summary.l1_size
        )));
    }
    let mut l1 = vec![0; wanted as usize];
    if probe::read_up_to(file, summary.l1_offset, &mut l1)?.len() as u64 != wanted {
        return Err(Error::Corrupt("the L1 table extends past the end of the file".into()));
    }
    // There cannot be more tables than fit in the file, however often an L1 table refers to one.
    let most = length / geometry.cluster_size();
    let mut tables = 0_u32;
    let mut wrong = None;
    let mut table = vec![0; geometry.cluster_size() as usize];
    for index in 0..entries {
        let entry = L1Entry::read(&l1, index as usize).unwrap_or_default();
        let offset = match entry.offset(geometry) {
            Ok(Some(offset)) => offset,
            Ok(None) => continue,
            Err(error) => {
                wrong.get_or_insert_with(|| error.to_string());
                continue;
            }
        };
        if u64::from(tables) >= most {
            return Err(Error::Corrupt(
                "the L1 table refers to more tables than the file can hold".into(),
            ));
        }
        tables += 1;
        if probe::read_up_to(file, offset.get(), &mut table)?.len() != table.len() {
            wrong.get_or_insert_with(|| {
                format!("L1 entry {index}: the L2 table extends past the end of the file")
            });
            continue;
        }
        if let Err(error) = entries_of(&table, index, summary, each) {
            wrong.get_or_insert(error);
        }
    }
    match wrong {
        None => Ok(tables),
        Some(wrong) => Err(Error::Corrupt(wrong)),
    }
}

fn entries_of(
    table: &[u8],
    l1_index: u64,
    summary: &Summary,
    each: &mut dyn FnMut(&Cluster),
) -> Result<(), String> {
    let geometry = &summary.geometry;
    let length = geometry.cluster_size();
    let mut wrong = None;
    let Some(first) = geometry.first_cluster_of_l1(l1_index) else { return Ok(()) };
    for index in 0..geometry.l2_entries() {
        let Some(entry) = L2Entry::read(table, index as usize, geometry) else { break };
        if entry == L2Entry::unallocated() {
            continue;
        }
        let guest = first.checked_add(index).and_then(|cluster| geometry.cluster_start(cluster));
        let Some(guest) = guest.map(GuestOffset::get).filter(|&guest| guest < summary.disk) else {
            break;
        };
        let (allocated, bytes, exclusive) = match entry.kind(geometry) {
            Ok(ClusterKind::Unallocated) => continue,
            Ok(ClusterKind::ZeroPlain) => (u32::MAX, 0, false),
            Ok(ClusterKind::ZeroAllocated { copied, .. } | ClusterKind::Data { copied, .. }) => {
                (u32::MAX, length, copied)
            }
            Ok(ClusterKind::Compressed(cluster)) => (u32::MAX, cluster.length, true),
            Ok(ClusterKind::Subclusters { offset, copied, allocated, zero }) => {
                (allocated | zero, offset.map_or(0, |_| length), copied)
            }
            Err(error) => {
                wrong.get_or_insert_with(|| error.to_string());
                continue;
            }
        };
        let bits = geometry.subcluster_size().trailing_zeros();
        each(&Cluster { guest, length, bits, allocated, bytes, exclusive });
    }
    wrong.map_or(Ok(()), Err)
}
