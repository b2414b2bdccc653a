//! Everything that can be asked of an image, whatever it is.

use super::images::{BASE, IMAGE, SECRET, base};
use super::memory;
use isobath_disk::{
    CheckOptions, Disk, InfoOptions, OpenOptions, Preallocation, Repair, Result, ZeroFlags, check,
    info,
};
use isobath_qcow2::Header;
use isobath_storage::memory::MemoryHost;
use isobath_storage::{Host, IoBuf, OpenMode, Storage};
use isobath_storage_test::any::{AnyHost, ToAny};
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// What may be allocated at once for an image of a few hundred KiB: an L1 table of 32 MiB is read
/// whole, and kept in another form.
const MEMORY: usize = 160 << 20;

/// What has not ended by then hangs.
const PATIENCE: Duration = Duration::from_mins(2);

/// The size of a request.
const PIECE: u64 = 1 << 20;

/// Runs `work` on another thread; fails where it panics, hangs or takes much memory.
pub(crate) fn guarded<T: Send + 'static>(
    what: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    let (sender, receiver) = mpsc::channel();
    let worker = thread::spawn(move || {
        memory::restart();
        let value = work();
        let _ = sender.send(memory::peak());
        value
    });
    match receiver.recv_timeout(PATIENCE) {
        Ok(peak) => assert!(peak <= MEMORY, "{what}: took {} MiB of memory", peak >> 20),
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("{what}: hangs"),
        Err(mpsc::RecvTimeoutError::Disconnected) => {}
    }
    worker.join().unwrap_or_else(|_| panic!("{what}: panicked"))
}

/// A host with the image, its base, and a file that is nobody's business.
pub(crate) fn host_with(image: &[u8]) -> MemoryHost {
    let host = MemoryHost::new();
    host.insert(IMAGE, image);
    host.insert(BASE, &base());
    host.insert(SECRET, &[0x5e; 5000]);
    host
}

pub(crate) fn writable() -> OpenOptions {
    OpenOptions::new().writable(true)
}

pub(crate) async fn open(host: impl ToAny, options: &OpenOptions) -> Result<Disk<AnyHost>> {
    Disk::open(host.any(), Path::new(IMAGE), options).await
}

/// Reads the parts of a disk of which a file this large can have content; the first error.
pub(crate) async fn read_all<H: Host>(disk: &Disk<H>) -> Result<()> {
    let mut first = Ok(());
    let mut at = 0;
    let end = disk.size().min(4 << 20);
    while at < end {
        let length = (end - at).min(PIECE);
        if let Err(error) = disk.read(at, IoBuf::zeroed(length as usize)).await {
            first = first.and(Err(error));
        }
        at += length;
    }
    if let Some(tail) = disk.size().checked_sub(4096) {
        first = first.and(disk.read(tail, IoBuf::zeroed(4096)).await.map(drop));
    }
    let mut at = 0;
    while at < end {
        match disk.block_status(at, end - at, 256).await {
            Ok(runs) => at += runs.iter().map(|run| run.length).sum::<u64>().max(1),
            Err(error) => {
                first = first.and(Err(error));
                at += 4096;
            }
        }
    }
    first
}

/// Writes to a disk in every way; the first error.
pub(crate) async fn write_all<H: Host>(disk: Disk<H>) -> Result<()> {
    let size = disk.size();
    let mut first = Ok(());
    let mut note = |result: Result<()>| first = std::mem::replace(&mut first, Ok(())).and(result);
    let unmap = ZeroFlags { may_unmap: true, only_fast: false };
    for (n, offset) in
        [0, 5000, 20_000, 70_000, 300_000, size.saturating_sub(9000)].into_iter().enumerate()
    {
        if offset + 9000 > size {
            continue;
        }
        note(disk.write(offset, IoBuf::copy_of(&[n as u8; 9000])).await.map(drop));
        note(disk.write_zeroes(offset + 3000, 5000, unmap).await);
        note(disk.discard(offset, 9000).await);
        note(disk.write(offset + 4000, IoBuf::copy_of(&[n as u8; 3])).await.map(drop));
        note(disk.flush().await);
    }
    let cluster =
        disk.layers().next().and_then(|layer| layer.header()).map(|h| 1 << h.cluster_bits);
    if let Some(cluster) = cluster.filter(|cluster| *cluster <= size) {
        let data = IoBuf::copy_of(&vec![3; cluster as usize]);
        note(disk.write_compressed(0, data).await.map(drop));
    }
    note(disk.write_zeroes(0, size.min(8 << 20), ZeroFlags::default()).await);
    note(disk.resize(size.saturating_add(102_400).min(1 << 40), Preallocation::Off, false).await);
    note(disk.close().await);
    first
}

/// Does everything to an image. What fails must say so in words, with the image's name; other files
/// stay as they are, and an image that had a header keeps one.
pub(crate) fn survive(what: &str, image: &[u8]) {
    let bytes = image.to_vec();
    let messages = guarded(what, move || {
        futures_executor::block_on(async {
            let mut errors = Vec::new();
            let mut note = |result: Result<()>| errors.extend(result.err().map(|e| e.to_string()));
            let host = host_with(&bytes);
            note(info(&host.any(), Path::new(IMAGE), &InfoOptions::default()).await.map(drop));
            match open(host.clone(), &OpenOptions::default()).await {
                Ok(disk) => note(read_all(&disk).await),
                Err(error) => note(Err(error)),
            }
            let after = start_of(&host, bytes.len()).await;
            assert!(after == bytes, "a read-only open changed the image");
            let checks = [Repair::None, Repair::Leaks, Repair::All];
            for repair in checks {
                let host = host_with(&bytes);
                let options = CheckOptions { repair, ..CheckOptions::default() };
                note(check(&host.any(), Path::new(IMAGE), &options, &mut |_| {}).await.map(drop));
                unharmed(&host);
            }
            let host = host_with(&bytes);
            match open(host.clone(), &writable()).await {
                Ok(disk) => note(write_all(disk).await),
                Err(error) => note(Err(error)),
            }
            unharmed(&host);
            if Header::parse(&bytes).is_ok() {
                let after = start_of(&host, bytes.len().max(1 << 16)).await;
                assert!(Header::parse(&after).is_ok(), "the header was overwritten");
            }
            errors
        })
    });
    for message in messages {
        // QEMU's words, of what is raw; and of a disk whose first error named the image.
        let known =
            message.contains("does not support checks") || message.contains("earlier failure");
        assert!(known || message.contains("image.qcow2"), "{what}: no image in: {message}");
        let plain = !message.contains(|c: char| c.is_control());
        assert!(plain, "{what}: control characters in: {message:?}");
    }
}

/// Nothing happened to the other files.
pub(crate) fn unharmed(host: &MemoryHost) {
    assert!(host.contents(SECRET).unwrap() == [0x5e; 5000], "another file was changed");
    assert!(host.contents(BASE).unwrap() == base(), "the backing file was changed");
    assert_eq!(host.names().len(), 3, "files: {:?}", host.names());
}

/// The start of the image as it is now; it may have become long, and sparse.
pub(crate) async fn start_of(host: &MemoryHost, length: usize) -> Vec<u8> {
    let file = host.open(Path::new(IMAGE), OpenMode::default()).await.unwrap();
    file.read_at(0, IoBuf::zeroed(length)).await.unwrap().to_vec()
}

/// A sparse file of this length that starts with these bytes.
pub(crate) async fn lengthen(host: &MemoryHost, length: u64) {
    let mode = OpenMode { writable: true, ..OpenMode::default() };
    host.open(Path::new(IMAGE), mode).await.unwrap().set_len(length).await.unwrap();
}
