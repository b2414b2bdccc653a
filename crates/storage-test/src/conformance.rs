//! Requirements for every host, however it stores the bytes.
//!
//! For tests: a violation panics.

#![allow(clippy::unwrap_used, reason = "a check fails by a panic")]

use futures_util::future::join;
use isobath_storage::{Host, IoBuf, Locking, OpenMode, Storage, StorageExt, ZeroMode};
use std::io::ErrorKind;
use std::path::Path;

/// For writing, with locks.
pub const WRITABLE: OpenMode =
    OpenMode { writable: true, direct: false, locking: Locking::Exclusive };
/// For reading, with locks.
pub const READ_ONLY: OpenMode =
    OpenMode { writable: false, direct: false, locking: Locking::Exclusive };

async fn read(file: &impl Storage, offset: u64, length: usize) -> Vec<u8> {
    let mut buf = IoBuf::zeroed(length);
    buf.fill(0xEE);
    file.read_at(offset, buf).await.unwrap().to_vec()
}

/// Bytes that identify their offset and the generation of the write.
fn pattern(offset: u64, length: usize, generation: u64) -> Vec<u8> {
    (offset..offset + length as u64)
        .map(|at| (at.wrapping_mul(31) ^ (at >> 9) ^ generation.wrapping_mul(97)) as u8 | 1)
        .collect()
}

/// Runs every check on files in `directory`; `direct` requests `O_DIRECT`.
pub async fn check<H: Host>(host: &H, directory: &Path, direct: bool) {
    let writable = OpenMode { direct, ..WRITABLE };
    let read_only = OpenMode { direct, ..READ_ONLY };
    let name = directory.join("image");

    opening(host, &name, writable, read_only).await;
    let file = host.create(&name, writable).await.unwrap();
    lengths(&file).await;
    expected_lengths(&file).await;
    edges(&file).await;
    zeroes(&file).await;
    holes(&file).await;
    overlap(&file).await;
    against_a_model(&file).await;
    refused(&file).await;
    drop(file);

    let file = host.open(&name, read_only).await.unwrap();
    assert!(file.is_read_only());
    let before = file.len().await.unwrap();
    assert!(file.write_at(0, IoBuf::copy_of(b"x")).await.is_err());
    assert!(file.write_zeroes(0, 512, ZeroMode::default()).await.is_err());
    assert!(file.discard(0, 512).await.is_err());
    assert!(file.set_len(1).await.is_err());
    assert_eq!(file.len().await.unwrap(), before);
    drop(file);
    removing(host, &name, writable).await;
    host.remove(&name).await.unwrap();
    assert_eq!(host.open(&name, read_only).await.err().unwrap().kind(), ErrorKind::NotFound);
    assert_eq!(host.remove(&name).await.err().unwrap().kind(), ErrorKind::NotFound);
}

async fn opening<H: Host>(host: &H, name: &Path, writable: OpenMode, read_only: OpenMode) {
    let error = host.open(name, writable).await.err().unwrap();
    assert_eq!(error.errno(), libc::ENOENT);
    assert!(error.to_string().contains(&name.display().to_string()), "{error}");

    let file = host.create(name, writable).await.unwrap();
    assert_eq!((file.name(), file.is_read_only()), (name, false));
    assert!(file.extends_with_zeroes());
    // The file that is found is the one that is opened.
    let found = host.find(name).unwrap();
    assert!(found.is_none_or(|found| found == file.id()), "{found:?}");
    file.write_at(0, IoBuf::copy_of(b"kept")).await.unwrap();
    for mode in [writable, read_only] {
        let error = host.open(name, mode).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::ResourceBusy);
        assert!(error.to_string().contains("\"write\" lock"), "{error}");
        assert!(error.to_string().contains("Is another process using the image"), "{error}");
    }
    assert!(host.create(name, writable).await.is_err(), "a locked file is not truncated");
    assert_eq!(read(&file, 0, 4).await, b"kept");
    let unlocked = OpenMode { locking: Locking::Unlocked, ..read_only };
    let other = host.open(name, unlocked).await.unwrap();
    assert_eq!(other.id(), file.id());
    assert_eq!(read(&other, 0, 4).await, b"kept");
    drop((file, other));

    let first = host.open(name, read_only).await.unwrap();
    let second = host.open(name, read_only).await.unwrap();
    second.flush().await.unwrap();
    assert_eq!(host.open(name, writable).await.err().unwrap().kind(), ErrorKind::ResourceBusy);
    drop((first, second));

    let id = host.open(name, read_only).await.unwrap().id();
    let spared = host.create_unlike(name, writable, &|other| other == id).await.unwrap();
    assert!(spared.is_none(), "what is not to be replaced stays");
    assert_eq!(read(&host.open(name, read_only).await.unwrap(), 0, 4).await, b"kept");
    let spared = host.create_unlike(name, writable, &|_| true).await.unwrap();
    assert!(spared.is_none(), "what is there stays");
    let fresh = name.with_file_name("fresh");
    let made = host.create_unlike(&fresh, writable, &|_| true).await.unwrap().unwrap();
    assert!(made.is_new);
    assert!(host.remove_file(&fresh, &made.file).await.unwrap());
    drop(made);
    let made = host.create_unlike(name, writable, &|_| false).await.unwrap().unwrap();
    assert!(!made.is_new);
    assert_eq!(made.file.len().await.unwrap(), 0, "creating truncates");
    drop(made);
    let file = host.create(name, writable).await.unwrap();
    assert_eq!(file.len().await.unwrap(), 0, "creating truncates");
    file.flush().await.unwrap();
}

