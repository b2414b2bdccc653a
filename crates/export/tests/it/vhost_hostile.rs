//! Clients and guests that do what they must not.

use crate::memory_disk::MemoryDisk;
use crate::vhost_raw::{
    AVAILABLE, DATA, EVENT_INDEX, FEATURES, FLUSH, INDIRECT, MEMORY, NEXT, PART, Raw, TABLE, USED,
    USER, WRITE, addresses, descriptor, eventfd, header, memory_table, message, state,
};
use crate::vhost_served::VhostServed;
use isobath_export::vhost_user::{Options, Server};
use isobath_ring::{Config, Executor, yield_now};
use proptest::prelude::*;
use std::fs::File;
use std::future::{Future, poll_fn};
use std::io::{ErrorKind, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

const SIZE: usize = 1 << 20;
const IN: u32 = 0;
const OUT: u32 = 1;
const OK: u8 = 0;
const ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;

fn served() -> VhostServed<MemoryDisk> {
    served_with(MemoryDisk::new(SIZE), Options::default())
}

/// Takes requests only when it is kicked, once it is [idle](VhostServed::wait_idle).
fn served_on_kicks() -> VhostServed<MemoryDisk> {
    let options = Options { poll: Duration::ZERO, ..Options::default() };
    served_with(MemoryDisk::new(SIZE), options)
}

fn served_with(disk: MemoryDisk, options: Options) -> VhostServed<MemoryDisk> {
    VhostServed::new(Arc::new(disk), options, 2)
}

/// Places of a test's request.
const HEADER: u64 = DATA;
const STATUS: u64 = DATA + 0x100;
const BUFFER: u64 = DATA + 0x1000;

/// Sends a request made by hand; gives its status, 0xee if that was not touched.
fn status(raw: &Raw, header: [u8; 16], parts: &[(u64, u32, bool)]) -> u8 {
    raw.memory.write(HEADER, &header);
    raw.memory.write(STATUS, &[0xee]);
    raw.request(0, parts);
    raw.memory.read(STATUS, 1)[0]
}

#[test]
fn requests_that_make_no_sense_fail_alone() {
    let served = served();
    let raw = Raw::start(&served.socket, 2, 16, FEATURES);
    let head = (HEADER, 16, false);
    let tail = (STATUS, 1, true);
    let last = (SIZE / 512) as u64;
    let beyond = MEMORY as u64;
    for (kind, sector, parts, expected) in [
        // Lengths and places.
        (IN, 0, vec![head, (BUFFER, 511, true), tail], ERROR),
        (OUT, 0, vec![head, (BUFFER, 513, false), tail], ERROR),
        (IN, last, vec![head, (BUFFER, 512, true), tail], ERROR),
        (OUT, last - 1, vec![head, (BUFFER, 1024, false), tail], ERROR),
        (IN, u64::MAX, vec![head, (BUFFER, 512, true), tail], ERROR),
        (IN, 1 << 55, vec![head, (BUFFER, 512, true), tail], ERROR),
        // Nothing to do.
        (IN, 0, vec![head, tail], OK),
        (OUT, last, vec![head, tail], OK),
        // Memory of the wrong kind.
        (IN, 0, vec![head, (BUFFER, 512, false), tail], ERROR),
        (OUT, 0, vec![head, (BUFFER, 512, true), tail], ERROR),
        (IN, 0, vec![head, (BUFFER, 512, false), (BUFFER, 512, true), tail], ERROR),
        // Memory that is not there.
        (IN, 0, vec![head, (beyond, 512, true), tail], ERROR),
        (IN, 0, vec![head, (beyond - 256, 512, true), tail], ERROR),
        (OUT, 0, vec![head, (u64::MAX - 100, 512, false), tail], ERROR),
        (OUT, 0, vec![head, (BUFFER, u32::MAX, false), tail], ERROR),
        (OUT, 0, vec![(beyond, 16, false), (BUFFER, 512, false), tail], ERROR),
        // Headers.
        (IN, 0, vec![(HEADER, 15, false), tail], ERROR),
        (IN, 0, vec![tail], ERROR),
        (77, 0, vec![head, tail], UNSUPPORTED),
        (u32::MAX, 0, vec![head, (BUFFER, 512, true), tail], UNSUPPORTED),
        // Lists of ranges.
        (11, 0, vec![head, tail], ERROR),
        (13, 0, vec![head, (BUFFER, 15, false), tail], ERROR),
        (13, 0, vec![head, (BUFFER, 17 * 16, false), tail], ERROR),
        // A header in parts, and data right behind it, are fine.
        (IN, 0, vec![(HEADER, 3, false), (HEADER + 3, 13, false), (BUFFER, 512, true), tail], OK),
        (OUT, 0, vec![(HEADER, 16 + 512, false), tail], OK),
        (4, 0, vec![head, tail], OK),
    ] {
        let found = status(&raw, header(kind, sector), &parts);
        assert_eq!(found, expected, "kind {kind} at {sector}: {parts:x?}");
        raw.assert_works(1);
    }
    // Without a place for the status there is nothing but the used ring.
    for parts in [
        vec![head],
        vec![head, (BUFFER, 512, false)],
        vec![head, (BUFFER, 0, true)],
        vec![head, (beyond, 1, true)],
        vec![head, (BUFFER, 512, true), head, tail],
    ] {
        raw.memory.write(HEADER, &header(IN, 0));
        raw.memory.write(STATUS, &[0xee]);
        assert_eq!(raw.request(0, &parts), 0, "{parts:x?}");
        assert_eq!(raw.memory.read(STATUS, 1), [0xee]);
    }
    raw.assert_works(0);
}

#[test]
fn ranges_are_checked_one_by_one() {
    let served = served();
    let raw = Raw::start(&served.socket, 1, 16, FEATURES);
    let range = |sector: u64, count: u32, flags: u32| {
        [&sector.to_le_bytes()[..], &count.to_le_bytes(), &flags.to_le_bytes()].concat()
    };
    let last = (SIZE / 512) as u64;
    for (kind, ranges, expected) in [
        (11, vec![range(0, 8, 0), range(16, 8, 0)], OK),
        (11, vec![range(0, 8, 1)], UNSUPPORTED),
        (11, vec![range(0, 8, 2)], UNSUPPORTED),
        (13, vec![range(0, 8, 1), range(64, 0, 0)], OK),
        (13, vec![range(0, 8, 3)], UNSUPPORTED),
        (13, vec![range(last, 1, 0)], ERROR),
        (13, vec![range(0, u32::MAX, 0)], ERROR),
        (11, vec![range(u64::MAX, 1, 0)], ERROR),
        (11, vec![range(0, last as u32, 0)], OK),
        (13, vec![range(3, 1, 0); 16], OK),
    ] {
        assert_eq!(raw.transfer(0, OUT, 0, &[7; 4096]).0, OK);
        let bytes = ranges.concat();
        raw.memory.write(BUFFER, &bytes);
        let parts = [(HEADER, 16, false), (BUFFER, bytes.len() as u32, false), (STATUS, 1, true)];
        let found = status(&raw, header(kind, 0), &parts);
        assert_eq!(found, expected, "kind {kind}: {ranges:?}");
        let zeroed = found == OK && ranges[0][..4] == [0; 4];
        assert_eq!(served.device.bytes(0, 1) == [0], zeroed, "kind {kind}: {ranges:?}");
    }
}

#[test]
fn chains_that_never_end_fail() {
    let served = served();
    let raw = Raw::start(&served.socket, 2, 16, FEATURES);
    raw.memory.write(HEADER, &header(IN, 0));
    let table = |at: u16, bytes: [u8; 16]| raw.memory.write(TABLE + 16 * u64::from(at), &bytes);
    let offer = |descriptor: [u8; 16]| {
        raw.memory.write(STATUS, &[0xee]);
        raw.describe(0, 0, descriptor);
        let index = raw.used_index(0);
        raw.offer(0, 0);
        raw.kick(0);
        raw.wait_used(0, index.wrapping_add(1));
        assert_eq!(raw.used(0, index).0, 0);
        raw.memory.read(STATUS, 1)[0]
    };
    let indirect = |address, length, flags| descriptor(address, length, flags | INDIRECT, 0);
    // Loops.
    assert_eq!(offer(descriptor(HEADER, 16, NEXT, 0)), 0xee);
    assert_eq!(offer(descriptor(STATUS, 1, NEXT | WRITE, 0)), 0xee);
    assert_eq!(offer(descriptor(HEADER, 16, NEXT, 16)), 0xee);
    assert_eq!(offer(descriptor(HEADER, 16, NEXT, u16::MAX)), 0xee);
    table(0, descriptor(HEADER, 16, NEXT, 1));
    table(1, descriptor(STATUS, 1, NEXT | WRITE, 1));
    assert_eq!(offer(indirect(TABLE, 32, 0)), 0xee);
    // Tables that are not allowed.
    table(1, descriptor(STATUS, 1, WRITE, 0));
    assert_eq!(offer(indirect(TABLE, 32, 0)), OK);
    assert_eq!(offer(indirect(TABLE, 32, WRITE)), OK, "the flag means nothing here");
    assert_eq!(offer(indirect(TABLE, 32, NEXT)), 0xee);
    assert_eq!(offer(indirect(TABLE, 16, 0)), 0xee);
    for length in [0, 15, 33, 1 << 20, !15] {
        assert_eq!(offer(indirect(TABLE, length, 0)), 0xee, "{length}");
    }
    assert_eq!(offer(indirect(MEMORY as u64 - 16, 32, 0)), 0xee);
    assert_eq!(offer(indirect(u64::MAX - 15, 32, 0)), 0xee);
    table(1, indirect(TABLE, 32, 0));
    assert_eq!(offer(indirect(TABLE, 32, 0)), 0xee, "one in another");
    // A table at an odd address is allowed.
    raw.memory.write(TABLE + 3, &descriptor(HEADER, 16, NEXT, 1));
    raw.memory.write(TABLE + 19, &descriptor(STATUS, 1, WRITE, 0));
    assert_eq!(offer(indirect(TABLE + 3, 32, 0)), OK);
    raw.assert_works(0);
    raw.assert_works(1);
}

#[test]
fn a_ring_that_makes_no_sense_is_stopped_alone() {
    for event_index in [0, EVENT_INDEX] {
        let served = served();
        let raw = Raw::start(&served.socket, 3, 16, FEATURES | event_index);
        let error = eventfd();
        assert!(raw.is_done(14, &0_u64.to_ne_bytes(), &[&error]));
        raw.assert_works(0);
        // An index that is too far ahead.
        raw.memory.set_half(AVAILABLE + 2, 2 + 17);
        raw.kick(0);
        wait_readable(&error);
        raw.assert_works(1);
        // An entry that is no descriptor.
        raw.memory.set_half(2 * PART + AVAILABLE + 4, 16);
        raw.memory.set_half(2 * PART + AVAILABLE + 2, 1);
        raw.kick(2);
        raw.assert_works(1);
        assert_eq!((raw.stop_queue(0), raw.stop_queue(2)), (2, 0));
        // Both can be used again.
        raw.memory.set_half(AVAILABLE + 2, 2);
        raw.start_queue(0, 2);
        raw.assert_works(0);
        raw.memory.set_half(2 * PART + AVAILABLE + 2, 0);
        raw.start_queue(2, 0);
        raw.assert_works(2);
    }
}

#[test]
fn a_guest_cannot_have_more_requests_than_descriptors() {
    let disk = MemoryDisk::new(SIZE);
    *disk.held.lock() = Some(Vec::new());
    let served = served_with(disk, Options::default());
    let raw = Raw::start(&served.socket, 1, 4, FEATURES);
    raw.memory.write(HEADER, &header(4, 0));
    raw.describe(0, 0, descriptor(HEADER, 16, NEXT, 1));
    raw.describe(0, 1, descriptor(STATUS, 1, WRITE, 0));
    for _ in 0..50 {
        for _ in 0..4 {
            raw.offer(0, 0);
        }
        raw.kick(0);
        std::thread::yield_now();
    }
    served.device.release();
    raw.stop_queue(0);
    assert!(served.device.most_running.load(Ordering::Relaxed) <= 4);
}

#[test]
fn messages_that_make_no_sense_end_the_connection_or_are_refused() {
    let served = served();
    let good = Raw::connect(&served.socket, 1, 16);
    let table = |regions: &[_]| memory_table(regions);
    let whole = (0, MEMORY as u64, USER, 0);
    good.agree(FEATURES);
    let (memory, call) = (&good.memory.file, &good.calls[0]);
    let pipe = File::open("/dev/zero").unwrap();
    for (code, body, files) in [
        (2, u64::MAX.to_ne_bytes().to_vec(), vec![]),
        (2, vec![0; 7], vec![]),
        (16, u64::MAX.to_ne_bytes().to_vec(), vec![]),
        (5, table(&[whole]), vec![]),
        (5, table(&[whole, whole]), vec![memory, memory]),
        (5, table(&[(0, MEMORY as u64 + 1, USER, 0)]), vec![memory]),
        (5, table(&[whole])[..20].to_vec(), vec![memory]),
        (5, vec![], vec![]),
        (37, [vec![0; 8], table(&[whole])[8..].to_vec()].concat(), vec![memory]),
        (37, vec![0; 40], vec![memory]),
        (38, vec![0; 40], vec![]),
        (8, state(0, 3), vec![]),
        (8, state(0, 4096), vec![]),
        (8, state(4, 16), vec![]),
        (8, state(0, 16)[..7].to_vec(), vec![]),
        (9, addresses(9, USER, USER, USER), vec![]),
        (9, [state(0, 1), vec![0; 32]].concat(), vec![]),
        (10, state(0, 1 << 16), vec![]),
        (12, 0x100_u64.to_ne_bytes().to_vec(), vec![]),
        (12, 0_u64.to_ne_bytes().to_vec(), vec![&pipe]),
        (12, 0_u64.to_ne_bytes().to_vec(), vec![]),
        (12, 200_u64.to_ne_bytes().to_vec(), vec![call]),
        (13, 0_u64.to_ne_bytes().to_vec(), vec![call, call]),
        (13, 0_u64.to_ne_bytes().to_vec(), vec![memory]),
        (18, state(0, 2), vec![]),
        (25, [vec![0; 12], vec![1; 4]].concat(), vec![]),
        (32, vec![0xff; 24], vec![memory]),
        (32, vec![1; 20], vec![]),
        (6, vec![0; 16], vec![memory]),
        (39, 256_u64.to_ne_bytes().to_vec(), vec![]),
        (28, vec![], vec![]),
        (99, vec![], vec![]),
        (0, vec![], vec![]),
    ] {
        assert!(!good.is_done(code, &body, &files), "message {code} {body:x?}");
    }
    good.start_queue(0, 0);
    good.assert_works(0);
    drop(good);

    for bytes in [
        message(1, 0, &[]),
        message(1, 2, &[]),
        message(1, 5, &[]),
        [&1_u32.to_ne_bytes()[..], &1_u32.to_ne_bytes(), &4097_u32.to_ne_bytes()].concat(),
        message(8, 1, &state(77, 16)),
        message(99, 1, &[]),
        vec![0xff; 64],
    ] {
        let bad = Raw::connect(&served.socket, 1, 16);
        bad.send(&bytes, &[]);
        bad.wait_closed();
    }
    for count in [33, 60] {
        let many = Raw::connect(&served.socket, 1, 16);
        let files = vec![&many.memory.file; count];
        many.send(&message(1, 1, &[]), &files);
        many.wait_closed();
    }
    let half = Raw::connect(&served.socket, 1, 16);
    half.send(&message(8, 1, &state(0, 16))[..15], &[&half.memory.file]);
    drop(half);
    Raw::start(&served.socket, 1, 16, FEATURES).assert_works(0);
}

#[test]
fn a_configuration_space_is_read_in_any_part() {
    let served = served();
    let raw = Raw::connect(&served.socket, 1, 16);
    raw.agree(FEATURES);
    let read = |offset: u32, size: u32, room: usize| {
        let part = [offset.to_ne_bytes(), size.to_ne_bytes(), [0; 4]].concat();
        raw.ask(24, &[part, vec![0; room]].concat())
    };
    let all = read(0, 60, 60);
    assert_eq!(all[12..20], (SIZE as u64 / 512).to_le_bytes());
    assert_eq!(read(0, 256, 256)[12 + 60..], [0; 196]);
    assert_eq!(read(20, 4, 4)[12..], 512_u32.to_le_bytes());
    assert_eq!(read(100, 8, 8)[12..], [0; 8]);
    for (offset, size, room) in [(0, 8, 4), (u32::MAX, 8, 8), (4090, 8, 8), (0, u32::MAX, 8)] {
        assert_eq!(read(offset, size, room)[4..8], [0; 4], "{offset} {size}");
    }
}

#[test]
fn without_flushes_writes_are_durable_at_once() {
    let served = served();
    let flushes = || served.device.flushes.load(Ordering::Relaxed);
    let raw = Raw::start(&served.socket, 1, 16, FEATURES);
    raw.assert_works(0);
    assert_eq!(flushes(), 0);
    drop(raw);
    let raw = Raw::start(&served.socket, 1, 16, FEATURES & !FLUSH);
    raw.assert_works(0);
    assert_eq!(flushes(), 1);
}

#[test]
fn a_client_that_leaves_takes_nothing_with_it() {
    let disk = MemoryDisk::new(SIZE);
    *disk.held.lock() = Some(Vec::new());
    let served = served_with(disk, Options::default());
    let raw = Raw::start(&served.socket, 1, 16, FEATURES);
    raw.memory.write(HEADER, &header(OUT, 0));
    raw.memory.write(BUFFER, &[5; 512]);
    raw.describe(0, 0, descriptor(HEADER, 16, NEXT, 1));
    raw.describe(0, 1, descriptor(BUFFER, 512, NEXT, 2));
    raw.describe(0, 2, descriptor(STATUS, 1, WRITE, 0));
    raw.offer(0, 0);
    raw.kick(0);
    wait_running(&served);
    drop(raw);
    served.device.release();
    served.wait_connected(false);
    assert_eq!(served.device.bytes(0, 512), [5; 512]);
    Raw::start(&served.socket, 1, 16, FEATURES).assert_works(0);
}

#[test]
fn the_list_of_requests_in_flight_brings_them_back_in_order() {
    let served = served();
    let raw = Raw::connect(&served.socket, 1, 16);
    raw.agree(FEATURES);
    let (body, file) = raw.ask_for_list();
    assert_eq!((body.len(), &body[..8]), (24, &320_u64.to_ne_bytes()[..]));
    // As a server left it that took three writes of the same sector, and ended one read and one of the
    // writes, of which it had told in the used ring only.
    let write = |value: u8, head: u16| {
        let place = DATA + 0x2000 * u64::from(head);
        raw.memory.write(place, &header(OUT, 0));
        raw.memory.write(place + 0x1000, &[value; 512]);
        raw.describe(0, head, descriptor(place, 16, NEXT, head + 1));
        raw.describe(0, head + 1, descriptor(place + 0x1000, 512, NEXT, head + 2));
        raw.describe(0, head + 2, descriptor(place + 16, 1, WRITE, 0));
        raw.offer(0, head);
    };
    for (value, head) in [(1, 0), (2, 6), (3, 3), (4, 9)] {
        write(value, head);
    }
    let mut region = vec![0; 320];
    region[8..16].copy_from_slice(&[1, 0, 16, 0, 0, 0, 0, 0]);
    for (counter, head, marked) in [(0_u64, 0_usize, 1), (2, 6, 1), (1, 3, 1)] {
        region[16 + 16 * head] = marked;
        region[24 + 16 * head..32 + 16 * head].copy_from_slice(&counter.to_ne_bytes());
    }
    std::os::unix::fs::FileExt::write_all_at(&file, &region, 0).unwrap();
    // The last batch was head 0, which the used ring has.
    raw.memory.write(USED + 4, &[0; 8]);
    raw.memory.set_half(USED + 2, 1);
    assert!(raw.is_done(32, &body, &[&file]));
    raw.start_queue(0, 7);
    raw.wait_used(0, 4);
    let heads: Vec<u32> = (1..4).map(|index| raw.used(0, index).0).collect();
    assert_eq!(heads, [3, 6, 9], "by their counters, and then the one never taken");
    assert_eq!(served.device.bytes(0, 512), [4; 512]);
    assert_eq!(raw.stop_queue(0), 4);
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut region, 0).unwrap();
    assert!((0..16).all(|head| region[16 + 16 * head] == 0));
    assert_eq!(region[14..16], [4, 0]);
}

