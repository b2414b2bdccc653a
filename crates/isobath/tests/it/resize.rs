//! Disks that change their size, against a model and `qemu-img`.

use crate::common::{export, findings, make};
use futures_executor::block_on;
use futures_util::future::join;
use isobath_disk::encryption::Secret;
use isobath_disk::{
    BackingFile, Below, Disk, ImageFormat, MetadataMode, NewDisk, NewEncryption, OpenOptions,
    Preallocation, ZeroFlags, create,
};
use isobath_qcow2::NewImage;
use isobath_storage::IoBuf;
use isobath_storage::memory::MemoryHost;
use isobath_storage_test::any::{AnyHost, ToAny};
use isobath_testkit::{args, model::Model, qemu, seed::Seed};
use rand::rngs::StdRng;
use rand::{Rng, RngExt};
use std::path::Path;
use std::time::Duration;

const TOP: &str = "top.qcow2";

async fn open(host: &MemoryHost, name: &str) -> Disk<AnyHost> {
    let options = OpenOptions::new().writable(true);
    Disk::open(host.any(), Path::new(name), &options).await.unwrap()
}

async fn read_all(disk: &Disk<AnyHost>) -> Vec<u8> {
    disk.read(0, IoBuf::zeroed(disk.size() as usize)).await.unwrap().to_vec()
}

#[track_caller]
fn assert_agreed(host: &MemoryHost, model: &Model) {
    let directory = export(host);
    let image = directory.path().join(TOP);
    qemu::assert_clean(&image);
    if let Err(mismatch) = model.check(&qemu::read_disk(&image, "qcow2")) {
        panic!("QEMU reads otherwise: {mismatch}");
    }
}

fn random_image(rng: &mut StdRng, size: u64) -> NewImage {
    let mut image = NewImage::new(size);
    image.version = if rng.random_bool(0.2) { 2 } else { 3 };
    image.cluster_bits = if rng.random() { 9 } else { rng.random_range(10..=17) };
    if image.version == 3 {
        image.refcount_order = rng.random_range(0..=6);
        image.extended_l2 = rng.random_bool(0.3);
        if image.extended_l2 {
            image.cluster_bits = rng.random_range(14..=17);
        }
    }
    image
}

/// A size in sectors or whole clusters.
fn random_size(rng: &mut StdRng) -> u64 {
    let unit: u64 = if rng.random() { 512 } else { 64 << 10 };
    rng.random_range(0..(8 << 20) / unit) * unit
}

async fn scribble(disk: &Disk<AnyHost>, model: &mut Model, rng: &mut StdRng, within: u64) {
    for _ in 0..rng.random_range(0..6) {
        if rng.random_bool(0.3) {
            disk.flush().await.unwrap();
        }
        if within == 0 {
            return;
        }
        let offset = rng.random_range(0..within);
        let length = rng.random_range(1..=300_000).min(within - offset);
        if rng.random_bool(0.2) {
            model.fill(offset, length, 0);
            let flags = ZeroFlags { may_unmap: rng.random(), only_fast: false };
            disk.write_zeroes(offset, length, flags).await.unwrap();
            continue;
        }
        let mut bytes = vec![0; length as usize];
        rng.fill_bytes(&mut bytes);
        model.write(offset, &bytes);
        disk.write(offset, IoBuf::copy_of(&bytes)).await.unwrap();
    }
}

