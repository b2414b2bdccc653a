//! A server that breaks the protocol in one way: each ends in an error that says so. None hangs or panics.

use crate::shared::{WRITABLE, name};
use isobath_nbd_client::wire::{
    GREETING_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, REQUEST_MAGIC, SIMPLE_REPLY_MAGIC,
    STRUCTURED_REPLY_MAGIC, chunk, command, info, option, option_reply, transmission_flag,
};
use isobath_nbd_client::{NbdFile, NbdHost};
use isobath_ring::block_on;
use isobath_storage::{Host, IoBuf, Storage, StorageError, StorageExt, ZeroMode};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

const SIZE: u64 = 1 << 20;

/// A server for one client, in a thread.
struct Scripted {
    directory: tempfile::TempDir,
    thread: JoinHandle<()>,
}

impl Scripted {
    fn new(serve: impl FnOnce(&mut UnixStream) + Send + 'static) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("s")).unwrap();
        let thread = thread::spawn(move || {
            let (mut client, _) = listener.accept().unwrap();
            serve(&mut client);
            // Whatever the client still sends is heard, until it gives up.
            let _ = client.shutdown(std::net::Shutdown::Write);
            let mut rest = [0; 4096];
            while client.read(&mut rest).is_ok_and(|count| count > 0) {}
        });
        Self { directory, thread }
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("s")
    }

    fn open(&self) -> Result<NbdFile, StorageError> {
        block_on(NbdHost::default().open(&name(&self.socket()), WRITABLE))
    }

    /// The client has closed its connection.
    fn end(self) {
        self.thread.join().unwrap();
    }
}

fn array<const N: usize>(client: &mut UnixStream) -> [u8; N] {
    let mut bytes = [0; N];
    client.read_exact(&mut bytes).unwrap();
    bytes
}

fn say(client: &mut UnixStream, bytes: &[u8]) {
    // The client may have gone already.
    let _ = client.write_all(bytes);
}

fn greeting() -> Vec<u8> {
    let magics = [GREETING_MAGIC.to_be_bytes(), OPTION_MAGIC.to_be_bytes()].concat();
    [magics, vec![0, 3]].concat()
}

/// Greets, and hears the client's flags.
fn greet(client: &mut UnixStream) {
    say(client, &greeting());
    let _: [u8; 4] = array(client);
}

/// Hears an option. Returns its number.
fn hear(client: &mut UnixStream) -> u32 {
    assert_eq!(array(client), OPTION_MAGIC.to_be_bytes());
    let option = u32::from_be_bytes(array(client));
    let mut payload = vec![0; u32::from_be_bytes(array(client)) as usize];
    client.read_exact(&mut payload).unwrap();
    option
}

fn reply(option: u32, kind: u32, payload: &[u8]) -> Vec<u8> {
    let numbers = [option, kind, payload.len() as u32].map(u32::to_be_bytes).concat();
    [&OPTION_REPLY_MAGIC.to_be_bytes()[..], &numbers, payload].concat()
}

/// Negotiates well: an export of [`SIZE`] bytes that can do everything.
fn negotiate(client: &mut UnixStream, structured: bool) {
    greet(client);
    let flags = transmission_flag::HAS_FLAGS
        | transmission_flag::SEND_FLUSH
        | transmission_flag::SEND_TRIM
        | transmission_flag::SEND_WRITE_ZEROES;
    loop {
        let option = hear(client);
        let ack = reply(option, option_reply::ACK, &[]);
        match option {
            option::STRUCTURED_REPLY if structured => say(client, &ack),
            option::SET_META_CONTEXT => {
                let context = [&7_u32.to_be_bytes()[..], b"base:allocation"].concat();
                say(client, &reply(option, option_reply::META_CONTEXT, &context));
                say(client, &ack);
            }
            option::GO => {
                let export =
                    [&info::EXPORT.to_be_bytes()[..], &SIZE.to_be_bytes(), &flags.to_be_bytes()];
                say(client, &reply(option, option_reply::INFO, &export.concat()));
                return say(client, &ack);
            }
            _ => say(client, &reply(option, option_reply::ERR_UNSUP, &[])),
        }
    }
}

