//! Headers that qemu-img writes are read as it reads them, and written as it writes them.

use crate::common::{Image, patch};
use isobath_qcow2::header::field;
use isobath_qcow2::{
    AutoclearFeatures, Bitmap, CompatibleFeatures, Extension, FeatureKind, FeatureName,
    FormatError, FormatErrorKind, Header, IncompatibleFeatures, Snapshot,
};
use isobath_testkit::process::Finished;
use isobath_testkit::{args, qemu};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Makes image `n` of many: between them they have every option, and most pairs of options.
fn create(directory: &Path, n: usize) -> std::path::PathBuf {
    let cluster_size = [512, 4096, 16384, 65536, 2 << 20][n % 5];
    let v2 = n % 6 == 5;
    let mut options = format!("cluster_size={cluster_size}");
    let mut set = |option: &str| {
        options.push(',');
        options.push_str(option);
    };
    set(if v2 { "compat=0.10" } else { "compat=1.1" });
    let backed = n / 4 % 2 == 1;
    if !v2 {
        set(&format!("refcount_bits={}", 1 << (n % 7)));
        set(if n % 2 == 1 { "lazy_refcounts=on" } else { "lazy_refcounts=off" });
        set(if n / 2 % 2 == 1 { "compression_type=zstd" } else { "compression_type=zlib" });
        if cluster_size >= 16384 && n / 3 % 2 == 1 {
            set("extended_l2=on");
        }
        let data_file = directory.join(format!("{n}.data"));
        match n / 5 % 3 {
            1 => set(&format!("data_file={}", data_file.display())),
            2 if !backed => {
                set(&format!("data_file={},data_file_raw=on", data_file.display()));
            }
            _ => {}
        }
    }
    let image = directory.join(format!("{n}.qcow2"));
    if backed {
        let base = directory.join("base");
        if !base.exists() {
            fs::write(&base, vec![7; 1 << 20]).unwrap();
        }
        qemu::create_overlay(&image, &base, "raw", &options);
    } else {
        qemu::create(&image, "qcow2", n as u64 * 51200, &options);
    }
    image
}

/// What `qemu-img info` would say of the header.
fn described(header: &Header) -> Value {
    let mut data = json!({
        "compat": if header.version == 2 { "0.10" } else { "1.1" },
        "compression-type": header.compression_type.name(),
        "refcount-bits": header.geometry().unwrap().refcount_bits(),
    });
    if header.version == 3 {
        let more = json!({
            "lazy-refcounts": header.compatible.contains(CompatibleFeatures::LAZY_REFCOUNTS),
            "corrupt": header.incompatible.contains(IncompatibleFeatures::CORRUPT),
            "extended-l2": header.incompatible.contains(IncompatibleFeatures::EXTENDED_L2),
        });
        data.as_object_mut().unwrap().append(&mut more.as_object().unwrap().clone());
    }
    if header.incompatible.contains(IncompatibleFeatures::DATA_FILE) {
        data["data-file"] = json!(header.data_file().unwrap());
        data["data-file-raw"] = json!(header.autoclear.contains(AutoclearFeatures::DATA_FILE_RAW));
    }
    let mut info = json!({
        "virtual-size": header.disk_size(),
        "cluster-size": header.geometry().unwrap().cluster_size(),
        "dirty-flag": header.incompatible.contains(IncompatibleFeatures::DIRTY),
        "format-specific": { "type": "qcow2", "data": data },
    });
    if let Some(name) = &header.backing_file {
        info["backing-filename"] = json!(name);
        info["backing-filename-format"] = json!(header.backing_format().unwrap());
    }
    info
}

/// What `qemu-img info` says, without what the file system or the path decide.
fn info(image: &Path) -> Value {
    let mut info = qemu::info(image);
    let object = info.as_object_mut().unwrap();
    for key in ["filename", "format", "actual-size", "full-backing-filename", "children"] {
        object.remove(key);
    }
    info
}

#[test]
fn every_option_is_read_and_written_back_byte_for_byte() {
    let directory = tempfile::tempdir().unwrap();
    for n in 0..42 {
        let path = create(directory.path(), n);
        let image = Image::read(&path);
        assert_eq!(described(&image.header), info(&path), "image {n}");
        let first = image.first_cluster();
        assert_eq!(Header::probe_length(&first[..24]), Ok(first.len()));
        assert!(image.header.encode().unwrap() == first, "image {n}");
    }
}