#[test]
fn memory_may_change_while_queues_run() {
    let served = served();
    let raw = Raw::start(&served.socket, 2, 16, FEATURES | EVENT_INDEX);
    raw.assert_works(0);
    let more = raw.memory.file.try_clone().unwrap();
    let region = (1 << 40, 0x10_0000, USER + (1 << 30), 0);
    let body = [vec![0; 8], memory_table(&[region])[8..].to_vec()].concat();
    assert!(raw.is_done(37, &body, &[&more]));
    raw.assert_works(0);
    raw.assert_works(1);
    // The same memory at its other address.
    raw.memory.write(HEADER, &header(OUT, 1));
    let high = |address: u64| address + (1 << 40);
    let parts = [(high(HEADER), 16, false), (high(BUFFER), 512, false), (high(STATUS), 1, true)];
    raw.memory.write(BUFFER, &[9; 512]);
    raw.request(0, &parts);
    assert_eq!((raw.memory.read(STATUS, 1)[0], served.device.bytes(512, 1)), (OK, vec![9]));
    assert!(raw.is_done(38, &body, &[]));
    raw.memory.write(STATUS, &[0xee]);
    assert_eq!(raw.request(0, &parts), 0, "it is not there any more");
    raw.assert_works(1);
    // A table without the rings stops them.
    let elsewhere = memory_table(&[(0, 0x1000, 0x1000, 0)]);
    assert!(!raw.is_done(5, &elsewhere, &[&more]));
}

