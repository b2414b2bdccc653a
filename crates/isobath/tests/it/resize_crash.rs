//! A crash while a disk changes its size: the disk has its old size with all it held, or its new one.

use crate::common::{assert_consistent, random_fates};
use futures_executor::block_on;
use isobath_disk::{Disk, NewDisk, OpenOptions, Preallocation, create};
use isobath_storage::memory::MemoryHost;
use isobath_storage::{Host, IoBuf};
use isobath_storage_test::recorder::RecorderHost;
use isobath_testkit::{model::Model, seed::Seed};
use rand::rngs::StdRng;
use rand::{Rng, RngExt};
use std::path::Path;

const NAME: &str = "disk.qcow2";

async fn open<H: Host>(host: H) -> Disk<H> {
    let options = OpenOptions::new().writable(true);
    Disk::open(host, Path::new(NAME), &options).await.unwrap()
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
    create(&host, Path::new(NAME), &new).await.unwrap();
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

#[test]
fn the_old_disk_or_the_new_one() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    for _ in 0..20 {
        block_on(crash(&mut rng));
    }
}
