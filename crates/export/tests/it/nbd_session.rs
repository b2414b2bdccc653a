//! Whole sessions without sockets: whatever a client sends and however it is cut, each request is
//! answered once, and the disk holds what was written.

use crate::memory_disk::MemoryDisk;
use crate::script::{Reply, Script, handshake, replies, request, skip_handshake};
use isobath_export::nbd::wire::{chunk, command, command_flag};
use isobath_export::nbd::{Export, InFlight, Limits, Server, SessionError};
use isobath_ring::{Config, Executor, block_on};
use proptest::prelude::*;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};

const SIZE: usize = 1 << 20;

fn server(disk: MemoryDisk, limits: Limits) -> (Arc<MemoryDisk>, Server<MemoryDisk>) {
    let device = Arc::new(disk);
    let export = Export {
        name: "disk".into(),
        description: String::new(),
        read_only: false,
        allocation_depth: true,
        bitmaps: Arc::default(),
        device: device.clone(),
    };
    (device, Server::new(vec![export], limits).unwrap())
}

/// Runs a session and gives its replies by cookie, in the order in which they came.
fn run(
    server: &Server<MemoryDisk>,
    script: &Script,
) -> (HashMap<u64, Vec<Reply>>, Result<(), SessionError>) {
    let result = block_on(server.session(script));
    let output = script.output.borrow();
    let mut by_cookie: HashMap<u64, Vec<Reply>> = HashMap::new();
    for (reply, _) in replies(skip_handshake(&output), |_| 0) {
        let (Reply::Simple { cookie, .. } | Reply::Chunk { cookie, .. }) = reply;
        by_cookie.entry(cookie).or_default().push(reply);
    }
    (by_cookie, result)
}

fn ok(cookie: u64) -> Vec<Reply> {
    vec![Reply::Simple { error: 0, cookie }]
}

fn failed(cookie: u64, error: u32) -> impl Fn(&Vec<Reply>) -> bool {
    move |replies| match &replies[..] {
        [Reply::Chunk { flags: 1, kind: chunk::ERROR, cookie: its, payload }] => {
            *its == cookie && payload[..4] == error.to_be_bytes()
        }
        _ => false,
    }
}

#[test]
fn requests_are_carried_out_and_answered() {
    let (disk, server) = server(MemoryDisk::new(SIZE), Limits::default());
    let data: Vec<u8> = (0..=255).cycle().take(5000).collect();
    let input = [
        handshake(true),
        request(command::WRITE, command_flag::FUA, 1, (1000, 5000), &data),
        request(command::READ, command_flag::DF, 2, (1001, 3), &[]),
        request(command::WRITE_ZEROES, command_flag::NO_HOLE, 3, (1002, 1), &[]),
        request(command::READ, 0, 4, (1000, 4), &[]),
        request(command::TRIM, 0, 5, (8192, 4096), &[]),
        request(command::CACHE, 0, 6, (0, SIZE as u32), &[]),
        request(command::FLUSH, 0, 7, (0, 0), &[]),
        request(command::READ, 0, 8, (0, 0), &[]),
        request(command::BLOCK_STATUS, 0, 9, (0, SIZE as u32), &[]),
        request(command::DISC, 0, 10, (0, 0), &[]),
        request(command::READ, 0, 11, (0, 1), &[]),
    ];
    let (replies, result) = run(&server, &Script::cut(&input.concat(), &[1000]));
    result.unwrap();
    for cookie in [1, 3, 5, 6, 7] {
        assert_eq!(replies[&cookie], ok(cookie));
    }
    let read = |cookie, payload: &[u8]| {
        let (flags, kind) = (1, chunk::OFFSET_DATA);
        vec![Reply::Chunk { flags, kind, cookie, payload: payload.to_vec() }]
    };
    assert_eq!(replies[&2], read(2, b"\0\0\0\0\0\0\x03\xe9\x01\x02\x03"));
    assert_eq!(replies[&4], read(4, b"\0\0\0\0\0\0\x03\xe8\x00\x01\x00\x03"));
    let none = Reply::Chunk { flags: 1, kind: chunk::NONE, cookie: 8, payload: vec![] };
    assert_eq!(replies[&8], [none]);
    let status = |flags, payload: &[u32]| Reply::Chunk {
        flags,
        kind: chunk::BLOCK_STATUS,
        cookie: 9,
        payload: payload.iter().flat_map(|number| number.to_be_bytes()).collect(),
    };
    let allocation = status(0, &[0, 8192, 0, SIZE as u32 - 8192, 3]);
    let depth = status(1, &[1, 12288, 1, SIZE as u32 - 12288, 0]);
    assert_eq!(replies[&9], [allocation, depth]);
    assert!(!replies.contains_key(&10) && !replies.contains_key(&11));
    assert_eq!(disk.flushes.load(Ordering::Relaxed), 2);
    assert_eq!(disk.bytes(1000, 4), [0, 1, 0, 3]);
}