/// Empties an eventfd when it is dropped, so that nobody waits for it any longer.
struct Emptied<'a>(&'a File);

impl Drop for Emptied<'_> {
    fn drop(&mut self) {
        let _ = std::io::Read::read(&mut self.0, &mut [0; 8]);
    }
}

#[test]
fn an_eventfd_made_blocking_and_full_holds_up_nobody() {
    let served = VhostServed::new(Arc::new(MemoryDisk::new(SIZE)), Options::default(), 1);
    let raw = Raw::start(&served.socket, 2, 16, FEATURES);
    // The server has seen the eventfd while it was non-blocking.
    raw.assert_works(0);
    raw.assert_works(1);
    let call = &raw.calls[0];
    let most = (u64::MAX - 1).to_ne_bytes();
    while std::io::Write::write_all(&mut &*call, &most).is_err() {
        let _ = std::io::Read::read(&mut &*call, &mut [0; 8]);
    }
    let _emptied = Emptied(call);
    // SAFETY: a plain system call on an open descriptor.
    assert_eq!(unsafe { libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(call), libc::F_SETFL, 0) }, 0);
    raw.assert_works(0);
    raw.assert_works(1);
}

#[test]
fn requests_in_many_pieces_take_a_bounded_amount_of_memory_and_their_own_guests_time() {
    const REQUESTS: u16 = 128;
    const PIECE: u32 = 16 << 10;
    let (served, other) = (served(), served());
    let neighbour = Raw::start(&other.socket, 1, 16, FEATURES);
    for kind in [IN, OUT] {
        let raw = Raw::start(&served.socket, 1, REQUESTS, FEATURES);
        // One table of pieces that are the same memory: together they are the whole disk, of which each request needs
        // a copy in one piece.
        let pieces = SIZE as u32 / PIECE;
        let flags = NEXT | if kind == IN { WRITE } else { 0 };
        let mut table = descriptor(HEADER, 16, NEXT, 1).to_vec();
        for index in 0..pieces as u16 {
            table.extend(descriptor(BUFFER, PIECE, flags, index + 2));
        }
        table.extend(descriptor(STATUS, 1, WRITE, 0));
        let place = BUFFER + u64::from(PIECE);
        raw.memory.write(place, &table);
        raw.memory.write(HEADER, &header(kind, 0));
        raw.memory.write(STATUS, &[0xee]);
        served.device.most_running.store(0, Ordering::Relaxed);
        *served.device.held.lock() = Some(Vec::new());
        for head in 0..REQUESTS - 2 {
            raw.describe(0, head, descriptor(place, table.len() as u32, INDIRECT, 0));
            raw.offer(0, head);
        }
        // The last one fails at once, when all others have begun.
        raw.describe(0, REQUESTS - 2, descriptor(HEADER, 8, NEXT, REQUESTS - 1));
        raw.describe(0, REQUESTS - 1, descriptor(STATUS + 1, 1, WRITE, 0));
        raw.offer(0, REQUESTS - 2);
        raw.kick(0);
        raw.wait_used(0, 1);
        neighbour.assert_works(0);
        served.device.release();
        raw.wait_used(0, REQUESTS - 1);
        assert_eq!(raw.memory.read(STATUS, 1), [OK]);
        // The bytes assured to a device, and an eighth of those that all share.
        let most = 4 + 256 / 8;
        let copies = served.device.most_running.load(Ordering::Relaxed);
        assert!((4..=most).contains(&copies), "{copies} MiB were in use");
        drop(raw);
        served.wait_connected(false);
    }
}

