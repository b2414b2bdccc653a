//! Servers that are killed with requests in flight, and what the next one makes of them.

use crate::vhost_process::start;
use crate::vhost_raw::{
    AVAILABLE, EVENT_INDEX, FEATURES, NEXT, Raw, USED, WRITE, descriptor, header, receive_with_file,
};
use isobath_testkit::process::PATIENCE;
use isobath_testkit::qemu;
use isobath_testkit::seed::Seed;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

/// Requests at a time, each with its own three descriptors and its own part of the disk.
const DEPTH: u16 = 16;
const SIZE: u16 = 64;
/// Bytes of a write.
const LENGTH: u32 = 4096;
/// Where in the memory a request's header and status, and its data are.
const PLACE: u64 = 0x1_0000;
const STEP: u64 = 0x2000;
/// Bytes of an image's cluster, of which each request has one.
const CLUSTER: u64 = 65536;
/// Bytes of the list before its entries, and of an entry.
const LIST: usize = 16;

/// A driver whose server is exchanged under it.
struct Driver {
    raw: Raw,
    list: File,
    area: Vec<u8>,
    /// The used entries that were seen.
    seen: u16,
    /// Which requests are open, by number.
    open: [bool; DEPTH as usize],
    /// What was last written, by number.
    values: [u8; DEPTH as usize],
}

impl Driver {
    fn connect(mut self, socket: &std::path::Path) -> Self {
        self.raw.socket = UnixStream::connect(socket).unwrap();
        self.raw.agree(FEATURES | EVENT_INDEX);
        assert!(self.raw.is_done(32, &self.area, &[&self.list]));
        // QEMU would tell the used index, having lost the available one.
        self.raw.start_queue(0, u32::from(self.raw.used_index(0)));
        self
    }

    /// Writes the next value to a part of the disk.
    fn send(&mut self, number: u16) {
        let place = PLACE + STEP * u64::from(number);
        let value = self.values[usize::from(number)].wrapping_add(1);
        self.values[usize::from(number)] = value;
        self.raw.memory.write(place, &header(1, CLUSTER / 512 * u64::from(number)));
        self.raw.memory.write(place + 16, &[0xee]);
        self.raw.memory.write(place + 0x1000, &[value; LENGTH as usize]);
        let head = 3 * number;
        self.raw.describe(0, head, descriptor(place, 16, NEXT, head + 1));
        self.raw.describe(0, head + 1, descriptor(place + 0x1000, LENGTH, NEXT, head + 2));
        self.raw.describe(0, head + 2, descriptor(place + 16, 1, WRITE, 0));
        self.raw.offer(0, head);
        self.open[usize::from(number)] = true;
    }

    /// Takes what has ended.
    fn reap(&mut self) {
        while self.seen != self.raw.used_index(0) {
            let (head, _) = self.raw.used(0, self.seen);
            self.seen = self.seen.wrapping_add(1);
            let number = (head / 3) as u16;
            assert_eq!(head, u32::from(3 * number));
            let status = self.raw.memory.read(PLACE + STEP * u64::from(number) + 16, 1);
            assert_eq!(status, [0], "request {number}");
            assert!(self.open[usize::from(number)], "request {number} has ended twice");
            self.open[usize::from(number)] = false;
        }
    }

    /// How many requests the list has.
    fn listed(&self) -> usize {
        let mut list = vec![0; LIST + LIST * usize::from(SIZE)];
        self.list.read_exact_at(&mut list, 0).unwrap();
        list[LIST..].chunks(LIST).filter(|entry| entry[0] != 0).count()
    }
}

#[test]
fn no_request_is_lost_or_answered_twice_however_often_its_server_is_killed() {
    let directory = tempfile::tempdir().unwrap();
    let (image, socket) = (directory.path().join("disk.qcow2"), directory.path().join("socket"));
    qemu::create(&image, "qcow2", CLUSTER * u64::from(DEPTH), "preallocation=metadata");
    let seed = Seed::new();
    let mut random = seed.value() | 1;
    let mut below = |end: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 11) % end
    };
    let mut server = start(&socket, &image, &["slow"]);
    let raw = Raw::connect(&socket, 1, SIZE);
    raw.agree(FEATURES);
    raw.tell(31, &[&[0; 16][..], &1_u16.to_ne_bytes(), &SIZE.to_ne_bytes(), &[0; 4]].concat());
    let (area, list) = receive_with_file(&raw.socket, 31);
    let (open, values) = ([false; DEPTH as usize], [0; DEPTH as usize]);
    // Indices that pass the end of 16 bits on the way.
    raw.memory.set_half(AVAILABLE + 2, 0xfff0);
    raw.memory.set_half(USED + 2, 0xfff0);
    let mut driver = Driver { raw, list: list.into(), area, seen: 0xfff0, open, values };
    driver.raw.socket.shutdown(std::net::Shutdown::Both).unwrap();
    driver = driver.connect(&socket);
    let (mut kills, mut found) = (0, 0);
    let deadline = Instant::now() + PATIENCE;
    while kills < 40 || found <= 40 {
        // At any moment; or not before the server has taken up a request, however long that takes.
        let until = Instant::now() + Duration::from_micros(below(15_000));
        let at_work = below(2) == 0;
        while Instant::now() < until || at_work && driver.listed() == 0 {
            let now = Instant::now();
            assert!(now < deadline, "only {found} requests were in flight at {kills} kills");
            let number = below(u64::from(DEPTH)) as u16;
            if !driver.open[usize::from(number)] {
                driver.send(number);
                driver.raw.kick(0);
            }
            driver.reap();
            if below(4) == 0 {
                thread::sleep(Duration::from_micros(below(400)));
            }
        }
        let _ = server.kill();
        kills += 1;
        driver.reap();
        found += driver.listed();
        server = start(&socket, &image, &["slow"]);
        driver = driver.connect(&socket);
    }
    let deadline = Instant::now() + PATIENCE;
    while driver.open.contains(&true) {
        assert!(Instant::now() < deadline, "a request was lost: {:?}", driver.open);
        driver.reap();
        thread::yield_now();
    }
    // An answer is shown before its request leaves the list; a queue that has stopped has done both.
    assert_eq!(driver.raw.stop_queue(0), driver.seen);
    assert_eq!(driver.listed(), 0);
    let values = driver.values;
    drop(driver);
    let _ = server.stop().ok();
    let disk = qemu::read_disk(&image, "qcow2");
    for (part, value) in disk.chunks(CLUSTER as usize).zip(values) {
        assert!(part[..LENGTH as usize].iter().all(|byte| *byte == value), "not {value}");
    }
    qemu::assert_clean(&image);
}
