//! A file served by several threads, of which each takes one request at a time: whoever has room reads.

use crate::fuse_mount::{FIXED, FileEnd, Mounted};
use crate::memory_disk::MemoryDisk;
use isobath_disk::pausing::{OnFailure, Policies};
use isobath_disk::throttle::Direction;
use isobath_export::fuse::Options;
use isobath_ring::Io;
use isobath_testkit::until;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};

const THREADS: usize = 4;
const ONE_EACH: Options = Options { requests: 1, ..FIXED };
const WAYS: [Io; 2] = [Io::Ring, Io::Threads];

fn mounted(io: Io) -> Mounted<MemoryDisk> {
    let disk = MemoryDisk::new(1 << 20).with(0, 1 << 20, 3, 0);
    disk.pausing.set_policies(Policies { reads: OnFailure::Stop, writes: OnFailure::Enospc });
    Mounted::with_io(Arc::new(disk), ONE_EACH, THREADS, io)
}

/// Reads several times, one after the other. Not in a scope, which would wait for it if the test fails.
fn reads(file: &Arc<FileEnd>, count: usize) -> JoinHandle<()> {
    let file = file.clone();
    thread::spawn(move || {
        for _ in 0..count {
            assert_eq!(file.read(0, 4096), Ok(vec![3; 4096]));
        }
    })
}

/// Waits until a thread has ended. A request that is never answered is told as such.
fn ended(what: &str, io: Io, thread: JoinHandle<()>) {
    until(&format!("{what}, with {io:?}"), || thread.is_finished());
    thread.join().unwrap();
}

#[test]
fn a_request_that_is_held_keeps_no_other_from_a_thread_with_room() {
    for io in WAYS {
        let mounted = mounted(io);
        let file = Arc::new(mounted.open(libc::O_DIRECT));
        // After many single requests, the threads look for no second one.
        ended("reads alone", io, reads(&file, THREADS * 32));
        let mut writes = Vec::new();
        for held in 1..THREADS {
            *mounted.device.failing.lock() = Some((Direction::Write, libc::ENOSPC));
            let file_of_write = file.clone();
            writes.push(thread::spawn(move || {
                assert_eq!(file_of_write.write(4096 * held as u64, &[7; 4096]), Ok(4096));
            }));
            until("a write to be held", || mounted.device.pausing.state().waiting == held);
            // As many as wake every thread more than once.
            ended(&format!("reads beside {held} writes"), io, reads(&file, THREADS * 4));
        }
        *mounted.device.failing.lock() = None;
        mounted.device.pausing.resume();
        for write in writes {
            ended("a write that was held", io, write);
        }
        assert_eq!(mounted.device.bytes(4096, 3 * 4096), [7; 3 * 4096]);
    }
}

#[test]
fn requests_that_arrive_together_each_get_a_thread() {
    for io in WAYS {
        let mounted = mounted(io);
        let file = Arc::new(mounted.open(libc::O_DIRECT));
        for round in 0..200 {
            *mounted.device.held.lock() = Some(Vec::new());
            // Two find every thread full, and are read when one has room.
            let together: Vec<_> = (0..THREADS + 2).map(|_| reads(&file, 1)).collect();
            until(&format!("a request on each thread in round {round}, with {io:?}"), || {
                mounted.device.running.load(Ordering::Relaxed) == THREADS
            });
            mounted.device.release();
            for read in together {
                ended(&format!("a read of round {round}"), io, read);
            }
        }
    }
}
