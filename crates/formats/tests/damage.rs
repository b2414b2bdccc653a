//! Images made by QEMU, with bytes changed: nothing panics or takes without bound, and what is accepted here reads as
//! it does in QEMU, or QEMU refuses it.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by a panic")]

use futures_executor::block_on;
use isobath_formats::{Error, Format, Image};
use isobath_storage::memory::MemoryHost;
use isobath_storage::{Host, IoBuf, OpenMode};
use isobath_testkit::seed::Seed;
use isobath_testkit::{args, qemu};
use rand::RngExt;
use rand::rngs::StdRng;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const KINDS: [(Format, &str); 12] = [
    (Format::Vmdk, "subformat=monolithicSparse"),
    (Format::Vmdk, "subformat=monolithicSparse,zeroed_grain=on"),
    (Format::Vmdk, "subformat=streamOptimized"),
    (Format::Vmdk, "subformat=monolithicFlat"),
    (Format::Vmdk, "subformat=twoGbMaxExtentSparse"),
    (Format::Vdi, "static=off"),
    (Format::Vhdx, "subformat=dynamic,block_size=1M"),
    (Format::Vhdx, "subformat=fixed,block_size=2M"),
    (Format::Vpc, "subformat=dynamic"),
    (Format::Vpc, "subformat=fixed,force_size=on"),
    (Format::Qed, "cluster_size=4096,table_size=2"),
    (Format::Qed, "cluster_size=1M,table_size=16"),
];

/// Disks up to this size are read as a whole.
const WHOLE: u64 = 64 << 20;

/// The disk, if it can be read; of a large one only some parts, and then `None`.
async fn read(host: &MemoryHost, format: Format, name: &Path) -> Result<Option<Vec<u8>>, Error> {
    let open = async |name: &Path| host.open(name, OpenMode::default()).await.map(Arc::new);
    let image = Image::open(format, name, open(name).await?, async |extent: &str| {
        let path = PathBuf::from(extent);
        let file = open(&path).await?;
        Ok::<_, Error>((path, file))
    })
    .await?;
    let size = image.size();
    assert!(size.is_multiple_of(512));
    if size > WHOLE {
        for at in [0, size / 2, size - (1 << 20)] {
            let run = image.run(at, size - at).await?;
            assert!(run.length > 0 && run.length <= size - at);
            image.read(at, IoBuf::zeroed(1 << 20)).await?;
        }
        return Ok(None);
    }
    let mut disk = Vec::new();
    while (disk.len() as u64) < size {
        let length = (1 << 20).min(size - disk.len() as u64);
        disk.extend_from_slice(
            &image.read(disk.len() as u64, IoBuf::zeroed(length as usize)).await?,
        );
    }
    Ok(Some(disk))
}

fn sum(bytes: &[u8], at: usize) -> u32 {
    let sum = |bytes: &[u8]| bytes.iter().fold(0_u32, |sum, byte| sum + u32::from(*byte));
    !(sum(bytes) - sum(&bytes[at..at + 4]))
}

fn crc(bytes: &[u8]) -> u32 {
    let parts: [&[u8]; 3] = [&bytes[..4], &[0; 4], &bytes[8..]];
    parts.into_iter().fold(0, crc32c::crc32c_append)
}

/// Makes the checksums right again, so that the damage is not only found by them.
fn seal(format: Format, bytes: &mut [u8]) {
    match format {
        Format::Vhdx if bytes.len() > 320 << 10 => {
            for (at, length) in [(64, 4), (128, 4), (192, 64), (256, 64)] {
                let part = &mut bytes[at << 10..][..length << 10];
                let crc = crc(part);
                part[4..8].copy_from_slice(&crc.to_le_bytes());
            }
        }
        Format::Vpc if bytes.len() > 2048 => {
            let end = bytes.len() - 512;
            for (at, length, field) in [(0, 512, 64), (512, 1024, 36), (end, 512, 64)] {
                let part = &mut bytes[at..at + length];
                if part.starts_with(b"c") {
                    let sum = sum(part, field);
                    part[field..field + 4].copy_from_slice(&sum.to_be_bytes());
                }
            }
        }
        _ => {}
    }
}

