//! Requests from the `virtio-driver` crate's client, many at a time, against a model of the disk.

use crate::memory_disk::MemoryDisk;
use crate::vhost_raw::Shared;
use crate::vhost_served::VhostServed;
use isobath_disk::{BlockDevice, LiveDisk, OpenOptions};
use isobath_export::vhost_user::Options;
use isobath_ring::{Config, Executor};
use isobath_storage_file::FileHost;
use isobath_testkit::qemu;
use isobath_testkit::seed::Seed;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use virtio_driver::{
    VhostUser, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags,
    VirtioTransport,
};

/// Bytes of a queue's own part of the disk, in slots; each slot has one request at a time.
const SLOTS: usize = 24;
const SLOT: usize = 80 << 10;
const ZONE: usize = SLOTS * SLOT;
const QUEUES: usize = 3;
/// Buffers are at odd sectors of their memory, so that not all of them are aligned.
const PLACE: usize = SLOT + 4096;

/// A request under way, of which each slot has one at most.
#[derive(Clone, Copy)]
enum Open {
    Flush,
    Change {
        slot: usize,
    },
    /// Bytes from `from` of the zone, into the memory at `place`.
    Read {
        slot: usize,
        from: usize,
        length: usize,
        place: usize,
    },
}

/// Random numbers that a seed repeats (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % end
    }
}

#[test]
fn a_disk_in_memory_holds_what_was_written() {
    let seed = Seed::new();
    for (event_index, workers, poll) in [
        (true, 0, Duration::ZERO),
        (false, 1, Duration::from_micros(32)),
        (true, 2, Duration::from_millis(1)),
    ] {
        let disk = MemoryDisk { delay: 2, ..MemoryDisk::new(QUEUES * ZONE) };
        let options = Options { poll, ..Options::default() };
        let served = VhostServed::new(Arc::new(disk), options, workers);
        let models = drive(&served, event_index, seed.value());
        assert!(served.device.bytes(0, QUEUES * ZONE) == models.concat());
    }
}

#[test]
fn a_chain_of_images_holds_what_was_written() {
    let seed = Seed::new();
    let directory = tempfile::tempdir().unwrap();
    let (base, image) = (directory.path().join("base.qcow2"), directory.path().join("disk.qcow2"));
    qemu::create(&base, "qcow2", (QUEUES * ZONE) as u64, "");
    qemu::create_overlay(&image, &base, "qcow2", "cluster_size=16k");
    let executor = Executor::new(&Config::default()).unwrap();
    let open = OpenOptions::new().writable(true);
    let disk = executor.block_on(LiveDisk::open(FileHost, &image, &open)).unwrap();
    let served = VhostServed::new(disk.clone(), Options::default(), 1);
    let models = drive(&served, true, seed.value());
    drop(served);
    executor.block_on(disk.close()).unwrap();
    drop(disk);
    qemu::assert_clean(&image);
    assert!(qemu::read_disk(&image, "qcow2") == models.concat(), "QEMU reads something else");
}

/// Sends random requests on all queues, compares every read, and gives what the disk must hold.
fn drive<D: BlockDevice>(served: &VhostServed<D>, event_index: bool, seed: u64) -> Vec<Vec<u8>> {
    let count = 2500;
    let mut features = VirtioFeatureFlags::VERSION_1;
    features.set(VirtioFeatureFlags::RING_EVENT_IDX, event_index);
    let blk = VirtioBlkFeatureFlags::FLUSH
        | VirtioBlkFeatureFlags::MQ
        | VirtioBlkFeatureFlags::DISCARD
        | VirtioBlkFeatureFlags::WRITE_ZEROES;
    let path = served.socket.to_str().unwrap();
    let mut device = VhostUser::new(path, features.bits() | blk.bits()).unwrap();
    let memory = Shared::new(QUEUES * SLOTS * PLACE);
    let start = memory.start() as usize;
    device.map_mem_region(start, memory.len(), memory.file.as_raw_fd(), 0).unwrap();
    let device: &mut VirtioBlkTransport = &mut device;
    let config = device.get_config().unwrap();
    assert_eq!(u64::from(config.capacity), served.device.size() / 512);
    let mut queues = VirtioBlkQueue::setup_queues(device, QUEUES, 256).unwrap();
    let notifiers: Vec<_> = (0..QUEUES).map(|at| device.get_submission_notifier(at)).collect();
    let calls: Vec<_> = (0..QUEUES).map(|at| device.get_completion_fd(at)).collect();
    let mut requests = Requests {
        memory: &memory,
        random: Random(seed | 1),
        models: vec![vec![0; ZONE]; QUEUES],
        busy: vec![[false; SLOTS]; QUEUES],
    };
    let mut under_way = [0_usize; QUEUES];
    let deadline = Instant::now() + Duration::from_mins(2);
    let mut sent = 0;
    for queue in &mut queues {
        queue.set_used_notif_enabled(true);
    }
    while sent < count || under_way != [0; QUEUES] {
        assert!(Instant::now() < deadline, "requests do not end");
        let at = requests.random.below(QUEUES);
        let queue = &mut queues[at];
        let batch = if sent < count { requests.random.below(9) } else { 0 };
        for _ in 0..batch {
            let begun = usize::from(requests.send(queue, at));
            under_way[at] += begun;
            sent += begun;
        }
        if queue.avail_notif_needed() {
            notifiers[at].notify().unwrap();
        }
        if sent >= count && under_way[at] > 0 && !queue.completions().has_next() {
            // Nothing more is sent, so that only an interrupt can end the wait.
            wait_readable(calls[at].as_raw_fd());
        }
        for completion in queue.completions() {
            assert_eq!(completion.ret, 0);
            under_way[at] -= 1;
            requests.end(at, completion.context);
        }
    }
    requests.models
}

