//! Files on a simulated disk.

use isobath_ring::block_on;
use isobath_ring::{Config, Executor, spawn};
use isobath_storage::memory::MemoryHost;
use isobath_storage::{Host, IoBuf, Storage, StorageExt, ZeroMode};
use isobath_storage_test::conformance;
use isobath_storage_test::conformance::WRITABLE;
use isobath_storage_test::slow::{SlowDisk, SlowHost};
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn disk(bandwidth: u64, latency: Duration, depth: usize) -> SlowDisk {
    SlowDisk {
        bandwidth: NonZeroU64::new(bandwidth).unwrap(),
        latency,
        depth: NonZeroUsize::new(depth).unwrap(),
        flush: Duration::ZERO,
        mechanics: None,
    }
}

#[test]
fn a_slow_disk_is_a_disk() {
    let fast = disk(1 << 40, Duration::ZERO, 64);
    let host = SlowHost::new(MemoryHost::new(), fast);
    block_on(conformance::check(&host, Path::new("/images"), false));
    let executor = Executor::new(&Config::default()).unwrap();
    let host = SlowHost::new(MemoryHost::new(), disk(1 << 34, Duration::from_micros(1), 64));
    executor.block_on(conformance::check(&host, Path::new("/images"), false));
}

/// Two files, requests at once: nothing ends before the disk that they share allows it.
#[test]
fn files_share_the_disks_time() {
    const MIB: u64 = 1 << 20;
    let slow = disk(100 * MIB, Duration::from_millis(3), 4);
    let executor = Executor::new(&Config::default()).unwrap();
    for clones in [false, true] {
        let host = SlowHost::new(MemoryHost::new(), slow);
        let other = if clones { host.clone() } else { SlowHost::new(MemoryHost::new(), slow) };
        executor.block_on(async {
            let mut files = Vec::new();
            for (host, name) in [(&host, "/one"), (&other, "/two")] {
                files.push(Arc::new(host.create(Path::new(name), WRITABLE).await.unwrap()));
            }
            let start = Instant::now();
            let writes: Vec<_> = (0..4)
                .map(|index| {
                    let file = files[index % 2].clone();
                    spawn(async move {
                        file.write_at(0, IoBuf::zeroed(MIB as usize)).await.unwrap();
                        Instant::now()
                    })
                })
                .collect();
            let mut last = start;
            for write in writes {
                last = last.max(write.await.unwrap());
            }
            let through = if clones { 4 } else { 2 };
            assert!(last - start >= Duration::from_millis(10 * through + 3));
        });
    }
}

#[test]
fn every_change_takes_a_requests_time() {
    const LATENCY: Duration = Duration::from_millis(2);
    let host = SlowHost::new(MemoryHost::new(), disk(1 << 40, LATENCY, 8));
    block_on(async {
        let file = host.create(Path::new("/file"), WRITABLE).await.unwrap();
        let mut before = Instant::now();
        let mut took = || {
            let now = Instant::now();
            let took = now - before;
            before = now;
            took >= LATENCY
        };
        file.write_at(0, IoBuf::zeroed(8192)).await.unwrap();
        assert!(took());
        file.write_vectored_at(0, vec![IoBuf::zeroed(1), IoBuf::zeroed(2)]).await.unwrap();
        assert!(took());
        file.read_at(0, IoBuf::zeroed(1)).await.unwrap();
        assert!(took());
        file.write_zeroes(0, 1, ZeroMode::default()).await.unwrap();
        assert!(took());
        file.discard(0, 1).await.unwrap();
        assert!(took());
        file.set_len(4096).await.unwrap();
        assert!(took());
        file.flush().await.unwrap();
        assert!(took());
        assert!(file.clone_range(&file, 0, 4096, 4096).await.unwrap());
        assert!(took());
        file.retire().await.unwrap();
        assert!(took());
        assert!(file.is_read_only());
    });
}
