//! Generated chains, judged by QEMU: every image is clean, and the disk holds what was told.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by a panic")]

use isobath_generate::{
    Chain, Data, Distribution, Fill, GenerateError, Ownership, Progress, generate, pattern, trace,
};
use isobath_qcow2::GuestOffset;
use isobath_testkit::qemu;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const MIB: u64 = 1 << 20;

fn chain(layers: u32, size: u64, cluster_bits: u32, data: Data) -> Chain {
    Chain { layers, size, cluster_bits, data, seed: 3 }
}

fn draw(chain: &Chain, fill: f64, distribution: Distribution) -> Ownership {
    Ownership::draw(chain, Fill::new(fill).unwrap(), distribution).unwrap()
}

/// Every file of a directory with its bytes.
fn files(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    fs::read_dir(directory)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())
        })
        .collect()
}

/// What the disk must hold in a chain of [`Data::Pattern`].
fn expected(chain: &Chain, ownership: &Ownership) -> Vec<u8> {
    let mut disk = vec![0; chain.size as usize];
    for layer in 0..chain.layers {
        for cluster in ownership.clusters_of(layer) {
            let start = (cluster.get() as usize) << chain.cluster_bits;
            let end = disk.len().min(start + (1 << chain.cluster_bits));
            for (number, sector) in disk[start..end].chunks_mut(512).enumerate() {
                let offset = GuestOffset::new((start + number * 512) as u64);
                sector.copy_from_slice(&pattern(layer, offset));
            }
        }
    }
    disk
}

/// Generates a chain, has QEMU check every layer, and compares what QEMU reads.
#[track_caller]
fn assert_as_told(chain: &Chain, ownership: &Ownership) {
    let directory = tempfile::tempdir().unwrap();
    let progress = Progress::default();
    let active = generate(chain, ownership, directory.path(), &progress).unwrap();
    assert_eq!(progress.clusters(), ownership.total());
    let names: Vec<_> = files(directory.path()).into_keys().collect();
    let expected_names: Vec<_> = (0..chain.layers).map(|layer| chain.file_name(layer)).collect();
    assert_eq!(names, expected_names);
    assert_eq!(active, directory.path().join(names.last().unwrap()));
    for name in &names {
        qemu::assert_clean(&directory.path().join(name));
    }
    assert!(qemu::read_disk(&active, "qcow2") == expected(chain, ownership), "{chain:?}");
}

#[test]
fn qemu_reads_what_each_layer_was_given() {
    for (distribution, fill) in
        [(Distribution::Uniform, 0.9), (Distribution::Zipf, 0.5), (Distribution::Sequential, 1.0)]
    {
        let chain = chain(12, 24 * MIB, 16, Data::Pattern);
        assert_as_told(&chain, &draw(&chain, fill, distribution));
    }
}

#[test]
fn every_cluster_size_and_an_odd_end() {
    for cluster_bits in [9, 12, 21] {
        // Several L2 tables, and with the smallest clusters several clusters of the L1 table.
        let chain = chain(3, 8 * MIB + 1536, cluster_bits, Data::Pattern);
        assert_as_told(&chain, &draw(&chain, 0.7, Distribution::Uniform));
    }
}

#[test]
fn empty_layers_and_a_single_one() {
    let chain = chain(1, 4 * MIB, 16, Data::Pattern);
    assert_as_told(&chain, &draw(&chain, 0.5, Distribution::Uniform));
    let chain = self::chain(5, 4 * MIB, 16, Data::Pattern);
    assert_as_told(&chain, &draw(&chain, 0.0, Distribution::Uniform));
    assert_as_told(&chain, &draw(&chain, 0.02, Distribution::Zipf));
}

#[test]
fn the_last_writer_of_a_trace_is_read() {
    let chain = chain(4, 2 * MIB, 16, Data::Pattern);
    let ownership = trace::read(&chain, &b"0 0 2097152\n3 65536 65536\n2 0 131072\n"[..]).unwrap();
    assert_eq!(ownership.total(), 32 + 1 + 2);
    assert_as_told(&chain, &ownership);
}

#[test]
fn a_refcount_table_of_several_clusters() {
    // 4 KiB clusters: a block counts 2048 clusters, a cluster of the table 512 blocks.
    let chain = chain(1, 5 << 30, 12, Data::Zero);
    let ownership = draw(&chain, 1.0, Distribution::Uniform);
    let directory = tempfile::tempdir().unwrap();
    let active = generate(&chain, &ownership, directory.path(), &Progress::default()).unwrap();
    qemu::assert_clean(&active);
    let allocated = std::os::unix::fs::MetadataExt::blocks(&active.metadata().unwrap()) * 512;
    assert!(allocated < 32 * MIB, "zeroes are holes, and yet {allocated} bytes are in use");
    let map = qemu::map(&active);
    assert_eq!((map[0]["length"].as_u64(), map[0]["data"].as_bool()), (Some(5 << 30), Some(true)));
}

