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