/// A request: its command and cookie. `None` when the client has gone.
fn request(client: &mut UnixStream) -> Option<(u16, u64)> {
    let mut header = [0; 28];
    client.read_exact(&mut header).ok()?;
    assert_eq!(header[..4], REQUEST_MAGIC.to_be_bytes());
    let command = u16::from_be_bytes([header[6], header[7]]);
    let mut cookie = [0; 8];
    cookie.copy_from_slice(&header[8..16]);
    if command == command::WRITE {
        let mut length = [0; 4];
        length.copy_from_slice(&header[24..]);
        let mut data = vec![0; u32::from_be_bytes(length) as usize];
        client.read_exact(&mut data).ok()?;
    }
    Some((command, u64::from_be_bytes(cookie)))
}

fn simple(error: u32, cookie: u64) -> Vec<u8> {
    let numbers = [SIMPLE_REPLY_MAGIC, error].map(u32::to_be_bytes).concat();
    [numbers, cookie.to_be_bytes().to_vec()].concat()
}

fn piece(kind: u16, flags: u16, cookie: u64, length: u32, payload: &[u8]) -> Vec<u8> {
    [
        &STRUCTURED_REPLY_MAGIC.to_be_bytes()[..],
        &flags.to_be_bytes(),
        &kind.to_be_bytes(),
        &cookie.to_be_bytes(),
        &length.to_be_bytes(),
        payload,
    ]
    .concat()
}

fn data(offset: u64, length: usize) -> Vec<u8> {
    [&offset.to_be_bytes()[..], &vec![7; length]].concat()
}

/// What a client sees of a server that negotiates so.
fn refused(serve: impl FnOnce(&mut UnixStream) + Send + 'static) -> String {
    let server = Scripted::new(serve);
    let error = server.open().unwrap_err();
    server.end();
    error.to_string()
}

#[test]
fn every_truncated_handshake_ends() {
    for length in 0..greeting().len() {
        let error = refused(move |client| say(client, &greeting()[..length]));
        assert!(error.contains("closed the connection during negotiation"), "{length}: {error}");
    }
    // After each option, and within the reply to it.
    for (options, cut) in [(1, 0), (1, 7), (1, 19), (2, 0), (2, 25), (3, 0), (3, 25)] {
        let error = refused(move |client| {
            greet(client);
            for number in 1..options {
                let option = hear(client);
                assert!(number < 3);
                say(client, &reply(option, option_reply::ACK, &[]));
            }
            let option = hear(client);
            let whole = reply(option, option_reply::INFO, &[0; 12]);
            say(client, &whole[..cut]);
        });
        assert!(error.contains("closed the connection during negotiation"), "{options}: {error}");
    }
}

#[test]
fn lies_in_the_handshake_end_it() {
    let lie = |part: Vec<u8>| {
        refused(move |client| {
            greet(client);
            hear(client);
            say(client, &part);
        })
    };
    let mut long = reply(option::STRUCTURED_REPLY, option_reply::ACK, &[]);
    long[16..].copy_from_slice(&u32::MAX.to_be_bytes());
    assert!(lie(long).contains("4294967295 bytes"));
    assert!(lie(vec![0; 40]).contains("wrong magic"));
    assert!(lie(reply(99, option_reply::ACK, &[])).contains("replied to option 99"));
    let error = refused(|client| say(client, b"HTTP/1.1 400 Bad Request\r\n\r\n"));
    assert!(error.contains("not that of an NBD server"), "{error}");
    let error = refused(|client| {
        greet(client);
        loop {
            let option = hear(client);
            if option == option::GO {
                let name = reply(option, option_reply::INFO, &info::NAME.to_be_bytes());
                return say(client, &name.repeat(5000));
            }
            say(client, &reply(option, option_reply::ERR_UNSUP, &[]));
        }
    });
    assert!(error.contains("without an end"), "{error}");
}

#[test]
fn a_silent_server_is_given_up() {
    let server = Scripted::new(|_| {});
    let host = NbdHost::with_patience(Duration::from_millis(50));
    // It says nothing, and closes nothing.
    let socket = server.directory.path().join("silent");
    let listener = UnixListener::bind(&socket).unwrap();
    let error = block_on(host.open(&name(&socket), WRITABLE)).unwrap_err();
    assert!(error.to_string().contains("did not answer during negotiation"), "{error}");
    drop(listener);
    assert!(server.open().is_err());
    server.end();
}

