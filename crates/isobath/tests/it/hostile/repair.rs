//! Images that are marked as not closed, whose repair would take time and memory without end.

use super::images::at;
use super::memory;
use isobath_disk::{
    CheckOptions, Disk, DiskError, MemoryLimit, NewDisk, OpenOptions, Repair, Trust, check, create,
};
use isobath_ring::block_on;
use isobath_storage::IoBuf;
use isobath_storage_file::FileHost;
use isobath_storage_test::any::ToAny;
use isobath_testkit::loop_device::LoopDevice;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// The incompatible feature.
const DIRTY: u64 = 1;
const MIB: u64 = 1 << 20;

/// A sparse image that says that it was not closed.
struct Dirty {
    directory: TempDir,
    file: File,
    cluster: u64,
}

impl Dirty {
    fn new(size: u64, cluster: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        let new = NewDisk::new(size).cluster_size(cluster);
        block_on(create(&FileHost.any(), &path, &new)).unwrap();
        let file = File::options().read(true).write(true).open(path).unwrap();
        let dirty = Self { directory, file, cluster };
        dirty.put64(at::INCOMPATIBLE as u64, DIRTY);
        dirty
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("image")
    }

    fn put64(&self, at: u64, value: u64) {
        self.file.write_all_at(&value.to_be_bytes(), at).unwrap();
    }

