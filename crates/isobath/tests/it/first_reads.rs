//! The first request to a part of a disk resolves what it needs, the second one the rest: no table is read twice, and
//! whatever happens in between, both answer what the layers say.

use crate::common::export;
use crate::heads::{Reads, name};
use futures_executor::block_on;
use isobath_disk::{Disk, NewDisk, OpenOptions, ZeroFlags, create};
use isobath_storage::memory::MemoryHost;
use isobath_storage::{Host, IoBuf, OpenMode, Operation, Storage};
use isobath_storage_test::any::{AnyHost, ToAny};
use isobath_storage_test::fault::{Fault, FaultHost, Plan};
use isobath_storage_test::pass_through::PassThrough;
use isobath_testkit::{model::Model, qemu, seed::Seed};
use rand::rngs::StdRng;
use rand::{Rng, RngExt};
use std::collections::BTreeMap;

const CLUSTER: u64 = 4096;
/// What one table maps: a slice is longer.
const SIZE: u64 = 2 << 20;
const DEPTH: usize = 40;

/// Layers without an index, each of which has the cluster of its number.
async fn chain() -> MemoryHost {
    let host = MemoryHost::new();
    for layer in 0..DEPTH {
        add(&host, layer, CLUSTER).await;
        let disk = open(&host, layer, true).await;
        disk.write(layer as u64 * CLUSTER, bytes(layer)).await.unwrap();
        disk.close().await.unwrap();
    }
    host
}

async fn add(host: &MemoryHost, layer: usize, cluster: u64) {
    let mut new = NewDisk::new(SIZE).cluster_size(cluster).index(false);
    if layer > 0 {
        new = new.backing_file(name(layer - 1).to_str().unwrap(), "qcow2");
    }
    create(&host.any(), &name(layer), &new).await.unwrap();
}

async fn open(host: &MemoryHost, layer: usize, writable: bool) -> Disk<AnyHost> {
    let options = OpenOptions::new().writable(writable);
    Disk::open(host.any(), &name(layer), &options).await.unwrap()
}

fn bytes(layer: usize) -> IoBuf {
    IoBuf::copy_of(&[layer as u8 + 1; CLUSTER as usize])
}

async fn assert_reads<H: Host>(disk: &Disk<H>, layer: usize) {
    let at = layer as u64 * CLUSTER;
    let read = disk.read(at, IoBuf::zeroed(CLUSTER as usize)).await.unwrap();
    assert_eq!(*read, *bytes(layer), "the cluster of layer {layer}");
}

#[test]
fn a_first_read_reads_few_tables_below_the_owner_and_a_second_one_each_of_the_rest_once() {
    block_on(async {
        let memory = chain().await;
        let top = DEPTH - 1;
        for owner in [top, top - 1, top - 5, top - 20, 0] {
            let reads = Reads::default();
            let host = PassThrough::around(memory.clone(), reads.clone());
            let options = OpenOptions::new();
            let disk = Disk::open(host.any(), &name(top), &options).await.unwrap();
            let reset = || std::mem::take(&mut *reads.calls.lock());
            reset();
            assert_reads(&disk, owner).await;
            let mut first = reset();
            *first.get_mut(&name(owner)).unwrap() -= 1;
            let needed = DEPTH - owner;
            assert!((owner..DEPTH).all(|layer| first.get(&name(layer)) == Some(&1)), "{first:?}");
            let read: u64 = first.values().sum();
            assert!(read as usize <= needed + needed / 8, "{read} tables of {needed}");

            let second = owner.abs_diff(10);
            assert_reads(&disk, second).await;
            let mut rest = reset();
            *rest.get_mut(&name(second)).unwrap() -= 1;
            for layer in 0..DEPTH {
                let of = |reads: &BTreeMap<_, u64>| reads.get(&name(layer)).copied();
                let both = of(&first).unwrap_or(0) + of(&rest).unwrap_or(0);
                assert_eq!(both, 1, "reads of the table of layer {layer}; its owner is {owner}");
            }
            for layer in 0..DEPTH {
                assert_reads(&disk, layer).await;
            }
            assert_eq!(reset().values().sum::<u64>(), DEPTH as u64, "only data is read");
        }
    });
}

/// A request to a random place.
async fn request(disk: &Disk<AnyHost>, model: &mut Model, rng: &mut StdRng, writes: bool) {
    let at = rng.random_range(0..SIZE);
    let length = rng.random_range(1..=4 * CLUSTER).min(SIZE - at);
    if !writes {
        let read = disk.read(at, IoBuf::zeroed(length as usize)).await.unwrap();
        model.check_range(at, &read).unwrap();
    } else if rng.random_bool(0.8) {
        let mut bytes = vec![0; length as usize];
        rng.fill_bytes(&mut bytes);
        model.write(at, &bytes);
        disk.write(at, IoBuf::copy_of(&bytes)).await.unwrap();
    } else {
        model.fill(at, length, 0);
        disk.write_zeroes(at, length, ZeroFlags::default()).await.unwrap();
    }
}