async fn history(rng: &mut StdRng) {
    let host = MemoryHost::new();
    let size = random_size(rng);
    let mut image = random_image(rng, size);
    let mut model = Model::new(size);
    if rng.random() {
        let mut bytes = vec![0; random_size(rng).max(512) as usize];
        rng.fill_bytes(&mut bytes);
        host.insert("base.raw", &bytes);
        image.backing_file = Some("base.raw".into());
        image.backing_format = Some("raw".into());
        model = Model::from_bytes(&bytes);
        model.resize(size);
    }
    println!("{image:?}");
    make(&host, TOP, &image).await;
    // Then space is prepared, and small writes are kept for the next record.
    host.set_gains_from_written_space(rng.random());
    for _ in 0..3 {
        let mode = if image.version < 3 {
            MetadataMode::Auto
        } else {
            MetadataMode::ALL[rng.random_range(0..MetadataMode::ALL.len())]
        };
        let options = OpenOptions::new().writable(true).metadata(mode);
        let journal_size = 64 << rng.random_range(10..16);
        let options = options.journal_size(journal_size);
        println!("{mode:?}, a journal of {journal_size} bytes");
        let disk = Disk::open(host.any(), Path::new(TOP), &options).await.unwrap();
        for _ in 0..rng.random_range(1..6) {
            scribble(&disk, &mut model, rng, disk.size()).await;
            let old = disk.size();
            let new = random_size(rng);
            let mode = match rng.random_range(0..6) {
                0 if new > old => Preallocation::Metadata,
                1 if new > old => Preallocation::Falloc,
                2 if new > old => Preallocation::Full,
                _ => Preallocation::Off,
            };
            println!("resize {old} to {new}, {mode:?}");
            // Writes that go on meanwhile stay within what both sizes have.
            let mut busy = rng.fork();
            let resize = disk.resize(new, mode, true);
            let write = scribble(&disk, &mut model, &mut busy, old.min(new));
            Box::pin(join(async { resize.await.unwrap() }, write)).await;
            model.resize(new);
            assert_eq!(disk.size(), new);
            model.check(&read_all(&disk).await).unwrap();
        }
        disk.close().await.unwrap();
        assert_agreed(&host, &model);
    }
}

trait Fork {
    fn fork(&mut self) -> StdRng;
}

impl Fork for StdRng {
    fn fork(&mut self) -> StdRng {
        rand::SeedableRng::seed_from_u64(self.random())
    }
}

#[test]
fn random_sizes_agree_with_the_model() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    for _ in 0..25 {
        block_on(history(&mut rng));
    }
}

#[test]
fn the_new_part_is_preallocated() {
    for mode in [Preallocation::Metadata, Preallocation::Falloc, Preallocation::Full] {
        for (version, extended_l2, backed) in
            [(3, false, false), (2, false, true), (3, true, true), (3, false, true)]
        {
            block_on(async {
                let host = MemoryHost::new();
                let mut image = NewImage::new(100 << 10);
                image.version = version;
                image.extended_l2 = extended_l2;
                let mut model = Model::new(100 << 10);
                if backed {
                    host.insert("base.raw", &vec![7; 1 << 20]);
                    image.backing_file = Some("base.raw".into());
                    image.backing_format = Some("raw".into());
                    model.fill(0, 100 << 10, 7);
                }
                make(&host, TOP, &image).await;
                let disk = open(&host, TOP).await;
                disk.resize(3 << 20, mode, false).await.unwrap();
                model.resize(3 << 20);
                let runs = disk.block_status(128 << 10, (3 << 20) - (128 << 10), 9).await.unwrap();
                assert!(runs.iter().all(|run| run.depth == 0 && run.host.is_some()), "{runs:?}");
                model.check(&read_all(&disk).await).unwrap();
                disk.close().await.unwrap();
                assert_agreed(&host, &model);
            });
        }
    }
}

/// The names in the headers decide what others find below.
#[test]
fn the_new_part_is_zeroes_above_the_named_backing_file_whatever_is_below_meanwhile() {
    let short =
        Below::Given(BackingFile { name: "short.raw".into(), format: Some(ImageFormat::Raw) });
    for below in [short, Below::Nothing, Below::Named] {
        for (version, extended_l2) in [(3, false), (3, true), (2, false)] {
            block_on(async {
                let host = MemoryHost::new();
                host.insert("base.raw", &vec![7; 3 << 20]);
                host.insert("short.raw", &vec![8; 64 << 10]);
                let mut image = NewImage::new(128 << 10);
                (image.version, image.extended_l2) = (version, extended_l2);
                image.backing_file = Some("base.raw".into());
                image.backing_format = Some("raw".into());
                make(&host, TOP, &image).await;
                let options = OpenOptions::new().writable(true).backing_files(vec![below.clone()]);
                let disk = Disk::open(host.any(), Path::new(TOP), &options).await.unwrap();
                let resized = disk.resize(5 << 20, Preallocation::Off, false).await;
                disk.close().await.unwrap();
                let mut model = Model::new(128 << 10);
                model.fill(0, 128 << 10, 7);
                if version < 3 && below != Below::Named {
                    let error = resized.unwrap_err().to_string();
                    assert!(error.contains("compat=1.1"), "{error}");
                } else {
                    resized.unwrap();
                    model.resize(5 << 20);
                }
                assert_agreed(&host, &model);
            });
        }
    }
}