    fn get64(&self, at: u64) -> u64 {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, at).unwrap();
        u64::from_be_bytes(bytes)
    }

    /// Makes the file longer, by a hole.
    fn grow(&self, length: u64) {
        self.file.set_len(length).unwrap();
    }

    fn end(&self) -> u64 {
        self.file.metadata().unwrap().len().next_multiple_of(self.cluster)
    }

    /// Adds a snapshot table with so many snapshots, whose L1 tables of 32 MiB are one hole after another.
    fn add_snapshots(&self, count: u64) {
        let table = self.end();
        let first = table + 64 * 1024;
        let mut bytes = Vec::new();
        for number in 0..count {
            let id = format!("{number:08}");
            bytes.extend((first + number * 32 * MIB).to_be_bytes());
            bytes.extend((4 * MIB as u32).to_be_bytes());
            bytes.extend([0, 8, 0, 0]);
            // The times, and no state of a machine.
            bytes.extend([0; 20]);
            bytes.extend(16_u32.to_be_bytes());
            bytes.extend([0; 8]);
            bytes.extend(MIB.to_be_bytes());
            bytes.extend(id.as_bytes());
        }
        self.file.write_all_at(&bytes, table).unwrap();
        self.file.write_all_at(&(count as u32).to_be_bytes(), at::SNAPSHOTS as u64).unwrap();
        self.put64(at::SNAPSHOTS_OFFSET as u64, table);
        self.grow(first + count * 32 * MIB);
    }

    /// Adds a bitmap in use, whose table leads to so many places of the file that are `apart` from each other.
    fn scatter_bitmap(&self, entries: u64, apart: u64) {
        let (directory, table) = (self.end(), self.end() + self.cluster);
        let mut entry = Vec::new();
        entry.extend(table.to_be_bytes());
        entry.extend((entries as u32).to_be_bytes());
        // In use; a bitmap of dirty clusters of 64 KiB, named "x".
        entry.extend([0, 0, 0, 1, 1, 16, 0, 1, 0, 0, 0, 0, b'x', 0, 0, 0, 0, 0, 0, 0]);
        self.file.write_all_at(&entry, directory).unwrap();
        self.scatter_at(table, entries, apart);
        let mut extension = Vec::new();
        extension.extend(0x2385_2875_u32.to_be_bytes());
        extension.extend(24_u32.to_be_bytes());
        extension.extend([0, 0, 0, 1, 0, 0, 0, 0]);
        extension.extend((entry.len() as u64).to_be_bytes());
        extension.extend(directory.to_be_bytes());
        extension.extend([0; 8]);
        let header = self.get64(at::HEADER_LENGTH as u64) >> 32;
        self.file.write_all_at(&extension, header).unwrap();
        self.put64(at::AUTOCLEAR as u64, 1);
    }

    /// Gives it a refcount table that leads to so many places of the file that are `apart` from each other.
    fn scatter_blocks(&self, entries: u64, apart: u64) {
        let table = self.end();
        self.scatter_at(table, entries, apart);
        self.put64(at::REFCOUNT_TABLE as u64, table);
        let clusters = (entries * 8).div_ceil(self.cluster) as u32;
        self.file.write_all_at(&clusters.to_be_bytes(), at::REFCOUNT_CLUSTERS as u64).unwrap();
    }

    /// Lets so many entries of the L1 table lead to places of the file that are `apart` from each other.
    fn scatter(&self, entries: u64, apart: u64) {
        self.scatter_at(self.get64(at::L1_OFFSET as u64), entries, apart);
    }

    /// Makes a table of so many entries, which lead to places that are `apart` from each other.
    fn scatter_at(&self, table: u64, entries: u64, apart: u64) {
        let first = self.end().max(table + entries * 8).next_multiple_of(apart);
        let all: Vec<u8> = (0..entries).flat_map(|n| (first + n * apart).to_be_bytes()).collect();
        self.file.write_all_at(&all, table).unwrap();
        self.grow(first + entries * apart);
    }

    /// Everything that is not a hole: the beginning, and the space that it takes.
    fn state(&self) -> (Vec<u8>, u64) {
        use std::os::unix::fs::MetadataExt;
        let mut bytes = vec![0; 8 << 20];
        let length = self.file.read_at(&mut bytes, 0).unwrap();
        bytes.truncate(length);
        // Until it is written back, space may be counted that the file does not take in the end.
        self.file.sync_all().unwrap();
        (bytes, self.file.metadata().unwrap().blocks())
    }

    /// Opens it for writing.
    fn open(&self, options: OpenOptions) -> Result<(), DiskError> {
        open(&self.path(), options)
    }

    /// Opens it for writing, untrusted, which must be refused, with the way out, and change nothing.
    fn is_refused(&self, what: &str) {
        let before = self.state();
        memory::restart();
        let message = self.open(untrusted()).unwrap_err().to_string();
        assert!(memory::peak() < 600 << 20, "{} bytes", memory::peak());
        for part in ["image", "dirty bit", what, "--untrusted", "isobath check -r all"] {
            assert!(message.contains(part), "{message}");
        }
        assert!(self.state() == before);
        // Who only reads it has no need of refcounts.
        let read = async {
            let disk = Disk::open(FileHost.any(), &self.path(), &OpenOptions::new()).await?;
            disk.read(0, IoBuf::zeroed(512)).await
        };
        assert_eq!(*block_on(read).unwrap(), [0; 512]);
    }
}

fn untrusted() -> OpenOptions {
    OpenOptions::new().trust(Trust::Within(Vec::new()))
}

fn open(path: &Path, options: OpenOptions) -> Result<(), DiskError> {
    block_on(Disk::open(FileHost.any(), path, &options.writable(true))).map(drop)
}

#[test]
fn snapshots_with_more_tables_than_the_file_has_bytes_are_not_read_at_open() {
    let image = Dirty::new(MIB, 64 * 1024);
    image.add_snapshots(33);
    image.is_refused("bytes of tables");
    // Who trusts it has it repaired.
    let options = CheckOptions { repair: Repair::All, ..CheckOptions::default() };
    let report = block_on(check(&FileHost.any(), &image.path(), &options, &mut |_| ())).unwrap();
    assert!(report.is_clean(), "{report:?}");
    image.open(untrusted()).unwrap();
}

#[test]
fn a_trusted_image_is_repaired_at_open_whatever_it_takes() {
    let image = Dirty::new(MIB, 64 * 1024);
    image.add_snapshots(33);
    image.open(OpenOptions::new()).unwrap();
    assert_eq!(image.get64(at::INCOMPATIBLE as u64), 0);
}

