//! Clients that misbehave, leave, dawdle or crowd: the others are served, nothing that was accepted
//! is lost, and the server ends cleanly.

use crate::client::Client;
use crate::memory_disk::MemoryDisk;
use crate::script::{flags, go, handshake, option as option_bytes, request};
use crate::served::{Served, export};
use isobath_disk::throttle::Direction;
use isobath_export::nbd::wire::{command, command_flag, option};
use isobath_export::nbd::{InFlight, Limits};
use isobath_ring::net::Listener;
use isobath_testkit::until;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

const MIB: usize = 1 << 20;

#[test]
fn a_handshake_cut_anywhere_leaves_nothing_behind() {
    let served = Served::new(vec![export("disk", MemoryDisk::new(MIB))]);
    let whole = handshake(true);
    for length in 0..whole.len() {
        let mut client = Client::connect(&served);
        client.send(&whole[..length]);
        client.0.shutdown(Shutdown::Write).unwrap();
        client.rest();
    }
    for length in (0..whole.len()).step_by(3) {
        let mut client = Client::connect(&served);
        client.send(&whole[..length]);
    }
    until("the end of every connection", || served.server.connections() == 0);
    Client::ready(&served).disconnect();
}

#[test]
fn garbage_closes_only_its_own_connection() {
    let served = Served::new(vec![export("disk", MemoryDisk::new(MIB))]);
    let mut good = Client::ready(&served);
    let huge = [&option_bytes(option::GO, &[])[..12], &u32::MAX.to_be_bytes()].concat();
    let garbage = [
        vec![0xff; 4096],
        0xdead_beef_u32.to_be_bytes().to_vec(),
        [flags(), vec![0; 16]].concat(),
        [flags(), huge].concat(),
        [flags(), option_bytes(option::EXPORT_NAME, b"nobody")].concat(),
        [vec![0; 4], option_bytes(option::LIST, b"")].concat(),
        [handshake(false), vec![0xaa; 100]].concat(),
        [handshake(true), vec![0; 28]].concat(),
    ];
    for bytes in garbage {
        let mut bad = Client::connect(&served);
        bad.send(&bytes);
        bad.rest();
        good.write(0, b"good");
    }
    assert_eq!(good.read(0, 4), b"good");
}

#[test]
fn an_aborted_handshake_is_acknowledged() {
    let served = Served::new(vec![export("disk", MemoryDisk::new(MIB))]);
    let mut client = Client::connect(&served);
    client.send(&[flags(), option_bytes(option::ABORT, &[])].concat());
    let ack = b"\0\x03\xe8\x89\x04\x55\x65\xa9\0\0\0\x02\0\0\0\x01\0\0\0\0";
    assert_eq!(client.rest()[18..], *ack);
}

#[test]
fn refused_requests_do_not_end_the_session() {
    let disk = MemoryDisk { slow_zeroes: true, ..MemoryDisk::new(MIB) };
    let served = Served::new(vec![export("disk", disk)]);
    let mut client = Client::ready(&served);
    let end = MIB as u64;
    let fast = command_flag::FAST_ZERO;
    for (command, flags, range, payload, error) in [
        (command::WRITE, 0, (end - 1, 2), 2, 28),
        (command::WRITE, 0, (u64::MAX, u32::MAX >> 4), u32::MAX >> 4, 75),
        (command::WRITE, 0x8000, (0, 4096), 4096, 22),
        (command::READ, 0, (end, 1), 0, 22),
        (command::READ, command_flag::DF, (0, 1), 0, 22),
        (command::READ, 0, (0, u32::MAX), 0, 75),
        (command::WRITE_ZEROES, fast, (0, 4096), 0, 95),
        (command::WRITE_ZEROES, 0, (1, end as u32), 0, 28),
        (command::TRIM, 0, (end, 1), 0, 22),
        (command::BLOCK_STATUS, 0, (0, 1), 0, 22),
        (command::FLUSH, 0, (0, 1), 0, 22),
        (99, 0, (0, 1), 0, 22),
    ] {
        client.send(&request(command, flags, 5, range, &vec![0xee; payload as usize]));
        assert_eq!(client.reply(), (error, 5), "command {command}, flags {flags}, {range:?}");
    }
    for command in [command::READ, command::WRITE, command::WRITE_ZEROES, command::TRIM] {
        client.send(&request(command, 0, 6, (end, 0), &[]));
        assert_eq!(client.reply(), (0, 6), "an empty request at the end");
    }
    assert_eq!(client.read(0, 4096), [0; 4096]);
    client.disconnect();
}

