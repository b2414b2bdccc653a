//! A vhost-user client that sends whatever a test wants, and whose rings are just memory.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::expect_used)]

use std::fs::File;
use std::io::{Read, Write};
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::time::{Duration, Instant};

/// Nothing that is waited for takes so long.
pub const PATIENCE: Duration = Duration::from_mins(1);

/// Bytes of shared memory; guest addresses start at 0.
pub const MEMORY: usize = 1 << 20;
/// Where the client says that its memory is.
pub const USER: u64 = 0x7000_0000_0000;
/// Bytes of a queue's part of the memory, and where in it things are.
pub const PART: u64 = 0x4000;
pub const AVAILABLE: u64 = 0x1000;
pub const USED: u64 = 0x2000;
pub const TABLE: u64 = 0x3000;
/// Where data may be.
pub const DATA: u64 = 0x4_0000;

pub const EVENT_INDEX: u64 = 1 << 29;
pub const FLUSH: u64 = 1 << 9;
/// Version 1, indirect descriptors, protocol features, flush.
pub const FEATURES: u64 = 1 << 32 | 1 << 28 | 1 << 30 | FLUSH;

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

/// Shared memory, mapped here too.
pub struct Shared {
    pub file: File,
    start: *mut u8,
    length: usize,
}

// SAFETY: only addresses; tests answer for what they do at once.
unsafe impl Send for Shared {}