/// Serves one read after a good negotiation; the client must see an error that contains `text`, and then only errors.
#[track_caller]
fn bad_read(structured: bool, text: &str, answer: impl FnOnce(u64) -> Vec<u8> + Send + 'static) {
    let server = Scripted::new(move |client| {
        negotiate(client, structured);
        let (command, cookie) = request(client).unwrap();
        assert_eq!(command, command::READ);
        say(client, &answer(cookie));
    });
    let file = server.open().unwrap();
    let error = block_on(file.read_at(4096, IoBuf::zeroed(512))).unwrap_err().to_string();
    assert!(error.contains(text), "{error}");
    assert!(error.contains("nbd+unix://?socket="), "{error}");
    let later = block_on(file.flush()).unwrap_err().to_string();
    assert!(later.contains(text), "{later}");
    drop(file);
    server.end();
}

#[test]
fn wrong_replies_end_the_connection() {
    let closed = "closed the connection";
    bad_read(false, closed, |_| Vec::new());
    bad_read(false, closed, |cookie| simple(0, cookie)[..9].to_vec());
    bad_read(false, closed, |cookie| [simple(0, cookie), vec![1; 511]].concat());
    bad_read(false, "wrong magic", |_| vec![0xab; 16]);
    bad_read(false, "was not made", |cookie| simple(0, cookie + 1));
    bad_read(false, "was not made", |_| simple(0, u64::MAX));
    bad_read(false, "without being asked", |cookie| {
        piece(chunk::NONE, chunk::FLAG_DONE, cookie, 0, &[])
    });
    bad_read(true, "a simple reply", |cookie| [simple(0, cookie), vec![1; 512]].concat());
    bad_read(true, "was not made", |cookie| piece(chunk::NONE, 1, cookie + 1, 0, &[]));
}

#[test]
fn lying_chunks_end_the_connection() {
    let offset_data = |cookie, flags, at, length: usize| {
        let payload = data(at, length);
        piece(chunk::OFFSET_DATA, flags, cookie, payload.len() as u32, &payload)
    };
    bad_read(true, "before all of its bytes", |cookie| piece(chunk::NONE, 1, cookie, 0, &[]));
    bad_read(true, "before all", move |cookie| offset_data(cookie, 1, 4096, 511));
    bad_read(true, "513 bytes at 4096", move |cookie| offset_data(cookie, 1, 4096, 513));
    bad_read(true, "for a read of 512", move |cookie| offset_data(cookie, 1, 4095, 512));
    bad_read(true, "for a read of 512", move |cookie| offset_data(cookie, 1, u64::MAX, 2));
    bad_read(true, "twice", move |cookie| {
        [offset_data(cookie, 0, 4096, 300), offset_data(cookie, 1, 4300, 308)].concat()
    });
    bad_read(true, "4294967287 bytes", |cookie| {
        piece(chunk::OFFSET_DATA, 1, cookie, u32::MAX, &4096_u64.to_be_bytes())
    });
    bad_read(true, "a chunk of kind 2 has", |cookie| {
        piece(chunk::OFFSET_HOLE, 1, cookie, u32::MAX, &[])
    });
    bad_read(true, "for a read of 512", |cookie| {
        let hole = [&4096_u64.to_be_bytes()[..], &u32::MAX.to_be_bytes()].concat();
        piece(chunk::OFFSET_HOLE, 1, cookie, 12, &hole)
    });
    bad_read(true, "too short", |cookie| piece(chunk::OFFSET_DATA, 1, cookie, 3, &[0; 3]));
    bad_read(true, "unknown kind", |cookie| piece(17, 1, cookie, 0, &[]));
    bad_read(true, "not requested", |cookie| piece(chunk::BLOCK_STATUS, 1, cookie, 12, &[0; 12]));
    bad_read(true, "an error that is none", |cookie| piece(chunk::ERROR, 1, cookie, 6, &[0; 6]));
    bad_read(true, "a chunk of kind 32769 has", |cookie| {
        piece(chunk::ERROR, 1, cookie, 1 << 20, &[0; 6])
    });
    bad_read(true, "without an end", |cookie| {
        piece(chunk::ERROR, 0, cookie, 6, &[0, 0, 0, 5, 0, 0]).repeat(2000)
    });
}

