//! QEMU refuses an image whose journal must be replayed, says how to recover it, and takes the image
//! as before once the journal is gone.

use crate::common::{Image, patch};
use isobath_qcow2::header::field;
use isobath_qcow2::journal::JournalExtension;
use isobath_qcow2::{Extension, Header, HostOffset, IncompatibleFeatures, Lsn};
use isobath_testkit::{args, qemu};
use std::fs;
use std::path::Path;

fn first_cluster(image: &Path) -> Vec<u8> {
    let bytes = fs::read(image).unwrap();
    let length = Header::probe_length(&bytes).unwrap();
    bytes[..length].to_vec()
}

fn journal(cluster_size: u64) -> JournalExtension {
    JournalExtension {
        area_offset: HostOffset::new(8 * cluster_size),
        area_length: cluster_size.max(16 << 10),
        id: 0x0123_4567_89ab_cdef,
        first_lsn: Lsn::new(1),
    }
}

/// Sets or removes the journal, with a look by QEMU after each write.
fn edit(image: &Path, journal: Option<&JournalExtension>, look: impl Fn()) {
    for (at, bytes) in Header::edit_journal(&first_cluster(image), journal).unwrap() {
        patch(image, at as u64, &bytes);
        look();
    }
}

fn set_bits(image: &Path, bits: IncompatibleFeatures) {
    patch(image, field::INCOMPATIBLE_FEATURES as u64, &bits.bits().to_be_bytes());
}

#[test]
fn the_bit_keeps_qemu_out_by_its_name_until_it_is_cleared() {
    let directory = tempfile::tempdir().unwrap();
    let base = directory.path().join("base");
    fs::write(&base, vec![7; 1 << 20]).unwrap();
    for (n, options) in [
        "",
        "cluster_size=512",
        "cluster_size=4096",
        "cluster_size=8192,lazy_refcounts=on",
        "cluster_size=2M",
        "extended_l2=on,compression_type=zstd",
    ]
    .into_iter()
    .enumerate()
    {
        let image = directory.path().join(n.to_string());
        qemu::create_overlay(&image, &base, "raw", options);
        let _ = qemu::io(&image, "qcow2", &["write -P 9 4096 8192"]).ok();
        if n % 2 == 0 {
            // Something behind the feature name table.
            let _ = qemu::img(args!["bitmap", "--add", &image, "b"]).ok();
        }
        let disk = qemu::read_disk(&image, "qcow2");
        let before = Image::read(&image).header;
        let cluster_size = before.geometry().unwrap().cluster_size();
        let mut grown = None;
        for round in 0..2 {
            edit(&image, Some(&journal(cluster_size)), || {
                assert!(qemu::read_disk(&image, "qcow2") == disk);
            });
            set_bits(&image, before.incompatible.with(IncompatibleFeatures::JOURNAL));
            let header = Image::read(&image).header;
            assert_eq!(header.journal(), Some(&journal(cluster_size)));
            for refused in [
                qemu::check(&image),
                qemu::img(args!["check", "-r", "all", "-f", "qcow2", &image]),
                qemu::io(&image, "qcow2", &["read 0 512"]),
                qemu::img(args!["convert", "-O", "raw", &image, directory.path().join("raw")]),
            ] {
                assert_eq!(refused.code(), 1, "{}", refused.report());
                let text = "feature(s): journal; run 'isobath check -r all IMAGE'";
                assert!(refused.stderr.trim_end().ends_with(text), "{}", refused.report());
            }
            set_bits(&image, before.incompatible);
            edit(&image, None, || qemu::assert_clean(&image));
            qemu::assert_clean(&image);
            assert_eq!(qemu::info(&image)["backing-filename"], base.to_str().unwrap());
            assert!(qemu::read_disk(&image, "qcow2") == disk);
            let bytes = first_cluster(&image);
            let used = bytes.iter().rposition(|byte| *byte != 0);
            assert_eq!(*grown.get_or_insert(used), used, "round {round}");
            let mut after = Header::parse(&bytes).unwrap();
            let mut before = before.clone();
            for header in [&mut before, &mut after] {
                header.extensions.retain(|e| !matches!(e, Extension::FeatureNames(_)));
            }
            assert_eq!(after, before);
        }
        // QEMU writes the header anew, and leaves nothing of ours.
        let _ = qemu::img(args!["rebase", "-u", "-b", &base, "-F", "raw", &image]).ok();
        let mut extensions = [before, Image::read(&image).header].map(|header| header.extensions);
        for extensions in &mut extensions {
            // It moves the bitmaps.
            extensions.retain(|extension| !matches!(extension, Extension::Bitmaps(_)));
        }
        assert_eq!(extensions[0], extensions[1]);
        let _ = qemu::io(&image, "qcow2", &["write -P 5 0 512"]).ok();
        qemu::assert_clean(&image);
    }
}