#[test]
fn the_new_part_is_zeroes_if_another_file_is_further_below_or_one_in_another_format() {
    let short =
        Below::Given(BackingFile { name: "short.raw".into(), format: Some(ImageFormat::Raw) });
    let as_qcow2 = Below::NamedWithFormat(ImageFormat::Qcow2);
    for deeper in [short, Below::Nothing, as_qcow2] {
        block_on(async {
            let host = MemoryHost::new();
            // Its header says that it is raw, so that its tables are what the disk shows.
            make(&host, "base", &NewImage::new(64 << 10)).await;
            host.insert("short.raw", &vec![8; 64 << 10]);
            let base = host.contents("base").unwrap();
            let mut image = NewImage::new(5 << 20);
            image.backing_file = Some("base".into());
            image.backing_format = Some("raw".into());
            make(&host, "mid.qcow2", &image).await;
            image = NewImage::new(64 << 10);
            image.backing_file = Some("mid.qcow2".into());
            image.backing_format = Some("qcow2".into());
            make(&host, TOP, &image).await;
            let options = OpenOptions::new().writable(true);
            let options = options.backing_files(vec![Below::Named, deeper]);
            let disk = Disk::open(host.any(), Path::new(TOP), &options).await.unwrap();
            disk.resize(5 << 20, Preallocation::Off, false).await.unwrap();
            disk.close().await.unwrap();
            assert!(base[64 << 10..].iter().any(|byte| *byte != 0));
            let mut model = Model::from_bytes(&base);
            model.resize(64 << 10);
            model.resize(5 << 20);
            assert_agreed(&host, &model);
        });
    }
}

#[test]
fn a_shrunken_image_gives_its_space_back() {
    block_on(async {
        let host = MemoryHost::new();
        make(&host, TOP, &NewImage::new(16 << 20)).await;
        let disk = open(&host, TOP).await;
        disk.write(0, IoBuf::copy_of(&vec![1; 16 << 20])).await.unwrap();
        disk.flush().await.unwrap();
        let full = host.contents(TOP).unwrap().len();
        disk.resize(1 << 20, Preallocation::Off, true).await.unwrap();
        let length = host.contents(TOP).unwrap().len();
        assert!(full > 16 << 20 && length < 2 << 20, "{full} {length}");
        // What is free is used again, and the disk goes on.
        disk.resize(2 << 20, Preallocation::Off, false).await.unwrap();
        disk.write(1 << 20, IoBuf::copy_of(&[2; 4096])).await.unwrap();
        disk.close().await.unwrap();
        let mut model = Model::new(2 << 20);
        model.fill(0, 1 << 20, 1);
        model.fill(1 << 20, 4096, 2);
        assert_agreed(&host, &model);
    });
}

#[test]
fn snapshots_keep_what_a_shrink_drops() {
    block_on(async {
        let host = MemoryHost::new();
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join(TOP);
        qemu::create(&image, "qcow2", 4 << 20, "cluster_size=4k");
        let _ = qemu::io(&image, "qcow2", &["write -P 5 0 4M"]).ok();
        let _ = qemu::img(args!["snapshot", "-c", "one", &image]).ok();
        host.insert(TOP, &std::fs::read(&image).unwrap());
        let disk = open(&host, TOP).await;
        disk.resize(1 << 20, Preallocation::Off, true).await.unwrap();
        disk.resize(8 << 20, Preallocation::Off, false).await.unwrap();
        disk.write(0, IoBuf::copy_of(&[9; 5000])).await.unwrap();
        disk.close().await.unwrap();
        let mut model = Model::new(8 << 20);
        model.fill(0, 1 << 20, 5);
        model.fill(0, 5000, 9);
        assert_agreed(&host, &model);
        let directory = export(&host);
        let image = directory.path().join(TOP);
        let _ = qemu::img(args!["snapshot", "-a", "one", &image]).ok();
        qemu::assert_clean(&image);
        assert!(qemu::read_disk(&image, "qcow2") == vec![5; 4 << 20]);
    });
}

