//! Images made by QEMU, and damage done to them on purpose.

use isobath_qcow2::{Geometry, Header, HostCluster, L1Entry, L2Entry, RefcountTableEntry};
use isobath_testkit::{args, qemu};
use rand::rngs::StdRng;
use rand::{Rng, RngExt};
use std::fmt;
use std::fs;
use std::path::Path;

/// Options that change what a check must understand.
pub(crate) const OPTIONS: &[&str] = &[
    "",
    "cluster_size=4k",
    "cluster_size=512",
    "cluster_size=2M",
    "compat=0.10,cluster_size=4k",
    "refcount_bits=1",
    "refcount_bits=64,cluster_size=4k",
    "refcount_bits=4,cluster_size=4k",
    "extended_l2=on,cluster_size=16k",
    "lazy_refcounts=on,cluster_size=4k",
    "compression_type=zstd,cluster_size=8k",
    "preallocation=metadata,cluster_size=4k",
];

/// The disk's size in bytes.
const SIZE: u64 = 3 << 20;

/// Makes an image with data, zeroes, discards, compressed clusters, an internal snapshot and a
/// bitmap, as far as the options let it have them.
pub(crate) fn make(image: &Path, options: &str, rng: &mut StdRng) {
    qemu::create(image, "qcow2", SIZE, options);
    let write = |rng: &mut StdRng, kind: &str| {
        let offset = rng.random_range(0..SIZE / 512) * 512;
        let length = rng.random_range(1..=(SIZE - offset).min(200 << 10) / 512) * 512;
        let pattern = rng.random_range(1..256);
        match kind {
            "write" => format!("write -P {pattern} {offset} {length}"),
            "zero" => format!("write -z {offset} {length}"),
            _ => format!("discard {offset} {length}"),
        }
    };
    let mut commands: Vec<String> = Vec::new();
    for _ in 0..6 {
        commands.push(write(rng, "write"));
    }
    commands.push(write(rng, "zero"));
    commands.push(write(rng, "discard"));
    let _ = qemu::io(image, "qcow2", &commands).ok();
    if !options.contains("preallocation") {
        let cluster = 2 << 20;
        // Not every cluster lets itself be compressed: it is written plainly then, or refused.
        let _ = qemu::io(image, "qcow2", &[format!("write -c -P 7 {cluster} 512k")]);
    }
    // Narrow refcounts cannot count a snapshot's references besides the image's.
    let narrow = ["refcount_bits=1", "refcount_bits=4"].iter().any(|bits| options.contains(bits));
    if !narrow && rng.random() {
        let _ = qemu::img(args!["snapshot", "-c", "before", image]).ok();
        let commands: Vec<String> = (0..3).map(|_| write(rng, "write")).collect();
        let _ = qemu::io(image, "qcow2", &commands).ok();
    }
    if !options.contains("0.10") && rng.random() {
        let _ = qemu::img(args!["bitmap", "--add", "-g", "4k", image, "b"]).ok();
        let _ = qemu::io(image, "qcow2", &[write(rng, "write")]).ok();
    }
    qemu::assert_clean(image);
}

/// What was done to an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Damage {
    /// A cluster's refcount is another.
    Refcount,
    /// A COPIED flag is flipped.
    Copied,
    /// An L2 entry is lost, and its cluster leaked.
    EntryLost,
    /// An L2 entry leads to another entry's cluster.
    EntryElsewhere,
    /// A reserved bit of an L2 entry is set.
    EntryReserved,
    /// An entry of the refcount table is lost.
    BlockLost,
    /// An entry of the refcount table has a reserved bit.
    BlockReserved,
    /// An L2 entry is not at a cluster's start.
    EntryMisaligned,
    /// An L1 entry leads past the end of the file.
    TablePastEnd,
}

impl Damage {
    pub(crate) const ALL: [Self; 9] = [
        Self::Refcount,
        Self::Copied,
        Self::EntryLost,
        Self::EntryElsewhere,
        Self::EntryReserved,
        Self::BlockLost,
        Self::BlockReserved,
        Self::EntryMisaligned,
        Self::TablePastEnd,
    ];

    /// Whether a repair can make the image consistent without guessing.
    pub(crate) fn is_repairable(self) -> bool {
        !matches!(self, Self::EntryMisaligned | Self::TablePastEnd)
    }

    /// Whether QEMU counts it as is done here.
    pub(crate) fn is_counted_alike(self) -> bool {
        matches!(self, Self::Refcount | Self::Copied | Self::EntryLost | Self::EntryElsewhere)
    }
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// An image's bytes and where its tables are.
struct Open {
    bytes: Vec<u8>,
    header: Header,
    geometry: Geometry,
}

impl Open {
    fn be64(&self, at: u64) -> u64 {
        u64::from_be_bytes(self.bytes[at as usize..at as usize + 8].try_into().unwrap())
    }

