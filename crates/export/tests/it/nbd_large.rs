//! Reads and writes for which a client does not get the memory: they are carried out in pieces, whatever others do.

use crate::memory_disk::MemoryDisk;
use crate::script::{Reply, Script, handshake, replies, request, skip_handshake};
use isobath_disk::throttle::Direction;
use isobath_export::nbd::wire::{chunk, command, command_flag};
use isobath_export::nbd::{Export, Limits, Server, SessionError};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};

const MIB: usize = 1 << 20;
/// The disk, and its largest requests: not a whole number of pieces.
const SIZE: usize = 8 * MIB + 4096;
const ALL: (u64, u32) = (0, SIZE as u32);

/// With which a connection has 1 MiB for itself, beside the half that encryption would take.
fn limits() -> Limits {
    Limits { connections: 8, memory: 4 * MIB, assured: 3 * MIB / 2, ..Limits::default() }
}

fn server(disk: MemoryDisk) -> (Arc<MemoryDisk>, Server<MemoryDisk>) {
    let device = Arc::new(disk);
    let export = Export {
        name: "disk".into(),
        description: String::new(),
        read_only: false,
        allocation_depth: true,
        bitmaps: Arc::default(),
        device: device.clone(),
    };
    (device, Server::new(vec![export], limits()).unwrap())
}

/// Polls a session so often that whatever can be done is done; gives how it ended, if it did.
fn pump<F: Future>(session: &mut Pin<Box<F>>) -> Option<F::Output> {
    let mut context = Context::from_waker(Waker::noop());
    (0..10_000).find_map(|_| match session.as_mut().poll(&mut context) {
        Poll::Ready(result) => Some(result),
        Poll::Pending => None,
    })
}

/// Runs a session, which goes on to its end.
fn run(server: &Server<MemoryDisk>, script: &Script) -> Result<(), SessionError> {
    pump(&mut Box::pin(server.session(script))).unwrap()
}

/// What a whole disk holds.
fn data(seed: usize) -> Vec<u8> {
    (0..SIZE).map(|at| ((at >> 9) * 7 + at + seed) as u8).collect()
}

/// What a client has read with all chunks of a reply, which must be in order, without a gap and within the disk.
fn whole(replies: &[(Reply, Vec<u8>)], cookie: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut done = false;
    for (reply, data) in replies {
        match reply {
            Reply::Simple { error: 0, cookie: its } if *its == cookie => {
                assert!(!std::mem::replace(&mut done, true));
                bytes.extend(data);
            }
            Reply::Chunk { flags, kind: chunk::OFFSET_DATA, cookie: its, payload }
                if *its == cookie =>
            {
                assert!(!std::mem::replace(&mut done, *flags & chunk::FLAG_DONE != 0));
                assert_eq!(payload[..8], (bytes.len() as u64).to_be_bytes());
                bytes.extend(&payload[8..]);
            }
            _ => {}
        }
    }
    assert!(done, "the reply to {cookie} has an end");
    bytes
}

fn has(reply: &Reply, of: u64) -> bool {
    let (Reply::Simple { cookie, .. } | Reply::Chunk { cookie, .. }) = reply;
    *cookie == of
}

/// The request, kind and flags of a chunk.
fn kind(reply: &Reply) -> (u64, u16, u16) {
    match reply {
        Reply::Chunk { cookie, kind, flags, .. } => (*cookie, *kind, *flags),
        Reply::Simple { .. } => panic!("{reply:?} is no chunk"),
    }
}

fn parsed(script: &Script) -> Vec<(Reply, Vec<u8>)> {
    let output = script.output.borrow();
    // Cookies below 10 are reads of everything.
    replies(skip_handshake(&output), |cookie| if cookie < 10 { SIZE } else { 0 })
}

/// Clients that have asked for as much as they get, and read none of their replies.
struct Deaf(Vec<Script>);

