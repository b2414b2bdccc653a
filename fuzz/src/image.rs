//! A whole image, opened, read and written.

use futures_executor::block_on;
use isobath_disk::{Disk, OpenOptions, Trust, ZeroFlags};
use isobath_storage::memory::MemoryHost;
use isobath_storage::{IoBuf, Locking};
use std::path::Path;

/// Length of the reads and writes.
const PIECE: u64 = 70_000;

/// Opens the input as an image, reads it, and writes to it; reads of a disk that only reads were
/// made of agree with each other.
pub fn image(input: &[u8]) {
    let host = MemoryHost::new();
    let name = Path::new("image");
    host.insert(name, input);
    host.insert("base", &[0x5a; 10_000]);
    let options = |writable| {
        OpenOptions::new()
            .writable(writable)
            .trust(Trust::default())
            .locking(Locking::Unlocked)
            .map_cache(1 << 20)
    };
    block_on(async {
        let Ok(disk) = Disk::open(host.deep_copy(), name, &options(false)).await else { return };
        for (offset, length) in ranges(disk.size()) {
            let first = disk.read(offset, IoBuf::zeroed(length as usize)).await;
            let second = disk.read(offset, IoBuf::zeroed(length as usize)).await;
            assert_eq!(first.is_ok(), second.is_ok());
            if let (Ok(first), Ok(second)) = (first, second) {
                assert!(*first == *second, "two reads differ");
            }
            if let Ok(runs) = disk.block_status(offset, length, 16).await {
                assert!(!runs.is_empty() && runs.len() <= 16);
                assert!(runs.iter().all(|run| run.length > 0));
            }
        }
        let _ = disk.close().await;
    });
    block_on(async {
        let Ok(disk) = Disk::open(host.deep_copy(), name, &options(true)).await else { return };
        for (offset, length) in ranges(disk.size()) {
            let _ = disk.write(offset, IoBuf::copy_of(&vec![0xa5; length as usize])).await;
            let flags = ZeroFlags { may_unmap: offset % 2 == 0, only_fast: false };
            let _ = disk.write_zeroes(offset + length / 2, length / 4, flags).await;
            let _ = disk.discard(offset + length / 3, length / 3).await;
            let _ = disk.flush().await;
            let _ = disk.read(offset, IoBuf::zeroed(length as usize)).await;
        }
        let _ = disk.close().await;
    });
}

/// Where a disk is tried: at its start, its middle and its end.
fn ranges(size: u64) -> impl Iterator<Item = (u64, u64)> {
    [0, 4095, size / 2, size.saturating_sub(PIECE)]
        .into_iter()
        .filter(move |offset| *offset < size)
        .map(move |offset| (offset, PIECE.min(size - offset)))
}
