//! Random requests, many at once, on chains of every kind, against a model and `qemu-img check`.

use crate::common::{guest_memory, make};
use futures_executor::block_on;
use futures_util::future::join_all;
use isobath_disk::encryption::Secret;
use isobath_disk::{
    Disk, DiskError, MetadataMode, NewDisk, NewEncryption, OpenOptions, ZeroFlags, create,
};
use isobath_qcow2::{CompressionType, NewImage};
use isobath_storage::IoBuf;
use isobath_storage::memory::MemoryHost;
use isobath_storage_test::any::{AnyHost, ToAny};
use isobath_testkit::{args, model::Model, qemu, seed::Seed};
use rand::rngs::StdRng;
use rand::{Rng, RngExt};
use std::path::Path;
use std::time::Duration;

fn random_image(rng: &mut StdRng, size: u64) -> NewImage {
    let mut image = NewImage::new(size);
    image.version = if rng.random_bool(0.2) { 2 } else { 3 };
    image.cluster_bits = rng.random_range(9..=17);
    if image.version == 3 {
        image.refcount_order = rng.random_range(0..=6);
        image.extended_l2 = rng.random_bool(0.4);
        if image.extended_l2 {
            image.cluster_bits = rng.random_range(14..=17);
        }
        if rng.random_bool(0.5) {
            image.compression_type = CompressionType::Zstd;
        }
    }
    image
}

/// The password of encrypted images.
const PASSWORD: &[u8] = b"correct horse";

async fn open(host: &MemoryHost, name: &str, metadata: MetadataMode) -> Disk<AnyHost> {
    let options = OpenOptions::new().writable(true).map_cache(64 << 10).metadata(metadata);
    let options = options.secrets(Secret::new(PASSWORD.to_vec()).unwrap());
    Disk::open(host.any(), Path::new(name), &options).await.unwrap()
}

/// A range of a few bytes or of many clusters, aligned or not.
fn range(rng: &mut StdRng, size: u64) -> (u64, u64) {
    let most: u64 = if rng.random_bool(0.2) { 1 << 20 } else { 1 << 14 };
    let mut offset = rng.random_range(0..size);
    let mut length = rng.random_range(1..=most);
    if rng.random_bool(0.6) {
        let unit: u64 = 1 << rng.random_range(9..=16);
        offset = offset / unit * unit;
        length = length.next_multiple_of(unit);
    }
    (offset, length.min(size - offset))
}

/// Writes from memory of the disk's own, or of a guest's, who changes it as soon as the request is done.
async fn write(
    disk: &Disk<AnyHost>,
    at: u64,
    bytes: Vec<u8>,
    shared: bool,
) -> Result<(), DiskError> {
    let buf = if shared { guest_memory(bytes) } else { IoBuf::from(bytes) };
    let address = buf.as_ptr();
    let mut buf = disk.write(at, buf).await?;
    if shared {
        assert_eq!(buf.as_ptr(), address, "a write returns its own buffer");
    }
    buf.fill(0xdd);
    Ok(())
}

