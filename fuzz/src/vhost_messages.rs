//! Messages of vhost-user, to the server of a disk in memory.

use crate::take;
use crate::vhost_user::raw::{self, Shared, message};
use crate::vhost_user::{SERVED, again};
use std::fs::File;
use std::os::unix::net::UnixStream;
use std::sync::LazyLock;

/// What a client may send along: memory, and an eventfd.
static FILES: LazyLock<[File; 2]> = LazyLock::new(|| {
    [Shared::new(1 << 16).file.try_clone().expect("a descriptor"), raw::eventfd()]
});

/// A session: whatever a client sends, and whatever descriptors come along, the session ends when the
/// client has gone, and another one works after it.
pub fn vhost_messages(mut input: &[u8]) {
    let [mode] = take(&mut input);
    let (_, address) = &*SERVED;
    let socket = UnixStream::connect_addr(address).expect("a server");
    while !input.is_empty() {
        let [code, flags, length, files] = take(&mut input);
        let (body, rest) = input.split_at(usize::from(length).min(input.len()));
        input = rest;
        // The version, and a reply wanted.
        let mut bytes = message(u32::from(code) % 48, 1 | u32::from(flags & 8), body);
        if flags & 0xf0 == 0xf0 {
            bytes[8..12].copy_from_slice(&(u32::from(flags) << (8 * (flags % 4))).to_ne_bytes());
        }
        let list: Vec<&File> =
            (0..files % 4).map(|n| &FILES[usize::from(n + files / 4) % 2]).collect();
        raw::send(&socket, &bytes, &list);
    }
    let _ = socket.shutdown(std::net::Shutdown::Write);
    raw::read_to_the_end(&socket);
    if mode == 0 {
        again();
    }
}

/// What clients say to set a queue up, and each message alone.
pub(crate) fn valid_inputs() -> Vec<Vec<u8>> {
    let part =
        |code: u8, body: &[u8], files: u8| [&[code, 8, body.len() as u8, files][..], body].concat();
    let number = |value: u64| value.to_ne_bytes().to_vec();
    let table = raw::memory_table(&[(0, 1 << 16, raw::USER, 0)]);
    let whole = [
        part(3, &[], 0),
        part(1, &[], 0),
        part(2, &number(raw::FEATURES), 0),
        part(15, &[], 0),
        part(16, &number(0x1_b229), 0),
        part(17, &[], 0),
        part(5, &table, 1),
        part(8, &raw::state(0, 16), 0),
        part(10, &raw::state(0, 0), 0),
        part(9, &raw::addresses(0, raw::USER, raw::USER + 0x2000, raw::USER + 0x1000), 0),
        part(13, &number(0), 5),
        part(12, &number(0), 5),
        part(18, &raw::state(0, 1), 0),
        part(24, &[0; 72], 0),
        part(31, &[0; 24], 0),
        part(36, &[], 0),
        part(40, &[], 0),
        part(11, &raw::state(0, 0), 0),
        part(34, &[], 0),
    ];
    let mut seeds: Vec<Vec<u8>> = whole.iter().map(|one| [&[0][..], one].concat()).collect();
    seeds.push([&[0][..], &whole.concat()].concat());
    seeds
}