#[test]
fn a_device_counts_as_filled_to_its_length() {
    let image = Dirty::new(MIB, 64 * 1024);
    image.add_snapshots(33);
    let device = LoopDevice::new(&image.path());
    open(device.path(), untrusted()).unwrap();
    device.write_back();
    assert_eq!(image.get64(at::INCOMPATIBLE as u64), 0);
}

#[test]
fn a_file_with_as_many_tables_as_it_has_bytes_is_repaired_at_open() {
    let image = Dirty::new(MIB, 64 * 1024);
    image.add_snapshots(2);
    image.open(untrusted()).unwrap();
    assert_eq!(image.get64(at::INCOMPATIBLE as u64), 0);
}

#[test]
fn tables_all_over_a_sparse_file_do_not_fill_the_memory_at_open() {
    // Each leads to clusters of which none before has been counted.
    let entries = 800_000;
    let image = Dirty::new(entries * 64 * 512, 512);
    image.scatter(entries, 256 * 512);
    image.is_refused("bytes of memory");
}

#[test]
fn one_table_that_is_referred_to_thousands_of_times_is_read_once() {
    let image = Dirty::new(1_000_000 * 64 * 512, 512);
    image.scatter(1_000_000, 0x200);
    let table = image.get64(image.get64(at::L1_OFFSET as u64));
    let all: Vec<u8> = (0..1_000_000).flat_map(|_| table.to_be_bytes()).collect();
    image.file.write_all_at(&all, image.get64(at::L1_OFFSET as u64)).unwrap();
    let before = image.state();
    memory::restart();
    // Each entry is another part of the disk, so that the table is wrong.
    let message = image.open(untrusted()).unwrap_err().to_string();
    assert!(message.contains("could not be repaired"), "{message}");
    assert!(memory::peak() < 600 << 20, "{} bytes", memory::peak());
    assert!(image.get64(at::INCOMPATIBLE as u64) == DIRTY && image.state().1 <= before.1 + 64);
}

#[test]
fn a_repair_takes_part_of_the_limit_on_memory_and_gives_it_back() {
    let image = Dirty::new(100_000 * 64 * 512, 512);
    image.scatter(100_000, 256 * 512);
    let before = image.state();
    let limit = MemoryLimit::new(20 << 20);
    let options = || OpenOptions::new().memory(Some(limit.clone()));
    let message = image.open(options()).unwrap_err().to_string();
    assert!(message.contains("the repair of its refcounts"), "{message}");
    assert!(message.contains("raise the memory limit"), "{message}");
    assert!(image.state() == before);
    assert_eq!(limit.reserved(), 0);
    let limit = MemoryLimit::new(1 << 30);
    image.open(OpenOptions::new().memory(Some(limit.clone()))).unwrap();
    assert_eq!(limit.reserved(), 0);
}

#[test]
fn what_a_repair_keeps_is_reserved_before_it_is_kept() {
    type Scatter = fn(&Dirty, u64, u64);
    let tables: [(&str, u64, Scatter); 3] = [
        ("L2 tables", 100_000, Dirty::scatter),
        ("a bitmap's clusters", 200_000, Dirty::scatter_bitmap),
        ("refcount blocks", 200_000, Dirty::scatter_blocks),
    ];
    for (what, entries, scatter) in tables {
        let image = Dirty::new(100_000 * 64 * 512, 512);
        scatter(&image, entries, 256 * 512);
        let before = image.state();
        let limit = MemoryLimit::new(64 << 20);
        memory::restart();
        let opened = image.open(OpenOptions::new().memory(Some(limit.clone())));
        let peak = memory::peak();
        let message = opened.unwrap_err().to_string();
        assert!(message.contains("the repair of its refcounts"), "{what}: {message}");
        assert!(peak < 80 << 20, "{what}: {peak} bytes");
        assert!(image.state() == before, "{what}");
        assert_eq!(limit.reserved(), 0);
    }
}
