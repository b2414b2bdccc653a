//! A disk under a guest that pauses when the storage fails.

use crate::memory_disk::MemoryDisk;
use crate::vhost_raw::{DATA, FEATURES, NEXT, Raw, WRITE, descriptor, header};
use crate::vhost_served::VhostServed;
use isobath_disk::pausing::{OnFailure, Pause, Policies};
use isobath_disk::throttle::Direction;
use isobath_disk::{LiveDisk, OpenOptions};
use isobath_export::vhost_user::Options;
use isobath_ring::block_on;
use isobath_storage::Operation;
use isobath_storage_file::FileHost;
use isobath_storage_test::fault::{Fault, FaultHost, Plan};
use isobath_testkit::{qemu, until};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tempfile::TempDir;

/// Where the request that is held has its header, its data and its status.
const HELD: u64 = DATA + 0x1_0000;
const STATUS: u64 = HELD + 16;
/// Its first descriptor: requests of [`Raw::transfer`] use those before.
const HEAD: u16 = 8;
/// Bytes of the list of those in flight, for one queue of 16.
const LIST: usize = 320;

const STOP: Policies = Policies { reads: OnFailure::Stop, writes: OnFailure::Stop };

/// A disk that pauses, and on which requests of this direction fail.
fn failing(direction: Direction) -> VhostServed<MemoryDisk> {
    let disk = MemoryDisk::new(1 << 20).with(0, 512, 3, 0);
    disk.pausing.set_policies(STOP);
    *disk.failing.lock() = Some((direction, libc::ENOSPC));
    VhostServed::new(Arc::new(disk), Options::default(), 1)
}

/// Sends a request for the first sector.
fn send(raw: &Raw, direction: Direction) {
    let (kind, flags) = if direction == Direction::Read { (0, WRITE) } else { (1, 0) };
    raw.memory.write(HELD, &header(kind, 0));
    raw.memory.write(STATUS, &[0xee]);
    raw.memory.write(HELD + 0x200, &[7; 512]);
    raw.describe(0, HEAD, descriptor(HELD, 16, NEXT, HEAD + 1));
    raw.describe(0, HEAD + 1, descriptor(HELD + 0x200, 512, NEXT | flags, HEAD + 2));
    raw.describe(0, HEAD + 2, descriptor(STATUS, 1, WRITE, 0));
    raw.offer(0, HEAD);
    raw.kick(0);
}

fn status(raw: &Raw) -> u8 {
    raw.memory.read(STATUS, 1)[0]
}

fn until_held(disk: &MemoryDisk, count: usize) {
    until(&format!("{count} requests to be held"), || disk.pausing.state().waiting == count);
}

/// The storage is well again, and the operator lets the disk go on.
fn go_on(disk: &MemoryDisk) {
    *disk.failing.lock() = None;
    disk.pausing.resume();
}

/// A client that has asked for a list of those in flight, on a queue that runs.
fn listed(served: &VhostServed<MemoryDisk>) -> (Raw, Vec<u8>, File) {
    let raw = Raw::connect(&served.socket, 1, 16);
    raw.agree(FEATURES);
    let (body, file) = raw.ask_for_list();
    assert!(raw.is_done(32, &body, &[&file]));
    raw.start_queue(0, 0);
    (raw, body, file)
}

/// Whether the list has the request.
fn is_listed(list: &File) -> bool {
    let mut bytes = [0; LIST];
    list.read_exact_at(&mut bytes, 0).unwrap();
    let marks: Vec<usize> = (0..16).filter(|head| bytes[16 + 16 * head] != 0).collect();
    assert!(marks.is_empty() || marks == [usize::from(HEAD)], "{marks:?}");
    !marks.is_empty()
}

#[test]
fn a_request_that_is_held_is_answered_after_the_disk_goes_on() {
    for direction in [Direction::Read, Direction::Write] {
        let served = failing(direction);
        let raw = Raw::start(&served.socket, 1, 16, FEATURES);
        send(&raw, direction);
        until_held(&served.device, 1);
        // Those of the other direction go on.
        let other = u32::from(direction == Direction::Read);
        assert_eq!(raw.transfer(0, other, 64, &[9; 512]).0, 0);
        // Nothing has changed: it is held again.
        served.device.pausing.resume();
        until_held(&served.device, 1);
        assert_eq!((status(&raw), raw.used_index(0)), (0xee, 1));
        go_on(&served.device);
        raw.wait_used(0, 2);
        assert_eq!((raw.used(0, 1).0, status(&raw)), (u32::from(HEAD), 0));
        match direction {
            Direction::Read => assert_eq!(raw.memory.read(HELD + 0x200, 512), [3; 512]),
            Direction::Write => assert_eq!(served.device.bytes(0, 512), [7; 512]),
        }
        raw.assert_works(0);
    }
}

