//! Whole NBD sessions, on a disk in memory.

#[path = "../../crates/export/tests/common/memory_disk.rs"]
pub(crate) mod memory_disk;
#[path = "../../crates/export/tests/common/script.rs"]
pub(crate) mod script;

use crate::take;
use isobath_export::nbd::{Export, InFlight, Limits, Server};
use isobath_ring::block_on;
use memory_disk::MemoryDisk;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const SIZE: u64 = 64 << 10;

/// Bits of the first byte of input.
pub(crate) const GREETED: u8 = 1;
pub(crate) const STRUCTURED: u8 = 2;
pub(crate) const FRAMED: u8 = 4;
const DEAF: u8 = 8;
const READ_ONLY: u8 = 16;
const SLOW_ZEROES: u8 = 32;
const BROKEN: u8 = 64;

/// A session: whatever a client sends, and whenever it stops listening, the session ends, every
/// request begun is finished, and what is sent back can be parsed.
pub fn nbd_session(mut input: &[u8]) {
    let [mode, first, second, deaf] = take(&mut input);
    let disk = MemoryDisk {
        read_only: mode & READ_ONLY != 0,
        slow_zeroes: mode & SLOW_ZEROES != 0,
        broken: (mode & BROKEN != 0).then_some((SIZE / 2, 5)),
        delay: usize::from(first % 4),
        ..MemoryDisk::new(SIZE as usize)
    };
    let device = Arc::new(disk);
    let export = Export {
        name: "a".into(),
        description: String::new(),
        read_only: false,
        allocation_depth: true,
        bitmaps: Arc::default(),
        device: device.clone(),
    };
    let in_flight = InFlight { requests: 3, bytes: 100_000 };
    let limits = Limits { in_flight, ..Limits::default() };
    let server = Server::new(vec![export], limits).expect("a valid server");

    let greeted = mode & GREETED != 0;
    let structured = mode & STRUCTURED != 0;
    let mut bytes = if greeted { script::handshake(structured) } else { script::flags() };
    if mode & FRAMED != 0 && greeted {
        bytes.extend(requests(input));
    } else {
        bytes.extend_from_slice(input);
    }
    let pieces = [usize::from(first) + 1, (usize::from(second) + 1) * 100];
    let client = script::Script::cut(&bytes, &pieces);
    let deaf_after = (mode & DEAF != 0).then_some(usize::from(deaf) * 8);
    let client = script::Script { deaf_after, ..client };
    let _ = block_on(server.session(&client));
    assert_eq!(device.running.load(Ordering::Relaxed), 0);
    if greeted && structured && deaf_after.is_none() {
        let output = client.output.borrow();
        script::replies(script::skip_handshake(&output), |_| 0);
    }
}

/// Requests with the right magic and mostly sensible ranges, 8 bytes of input each.
fn requests(input: &[u8]) -> Vec<u8> {
    let mut requests = Vec::new();
    for (cookie, mut chunk) in input.chunks(8).enumerate() {
        let [command, flags, a, b, c, d, wild, byte] = take(&mut chunk);
        let mut offset = u64::from(u16::from_be_bytes([a, b]));
        let mut length = u32::from(u16::from_be_bytes([c, d]));
        match wild {
            0 => offset = u64::MAX - offset,
            1 => length = u32::MAX - length,
            2.. => {}
        }
        let payload = if command % 9 == 1 { length.min(1 << 16) as usize } else { 0 };
        let data = vec![byte; payload];
        let (command, flags) = (u16::from(command % 9), u16::from(flags));
        requests.extend(script::request(command, flags, cookie as u64, (offset, length), &data));
    }
    requests
}
