//! A crash while a disk changes its size: the disk has its old size with all it held, or its new one.

use crate::common::{assert_consistent, random_fates};
use futures_executor::block_on;
use isobath_disk::encryption::{Secret, Secrets};
use isobath_disk::sabotage::Sabotage;
use isobath_disk::{
    CheckOptions, Disk, ImageFormat, NewDisk, NewEncryption, OpenOptions, Preallocation, check,
    create,
};
use isobath_storage::IoBuf;
use isobath_storage::memory::MemoryHost;
use isobath_storage::window::WindowHost;
use isobath_storage_test::any::{AnyHost, ToAny};
use isobath_storage_test::recorder::{Change, Entry, Fate, RecorderHost};
use isobath_testkit::{model::Model, seed::Seed};
use rand::rngs::StdRng;
use rand::{Rng, RngExt};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const NAME: &str = "disk.qcow2";

async fn open(host: impl ToAny) -> Disk<AnyHost> {
    let options = OpenOptions::new().writable(true);
    Disk::open(host.any(), Path::new(NAME), &options).await.unwrap()
}

fn random_size(rng: &mut StdRng) -> u64 {
    rng.random_range(0..4096) * 512
}

/// An image with something in it, and what that is.
async fn prepare(rng: &mut StdRng) -> (MemoryHost, Model) {
    let host = MemoryHost::new();
    let size = random_size(rng);
    let mut model = Model::new(size);
    let cluster_size = 512 << rng.random_range(0..8);
    let mut new = NewDisk::new(size)
        .cluster_size(cluster_size)
        .refcount_bits(1 << rng.random_range(0..=6))
        .extended_l2(cluster_size >= 16 << 10 && rng.random());
    if rng.random() {
        let bytes = vec![5; random_size(rng).max(512) as usize];
        host.insert("base.raw", &bytes);
        new.backing_file = Some("base.raw".into());
        new.backing_format = Some("raw".into());
        model = Model::from_bytes(&bytes);
        model.resize(size);
    }
    println!("{new:?}");
    create(&host.any(), Path::new(NAME), &new).await.unwrap();
    let disk = open(host.clone()).await;
    for _ in 0..rng.random_range(0..8) {
        if size > 0 {
            let offset = rng.random_range(0..size);
            let mut bytes = vec![0; rng.random_range(1..=100_000).min(size - offset) as usize];
            rng.fill_bytes(&mut bytes);
            model.write(offset, &bytes);
            disk.write(offset, IoBuf::copy_of(&bytes)).await.unwrap();
        }
    }
    disk.close().await.unwrap();
    (host, model)
}

async fn crash(rng: &mut StdRng) {
    let (base, old) = prepare(rng).await;
    let size = random_size(rng);
    let mut new = old.clone();
    new.resize(size);
    let host = RecorderHost::new(base.deep_copy());
    let record = host.record();
    let disk = open(host).await;
    let mut modes = vec![Preallocation::Off];
    if size > old.size() {
        modes.extend([Preallocation::Metadata, Preallocation::Full]);
    }
    let mode = modes[rng.random_range(0..modes.len())];
    println!("{} to {size} {mode:?}", old.size());
    disk.resize(size, mode, true).await.unwrap();
    drop(disk);
    for _ in 0..6 {
        let keep: f64 = rng.random();
        let end = rng.random_range(0..=record.len());
        let fate = random_fates(rng, keep);
        let left = record.replay(&base, end, fate).await.unwrap();
        assert_consistent(&left, NAME);
        let disk = open(left.clone()).await;
        let found = disk.read(0, IoBuf::zeroed(disk.size() as usize)).await.unwrap();
        let model = if disk.size() == size { &new } else { &old };
        if end == record.len() {
            assert_eq!(disk.size(), size, "the change is durable when it is answered");
        }
        model.check(&found).unwrap();
        // It goes on, to the end that was wanted and beyond.
        disk.resize(size, Preallocation::Off, true).await.unwrap();
        disk.resize(3 << 20, Preallocation::Off, false).await.unwrap();
        let mut model = new.clone();
        model.resize(3 << 20);
        let found = disk.read(0, IoBuf::zeroed(3 << 20)).await.unwrap();
        model.check(&found).unwrap();
        disk.close().await.unwrap();
        assert_consistent(&left, NAME);
    }
}