/// A name is removed as that of an open file only while it is.
async fn removing<H: Host>(host: &H, name: &Path, writable: OpenMode) {
    let other = name.with_file_name("other");
    let file = host.create(&other, writable).await.unwrap();
    assert!(!host.remove_file(name, &file).await.unwrap());
    assert!(host.remove_file(&other, &file).await.unwrap());
    assert!(!host.remove_file(&other, &file).await.unwrap());
    let successor = host.create(&other, writable).await.unwrap();
    assert!(!host.remove_file(&other, &file).await.unwrap());
    assert!(host.remove_file(&other, &successor).await.unwrap());
}

async fn lengths(file: &impl Storage) {
    file.write_at(0, IoBuf::copy_of(&[7; 1000])).await.unwrap();
    assert_eq!(file.len().await.unwrap(), 1000, "an odd length is kept");
    assert_eq!(read(file, 990, 20).await, [[7; 10], [0; 10]].concat(), "zeroes past the end");
    assert_eq!(read(file, 1 << 40, 3).await, [0; 3]);
    assert_eq!(file.len().await.unwrap(), 1000, "reading extends nothing");

    file.set_len(500).await.unwrap();
    file.set_len(2000).await.unwrap();
    assert_eq!(read(file, 499, 3).await, [7, 0, 0], "what was cut off does not come back");
    file.write_at(5001, IoBuf::copy_of(b"!")).await.unwrap();
    assert_eq!(file.len().await.unwrap(), 5002);
    assert_eq!(read(file, 1999, 3003).await, [vec![0; 3002], vec![b'!']].concat());

    file.set_len(3 << 40).await.unwrap();
    file.write_at((3 << 40) - 1, IoBuf::copy_of(b"end")).await.unwrap();
    assert_eq!(file.len().await.unwrap(), (3 << 40) + 2);
    file.set_len(0).await.unwrap();
}

/// A hint about the length makes a file longer or leaves it alone, and changes no byte.
async fn expected_lengths(file: &impl Storage) {
    file.set_len(0).await.unwrap();
    let bytes = pattern(0, 5000, 1);
    file.write_at(0, IoBuf::copy_of(&bytes)).await.unwrap();
    for length in [0, 100, 4096, 5000] {
        file.expect_length(length).await;
        assert_eq!(file.len().await.unwrap(), 5000);
    }
    let mut model = bytes;
    for (round, length) in [70_000, 70_001, 1 << 20, 8 << 20].into_iter().enumerate() {
        file.expect_length(length).await;
        if file.extends_one_at_a_time() {
            model.resize(model.len().max(length as usize), 0);
        }
        assert_eq!(file.len().await.unwrap(), model.len() as u64);
        // Before what was there, across its end, and behind it.
        for (number, at) in [length / 2, length - 9, length + 20_000].into_iter().enumerate() {
            let piece = pattern(at, 9000, 10 * round as u64 + number as u64);
            let longer = file.expect_length(at + 5);
            let write = file.write_at(at, IoBuf::copy_of(&piece));
            let ((), written) = join(longer, write).await;
            written.unwrap();
            let end = at as usize + piece.len();
            model.resize(model.len().max(end), 0);
            model[at as usize..end].copy_from_slice(&piece);
        }
        assert_eq!(file.len().await.unwrap(), model.len() as u64);
        assert!(read(file, 0, model.len()).await == model);
    }
    file.set_len(0).await.unwrap();
    assert_eq!(file.len().await.unwrap(), 0);
}

