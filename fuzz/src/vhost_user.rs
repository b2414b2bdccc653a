//! Queues of a vhost-user-blk device, on a disk in memory.

#[path = "../../crates/export/tests/common/vhost_raw.rs"]
pub(crate) mod raw;

use crate::nbd_session::memory_disk::MemoryDisk;
use crate::take;
use isobath_export::vhost_user::{Options, Server};
use isobath_ring::{Config, Executor};
use raw::{
    AVAILABLE, DATA, EVENT_INDEX, FEATURES, NEXT, PART, Raw, TABLE, WRITE, descriptor, header,
};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock};

const SIZE: u16 = 16;
const DISK: usize = 64 << 10;

/// Bits of the first byte of input.
const EVENTS: u8 = 1;
const LATE: u8 = 2;

/// One for all inputs: a server that is well serves the next client after any other.
pub(crate) static SERVED: LazyLock<(Arc<MemoryDisk>, SocketAddr)> = LazyLock::new(|| {
    let disk = Arc::new(MemoryDisk { delay: 1, ..MemoryDisk::new(DISK) });
    let name = format!("isobath-fuzz-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(name).unwrap();
    let listener = UnixListener::bind_addr(&address).unwrap();
    let server = Server::new(disk.clone(), Options::default()).unwrap();
    std::thread::spawn(move || {
        let executor = Executor::new(&Config::default()).unwrap();
        executor.block_on(server.serve(listener, &[])).unwrap();
    });
    (disk, address)
});

/// A queue: whatever is in its descriptors, its rings and its indirect tables, every request taken ends,
/// the queue can be stopped, and another one works after it.
pub fn vhost_user(mut input: &[u8]) {
    let [mode, ahead] = take(&mut input);
    let features = FEATURES | if mode & EVENTS != 0 { EVENT_INDEX } else { 0 };
    let (disk, address) = &*SERVED;
    let client = Raw::on(UnixStream::connect_addr(address).unwrap(), 2, SIZE);
    client.agree(features);
    client.start_queue(0, 0);
    let heads: [u8; 2 * SIZE as usize] = take(&mut input);
    let descriptors: [u8; 16 * SIZE as usize] = take(&mut input);
    let table: [u8; 128] = take(&mut input);
    client.memory.write(DATA, &input[..input.len().min(4096)]);
    client.memory.write(TABLE, &table);
    client.memory.write(AVAILABLE + 4, &heads);
    client.memory.write(0, &descriptors);
    client.memory.set_half(AVAILABLE + 2, u16::from(ahead));
    client.kick(0);
    if mode & LATE != 0 {
        // While it works on them, they change.
        client.memory.write(0, &[0xff; 64]);
        client.memory.write(TABLE, &[0xff; 32]);
    }
    assert!(client.stop_queue(0) <= u16::from(ahead));
    assert_eq!(disk.running.load(Ordering::Relaxed), 0);
    // Whatever was read into the other's memory.
    client.memory.write(PART, &[0; PART as usize]);
    client.start_queue(1, 0);
    client.assert_works(1);
}

/// A new client finds the server well.
pub(crate) fn again() {
    let client = Raw::on(UnixStream::connect_addr(&SERVED.1).unwrap(), 1, SIZE);
    client.agree(FEATURES);
    client.start_queue(0, 0);
    client.assert_works(0);
}

/// A direct chain and an indirect one, of a kind of request each.
pub(crate) fn valid_inputs() -> Vec<Vec<u8>> {
    let requests = [(0, true), (1, false), (4, true), (8, true), (11, false), (13, false)];
    let seed = |(mode, (kind, data_written)): (u8, (u32, bool))| {
        let write = if data_written { WRITE } else { 0 };
        let chain = [
            descriptor(DATA, 16, NEXT, 1),
            descriptor(DATA + 16, 16, write | NEXT, 2),
            descriptor(DATA + 16, 1024 - 16, write | NEXT, 3),
            descriptor(DATA + 2048, 1, WRITE, 0),
        ];
        let mut input = vec![mode, 2];
        let mut heads = [0; 2 * SIZE as usize];
        heads[2] = 8;
        input.extend(heads);
        let mut descriptors = chain.concat();
        descriptors.resize(8 * 16, 0);
        descriptors.extend(descriptor(TABLE, 64, raw::INDIRECT, 0));
        descriptors.resize(16 * usize::from(SIZE), 0);
        input.extend(descriptors);
        let mut table = chain.concat();
        table.resize(128, 0);
        input.extend(table);
        input.extend(header(kind, 1));
        input.extend([0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0]);
        input
    };
    (0..3).flat_map(|mode| requests.map(|request| (mode, request))).map(seed).collect()
}