/// Small clusters and wide refcounts: each refcount block counts 64 clusters, so growth needs several new blocks, and
/// the cluster of one may be counted by another. Loses each write of the growth alone, and all others but it; returns
/// a crash that leaves the image inconsistent.
async fn grow_by_many_blocks() -> Option<String> {
    let base = MemoryHost::new();
    let new = NewDisk::new(300 << 10).cluster_size(512).refcount_bits(64);
    create(&base.any(), Path::new(NAME), &new).await.unwrap();
    let host = RecorderHost::new(base.deep_copy());
    let record = host.record();
    let disk = open(host).await;
    disk.resize(2 << 20, Preallocation::Full, false).await.unwrap();
    drop(disk);
    let ends = record.entries().into_iter().enumerate();
    let ends = ends.filter(|(_, entry)| matches!(entry.change, Change::Flush { .. }));
    for end in ends.map(|(end, _)| end).chain([record.len()]) {
        let durable = record.durable(end);
        for odd in (0..end).filter(|index| !durable[*index]) {
            for (others, fate) in [(Fate::Kept, Fate::Lost), (Fate::Lost, Fate::Kept)] {
                let fates = |index, _: &Entry| if index == odd { fate } else { others };
                let left = record.replay(&base, end, fates).await.unwrap();
                let options = CheckOptions::default();
                let report =
                    check(&left.any(), Path::new(NAME), &options, &mut |_| {}).await.unwrap();
                if report.corruptions > 0 {
                    return Some(format!("{end} complete, {odd} {fate:?}: {report:?}"));
                }
            }
        }
    }
    None
}

#[test]
fn whichever_write_is_lost_or_the_only_one_kept() {
    assert_eq!(block_on(grow_by_many_blocks()), None);
    let _broken = Sabotage::ListedAtOnce.begin();
    let found = block_on(grow_by_many_blocks());
    assert!(found.is_some_and(|crash| crash.contains("corruptions: 1")));
}

#[test]
fn the_old_disk_or_the_new_one() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    for _ in 0..20 {
        block_on(crash(&mut rng));
    }
}

/// What is added to an encrypted file is noise until it is written.
#[test]
fn an_encrypted_disk_grows_by_zeroes_whenever_it_is_interrupted() {
    block_on(async {
        let secret = Arc::new(Secret::new(b"of the night".to_vec()).unwrap());
        let base = MemoryHost::new();
        let name = Path::new("disk.luks");
        let (old, size) = (5 << 20, 9 << 20);
        let mut encryption = NewEncryption::new(Arc::clone(&secret));
        encryption.options.iter_time = Duration::from_millis(1);
        let mut new = NewDisk::new(old).format(ImageFormat::Luks);
        new.encryption = Some(encryption);
        create(&WindowHost::new(base.any()), name, &new).await.unwrap();
        let mut secrets = Secrets::default();
        secrets.set(0, secret);
        let options = OpenOptions::new().writable(true).format(ImageFormat::Luks).secrets(secrets);
        let host = WindowHost::new(base.any());
        let disk = Disk::open(host, name, &options).await.unwrap();
        disk.write(0, IoBuf::copy_of(&vec![7; old as usize])).await.unwrap();
        disk.close().await.unwrap();

        let host = RecorderHost::new(base.deep_copy());
        let record = host.record();
        let disk = Disk::open(WindowHost::new(host.any()), name, &options).await.unwrap();
        let zeroes = disk.preallocation_of_zeroes();
        disk.resize(size, zeroes, false).await.unwrap();
        drop(disk);
        let mut sizes = BTreeSet::new();
        for end in 0..=record.len() {
            let left = record.replay(&base, end, |_, _| Fate::Kept).await.unwrap();
            let host = WindowHost::new(left.any());
            let disk = Disk::open(host, name, &options).await.unwrap();
            let found = disk.read(0, IoBuf::zeroed(disk.size() as usize)).await.unwrap();
            let (before, added) = found.split_at(old as usize);
            assert!(before.iter().all(|byte| *byte == 7));
            assert!(added.iter().all(|byte| *byte == 0), "{end}: {} bytes added", added.len());
            sizes.insert(disk.size());
        }
        assert!(sizes.len() > 3 && sizes.last() == Some(&size), "{sizes:?}");
    });
}
