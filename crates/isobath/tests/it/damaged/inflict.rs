//! Damage by structure: fields of the header, entries of tables, refcounts, descriptors, lists.

use isobath_qcow2::header::field;
use isobath_qcow2::{Bitmap, Geometry, Header, HostCluster, L1Entry, RefcountTableEntry, Snapshot};
use rand::RngExt;
use rand::rngs::StdRng;
use std::ops::Range;

/// Bits 9 to 55 of an entry: its offset.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// The fields of a header: name, place, bytes.
const FIELDS: &[(&str, usize, usize)] = &[
    ("magic", 0, 4),
    ("version", 4, 4),
    ("backing_file_offset", 8, 8),
    ("backing_file_size", 16, 4),
    ("cluster_bits", 20, 4),
    ("size", 24, 8),
    ("crypt_method", 32, 4),
    ("l1_size", field::L1_SIZE, 4),
    ("l1_table_offset", field::L1_SIZE + 4, 8),
    ("refcount_table_offset", field::REFCOUNT_TABLE_OFFSET, 8),
    ("refcount_table_clusters", field::REFCOUNT_TABLE_CLUSTERS, 4),
    ("nb_snapshots", field::NB_SNAPSHOTS, 4),
    ("snapshots_offset", field::NB_SNAPSHOTS + 4, 8),
    ("incompatible_features", field::INCOMPATIBLE_FEATURES, 8),
    ("compatible_features", field::INCOMPATIBLE_FEATURES + 8, 8),
    ("autoclear_features", field::AUTOCLEAR_FEATURES, 8),
    ("refcount_order", 96, 4),
    ("header_length", 100, 4),
    ("compression_type", 104, 1),
];

/// What is damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Field,
    Extensions,
    L1Entry,
    L2Entry,
    Subclusters,
    Refcount,
    RefcountTableEntry,
    BitmapDirectory,
    BitmapTableEntry,
    SnapshotTable,
    SnapshotL1Entry,
    CompressedData,
    Length,
}

/// Each as often as it is here.
const PLACES: &[Place] = &[
    Place::Field,
    Place::Field,
    Place::Extensions,
    Place::L1Entry,
    Place::L1Entry,
    Place::L1Entry,
    Place::L2Entry,
    Place::L2Entry,
    Place::L2Entry,
    Place::L2Entry,
    Place::Subclusters,
    Place::Refcount,
    Place::Refcount,
    Place::Refcount,
    Place::RefcountTableEntry,
    Place::RefcountTableEntry,
    Place::BitmapDirectory,
    Place::BitmapTableEntry,
    Place::SnapshotTable,
    Place::SnapshotL1Entry,
    Place::CompressedData,
    Place::Length,
];

/// An image's bytes and where its tables are.
struct Image<'a> {
    bytes: Vec<u8>,
    header: Header,
    geometry: Geometry,
    rng: &'a mut StdRng,
}

/// Damages an image in one place or a few; returns its bytes, and what was done.
pub(crate) fn inflict(image: &[u8], rng: &mut StdRng) -> (Vec<u8>, String) {
    let header = Header::parse(image).unwrap();
    let geometry = header.geometry().unwrap();
    let times = [1, 1, 1, 1, 1, 2, 2, 3][rng.random_range(0..8)];
    let mut image = Image { bytes: image.to_vec(), header, geometry, rng };
    let mut done = Vec::new();
    while done.len() < times {
        let place = PLACES[image.rng.random_range(0..PLACES.len())];
        // Not every image has every place.
        if let Some(what) = image.damage(place) {
            done.push(what);
        }
    }
    (image.bytes, done.join("; "))
}

