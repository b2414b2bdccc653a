//! Images laid out by `NewImage` are what qemu-img would have made: its check is silent, its info
//! agrees.

use crate::common::{Image, write_file};
use isobath_qcow2::{CompressionType, NewImage, Plan};
use isobath_testkit::qemu;
use std::fs::{self, File};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

fn write(path: &Path, image: &NewImage) -> Plan {
    let plan = image.plan().unwrap();
    write_file(path, plan.writes(), plan.file_length());
    if let (Some(name), Some(length)) = (&image.data_file, plan.data_file_length()) {
        File::create(name).unwrap().set_len(length).unwrap();
    }
    plan
}

#[test]
fn every_cluster_size_and_refcount_width_from_nothing_to_the_largest_disk() {
    let directory = tempfile::tempdir().unwrap();
    let mut images = Vec::new();
    for cluster_bits in 9..=21 {
        for refcount_order in 0..=6 {
            let image = NewImage { cluster_bits, refcount_order, ..NewImage::new(0) };
            let largest = image.plan().unwrap().header().geometry().unwrap().max_disk_size();
            // All limits for one width of each cluster size, and otherwise one disk.
            let sizes = if (cluster_bits + refcount_order) % 7 == 0 {
                vec![0, 512, 3 << 30, largest]
            } else {
                vec![largest >> 9]
            };
            images.extend(sizes.into_iter().map(|size| NewImage { size, ..image.clone() }));
        }
    }
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while let n = next.fetch_add(1, Ordering::Relaxed)
                    && let Some(image) = images.get(n)
                {
                    let path = directory.path().join(n.to_string());
                    let plan = write(&path, image);
                    assert_eq!(fs::metadata(&path).unwrap().len(), plan.file_length());
                    qemu::assert_clean(&path);
                    let info = qemu::info(&path);
                    assert_eq!(info["virtual-size"], plan.header().disk_size());
                    fs::remove_file(&path).unwrap();
                }
            });
        }
    });
}

#[test]
fn the_image_is_qemus_byte_for_byte() {
    let directory = tempfile::tempdir().unwrap();
    let base = directory.path().join("base.raw");
    fs::write(&base, vec![1; 4096]).unwrap();
    let name = base.to_str().unwrap();
    let data = directory.path().join("data").to_str().unwrap().to_owned();
    let new = NewImage::new(10 << 20);
    let cases = [
        (new.clone(), String::new()),
        (NewImage { version: 2, ..new.clone() }, "compat=0.10".into()),
        (NewImage { cluster_bits: 9, ..new.clone() }, "cluster_size=512".into()),
        (NewImage { extended_l2: true, ..new.clone() }, "extended_l2=on".into()),
        (
            NewImage { lazy_refcounts: true, refcount_order: 0, ..new.clone() },
            "lazy_refcounts=on,refcount_bits=1".into(),
        ),
        (
            NewImage { compression_type: CompressionType::Zstd, ..new.clone() },
            "compression_type=zstd".into(),
        ),
        (
            NewImage {
                backing_file: Some(name.into()),
                backing_format: Some("raw".into()),
                ..new.clone()
            },
            format!("backing_file={name},backing_fmt=raw"),
        ),
        (NewImage { data_file: Some(data.clone()), ..new }, format!("data_file={data}")),
    ];
    for (image, options) in cases {
        let (ours, theirs) = (directory.path().join("ours"), directory.path().join("theirs"));
        let plan = write(&ours, &image);
        qemu::create(&theirs, "qcow2", image.size, &options);
        let (ours, mut theirs) = (Image::read(&ours), Image::read(&theirs));
        // QEMU's file ends with the L1 table, not with its cluster.
        theirs.bytes.resize(ours.bytes.len(), 0);
        assert_eq!(ours.header, theirs.header, "{options}");
        assert!(
            ours.bytes == theirs.bytes,
            "{options} {} {}",
            ours.bytes.len(),
            theirs.bytes.len()
        );
        assert_eq!(&ours.header, plan.header());
    }
}

#[test]
fn preallocated_images_read_as_zeroes_and_check_clean() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("i.qcow2");
    let data = directory.path().join("data").to_str().unwrap().to_owned();
    let base = directory.path().join("base.raw");
    fs::write(&base, vec![1; 3 << 20]).unwrap();
    let new = NewImage { preallocate: true, ..NewImage::new((3 << 20) + 512) };
    let zeroes = vec![0; (3 << 20) + 512];
    for cluster_bits in [9, 12, 16, 21] {
        let image = NewImage { cluster_bits, ..new.clone() };
        for image in [
            image.clone(),
            NewImage { version: 2, ..image.clone() },
            NewImage { refcount_order: 0, ..image.clone() },
            NewImage { data_file: Some(data.clone()), ..image.clone() },
            NewImage { data_file: Some(data.clone()), data_file_raw: true, ..image },
        ] {
            let plan = write(&path, &image);
            qemu::assert_clean(&path);
            assert!(qemu::read_disk(&path, "qcow2") == zeroes);
            let read = Image::read(&path);
            assert_eq!(read.references(), read.refcounts());
            assert_eq!(read.refcounts().len() as u64, plan.file_length() >> cluster_bits);
            let map = qemu::map(&path);
            let present = |run: &serde_json::Value| run["present"] == true && run["data"] == true;
            assert!(map.as_array().unwrap().iter().all(present), "{map}");
        }
    }
    // With subclusters the backing file shows through, and the raw data file is the disk.
    let extended = NewImage { extended_l2: true, ..new };
    let overlay = NewImage {
        backing_file: Some(base.to_str().unwrap().into()),
        backing_format: Some("raw".into()),
        ..extended.clone()
    };
    write(&path, &overlay);
    qemu::assert_clean(&path);
    let disk = qemu::read_disk(&path, "qcow2");
    assert!(disk[..3 << 20] == vec![1; 3 << 20] && disk[3 << 20..] == [0; 512]);
    let raw = NewImage { data_file: Some(data.clone()), data_file_raw: true, ..extended };
    write(&path, &raw);
    fs::write(&data, vec![9; (3 << 20) + 512]).unwrap();
    qemu::assert_clean(&path);
    assert!(qemu::read_disk(&path, "qcow2") == vec![9; (3 << 20) + 512]);
}