#[test]
fn random_clusters_are_random_and_the_seed_repeats_them_to_the_byte() {
    let chain = chain(4, 4 * MIB, 16, Data::Random);
    let ownership = draw(&chain, 1.0, Distribution::Uniform);
    let make = |chain: &Chain, ownership: &Ownership| {
        let directory = tempfile::tempdir().unwrap();
        let active = generate(chain, ownership, directory.path(), &Progress::default()).unwrap();
        let disk = qemu::read_disk(&active, "qcow2");
        (files(directory.path()), disk)
    };
    let (first, disk) = make(&chain, &ownership);
    assert!(first == make(&chain, &ownership).0);
    let other = Chain { seed: 4, ..chain.clone() };
    assert!(first != make(&other, &ownership).0);
    let clusters: std::collections::HashSet<_> = disk.chunks(65536).collect();
    assert_eq!(clusters.len(), 64, "no two clusters are alike");
}

#[test]
fn a_raw_image_is_spread_over_the_layers() {
    let directory = tempfile::tempdir().unwrap();
    let raw = directory.path().join("raw");
    let mut disk = vec![0; 3 * MIB as usize + 512];
    let length = disk.len() - 100;
    for (number, byte) in disk[..length].iter_mut().enumerate() {
        *byte = (number / 1000) as u8;
    }
    fs::write(&raw, &disk[..length]).unwrap();
    let data = Data::Raw(fs::File::open(&raw).unwrap().into());
    let chain = chain(7, disk.len() as u64, 16, data);
    let ownership = draw(&chain, 1.0, Distribution::Uniform);
    let made = directory.path().join("chain");
    let active = generate(&chain, &ownership, &made, &Progress::default()).unwrap();
    assert!(qemu::read_disk(&active, "qcow2") == disk);
}

#[test]
fn only_a_new_or_an_empty_directory_is_taken() {
    let directory = tempfile::tempdir().unwrap();
    let chain = chain(2, MIB, 16, Data::Zero);
    let ownership = draw(&chain, 1.0, Distribution::Uniform);
    let make = |path: &Path| generate(&chain, &ownership, path, &Progress::default());
    let new = directory.path().join("new");
    make(&new).unwrap();
    let before = files(&new);
    let error = make(&new).unwrap_err();
    assert!(matches!(error, GenerateError::NotEmpty(_)), "{error}");
    assert!(files(&new) == before);
    let error = make(&new.join("layer-00000.qcow2")).unwrap_err().to_string();
    assert!(error.contains("cannot read the directory"), "{error}");
    let error = make(&directory.path().join("no/such")).unwrap_err().to_string();
    assert!(error.contains("cannot create the directory"), "{error}");
}

#[test]
fn what_was_begun_is_removed_when_stopped() {
    let directory = tempfile::tempdir().unwrap();
    let chain = chain(50, 64 * MIB, 16, Data::Pattern);
    let ownership = draw(&chain, 1.0, Distribution::Uniform);
    let new = directory.path().join("new");
    let progress = Progress::default();
    let error = std::thread::scope(|scope| {
        let work = scope.spawn(|| generate(&chain, &ownership, &new, &progress));
        while progress.clusters() == 0 {
            std::thread::yield_now();
        }
        progress.stop();
        work.join().unwrap().unwrap_err()
    });
    assert!(matches!(error, GenerateError::Stopped), "{error}");
    assert!(!new.exists());
}

#[test]
fn disks_and_chains_that_cannot_be_are_refused() {
    let refused = |chain: &Chain| {
        Ownership::draw(chain, Fill::new(0.5).unwrap(), Distribution::Uniform)
            .unwrap_err()
            .to_string()
    };
    let good = chain(1, MIB, 16, Data::Zero);
    assert!(refused(&Chain { layers: 0, ..good.clone() }).contains("at least one layer"));
    assert!(refused(&Chain { size: 0, ..good.clone() }).contains("0 bytes"));
    assert!(refused(&Chain { size: 1000, ..good.clone() }).contains("multiple of 512"));
    assert!(refused(&Chain { cluster_bits: 8, ..good.clone() }).contains("cluster"));
    assert!(refused(&Chain { size: 1 << 40, cluster_bits: 9, ..good }).contains("too large"));
}