#[test]
fn raw_disks_change_their_size() {
    block_on(async {
        let host = MemoryHost::new();
        host.insert("disk.raw", &[3; 1000]);
        let disk = open(&host, "disk.raw").await;
        disk.resize(1 << 20, Preallocation::Off, false).await.unwrap();
        disk.write(5000, IoBuf::copy_of(&[4; 100])).await.unwrap();
        disk.resize(5050, Preallocation::Off, true).await.unwrap();
        assert!(disk.write(6000, IoBuf::copy_of(&[4; 100])).await.is_err());
        disk.resize(8192, Preallocation::Full, false).await.unwrap();
        disk.close().await.unwrap();
        let mut model = Model::new(8192);
        model.fill(0, 1000, 3);
        model.fill(5000, 50, 4);
        model.check(&host.contents("disk.raw").unwrap()).unwrap();
    });
}

#[test]
fn external_data_files_follow() {
    for raw in [false, true] {
        block_on(async {
            let host = MemoryHost::new();
            let directory = tempfile::tempdir().unwrap();
            let image = directory.path().join(TOP);
            let data = directory.path().join("data");
            // By its full name: QEMU looks for others in the current directory.
            let name = data.to_str().unwrap();
            let raw_data = if raw { "on" } else { "off" };
            let options = format!("data_file={name},data_file_raw={raw_data}");
            qemu::create(&image, "qcow2", 1 << 20, &options);
            let _ = qemu::io(&image, "qcow2", &["write -P 5 0 1M"]).ok();
            host.insert(TOP, &std::fs::read(&image).unwrap());
            host.insert(name, &std::fs::read(&data).unwrap());
            let disk = open(&host, TOP).await;
            let mut model = Model::new(1 << 20);
            model.fill(0, 1 << 20, 5);
            for size in [100 << 10, 2 << 20] {
                disk.resize(size, Preallocation::Off, true).await.unwrap();
                model.resize(size);
                assert_eq!(host.contents(name).unwrap().len() as u64, size);
                model.check(&read_all(&disk).await).unwrap();
            }
            disk.close().await.unwrap();
            assert_agreed(&host, &model);
            if raw {
                model.check(&host.contents(name).unwrap()).unwrap();
            }
        });
    }
}

#[test]
fn what_cannot_be_resized_is_refused_unchanged() {
    let refuse = |options: &str, prepare: &[&str], size: u64, why: &str| {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join(TOP);
        qemu::create(&image, "qcow2", 1 << 20, options);
        if !prepare.is_empty() {
            let mut arguments: Vec<_> = prepare.iter().map(std::ffi::OsString::from).collect();
            let at = if prepare[0] == "snapshot" { arguments.len() } else { 2 };
            arguments.insert(at, (&image).into());
            let _ = qemu::img(arguments).ok();
        }
        let host = MemoryHost::new();
        host.insert(TOP, &std::fs::read(&image).unwrap());
        block_on(async {
            let disk = open(&host, TOP).await;
            let error = disk.resize(size, Preallocation::Off, false).await.unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
            assert_eq!(disk.size(), 1 << 20);
            disk.write(0, IoBuf::zeroed(512)).await.unwrap();
            disk.close().await.unwrap();
        });
    };
    refuse("compat=0.10", &["snapshot", "-c", "one"], 2 << 20, "version 2");
    refuse("cluster_size=512", &[], 1 << 40, "too large");
    refuse("", &[], (1 << 20) + 1, "multiple of 512");
    refuse("", &[], 1 << 19, "--shrink");
}

/// A program that ended without closing the image left its bitmap marked: what it would say of the new part is unknown.
#[test]
fn an_image_with_an_inconsistent_bitmap_is_not_resized() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join(TOP);
    qemu::create(&image, "qcow2", 1 << 20, "");
    let _ = qemu::img(args!["bitmap", "--add", &image, "one"]).ok();
    let host = MemoryHost::new();
    host.insert(TOP, &std::fs::read(&image).unwrap());
    block_on(async {
        let disk = open(&host, TOP).await;
        disk.write(0, IoBuf::zeroed(512)).await.unwrap();
        disk.flush().await.unwrap();
        drop(disk);
        let disk = open(&host, TOP).await;
        for (size, shrink) in [(2 << 20, false), (1 << 19, true)] {
            let error = disk.resize(size, Preallocation::Off, shrink).await.unwrap_err();
            assert!(error.to_string().contains("Bitmap 'one' is inconsistent"), "{error}");
            assert_eq!(disk.size(), 1 << 20);
        }
        disk.close().await.unwrap();
    });
}