impl Deaf {
    fn new() -> Self {
        let reads = (0..64).map(|cookie| request(command::READ, 0, cookie, (0, MIB as u32), &[]));
        let input: Vec<_> = [handshake(true)].into_iter().chain(reads).collect();
        Self((0..7).map(|_| Script::new(input.clone())).collect())
    }

    /// Their sessions, which hold what they got from now on.
    fn hold<'a>(
        &'a self,
        disk: &MemoryDisk,
        server: &'a Server<MemoryDisk>,
    ) -> Vec<Pin<Box<impl Future<Output = Result<(), SessionError>> + use<'a>>>> {
        *disk.held.lock() = Some(Vec::new());
        let mut sessions: Vec<_> =
            self.0.iter().map(|script| Box::pin(server.session(script))).collect();
        assert!(sessions.iter_mut().all(|session| pump(session).is_none()));
        let held = disk.in_flight.load(Ordering::Relaxed);
        assert!(held > 7 * MIB && held <= limits().most_memory(), "{held} bytes");
        self.0.iter().for_each(|script| script.slow.set(usize::MAX));
        disk.release();
        assert!(sessions.iter_mut().all(|session| pump(session).is_none()));
        sessions
    }
}

#[test]
fn a_client_that_reads_no_replies_delays_no_request_of_others_however_large() {
    let (disk, server) = server(MemoryDisk::new(SIZE));
    let deaf = Deaf::new();
    let mut sessions = deaf.hold(&disk, &server);
    // However what it sends arrives.
    for (structured, cut) in [(false, 20_011), (true, 100_003), (false, 3 << 20), (true, 3 << 20)] {
        let data = data(cut);
        let fragments = if structured { command_flag::DF } else { 0 };
        let input = [
            handshake(structured),
            request(command::WRITE, command_flag::FUA, 20, ALL, &data),
            request(command::READ, 0, 1, ALL, &[]),
            request(command::FLUSH, 0, 21, (0, 0), &[]),
            request(command::READ, fragments, 2, ALL, &[]),
            request(command::DISC, 0, 22, (0, 0), &[]),
        ];
        let script = Script::cut(&input.concat(), &[cut]);
        run(&server, &script).unwrap();
        let replies = parsed(&script);
        assert!(whole(&replies, 1) == data && whole(&replies, 2) == data);
        let answered = [20, 21].map(|cookie| (Reply::Simple { error: 0, cookie }, Vec::new()));
        assert!(answered.iter().all(|reply| replies.contains(reply)));
        assert!(disk.bytes(0, SIZE) == data);
        let of = |cookie: u64| replies.iter().filter(move |(reply, _)| has(reply, cookie)).count();
        assert_eq!((of(1), of(2)), if structured { (9, 1) } else { (1, 1) });
    }
    assert_eq!(disk.largest.load(Ordering::Relaxed), MIB);
    // For the disk's limits each is one request.
    let large = |of| disk.admitted.lock().iter().filter(|one| **one == (of, SIZE as u64)).count();
    assert_eq!((large(Direction::Write), large(Direction::Read)), (4, 8));
    assert!(sessions.iter_mut().all(|session| pump(session).is_none()));
}

#[test]
fn a_large_request_is_carried_out_as_a_whole_where_there_is_memory() {
    let (disk, server) = server(MemoryDisk::new(SIZE));
    let read = request(command::READ, 0, 1, (0, 2 * MIB as u32), &[]);
    let script = Script::new([handshake(false), read]);
    let mut session = Box::pin(server.session(&script));
    assert!(pump(&mut session).unwrap().is_ok());
    assert_eq!(disk.largest.load(Ordering::Relaxed), 2 * MIB);
}

