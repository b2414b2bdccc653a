//! The entries of a traced program's rings, in its memory.

use super::tracer::{Kind, read, write};
use std::collections::HashMap;
use std::fs;

/// The offset of the entries among what a ring's descriptor maps; that of the queues is 0.
const ENTRIES: u64 = 0x1000_0000;
/// The bytes of an entry.
const ENTRY: usize = 64;
const OP_NOP: u8 = 0;
/// `IORING_NOP_INJECT_RESULT`: the result is in the length. Linux 6.10.
const INJECT_RESULT: u32 = 1;

#[derive(Clone, Copy, Default)]
struct Ring {
    queues: u64,
    entries: u64,
    /// Offsets within the queues.
    head: u32,
    tail: u32,
    mask: u32,
    array: u32,
}

/// The rings of a program, by descriptor.
#[derive(Default)]
pub(super) struct Rings(HashMap<u64, Ring>);

impl Rings {
    /// A call that makes a ring, or maps memory, has ended.
    pub(super) fn made(&mut self, thread: libc::pid_t, registers: &libc::user_regs_struct) {
        if (registers.rax as i64) < 0 {
            return;
        }
        if registers.orig_rax as i64 == libc::SYS_io_uring_setup {
            let mut parameters = [0; 120];
            read(thread, registers.rsi, &mut parameters);
            let word = |at: usize| u32::from_ne_bytes(parameters[at..at + 4].try_into().unwrap());
            // The offsets of the submission queue follow 40 bytes of parameters.
            let ring = Ring {
                head: word(40),
                tail: word(44),
                mask: word(48),
                array: word(64),
                ..Ring::default()
            };
            self.0.insert(registers.rax, ring);
        } else if let Some(ring) = self.0.get_mut(&registers.r8) {
            match registers.r9 {
                0 => ring.queues = registers.rax,
                ENTRIES => ring.entries = registers.rax,
                _ => {}
            }
        }
    }

    /// The entries that a call of `io_uring_enter` submits.
    pub(super) fn entries(
        &self,
        thread: libc::pid_t,
        registers: &libc::user_regs_struct,
    ) -> Vec<Entry> {
        let Some(ring) = self.0.get(&registers.rdi) else { return Vec::new() };
        let word = |offset: u32| {
            let mut bytes = [0; 4];
            let length = read(thread, ring.queues + u64::from(offset), &mut bytes);
            assert_eq!(length, 4, "the ring's memory can be read");
            u32::from_ne_bytes(bytes)
        };
        let (head, mask) = (word(ring.head), word(ring.mask));
        let count = word(ring.tail).wrapping_sub(head).min(registers.rsi as u32);
        let at = |number: u32| {
            let place = word(ring.array + 4 * (head.wrapping_add(number) & mask));
            let address = ring.entries + u64::from(place) * ENTRY as u64;
            let mut bytes = [0; ENTRY];
            read(thread, address, &mut bytes);
            Entry { thread, address, bytes }
        };
        (0..count).map(at).collect()
    }
}

/// An entry that is about to be submitted.
pub(super) struct Entry {
    thread: libc::pid_t,
    address: u64,
    bytes: [u8; ENTRY],
}

impl Entry {
    fn word(&self, at: usize) -> u32 {
        u32::from_ne_bytes(self.bytes[at..at + 4].try_into().unwrap())
    }

    fn long(&self, at: usize) -> u64 {
        u64::from_ne_bytes(self.bytes[at..at + 8].try_into().unwrap())
    }

    pub(super) fn descriptor(&self) -> u64 {
        self.word(4).into()
    }

    pub(super) fn offset(&self) -> u64 {
        self.long(8)
    }

    /// How many bytes are transferred; of a vector, how many buffers.
    pub(super) fn length(&self) -> u64 {
        // The length of an fallocate is where others have an address.
        if self.bytes[0] == 17 { self.long(16) } else { self.word(24).into() }
    }

    /// What it does, if that is of interest.
    pub(super) fn operation(&self) -> Option<(Kind, &'static str)> {
        match self.bytes[0] {
            1 | 22 => Some((Kind::Read, "read")),
            2 => Some((Kind::Write, "writev")),
            23 => Some((Kind::Write, "write")),
            3 => Some((Kind::Sync, "fsync")),
            17 => Some((Kind::Allocate, "fallocate")),
            _ => None,
        }
    }

    /// Makes it transfer fewer bytes.
    pub(super) fn shorten(&mut self, length: u32) {
        self.bytes[24..28].copy_from_slice(&length.to_ne_bytes());
        write(self.thread, self.address, &self.bytes);
    }

    /// Makes it fail: with this error, or with `EBADF` if the kernel cannot be told.
    pub(super) fn fail(&mut self, error: i32) {
        if !injects_results() {
            self.bytes[4..8].copy_from_slice(&(-1_i32).to_ne_bytes());
            write(self.thread, self.address, &self.bytes);
            return;
        }
        let name = self.long(32);
        self.bytes = [0; ENTRY];
        self.bytes[0] = OP_NOP;
        self.bytes[24..28].copy_from_slice(&(-error).to_ne_bytes());
        self.bytes[28..32].copy_from_slice(&INJECT_RESULT.to_ne_bytes());
        self.bytes[32..40].copy_from_slice(&name.to_ne_bytes());
        write(self.thread, self.address, &self.bytes);
    }
}

/// Whether the kernel has [`INJECT_RESULT`]; others take the flag, and the entry succeeds.
fn injects_results() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers =
        release.split(['.', '-']).map_while(|number| number.trim().parse::<u32>().ok());
    let version = (numbers.next().unwrap(), numbers.next().unwrap());
    version >= (6, 10)
}