#[test]
fn a_disconnect_in_mid_request_loses_no_accepted_write() {
    let disk = MemoryDisk { delay: 3, ..MemoryDisk::new(MIB) };
    let served = Served::with(vec![export("disk", disk)], Limits::default(), 1);
    for round in 1..=50_u8 {
        let mut client = Client::ready(&served);
        client.write(0, &[round; 512]);
        let requests: Vec<u8> = (1..=20)
            .flat_map(|block| {
                request(command::WRITE, 0, block, (block * 4096, 4096), &[round; 4096])
            })
            .collect();
        client.send(&requests);
        client.send(&request(command::WRITE, 0, 99, (0, 65536), &[0xee; 1000]));
        drop(client);
        until("the end of the connection", || served.server.connections() == 0);
        assert_eq!(served.disk(0).running.load(Ordering::Relaxed), 0);
        assert_eq!(served.disk(0).bytes(0, 512), [round; 512], "the cut write is not carried out");
    }
}

#[test]
fn reads_of_a_client_that_has_left_are_cancelled_and_its_writes_are_not() {
    let in_flight = InFlight { requests: 4, bytes: MIB };
    let limits = Limits { in_flight, ..Limits::default() };
    let served = Served::with(vec![export("disk", MemoryDisk::new(MIB))], limits, 1);
    let mut client = Client::ready(&served);
    *served.disk(0).held.lock() = Some(Vec::new());
    // More reads than may be in flight, so that nothing is received that could tell that the client has left.
    let mut requests: Vec<u8> =
        (0..20).flat_map(|cookie| request(command::READ, 0, cookie, (0, 4096), &[])).collect();
    requests.extend(request(command::WRITE, 0, 20, (8192, 512), &[7; 512]));
    client.send(&requests);
    until("reads in flight", || served.disk(0).running.load(Ordering::Relaxed) == 4);
    drop(client);
    until("the write alone", || served.disk(0).running.load(Ordering::Relaxed) == 1);
    served.disk(0).release();
    until("the end of the connection", || served.server.connections() == 0);
    assert_eq!(served.disk(0).bytes(8192, 512), [7; 512]);
}

#[test]
fn changes_of_a_client_that_has_left_wait_for_limits_and_its_reads_are_dropped() {
    let in_flight = InFlight { requests: 8, bytes: MIB };
    let limits = Limits { in_flight, ..Limits::default() };
    let served = Served::with(vec![export("disk", MemoryDisk::new(MIB))], limits, 1);
    let disk = served.disk(0);
    disk.limit();
    let mut client = Client::ready(&served);
    client.write(0, &[1; 512]);
    // More than may be in flight: some of them are received only when the client has left.
    let mut requests = Vec::new();
    for cookie in 0..12_u64 {
        let at = (4096 + cookie * 512, 512);
        requests.extend(request(command::WRITE, 0, cookie, at, &[7; 512]));
    }
    requests.extend(request(command::WRITE_ZEROES, 0, 12, (4096, 512), &[]));
    requests.extend(request(command::TRIM, 0, 13, (4608, 512), &[]));
    requests.extend(request(command::READ, 0, 14, (0, 4096), &[]));
    requests.extend(request(command::CACHE, 0, 15, (0, 4096), &[]));
    client.send(&requests);
    until("requests to wait", || disk.throttle.waiting() == 8);
    drop(client);
    // Another client's request waits behind them.
    let mut other = Client::ready(&served);
    other.send(&request(command::WRITE, 0, 1, (8192 + 4096, 512), &[9; 512]));
    until("the other one to wait", || disk.throttle.waiting() == 9);
    assert_eq!(disk.bytes(4096, 12 * 512), [0; 12 * 512]);
    disk.throttle.set_group(None);
    until("the end of the connection", || served.server.connections() == 1);
    assert_eq!(disk.bytes(4096, 1024), [0; 1024]);
    assert_eq!(disk.bytes(5120, 10 * 512), [7; 10 * 512]);
    assert_eq!((disk.throttle.waiting(), disk.read.load(Ordering::Relaxed)), (0, 0));
    assert_eq!(other.reply(), (0, 1));
    other.disconnect();
}

