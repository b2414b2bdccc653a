//! Sound images of every sort, made by QEMU and by the engine, to be damaged.

use crate::damaged::sides::{qemu_checks, qemu_img, qemu_io};
use futures_executor::block_on;
use isobath_disk::{Disk, MetadataMode, NewDisk, OpenOptions, ZeroFlags, create};
use isobath_qcow2::{CompressionType, Header};
use isobath_storage::IoBuf;
use isobath_storage::memory::MemoryHost;
use isobath_storage_test::any::ToAny;
use isobath_testkit::args;
use rand::RngExt;
use rand::rngs::StdRng;
use std::fs;
use std::path::{Path, PathBuf};

/// The image's name, in a directory of its own.
pub(crate) const IMAGE: &str = "image.qcow2";
/// Its backing file, where it has one.
pub(crate) const BASE: &str = "base.qcow2";
/// Its external data file, where it has one.
pub(crate) const DATA: &str = "data.raw";

/// An image and the files that belong to it.
pub(crate) struct Sample {
    /// How it was made.
    pub(crate) what: String,
    pub(crate) image: Vec<u8>,
    /// Its other files, by their names.
    pub(crate) others: Vec<(&'static str, Vec<u8>)>,
    /// The disk's size in bytes.
    pub(crate) size: u64,
    /// Bytes of a cluster.
    pub(crate) cluster_size: u64,
    /// The qcow2 version.
    pub(crate) version: u32,
}

/// Options of `qemu-img create`; what follows `+` says what else the image has.
const BY_QEMU: &[&str] = &[
    "",
    "+snapshots,bitmaps",
    "cluster_size=4k+snapshots,compressed",
    "cluster_size=512",
    "cluster_size=512,refcount_bits=64+snapshots,bitmaps,compressed",
    "cluster_size=1k,refcount_bits=2+compressed",
    "cluster_size=2M",
    "compat=0.10,cluster_size=4k+compressed,snapshots",
    "compat=0.10,cluster_size=4k+base",
    "refcount_bits=1,cluster_size=4k",
    "refcount_bits=4,cluster_size=4k+compressed",
    "refcount_bits=64,cluster_size=4k+bitmaps",
    "extended_l2=on,cluster_size=16k+compressed,snapshots",
    "extended_l2=on,cluster_size=32k+base,bitmaps",
    "lazy_refcounts=on,cluster_size=4k+snapshots",
    "compression_type=zstd,cluster_size=8k+compressed,bitmaps",
    "preallocation=metadata,cluster_size=4k",
    "cluster_size=4k+base,compressed,snapshots",
    "data_file=data.raw,cluster_size=4k+bitmaps",
    "data_file=data.raw,data_file_raw=on,cluster_size=64k",
    "data_file=data.raw,extended_l2=on,cluster_size=16k",
];

/// Makes all of them.
pub(crate) fn make(rng: &mut StdRng, directory: &Path) -> Vec<Sample> {
    let mut pool: Vec<Sample> =
        BY_QEMU.iter().map(|options| by_qemu(options, rng, directory)).collect();
    for new in [
        NewDisk::default().cluster_size(4096),
        NewDisk::default().cluster_size(512).refcount_bits(1),
        NewDisk::default().cluster_size(16 << 10).extended_l2(true),
        NewDisk::default().cluster_size(4096).version(2),
        NewDisk::default()
            .cluster_size(8192)
            .compression_type(CompressionType::Zstd)
            .refcount_bits(8),
    ] {
        pool.push(by_engine(&new, rng));
    }
    pool
}

fn range(rng: &mut StdRng, size: u64) -> (u64, u64) {
    let offset = rng.random_range(0..size / 512) * 512;
    let length = rng.random_range(1..=(size - offset).min(100 << 10) / 512) * 512;
    (offset, length)
}

fn writes(rng: &mut StdRng, size: u64, count: usize) -> Vec<String> {
    let command = |_| {
        let (offset, length) = range(rng, size);
        match rng.random_range(0..8) {
            0 => format!("write -z {offset} {length}"),
            1 => format!("discard {offset} {length}"),
            _ => format!("write -P {} {offset} {length}", rng.random_range(1..256)),
        }
    };
    (0..count).map(command).collect()
}

fn by_qemu(options: &str, rng: &mut StdRng, directory: &Path) -> Sample {
    let (options, extras) = options.split_once('+').unwrap_or((options, ""));
    let has = |what: &str| extras.split(',').any(|extra| extra == what);
    let directory = directory.join("pool");
    fs::create_dir_all(&directory).unwrap();
    let path = |name: &str| directory.join(name);
    let size: u64 = if options.contains("2M") { 8 << 20 } else { 1 << 20 };
    let mut others = Vec::new();
    let mut create = args!["create", "-q", "-f", "qcow2"];
    if !options.is_empty() {
        create.extend(args!["-o", options]);
    }
    if has("base") {
        let base = args!["create", "-q", "-f", "qcow2", BASE, (size / 2).to_string()];
        let _ = qemu_img(&directory, base).ok();
        fs::rename(path(BASE), path(IMAGE)).unwrap();
        let _ = qemu_io(&directory, &writes(rng, size / 2, 6)).ok();
        fs::rename(path(IMAGE), path(BASE)).unwrap();
        others.push((BASE, fs::read(path(BASE)).unwrap()));
        create.extend(args!["-b", BASE, "-F", "qcow2"]);
    }
    create.extend(args![IMAGE, size.to_string()]);
    let _ = qemu_img(&directory, create).ok();
    let _ = qemu_io(&directory, &writes(rng, size, 10)).ok();
    if has("compressed") {
        for _ in 0..3 {
            let at = rng.random_range(0..size / (64 << 10)) * (64 << 10);
            // Not every cluster lets itself be compressed: it is written plainly then, or refused.
            let _ = qemu_io(&directory, &[format!("write -c -P 7 {at} 64k")]);
        }
    }
    if has("bitmaps") {
        for name in ["one", "two"] {
            let _ = qemu_img(&directory, args!["bitmap", "--add", "-g", "4k", IMAGE, name]).ok();
        }
        let _ = qemu_io(&directory, &writes(rng, size, 3)).ok();
    }
    if has("snapshots") {
        for name in ["first", "second"] {
            let _ = qemu_img(&directory, args!["snapshot", "-c", name, IMAGE]).ok();
            let _ = qemu_io(&directory, &writes(rng, size, 4)).ok();
        }
    }
    let _ = qemu_checks(&directory).ok();
    if options.contains("data_file") {
        others.push((DATA, fs::read(path(DATA)).unwrap()));
    }
    let image = fs::read(path(IMAGE)).unwrap();
    let cluster_size = Header::parse(&image).unwrap().geometry().unwrap().cluster_size();
    let sample = Sample {
        what: format!("by QEMU, '{options}' with '{extras}'"),
        image,
        others,
        size,
        cluster_size,
        version: if options.contains("compat=0.10") { 2 } else { 3 },
    };
    fs::remove_dir_all(&directory).unwrap();
    sample
}

fn by_engine(new: &NewDisk, rng: &mut StdRng) -> Sample {
    let size = 1 << 20;
    let host = MemoryHost::new();
    let name = PathBuf::from(IMAGE);
    block_on(async {
        create(&host.any(), &name, &new.clone().size(size)).await.unwrap();
        let options =
            OpenOptions::new().writable(true).metadata(MetadataMode::Auto).journal_size(64 << 10);
        let disk = Disk::open(host.any(), &name, &options).await.unwrap();
        for number in 0..20 {
            let (offset, length) = range(rng, size);
            let bytes = vec![rng.random_range(1..=255); length as usize];
            match rng.random_range(0..10) {
                0 => disk.discard(offset, length).await.unwrap(),
                1 => disk.write_zeroes(offset, length, ZeroFlags::default()).await.unwrap(),
                2 | 3 => {
                    let at = offset / new.cluster_size * new.cluster_size;
                    let whole = vec![bytes[0]; new.cluster_size as usize];
                    drop(disk.write_compressed(at, IoBuf::copy_of(&whole)).await.unwrap());
                }
                _ => drop(disk.write(offset, IoBuf::copy_of(&bytes)).await.unwrap()),
            }
            if number % 5 == 0 {
                disk.flush().await.unwrap();
            }
        }
        disk.close().await.unwrap();
    });
    Sample {
        what: format!("by Isobath, {new:?}"),
        image: host.contents(IMAGE).unwrap(),
        others: Vec::new(),
        size,
        cluster_size: new.cluster_size,
        version: new.version,
    }
}
