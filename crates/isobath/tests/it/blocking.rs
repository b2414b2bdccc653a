//! The library as a program without an executor uses it: from several threads, with memory that it lends for a call.

use isobath::blocking::{self, Disk};
use isobath::encryption::Secret;
use isobath::jobs::JobError;
use isobath::{
    CheckOptions, DiskError, InfoOptions, MetadataMode, NewDisk, NewEncryption, OpenOptions,
    Overlay, Preallocation, Secrets, ZeroFlags,
};
use isobath_testkit::model::Model;
use isobath_testkit::qemu;
use isobath_testkit::seed::Seed;
use rand::RngExt;
use rand::rngs::StdRng;
use std::io::{IoSlice, IoSliceMut};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const SIZE: u64 = (4 << 20) + 512;

fn writable() -> OpenOptions {
    OpenOptions::new().writable(true)
}

/// Cuts `bytes` into up to five parts, some of them empty.
fn cuts(rng: &mut StdRng, length: usize) -> Vec<usize> {
    let mut cuts: Vec<usize> =
        (0..rng.random_range(0..5)).map(|_| rng.random_range(0..=length)).collect();
    cuts.sort_unstable();
    let mut lengths = Vec::new();
    let mut last = 0;
    for cut in cuts.into_iter().chain([length]) {
        lengths.push(cut - last);
        last = cut;
    }
    lengths
}

/// A random request, and what it must do.
fn request(disk: &Disk, model: &mut Model, rng: &mut StdRng) {
    let length = rng.random_range(0..200_000_usize);
    let offset = rng.random_range(0..=SIZE - length as u64);
    match rng.random_range(0..10) {
        0..4 => {
            let mut bytes = vec![0; length];
            rng.fill(&mut bytes[..]);
            let mut rest = &bytes[..];
            let mut parts = Vec::new();
            for cut in cuts(rng, length) {
                let (part, tail) = rest.split_at(cut);
                parts.push(IoSlice::new(part));
                rest = tail;
            }
            disk.write_vectored_at(offset, &parts).unwrap();
            model.write(offset, &bytes);
        }
        4..8 => {
            let mut bytes = vec![0xee; length];
            let mut rest = &mut bytes[..];
            let mut parts = Vec::new();
            for cut in cuts(rng, length) {
                let (part, tail) = rest.split_at_mut(cut);
                parts.push(IoSliceMut::new(part));
                rest = tail;
            }
            disk.read_vectored_at(offset, &mut parts).unwrap();
            model.check_range(offset, &bytes).unwrap();
        }
        8 => {
            disk.write_zeroes_at(offset, length as u64, ZeroFlags::default()).unwrap();
            model.fill(offset, length as u64, 0);
        }
        _ => disk.flush().unwrap(),
    }
}

#[test]
fn qemu_reads_what_was_written_with_lent_memory() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    for metadata in [MetadataMode::Ordered, MetadataMode::Auto, MetadataMode::Embedded] {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("disk.qcow2");
        blocking::create(&image, &NewDisk::new(SIZE)).unwrap();
        let mut model = Model::new(SIZE);
        for _ in 0..2 {
            let disk = Disk::open(&image, &writable().metadata(metadata)).unwrap();
            for _ in 0..60 {
                request(&disk, &mut model, &mut rng);
            }
            disk.close().unwrap();
        }
        qemu::assert_clean(&image);
        model.check(&qemu::read_disk(&image, "qcow2")).unwrap();
    }
}

#[test]
fn what_is_written_stays_as_it_is() {
    // In memory that cannot be written to, so that a write there ends the program.
    static WRITTEN: [u8; 200_000] = [7; 200_000];
    let secret = Arc::new(Secret::new(b"of the day".to_vec()).unwrap());
    let mut encryption = NewEncryption::new(Arc::clone(&secret));
    encryption.options.iter_time = Duration::from_millis(1);
    for metadata in [MetadataMode::Ordered, MetadataMode::Journal, MetadataMode::Embedded] {
        for encrypted in [false, true] {
            if encrypted && metadata == MetadataMode::Embedded {
                // Nothing is embedded in ciphertext.
                continue;
            }
            let directory = tempfile::tempdir().unwrap();
            let image = directory.path().join("disk.qcow2");
            let mut new = NewDisk::new(SIZE);
            let mut secrets = Secrets::default();
            if encrypted {
                secrets.set(0, Arc::clone(&secret));
                new.encryption = Some(encryption.clone());
            }
            blocking::create(&image, &new).unwrap();
            let options = writable().metadata(metadata).secrets(secrets);
            let disk = Disk::open(&image, &options).unwrap();
            // Into new clusters, whole ones and parts, in an order that leaves them scattered; then over them, where
            // their mappings may be embedded.
            let places =
                [(1 << 20, 65536), (0, 65536), (1000, 100_000), (2 << 20, 512), (3000, 190_000)];
            let mut model = Model::new(SIZE);
            for round in 0..3 {
                for (offset, length) in places {
                    let offset = offset + round * 512;
                    disk.write_at(offset, &WRITTEN[..length]).unwrap();
                    model.fill(offset, length as u64, 7);
                    disk.flush().unwrap();
                }
            }
            let mut read = vec![0xee; SIZE as usize];
            disk.read_at(0, &mut read).unwrap();
            model.check(&read).unwrap();
            disk.close().unwrap();
        }
    }
}

