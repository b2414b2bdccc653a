//! A disk with limits under a guest.

use crate::vhost_raw::{DATA, FEATURES, NEXT, Raw, WRITE, descriptor, header};
use crate::vhost_served::VhostServed;
use isobath_disk::clock::SystemClock;
use isobath_disk::throttle::{Group, Limits};
use isobath_disk::{LiveDisk, OpenOptions};
use isobath_export::vhost_user::Options;
use isobath_ring::{Config, Executor};
use isobath_storage_file::FileHost;
use isobath_testkit::{qemu, until};
use std::sync::Arc;
use tempfile::TempDir;

/// A disk of 2 MiB under a guest.
struct Guest {
    raw: Raw,
    served: VhostServed<LiveDisk<FileHost>>,
    disk: Arc<LiveDisk<FileHost>>,
    executor: Executor,
    _directory: TempDir,
}

impl Guest {
    fn start(queue_size: u16) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("disk.qcow2");
        qemu::create(&image, "qcow2", 2 << 20, "");
        let executor = Executor::new(&Config::default()).unwrap();
        let open = OpenOptions::new().writable(true);
        let disk = executor.block_on(LiveDisk::open(FileHost, &image, &open)).unwrap();
        let served = VhostServed::new(disk.clone(), Options::default(), 1);
        let raw = Raw::start(&served.socket, 1, queue_size, FEATURES);
        Self { raw, served, disk, executor, _directory: directory }
    }

    /// From now on one request passes, and the next ones would wait for minutes.
    fn limit(&self) {
        let mut limits = Limits::default();
        assert!(limits.set_by_name("bps-total", 1));
        let group = Arc::new(Group::new("slow", Arc::<SystemClock>::default()));
        group.set_limits(&limits);
        self.disk.throttle().set_group(Some(group));
    }

    fn end(self) {
        drop(self.served);
        self.executor.block_on(self.disk.close()).unwrap();
    }
}

#[test]
fn a_request_of_many_segments_passes_as_one() {
    let guest = Guest::start(64);
    let raw = &guest.raw;
    let status = DATA + 0x100;
    // Segments that go to the disk one by one, and small ones, which are copied a MiB at a time.
    for (kind, count, length) in [(0, 5, 64 << 10), (1, 5, 64 << 10), (0, 40, 32 << 10)] {
        guest.limit();
        raw.memory.write(DATA, &header(kind, 0));
        raw.memory.write(status, &[0xee]);
        let mut parts = vec![(DATA, 16, false)];
        parts.extend(vec![(DATA + 0x1000, length, kind == 0); count]);
        parts.push((status, 1, true));
        raw.request(0, &parts);
        assert_eq!(raw.memory.read(status, 1), [0]);
    }
    // Two ranges to be zeroed.
    guest.limit();
    let range = [1_u64.to_le_bytes(), 8_u64.to_le_bytes()].concat();
    raw.memory.write(DATA, &[&header(13, 0)[..], &range, &range].concat());
    raw.memory.write(status, &[0xee]);
    raw.request(0, &[(DATA, 48, false), (status, 1, true)]);
    assert_eq!(raw.memory.read(status, 1), [0]);
    guest.end();
}

#[test]
fn a_request_that_waits_takes_no_memory_from_others() {
    let guest = Guest::start(64);
    guest.limit();
    let raw = &guest.raw;
    // Reads of small segments, each of which is copied through a MiB: more MiB than a disk can have.
    raw.memory.write(DATA, &header(0, 0));
    raw.describe(0, 0, descriptor(DATA, 16, NEXT, 1));
    for index in 1..33 {
        let place = DATA + 0x1000;
        raw.describe(0, index, descriptor(place, 32 << 10, NEXT | WRITE, index + 1));
    }
    raw.describe(0, 33, descriptor(DATA + 0x100, 1, WRITE, 0));
    for _ in 0..60 {
        raw.offer(0, 0);
    }
    raw.kick(0);
    until("59 requests to wait", || guest.disk.throttle().waiting() == 59);
    assert_eq!((raw.stop_queue(0), raw.used_index(0)), (60, 60));
    guest.end();
}

#[test]
fn a_queue_that_stops_lets_its_waiting_requests_pass() {
    let guest = Guest::start(16);
    guest.limit();
    let raw = &guest.raw;
    raw.memory.write(DATA, &header(0, 0));
    raw.describe(0, 0, descriptor(DATA, 16, NEXT, 1));
    raw.describe(0, 1, descriptor(DATA + 0x1000, 512, NEXT | WRITE, 2));
    raw.describe(0, 2, descriptor(DATA + 0x100, 1, WRITE, 0));
    for _ in 0..4 {
        raw.offer(0, 0);
    }
    raw.kick(0);
    until("three requests to wait", || guest.disk.throttle().waiting() == 3);
    raw.wait_used(0, 1);
    assert_eq!((raw.stop_queue(0), raw.used_index(0)), (4, 4));
    guest.end();
}
