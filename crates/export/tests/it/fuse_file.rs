//! The file as programs see it, by plain system calls.

use crate::fuse_mount::{FIXED, FULL, FileEnd, Image, Mounted};
use crate::memory_disk::MemoryDisk;
use isobath_disk::{BlockDevice, OpenOptions, Preallocation};
use isobath_export::fuse::Options;
use isobath_ring::block_on;
use isobath_testkit::until;
use std::fs::{self, File, OpenOptions as Open, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::process::Command;
use std::sync::atomic::Ordering;
use std::thread;

const MIB: usize = 1 << 20;
const KEEP: i32 = libc::FALLOC_FL_KEEP_SIZE;
const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | KEEP;
const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE;

#[test]
fn it_looks_like_a_file_of_the_disks_size() {
    let mounted = Mounted::new(MemoryDisk::new(MIB + 700), FIXED);
    let data = fs::metadata(&mounted.path).unwrap();
    assert!(data.is_file());
    assert_eq!((data.len(), data.mode() & 0o7777, data.nlink()), (MIB as u64 + 700, 0o600, 1));
    assert!(data.blocks() > 0 && data.blocks() * 512 < data.len(), "programs look for holes");
    fs::set_permissions(&mounted.path, Permissions::from_mode(0o640)).unwrap();
    assert_eq!(fs::metadata(&mounted.path).unwrap().mode() & 0o7777, 0o640);
    std::os::unix::fs::chown(&mounted.path, Some(12), Some(34)).unwrap();
    let data = fs::metadata(&mounted.path).unwrap();
    assert_eq!((data.uid(), data.gid()), (12, 34));
    let modified = data.modified().unwrap();
    mounted.open(0).write(0, b"new").unwrap();
    assert!(fs::metadata(&mounted.path).unwrap().modified().unwrap() > modified);
    assert_eq!(mounted.device.bytes(0, 4), b"new\0");
}

#[test]
fn odd_ranges_end_where_the_disk_does() {
    let size = MIB as u64 + 700;
    let mounted = Mounted::new(MemoryDisk::new(size as usize).with(0, 5000, 7, 0), FIXED);
    for flags in [0, libc::O_DIRECT, libc::O_DSYNC, libc::O_APPEND] {
        let file = mounted.open(flags);
        assert!(file.read(0, 5001).unwrap() == [vec![7; 5000], vec![0]].concat());
        assert_eq!(file.read(size - 3, 100), Ok(vec![0; 3]));
        for beyond in [size, size + 1, 1 << 40, i64::MAX as u64 - 4096] {
            assert_eq!(file.read(beyond, 1), Ok(vec![]));
        }
        assert_eq!(file.size(), size);
    }
    let file = mounted.open(0);
    assert_eq!(file.write(size - 3, b"tail and more"), Ok(3));
    assert_eq!(file.read(size - 5, 9).unwrap(), b"\0\0tai");
    for beyond in [size, size + 1, 1 << 40] {
        assert_eq!(file.write(beyond, b"x"), Err(libc::ENOSPC));
    }
    assert_eq!(file.size(), size);
    let whole: Vec<u8> = (0..size as usize).map(|at| (at % 251) as u8).collect();
    assert_eq!(file.write(0, &whole), Ok(size));
    assert!(file.read(0, 2 * MIB).unwrap() == whole);
    assert!(mounted.open(libc::O_DIRECT).read(1, 2 * MIB).unwrap() == whole[1..]);
    assert!(file.mapped(4096, 5000) == whole[4096..9096]);
    assert!(mounted.device.bytes(0, size as usize) == whole);
}

#[test]
fn more_requests_than_may_be_in_flight_wait_for_their_turn() {
    const CLIENTS: usize = 8;
    let mounted = Mounted::new(MemoryDisk::new(CLIENTS * MIB), Options { requests: 1, ..FIXED });
    thread::scope(|scope| {
        for client in 0..CLIENTS {
            let file = mounted.open(libc::O_DIRECT);
            scope.spawn(move || {
                let (at, data) = ((client * MIB) as u64, vec![client as u8 + 1; MIB]);
                assert_eq!(file.write(at, &data), Ok(MIB as u64));
                assert!(file.read(at, MIB).unwrap() == data);
            });
        }
    });
}

#[test]
fn ranges_are_punched_and_zeroed() {
    let mounted = Mounted::new(MemoryDisk::new(MIB).with(0, MIB, 7, 0), FIXED);
    let file = mounted.open(0);
    file.fallocate(PUNCH, 4096, 8192).unwrap();
    file.fallocate(ZERO, 20_000, 5).unwrap();
    file.fallocate(ZERO | KEEP, 30_000, 5).unwrap();
    file.fallocate(PUNCH, MIB as u64 - 10, 1 << 40).unwrap();
    file.fallocate(ZERO | KEEP, MIB as u64 - 20, 1 << 40).unwrap();
    let mut expected = vec![7; MIB];
    for (start, end) in [(4096, 12_288), (20_000, 20_005), (30_000, 30_005), (MIB - 20, MIB)] {
        expected[start..end].fill(0);
    }
    assert!(file.read(0, MIB).unwrap() == expected);
    file.fallocate(0, 0, MIB as u64).unwrap();
    file.fallocate(KEEP, 0, 1 << 40).unwrap();
    let past = MIB as u64 + 1;
    assert_eq!(file.fallocate(0, 0, past), Err(libc::ENOSPC));
    assert_eq!(file.fallocate(ZERO, 0, past), Err(libc::ENOSPC));
    let modes = [
        libc::FALLOC_FL_COLLAPSE_RANGE,
        libc::FALLOC_FL_INSERT_RANGE,
        libc::FALLOC_FL_UNSHARE_RANGE,
    ];
    for mode in modes {
        assert_eq!(file.fallocate(mode, 4096, 4096), Err(libc::EOPNOTSUPP));
    }
    assert!(file.read(0, MIB).unwrap() == expected && file.size() == MIB as u64);
}

#[test]
fn holes_are_found() {
    let disk = MemoryDisk::new(MIB).with(8192, 4096, 1, 0).with(65_536, 10, 2, 3);
    let mounted = Mounted::new(disk, FIXED);
    let file = mounted.open(0);
    for (offset, data, hole) in [
        (0, Ok(8192), 0),
        (8191, Ok(8192), 8191),
        (8192, Ok(8192), 12_288),
        (12_287, Ok(12_287), 12_288),
        (12_288, Ok(65_536), 12_288),
        (65_540, Ok(65_540), 69_632),
        (69_632, Err(libc::ENXIO), 69_632),
        (MIB as u64 - 1, Err(libc::ENXIO), MIB as u64 - 1),
    ] {
        assert_eq!(file.seek(offset, libc::SEEK_DATA), data, "data from {offset}");
        assert_eq!(file.seek(offset, libc::SEEK_HOLE), Ok(hole), "a hole from {offset}");
    }
    assert_eq!(file.seek(MIB as u64, libc::SEEK_DATA), Err(libc::ENXIO));
    assert_eq!(file.seek(MIB as u64, libc::SEEK_HOLE), Err(libc::ENXIO));
    file.write(MIB as u64 - 1, b"x").unwrap();
    assert_eq!(file.seek(MIB as u64 - 1, libc::SEEK_HOLE), Ok(MIB as u64), "the end is a hole");
    assert_eq!(file.seek(0, libc::SEEK_END), Ok(MIB as u64));
    let copy = mounted.directory.path().join("copy");
    let mut cp = Command::new("cp");
    let done = isobath_testkit::process::run(cp.arg("--sparse=auto").arg(&mounted.path).arg(&copy));
    let _ = done.ok();
    assert!(fs::read(&copy).unwrap() == file.read(0, MIB).unwrap());
    assert!(fs::metadata(&copy).unwrap().blocks() < 512, "cp went around the holes");
}

#[test]
fn nothing_cuts_a_disk() {
    let mounted = Mounted::new(MemoryDisk::new(MIB).with(0, MIB, 7, 0), FIXED);
    let truncated = Open::new().write(true).truncate(true).open(&mounted.path);
    assert_eq!(truncated.unwrap_err().kind(), ErrorKind::PermissionDenied);
    let file = mounted.open(0);
    for size in [0, 1, MIB as u64 - 1, MIB as u64 + 1] {
        assert_eq!(file.truncate(size), Err(libc::EPERM));
    }
    assert_eq!(file.truncate(MIB as u64), Ok(0));
    assert!(file.read(0, 2 * MIB).unwrap() == vec![7; MIB]);
}

#[test]
fn a_file_that_may_grow_does() {
    let image = Image::new(MIB as u64, &OpenOptions::default(), FULL, 1);
    let file = image.open(0);
    assert_eq!(file.write(3 * MIB as u64 - 1, b"far"), Ok(3));
    assert_eq!(file.size(), 3 * MIB as u64 + 512, "disks have whole sectors");
    assert_eq!(file.truncate(4 * MIB as u64), Ok(0));
    assert_eq!(file.fallocate(0, 4 * MIB as u64, 100), Ok(0));
    assert_eq!(file.fallocate(ZERO, 0, 4 * MIB as u64 + 1024), Ok(0));
    assert_eq!(file.fallocate(ZERO | KEEP, 0, 1 << 40), Ok(0));
    assert_eq!(file.truncate(MIB as u64), Err(libc::EPERM));
    assert_eq!(file.write(i64::MAX as u64 - 4096, b"x"), Err(libc::EFBIG));
    assert_eq!(file.truncate(i64::MAX as u64), Err(libc::EFBIG));
    let mut append = Open::new().append(true).open(&image.path).unwrap();
    std::io::Write::write_all(&mut append, &[7; 512]).unwrap();
    let size = 4 * MIB + 1536;
    assert_eq!(file.size(), size as u64);
    let held = image.finish();
    assert_eq!(held.len(), size);
    assert!(held[..size - 512].iter().all(|byte| *byte == 0) && held[size - 512..] == [7; 512]);
}

#[test]
fn a_size_that_others_change_is_seen_at_once() {
    let image = Image::new(MIB as u64, &OpenOptions::default(), FIXED, 0);
    let file = image.open(0);
    for size in [MIB as u64 + 512, 9 * MIB as u64] {
        block_on(image.device.resize(size, Preallocation::Off, false)).unwrap();
        assert_eq!(file.size(), size);
        assert_eq!(fs::metadata(&image.path).unwrap().len(), size);
        assert_eq!(file.write(size - 1, b"end"), Ok(1));
        assert_eq!(file.seek(0, libc::SEEK_END), Ok(size));
        assert_eq!(file.read(size - 2, 9).unwrap(), b"\0e");
    }
    block_on(image.device.resize(MIB as u64, Preallocation::Off, true)).unwrap();
    assert_eq!((file.size(), file.read(MIB as u64, 1)), (MIB as u64, Ok(vec![])));
}

#[test]
fn a_new_size_reaches_asynchronous_reads_that_ask_for_none() {
    let image = Image::new(MIB as u64, &OpenOptions::default(), FIXED, 0);
    let file = image.open(libc::O_DIRECT);
    assert_eq!(file.read_later(MIB as u64 - 1024, 4096), Ok(1024));
    for size in [2 * MIB as u64, 3 * MIB as u64] {
        block_on(image.device.resize(size, Preallocation::Off, false)).unwrap();
        until("the new size", || file.read_later(size - 4096, 4096) == Ok(4096));
        assert_eq!(file.read_later(size - 1024, 4096), Ok(1024));
    }
}

#[test]
fn what_is_read_only_stays_as_it_is() {
    let disk = MemoryDisk { read_only: true, ..MemoryDisk::new(MIB) };
    for mounted in
        [Mounted::new(disk, FULL), Mounted::new(MemoryDisk::new(MIB), Options::default())]
    {
        let opened = Open::new().write(true).open(&mounted.path);
        assert_eq!(opened.unwrap_err().kind(), ErrorKind::ReadOnlyFilesystem);
        let file = FileEnd(File::open(&mounted.path).unwrap());
        assert_eq!(file.read(MIB as u64 - 1, 9), Ok(vec![0]));
        assert_eq!((file.sync(), file.size()), (Ok(0), MIB as u64));
        assert!(fs::set_permissions(&mounted.path, Permissions::from_mode(0o644)).is_err());
        assert_eq!(fs::metadata(&mounted.path).unwrap().mode() & 0o7777, 0o400);
    }
}

#[test]
fn what_the_disk_fails_fails() {
    let disk = MemoryDisk { broken: Some((70_000, libc::EIO)), ..MemoryDisk::new(MIB) };
    let mounted = Mounted::new(MemoryDisk { broken_flush: true, ..disk }, FIXED);
    let file = mounted.open(0);
    assert_eq!(file.read(69_000, 4096), Err(libc::EIO));
    assert_eq!(file.write(69_000, &[1; 4096]), Err(libc::EIO));
    assert_eq!(file.fallocate(PUNCH, 65_536, 8192), Err(libc::EIO));
    assert_eq!(file.sync(), Err(libc::EIO));
    assert_eq!(mounted.open(libc::O_SYNC).write(0, b"x"), Err(libc::EIO));
    assert_eq!(file.write(0, b"well"), Ok(4));
    assert_eq!(file.read(0, 4).unwrap(), b"well");
}

#[test]
fn a_full_disk_says_so() {
    let disk = MemoryDisk { broken: Some((0, libc::ENOSPC)), ..MemoryDisk::new(MIB) };
    let mounted = Mounted::new(disk, FIXED);
    assert_eq!(mounted.open(0).write(0, b"x"), Err(libc::ENOSPC));
}

#[test]
fn what_must_be_durable_is_flushed() {
    let mounted = Mounted::new(MemoryDisk::new(MIB), FIXED);
    let flushes = || mounted.device.flushes.load(Ordering::Relaxed);
    let file = mounted.open(0);
    file.write(0, b"not yet").unwrap();
    assert_eq!(flushes(), 0);
    file.sync().unwrap();
    file.0.sync_data().unwrap();
    assert_eq!(flushes(), 2);
    mounted.open(libc::O_DSYNC).write(0, b"now").unwrap();
    assert_eq!(flushes(), 3);
    mounted.open(libc::O_SYNC).write(0, &vec![1; 3 * MIB]).unwrap();
    assert!(flushes() > 3);
}

#[test]
fn requests_run_side_by_side() {
    for workers in [0, 3] {
        let disk = std::sync::Arc::new(MemoryDisk::new(MIB));
        let mounted = Mounted::with(disk, FIXED, workers);
        let file = mounted.open(0);
        *mounted.device.held.lock() = Some(Vec::new());
        thread::scope(|scope| {
            for at in 0..40_u64 {
                let file = &file;
                scope.spawn(move || file.0.write_all_at(&[at as u8; 512], at * 512).unwrap());
            }
            until("forty writes at once", || mounted.device.running.load(Ordering::Relaxed) == 40);
            mounted.device.release();
        });
        for at in 0..40 {
            assert_eq!(mounted.device.bytes(at * 512, 512), [at as u8; 512]);
        }
    }
}

#[test]
fn a_client_that_is_killed_leaves_the_others_served() {
    let mounted = Mounted::new(MemoryDisk::new(16 * MIB), FIXED);
    for round in 0..5 {
        *mounted.device.held.lock() = Some(Vec::new());
        let to = format!("of={}", mounted.path.display());
        let arguments = ["if=/dev/zero", "bs=1M", "count=16", "conv=notrunc", "status=none"];
        let mut client = Command::new("dd").args(arguments).arg(to).spawn().unwrap();
        until("a write", || mounted.device.running.load(Ordering::Relaxed) > 0);
        client.kill().unwrap();
        mounted.device.release();
        client.wait().unwrap();
        until("the write's end", || mounted.device.running.load(Ordering::Relaxed) == 0);
        let file = mounted.open(0);
        file.write(round * 100, b"alive").unwrap();
        assert_eq!(file.read(round * 100, 5).unwrap(), b"alive");
    }
}

#[test]
fn the_same_file_serves_many_that_open_and_close_it() {
    let mounted = Mounted::with(std::sync::Arc::new(MemoryDisk::new(MIB)), FIXED, 2);
    thread::scope(|scope| {
        for number in 0..8_usize {
            let mounted = &mounted;
            scope.spawn(move || {
                for round in 0..200 {
                    let file = mounted.open(if round % 2 == 0 { 0 } else { libc::O_DIRECT });
                    let bytes = [number as u8 ^ round as u8; 1000];
                    file.write(number as u64 * 1000, &bytes).unwrap();
                    assert_eq!(file.read(number as u64 * 1000, 1000).unwrap(), bytes);
                }
            });
        }
    });
    assert_eq!(mounted.device.size(), MIB as u64);
}

#[test]
fn direct_access_needs_no_alignment() {
    let mounted = Mounted::new(MemoryDisk::new(MIB), FIXED);
    let file = mounted.open(libc::O_DIRECT).0;
    file.write_all_at(&[9; 4001], 333).unwrap();
    let mut back = [0; 4003];
    file.read_exact_at(&mut back, 332).unwrap();
    assert_eq!((back[0], back[4002]), (0, 0));
    assert_eq!(back[1..4002], [9; 4001]);
}