/// Requests that do not overlap, so that the model knows their outcome, issued together.
async fn burst(disk: &Disk<AnyHost>, model: &mut Model, rng: &mut StdRng, v2_overlay: bool) {
    let encrypted = disk.layers().next().unwrap().is_encrypted();
    let mut taken: Vec<(u64, u64)> = Vec::new();
    let mut writes = Vec::new();
    let mut zeroes = Vec::new();
    let mut discards = Vec::new();
    let mut compressed = Vec::new();
    let mut reads = Vec::new();
    let cluster = u64::from(disk.preferred_block()).max(1 << 17);
    for _ in 0..rng.random_range(1..12) {
        let (mut offset, mut length) = range(rng, disk.size());
        let kind = rng.random_range(0..100);
        if kind >= 90 {
            // Discards and compressed writes act on whole clusters.
            offset = offset / cluster * cluster;
            length = length.next_multiple_of(cluster).min(disk.size() - offset);
        }
        if taken.iter().any(|(o, l)| offset < o + l && *o < offset + length) {
            continue;
        }
        taken.push((offset, length));
        match kind {
            0..50 => {
                let mut bytes = vec![0; length as usize];
                rng.fill_bytes(&mut bytes);
                if rng.random_bool(0.2) {
                    bytes.fill(rng.random());
                }
                model.write(offset, &bytes);
                writes.push(write(disk, offset, bytes, rng.random_bool(0.5)));
            }
            50..70 => {
                model.fill(offset, length, 0);
                let flags = ZeroFlags { may_unmap: rng.random(), only_fast: false };
                zeroes.push(disk.write_zeroes(offset, length, flags));
            }
            70..90 => {
                let expected = model.read(offset, length as usize);
                let shared = rng.random_bool(0.5);
                reads.push(async move {
                    let bytes = vec![0xee; length as usize];
                    let buf = if shared { guest_memory(bytes) } else { IoBuf::from(bytes) };
                    let address = buf.as_ptr();
                    let read = disk.read(offset, buf).await.unwrap();
                    assert_eq!(read.as_ptr(), address, "a read returns its own buffer");
                    (offset, expected, read)
                });
            }
            90..95 if !v2_overlay => {
                model.fill(offset, length, 0);
                discards.push(disk.discard(offset, length));
            }
            _ if encrypted => {
                let refused = disk.write_compressed(offset, IoBuf::zeroed(length as usize)).await;
                let refused = refused.unwrap_err().to_string();
                assert!(refused.contains("Compression and encryption not supported"), "{refused}");
            }
            _ => {
                let mut bytes = vec![rng.random(); length as usize];
                let noise = bytes.len().min(700);
                rng.fill_bytes(&mut bytes[..noise]);
                model.write(offset, &bytes);
                compressed.push((offset, bytes));
            }
        }
    }
    let compress = compressed.into_iter().map(|(offset, bytes)| async move {
        let size = disk.layers().next().unwrap().header().unwrap().cluster_bits;
        for (n, part) in bytes.chunks(1 << size).enumerate() {
            let at = offset + ((n as u64) << size);
            disk.write_compressed(at, IoBuf::copy_of(part)).await.unwrap();
        }
    });
    let flush = rng.random_bool(0.5);
    let (written, zeroed, discarded, _, read, flushed) = futures_util::join!(
        join_all(writes),
        join_all(zeroes),
        join_all(discards),
        join_all(compress),
        join_all(reads),
        async { if flush { disk.flush().await } else { Ok(()) } },
    );
    for result in written {
        result.unwrap();
    }
    for result in zeroed.into_iter().chain(discarded) {
        result.unwrap();
    }
    flushed.unwrap();
    for (offset, expected, bytes) in read {
        assert!(expected == *bytes, "a read of {} at {offset} differs", expected.len());
    }
}

async fn compare(disk: &Disk<AnyHost>, model: &Model) {
    let mut at = 0;
    while at < disk.size() {
        let length = (disk.size() - at).min(1 << 20);
        let bytes = disk.read(at, IoBuf::zeroed(length as usize)).await.unwrap();
        if let Err(mismatch) = model.check_range(at, &bytes) {
            panic!("{mismatch}");
        }
        at += length;
    }
}

/// QEMU finds the image in order, and reads the same from the chain. `encrypted` says which of its images are, the
/// active one first.
fn assert_agreed(host: &MemoryHost, name: &str, encrypted: &[bool], model: &Model) {
    let directory = tempfile::tempdir().unwrap();
    for file in host.names() {
        std::fs::write(directory.path().join(&file), host.contents(&file).unwrap()).unwrap();
    }
    let image = directory.path().join(name);
    let password = directory.path().join("password");
    std::fs::write(&password, PASSWORD).unwrap();
    let secret = format!("secret,id=s,file={}", password.display());
    let secrets = encrypted.iter().enumerate().filter(|(_, encrypted)| **encrypted);
    let secrets =
        secrets.map(|(depth, _)| format!(",{}encrypt.key-secret=s", "backing.".repeat(depth)));
    let secrets: String = secrets.collect();
    let named = format!("driver=qcow2,file.filename={}{secrets}", image.display());
    let checked = args!["check", "-q", "--object", &secret, "--image-opts", &named];
    let _ = qemu::img(checked).ok();
    let raw = directory.path().join("raw");
    let converted =
        args!["convert", "-q", "--object", &secret, "--image-opts", &named, "-O", "raw", &raw];
    let _ = qemu::img(converted).ok();
    if let Err(mismatch) = model.check(&std::fs::read(&raw).unwrap()) {
        panic!("QEMU reads otherwise: {mismatch}");
    }
}

