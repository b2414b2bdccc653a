//! L1, L2, refcount, snapshot and bitmap tables: those that QEMU writes are read as it reads them,
//! and it reads those that are written here.

use crate::common::{Image, write_file};
use isobath_qcow2::compress::compress;
use isobath_qcow2::{
    AutoclearFeatures, Bitmap, BitmapCluster, BitmapFlags, CompressionType, HostOffset, L1Entry,
    L2Entry, NewImage, RefcountTableEntry, Snapshot,
};
use isobath_testkit::{args, qemu};
use std::fs;
use std::path::Path;

const SIZE: u64 = (4 << 20) + 1536;

/// Text that compresses by about a half.
fn text(length: usize) -> Vec<u8> {
    (0u64..).flat_map(|n| (n * n % 1_000_003).to_string().into_bytes()).take(length).collect()
}

/// Writes of every sort, over an image with `options`.
fn make(path: &Path, options: &str) {
    qemu::create(path, "qcow2", SIZE, options);
    let _ = qemu::io(
        path,
        "qcow2",
        &[
            "write -P 1 0 300k",
            "write -P 2 1000k 5k",
            "write -z 64k 64k",
            "write -z -u 128k 64k",
            "write -P 3 2M 512k",
            "discard 2200k 128k",
            "write -P 4 4M 1536",
            "write -P 5 70000 700",
        ],
    )
    .ok();
}

#[test]
fn every_sort_of_image_is_read_as_qemu_reads_it() {
    let directory = tempfile::tempdir().unwrap();
    let (path, data) = (directory.path().join("i.qcow2"), directory.path().join("data"));
    for (n, options) in [
        "cluster_size=512",
        "cluster_size=4k,refcount_bits=1",
        "cluster_size=4k,refcount_bits=2",
        "refcount_bits=4",
        "refcount_bits=8",
        "compat=0.10",
        "cluster_size=2M,refcount_bits=32",
        "refcount_bits=64,lazy_refcounts=on",
        "extended_l2=on",
        "extended_l2=on,cluster_size=16k,refcount_bits=1",
        "data_file=DATA",
        "data_file=DATA,data_file_raw=on,cluster_size=4k",
        "data_file=DATA,extended_l2=on",
    ]
    .into_iter()
    .enumerate()
    {
        make(&path, &options.replace("DATA", data.to_str().unwrap()));
        let narrow = options.contains("refcount_bits=1") || options.contains("data_file");
        if !narrow {
            // Snapshots share clusters: refcounts of 2, and COPIED no longer set.
            let _ = qemu::img(args!["snapshot", "-c", "s", &path]).ok();
            let _ = qemu::io(&path, "qcow2", &["write -P 6 100k 100k"]).ok();
        }
        let image = Image::read(&path);
        let file = image.geometry.has_data_file().then(|| fs::read(&data).unwrap());
        let disk = qemu::read_disk(&path, "qcow2");
        assert!(image.disk(file.as_deref()) == disk, "image {n}: {options}");
        assert_eq!(image.references(), image.refcounts(), "image {n}: {options}");
        assert_eq!(image.header.nb_snapshots, u32::from(!narrow));
    }
}

#[test]
fn compressed_images_are_read_as_qemu_reads_them() {
    let directory = tempfile::tempdir().unwrap();
    let (plain, packed) = (directory.path().join("plain"), directory.path().join("packed"));
    make(&plain, "");
    // Text, which compresses by less than the patterns.
    let file = directory.path().join("text");
    fs::write(&file, text(200 << 10)).unwrap();
    let write = format!("write -s {} 3M 200k", file.display());
    let _ = qemu::io(&plain, "qcow2", &[write]).ok();
    let disk = qemu::read_disk(&plain, "qcow2");
    for options in [
        "compression_type=zlib,cluster_size=512",
        "compression_type=zstd,cluster_size=4k",
        "compression_type=zlib",
        "compression_type=zstd,refcount_bits=64",
        "compression_type=zstd,extended_l2=on",
        "compression_type=zlib,cluster_size=2M",
        "compat=0.10",
    ] {
        let _ = qemu::img(args![
            "convert", "-c", "-f", "qcow2", "-O", "qcow2", "-o", options, &plain, &packed
        ])
        .ok();
        let image = Image::read(&packed);
        assert!(image.disk(None) == disk, "{options}");
        assert_eq!(image.references(), image.refcounts(), "{options}");
    }
}