#[test]
fn replies_are_sent_before_more_requests_are_received() {
    let (_, server) = server(MemoryDisk::new(SIZE), Limits::default());
    let read = |cookie| request(command::READ, 0, cookie, (0, 512), &[]);
    let script = Script::new([handshake(false), [read(1), read(2)].concat(), read(3)]);
    block_on(server.session(&script)).unwrap();
    let sent = script.sent_before.borrow();
    let [.., first, second, end] = sent[..] else { panic!("{sent:?}") };
    let reply = 16 + 512;
    assert_eq!((second - first, end - second), (2 * reply, reply));
}

#[test]
fn refused_requests_leave_the_stream_in_step() {
    let disk = MemoryDisk { slow_zeroes: true, ..MemoryDisk::new(SIZE) };
    let (disk, server) = server(disk, Limits::default());
    let fast = command_flag::FAST_ZERO;
    let input = [
        handshake(true),
        request(command::WRITE, 0, 1, (SIZE as u64 - 1, 300_000), &[0xee; 300_000]),
        request(command::WRITE, 0x80, 2, (0, 10), &[0xee; 10]),
        request(command::WRITE, 0, 3, (0, (32 << 20) + 1), &vec![0xee; (32 << 20) + 1]),
        request(0x99, 0, 4, (0, 10), &[]),
        request(command::WRITE_ZEROES, fast, 5, (0, 10), &[]),
        request(command::READ, 0, 6, (0, (32 << 20) + 1), &[]),
        request(command::WRITE, 0, 7, (7, 3), b"abc"),
        request(command::WRITE, 0, 8, (9, 0), &[]),
    ];
    let (replies, result) = run(&server, &Script::cut(&input.concat(), &[100_000, 7]));
    result.unwrap();
    for (cookie, error) in [(1, 28), (2, 22), (3, 75), (4, 22), (5, 95), (6, 75)] {
        assert!(failed(cookie, error)(&replies[&cookie]), "{cookie}: {:?}", replies[&cookie]);
    }
    assert_eq!((&replies[&7], &replies[&8]), (&ok(7), &ok(8)));
    assert_eq!(disk.bytes(0, 11), *b"\0\0\0\0\0\0\0abc\0");
}

#[test]
fn failures_of_the_disk_become_the_protocols() {
    for (errno, error) in [(libc::EIO, 5), (libc::EDQUOT, 28), (libc::EROFS, 1), (libc::EBADF, 5)] {
        let disk = MemoryDisk { broken: Some((70_000, errno)), ..MemoryDisk::new(SIZE) };
        let (_, server) = server(disk, Limits::default());
        let range = (65536, 8192);
        let input = [
            handshake(true),
            request(command::READ, 0, 1, range, &[]),
            request(command::WRITE, 0, 2, range, &[1; 8192]),
            request(command::WRITE_ZEROES, 0, 3, range, &[]),
            request(command::TRIM, 0, 4, range, &[]),
            request(command::CACHE, 0, 5, range, &[]),
            request(command::BLOCK_STATUS, 0, 6, range, &[]),
            request(command::READ, 0, 7, (0, 1), &[]),
        ];
        let (replies, result) = run(&server, &Script::new([input.concat()]));
        result.unwrap();
        for cookie in 1..=6 {
            assert!(failed(cookie, error)(&replies[&cookie]), "{cookie}: {:?}", replies[&cookie]);
        }
        assert_eq!(replies[&7].len(), 1);
        assert!(!failed(7, error)(&replies[&7]));
    }
}