async fn edges(file: &impl Storage) {
    assert_eq!(file.read_at(3, IoBuf::empty()).await.unwrap().len(), 0);
    file.write_at(77, IoBuf::empty()).await.unwrap();
    assert!(file.write_vectored_at(77, Vec::new()).await.unwrap().is_empty());
    file.write_zeroes(77, 0, ZeroMode::default()).await.unwrap();
    file.discard(77, 0).await.unwrap();
    assert_eq!(file.len().await.unwrap(), 0, "empty operations change nothing");

    let parts: Vec<IoBuf> =
        [&b"ab"[..], b"", b"cde", &[9; 5000]].into_iter().map(IoBuf::copy_of).collect();
    let back = file.write_vectored_at(4090, parts).await.unwrap();
    assert_eq!(back.iter().map(IoBuf::len).collect::<Vec<_>>(), [2, 0, 3, 5000]);
    assert_eq!(read(file, 4089, 8).await, [0, b'a', b'b', b'c', b'd', b'e', 9, 9]);
    assert_eq!(file.len().await.unwrap(), 4090 + 5005);

    let many: Vec<IoBuf> = (0..3000_u32).map(|n| IoBuf::copy_of(&n.to_be_bytes())).collect();
    file.write_vectored_at(1, many).await.unwrap();
    let bytes = read(file, 1, 12_000).await;
    assert!(bytes.chunks(4).zip(0..).all(|(chunk, n): (_, u32)| chunk == n.to_be_bytes()));

    let mut rest = IoBuf::copy_of(&[b"?".repeat(13), b"inner".to_vec()].concat());
    drop(rest.split_to(13));
    file.write_at(20_000, rest).await.unwrap();
    assert_eq!(read(file, 20_000, 5).await, b"inner", "memory need not be aligned");
    file.set_len(0).await.unwrap();
}

async fn zeroes(file: &impl Storage) {
    for (round, may_unmap) in [false, true].into_iter().enumerate() {
        for only_fast in [false, true] {
            let mode = ZeroMode { may_unmap, only_fast };
            file.set_len(0).await.unwrap();
            let data = pattern(0, 300_000, round as u64);
            file.write_at(0, IoBuf::copy_of(&data)).await.unwrap();
            for (offset, length) in
                [(1000, 200_000_u64), (4096, 8192), (299_999, 1), (290_000, 20_000)]
            {
                match file.write_zeroes(offset, length, mode).await {
                    Err(error) if only_fast => assert_eq!(error.kind(), ErrorKind::Unsupported),
                    result => {
                        result.unwrap();
                        assert_eq!(
                            read(file, offset, length as usize).await,
                            vec![0; length as usize]
                        );
                    }
                }
            }
            assert_eq!(read(file, 0, 1000).await, data[..1000]);
            assert_eq!(read(file, 201_000, 80_000).await, data[201_000..281_000]);
            if !only_fast {
                assert_eq!(file.len().await.unwrap(), 310_000, "zeroes extend the file");
            }
        }
    }
    file.set_len(0).await.unwrap();
    file.write_zeroes(10_000, 10_000, ZeroMode { may_unmap: true, only_fast: false })
        .await
        .unwrap();
    assert_eq!(file.len().await.unwrap(), 20_000);
    assert_eq!(read(file, 0, 20_000).await, vec![0; 20_000]);

    file.write_at(0, IoBuf::copy_of(&vec![3; 20_000])).await.unwrap();
    file.discard(4096, 4096).await.unwrap();
    file.discard(19_000, 9000).await.unwrap();
    assert_eq!(file.len().await.unwrap(), 20_000, "a discard never changes the length");
    assert_eq!(read(file, 0, 4096).await, [3; 4096]);
    assert_eq!(read(file, 8192, 10_000).await, [3; 10_000]);
    file.set_len(0).await.unwrap();
}