    fn put(&mut self, at: u64, bytes: &[u8]) {
        self.bytes[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    }

    /// Where the entries of the active L1 table that lead to a table are.
    fn l1_entries(&self) -> Vec<u64> {
        let start = self.header.l1_table_offset.get();
        let all = (0..u64::from(self.header.l1_size)).map(|index| start + index * 8);
        all.filter(|at| self.be64(*at) != 0).collect()
    }

    /// Where the standard L2 entries with a host cluster are.
    fn l2_entries(&self) -> Vec<u64> {
        let size = self.geometry.l2_entry_size() as u64;
        let tables = self.l1_entries();
        let tables = tables
            .iter()
            .filter_map(|at| L1Entry::from_raw(self.be64(*at)).offset(&self.geometry).unwrap());
        tables
            .flat_map(|table| (0..self.geometry.l2_entries()).map(move |n| table.get() + n * size))
            .filter(|at| {
                let entry = L2Entry { descriptor: self.be64(*at), subclusters: 0 };
                !entry.is_compressed() && self.be64(*at) & 0x00ff_ffff_ffff_fe00 != 0
            })
            .collect()
    }
}

/// Damages an image in one place; `false` if it has no such place.
pub(crate) fn inflict(image: &Path, damage: Damage, rng: &mut StdRng) -> bool {
    let bytes = fs::read(image).unwrap();
    let header = Header::parse(&bytes).unwrap();
    let geometry = header.geometry().unwrap();
    let mut open = Open { bytes, header, geometry };
    let done = match damage {
        Damage::Refcount => refcount(&mut open, rng),
        Damage::BlockLost => {
            let at = open.header.refcount_table_offset.get();
            open.put(at, &[0; 8]);
            true
        }
        Damage::BlockReserved => {
            let at = open.header.refcount_table_offset.get();
            let entry = open.be64(at) | 4;
            open.put(at, &entry.to_be_bytes());
            true
        }
        Damage::TablePastEnd => {
            let Some(at) = pick(&open.l1_entries(), rng) else { return false };
            open.put(at, &((1u64 << 45) | 1 << 63).to_be_bytes());
            true
        }
        Damage::Copied if rng.random_range(0..4) == 0 => {
            let Some(at) = pick(&open.l1_entries(), rng) else { return false };
            let entry = open.be64(at) ^ 1 << 63;
            open.put(at, &entry.to_be_bytes());
            true
        }
        _ => l2_entry(&mut open, damage, rng),
    };
    fs::write(image, &open.bytes).unwrap();
    done
}

fn refcount(open: &mut Open, rng: &mut StdRng) -> bool {
    let clusters = open.bytes.len() as u64 / open.geometry.cluster_size();
    let cluster = HostCluster::new(rng.random_range(0..clusters));
    let (table, block) = open.geometry.refcount_position(cluster);
    let at = open.be64(open.header.refcount_table_offset.get() + table * 8);
    let entry = RefcountTableEntry::from_raw(at).offset(&open.geometry).unwrap();
    let Some(at) = entry.map(|offset| offset.get() as usize) else { return false };
    let size = open.geometry.cluster_size() as usize;
    let order = open.geometry.refcount_order();
    let bytes = &mut open.bytes[at..at + size];
    let old = order.read(bytes, block).unwrap();
    let new = rng.random_range(0..=order.max().min(3));
    order.write(bytes, block, new).unwrap();
    old != new
}

fn l2_entry(open: &mut Open, damage: Damage, rng: &mut StdRng) -> bool {
    let entries = open.l2_entries();
    let (Some(at), Some(other)) = (pick(&entries, rng), pick(&entries, rng)) else { return false };
    let (entry, another) = (open.be64(at), open.be64(other));
    let new = match damage {
        Damage::Copied => entry ^ 1 << 63,
        Damage::EntryLost => 0,
        Damage::EntryElsewhere => another,
        Damage::EntryReserved => entry | 1 << rng.random_range(56..62),
        Damage::EntryMisaligned => (entry & !1) ^ 512,
        _ => unreachable!("{damage} is no L2 entry's"),
    };
    if damage == Damage::EntryLost && open.geometry.extended_l2() {
        open.put(at + 8, &[0; 8]);
    }
    if damage == Damage::EntryElsewhere && open.geometry.extended_l2() {
        let bitmap = open.be64(other + 8);
        open.put(at + 8, &bitmap.to_be_bytes());
    }
    if damage == Damage::EntryMisaligned && open.geometry.cluster_size() == 512 {
        return false;
    }
    open.put(at, &new.to_be_bytes());
    new != entry
}

fn pick(places: &[u64], rng: &mut impl Rng) -> Option<u64> {
    (!places.is_empty()).then(|| places[rng.random_range(0..places.len())])
}