#[test]
fn a_flush_that_fails_fails_the_writes_that_need_it() {
    let disk = MemoryDisk { broken_flush: true, ..MemoryDisk::new(SIZE) };
    let (_, server) = server(disk, Limits::default());
    let input = [
        handshake(true),
        request(command::WRITE, 0, 1, (4096, 4), b"data"),
        request(command::WRITE, command_flag::FUA, 2, (4096, 4), b"data"),
        request(command::TRIM, command_flag::FUA, 3, (4096, 4), &[]),
        request(command::FLUSH, 0, 4, (0, 0), &[]),
    ];
    let (replies, _) = run(&server, &Script::new([input.concat()]));
    assert_eq!(replies[&1], ok(1));
    for cookie in 2..=4 {
        assert!(failed(cookie, 5)(&replies[&cookie]));
    }
}

#[test]
fn what_is_in_flight_is_bounded_and_all_of_it_answered() {
    let in_flight = InFlight { requests: 4, bytes: 64 << 10 };
    let limits = Limits { in_flight, ..Limits::default() };
    let disk = MemoryDisk { delay: 3, ..MemoryDisk::new(SIZE) };
    let (disk, server) = server(disk, limits);
    let mut input = handshake(true);
    for cookie in 0..100 {
        input.extend(request(command::READ, 0, cookie, (cookie * 512, 30 << 10), &[]));
    }
    input.extend(request(command::READ, 0, 100, (0, SIZE as u32), &[]));
    let script = Script::new([input]);
    script.slow.set(20);
    let (replies, result) = run(&server, &script);
    result.unwrap();
    assert_eq!(replies.len(), 101);
    assert_eq!(disk.most_running.load(Ordering::Relaxed), 2, "two fit into 64 KiB");
    assert_eq!(script.largest_send.get(), SIZE + 28, "a larger one goes alone");
}

#[test]
fn everything_begun_is_finished_for_a_client_that_is_gone() {
    for deaf_after in [0, 100, 5000] {
        let disk = MemoryDisk { delay: 5, ..MemoryDisk::new(SIZE) };
        let (disk, server) = server(disk, Limits::default());
        let mut input = handshake(true);
        for cookie in 0..10_u64 {
            let data = [cookie as u8 + 1; 4096];
            input.extend(request(command::WRITE, 0, cookie, (cookie * 4096, 4096), &data));
        }
        let handshake_length = 18 + 6 * 20 + 200;
        let script = Script::new([input]);
        let script = Script { deaf_after: Some(handshake_length + deaf_after), ..script };
        let _ = block_on(server.session(&script));
        assert_eq!(disk.running.load(Ordering::Relaxed), 0);
        for block in 0..10 {
            assert_eq!(disk.bytes(block * 4096, 4096), [block as u8 + 1; 4096]);
        }
    }
}

/// Polls a session so often that whatever can be done is done; gives how it ended, if it did.
fn pump<F: Future>(session: &mut std::pin::Pin<Box<F>>) -> Option<F::Output> {
    let mut context = Context::from_waker(Waker::noop());
    (0..10_000).find_map(|_| match session.as_mut().poll(&mut context) {
        Poll::Ready(result) => Some(result),
        Poll::Pending => None,
    })
}

