//! What is discarded in an overlay reads as zeroes, never as what the backing file holds.

use futures_executor::block_on;
use isobath_disk::{Disk, NewDisk, OpenOptions, create};
use isobath_storage::IoBuf;
use isobath_storage::memory::MemoryHost;
use isobath_storage_test::any::ToAny;
use std::path::Path;

#[test]
fn even_when_the_overlay_was_open_without_its_base() {
    block_on(async {
        let host = MemoryHost::new();
        host.insert("base", &vec![7; 1 << 20]);
        let name = Path::new("overlay");
        let new = NewDisk::default().backing_file("base", "raw");
        create(&host.any(), name, &new).await.unwrap();
        let alone = OpenOptions::new().writable(true).backing(false);
        let disk = Disk::open(host.any(), name, &alone).await.unwrap();
        disk.write(0, IoBuf::copy_of(&vec![1; 1 << 17])).await.unwrap();
        disk.discard(0, 1 << 17).await.unwrap();
        disk.close().await.unwrap();
        drop(disk);
        let disk = Disk::open(host.any(), name, &OpenOptions::default()).await.unwrap();
        let bytes = disk.read(0, IoBuf::zeroed(1 << 18)).await.unwrap();
        assert!(bytes[..1 << 17].iter().all(|byte| *byte == 0));
        assert!(bytes[1 << 17..].iter().all(|byte| *byte == 7));
    });
}