impl Shared {
    pub fn new(length: usize) -> Self {
        // SAFETY: the name ends with a zero byte, and the descriptor is new.
        let file = unsafe {
            let fd = libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC);
            assert!(fd >= 0);
            File::from_raw_fd(fd)
        };
        file.set_len(length as u64).unwrap();
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: a new mapping.
        let start =
            unsafe { libc::mmap(ptr::null_mut(), length, access, flags, file.as_raw_fd(), 0) };
        assert!(start != libc::MAP_FAILED);
        Self { file, start: start.cast(), length }
    }

    pub fn start(&self) -> *mut u8 {
        self.start
    }

    pub fn len(&self) -> usize {
        self.length
    }

    pub fn write(&self, address: u64, bytes: &[u8]) {
        assert!(address as usize + bytes.len() <= self.length);
        // SAFETY: within the mapping; the server uses the bytes only in ways that this may disturb.
        unsafe {
            self.start.add(address as usize).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        }
    }

    pub fn read(&self, address: u64, length: usize) -> Vec<u8> {
        assert!(address as usize + length <= self.length);
        let mut bytes = vec![0; length];
        // SAFETY: within the mapping.
        unsafe {
            self.start.add(address as usize).copy_to_nonoverlapping(bytes.as_mut_ptr(), length);
        }
        bytes
    }

    pub fn half(&self, address: u64) -> u16 {
        assert!(address as usize + 2 <= self.length && address.is_multiple_of(2));
        let place = NonNull::new(self.start).unwrap();
        // SAFETY: within the mapping, and aligned.
        unsafe { place.add(address as usize).cast::<u16>().read_volatile() }
    }

    pub fn set_half(&self, address: u64, value: u16) {
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        self.write(address, &value.to_le_bytes());
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`.
        unsafe { libc::munmap(self.start.cast(), self.length) };
    }
}

/// A descriptor as it is in memory.
pub fn descriptor(address: u64, length: u32, flags: u16, next: u16) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&address.to_le_bytes());
    bytes[8..12].copy_from_slice(&length.to_le_bytes());
    bytes[12..14].copy_from_slice(&flags.to_le_bytes());
    bytes[14..].copy_from_slice(&next.to_le_bytes());
    bytes
}

/// A request's header.
pub fn header(kind: u32, sector: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[8..].copy_from_slice(&sector.to_le_bytes());
    bytes
}

pub fn eventfd() -> File {
    // SAFETY: a plain system call, and the descriptor is new.
    unsafe {
        let fd = libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK);
        assert!(fd >= 0);
        File::from_raw_fd(fd)
    }
}

/// A client, its memory, and its queues.
pub struct Raw {
    pub socket: UnixStream,
    pub memory: Shared,
    pub kicks: Vec<File>,
    pub calls: Vec<File>,
    pub size: u16,
}

impl Raw {
    /// Connects; nothing is said yet.
    pub fn connect(socket: &Path, queues: u16, size: u16) -> Self {
        Self::on(UnixStream::connect(socket).unwrap(), queues, size)
    }

    /// Takes a connection over; nothing is said yet.
    pub fn on(socket: UnixStream, queues: u16, size: u16) -> Self {
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        Self {
            socket,
            memory: Shared::new(MEMORY),
            kicks: (0..queues).map(|_| eventfd()).collect(),
            calls: (0..queues).map(|_| eventfd()).collect(),
            size,
        }
    }

    /// Connects and starts all queues.
    pub fn start(socket: &Path, queues: u16, size: u16, features: u64) -> Self {
        let raw = Self::connect(socket, queues, size);
        raw.start_all(features);
        raw
    }

    /// Agrees on features and starts all queues.
    pub fn start_all(&self, features: u64) {
        self.agree(features);
        for queue in 0..self.kicks.len() {
            self.start_queue(queue as u16, 0);
        }
    }

    /// Agrees on features and gives the memory away.
    pub fn agree(&self, features: u64) {
        self.tell(3, &[]);
        self.tell(2, &features.to_ne_bytes());
        let offered = self.ask_number(15, &[]);
        self.tell(16, &offered.to_ne_bytes());
        self.tell_with(5, &memory_table(&[(0, MEMORY as u64, USER, 0)]), &[&self.memory.file]);
    }

    /// Asks for a list of those in flight, for one queue of 16: what describes it, and its file.
    pub fn ask_for_list(&self) -> (Vec<u8>, File) {
        self.tell(31, &[vec![0; 16], vec![1, 0, 16, 0]].concat());
        let (body, file) = receive_with_file(&self.socket, 31);
        (body, file.into())
    }

    pub fn start_queue(&self, queue: u16, base: u32) {
        self.set_up(queue, base);
        self.tell_with(12, &u64::from(queue).to_ne_bytes(), &[&self.kicks[usize::from(queue)]]);
        self.tell_with(13, &u64::from(queue).to_ne_bytes(), &[&self.calls[usize::from(queue)]]);
        self.tell(18, &state(queue, 1));
    }

    /// Sets a queue up without starting it.
    pub fn set_up(&self, queue: u16, base: u32) {
        self.tell(8, &state(queue, u32::from(self.size)));
        self.tell(10, &state(queue, base));
        let part = USER + u64::from(queue) * PART;
        self.tell(9, &addresses(queue, part, part + USED, part + AVAILABLE));
    }

    /// Stops a queue; gives the index of the next available entry.
    pub fn stop_queue(&self, queue: u16) -> u16 {
        let reply = self.ask(11, &state(queue, 0));
        u16::from_ne_bytes(reply[4..6].try_into().unwrap())
    }

    pub fn tell(&self, code: u32, body: &[u8]) {
        self.tell_with(code, body, &[]);
    }

    pub fn tell_with(&self, code: u32, body: &[u8], files: &[&File]) {
        self.send(&message(code, 1, body), files);
    }

    /// Sends a message that wants an acknowledgement, and tells whether it was done.
    pub fn is_done(&self, code: u32, body: &[u8], files: &[&File]) -> bool {
        self.send(&message(code, 9, body), files);
        self.receive(code) == 0_u64.to_ne_bytes()
    }

    pub fn ask(&self, code: u32, body: &[u8]) -> Vec<u8> {
        self.tell(code, body);
        self.receive(code)
    }

    pub fn ask_number(&self, code: u32, body: &[u8]) -> u64 {
        u64::from_ne_bytes(self.ask(code, body).try_into().unwrap())
    }

    pub fn send(&self, bytes: &[u8], files: &[&File]) {
        send(&self.socket, bytes, files);
    }

    /// Receives the reply to a message.
    pub fn receive(&self, code: u32) -> Vec<u8> {
        let mut header = [0; 12];
        (&self.socket).read_exact(&mut header).unwrap();
        let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
        assert_eq!((word(0), word(4)), (code, 5));
        let mut body = vec![0; word(8) as usize];
        (&self.socket).read_exact(&mut body).unwrap();
        body
    }

    /// Waits until the server has closed the connection.
    pub fn wait_closed(&self) {
        read_to_the_end(&self.socket);
    }

    /// Puts a descriptor into a queue's table.
    pub fn describe(&self, queue: u16, index: u16, descriptor: [u8; 16]) {
        self.memory.write(u64::from(queue) * PART + 16 * u64::from(index), &descriptor);
    }

    /// Makes a chain available, without a kick.
    pub fn offer(&self, queue: u16, head: u16) {
        let ring = u64::from(queue) * PART + AVAILABLE;
        let index = self.memory.half(ring + 2);
        self.memory.set_half(ring + 4 + 2 * u64::from(index % self.size), head);
        self.memory.set_half(ring + 2, index.wrapping_add(1));
    }

    pub fn kick(&self, queue: u16) {
        (&self.kicks[usize::from(queue)]).write_all(&1_u64.to_ne_bytes()).unwrap();
    }

    pub fn used_index(&self, queue: u16) -> u16 {
        self.memory.half(u64::from(queue) * PART + USED + 2)
    }

    /// Head and length of a used entry.
    pub fn used(&self, queue: u16, index: u16) -> (u32, u32) {
        let at = u64::from(queue) * PART + USED + 4 + 8 * u64::from(index % self.size);
        let bytes = self.memory.read(at, 8);
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        (word(0), word(4))
    }

    /// Waits until the used index is `index`.
    pub fn wait_used(&self, queue: u16, index: u16) {
        let deadline = Instant::now() + PATIENCE;
        while self.used_index(queue) != index {
            assert!(Instant::now() < deadline, "used: {}, not {index}", self.used_index(queue));
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Sends a request of one chain: descriptors as `(address, length, writable)`. Gives what the used ring
    /// says was written.
    pub fn request(&self, queue: u16, parts: &[(u64, u32, bool)]) -> u32 {
        let last = parts.len() - 1;
        for (index, (address, length, writable)) in parts.iter().enumerate() {
            let write = if *writable { WRITE } else { 0 };
            let next = if index < last { NEXT } else { 0 };
            let bytes = descriptor(*address, *length, write | next, index as u16 + 1);
            self.describe(queue, index as u16, bytes);
        }
        let index = self.used_index(queue);
        self.offer(queue, 0);
        self.kick(queue);
        self.wait_used(queue, index.wrapping_add(1));
        let (head, written) = self.used(queue, index);
        assert_eq!(head, 0);
        written
    }

    /// A read or write, as a driver would send it; gives the status and what was read.
    pub fn transfer(&self, queue: u16, kind: u32, sector: u64, data: &[u8]) -> (u8, Vec<u8>) {
        let place = DATA + u64::from(queue) * PART;
        self.memory.write(place, &header(kind, sector));
        self.memory.write(place + 16, &[0xee]);
        self.memory.write(place + 0x200, data);
        let length = data.len() as u32;
        let writable = kind == 0 || kind == 8;
        self.request(
            queue,
            &[(place, 16, false), (place + 0x200, length, writable), (place + 16, 1, true)],
        );
        (self.memory.read(place + 16, 1)[0], self.memory.read(place + 0x200, data.len()))
    }

    /// Whether a whole write and read arrive, with no trace of what happened before.
    pub fn assert_works(&self, queue: u16) {
        let data: Vec<u8> = (0..1024_u32).map(|at| (at % 251) as u8).collect();
        assert_eq!(self.transfer(queue, 1, 8, &data).0, 0);
        assert_eq!(self.transfer(queue, 0, 8, &[0; 1024]), (0, data));
    }
}

/// A whole message with its header.
pub fn message(code: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for word in [code, flags, body.len() as u32] {
        bytes.extend_from_slice(&word.to_ne_bytes());
    }
    bytes.extend_from_slice(body);
    bytes
}

pub fn state(queue: u16, value: u32) -> Vec<u8> {
    [u32::from(queue).to_ne_bytes(), value.to_ne_bytes()].concat()
}

pub fn addresses(queue: u16, descriptors: u64, used: u64, available: u64) -> Vec<u8> {
    let mut body = state(queue, 0);
    for address in [descriptors, used, available, 0] {
        body.extend_from_slice(&address.to_ne_bytes());
    }
    body
}

/// Regions as `(guest, size, user, offset)`.
pub fn memory_table(regions: &[(u64, u64, u64, u64)]) -> Vec<u8> {
    let mut body = (regions.len() as u64).to_ne_bytes().to_vec();
    for (guest, size, user, offset) in regions {
        for value in [guest, size, user, offset] {
            body.extend_from_slice(&value.to_ne_bytes());
        }
    }
    body
}

/// Sends bytes with descriptors.
pub fn send(socket: &UnixStream, bytes: &[u8], files: &[&File]) {
    let mut control = [0_u64; 40];
    let mut vector =
        libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: the header describes memory that is alive; the control message fits its room.
    let sent = unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        header.msg_iov = &raw mut vector;
        header.msg_iovlen = 1;
        if !files.is_empty() {
            let length = (files.len() * size_of::<i32>()) as u32;
            header.msg_control = control.as_mut_ptr().cast();
            header.msg_controllen = libc::CMSG_SPACE(length) as usize;
            assert!(header.msg_controllen <= size_of_val(&control));
            let one = libc::CMSG_FIRSTHDR(&raw const header);
            (*one).cmsg_level = libc::SOL_SOCKET;
            (*one).cmsg_type = libc::SCM_RIGHTS;
            (*one).cmsg_len = libc::CMSG_LEN(length) as usize;
            for (at, file) in files.iter().enumerate() {
                let place = libc::CMSG_DATA(one).add(size_of::<i32>() * at);
                place.cast::<[u8; 4]>().write(file.as_raw_fd().to_ne_bytes());
            }
        }
        libc::sendmsg(socket.as_raw_fd(), &raw const header, libc::MSG_NOSIGNAL)
    };
    // A server that closes the connection for what came before is the test's to notice.
    assert!(sent == bytes.len() as isize || sent < 0);
}

/// Receives a reply that has a descriptor.
pub fn receive_with_file(socket: &UnixStream, code: u32) -> (Vec<u8>, OwnedFd) {
    let mut bytes = [0; 256];
    let mut control = [0_u64; 8];
    let mut vector = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: the header describes memory that is alive, and the kernel has filled the control message.
    let (count, file) = unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        header.msg_iov = &raw mut vector;
        header.msg_iovlen = 1;
        header.msg_control = control.as_mut_ptr().cast();
        header.msg_controllen = size_of_val(&control);
        let count = libc::recvmsg(socket.as_raw_fd(), &raw mut header, 0);
        let one = libc::CMSG_FIRSTHDR(&raw const header);
        assert!(count > 12 && !one.is_null());
        (count as usize, OwnedFd::from_raw_fd(libc::CMSG_DATA(one).cast::<i32>().read_unaligned()))
    };
    assert_eq!(bytes[..4], code.to_ne_bytes());
    (bytes[12..count].to_vec(), file)
}

/// Reads until the server has closed the connection.
pub fn read_to_the_end(mut socket: &UnixStream) {
    let mut rest = Vec::new();
    match socket.read_to_end(&mut rest) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
    }
}