#[test]
fn tables_may_be_longer_than_what_a_refcount_block_counts() {
    block_on(async {
        let host = MemoryHost::new();
        let mut image = NewImage::new(1 << 20);
        // Blocks of 64 refcounts.
        (image.cluster_bits, image.refcount_order) = (9, 6);
        make(&host, TOP, &image).await;
        let disk = open(&host, TOP).await;
        // An L1 table of 80 clusters, and refcounts for 144 MiB, with a table of 71 clusters.
        disk.resize(144 << 20, Preallocation::Metadata, false).await.unwrap();
        disk.resize(160 << 20, Preallocation::Off, false).await.unwrap();
        disk.write(159 << 20, IoBuf::copy_of(&[1; 4096])).await.unwrap();
        disk.close().await.unwrap();
        let directory = export(&host);
        qemu::assert_clean(&directory.path().join(TOP));
        assert!(host.contents(TOP).unwrap().len() > 144 << 20);
    });
}

/// Its first cluster is at the start of the data file, where the entry of zeroes with a place is that of zeroes
/// without one.
#[test]
fn an_encrypted_disk_in_a_data_file_is_preallocated_from_its_start() {
    block_on(async {
        let host = MemoryHost::new();
        let mut new = NewDisk::new(0).data_file("data");
        let mut encryption = NewEncryption::new(Secret::new(b"password".to_vec()).unwrap());
        encryption.options.iter_time = Duration::from_millis(1);
        new.encryption = Some(encryption);
        create(&host.any(), Path::new(TOP), &new).await.unwrap();
        let secret = Secret::new(b"password".to_vec()).unwrap();
        let options = OpenOptions::new().writable(true).secrets(secret);
        let disk = Disk::open(host.any(), Path::new(TOP), &options).await.unwrap();
        disk.resize(1 << 20, Preallocation::Metadata, true).await.unwrap();
        assert!(read_all(&disk).await.iter().all(|byte| *byte == 0));
        disk.write(4096, IoBuf::copy_of(&[7; 512])).await.unwrap();
        let mut model = Model::new(1 << 20);
        model.fill(4096, 512, 7);
        model.check(&read_all(&disk).await).unwrap();
        disk.close().await.unwrap();
        drop(disk);
        assert_eq!(findings(&host, TOP).await, Vec::<String>::new());
    });
}

/// The journal's area stays reserved while the journal is not in use, also where no refcount block counts it.
#[test]
fn a_table_that_grows_after_a_shrink_leaves_the_journal_alone() {
    block_on(async {
        let host = MemoryHost::new();
        host.set_gains_from_written_space(true);
        let mut image = NewImage::new(64 << 20);
        image.cluster_bits = 12;
        make(&host, TOP, &image).await;
        let options = OpenOptions::new().writable(true).metadata(MetadataMode::Journal);
        let disk = Disk::open(host.any(), Path::new(TOP), &options).await.unwrap();
        let bytes = vec![7; 64 << 10];
        let mut model = Model::new(64 << 20);
        for number in 0..7 * 16 {
            let at = number * bytes.len() as u64;
            disk.write(at, IoBuf::copy_of(&bytes)).await.unwrap();
            model.write(at, &bytes);
        }
        disk.flush().await.unwrap();
        disk.flush().await.unwrap();
        for size in [4 << 20, 128 << 20] {
            disk.resize(size, Preallocation::Off, true).await.unwrap();
            model.resize(size);
        }
        // More records than the journal holds.
        for number in 0..64 {
            let at = (8 << 20) + number * (1 << 20);
            disk.write(at, IoBuf::copy_of(&bytes)).await.unwrap();
            model.write(at, &bytes);
            disk.flush().await.unwrap();
        }
        disk.close().await.unwrap();
        assert_agreed(&host, &model);
    });
}