/// An image with one L2 table of these entries, whose clusters are `data`, one after the other after
/// the L2 table.
fn hand_made(path: &Path, image: &NewImage, entries: &[L2Entry], data: &[u8], refcounts: &[u64]) {
    let plan = image.plan().unwrap();
    let header = plan.header();
    let geometry = header.geometry().unwrap();
    let l2 = HostOffset::new(plan.file_length());
    let mut l1 = [0; 8];
    L1Entry::new(l2, true, &geometry).unwrap().write(&mut l1, 0).unwrap();
    let mut table = vec![0; geometry.cluster_size() as usize];
    for (index, entry) in entries.iter().enumerate() {
        entry.write(&mut table, index, &geometry).unwrap();
    }
    table.extend(data);
    // The whole refcount block again: header, table, block, L1 and L2 table, and the clusters.
    let mut block = vec![0; geometry.cluster_size() as usize];
    for (index, &count) in [1; 5].iter().chain(refcounts).enumerate() {
        geometry.refcount_order().write(&mut block, index, count).unwrap();
    }
    let mut refcount_table = [0; 8];
    let block_at = HostOffset::new(2 << image.cluster_bits);
    RefcountTableEntry::new(block_at, &geometry).unwrap().write(&mut refcount_table, 0).unwrap();
    let length =
        (plan.file_length() + table.len() as u64).next_multiple_of(geometry.cluster_size());
    let pieces = plan.writes().chain([
        (header.refcount_table_offset, refcount_table.to_vec()),
        (block_at, block),
        (header.l1_table_offset, l1.to_vec()),
        (l2, table),
    ]);
    write_file(path, pieces, length);
}

#[test]
fn qemu_reads_what_is_compressed_here() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("i.qcow2");
    for compression_type in [CompressionType::Zlib, CompressionType::Zstd] {
        for cluster_bits in 9..=21 {
            let size = 1usize << cluster_bits;
            let image = NewImage {
                compression_type,
                cluster_bits,
                refcount_order: 6,
                ..NewImage::new(8 * size as u64)
            };
            let disk = text(8 * size);
            // Packed without gaps: two in a sector where they are small, and across clusters.
            let start = 5 * size as u64;
            let (mut packed, mut entries) = (Vec::new(), Vec::new());
            let mut refcounts = vec![0; 16];
            for cluster in disk.chunks(size) {
                let data = compress(compression_type, cluster).unwrap();
                let offset = start + packed.len() as u64;
                let entry =
                    L2Entry::compressed(HostOffset::new(offset), data.len() as u64, cluster_bits);
                entries.push(entry.unwrap());
                let last = (offset + data.len() as u64 - 1) | 511;
                for cluster in offset >> cluster_bits..=last >> cluster_bits {
                    refcounts[cluster as usize - 5] += 1;
                }
                packed.extend(data);
            }
            hand_made(&path, &image, &entries, &packed, &refcounts);
            let name = format!("{compression_type}, {cluster_bits} bits");
            assert!(Image::read(&path).disk(None) == disk, "{name}");
            assert!(qemu::read_disk(&path, "qcow2") == disk, "{name}");
            qemu::assert_clean(&path);
        }
    }
}

#[test]
fn qemu_reads_entries_of_every_kind() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("i.qcow2");
    let size = 65536;
    let at = |n: u64| HostOffset::new((5 + n) * size);
    let data: Vec<u8> = [7u8, 8, 9].into_iter().flat_map(|b| vec![b; size as usize]).collect();
    let entries = [
        L2Entry::unallocated(),
        L2Entry::data(at(0), true),
        L2Entry::zero_plain(),
        L2Entry::zero_allocated(at(1), true),
        L2Entry::data(at(2), true),
    ];
    hand_made(&path, &NewImage::new(5 * size), &entries, &data, &[1, 1, 1]);
    let expect: Vec<u8> =
        [0u8, 7, 0, 0, 9].into_iter().flat_map(|b| vec![b; size as usize]).collect();
    assert!(qemu::read_disk(&path, "qcow2") == expect);
    qemu::assert_clean(&path);
    let map = qemu::map(&path);
    assert_eq!(map[1]["offset"], at(0).get(), "{map}");
    assert_eq!(map[2]["zero"], true, "{map}");

    let entries = [
        L2Entry::unallocated(),
        L2Entry::subclustered(Some(at(0)), true, 0x0000_ffff, 0xff00_0000),
        L2Entry::subclustered(None, false, 0, u32::MAX),
        L2Entry::subclustered(Some(at(1)), true, 0, 0),
        L2Entry::subclustered(Some(at(2)), true, u32::MAX, 0),
    ];
    let image = NewImage { extended_l2: true, ..NewImage::new(5 * size) };
    hand_made(&path, &image, &entries, &data, &[1, 1, 1]);
    let mut expect = expect;
    expect[98304..131_072].fill(0);
    assert!(qemu::read_disk(&path, "qcow2") == expect);
    assert!(Image::read(&path).disk(None) == expect);
    qemu::assert_clean(&path);
}