#[test]
fn reads_and_writes_before_all_is_resolved_are_those_of_the_layers() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    block_on(async {
        for _ in 0..20 {
            let host = MemoryHost::new();
            let mut model = Model::new(SIZE);
            let depth = rng.random_range(2..=24);
            for layer in 0..depth {
                // A slice of small clusters is a part of the disk.
                add(&host, layer, 512 << rng.random_range(0..=5)).await;
                // Each is opened with nothing resolved.
                for _ in 0..rng.random_range(1..=3) {
                    let disk = open(&host, layer, true).await;
                    for _ in 0..rng.random_range(0..8) {
                        let writes = rng.random_bool(0.5);
                        request(&disk, &mut model, &mut rng, writes).await;
                    }
                    let whole = disk.read(0, IoBuf::zeroed(SIZE as usize)).await.unwrap();
                    model.check(&whole).unwrap();
                    disk.close().await.unwrap();
                }
            }
            let disk = open(&host, depth - 1, false).await;
            for _ in 0..20 {
                request(&disk, &mut model, &mut rng, false).await;
            }
            let directory = export(&host);
            let read = qemu::read_disk(&directory.path().join(name(depth - 1)), "qcow2");
            model.check(&read).unwrap();
        }
    });
}

#[test]
fn a_table_that_cannot_be_read_hides_only_what_lies_below_it() {
    block_on(async {
        let (memory, broken) = (chain().await, 15);
        let upwards: Vec<_> = (0..DEPTH).collect();
        let downwards: Vec<_> = (0..DEPTH).rev().collect();
        for order in [upwards, downwards] {
            let plan = Plan::new();
            let host = FaultHost::new(memory.clone(), plan.clone());
            let options = OpenOptions::new();
            let disk = Disk::open(host.any(), &name(DEPTH - 1), &options).await.unwrap();
            plan.add(Fault::new(Operation::Read, 0).of(name(broken)).forever());
            for layer in &order {
                if *layer > broken {
                    assert_reads(&disk, *layer).await;
                    continue;
                }
                let at = *layer as u64 * CLUSTER;
                let read = disk.read(at, IoBuf::zeroed(CLUSTER as usize)).await;
                let error = read.expect_err("what the table may have is not known").to_string();
                assert!(error.contains(name(broken).to_str().unwrap()), "{error}");
            }
            let before = plan.injected();
            for _ in 0..512 {
                assert_reads(&disk, DEPTH - 1).await;
            }
            let tried = plan.injected() - before;
            assert!((1..=16).contains(&tried), "the table is tried {tried} times");
            plan.clear();
            for layer in order {
                assert_reads(&disk, layer).await;
            }
        }
    });
}

#[test]
fn a_table_that_cannot_be_read_hides_only_clusters_of_its_own() {
    block_on(async {
        let (memory, cluster, table) = (MemoryHost::new(), 512, 32 << 10);
        for layer in 0..3 {
            add(&memory, layer, cluster).await;
            let disk = open(&memory, layer, true).await;
            for at in [0, 15 * table] {
                disk.write(at + layer as u64 * cluster, bytes(layer)).await.unwrap();
            }
            disk.close().await.unwrap();
        }
        let file = memory.open(&name(1), OpenMode::default()).await.unwrap();
        let number = async |at| {
            let read = file.read_at(at, IoBuf::zeroed(8)).await.unwrap();
            u64::from_be_bytes(read[..].try_into().unwrap())
        };
        let l1_table = number(40).await;
        let broken = number(l1_table + 15 * 8).await & 0x00FF_FFFF_FFFF_FE00;
        let plan = Plan::new();
        let fault = Fault::new(Operation::Read, 0).of(name(1)).at(broken..broken + cluster);
        plan.add(fault.forever());
        let host = FaultHost::new(memory, plan);
        let disk = Disk::open(host.any(), &name(2), &OpenOptions::new()).await.unwrap();
        let first = async |at| {
            let read = disk.read(at, IoBuf::zeroed(cluster as usize)).await;
            read.map(|read| read[0])
        };
        for _ in 0..4 {
            for layer in 0..3 {
                let at = layer * cluster;
                assert_eq!(first(at).await.unwrap(), layer as u8 + 1);
                let owned = first(15 * table + at).await;
                assert_eq!(owned.ok(), (layer == 2).then_some(3), "the cluster of layer {layer}");
            }
            assert_eq!(first(table).await.unwrap(), 0);
        }
    });
}