#[test]
fn of_a_request_in_many_large_pieces_some_are_under_way_at_a_time() {
    const PIECE: u32 = 64 << 10;
    const PIECES: u16 = 100;
    let size = usize::from(PIECES) * PIECE as usize;
    let served = served_with(MemoryDisk::new(size).with(0, size, 7, 0), Options::default());
    let raw = Raw::start(&served.socket, 1, 16, FEATURES);
    for kind in [IN, OUT] {
        let flags = NEXT | if kind == IN { WRITE } else { 0 };
        let mut table = descriptor(HEADER, 16, NEXT, 1).to_vec();
        for index in 0..PIECES {
            table.extend(descriptor(BUFFER, PIECE, flags, index + 2));
        }
        table.extend(descriptor(STATUS, 1, WRITE, 0));
        let place = BUFFER + u64::from(PIECE);
        raw.memory.write(place, &table);
        raw.memory.write(HEADER, &header(kind, 0));
        raw.memory.write(STATUS, &[0xee]);
        served.device.most_running.store(0, Ordering::Relaxed);
        *served.device.held.lock() = Some(Vec::new());
        let before = raw.used_index(0);
        raw.describe(0, 0, descriptor(place, table.len() as u32, INDIRECT, 0));
        raw.offer(0, 0);
        // The second one fails at once, when the first one has begun.
        raw.describe(0, 1, descriptor(HEADER, 8, NEXT, 2));
        raw.describe(0, 2, descriptor(STATUS + 1, 1, WRITE, 0));
        raw.offer(0, 1);
        raw.kick(0);
        raw.wait_used(0, before + 1);
        served.device.release();
        raw.wait_used(0, before + 2);
        assert_eq!(raw.memory.read(STATUS, 1), [OK]);
        assert_eq!(served.device.most_running.load(Ordering::Relaxed), 16);
        let expected = vec![7; PIECE as usize];
        assert!(raw.memory.read(BUFFER, PIECE as usize) == expected);
        assert!(served.device.bytes(size - PIECE as usize, PIECE as usize) == expected);
    }
}