#[test]
fn threads_share_a_disk_while_its_chain_changes() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    blocking::create(path("base"), &NewDisk::new(SIZE)).unwrap();
    let disk = Disk::open(path("base"), &writable()).unwrap();
    let snapshots = ["one", "two", "three"];
    let part = SIZE / 4;
    std::thread::scope(|scope| {
        for thread in 0..4_u8 {
            let disk = &disk;
            scope.spawn(move || {
                for round in 0..40_u64 {
                    let offset = u64::from(thread) * part + round * 8192;
                    disk.write_at(offset, &[thread + 1; 5000]).unwrap();
                    let mut read = [0; 5000];
                    disk.read_at(offset, &mut read).unwrap();
                    assert_eq!(read, [thread + 1; 5000]);
                }
                disk.flush().unwrap();
            });
        }
        for name in snapshots {
            disk.snapshot(&Overlay::Create(path(name))).unwrap();
        }
    });
    let layers = disk.layers();
    let names: Vec<_> = layers.iter().map(|layer| layer.name.clone()).collect();
    assert_eq!(names, ["three", "two", "one", "base"].map(path));

    // The oldest two become one, and then all of them.
    disk.compact(layers[2].file).unwrap();
    assert_eq!(
        disk.layers().iter().map(|layer| &layer.name).collect::<Vec<_>>(),
        [&names[0], &names[1], &names[2]]
    );
    disk.compact(layers[0].file).unwrap();
    assert_eq!(disk.layers().len(), 1);
    // The base's file is there, but no layer any more.
    let refused = disk.compact(layers[3].file).unwrap_err();
    assert!(matches!(refused, JobError::Disk(_)), "{refused}");
    disk.close().unwrap();

    let info = blocking::info(path("three"), &InfoOptions::default()).unwrap();
    assert_eq!((info.virtual_size, info.backing_filename), (SIZE, None));
    assert!(blocking::check(path("three"), &CheckOptions::default()).unwrap().is_clean());
    let read = qemu::read_disk(&path("three"), "qcow2");
    for (thread, bytes) in read.chunks(part as usize).take(4).enumerate() {
        for round in bytes.chunks(8192).take(40) {
            let written = round.iter().take(5000).all(|&byte| byte == thread as u8 + 1);
            assert!(written && round[5000..].iter().all(|&byte| byte == 0));
        }
    }
}

#[test]
fn a_disk_that_is_dropped_keeps_what_was_flushed() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("disk.qcow2");
    blocking::create(&image, &NewDisk::new(SIZE)).unwrap();
    let disk = Disk::open(&image, &writable().metadata(MetadataMode::Journal)).unwrap();
    for cluster in 0..8 {
        disk.write_at(cluster << 16, &[cluster as u8 + 1; 512]).unwrap();
        disk.flush().unwrap();
    }
    drop(disk);
    blocking::seal(&image).unwrap();
    qemu::assert_clean(&image);
    let read = qemu::read_disk(&image, "qcow2");
    assert!((0..8).all(|cluster| read[cluster << 16..][..512] == [cluster as u8 + 1; 512]));
}

#[test]
fn errors_name_what_is_wrong_and_return_the_memory() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("disk.qcow2");
    let missing = Disk::open(&image, &writable()).unwrap_err();
    assert!(missing.to_string().contains("disk.qcow2"), "{missing}");
    assert_eq!(missing.errno(), libc::ENOENT);

    blocking::create(&image, &NewDisk::new(SIZE)).unwrap();
    let disk = Disk::open(&image, &writable()).unwrap();
    let mut bytes = [3; 1024];
    for offset in [SIZE - 1023, SIZE, u64::MAX - 512, u64::MAX] {
        let out_of_range =
            |result| matches!(result, Err(DiskError::OutOfRange { length: 1024, .. }));
        assert!(out_of_range(disk.read_at(offset, &mut bytes)));
        assert!(out_of_range(disk.write_at(offset, &bytes)));
        // A part within the disk is not written either.
        let parts = [IoSlice::new(&bytes[..1]), IoSlice::new(&bytes[1..])];
        assert!(out_of_range(disk.write_vectored_at(offset, &parts)));
    }
    disk.read_at(SIZE - 1024, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 1024]);
    bytes.fill(3);
    disk.resize(SIZE * 2, Preallocation::Off, false).unwrap();
    assert_eq!(disk.size(), SIZE * 2);
    disk.write_at(SIZE * 2 - 512, &bytes[512..]).unwrap();
    disk.close().unwrap();

    let disk = Disk::open(&image, &OpenOptions::new()).unwrap();
    assert!(matches!(disk.write_at(0, &bytes), Err(DiskError::ReadOnly)));
    assert!(disk.is_read_only());
    disk.read_at(SIZE * 2 - 512, &mut bytes[..512]).unwrap();
    assert_eq!(bytes[..512], [3; 512]);
    disk.close().unwrap();
}

#[test]
fn a_disk_that_another_has_open_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("disk.qcow2");
    blocking::create(&image, &NewDisk::new(SIZE)).unwrap();
    let disk = Disk::open(&image, &writable()).unwrap();
    let refused = Disk::open(&image, &writable()).unwrap_err();
    assert!(refused.to_string().contains("lock"), "{refused}");
    let refused = blocking::create(&image, &NewDisk::new(SIZE)).unwrap_err();
    assert!(refused.to_string().contains("lock"), "{refused}");
    disk.close().unwrap();
    assert_eq!(
        blocking::info(Path::new(&image), &InfoOptions::default()).unwrap().virtual_size,
        SIZE
    );
}
