//! FUSE messages, on a disk in memory.

use crate::nbd_session::memory_disk::MemoryDisk;
use crate::take;
use isobath_export::fuse::{Answer, Options, Trial};
use std::sync::Arc;
use std::sync::atomic::Ordering;

const DISK: usize = 16 << 10;
/// Bytes of a message's header, and of a reply's.
const HEADER: usize = 40;
const REPLY: usize = 16;
/// Kinds of messages whose bodies begin with a handle and an offset.
const READ: u32 = 15;
const WRITE: u32 = 16;
const FALLOCATE: u32 = 43;
const LSEEK: u32 = 46;
const KINDS: [u32; 16] =
    [READ, WRITE, FALLOCATE, LSEEK, 4, 3, 14, 17, 18, 20, 26, 38, 42, 2, 1, 4096];

/// Bits of the first byte of input.
const READ_ONLY: u8 = 1;
const BROKEN: u8 = 2;
/// Messages are the input itself, cut to lengths that it gives.
const RAW: u8 = 4;

thread_local! {
    /// One of each kind for all inputs: a server that is well answers whatever it has answered before.
    static SERVED: [(Arc<MemoryDisk>, Trial<MemoryDisk>); 4] = [0, 1, 2, 3].map(|mode: u8| {
        let broken = (mode & BROKEN != 0).then_some((DISK as u64 / 2, 5));
        let disk = Arc::new(MemoryDisk { broken, ..MemoryDisk::new(DISK) });
        let options = Options { writable: mode & READ_ONLY == 0, ..Options::default() };
        (disk.clone(), Trial::new(disk, options).expect("sockets"))
    });
}

/// Messages: each is answered once, by its name, with as many bytes as it asks for at most; or ends the
/// server for contradicting itself.
pub fn fuse(mut input: &[u8]) {
    let [mode] = take(&mut input);
    SERVED.with(|served| {
        let (disk, trial) = &served[usize::from(mode % 4)];
        let mut unique = 0;
        while !input.is_empty() {
            unique += 1;
            let message = if mode & RAW != 0 { raw(&mut input) } else { built(&mut input, unique) };
            let answer = trial.send(&message).expect("a short message");
            assert_eq!(disk.running.load(Ordering::Relaxed), 0);
            match answer {
                Answer::Malformed => return,
                Answer::Silence => {}
                Answer::Reply(reply) => check(&message, &reply),
            }
        }
    });
}

fn number(bytes: &[u8], at: usize) -> u32 {
    bytes[at..].first_chunk().map_or(0, |word| u32::from_ne_bytes(*word))
}

fn check(message: &[u8], reply: &[u8]) {
    assert!(reply.len() >= REPLY && number(reply, 0) as usize == reply.len());
    assert_eq!(reply[8..16], message[8..16], "another request's name");
    let error = number(reply, 4).cast_signed();
    assert!((-4095..=0).contains(&error) && (error == 0 || reply.len() == REPLY));
    if number(message, 4) == READ {
        assert!(reply.len() - REPLY <= number(message, HEADER + 16) as usize);
    }
}

fn raw(input: &mut &[u8]) -> Vec<u8> {
    let [high, low] = take(input);
    let length = (usize::from(u16::from_be_bytes([high, low])) % 4096).min(input.len());
    let (message, rest) = input.split_at(length);
    *input = rest;
    // A message of no bytes is the end of a connection, which ends the server.
    [message, &[0; 1][..usize::from(message.is_empty())]].concat()
}

/// A message with a right header and a mostly sensible range, of 8 bytes of input and what it carries.
fn built(input: &mut &[u8], unique: u64) -> Vec<u8> {
    let [kind, a, b, c, d, wild, extra, carried] = take(input);
    let opcode = KINDS[usize::from(kind) % KINDS.len()];
    let mut offset = u64::from(u16::from_be_bytes([a, b]) % (DISK as u16 + 1024));
    let mut length = u32::from(u16::from_be_bytes([c, d]));
    match wild {
        0 => offset = u64::MAX - offset,
        1 => length = u32::MAX - length,
        2.. => {}
    }
    let (data, rest) = input.split_at(usize::from(carried).min(input.len()));
    let carried = data.len();
    *input = rest;
    let mut body = Vec::with_capacity(64 + carried);
    let mut put = |bytes: &[u8]| body.extend_from_slice(bytes);
    match opcode {
        READ | WRITE => {
            let size = if opcode == WRITE && wild > 8 { carried as u32 } else { length };
            let flags = if extra & 1 != 0 { libc::O_SYNC as u32 } else { 0 };
            put(&0u64.to_ne_bytes());
            put(&offset.to_ne_bytes());
            put(&size.to_ne_bytes());
            put(&[0; 12]);
            put(&flags.to_ne_bytes());
            put(&[0; 4]);
        }
        FALLOCATE => {
            put(&0u64.to_ne_bytes());
            put(&offset.to_ne_bytes());
            put(&u64::from(length).to_ne_bytes());
            put(&u32::from(extra).to_ne_bytes());
            put(&[0; 4]);
        }
        LSEEK => {
            put(&0u64.to_ne_bytes());
            put(&offset.to_ne_bytes());
            put(&u32::from(extra % 8).to_ne_bytes());
            put(&[0; 4]);
        }
        _ => {}
    }
    put(data);
    let mut message = Vec::with_capacity(HEADER + body.len());
    let said = (HEADER + body.len()) as u32 + u32::from(wild == 255);
    message.extend(said.to_ne_bytes());
    message.extend(opcode.to_ne_bytes());
    message.extend(unique.to_ne_bytes());
    message.extend(1u64.to_ne_bytes());
    message.resize(HEADER, 0);
    message.extend(body);
    message
}

/// A message of each kind, and some in a row.
pub(crate) fn valid_inputs() -> Vec<Vec<u8>> {
    let one = |kind: u8| {
        let mut message = vec![kind, 0, 16, 2, 0, 9, kind % 4, 100];
        message.extend([kind; 100]);
        message
    };
    let all: Vec<u8> = (0..KINDS.len() as u8).flat_map(one).collect();
    let mut seeds: Vec<_> = (0..4).map(|mode| [&[mode][..], &all].concat()).collect();
    let raw: Vec<u8> = (0..KINDS.len() as u64)
        .flat_map(|number| {
            let message = built(&mut one(number as u8).as_slice(), number);
            [&(message.len() as u16).to_be_bytes()[..], &message].concat()
        })
        .collect();
    seeds.push([&[RAW][..], &raw].concat());
    seeds
}