/// Waits until a request is under way.
fn wait_running(served: &VhostServed<MemoryDisk>) {
    let deadline = std::time::Instant::now() + Duration::from_mins(1);
    while served.device.running.load(Ordering::Relaxed) == 0 {
        assert!(std::time::Instant::now() < deadline, "the request should be under way");
        std::thread::yield_now();
    }
}

#[test]
fn memory_cut_short_costs_its_client_only() {
    let (served, other) = (served_on_kicks(), served());
    let neighbour = Raw::start(&other.socket, 2, 16, FEATURES);
    for length in [0, DATA] {
        let raw = Raw::start(&served.socket, 2, 16, FEATURES);
        raw.assert_works(0);
        raw.memory.write(HEADER, &header(OUT, 0));
        raw.describe(0, 0, descriptor(HEADER, 16, NEXT, 1));
        raw.describe(0, 1, descriptor(BUFFER, 512, NEXT, 2));
        raw.describe(0, 2, descriptor(STATUS, 1, WRITE, 0));
        served.wait_idle();
        raw.offer(0, 0);
        // This process accesses the memory no more, for which it has no handler of its own.
        raw.memory.file.set_len(length).unwrap();
        raw.kick(0);
        raw.wait_closed();
        neighbour.assert_works(0);
        neighbour.assert_works(1);
    }
    Raw::start(&served.socket, 2, 16, FEATURES).assert_works(1);
}