#[test]
fn a_header_with_more_in_it_satisfies_qemu() {
    let directory = tempfile::tempdir().unwrap();
    for n in [1, 8, 13, 23, 33] {
        let path = create(directory.path(), n);
        let mut header = Image::read(&path).header;
        header.extensions.push(Extension::Unknown { magic: 0x1357_9bdf, data: vec![5; 13] });
        if header.version == 3 {
            header.compatible = header.compatible.with(CompatibleFeatures::from_bits(1 << 40));
            header.autoclear = header.autoclear.with(AutoclearFeatures::from_bits(1 << 41));
            header.unknown_fields.extend([3; 8]);
            let name = FeatureName::new(FeatureKind::Autoclear, 41, "map index");
            for extension in &mut header.extensions {
                if let Extension::FeatureNames(table) = extension {
                    table.entries.push(name.clone());
                }
            }
        }
        let before = info(&path);
        patch(&path, 0, &header.encode().unwrap());
        assert_eq!(info(&path), before, "image {n}");
        qemu::assert_clean(&path);
        let back = Image::read(&path).header;
        header.header_length = back.header_length;
        assert_eq!(back, header, "image {n}");
    }
}

#[test]
fn qemu_rewrites_a_header_and_keeps_what_we_wrote() {
    let directory = tempfile::tempdir().unwrap();
    let path = create(directory.path(), 3);
    let mut header = Image::read(&path).header;
    let unknown = Extension::Unknown { magic: 0x1357_9bdf, data: vec![5; 13] };
    header.extensions.push(unknown.clone());
    header.unknown_fields.extend([3; 16]);
    patch(&path, 0, &header.encode().unwrap());
    let base = directory.path().join("new base");
    fs::write(&base, vec![7; 1 << 20]).unwrap();
    let _ = qemu::img(args!["rebase", "-u", "-b", &base, "-F", "raw", &path]).ok();
    let image = Image::read(&path);
    assert_eq!(image.header.backing_file.as_deref(), base.to_str());
    assert_eq!(image.header.unknown_fields, header.unknown_fields);
    assert!(image.header.extensions.contains(&unknown));
    assert!(image.header.encode().unwrap() == image.first_cluster());
}

#[test]
fn backing_is_changed_as_qemu_reads_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = create(directory.path(), 3);
    let base = directory.path().join("b");
    fs::write(&base, vec![7; 1 << 20]).unwrap();
    let name = base.to_str().unwrap().to_owned();
    let mut header = Image::read(&path).header;
    header.set_backing(Some((name.clone(), Some("raw".into()))));
    patch(&path, 0, &header.encode().unwrap());
    assert_eq!(info(&path)["backing-filename"], json!(name));
    assert_eq!(info(&path)["backing-filename-format"], json!("raw"));
    assert!(Image::read(&path).header.encode().unwrap() == Image::read(&path).first_cluster());
    header.set_backing(None);
    patch(&path, 0, &header.encode().unwrap());
    assert_eq!(info(&path).get("backing-filename"), None);
}

/// QEMU times the key's derivation by the processor time that the kernel has accounted, and gives up
/// where that says zero: so it does now and then on fast processors, and is asked again.
fn create_encrypted(path: &Path, method: &str) {
    // Or QEMU hashes the secret for two seconds.
    let time = if method == "luks" { ",encrypt.iter-time=1" } else { "" };
    let options = format!("encrypt.format={method},encrypt.key-secret=s{time}");
    let secret = "secret,id=s,data=geheim";
    let made = args!["create", "-q", "-f", "qcow2", "--object", secret, "-o", options, path, "1M"];
    let _ = qemu::img(made).ok();
}

#[test]
fn the_encryption_header_of_a_luks_image_is_found() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("luks");
    create_encrypted(&path, "luks");
    let bytes = fs::read(&path).unwrap();
    let header = Header::parse(&bytes).unwrap();
    let (offset, length) = header.encryption().unwrap();
    assert_eq!(&bytes[offset.get() as usize..][..6], b"LUKS\xba\xbe");
    assert!(offset.get() + length <= bytes.len() as u64);
    assert!(header.encode().unwrap() == bytes[..1 << header.cluster_bits]);
}

#[test]
fn images_with_the_broken_method_are_refused_by_its_name() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("aes");
    create_encrypted(&path, "aes");
    let error = Header::parse(&fs::read(&path).unwrap()).unwrap_err();
    assert_eq!(error.kind(), FormatErrorKind::Encrypted);
    assert!(error.to_string().contains("AES"), "{error}");
}

/// Values that stand at limits, or far beyond them.
const ODD: [u64; 12] =
    [0, 1, 3, 7, 22, 104, 1024, 65537, (1 << 22) + 1, 1 << 31, 1 << 56, u64::MAX];

/// What QEMU says of a file, and what is said here. QEMU reads the snapshot table on opening; here
/// whoever opens the file does.
fn verdicts(path: &Path, bytes: &[u8]) -> (Finished, Result<(), FormatError>) {
    fs::write(path, bytes).unwrap();
    let qemu = qemu::img(args!["info", "-f", "qcow2", path]);
    let ours = Header::parse(bytes).and_then(|header| {
        let table = bytes.get(header.snapshots_offset.get() as usize..).unwrap_or_default();
        Snapshot::parse_table(table, header.nb_snapshots)
    });
    (qemu, ours.map(|_| ()))
}

