//! The memory that a killed server left, and an image that it belongs to.

use crate::take;
use futures_executor::block_on;
use isobath_disk::{Disk, MetadataMode, NewDisk, OpenOptions, create};
use isobath_qcow2::Crc32c;
use isobath_storage::memory::MemoryHost;
use isobath_storage::{Host, IoBuf, MemoryUse, OpenMode, StorageExt};
use std::path::Path;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const IMAGE: &str = "image";
const SIZE: u64 = 256 << 10;

/// Places of numbers in the memory, in words.
const ID: usize = 1;
const UNCLEAN: usize = 3;
const ENTRIES: usize = 4;
const BYTES: usize = 5;
const END: usize = 6;
const ITEMS: usize = 8;

/// An image as a killed server left it, with its log. Of the disk's clusters the first was flushed, and the
/// second was not.
static LEFT: LazyLock<MemoryHost> = LazyLock::new(|| {
    let host = MemoryHost::new();
    block_on(async {
        let new = NewDisk::new(SIZE).cluster_size(4096);
        create(&host, Path::new(IMAGE), &new).await.expect("a valid image");
        let disk = open(host.clone()).await.expect("a valid image");
        write(&disk, 0, 1).await;
        disk.flush().await.expect("in memory");
        write(&disk, 4096, 2).await;
        write(&disk, 8192, 3).await;
        // Another host: the files are as when nobody has closed them.
        host.deep_copy()
    })
});

async fn write(disk: &Disk<MemoryHost>, offset: u64, byte: u8) {
    disk.write(offset, IoBuf::copy_of(&[byte; 4096])).await.expect("in memory");
}

async fn open(host: MemoryHost) -> isobath_disk::Result<Disk<MemoryHost>> {
    let options = OpenOptions::new()
        .writable(true)
        .metadata(MetadataMode::Journal)
        .restart_log(true)
        .map_cache(1 << 16);
    Disk::open(host, Path::new(IMAGE), &options).await
}

/// Words of the memory that are changed, and items that are put there with sums that are right: the image
/// opens and can be used, or is refused; a log that is as it was brings back what was answered. Who only
/// reads the image before sees the same.
pub fn restart_log(mut input: &[u8]) {
    let untouched = input.is_empty();
    let host = LEFT.deep_copy();
    block_on(async {
        {
            let mode = OpenMode { writable: true, ..OpenMode::default() };
            let file = host.open(Path::new(IMAGE), mode).await.expect("it is there");
            let memory = file.restart_memory(MemoryUse::Stale).await.expect("in memory");
            let memory = memory.expect("a killed server left it");
            change(memory.words(), &mut input);
        }
        let before = look(&host).await;
        let unclean = is_unclean(&host).await;
        let Ok(disk) = open(host).await else {
            assert!(!untouched);
            return;
        };
        // A writer repairs refcounts first if it is told to, and may then refuse what a reader cannot judge.
        if let Some(before) = before.filter(|_| !unclean)
            && let Ok(after) = disk.read(0, IoBuf::zeroed(before.len())).await
        {
            assert!(*before == *after, "who only reads sees something else");
        }
        for (offset, byte) in [(0, 1), (4096, 2), (8192, 3)] {
            match disk.read(offset, IoBuf::zeroed(4096)).await {
                Ok(data) => assert!(!untouched || *data == [byte; 4096]),
                Err(_) => assert!(!untouched),
            }
        }
        let _ = disk.write(4000, IoBuf::copy_of(&[9; 5000])).await;
        let _ = disk.flush().await;
        let _ = disk.close().await;
    });
}

/// What who only reads sees of the disk, if it can be opened and read.
async fn look(host: &MemoryHost) -> Option<IoBuf> {
    let disk = Disk::open(host.clone(), Path::new(IMAGE), &OpenOptions::new()).await.ok()?;
    disk.read(0, IoBuf::zeroed(disk.size() as usize)).await.ok()
}

/// Whether the log says that refcounts may be wrong.
async fn is_unclean(host: &MemoryHost) -> bool {
    let file = host.open(Path::new(IMAGE), OpenMode::default()).await.expect("it is there");
    let memory = file.restart_memory(MemoryUse::Stale).await.expect("in memory");
    memory.is_some_and(|memory| memory.words()[UNCLEAN].load(Relaxed) != 0)
}

fn change(words: &[AtomicU64], input: &mut &[u8]) {
    if input.is_empty() {
        return;
    }
    let [mode] = take(input);
    if mode & 1 != 0 {
        put_items(words, input);
    }
    while !input.is_empty() {
        let [place, bit, how] = take(input);
        // The numbers at the start, and some of the first items.
        let Some(word) = words.get(usize::from(place) % 64) else { return };
        match how % 4 {
            0 => word.store(word.load(Relaxed) ^ 1 << (bit % 64), Relaxed),
            1 => word.store(u64::from(bit), Relaxed),
            2 => word.store(u64::MAX - u64::from(bit), Relaxed),
            _ => word.store(u64::from_le_bytes(take(input)), Relaxed),
        }
    }
}

/// A log of items from the input: 1 is a mapping, 2 are bytes at a place.
fn put_items(words: &[AtomicU64], input: &mut &[u8]) {
    let id = words[ID].load(Relaxed);
    let [count] = take(input);
    let mut position = 0_u64;
    for _ in 0..count % 8 {
        let [kind, place, high, low, length] = take(input);
        let (kind, numbers, bytes) = if kind % 2 == 1 {
            // The flag of a copied cluster, an offset in clusters, and flags below.
            let entry = (u64::from(high) << 56 | u64::from(low) << 12).swap_bytes();
            (1, vec![u64::from(place), entry, 0], Vec::new())
        } else {
            let length = usize::from(length).min(input.len());
            let (bytes, rest) = input.split_at(length);
            *input = rest;
            let at = u64::from(place) << 9 | u64::from(high) << 48 | u64::from(low);
            (2, vec![at, length as u64], bytes.to_vec())
        };
        let mut sum = Crc32c::default();
        for number in [id, position].iter().chain(&numbers) {
            sum.update(&number.to_le_bytes());
        }
        sum.update(&bytes);
        let mut content = numbers;
        content.extend(bytes.chunks(8).map(|chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            u64::from_le_bytes(word)
        }));
        let length = 1 + content.len() as u64;
        let head = u64::from(sum.finish()) << 32 | length << 8 | kind;
        for (word, value) in
            words[ITEMS + position as usize..].iter().zip([head].iter().chain(&content))
        {
            word.store(*value, Relaxed);
        }
        position += length;
    }
    words[ENTRIES].store(0, Relaxed);
    words[BYTES].store(0, Relaxed);
    words[END].store(position, Relaxed);
}

/// The log as it was, items in place of it, and words that are changed.
pub(crate) fn valid_inputs() -> Vec<Vec<u8>> {
    vec![
        Vec::new(),
        vec![0],
        vec![1, 3, 1, 1, 0x80, 9, 0, 2, 80, 0, 0, 8, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 0x80, 20, 0],
        vec![1, 1, 2, 1, 0, 0, 16, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
        vec![0, 6, 1, 0],
        vec![0, 8, 0, 3, 1, 2, 3, 4, 5, 6, 7, 8],
    ]
}