#[test]
fn memory_cut_short_under_a_request_costs_its_client_only() {
    let (served, other) = (served(), served());
    let neighbour = Raw::start(&other.socket, 1, 16, FEATURES);
    let raw = Raw::start(&served.socket, 1, 16, FEATURES);
    raw.assert_works(0);
    *served.device.held.lock() = Some(Vec::new());
    raw.memory.write(HEADER, &header(IN, 0));
    raw.describe(0, 0, descriptor(HEADER, 16, NEXT, 1));
    raw.describe(0, 1, descriptor(BUFFER, 512, NEXT | WRITE, 2));
    raw.describe(0, 2, descriptor(STATUS, 1, WRITE, 0));
    raw.offer(0, 0);
    raw.kick(0);
    wait_running(&served);
    raw.memory.file.set_len(0).unwrap();
    served.device.release();
    raw.wait_closed();
    neighbour.assert_works(0);
    served.wait_connected(false);
    Raw::start(&served.socket, 1, 16, FEATURES).assert_works(0);
}

#[test]
fn a_list_of_requests_cut_short_costs_its_client_only() {
    let (served, other) = (served(), served());
    let neighbour = Raw::start(&other.socket, 1, 16, FEATURES);
    let (raw, list) = with_list(&served);
    list.set_len(0).unwrap();
    raw.offer(0, 0);
    raw.kick(0);
    raw.wait_closed();
    neighbour.assert_works(0);
}

#[test]
fn what_lost_memory_held_is_not_written() {
    let served = served_on_kicks();
    let raw = Raw::start(&served.socket, 1, 16, FEATURES);
    raw.assert_works(0);
    assert_eq!(raw.transfer(0, OUT, 0, &[7; 1024]).0, OK);
    raw.memory.write(HEADER, &header(OUT, 0));
    raw.describe(0, 0, descriptor(HEADER, 16, NEXT, 1));
    // Two pieces, which are copied to one buffer; only their page is gone.
    raw.describe(0, 1, descriptor(MEMORY as u64 - 4096, 512, NEXT, 2));
    raw.describe(0, 2, descriptor(MEMORY as u64 - 512, 512, NEXT, 3));
    raw.describe(0, 3, descriptor(STATUS, 1, WRITE, 0));
    served.wait_idle();
    raw.offer(0, 0);
    raw.memory.file.set_len(MEMORY as u64 - 4096).unwrap();
    raw.kick(0);
    raw.wait_closed();
    assert!(served.device.bytes(0, 1024) == [7; 1024]);
}