/// Places of bytes that are not zero, and not those of the disk's data.
fn places(bytes: &[u8]) -> Vec<usize> {
    let filled = |(at, sector): (usize, &[u8])| {
        let data = sector.iter().map(|byte| u32::from(*byte == 0xda)).sum::<u32>() > 16;
        let used = sector.iter().any(|byte| *byte != 0) && !data;
        used.then(|| at * 64..(at * 64 + sector.len()))
    };
    bytes.chunks(64).enumerate().filter_map(filled).flatten().collect()
}

fn damage(rng: &mut StdRng, bytes: &mut Vec<u8>, places: &[usize]) {
    for _ in 0..rng.random_range(1..4) {
        let at = places[rng.random_range(0..places.len())].min(bytes.len() - 1);
        let end = (at + rng.random_range(1..=8)).min(bytes.len());
        match rng.random_range(0..5) {
            0 => bytes[at] ^= 1 << rng.random_range(0..8),
            1 => bytes[at] = rng.random(),
            2 => bytes[at..end].fill(if rng.random() { 0xff } else { 0 }),
            3 => {
                let from = places[rng.random_range(0..places.len())].min(bytes.len() - 8);
                let from = from..(from + end - at).min(bytes.len());
                bytes.copy_within(from, at);
            }
            _ if rng.random_bool(0.2) => bytes.truncate(at.max(1024)),
            _ => {}
        }
    }
}

#[test]
fn damaged_images_read_as_in_qemu_or_are_refused() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    let (mut accepted, mut refused) = (0, 0);
    for (format, options) in KINDS {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let mut disk = vec![0; 5 << 19];
        for _ in 0..4 {
            let from = rng.random_range(0..disk.len());
            let to = disk.len().min(from + rng.random_range(1..400_000));
            // Recognized as data, and different everywhere.
            let bytes = (from..to).map(|at| if at % 2 == 0 { 0xda } else { (at >> 9) as u8 });
            disk.splice(from..to, bytes);
        }
        fs::write(at("source"), disk).unwrap();
        let made = args!["convert", "-f", "raw", "-O", format.name(), "-o", options, at("source")];
        let _ = qemu::img([made, args![at("image")]].concat()).ok();
        fs::remove_file(at("source")).unwrap();
        let host = MemoryHost::new();
        for file in fs::read_dir(directory.path()).unwrap() {
            let path = file.unwrap().path();
            host.insert(path.file_name().unwrap(), &fs::read(&path).unwrap());
        }
        let names = host.names();
        for round in 0..25 {
            let host = host.deep_copy();
            let name = &names[rng.random_range(0..names.len())];
            let mut bytes = host.contents(name).unwrap();
            if round > 0 {
                let places = places(&bytes);
                if places.is_empty() {
                    continue;
                }
                damage(&mut rng, &mut bytes, &places);
                if rng.random_bool(0.9) {
                    seal(format, &mut bytes);
                }
            }
            host.insert(name, &bytes);
            let ours = match block_on(read(&host, format, Path::new("image"))) {
                Ok(ours) => ours,
                Err(error) => {
                    assert!(round > 0, "{format:?} {options}: {error}");
                    refused += 1;
                    continue;
                }
            };
            accepted += 1;
            let Some(ours) = ours else { continue };
            for name in &names {
                fs::write(at(name.to_str().unwrap()), host.contents(name).unwrap()).unwrap();
            }
            let read = args!["convert", "-f", format.name(), "-O", "raw", at("image"), at("copy")];
            if qemu::img(read).code() != 0 {
                continue;
            }
            let theirs = fs::read(at("copy")).unwrap();
            if ours != theirs {
                let keep = std::env::temp_dir().join(format!("damaged-{}", seed.value()));
                fs::create_dir_all(&keep).unwrap();
                for name in &names {
                    fs::copy(at(name.to_str().unwrap()), keep.join(name)).unwrap();
                }
                let place = ours.iter().zip(&theirs).position(|(a, b)| a != b);
                panic!(
                    "{format:?} {options}, kept in {}: {} bytes here, {} in QEMU, the first that \
                     differs at {place:?}",
                    keep.display(),
                    ours.len(),
                    theirs.len()
                );
            }
        }
    }
    assert!(accepted > 100 && refused > 100, "{accepted} accepted, {refused} refused");
}