#[test]
fn a_large_write_that_fails_is_dropped_to_its_end() {
    for structured in [false, true] {
        let broken = Some((3 * MIB as u64 + 7, libc::ENOSPC));
        let (disk, server) = server(MemoryDisk { broken, ..MemoryDisk::new(SIZE) });
        let deaf = Deaf::new();
        let _sessions = deaf.hold(&disk, &server);
        let data = data(1);
        let script = Script::new([
            handshake(structured),
            request(command::WRITE, 0, 20, ALL, &data),
            request(command::WRITE, 0, 21, (SIZE as u64 - 512, 512), &[9; 512]),
        ]);
        run(&server, &script).unwrap();
        let replies = parsed(&script);
        let refused = |reply: &Reply| match reply {
            Reply::Simple { error, .. } => *error == 28,
            Reply::Chunk { kind, payload, .. } => {
                *kind == chunk::ERROR && payload[..4] == 28_u32.to_be_bytes()
            }
        };
        assert!(has(&replies[0].0, 20) && refused(&replies[0].0), "{:?}", replies[0]);
        assert_eq!(replies[1].0, Reply::Simple { error: 0, cookie: 21 });
        assert!(disk.bytes(0, 3 * MIB) == data[..3 * MIB]);
        assert!(disk.bytes(3 * MIB, 5 * MIB).iter().all(|byte| *byte == 0));
        assert_eq!(disk.bytes(SIZE - 512, 512), [9; 512]);
    }
}

#[test]
fn a_large_read_that_fails_in_the_middle_never_looks_whole() {
    let broken = Some((3 * MIB as u64 + 7, libc::EIO));
    let (disk, server) = server(MemoryDisk { broken, ..MemoryDisk::new(SIZE) });
    let deaf = Deaf::new();
    let _sessions = deaf.hold(&disk, &server);
    let then = || request(command::READ, 0, 12, (0, 0), &[]);
    // A structured reply has its error in the end, and the client goes on.
    let read = request(command::READ, 0, 1, ALL, &[]);
    let script = Script::new([handshake(true), read, then()]);
    run(&server, &script).unwrap();
    let replies = parsed(&script);
    let kinds: Vec<_> = replies.iter().map(|(reply, _)| kind(reply)).collect();
    let (data, none) = (chunk::OFFSET_DATA, chunk::NONE);
    let expected = [(1, data, 0), (1, data, 0), (1, data, 0), (1, chunk::ERROR, 1), (12, none, 1)];
    assert_eq!(kinds, expected);
    // Other replies cannot say it once they have begun: the connection ends.
    for (structured, flags) in [(false, 0), (true, command_flag::DF)] {
        let read = request(command::READ, flags, 1, ALL, &[]);
        let script = Script::new([handshake(structured), read, then()]);
        let result = run(&server, &script);
        assert!(matches!(result, Err(SessionError::HalfAnswered)), "{result:?}");
        let sent = skip_handshake(&script.output.borrow()).len();
        assert!((3 * MIB..4 * MIB).contains(&sent), "{sent} bytes");
    }
    // An error in the first piece is an answer like any other.
    for structured in [false, true] {
        let range = (3 * MIB as u64, 4 * MIB as u32 + 512);
        let read = request(command::READ, 0, 11, range, &[]);
        let script = Script::new([handshake(structured), read, then()]);
        run(&server, &script).unwrap();
        assert_eq!(parsed(&script).len(), 2);
    }
}

#[test]
fn a_large_request_of_a_client_that_leaves_ends() {
    let (disk, server) = server(MemoryDisk::new(SIZE));
    let deaf = Deaf::new();
    let _sessions = deaf.hold(&disk, &server);
    let write = request(command::WRITE, 0, 20, ALL, &data(1));
    let cut = Script::new([handshake(true), write[..5 * MIB].to_vec()]);
    assert!(matches!(run(&server, &cut), Err(SessionError::Truncated)));
    // Nothing can be sent after the first piece.
    let read = request(command::READ, 0, 1, ALL, &[]);
    let gone = Script { deaf_after: Some(MIB), ..Script::new([handshake(false), read]) };
    assert!(matches!(run(&server, &gone), Err(SessionError::Io(_))));
    assert!(gone.output.borrow().len() < 3 * MIB);
    assert_eq!(disk.in_flight.load(Ordering::Relaxed), 0);
}