impl Image<'_> {
    fn size(&self) -> u64 {
        self.geometry.cluster_size()
    }

    fn get(&self, at: u64) -> u64 {
        let bytes = self.bytes.get(at as usize..).and_then(|rest| rest.first_chunk::<8>());
        bytes.map_or(0, |bytes| u64::from_be_bytes(*bytes))
    }

    fn put(&mut self, at: u64, bytes: &[u8]) -> bool {
        let Some(place) = self.bytes.get_mut(at as usize..at as usize + bytes.len()) else {
            return false;
        };
        place.copy_from_slice(bytes);
        true
    }

    fn pick(&mut self, places: &[u64]) -> Option<u64> {
        (!places.is_empty()).then(|| places[self.rng.random_range(0..places.len())])
    }

    /// One place, a used one (not zero) most of the time.
    fn pick_entry(&mut self, places: &[u64]) -> Option<u64> {
        let used: Vec<u64> = places.iter().copied().filter(|at| self.get(*at) != 0).collect();
        if self.rng.random_range(0..8) == 0 { self.pick(places) } else { self.pick(&used) }
    }

    /// Where the entries of a table are. Earlier damage may claim billions of them: no more than the file has room for.
    fn table(&self, offset: u64, entries: u64, width: u64) -> Vec<u64> {
        let entries = entries.min(self.bytes.len() as u64 / width);
        (0..entries).map(|index| offset.saturating_add(index * width)).collect()
    }

    fn l1(&self) -> Vec<u64> {
        self.table(self.header.l1_table_offset.get(), u64::from(self.header.l1_size), 8)
    }

    /// Where the entries of all L2 tables of these L1 tables are.
    fn l2_of(&self, l1: &[u64]) -> Vec<u64> {
        let offsets = l1.iter().filter_map(|at| {
            L1Entry::from_raw(self.get(*at)).offset(&self.geometry).ok().flatten()
        });
        let width = self.geometry.l2_entry_size() as u64;
        offsets.flat_map(|at| self.table(at.get(), self.geometry.l2_entries(), width)).collect()
    }

    fn snapshots(&self) -> Vec<(Range<u64>, Snapshot)> {
        let mut at = self.header.snapshots_offset.get();
        let mut found = Vec::new();
        for _ in 0..self.header.nb_snapshots.min(100) {
            let rest = self.bytes.get(at as usize..).unwrap_or_default();
            let Ok((snapshot, length)) = Snapshot::parse(rest) else { break };
            found.push((at..at + length as u64, snapshot));
            at = (at + length as u64).next_multiple_of(8);
        }
        found
    }

    fn snapshot_l1(&self) -> Vec<u64> {
        let tables = self.snapshots();
        let tables = tables.iter().map(|(_, snapshot)| snapshot);
        tables
            .flat_map(|one| self.table(one.l1_table_offset.get(), u64::from(one.l1_size), 8))
            .collect()
    }

    fn bitmaps(&self) -> Vec<Bitmap> {
        let Some(extension) = self.header.bitmaps() else { return Vec::new() };
        let (at, length) = (extension.directory_offset.get(), extension.directory_size);
        let bytes = self.bytes.get(at as usize..(at + length) as usize).unwrap_or_default();
        Bitmap::parse_directory(bytes, extension.count).unwrap_or_default()
    }

    /// Where something of the image's own begins.
    fn own(&mut self) -> u64 {
        let (l1, table) = (self.header.l1_table_offset, self.header.refcount_table_offset);
        let some = [
            0,
            l1.get(),
            table.get(),
            self.get(table.get()),
            self.get(l1.get()) & OFFSET,
            self.header.snapshots_offset.get(),
        ];
        some[self.rng.random_range(0..some.len())]
    }

    fn any_cluster(&mut self) -> u64 {
        let clusters = self.bytes.len() as u64 / self.size();
        self.rng.random_range(0..clusters.max(1)) * self.size()
    }

    /// Another value of the entry at `at`, which has an offset and flags.
    fn other(&mut self, at: u64, others: &[u64]) -> (u64, &'static str) {
        let entry = self.get(at);
        match self.rng.random_range(0..13) {
            0 => (0, "lost"),
            1 => (entry ^ 1 << 63, "the other flag"),
            2 => (entry | 1 << self.rng.random_range(56..62), "a reserved bit"),
            3 => (entry & !OFFSET, "flags only"),
            4 => (1 << 63, "COPIED only"),
            5 => {
                let at = self.pick_entry(others).unwrap_or(0);
                (self.get(at), "another's value")
            }
            6 => (entry & !OFFSET | self.own(), "at a table"),
            7 => (entry & !OFFSET | self.any_cluster(), "anywhere"),
            8 => {
                let past = self.bytes.len() as u64 + self.any_cluster();
                (entry & !OFFSET | past.next_multiple_of(self.size()), "past the end")
            }
            9 => (entry ^ 512 << self.rng.random_range(0..3), "a low bit of the offset"),
            10 => (self.rng.random(), "random"),
            11 => {
                let size = if self.geometry.extended_l2() { 16 } else { 8 };
                (self.get(at.saturating_sub(size)), "that of the entry before it")
            }
            _ => (entry ^ 1 << self.rng.random_range(0..64), "a flipped bit"),
        }
    }

    fn damage_entry(&mut self, what: &str, places: &[u64]) -> Option<String> {
        let at = self.pick_entry(places)?;
        let old = self.get(at);
        let (new, how) = self.other(at, places);
        (new != old && self.put(at, &new.to_be_bytes()))
            .then(|| format!("{what} at {at:#x}: {old:#x} becomes {new:#x} ({how})"))
    }

    fn flip(&mut self, what: &str, bytes: Range<u64>) -> Option<String> {
        let at = self.rng.random_range(bytes);
        let old = *self.bytes.get(at as usize)?;
        let new = if self.rng.random() {
            old ^ 1 << self.rng.random_range(0..8)
        } else {
            self.rng.random()
        };
        (new != old && self.put(at, &[new]))
            .then(|| format!("{what}: byte {at:#x}: {old:#x} becomes {new:#x}"))
    }

    fn damage(&mut self, place: Place) -> Option<String> {
        let what = format!("{place:?}");
        match place {
            Place::Field => self.field(),
            Place::Extensions => {
                let end = self.size().min(1024);
                self.flip(&what, 104..end)
            }
            Place::L1Entry => {
                let places = self.l1();
                self.damage_entry(&what, &places)
            }
            Place::L2Entry => {
                let mut l1 = self.l1();
                l1.extend(self.snapshot_l1());
                let places = self.l2_of(&l1);
                self.damage_entry(&what, &places)
            }
            Place::Subclusters => {
                if !self.geometry.extended_l2() {
                    return None;
                }
                let places = self.l2_of(&self.l1());
                let at = self.pick_entry(&places)? + 8;
                self.flip(&what, at..at + 8)
            }
            Place::Refcount => self.refcount(),
            Place::RefcountTableEntry => {
                let at = self.header.refcount_table_offset.get();
                let entries = u64::from(self.header.refcount_table_clusters) * self.size() / 8;
                let places = self.table(at, entries, 8);
                self.damage_entry(&what, &places)
            }
            Place::BitmapDirectory => {
                let extension = *self.header.bitmaps()?;
                let at = extension.directory_offset.get();
                self.flip(&what, at..at + extension.directory_size)
            }
            Place::BitmapTableEntry => {
                let bitmaps = self.bitmaps();
                let places: Vec<u64> = bitmaps
                    .iter()
                    .flat_map(|b| self.table(b.table_offset.get(), u64::from(b.table_size), 8))
                    .collect();
                self.damage_entry(&what, &places)
            }
            Place::SnapshotTable => {
                let snapshots = self.snapshots();
                let ranges: Vec<u64> = snapshots.iter().map(|(range, _)| range.start).collect();
                let at = self.pick(&ranges)?;
                self.flip(&what, at..at + 60)
            }
            Place::SnapshotL1Entry => {
                let places = self.snapshot_l1();
                self.damage_entry(&what, &places)
            }
            Place::CompressedData => {
                let places = self.l2_of(&self.l1());
                let compressed: Vec<u64> =
                    places.into_iter().filter(|at| self.get(*at) >> 62 == 1).collect();
                let at = self.pick(&compressed)?;
                let bits = 62 - (self.geometry.cluster_bits() - 8);
                let data = self.get(at) & ((1 << bits) - 1);
                self.flip(&what, data..data + 20)
            }
            Place::Length => {
                let length = self.bytes.len();
                let new = match self.rng.random_range(0..3) {
                    0 => self.rng.random_range(0..length),
                    1 => length - self.rng.random_range(1..=(self.size() as usize * 2).min(length)),
                    _ => length + self.rng.random_range(1..self.size() as usize * 4),
                };
                self.bytes.resize(new, 0);
                Some(format!("{what}: {length} becomes {new}"))
            }
        }
    }

    fn field(&mut self) -> Option<String> {
        let (name, at, width) = FIELDS[self.rng.random_range(0..FIELDS.len())];
        if self.header.version < 3 && at >= field::INCOMPATIBLE_FEATURES {
            return None;
        }
        let mut raw = [0; 8];
        raw[8 - width..].copy_from_slice(self.bytes.get(at..at + width)?);
        let old = u64::from_be_bytes(raw);
        let new = match self.rng.random_range(0..7) {
            0 => 0,
            1 => old.wrapping_add(1),
            2 => old.wrapping_sub(1),
            3 => old << 1,
            4 => self.own(),
            5 => self.rng.random(),
            _ => old ^ 1 << self.rng.random_range(0..width * 8),
        };
        let bytes = new.to_be_bytes();
        (new != old && self.put(at as u64, &bytes[8 - width..]))
            .then(|| format!("{name}: {old:#x} becomes {new:#x}"))
    }

    fn refcount(&mut self) -> Option<String> {
        let cluster = HostCluster::new(if self.rng.random_range(0..4) == 0 {
            self.rng.random_range(0..6)
        } else {
            self.any_cluster() / self.size()
        });
        let (table, index) = self.geometry.refcount_position(cluster);
        let entry = self.get(self.header.refcount_table_offset.get() + table * 8);
        let at = RefcountTableEntry::from_raw(entry).offset(&self.geometry).ok()??.get() as usize;
        let (size, order) = (self.size() as usize, self.geometry.refcount_order());
        let new = match self.rng.random_range(0..3) {
            0 => 0,
            1 => self.rng.random_range(0..=order.max().min(4)),
            _ => self.rng.random_range(0..=order.max()),
        };
        let block = self.bytes.get_mut(at..at + size)?;
        let old = order.read(block, index)?;
        order.write(block, index, new).ok()?;
        (old != new).then(|| format!("Refcount of cluster {cluster}: {old} becomes {new}"))
    }
}
