//! Chains of images with large tables in which there is nothing.

use super::memory;
use isobath_disk::{Disk, NewDisk, OpenOptions, create};
use isobath_ring::block_on;
use isobath_storage::IoBuf;
use isobath_storage_file::FileHost;

/// The longest L1 table of an image.
const TABLE: usize = 32 << 20;

#[test]
fn a_chain_takes_memory_for_what_its_tables_hold_and_not_for_their_length() {
    let directory = tempfile::tempdir().unwrap();
    let path = |layer: u32| directory.path().join(layer.to_string());
    let layers: u32 = 8;
    block_on(async {
        for layer in 0..layers {
            let mut new = NewDisk::new(128 << 30);
            new.cluster_size = 512;
            if let Some(below) = layer.checked_sub(1) {
                new = new.backing_file(below.to_string(), "qcow2").index(false);
            }
            create(&FileHost, &path(layer), &new).await.unwrap();
        }
        memory::restart();
        let disk = Disk::open(FileHost, &path(layers - 1), &OpenOptions::new()).await.unwrap();
        let read = disk.read((128 << 30) - 4096, IoBuf::zeroed(4096)).await.unwrap();
        assert!(read.iter().all(|byte| *byte == 0));
        let peak = memory::peak();
        assert!(peak < TABLE / 2, "{peak} bytes");
    });
}

/// Memory that a layer of a long chain takes, as long as nothing is read of it.
#[test]
fn a_layer_takes_little_memory() {
    const DEPTH: usize = 300;
    let directory = tempfile::tempdir().unwrap();
    let path = |layer: usize| directory.path().join(format!("layer{layer:03}"));
    block_on(async {
        for layer in 0..DEPTH {
            let mut new = NewDisk::new(4 << 30).index(false);
            if let Some(below) = layer.checked_sub(1) {
                new = new.backing_file(format!("layer{below:03}"), "qcow2");
            }
            create(&FileHost, &path(layer), &new).await.unwrap();
        }
        let options = OpenOptions::new();
        let mut taken = Vec::new();
        for layer in [DEPTH / 3 - 1, DEPTH - 1] {
            memory::restart();
            let disk = Disk::open(FileHost, &path(layer), &options).await.unwrap();
            taken.push(memory::held());
            drop(disk);
        }
        let layers = DEPTH - DEPTH / 3;
        let each = |of: fn(&(usize, usize)) -> usize| (of(&taken[1]) - of(&taken[0])) / layers;
        let (bytes, blocks) = (each(|(bytes, _)| *bytes), each(|(_, blocks)| *blocks));
        println!("{bytes} bytes in {blocks} blocks");
        assert!(bytes <= 1024 && blocks <= 16, "{bytes} bytes in {blocks} blocks");
    });
}