#[test]
fn lying_extents_end_the_connection() {
    for (text, payload) in [
        ("of no bytes", [7, 0, 0].map(u32::to_be_bytes).concat()),
        ("was not requested", [8, 512, 0].map(u32::to_be_bytes).concat()),
        ("too short", 7_u32.to_be_bytes().to_vec()),
        ("within an extent", [&[7, 512, 0].map(u32::to_be_bytes).concat()[..], &[0]].concat()),
    ] {
        let server = Scripted::new(move |client| {
            negotiate(client, true);
            let (command, cookie) = request(client).unwrap();
            assert_eq!(command, command::BLOCK_STATUS);
            let length = payload.len() as u32;
            say(client, &piece(chunk::BLOCK_STATUS, 1, cookie, length, &payload));
        });
        let file = server.open().unwrap();
        let error = block_on(file.allocation(0)).unwrap_err().to_string();
        assert!(error.contains(text), "{text}: {error}");
        drop(file);
        server.end();
    }
    // An extent past the end of what was asked for is cut.
    let server = Scripted::new(move |client| {
        negotiate(client, true);
        let (_, cookie) = request(client).unwrap();
        let payload = [7, u32::MAX, 3].map(u32::to_be_bytes).concat();
        say(client, &piece(chunk::BLOCK_STATUS, 1, cookie, 12, &payload));
        assert_eq!(request(client).unwrap().0, command::DISC);
    });
    let file = server.open().unwrap();
    let found = block_on(file.allocation(100)).unwrap();
    assert_eq!((found.length, found.data), (SIZE - 100, false));
    drop(file);
    server.end();
}

#[test]
fn an_answer_twice_ends_the_connection() {
    let server = Scripted::new(|client| {
        negotiate(client, false);
        let (_, cookie) = request(client).unwrap();
        say(client, &simple(0, cookie).repeat(2));
    });
    let file = server.open().unwrap();
    // The first answer is good, unless the connection's end was faster.
    let _ = block_on(file.discard(0, 512));
    let error = block_on(file.discard(0, 512)).unwrap_err().to_string();
    assert!(error.contains("was not made"), "{error}");
    drop(file);
    server.end();
}

#[test]
fn replies_in_another_order_find_their_requests() {
    let server = Scripted::new(|client| {
        negotiate(client, true);
        let cookies: Vec<u64> = (0..8).map(|_| request(client).unwrap().1).collect();
        // One piece of each, and then the other, from the last to the first.
        for (half, flags) in [(256, 0), (0, 1)] {
            for (number, cookie) in cookies.iter().enumerate().rev() {
                let at = number as u64 * 4096 + half;
                let payload = [&at.to_be_bytes()[..], &[number as u8 + 1; 256]].concat();
                say(client, &piece(chunk::OFFSET_DATA, flags, *cookie, 264, &payload));
            }
        }
    });
    let file = server.open().unwrap();
    block_on(async {
        let mut reads: Vec<_> = (0..8)
            .map(|number| Box::pin(file.read_at(number * 4096, IoBuf::zeroed(512))))
            .collect();
        // In flight in the order of their numbers.
        std::future::poll_fn(|context| {
            for read in &mut reads {
                assert!(read.as_mut().poll(context).is_pending());
            }
            std::task::Poll::Ready(())
        })
        .await;
        for (number, read) in reads.into_iter().enumerate() {
            assert_eq!(read.await.unwrap()[..], [number as u8 + 1; 512]);
        }
    });
    drop(file);
    server.end();
}

#[test]
fn a_server_that_reads_nothing_does_not_hold_the_client() {
    let (leave, left) = mpsc::channel::<()>();
    let server = Scripted::new(move |client| {
        negotiate(client, false);
        let _ = left.recv();
        let _ = client.shutdown(std::net::Shutdown::Both);
    });
    let file = server.open().unwrap();
    {
        // More than a socket holds.
        let mut write = Box::pin(file.write_at(0, IoBuf::zeroed(SIZE as usize)));
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(write.as_mut().poll(&mut context).is_pending());
    }
    // While one thread is stuck in sending, this returns at once.
    drop(file);
    leave.send(()).unwrap();
    server.end();
}

#[test]
fn errors_of_requests_have_their_numbers() {
    let server = Scripted::new(|client| {
        negotiate(client, true);
        for error in [28, 95, 1, 12345] {
            let (_, cookie) = request(client).unwrap();
            say(client, &simple(error, cookie));
        }
    });
    let file = server.open().unwrap();
    let zero = || block_on(file.write_zeroes(0, 4096, ZeroMode::default())).unwrap_err();
    assert_eq!(zero().errno(), libc::ENOSPC);
    assert_eq!(zero().kind(), ErrorKind::Unsupported);
    assert_eq!(zero().errno(), libc::EPERM);
    assert_eq!(zero().errno(), libc::EIO);
    drop(file);
    server.end();
}