/// Makes an image, encrypted or not.
async fn make_image(host: &MemoryHost, name: &str, image: &NewImage, encrypted: bool) {
    if !encrypted {
        return make(host, name, image).await;
    }
    let mut new = NewDisk::new(image.size)
        .cluster_size(1 << image.cluster_bits)
        .version(image.version)
        .refcount_bits(1 << image.refcount_order)
        .extended_l2(image.extended_l2)
        .open_backing(false);
    new.backing_file = image.backing_file.clone();
    new.backing_format = image.backing_format.clone();
    let mut encryption = NewEncryption::new(Secret::new(PASSWORD.to_vec()).unwrap());
    encryption.options.iter_time = Duration::from_millis(1);
    new.encryption = Some(encryption);
    create(&host.any(), Path::new(name), &new).await.unwrap();
}

/// `encrypts` is the share of images that are encrypted.
async fn history(seed: u64, rng: &mut StdRng, encrypts: f64) {
    let mut encrypted = Vec::new();
    let host = MemoryHost::new();
    let size = rng.random_range(1..64 << 11) * 512;
    let mut model = Model::new(size);
    let depth = rng.random_range(1..=4);
    let mut below: Option<(String, &str)> = None;
    if rng.random_bool(0.3) {
        let length = rng.random_range(1..=size as usize);
        let mut bytes = vec![0; length];
        rng.fill_bytes(&mut bytes);
        host.insert("base.raw", &bytes);
        model = Model::from_bytes(&bytes);
        below = Some(("base.raw".into(), "raw"));
    }
    for layer in 0..depth {
        let top = layer + 1 == depth;
        let shown = if top { size } else { rng.random_range(1..=size / 512) * 512 };
        let mut image = random_image(rng, shown);
        if let Some((file, format)) = &below {
            image.backing_file = Some(file.clone());
            image.backing_format = Some((*format).into());
        }
        model.resize(shown);
        let name = format!("layer{layer}.qcow2");
        encrypted.insert(0, rng.random_bool(encrypts));
        let modes = [
            MetadataMode::Auto,
            MetadataMode::Ordered,
            MetadataMode::Journal,
            MetadataMode::Embedded,
        ];
        // The log needs version 3, and nothing is embedded in ciphertext.
        let usable = if image.version == 2 { 2 } else { 4 - usize::from(encrypted[0]) };
        let modes = &modes[..usable];
        let metadata = modes[rng.random_range(0..modes.len())];
        println!("seed {seed} layer {layer} {image:?}, {metadata:?}, encrypted: {}", encrypted[0]);
        make_image(&host, &name, &image, encrypted[0]).await;
        let v2_overlay = image.version == 2 && below.is_some();
        for _ in 0..rng.random_range(1..=2) {
            let disk = open(&host, &name, metadata).await;
            for _ in 0..rng.random_range(1..15) {
                burst(&disk, &mut model, rng, v2_overlay).await;
            }
            compare(&disk, &model).await;
            disk.close().await.unwrap();
            assert_agreed(&host, &name, &encrypted, &model);
        }
        let disk = open(&host, &name, metadata).await;
        compare(&disk, &model).await;
        below = Some((name, "qcow2"));
    }
}

#[test]
fn concurrent_random_requests_agree_with_the_model() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    for _ in 0..24 {
        block_on(history(seed.value(), &mut rng, 0.0));
    }
}

#[test]
fn requests_on_encrypted_chains_agree_with_the_model() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    for _ in 0..15 {
        block_on(history(seed.value(), &mut rng, 0.6));
    }
}
