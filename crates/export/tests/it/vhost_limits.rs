//! A disk with limits under a guest.

use crate::vhost_raw::{DATA, FEATURES, NEXT, Raw, WRITE, descriptor, header};
use crate::vhost_served::VhostServed;
use isobath_disk::clock::SystemClock;
use isobath_disk::throttle::{Group, Limits};
use isobath_disk::{LiveDisk, OpenOptions};
use isobath_export::vhost_user::Options;
use isobath_ring::{Config, Executor};
use isobath_storage_file::FileHost;
use isobath_testkit::qemu;
use std::sync::Arc;
use std::time::Duration;

#[test]
fn a_queue_that_stops_lets_its_waiting_requests_pass() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("disk.qcow2");
    qemu::create(&image, "qcow2", 1 << 20, "");
    let executor = Executor::new(&Config::default()).unwrap();
    let open = OpenOptions::new().writable(true);
    let disk = executor.block_on(LiveDisk::open(FileHost, &image, &open)).unwrap();
    let served = VhostServed::new(disk.clone(), Options::default(), 1);
    let raw = Raw::start(&served.socket, 1, 16, FEATURES);

    // The first request passes, the next ones would wait for minutes.
    let mut limits = Limits::default();
    assert!(limits.set_by_name("bps-total", 1));
    let group = Arc::new(Group::new("slow", Arc::<SystemClock>::default()));
    group.set_limits(&limits);
    disk.throttle().set_group(Some(group));
    raw.memory.write(DATA, &header(0, 0));
    raw.describe(0, 0, descriptor(DATA, 16, NEXT, 1));
    raw.describe(0, 1, descriptor(DATA + 0x1000, 512, NEXT | WRITE, 2));
    raw.describe(0, 2, descriptor(DATA + 0x100, 1, WRITE, 0));
    for _ in 0..4 {
        raw.offer(0, 0);
    }
    raw.kick(0);
    while disk.throttle().waiting() < 3 {
        std::thread::sleep(Duration::from_millis(1));
    }
    raw.wait_used(0, 1);
    assert_eq!((raw.stop_queue(0), raw.used_index(0)), (4, 4));

    drop(served);
    executor.block_on(disk.close()).unwrap();
}