#[test]
fn snapshot_tables_are_read_and_written_byte_for_byte() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("i.qcow2");
    for options in ["", "compat=0.10", "cluster_size=512"] {
        make(&path, options);
        for name in ["first", "the second", "3 \u{e9}"] {
            let _ = qemu::img(args!["snapshot", "-c", name, &path]).ok();
        }
        if options != "compat=0.10" {
            let _ = qemu::img(args!["resize", "-q", "-f", "qcow2", &path, "+1M"]).ok();
        }
        let image = Image::read(&path);
        let snapshots = image.snapshots();
        let info = qemu::info(&path);
        for (snapshot, listed) in snapshots.iter().zip(info["snapshots"].as_array().unwrap()) {
            assert_eq!(snapshot.id_text(), listed["id"]);
            assert_eq!(snapshot.name_text(), listed["name"]);
            assert_eq!(snapshot.date_sec, listed["date-sec"]);
            assert_eq!(snapshot.date_nsec, listed["date-nsec"]);
            assert_eq!(snapshot.vm_state_size, listed["vm-state-size"]);
            assert_eq!(snapshot.disk_size, Some(SIZE));
            snapshot.check(&image.geometry).unwrap();
        }
        assert_eq!(snapshots.len(), 3);
        let table = Snapshot::encode_table(&snapshots).unwrap();
        let stored = image.at(image.header.snapshots_offset, table.len() as u64);
        assert!(table == stored, "{options}");
        let length = Snapshot::entry_length(&stored).unwrap();
        let alone = Snapshot::encode_table(&snapshots[..1]).unwrap();
        assert_eq!(alone.len(), length);
        assert_eq!(image.references(), image.refcounts());
    }
}

#[test]
fn bitmaps_are_read_and_written_byte_for_byte() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("i.qcow2");
    qemu::create(&path, "qcow2", 1 << 30, "cluster_size=4k");
    for (name, options) in [("one", ["-g", "512"]), ("the other", ["-g", "1M"])] {
        let _ = qemu::img(args!["bitmap", "--add", options[0], options[1], &path, name]).ok();
    }
    let _ = qemu::img(args!["bitmap", "--disable", &path, "the other"]).ok();
    let _ = qemu::io(&path, "qcow2", &["write 0 1M", "write 500M 3k"]).ok();
    let image = Image::read(&path);
    assert!(image.header.autoclear.contains(AutoclearFeatures::BITMAPS));
    let extension = *image.header.bitmaps().unwrap();
    extension.validate(&image.geometry).unwrap();
    let directory = image.at(extension.directory_offset, extension.directory_size);
    let bitmaps = Bitmap::parse_directory(&directory, extension.count).unwrap();
    assert!(Bitmap::encode_directory(&bitmaps).unwrap() == directory);
    let listed = &qemu::info(&path)["format-specific"]["data"]["bitmaps"];
    let mut set = Vec::new();
    for (bitmap, listed) in bitmaps.iter().zip(listed.as_array().unwrap()) {
        bitmap.validate(&image.geometry, image.header.disk_size()).unwrap();
        assert_eq!(bitmap.name_text(), listed["name"]);
        assert_eq!(1u64 << bitmap.granularity_bits, listed["granularity"]);
        let flags = listed["flags"].as_array().unwrap();
        let auto = bitmap.flags.contains(BitmapFlags::AUTO);
        assert_eq!(flags.iter().any(|flag| flag == "auto"), auto);
        let table = image.at(bitmap.table_offset, u64::from(bitmap.table_size) * 8);
        let clusters = (0..bitmap.table_size as usize)
            .map(|index| BitmapCluster::read(&table, index, &image.geometry).unwrap().unwrap());
        let mut bits = 0;
        for cluster in clusters {
            if let BitmapCluster::Data(offset) = cluster {
                bits += image.cluster(offset).iter().map(|byte| byte.count_ones()).sum::<u32>();
            }
        }
        set.push((bitmap.name_text(), bits));
    }
    // 1 MiB and 3 KiB in bits of 512 bytes each; the other is disabled.
    assert_eq!(set, [("one".to_owned(), 2048 + 6), ("the other".to_owned(), 0)]);
    // QEMU rewrites the header with the extension; so do we.
    assert!(image.header.encode().unwrap() == image.first_cluster());
}
