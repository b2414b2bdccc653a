//! A file of a disk that pauses when the storage fails.

use crate::fuse_mount::{FIXED, Mounted};
use crate::memory_disk::MemoryDisk;
use isobath_disk::pausing::{OnFailure, Policies};
use isobath_disk::throttle::Direction;
use isobath_testkit::until;
use std::thread;

const MIB: u64 = 1 << 20;

fn failing(direction: Direction) -> Mounted<MemoryDisk> {
    let disk = MemoryDisk::new(2 << 20).with(0, 4096, 3, 0);
    disk.pausing.set_policies(Policies { reads: OnFailure::Stop, writes: OnFailure::Enospc });
    *disk.failing.lock() = Some((direction, libc::ENOSPC));
    Mounted::new(disk, FIXED)
}

fn until_held(disk: &MemoryDisk, count: usize) {
    until(&format!("{count} requests to be held"), || disk.pausing.state().waiting == count);
}

#[test]
fn a_program_waits_until_its_disk_goes_on() {
    for direction in [Direction::Read, Direction::Write] {
        let mounted = failing(direction);
        let file = mounted.open(0);
        thread::scope(|scope| {
            let held = scope.spawn(|| match direction {
                Direction::Read => file.read(0, 4096).map(|bytes| u64::from(bytes[0])),
                Direction::Write => file.write(0, &[7; 4096]),
            });
            until_held(&mounted.device, 1);
            if direction == Direction::Write {
                assert_eq!(mounted.open(libc::O_DIRECT).read(MIB, 4096), Ok(vec![0; 4096]));
            }
            *mounted.device.failing.lock() = None;
            mounted.device.pausing.resume();
            let expected = if direction == Direction::Read { 3 } else { 4096 };
            assert_eq!(held.join().unwrap(), Ok(expected));
        });
        if direction == Direction::Write {
            assert_eq!(mounted.device.bytes(0, 4096), [7; 4096]);
        }
    }
}

#[test]
fn a_program_that_waits_fails_when_the_server_ends() {
    for direction in [Direction::Read, Direction::Write] {
        let mut mounted = failing(direction);
        let file = mounted.open(libc::O_DIRECT);
        thread::scope(|scope| {
            let held = scope.spawn(|| match direction {
                Direction::Read => file.read(0, 4096).map(drop),
                Direction::Write => file.write(0, &[7; 4096]).map(drop),
            });
            until_held(&mounted.device, 1);
            mounted.stop();
            assert_eq!(held.join().unwrap(), Err(libc::ENOSPC));
        });
        assert_eq!(mounted.device.bytes(0, 4096), [3; 4096]);
    }
}