async fn holes(file: &impl Storage) {
    file.set_len(10 << 20).await.unwrap();
    file.write_at(2 << 20, IoBuf::copy_of(&vec![1; 1 << 20])).await.unwrap();
    let mut at = 0;
    let mut data = Vec::new();
    while at < 10 << 20 {
        let run = file.allocation(at).await.unwrap();
        assert!(run.length > 0 && at + run.length <= 10 << 20);
        if run.data {
            data.push(at..at + run.length);
        }
        at += run.length;
    }
    for wanted in [2 << 20, (3 << 20) - 1] {
        assert!(data.iter().any(|run| run.contains(&wanted)), "{wanted} in {data:?}");
    }
    let inside = file.allocation((2 << 20) + 5).await.unwrap();
    assert!(inside.data);
    assert_eq!(file.allocation(10 << 20).await.unwrap().length, 0);
    assert_eq!(file.allocation(1 << 50).await.unwrap().length, 0);
    file.set_len(0).await.unwrap();
}

/// Concurrent writes that share blocks: none overwrites another's bytes.
async fn overlap(file: &impl Storage) {
    let mut writes: Vec<_> = (0..200_u64)
        .map(|n| {
            let offset = n * 100;
            Box::pin(file.write_at(offset, IoBuf::copy_of(&pattern(offset, 100, 5))))
        })
        .collect();
    std::future::poll_fn(|context| {
        writes.retain_mut(|write| match write.as_mut().poll(context) {
            std::task::Poll::Ready(result) => {
                result.unwrap();
                false
            }
            std::task::Poll::Pending => true,
        });
        if writes.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    assert_eq!(read(file, 0, 20_000).await, pattern(0, 20_000, 5));
    assert_eq!(file.len().await.unwrap(), 20_000);
    file.set_len(0).await.unwrap();
}

async fn against_a_model(file: &impl Storage) {
    let mut state = 0x5EED_u64;
    let mut next = move |below: u64| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let mut model: Vec<u8> = Vec::new();
    for step in 0..400 {
        let unit = [1, 512, 4096][next(3) as usize];
        let offset = next(150_000) / unit * unit;
        let length = (1 + next(30_000)).div_ceil(unit) * unit;
        let end = (offset + length) as usize;
        match next(10) {
            0..=4 => {
                let bytes = pattern(offset, length as usize, step);
                if model.len() < end {
                    model.resize(end, 0);
                }
                model[offset as usize..end].copy_from_slice(&bytes);
                file.write_at(offset, IoBuf::copy_of(&bytes)).await.unwrap();
            }
            5 | 6 => {
                if model.len() < end {
                    model.resize(end, 0);
                }
                model[offset as usize..end].fill(0);
                let mode = ZeroMode { may_unmap: step % 2 == 0, only_fast: false };
                file.write_zeroes(offset, length, mode).await.unwrap();
            }
            7 => {
                model.resize(offset as usize, 0);
                file.set_len(offset).await.unwrap();
            }
            8 => file.flush().await.unwrap(),
            _ => {
                let mut wanted = model.get(offset as usize..).unwrap_or_default().to_vec();
                wanted.resize(length as usize, 0);
                assert!(read(file, offset, length as usize).await == wanted, "step {step}");
            }
        }
        assert_eq!(file.len().await.unwrap(), model.len() as u64, "step {step}");
    }
    assert!(read(file, 0, model.len()).await == model);
}

async fn refused(file: &impl Storage) {
    for offset in [u64::MAX, i64::MAX as u64] {
        let error = file.write_at(offset, IoBuf::copy_of(b"xy")).await.unwrap_err();
        assert_eq!(error.range, Some((offset, 2)), "{error}");
        assert!(file.read_at(offset, IoBuf::zeroed(2)).await.is_err());
        assert!(file.write_zeroes(offset, 2, ZeroMode::default()).await.is_err());
        assert!(file.discard(offset, 2).await.is_err());
    }
    assert!(file.set_len(u64::MAX).await.is_err());
}