struct Requests<'a> {
    memory: &'a Shared,
    random: Random,
    /// What each queue's zone holds once all is done.
    models: Vec<Vec<u8>>,
    busy: Vec<[bool; SLOTS]>,
}

impl Requests<'_> {
    /// Sends a request, if its slot has none and there are descriptors.
    fn send(&mut self, queue: &mut VirtioBlkQueue<'_, Open>, at: usize) -> bool {
        let random = &mut self.random;
        let slot = random.below(SLOTS);
        if random.below(16) == 0 {
            return queue.flush(Open::Flush).is_ok();
        }
        if self.busy[at][slot] {
            return false;
        }
        let first = random.below(SLOT / 512);
        let length = (random.below(SLOT / 512 - first) + 1) * 512;
        let from = slot * SLOT + first * 512;
        let offset = (at * ZONE + from) as u64;
        let place = (at * SLOTS + slot) * PLACE + random.below(8) * 512;
        // The buffer in pieces, as a page cache gives them, some of odd lengths.
        let mut vectors = Vec::new();
        let mut done = 0;
        let step = [length, 4096, 65536, 1000, 512][random.below(5)].max(length / 20);
        while done < length {
            let piece = step.min(length - done);
            // SAFETY: within the shared memory.
            let address = unsafe { self.memory.start().add(place + done) };
            vectors.push(libc::iovec { iov_base: address.cast(), iov_len: piece });
            done += piece;
        }
        let (vectors, pieces) = (vectors.as_ptr(), vectors.len());
        let change = Open::Change { slot };
        let mut new = vec![0; length];
        let sent = match random.below(7) {
            0..3 => {
                let read = Open::Read { slot, from, length, place };
                // SAFETY: the memory is shared with the device until the end of the test.
                let sent = unsafe { queue.readv(offset, vectors, pieces, read) };
                self.busy[at][slot] = sent.is_ok();
                return sent.is_ok();
            }
            3 => queue.write_zeroes(offset, length as u64, random.below(2) == 1, change),
            _ => {
                let byte = random.below(255) + 1;
                let fill = |(index, new): (usize, &mut u8)| *new = (byte + index / 512) as u8;
                new.iter_mut().enumerate().for_each(fill);
                self.memory.write(place as u64, &new);
                // SAFETY: as above.
                unsafe { queue.writev(offset, vectors, pieces, change) }
            }
        };
        if sent.is_ok() {
            self.busy[at][slot] = true;
            self.models[at][from..from + length].copy_from_slice(&new);
        }
        sent.is_ok()
    }

    fn end(&mut self, at: usize, request: Open) {
        match request {
            Open::Flush => {}
            Open::Change { slot } => self.busy[at][slot] = false,
            Open::Read { slot, from, length, place } => {
                self.busy[at][slot] = false;
                let read = self.memory.read(place as u64, length);
                assert!(read == self.models[at][from..from + length], "{length} bytes differ");
            }
        }
    }
}

fn wait_readable(number: i32) {
    let mut poll = libc::pollfd { fd: number, events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry, which is alive.
    assert_eq!(unsafe { libc::poll(&raw mut poll, 1, 60_000) }, 1, "no interrupt arrives");
    let mut count = 0_u64;
    // SAFETY: 8 bytes of a live value.
    assert_eq!(unsafe { libc::read(number, (&raw mut count).cast(), 8) }, 8);
}