#[test]
fn a_command_asks_the_limits_once_and_an_empty_one_does_not() {
    let served = Served::new(vec![export("disk", MemoryDisk::new(8 * MIB))]);
    let mut client = Client::ready(&served);
    let three = (0, 3 << 20);
    for command in [command::WRITE_ZEROES, command::TRIM, command::CACHE, command::FLUSH] {
        let range = if command == command::FLUSH { (0, 0) } else { three };
        for range in [range, (0, 0)] {
            client.send(&request(command, 0, 1, range, &[]));
            assert_eq!(client.reply(), (0, 1));
        }
    }
    client.write(0, &[1; 4096]);
    assert_eq!(client.read(0, 512), [1; 512]);
    let (read, write) = (Direction::Read, Direction::Write);
    let large = u64::from(three.1);
    let expected = [(write, large), (write, large), (read, large), (write, 4096), (read, 512)];
    assert_eq!(*served.disk(0).admitted.lock(), expected);
    client.disconnect();
}

#[test]
fn an_export_that_ends_waits_for_no_limit() {
    let mut served = Served::with(vec![export("disk", MemoryDisk::new(MIB))], Limits::default(), 1);
    served.disk(0).limit();
    let mut client = Client::ready(&served);
    for cookie in 0..5 {
        client.send(&request(command::WRITE, 0, cookie, (cookie * 512, 512), &[7; 512]));
    }
    until("requests to wait", || served.disk(0).throttle.waiting() == 4);
    served.server.stop();
    until("the end of the connection", || served.server.connections() == 0);
    assert_eq!(client.rest().len(), 5 * 16);
    served.stop();
    assert_eq!(served.disk(0).bytes(0, 5 * 512), [7; 5 * 512]);
}

#[test]
fn writes_of_a_client_that_leaves_while_a_reply_is_being_sent_are_carried_out() {
    const LARGE: u32 = 256 << 10;
    let in_flight = InFlight { requests: 4, bytes: 4 * MIB };
    let limits = Limits { in_flight, ..Limits::default() };
    let served = Served::with(vec![export("disk", MemoryDisk::new(MIB))], limits, 1);
    let mut client = Client::ready(&served);
    let mut requests: Vec<u8> =
        (0..20).flat_map(|cookie| request(command::READ, 0, cookie, (0, LARGE), &[])).collect();
    for cookie in 20..30 {
        requests.extend(request(command::WRITE, 0, cookie, (cookie * 8192, 512), &[7; 512]));
    }
    client.send(&requests);
    // More than fits into the socket's buffer, so that a send waits.
    until("replies", || served.disk(0).read.load(Ordering::Relaxed) >= MIB);
    drop(client);
    until("the end of the connection", || served.server.connections() == 0);
    for at in 20..30 {
        assert_eq!(served.disk(0).bytes(at * 8192, 512), [7; 512]);
    }
}

#[test]
fn a_client_that_has_only_closed_its_side_gets_its_replies() {
    let in_flight = InFlight { requests: 2, bytes: MIB };
    let limits = Limits { in_flight, ..Limits::default() };
    let served = Served::with(vec![export("disk", MemoryDisk::new(MIB))], limits, 1);
    let mut client = Client::ready(&served);
    *served.disk(0).held.lock() = Some(Vec::new());
    let requests: Vec<u8> =
        (0..9).flat_map(|cookie| request(command::READ, 0, cookie, (0, 512), &[])).collect();
    client.send(&requests);
    until("reads in flight", || served.disk(0).running.load(Ordering::Relaxed) == 2);
    client.0.shutdown(Shutdown::Write).unwrap();
    served.disk(0).release();
    assert_eq!(client.rest().len(), 9 * (16 + 512));
}

#[test]
fn connections_see_each_others_writes() {
    let served = Served::with(vec![export("disk", MemoryDisk::new(MIB))], Limits::default(), 2);
    let mut clients: Vec<_> = (0..6).map(|_| Client::ready(&served)).collect();
    for round in 0..100_u64 {
        let writer = round as usize % clients.len();
        let data = [round as u8 + 1; 700];
        clients[writer].write(round * 100, &data);
        for client in &mut clients {
            assert_eq!(client.read(round * 100, 700), data);
        }
    }
    let requests = command::FLUSH;
    for client in &mut clients {
        client.send(&request(requests, 0, 3, (0, 0), &[]));
        assert_eq!(client.reply(), (0, 3));
    }
    assert_eq!(served.disk(0).flushes.load(Ordering::Relaxed), 6);
}

