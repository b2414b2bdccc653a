//! Valid images to start from, and what is done to them.

use isobath_disk::{Disk, NewDisk, OpenOptions, ZeroFlags, create};
use isobath_qcow2::{CompressionType, Header};
use isobath_storage::IoBuf;
use isobath_storage::memory::MemoryHost;
use isobath_storage_test::any::ToAny;
use isobath_testkit::{args, qemu};
use std::ops::Range;
use std::path::Path;

/// The name of the image that is damaged.
pub(crate) const IMAGE: &str = "/disks/image.qcow2";
/// Its backing file, where it has one.
pub(crate) const BASE: &str = "/disks/base.raw";
/// A file that none of them names.
pub(crate) const SECRET: &str = "/disks/secret";

/// What [`BASE`] holds.
pub(crate) fn base() -> Vec<u8> {
    vec![0xba; 70_000]
}

/// An image's bytes, and which of them are its tables.
#[derive(Clone)]
pub(crate) struct Image {
    pub(crate) bytes: Vec<u8>,
    pub(crate) tables: Vec<Range<usize>>,
}

/// Places in the header.
pub(crate) mod at {
    pub(crate) const BACKING_OFFSET: usize = 8;
    pub(crate) const BACKING_SIZE: usize = 16;
    pub(crate) const CLUSTER_BITS: usize = 20;
    pub(crate) const SIZE: usize = 24;
    pub(crate) const CRYPT_METHOD: usize = 32;
    pub(crate) const L1_SIZE: usize = 36;
    pub(crate) const L1_OFFSET: usize = 40;
    pub(crate) const REFCOUNT_TABLE: usize = 48;
    pub(crate) const REFCOUNT_CLUSTERS: usize = 56;
    pub(crate) const SNAPSHOTS: usize = 60;
    pub(crate) const SNAPSHOTS_OFFSET: usize = 64;
    pub(crate) const INCOMPATIBLE: usize = 72;
    pub(crate) const AUTOCLEAR: usize = 88;
    pub(crate) const REFCOUNT_ORDER: usize = 96;
    pub(crate) const HEADER_LENGTH: usize = 100;
    pub(crate) const COMPRESSION: usize = 104;
}

impl Image {
    pub(crate) fn put32(&mut self, at: usize, value: u32) {
        self.bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
    }

    pub(crate) fn put64(&mut self, at: usize, value: u64) {
        self.bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
    }

    pub(crate) fn get32(&self, at: usize) -> u32 {
        u32::from_be_bytes(self.bytes[at..at + 4].try_into().unwrap())
    }

    pub(crate) fn get64(&self, at: usize) -> u64 {
        u64::from_be_bytes(self.bytes[at..at + 8].try_into().unwrap())
    }

    /// Where the first L2 table is.
    pub(crate) fn l2(&self) -> usize {
        (self.get64(self.get64(at::L1_OFFSET) as usize) & 0x00ff_ffff_ffff_fe00) as usize
    }

    /// Where the first refcount block is.
    pub(crate) fn refcount_block(&self) -> usize {
        self.get64(self.get64(at::REFCOUNT_TABLE) as usize) as usize
    }

    /// Finds the tables of a valid image.
    fn of(bytes: Vec<u8>) -> Self {
        let header = Header::parse(&bytes).unwrap();
        let cluster = 1_usize << header.cluster_bits;
        let mut image = Self { bytes, tables: Vec::new() };
        let length = image.bytes.len();
        let mut add = |start: u64, size: usize| {
            let start = start as usize;
            image.tables.push(start..(start + size).min(length));
        };
        add(0, cluster.min(1024));
        let l1 = header.l1_table_offset.get();
        let l1_bytes = header.l1_size as usize * 8;
        add(l1, l1_bytes);
        let table = header.refcount_table_offset.get();
        let table_bytes = header.refcount_table_clusters as usize * cluster;
        add(table, table_bytes);
        if header.nb_snapshots > 0 {
            add(header.snapshots_offset.get(), 200);
        }
        if let Some(bitmaps) = header.bitmaps() {
            add(bitmaps.directory_offset.get(), bitmaps.directory_size as usize);
        }
        let entries =
            |start: u64, bytes: usize| (0..bytes / 8).map(move |n| start as usize + n * 8);
        for entry in entries(l1, l1_bytes).chain(entries(table, table_bytes)) {
            let offset = image.get64(entry) & 0x00ff_ffff_ffff_fe00;
            if offset != 0 {
                image.tables.push(offset as usize..(offset as usize + cluster).min(length));
            }
        }
        image
    }
}

/// An image made here, with data, zeroes, compressed clusters and holes.
pub(crate) async fn made(new: &NewDisk) -> Image {
    let host = MemoryHost::new();
    host.insert(BASE, &base());
    create(&host.any(), Path::new(IMAGE), &new.clone().size(1 << 20)).await.unwrap();
    let options = OpenOptions::new().writable(true);
    let disk = Disk::open(host.any(), Path::new(IMAGE), &options).await.unwrap();
    let cluster = new.cluster_size;
    disk.write(0, IoBuf::copy_of(&vec![1; 100_000])).await.unwrap();
    disk.write_zeroes(2 * cluster, 2 * cluster, ZeroFlags::default()).await.unwrap();
    for n in 5..8 {
        let data = IoBuf::copy_of(&vec![n as u8; cluster as usize]);
        disk.write_compressed(n * cluster, data).await.unwrap();
    }
    disk.write((1 << 20) - 700, IoBuf::copy_of(&[2; 700])).await.unwrap();
    disk.close().await.unwrap();
    Image::of(host.contents(IMAGE).unwrap())
}

/// Small clusters, version 3.
pub(crate) fn plain() -> NewDisk {
    NewDisk::default().cluster_size(4096)
}

/// Over [`BASE`].
pub(crate) fn overlay() -> NewDisk {
    plain().backing_file("base.raw", "raw")
}

/// Images of every kind, to damage at random.
pub(crate) async fn kinds() -> Vec<Image> {
    let mut images = vec![with_snapshot_and_bitmap()];
    for new in [
        plain(),
        overlay(),
        plain().version(2),
        plain().cluster_size(16384).extended_l2(true),
        plain().cluster_size(512).refcount_bits(1),
        overlay()
            .cluster_size(65536)
            .refcount_bits(64)
            .compression_type(CompressionType::Zstd)
            .lazy_refcounts(true),
    ] {
        images.push(made(&new).await);
    }
    images
}

/// An image made by QEMU with what only it makes.
pub(crate) fn with_snapshot_and_bitmap() -> Image {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    qemu::create(&path, "qcow2", 1 << 20, "cluster_size=4096");
    let _ = qemu::io(&path, "qcow2", &["write -P 1 0 100k", "write -z 200k 8k"]).ok();
    let _ = qemu::img(args!["snapshot", "-c", "first", &path]).ok();
    let _ = qemu::img(args!["bitmap", "--add", "-g", "4096", &path, "changes"]).ok();
    let _ = qemu::io(&path, "qcow2", &["write -P 2 50k 100k", "discard 8k 8k"]).ok();
    Image::of(std::fs::read(path).unwrap())
}