#[test]
fn reads_for_a_client_that_is_gone_are_given_up() {
    for structured in [false, true] {
        let (disk, server) = server(MemoryDisk::new(SIZE), Limits::default());
        *disk.held.lock() = Some(Vec::new());
        let mut input = handshake(structured);
        for cookie in 0..10_u64 {
            input.extend(request(command::READ, 0, cookie, (cookie * 4096, 4096), &[]));
            input.extend(request(command::CACHE, 0, cookie + 100, (0, SIZE as u32), &[]));
        }
        // Refused without the disk: the reply shows that there is nobody any more.
        input.extend(request(command::READ, 0, 50, (1 << 40, 1), &[]));
        // The handshake is heard.
        let heard = {
            let script = Script::new([handshake(structured)]);
            let _ = block_on(server.session(&script));
            script.output.borrow().len()
        };
        let script = Script { deaf_after: Some(heard), ..Script::new([input]) };
        let mut session = Box::pin(server.session(&script));
        assert!(pump(&mut session).is_some_and(|ended| ended.is_err()), "it waits for the disk");
        assert_eq!(disk.running.load(Ordering::Relaxed), 0);
        // Nor is anything begun later.
        assert!(disk.most_running.load(Ordering::Relaxed) <= 20);
    }
}

#[test]
fn writes_for_a_client_that_is_gone_are_finished() {
    let (disk, server) = server(MemoryDisk::new(SIZE), Limits::default());
    *disk.held.lock() = Some(Vec::new());
    let mut input = handshake(true);
    input.extend(request(command::WRITE, 0, 1, (0, 4096), &[7; 4096]));
    input.extend(request(command::READ, 0, 2, (1 << 40, 1), &[]));
    let script = Script { deaf_after: Some(300), ..Script::new([input]) };
    let mut session = Box::pin(server.session(&script));
    assert!(pump(&mut session).is_none(), "a write is under way");
    disk.release();
    assert!(pump(&mut session).is_some());
    assert_eq!(disk.bytes(0, 4096), [7; 4096]);
}

#[test]
fn clients_that_receive_nothing_hold_a_bounded_amount_and_leave_some_to_others() {
    const LARGE: usize = 32 << 20;
    let (disk, server) = server(MemoryDisk::new(LARGE), Limits::default());
    *disk.held.lock() = Some(Vec::new());
    let script = |length: u32, count: u64| {
        let mut input = handshake(true);
        for cookie in 0..count {
            input.extend(request(command::READ, 0, cookie, (0, length), &[]));
        }
        Script::new([input])
    };
    let greedy: Vec<_> = (0..64).map(|_| script(LARGE as u32, 4)).collect();
    let mut sessions: Vec<_> =
        greedy.iter().map(|greedy| Box::pin(server.session(greedy))).collect();
    for session in &mut sessions {
        assert!(pump(session).is_none());
    }
    let held = disk.in_flight.load(Ordering::Relaxed);
    assert!((LARGE..=(512 << 20) + 64 * (4 << 20)).contains(&held), "{held} bytes in flight");
    // Who asks for what most ask for is served beside them.
    let before = disk.running.load(Ordering::Relaxed);
    let modest = script(1 << 20, 4);
    let mut other = Box::pin(server.session(&modest));
    assert!(pump(&mut other).is_none());
    assert_eq!(disk.running.load(Ordering::Relaxed), before + 4);
    // What waits goes on when there is memory again.
    let mut last = sessions.pop().unwrap();
    sessions.clear();
    disk.release();
    assert!(pump(&mut other).is_some());
    assert!(pump(&mut last).is_some());
    assert!(greedy.last().unwrap().output.borrow().len() > 4 * LARGE);
}

#[test]
fn a_write_cut_short_never_reaches_the_disk() {
    for length in [4096, 1 << 19] {
        let (disk, server) = server(MemoryDisk::new(SIZE), Limits::default());
        let whole = request(command::WRITE, 0, 1, (0, 512), &[1; 512]);
        let cut = request(command::WRITE, 0, 2, (4096, length), &vec![2; length as usize - 1]);
        let (replies, result) = run(&server, &Script::new([handshake(true), whole, cut]));
        assert!(matches!(result, Err(SessionError::Truncated)), "{result:?}");
        assert_eq!((replies.len(), &replies[&1]), (1, &ok(1)));
        assert_eq!(disk.bytes(0, 512), [1; 512]);
        assert!(disk.bytes(4096, length as usize).iter().all(|byte| *byte == 0));
    }
}