#[test]
fn what_qemu_refuses_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("i.qcow2");
    qemu::create(&path, "qcow2", 4 << 20, "cluster_size=4096");
    let _ = qemu::img(args!["snapshot", "-c", "s", &path]).ok();
    let good = fs::read(&path).unwrap();
    let fields = [
        (4, 4),
        (8, 8),
        (16, 4),
        (20, 4),
        (field::SIZE, 8),
        (32, 4),
        (field::L1_SIZE, 4),
        (field::L1_TABLE_OFFSET, 8),
        (field::REFCOUNT_TABLE_OFFSET, 8),
        (field::REFCOUNT_TABLE_CLUSTERS, 4),
        (field::NB_SNAPSHOTS, 4),
        (field::SNAPSHOTS_OFFSET, 8),
        (field::INCOMPATIBLE_FEATURES, 8),
        (field::COMPATIBLE_FEATURES, 8),
        (field::AUTOCLEAR_FEATURES, 8),
        (96, 4),
        (100, 4),
        (104, 1),
        (112, 4),
        (116, 4),
    ];
    let (mut refused, mut stricter) = (0, BTreeSet::new());
    for (offset, width) in fields {
        for value in ODD.into_iter().filter(|&v| width == 8 || v < 1 << (8 * width)) {
            let mut bytes = good.clone();
            bytes[offset..offset + width].copy_from_slice(&value.to_be_bytes()[8 - width..]);
            let (qemu, ours) = verdicts(&path, &bytes);
            if qemu.code() != 0 {
                refused += 1;
                assert!(ours.is_err(), "byte {offset} = {value:#x}: QEMU: {}", qemu.stderr);
            } else if let Err(error) = ours {
                stricter.insert(error.field().to_owned());
            }
        }
    }
    assert!(refused > 80, "{refused}");
    // Tables over tables, names over headers, tables past the file's end, encryption, and a raw data file where
    // there is none, which QEMU refuses only where it would read.
    let expected = [
        "autoclear_features",
        "backing_file_offset",
        "crypt_method",
        "l1_table_offset",
        "refcount_table_offset",
        "snapshot table",
        "snapshots_offset",
    ];
    assert_eq!(stricter, expected.map(str::to_owned).into());
}

#[test]
fn extensions_that_qemu_refuses_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("i.qcow2");
    qemu::create(&path, "qcow2", 4 << 20, "cluster_size=4096");
    let good = fs::read(&path).unwrap();
    let mut refused = 0;
    for magic in [0xe279_2aca_u32, 0x6803_f857, 0x2385_2875, 0x0537_be77, 0x4441_5441, 7] {
        for length in [0u32, 1, 15, 16, 24, 100, 3968, 3977] {
            let mut bytes = good.clone();
            bytes[112..116].copy_from_slice(&magic.to_be_bytes());
            bytes[116..120].copy_from_slice(&length.to_be_bytes());
            bytes[120..136].fill(b'x');
            let (qemu, ours) = verdicts(&path, &bytes);
            refused += u32::from(qemu.code() != 0);
            assert_eq!(qemu.code() != 0, ours.is_err(), "{magic:#x} {length}: {}", qemu.stderr);
        }
    }
    assert!(refused > 15, "{refused}");

    fs::write(&path, &good).unwrap();
    let _ = qemu::img(args!["bitmap", "--add", &path, "b"]).ok();
    let good = fs::read(&path).unwrap();
    let magic = 0x2385_2875_u32.to_be_bytes();
    let at = 8 + good.windows(4).position(|bytes| bytes == magic).unwrap();
    let mut refused = 0;
    for (offset, width) in [(0, 4), (4, 4), (8, 8), (16, 8)] {
        for value in ODD.into_iter().filter(|&v| width == 8 || v < 1 << (8 * width)) {
            let mut bytes = good.clone();
            let field = at + offset..at + offset + width;
            bytes[field].copy_from_slice(&value.to_be_bytes()[8 - width..]);
            let (qemu, ours) = verdicts(&path, &bytes);
            // QEMU reads the directory too.
            let ours = ours.and_then(|()| {
                let bitmaps = *Header::parse(&bytes)?.bitmaps().unwrap();
                let start = bitmaps.directory_offset.get() as usize;
                let end = start.saturating_add(bitmaps.directory_size as usize);
                let directory = bytes.get(start..end).unwrap_or_default();
                Bitmap::parse_directory(directory, bitmaps.count)
            });
            refused += u32::from(qemu.code() != 0);
            if qemu.code() != 0 {
                assert!(ours.is_err(), "byte {offset} = {value:#x}: QEMU: {}", qemu.stderr);
            }
        }
    }
    assert!(refused > 15, "{refused}");
}
