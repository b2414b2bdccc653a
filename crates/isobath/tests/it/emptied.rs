//! An overlay that is emptied since its backing file has everything.

use crate::common::{Ticking, run};
use futures_executor::block_on;
use isobath_disk::{Disk, LiveDisk, NewDisk, OpenOptions, create};
use isobath_storage::IoBuf;
use isobath_storage::memory::MemoryHost;
use isobath_storage_test::any::ToAny;
use isobath_storage_test::fault::{FaultHost, Plan};
use std::path::Path;
use std::sync::Arc;

/// Many tables of clusters of 512 bytes.
const SIZE: u64 = 256 << 10;

/// A base and an overlay with the same contents.
async fn committed() -> MemoryHost {
    let host = MemoryHost::new();
    for name in ["base", "overlay"] {
        let mut new = NewDisk::new(SIZE).cluster_size(512_u64).index(false);
        if name == "overlay" {
            new = new.backing_file("base", "qcow2");
        }
        create(&host.any(), Path::new(name), &new).await.unwrap();
        let options = OpenOptions::new().writable(true);
        let disk = Disk::open(host.any(), Path::new(name), &options).await.unwrap();
        disk.write(0, IoBuf::from(vec![7; SIZE as usize])).await.unwrap();
        disk.close().await.unwrap();
    }
    host
}

#[test]
fn a_disk_reads_as_before_wherever_its_emptying_is_given_up() {
    let memory = block_on(committed());
    for turns in 0.. {
        let plan = Plan::new();
        let host = FaultHost::new(memory.deep_copy(), plan.clone());
        let options = OpenOptions::new().writable(true);
        let disk = block_on(Disk::open(host.any(), Path::new("overlay"), &options)).unwrap();
        plan.delay(turns);
        let live = LiveDisk::new(disk, &options, Arc::new(Ticking::default()));
        let assert_whole = |when: &str| {
            let read = block_on(live.read(0, IoBuf::zeroed(SIZE as usize))).unwrap();
            assert_eq!(read.iter().position(|byte| *byte != 7), None, "{when} {turns} turns");
        };
        // The map has all of it.
        assert_whole("before");
        let ended = run(live.make_empty(), turns).is_some();
        assert_whole("after");
        if ended {
            break;
        }
    }
}