#[test]
fn garbage_ends_the_session_after_what_came_before() {
    let (disk, server) =
        server(MemoryDisk { delay: 9, ..MemoryDisk::new(SIZE) }, Limits::default());
    let write = request(command::WRITE, 0, 1, (0, 4), b"good");
    let (replies, result) = run(&server, &Script::new([handshake(true), write, vec![0xaa; 1000]]));
    assert!(matches!(result, Err(SessionError::BadMagic(_))), "{result:?}");
    assert_eq!((&replies[&1], &disk.bytes(0, 4)[..]), (&ok(1), &b"good"[..]));
}

#[derive(Clone, Debug)]
enum Action {
    Read(usize, usize),
    Write(usize, usize, u8),
    Zero(usize, usize),
    Trim(usize, usize),
    Bad,
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let range = || (0..SIZE, prop_oneof![4 => 0..9000_usize, 1 => 0..300_000_usize]);
    let clamp = |(offset, length): (usize, usize)| (offset, length.min(SIZE - offset));
    let action = prop_oneof![
        range().prop_map(clamp).prop_map(|(offset, length)| Action::Read(offset, length)),
        (range().prop_map(clamp), any::<u8>())
            .prop_map(|((offset, length), byte)| Action::Write(offset, length, byte)),
        range().prop_map(clamp).prop_map(|(offset, length)| Action::Zero(offset, length)),
        range().prop_map(clamp).prop_map(|(offset, length)| Action::Trim(offset, length)),
        Just(Action::Bad),
    ];
    prop::collection::vec(action, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// With a disk that answers at once, requests take effect in the order sent.
    #[test]
    fn any_conversation_is_served_right(
        actions in actions(),
        structured in any::<bool>(),
        pieces in prop::collection::vec(1_usize..200_000, 1..5),
    ) {
        let mut input = handshake(structured);
        let mut model = vec![0; SIZE];
        let mut expected = HashMap::new();
        for (cookie, action) in actions.iter().enumerate() {
            let cookie = cookie as u64;
            let (command, offset, length, data) = match *action {
                Action::Read(offset, length) => {
                    expected.insert(cookie, model[offset..offset + length].to_vec());
                    (command::READ, offset, length, vec![])
                }
                Action::Write(offset, length, byte) => {
                    model[offset..offset + length].fill(byte);
                    (command::WRITE, offset, length, vec![byte; length])
                }
                Action::Zero(offset, length) => {
                    model[offset..offset + length].fill(0);
                    (command::WRITE_ZEROES, offset, length, vec![])
                }
                Action::Trim(offset, length) => {
                    model[offset..offset + length].fill(0);
                    (command::TRIM, offset, length, vec![])
                }
                Action::Bad => (command::WRITE, SIZE, 100, vec![9; 100]),
            };
            input.extend(request(command, 0, cookie, (offset as u64, length as u32), &data));
        }
        let (disk, server) = server(MemoryDisk::new(SIZE), Limits::default());
        let script = Script::cut(&input, &pieces);
        block_on(server.session(&script)).unwrap();
        prop_assert!(disk.bytes(0, SIZE) == model, "the disk is not as it was written");

        let output = script.output.borrow();
        let length = |cookie: u64| expected.get(&cookie).map_or(0, Vec::len);
        let all = replies(skip_handshake(&output), length);
        prop_assert_eq!(all.len(), actions.len());
        for (reply, data) in all {
            let (cookie, data) = match reply {
                Reply::Simple { error, cookie } => {
                    let bad = matches!(actions[cookie as usize], Action::Bad);
                    prop_assert_eq!(error, if bad { 28 } else { 0 });
                    (cookie, data)
                }
                Reply::Chunk { kind: chunk::ERROR, cookie, .. } => {
                    prop_assert!(matches!(actions[cookie as usize], Action::Bad));
                    continue;
                }
                Reply::Chunk { cookie, payload, .. } => {
                    (cookie, payload.get(8..).unwrap_or_default().to_vec())
                }
            };
            if let Some(expected) = expected.get(&cookie) {
                prop_assert!(data == *expected, "request {} read something else", cookie);
            }
        }
    }
}

#[test]
fn requests_that_wait_for_limits_take_no_more_memory_than_documented() {
    const MIB: usize = 1 << 20;
    const WRITERS: usize = 3;
    let limits = Limits { connections: 8, memory: 16 * MIB, ..Limits::default() };
    let disk = MemoryDisk::new(SIZE);
    disk.limit();
    let (disk, server) = server(disk, limits);
    // Their waits need the executor's timers.
    Executor::new(&Config::default()).unwrap().block_on(async {
        let waiting = || disk.throttle.waiting();
        let client = |command, payload: &[u8]| {
            let ask = |cookie| request(command, 0, cookie, (0, SIZE as u32), payload);
            Script::new([handshake(true)].into_iter().chain((0..128).map(ask)))
        };
        let writers = [(); WRITERS].map(|()| client(command::WRITE, &[7; SIZE]));
        let mut sessions: Vec<_> =
            writers.iter().map(|script| Box::pin(server.session(script))).collect();
        for session in &mut sessions {
            assert!(pump(session).is_none());
        }
        let held = waiting() * SIZE;
        assert!(held > WRITERS * 4 * MIB && held <= limits.most_memory(), "{held} bytes wait");
        // A client gets what it is assured of, whoever waits, and for as long as others wait.
        let before = waiting();
        let reader = client(command::READ, &[]);
        let mut reading = Box::pin(server.session(&reader));
        assert!(pump(&mut reading).is_none());
        let more = (waiting() - before) * SIZE;
        assert!(more >= 4 * MIB && held + more <= limits.most_memory(), "{more} more bytes wait");
        drop((sessions, reading));
        assert_eq!(waiting(), 0);
    });
}

#[test]
fn clients_that_do_not_read_their_replies_take_no_more_memory_than_documented() {
    const MIB: usize = 1 << 20;
    const READERS: usize = 3;
    let limits = Limits { connections: 8, memory: 16 * MIB, ..Limits::default() };
    let most = limits.most_memory();
    assert_eq!(most, (16 + 8 * 4) * MIB);
    assert_eq!(Limits::default().most_memory(), 1 << 30, "the default is documented");
    let disk = MemoryDisk::new(SIZE);
    *disk.held.lock() = Some(Vec::new());
    let (disk, server) = server(disk, limits);
    let running = || disk.running.load(Ordering::Relaxed);
    let client = |command, length: usize| {
        let requests = (0..128).map(|cookie| request(command, 0, cookie, (0, length as u32), &[]));
        Script::new([handshake(true), requests.collect::<Vec<_>>().concat()])
    };
    let readers: Vec<_> = (0..READERS).map(|_| client(command::READ, SIZE)).collect();
    let others = [
        client(command::CACHE, SIZE),
        client(command::CACHE, SIZE),
        client(command::BLOCK_STATUS, SIZE),
        client(command::BLOCK_STATUS, SIZE),
    ];
    let mut reading: Vec<_> =
        readers.iter().map(|script| Box::pin(server.session(script))).collect();
    for session in &mut reading {
        assert!(pump(session).is_none());
    }
    let in_flight = running();
    assert!(in_flight * MIB > READERS * 4 * MIB, "{in_flight} reads");
    let mut held = in_flight * MIB;
    let mut asking = Vec::new();
    for (script, bytes) in others.iter().zip([MIB, MIB, 2 * 8 * 4096, 2 * 8 * 4096]) {
        let before = running();
        let mut session = Box::pin(server.session(script));
        assert!(pump(&mut session).is_none());
        held += (running() - before) * bytes;
        asking.push(session);
    }
    assert!(held <= most, "{held} bytes of requests that the disk has not finished");
    let before = running();
    let another = client(command::READ, MIB);
    let mut last = Box::pin(server.session(&another));
    assert!(pump(&mut last).is_none());
    assert!(running() - before >= 4, "another client gets what it is assured of");
    drop((last, asking));

    for script in &readers {
        script.slow.set(usize::MAX);
    }
    disk.release();
    for session in &mut reading {
        assert!(pump(session).is_none());
    }
    let read = disk.read.load(Ordering::Relaxed);
    assert!(read >= in_flight * MIB, "the replies wait");
    assert!(read <= limits.memory + READERS * 4 * MIB, "{read} bytes of replies that nobody reads");
}