/// A page that tests lose. The rings, headers and status bytes are elsewhere.
const LOST: u64 = MEMORY as u64 - 4096;

/// Connects a client whose list of the requests in flight, for one queue of 16, is in a file of the test.
fn with_list(served: &VhostServed<MemoryDisk>) -> (Raw, File) {
    let raw = Raw::connect(&served.socket, 1, 16);
    raw.agree(FEATURES);
    let list = tempfile::tempfile().unwrap();
    list.set_len(320).unwrap();
    let area = [&320_u64.to_ne_bytes()[..], &[0; 8], &[1, 0, 16, 0, 0, 0, 0, 0]].concat();
    assert!(raw.is_done(32, &area, &[&list]));
    raw.start_queue(0, 0);
    raw.assert_works(0);
    (raw, list)
}

#[test]
fn a_request_that_used_lost_memory_is_not_answered() {
    let served = served_on_kicks();
    for (kind, pieces) in [
        (IN, vec![(LOST, 512)]),
        (OUT, vec![(LOST, 512)]),
        (IN, vec![(BUFFER, 512), (LOST, 512)]),
        (8, vec![(LOST, 20)]),
    ] {
        let (raw, list) = with_list(&served);
        raw.memory.write(HEADER, &header(kind, 64));
        raw.describe(0, 0, descriptor(HEADER, 16, NEXT, 1));
        let flags = NEXT | if kind == OUT { 0 } else { WRITE };
        for (index, (address, length)) in pieces.iter().enumerate() {
            let index = index as u16 + 1;
            raw.describe(0, index, descriptor(*address, *length, flags, index + 1));
        }
        raw.describe(0, pieces.len() as u16 + 1, descriptor(STATUS, 1, WRITE, 0));
        let before = raw.used_index(0);
        served.wait_idle();
        raw.offer(0, 0);
        raw.memory.file.set_len(LOST).unwrap();
        raw.kick(0);
        raw.wait_closed();
        assert_eq!(raw.used_index(0), before, "kind {kind}: {pieces:x?}");
        let mut mark = [0];
        std::os::unix::fs::FileExt::read_exact_at(&list, &mut mark, 16).unwrap();
        assert_eq!(mark, [1], "kind {kind}: {pieces:x?} is still in flight");
    }
}

#[test]
fn a_request_that_lost_memory_describes_is_not_carried_out() {
    let served = served_on_kicks();
    let (raw, _list) = with_list(&served);
    assert_eq!(raw.transfer(0, OUT, 0, &[7; 512]).0, OK);
    // A write, according to the part of its header that is left, and of sector 0, according to what is lost.
    raw.memory.write(LOST - 4, &header(OUT, 64));
    raw.memory.write(BUFFER, &[9; 512]);
    raw.describe(0, 0, descriptor(LOST - 4, 16, NEXT, 1));
    raw.describe(0, 1, descriptor(BUFFER, 512, NEXT, 2));
    raw.describe(0, 2, descriptor(STATUS, 1, WRITE, 0));
    served.wait_idle();
    raw.offer(0, 0);
    raw.memory.file.set_len(LOST).unwrap();
    raw.kick(0);
    raw.wait_closed();
    served.wait_connected(false);
    assert!(served.device.bytes(0, 512) == [7; 512]);
}

#[test]
fn a_ring_in_lost_memory_puts_no_request_in_the_list() {
    let served = served();
    let (raw, list) = with_list(&served);
    let mark = |head: u64| {
        let mut mark = [0];
        std::os::unix::fs::FileExt::read_exact_at(&list, &mut mark, 16 + 16 * head).unwrap();
        mark[0]
    };
    // The queue starts again, with its available ring across the start of the page.
    let base = raw.stop_queue(0);
    raw.memory.set_half(LOST - 2, base + 1);
    raw.memory.write(LOST, &[3; 2 * 16]);
    raw.tell(8, &state(0, 16));
    raw.tell(10, &state(0, u32::from(base)));
    raw.tell(9, &addresses(0, USER, USER + USED, USER + LOST - 4));
    raw.memory.file.set_len(LOST).unwrap();
    raw.tell_with(12, &0_u64.to_ne_bytes(), &[&raw.kicks[0]]);
    raw.kick(0);
    raw.wait_closed();
    served.wait_connected(false);
    assert_eq!(raw.used_index(0), base);
    assert_eq!([0, 3].map(mark), [0, 0]);
}