#[test]
fn a_client_that_reads_nothing_holds_up_nobody() {
    let in_flight = InFlight { requests: 16, bytes: MIB };
    let limits = Limits { in_flight, drain: Duration::from_millis(50), ..Limits::default() };
    let mut served = Served::with(vec![export("disk", MemoryDisk::new(4 * MIB))], limits, 1);
    let mut lazy = Client::ready(&served);
    let reads: Vec<u8> =
        (0..64).flat_map(|cookie| request(command::READ, 0, cookie, (0, 1 << 20), &[])).collect();
    lazy.send(&reads);
    let mut other = Client::ready(&served);
    for round in 0..200_u64 {
        other.write(round * 512, &[1; 512]);
    }
    assert_eq!(other.read(0, 512), [1; 512]);
    assert!(served.disk(0).most_running.load(Ordering::Relaxed) <= 17);
    served.stop();
    let mut replies = Vec::new();
    let _ = lazy.0.read_to_end(&mut replies);
    assert!(replies.len() < 64 << 20, "the rest was given up");
}

#[test]
fn disc_and_stop_answer_what_was_begun() {
    for workers in [0, 1] {
        let disk = MemoryDisk { delay: 200, ..MemoryDisk::new(4 * MIB) };
        let mut served = Served::with(vec![export("disk", disk)], Limits::default(), workers);
        let mut leaving = Client::ready(&served);
        let mut staying = Client::ready(&served);
        let mut requests = Vec::new();
        for cookie in 0..40_u64 {
            requests.extend(request(command::WRITE, 0, cookie, (cookie * 512, 512), &[9; 512]));
        }
        staying.send(&requests);
        requests.extend(request(command::DISC, 0, 0, (0, 0), &[]));
        leaving.send(&requests);
        assert_eq!(leaving.rest().len(), 40 * 16);
        assert_eq!(staying.reply().0, 0);
        served.stop();
        let rest = staying.rest();
        assert_eq!((rest.len() / 16, rest.len() % 16), (39, 0));
        assert!(served.disk(0).bytes(0, 40 * 512) == [9; 40 * 512]);
    }
}

#[test]
fn replies_reach_a_tcp_client_whose_requests_are_left_unread() {
    let disk = MemoryDisk { delay: 100, ..MemoryDisk::new(MIB) };
    let in_flight = InFlight { requests: 1, bytes: MIB };
    let limits = Limits { in_flight, ..Limits::default() };
    let mut served = Served::with(vec![export("disk", disk)], limits, 0);
    let mut stream = TcpStream::connect(served.tcp).unwrap();
    let hello = [flags(), option_bytes(option::EXPORT_NAME, b"")].concat();
    stream.write_all(&hello).unwrap();
    stream.read_exact(&mut [0; 28]).unwrap();
    // More than the server's window takes, so that some stays in the socket.
    let requests: Vec<u8> =
        (0..20_000).flat_map(|cookie| request(command::READ, 0, cookie, (0, 65536), &[])).collect();
    let mut writer = stream.try_clone().unwrap();
    let writing = thread::spawn(move || writer.write_all(&requests));
    stream.read_exact(&mut [0; 16]).unwrap();
    served.server.stop();
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    assert_eq!((rest.len() + 16) % (65536 + 16), 0, "only whole replies");
    drop(stream);
    let _ = writing.join().unwrap();
    served.stop();
}

#[test]
fn idle_and_unfinished_clients_do_not_hold_up_a_stop() {
    let mut served = Served::new(vec![export("disk", MemoryDisk::new(MIB))]);
    let _mute = Client::connect(&served);
    let mut dawdling = Client::connect(&served);
    dawdling.send(&flags());
    let mut idle = Client::ready(&served);
    let mut partial = Client::ready(&served);
    partial.send(&request(command::WRITE, 0, 1, (0, 65536), &[1; 100]));
    let mut refused = Client::ready(&served);
    refused.send(&request(command::WRITE, 0, 1, (MIB as u64, 65536), &[1; 100]));
    until("five connections", || served.server.connections() == 5);
    served.stop();
    assert_eq!(idle.rest(), b"");
    assert_eq!(partial.rest(), b"");
}

