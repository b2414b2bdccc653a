//! Requests that need more of the map than may stay in memory.

use futures_executor::block_on;
use futures_util::future::join_all;
use isobath_disk::{Disk, NewDisk, OpenOptions, create};
use isobath_storage::IoBuf;
use isobath_storage::memory::MemoryHost;
use isobath_storage_test::any::ToAny;
use std::path::Path;

#[test]
fn a_request_larger_than_the_map_is_answered() {
    block_on(async {
        let host = MemoryHost::new();
        let name = Path::new("disk.qcow2");
        let new = NewDisk::new(16 << 20).cluster_size(512);
        create(&host.any(), name, &new).await.unwrap();
        let options = OpenOptions::new().writable(true).map_cache(0);
        let disk = Disk::open(host.any(), name, &options).await.unwrap();
        disk.write(8 << 20, IoBuf::copy_of(&[7; 512])).await.unwrap();
        let runs = disk.block_status(0, 16 << 20, 9).await.unwrap();
        assert_eq!(runs.len(), 3, "{runs:?}");
        let reads = (0..3).map(|_| disk.read(0, IoBuf::zeroed(16 << 20)));
        for read in join_all(reads).await {
            assert_eq!(read.unwrap()[8 << 20..][..512], [7; 512]);
        }
        disk.close().await.unwrap();
    });
}