fn wait_readable(file: &File) {
    use std::os::fd::AsRawFd;
    let mut poll = libc::pollfd { fd: file.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry, which is alive.
    assert_eq!(unsafe { libc::poll(&raw mut poll, 1, 60_000) }, 1);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_is_in_a_ring_other_queues_go_on(
        // Data are in memory that nothing else uses, or beyond all of it.
        descriptors in proptest::collection::vec((0x8_0000_u64..0x11_0000, 0_u32..5000, 0_u16..8, 0_u16..18), 16),
        table in proptest::collection::vec((0x8_0000_u64..0x11_0000, 0_u32..5000, 0_u16..8, 0_u16..10), 8),
        heads in proptest::collection::vec(0_u16..17, 16),
        ahead in 0_u16..20,
        event_index in any::<bool>(),
    ) {
        let served = served();
        let features = FEATURES | if event_index { EVENT_INDEX } else { 0 };
        let raw = Raw::start(&served.socket, 2, 16, features);
        let bytes = |(address, length, flags, next): &(u64, u32, u16, u16)| {
            let (address, length) = match (flags & INDIRECT, next) {
                (INDIRECT, 0..8) => (TABLE, 16 * u32::from(*next)),
                (_, 0..4) => (HEADER, 16),
                (_, 4..8) => (STATUS, 1),
                _ => (*address, *length),
            };
            descriptor(address, length, *flags, *next)
        };
        raw.memory.write(HEADER, &header(u32::from(ahead % 2), 0));
        for (index, one) in descriptors.iter().enumerate() {
            raw.describe(0, index as u16, bytes(one));
        }
        for (index, one) in table.iter().enumerate() {
            raw.memory.write(TABLE + 16 * index as u64, &bytes(one));
        }
        for (index, head) in heads.iter().enumerate() {
            raw.memory.set_half(AVAILABLE + 4 + 2 * index as u64, *head);
        }
        raw.memory.set_half(AVAILABLE + 2, ahead);
        raw.kick(0);
        raw.assert_works(1);
        prop_assert!(raw.stop_queue(0) <= ahead);
        prop_assert_eq!(served.device.running.load(Ordering::Relaxed), 0);
    }
}

/// A server and another task, whose turns are counted.
#[test]
fn a_client_that_keeps_sending_messages_leaves_the_other_tasks_of_the_thread_their_turns() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("vhost.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let server = Server::new(Arc::new(MemoryDisk::new(SIZE)), Options::default()).unwrap();
    let turns = Arc::new(AtomicU64::new(0));
    let serving = {
        let (server, turns) = (Arc::clone(&server), Arc::clone(&turns));
        std::thread::spawn(move || {
            let executor = Executor::new(&Config::default()).unwrap();
            executor.block_on(async {
                let mut serving = pin!(server.serve(listener, &[]));
                loop {
                    turns.fetch_add(1, Ordering::Relaxed);
                    if poll_fn(|cx| Poll::Ready(serving.as_mut().poll(cx).is_ready())).await {
                        break;
                    }
                    yield_now().await;
                }
            });
        })
    };
    // The client ends when the server closes the connection.
    let client = UnixStream::connect(&socket).unwrap();
    let flood = message(3, 1, &[]).repeat(5000);
    let sent = Arc::new(AtomicU64::new(0));
    let sending = {
        let (mut client, sent) = (client.try_clone().unwrap(), Arc::clone(&sent));
        std::thread::spawn(move || {
            while client.write_all(&flood).is_ok() {
                sent.fetch_add(1, Ordering::Relaxed);
            }
        })
    };
    while sent.load(Ordering::Relaxed) < 4 {
        std::thread::yield_now();
    }
    let before = turns.load(Ordering::Relaxed);
    while turns.load(Ordering::Relaxed) < before + 100 {
        std::thread::yield_now();
    }
    server.stop();
    serving.join().unwrap();
    sending.join().unwrap();
}

#[test]
fn a_client_that_takes_no_replies_is_disconnected_when_the_server_stops() {
    let mut served = served();
    let raw = Raw::start(&served.socket, 1, 16, FEATURES);
    raw.assert_works(0);
    raw.socket.set_nonblocking(true).unwrap();
    let asked = message(1, 1, &[]);
    let blocked = |error: std::io::Error| assert_eq!(error.kind(), ErrorKind::WouldBlock);
    // Until the server takes no more, since it waits for room for a reply.
    let mut full = 0;
    while full < 1000 {
        match (&raw.socket).write(&asked) {
            Ok(length) => {
                assert_eq!(length, asked.len());
                full = 0;
            }
            Err(error) => {
                blocked(error);
                full += 1;
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    }
    served.stop();
}

#[test]
fn a_request_in_more_pieces_than_a_ring_has_descriptors_twice_over_fails_alone() {
    // Regions of a byte each: a descriptor has a piece of memory in each of them.
    let served = served();
    let raw = Raw::start(&served.socket, 1, 16, FEATURES);
    let regions = 400;
    let start = 2 * MEMORY as u64;
    for n in 0..regions {
        let at = start + n;
        let region = [0, at, 1, 2 * USER + n, 0].map(u64::to_ne_bytes).concat();
        assert!(raw.is_done(37, &region, &[&raw.memory.file]));
    }
    let head = (HEADER, 16, false);
    let tail = (STATUS, 1, true);
    let many = |count: usize| {
        let mut parts = vec![head];
        parts.extend(std::iter::repeat_n((start, regions as u32, true), count));
        // Whole sectors.
        let rest = (count * regions as usize).next_multiple_of(512) - count * regions as usize;
        parts.push((BUFFER, rest as u32, true));
        parts.push(tail);
        parts
    };
    assert_eq!(status(&raw, header(IN, 0), &many(4)), OK);
    assert_eq!(status(&raw, header(IN, 0), &many(8)), ERROR);
    raw.assert_works(0);
}