#[test]
fn crowds_are_turned_away() {
    let limits = Limits { connections: 3, ..Limits::default() };
    let served = Served::with(vec![export("disk", MemoryDisk::new(MIB))], limits, 1);
    let mut clients: Vec<_> = (0..3).map(|_| Client::ready(&served)).collect();
    assert_eq!(Client::connect(&served).rest(), b"", "closed before any greeting");
    clients.pop().unwrap().disconnect();
    until("room", || served.server.connections() == 2);
    let mut last = Client::ready(&served);
    for client in clients.iter_mut().chain([&mut last]) {
        client.write(0, b"still here");
    }
}

#[test]
fn connections_that_never_finish_their_handshake_keep_nobody_out() {
    let limits = Limits { connections: 3, ..Limits::default() };
    let served = Served::with(vec![export("disk", MemoryDisk::new(MIB))], limits, 1);
    let mut first = Client::ready(&served);
    let mut mute = Client::connect(&served);
    let _greeting: [u8; 18] = mute.take();
    let mut dawdling = Client::connect(&served);
    dawdling.send(&flags());
    let _greeting: [u8; 18] = dawdling.take();
    let mut second = Client::ready(&served);
    assert_eq!(mute.rest(), b"", "the oldest makes room");
    let mut third = Client::ready(&served);
    assert_eq!(dawdling.rest(), b"");
    until("the ends of the connections", || served.server.connections() == 3);
    assert_eq!(Client::connect(&served).rest(), b"", "clients stay, however idle they are");
    for client in [&mut first, &mut second, &mut third] {
        client.write(0, b"still here");
    }
}

#[test]
fn one_user_cannot_keep_the_others_out() {
    let limits = Limits { connections: 16, ..Limits::default() };
    let served = Served::with(vec![export("disk", MemoryDisk::new(MIB))], limits, 1);
    let mut clients: Vec<_> = (0..14).map(|_| Client::ready(&served)).collect();
    assert_eq!(Client::connect(&served).rest(), b"", "closed before any greeting");
    // Over TCP, it is another peer.
    let mut other = TcpStream::connect(served.tcp).unwrap();
    other.write_all(&[flags(), option_bytes(option::EXPORT_NAME, b"")].concat()).unwrap();
    other.read_exact(&mut [0; 28]).unwrap();
    for client in &mut clients {
        client.write(0, b"still here");
    }
}

#[test]
fn a_handshake_that_takes_too_long_is_ended() {
    let limits = Limits { handshake: Duration::from_millis(100), ..Limits::default() };
    let served = Served::with(vec![export("disk", MemoryDisk::new(MIB))], limits, 1);
    let mut mute = Client::connect(&served);
    assert!(b"NBDMAGICIHAVEOPT\0\x03".starts_with(&mute.rest()));
    until("the end of the connection", || served.server.connections() == 0);
}

#[test]
fn exports_are_chosen_by_name() {
    let disk = |byte| MemoryDisk::new(MIB).with(0, 16, byte, 0);
    let served =
        Served::new(vec![export("one", disk(1)), export("two", disk(2)), export("дом", disk(3))]);
    for (name, byte) in [("", 1), ("one", 1), ("two", 2), ("дом", 3)] {
        let mut client = Client::connect(&served);
        client.send(&[flags(), option_bytes(option::EXPORT_NAME, name.as_bytes())].concat());
        client.take::<28>();
        assert_eq!(client.read(0, 16), [byte; 16]);
    }
    let mut client = Client::connect(&served);
    client.send(&[flags(), go("three"), go("two")].concat());
    let greeting_and_refusal: [u8; 38] = client.take();
    assert_eq!(greeting_and_refusal[30..34], 0x8000_0006_u32.to_be_bytes());
}

#[test]
fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists(), "left over");
    let listener = Listener::bind_unix(&path).unwrap();
    let error = Listener::bind_unix(&path).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AddrInUse);
    assert!(UnixStream::connect(&path).is_ok());
    drop(listener);
    assert!(!path.exists());
}