/// Describes a request of small segments for the whole disk, which is copied through a MiB; it can be sent many times.
fn describe_copied(raw: &Raw, direction: Direction) {
    let (kind, flags) = if direction == Direction::Read { (0, WRITE) } else { (1, 0) };
    raw.memory.write(HELD, &header(kind, 0));
    raw.memory.write(STATUS, &[0xee]);
    raw.memory.write(HELD + 0x200, &[7; 32 << 10]);
    raw.describe(0, 0, descriptor(HELD, 16, NEXT, 1));
    for index in 1..33 {
        raw.describe(0, index, descriptor(HELD + 0x200, 32 << 10, NEXT | flags, index + 1));
    }
    raw.describe(0, 33, descriptor(STATUS, 1, WRITE, 0));
}

#[test]
fn requests_that_are_held_take_no_memory_from_others() {
    // More MiB than a disk can have.
    const SENT: u16 = 60;
    for direction in [Direction::Read, Direction::Write] {
        let served = failing(direction);
        let disk = &served.device;
        *disk.held.lock() = Some(Vec::new());
        let raw = Raw::start(&served.socket, 1, 64, FEATURES);
        describe_copied(&raw, direction);
        (0..SENT).for_each(|_| raw.offer(0, 0));
        raw.kick(0);
        // Some have memory and are tried, to fail together, and the others wait for memory.
        until("all requests", || disk.admitted.lock().len() == usize::from(SENT));
        disk.release();
        until_held(disk, usize::from(SENT));

        let device = Arc::new(MemoryDisk::new(1 << 20));
        let other = VhostServed::new(device, Options::default(), 1);
        let its = Raw::start(&other.socket, 1, 64, FEATURES);
        describe_copied(&its, direction);
        (0..SENT).for_each(|_| its.offer(0, 0));
        its.kick(0);
        its.wait_used(0, SENT);
        assert_eq!(status(&its), 0);

        assert_eq!((status(&raw), raw.used_index(0)), (0xee, 0));
        go_on(disk);
        raw.wait_used(0, SENT);
        assert_eq!(status(&raw), 0);
        if direction == Direction::Write {
            assert!(disk.bytes(0, 1 << 20) == [7; 1 << 20]);
        }
    }
}

#[test]
fn the_next_server_carries_out_what_a_paused_disk_has_held() {
    let mut served = failing(Direction::Write);
    let (raw, body, list) = listed(&served);
    send(&raw, Direction::Write);
    until_held(&served.device, 1);
    served.stop();
    assert_eq!((status(&raw), raw.used_index(0)), (0xee, 0), "it is not answered");
    assert!(is_listed(&list));
    go_on(&served.device);
    served.restart(Options::default());
    let raw = Raw { socket: UnixStream::connect(&served.socket).unwrap(), ..raw };
    raw.agree(FEATURES);
    assert!(raw.is_done(32, &body, &[&list]));
    raw.start_queue(0, 0);
    raw.wait_used(0, 1);
    assert_eq!((raw.used(0, 0).0, status(&raw)), (u32::from(HEAD), 0));
    assert_eq!(served.device.bytes(0, 512), [7; 512]);
    raw.assert_works(0);
    assert_eq!(raw.stop_queue(0), 3);
    assert!(!is_listed(&list));
}

#[test]
fn a_device_that_is_reset_forgets_what_a_paused_disk_has_held() {
    let served = failing(Direction::Write);
    let (raw, _, list) = listed(&served);
    send(&raw, Direction::Write);
    until_held(&served.device, 1);
    assert_eq!((raw.stop_queue(0), raw.used_index(0)), (1, 0));
    assert!(is_listed(&list));
    assert!(raw.is_done(34, &[], &[]));
    assert!(!is_listed(&list));
    go_on(&served.device);
    assert_eq!(served.device.bytes(0, 512), [3; 512]);
}

/// Sends a request for a sector, from other descriptors than the one that is held.
fn write_elsewhere(raw: &Raw, sector: u64) {
    assert_eq!(raw.transfer(0, 1, sector, &[9; 512]).0, 0);
}

#[test]
fn a_queue_with_a_new_list_does_not_carry_out_what_has_ended_once_more() {
    let served = failing(Direction::Write);
    let (raw, body, list) = listed(&served);
    send(&raw, Direction::Write);
    until_held(&served.device, 1);
    // The disk goes on beside the request that is left, as if it had gone on to wait for something else.
    assert_eq!(raw.stop_queue(0), 1);
    assert!(is_listed(&list));
    go_on(&served.device);
    // Another list, from which that request is missing: it is never answered, and none is answered twice.
    let (_, new) = raw.ask_for_list();
    assert!(raw.is_done(32, &body, &[&new]));
    raw.start_queue(0, 1);
    write_elsewhere(&raw, 64);
    assert_eq!((raw.used_index(0), status(&raw)), (1, 0xee));
    assert_eq!(served.device.bytes(0, 512), [3; 512]);
}

/// As Cloud Hypervisor does, which sends the driver's index of available requests.
#[test]
fn requests_that_no_server_has_taken_are_served_whatever_position_the_client_gives() {
    let mut served = VhostServed::new(Arc::new(MemoryDisk::new(1 << 20)), Options::default(), 1);
    let (raw, body, list) = listed(&served);
    served.stop();
    send(&raw, Direction::Write);
    served.restart(Options::default());
    let raw = Raw { socket: UnixStream::connect(&served.socket).unwrap(), ..raw };
    raw.agree(FEATURES);
    assert!(raw.is_done(32, &body, &[&list]));
    raw.start_queue(0, 1);
    raw.wait_used(0, 1);
    assert_eq!((raw.used(0, 0).0, status(&raw)), (u32::from(HEAD), 0));
    assert_eq!(served.device.bytes(0, 512), [7; 512]);
}

#[test]
fn without_a_list_a_held_request_fails_when_its_queue_stops() {
    let served = failing(Direction::Write);
    let raw = Raw::start(&served.socket, 1, 16, FEATURES);
    send(&raw, Direction::Write);
    until_held(&served.device, 1);
    assert_eq!((raw.stop_queue(0), raw.used_index(0), status(&raw)), (1, 1, 1));
    // A client that leaves does not wait for the disk either.
    raw.start_queue(0, 1);
    send(&raw, Direction::Write);
    until_held(&served.device, 1);
    drop(raw);
    served.wait_connected(false);
    until_held(&served.device, 0);
    go_on(&served.device);
    Raw::start(&served.socket, 1, 16, FEATURES).assert_works(0);
}

/// A qcow2 disk that pauses, under a guest that has written; faults of its storage; how often it has paused.
struct Image {
    raw: Raw,
    served: VhostServed<LiveDisk<FaultHost<FileHost>>>,
    disk: Arc<LiveDisk<FaultHost<FileHost>>>,
    plan: Plan,
    pauses: Arc<AtomicUsize>,
    _directory: TempDir,
}

impl Image {
    fn new(policies: Policies) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("disk.qcow2");
        qemu::create(&image, "qcow2", 1 << 20, "");
        let plan = Plan::new();
        let open = OpenOptions::new().writable(true);
        let host = FaultHost::new(FileHost, plan.clone());
        let disk = block_on(LiveDisk::open(host, &image, &open)).unwrap();
        let pauses = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&pauses);
        disk.pausing().set_policies(policies);
        disk.pausing().on_pause(Box::new(move |_| {
            counted.fetch_add(1, Ordering::SeqCst);
        }));
        let served = VhostServed::new(disk.clone(), Options::default(), 1);
        let raw = Raw::start(&served.socket, 1, 16, FEATURES);
        raw.assert_works(0);
        Self { raw, served, disk, plan, pauses, _directory: directory }
    }

    fn send_flush(&self) {
        let raw = &self.raw;
        raw.memory.write(HELD, &header(4, 0));
        raw.memory.write(STATUS, &[0xee]);
        raw.describe(0, HEAD, descriptor(HELD, 16, NEXT, HEAD + 1));
        raw.describe(0, HEAD + 1, descriptor(STATUS, 1, WRITE, 0));
        raw.offer(0, HEAD);
        raw.kick(0);
    }

    fn until_held(&self) -> Vec<Pause> {
        until("a request to be held", || self.disk.pausing().state().waiting == 1);
        self.disk.pausing().state().failures
    }

    /// The disk has accepted no more writes.
    fn end_poisoned(self) {
        drop((self.raw, self.served));
        assert!(block_on(self.disk.close()).is_err());
    }
}

#[test]
fn a_disk_that_accepts_no_more_writes_pauses_once_each_time_that_it_goes_on() {
    let image = Image::new(STOP);
    image.plan.add(Fault::new(Operation::Flush, 0));
    image.send_flush();
    let pauses = || image.pauses.load(Ordering::SeqCst);
    for round in 1..4 {
        let failures = image.until_held();
        assert_eq!((failures.len(), pauses(), image.raw.used_index(0)), (1, round, 2));
        image.disk.pausing().resume();
        until("the next pause", || pauses() > round);
    }
    let reason = &image.until_held()[0].reason;
    assert!(reason.contains("accepts no more writes"), "{reason}");
    image.disk.pausing().set_policies(Policies::default());
    image.raw.wait_used(0, 3);
    assert_eq!(status(&image.raw), 1);
    image.end_poisoned();
}

#[test]
fn a_flush_without_space_for_tables_pauses_the_disk_and_fails_when_it_goes_on() {
    let image = Image::new(Policies { reads: OnFailure::Report, writes: OnFailure::Enospc });
    image.plan.add(Fault::new(Operation::Write, 0).errno(libc::ENOSPC).forever());
    image.send_flush();
    let failures = image.until_held();
    assert!(failures[0].no_space, "{failures:?}");
    image.plan.clear();
    image.disk.pausing().resume();
    // The commit was not whole, so that nothing may succeed after it.
    image.raw.wait_used(0, 3);
    assert_eq!((status(&image.raw), image.pauses.load(Ordering::SeqCst)), (1, 1));
    image.end_poisoned();
}
