//! Images of other programs, made by QEMU, are read as QEMU reads them, alone and below qcow2 images.

use crate::programs::{isobath, qemu_img};
use isobath_testkit::seed::Seed;
use isobath_testkit::{args, qemu};
use rand::RngExt;
use rand::rngs::StdRng;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

/// An image to make: its format, the options of `qemu-img`, and whether it can be detected.
type Kind = (&'static str, String, bool);

/// A format with random options.
fn random_kind(rng: &mut StdRng) -> Kind {
    let pick = |rng: &mut StdRng, list: &[&str]| list[rng.random_range(0..list.len())].to_owned();
    match rng.random_range(0..5) {
        0 => {
            let subformat = pick(
                rng,
                &[
                    "monolithicSparse",
                    "monolithicFlat",
                    "twoGbMaxExtentSparse",
                    "twoGbMaxExtentFlat",
                    "streamOptimized",
                ],
            );
            let zeroed = if subformat.ends_with("Sparse") && rng.random() { "on" } else { "off" };
            ("vmdk", format!("subformat={subformat},zeroed_grain={zeroed}"), true)
        }
        1 => ("vdi", format!("static={}", pick(rng, &["on", "off"])), true),
        2 => {
            let block = 1u64 << rng.random_range(20..26);
            let subformat = pick(rng, &["dynamic", "fixed"]);
            ("vhdx", format!("subformat={subformat},block_size={block}"), true)
        }
        3 => {
            let subformat = pick(rng, &["dynamic", "fixed"]);
            let forced = pick(rng, &["on", "off"]);
            let detected = subformat == "dynamic";
            ("vpc", format!("subformat={subformat},force_size={forced}"), detected)
        }
        _ => {
            let cluster = 4096 << rng.random_range(0..8);
            // QEMU cannot open what it converts to tables of one cluster.
            let table = 1 << rng.random_range(1..5);
            ("qed", format!("cluster_size={cluster},table_size={table}"), true)
        }
    }
}

/// A disk of up to 12 MiB with data, zeroes and nothing in places that suit no format.
fn random_disk(rng: &mut StdRng, path: &Path) {
    let size = rng.random_range(1..=12 << 11) * 512;
    let mut disk = vec![0; size];
    for _ in 0..rng.random_range(0..12) {
        let from = rng.random_range(0..size);
        let most = 1 << rng.random_range(9..22);
        let length = rng.random_range(1..=most);
        let to = size.min(from + length);
        if rng.random() {
            rng.fill(&mut disk[from..to]);
        } else {
            disk[from..to].fill(rng.random());
        }
    }
    fs::write(path, disk).unwrap();
}

/// A new directory with the image `image` of that kind, with random contents.
fn random_image(rng: &mut StdRng, (format, options, _): &Kind) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    random_disk(rng, &directory.path().join("source"));
    let image = directory.path().join("image");
    let _ = qemu::img(args![
        "convert",
        "-f",
        "raw",
        "-O",
        *format,
        "-o",
        options,
        directory.path().join("source"),
        &image
    ])
    .ok();
    let written_in_place = !options.contains("streamOptimized");
    if written_in_place && rng.random() {
        let size = qemu::info(&image)["virtual-size"].as_u64().unwrap();
        for _ in 0..rng.random_range(1..5) {
            let at = rng.random_range(0..size / 512) * 512;
            let length = (512 * rng.random_range(1..200)).min(size - at);
            let verb = ["write -P 7", "write -z", "discard"][rng.random_range(0..3)];
            // Some formats cannot write zeroes or discard; then QEMU fails, and nothing has changed.
            drop(qemu::io(&image, format, &[format!("{verb} {at} {length}")]));
        }
    }
    directory
}

#[test]
fn random_images_are_read_as_by_qemu() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    for _ in 0..40 {
        let kind = random_kind(&mut rng);
        println!("{kind:?}");
        let (format, _, detected) = &kind;
        let directory = random_image(&mut rng, &kind);
        let directory = directory.path();
        let expected = qemu::read_disk(&directory.join("image"), format);
        let mut arguments = args!["convert", "-O", "raw"];
        let named = !detected || rng.random();
        if named {
            arguments.extend(args!["-f", *format]);
        }
        arguments.extend(args!["image", "copy"]);
        let _ = isobath(directory, arguments).ok();
        assert!(fs::read(directory.join("copy")).unwrap() == expected, "{kind:?}");
        let info = isobath(directory, args!["info", "-f", *format, "--output=json", "image"]);
        let info = info.ok().json();
        assert_eq!(info["virtual-size"], expected.len());
        assert_eq!(info["format"], *format);

        // Below a qcow2 image, which is written to.
        let _ = qemu_img(
            directory,
            args!["create", "-q", "-f", "qcow2", "-b", "image", "-F", *format, "top"],
        )
        .ok();
        let top = directory.join("top");
        let size = expected.len() as u64;
        let mut write = args!["io", "top"];
        for _ in 0..3 {
            let at = rng.random_range(0..size / 512) * 512;
            let length = (512 * rng.random_range(1..300)).min(size - at);
            write.extend(args!["-c", format!("write -P 3 {at} {length}")]);
        }
        let _ = isobath(directory, write).ok();
        qemu::assert_clean(&top);
        let _ = isobath(directory, args!["convert", "-O", "raw", "top", "topcopy"]).ok();
        assert!(fs::read(directory.join("topcopy")).unwrap() == qemu::read_disk(&top, "qcow2"));
        let _ = isobath(directory, args!["compare", "top", "topcopy"]).ok();
    }
}

#[test]
fn what_cannot_be_done_with_them_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    for format in ["vmdk", "vdi", "vhdx", "vpc", "qed"] {
        let _ = qemu_img(directory, args!["create", "-q", "-f", format, "image", "8M"]).ok();
        let writing = isobath(directory, args!["io", "-c", "write 0 512", "image"]);
        assert!(
            writing.code() != 0 && writing.stderr.contains("only read"),
            "{}",
            writing.report()
        );
        let check = isobath(directory, args!["check", "image"]).exits(63);
        assert!(check.stderr.contains("does not support checks"), "{}", check.report());
        let create =
            isobath(directory, args!["create", "-q", "-f", format, "other", "8M"]).exits(1);
        assert!(create.stderr.contains("does not support image creation"), "{}", create.report());
        assert!(!directory.join("other").exists());
    }
}

#[test]
fn images_that_need_another_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let _ = qemu_img(directory, args!["create", "-q", "-f", "raw", "base", "8M"]).ok();
    let _ = qemu_img(directory, args!["create", "-q", "-f", "vmdk", "base.vmdk", "8M"]).ok();
    for (format, base, base_format) in [("qed", "base", "raw"), ("vmdk", "base.vmdk", "vmdk")] {
        let _ = qemu_img(
            directory,
            args!["create", "-q", "-f", format, "-b", base, "-F", base_format, "image"],
        )
        .ok();
        let refused = isobath(directory, args!["convert", "-O", "raw", "image", "copy"]).exits(1);
        assert!(refused.stderr.contains("not supported"), "{}", refused.report());
    }
}

#[test]
fn random_images_written_are_read_by_qemu() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    for round in 0..16 {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        random_disk(&mut rng, &directory.join("source"));
        let source = fs::read(directory.join("source")).unwrap();
        let (format, options) = if round % 2 == 0 {
            let adapter = ["ide", "lsilogic", "buslogic", "legacyESX"][rng.random_range(0..4)];
            ("vmdk", format!("subformat=streamOptimized,adapter_type={adapter}"))
        } else {
            let block = 1_u64 << rng.random_range(20..29);
            ("vhdx", ["subformat=dynamic".to_owned(), format!("block_size={block}")].join(","))
        };
        println!("{format} {options}");
        let tasks = rng.random_range(1..4).to_string();
        let convert = args!["convert", "-m", tasks, "-f", "raw", "-O", format, "-o", options];
        let _ = isobath(directory, [convert, args!["source", "image"]].concat()).ok();
        let image = directory.join("image");
        assert!(qemu::read_disk(&image, format) == source);
        let check = qemu::img(args!["check", "-f", format, &image]).ok();
        assert!(check.text().contains("No errors"), "{}", check.report());
        let back = args!["convert", "-O", "raw", "image", "copy"];
        let _ = isobath(directory, back).ok();
        assert!(fs::read(directory.join("copy")).unwrap() == source);

        // From a chain of two disks, one after another.
        let _ = qemu_img(directory, args!["convert", "-O", "qcow2", "source", "qcow2"]).ok();
        let twice = args!["convert", "-f", "qcow2", "-O", format];
        let twice = [twice, args!["-o", "subformat=streamOptimized"]].concat();
        let twice = if format == "vmdk" { twice } else { args!["convert", "-O", format] };
        let _ = isobath(directory, [twice, args!["qcow2", "qcow2", "twice"]].concat()).ok();
        let expected = [&source[..], &source[..]].concat();
        assert!(qemu::read_disk(&directory.join("twice"), format) == expected);
    }
}

#[test]
fn what_cannot_be_written_is_refused_and_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let _ = qemu_img(directory, args!["create", "-q", "-f", "raw", "source", "8M"]).ok();
    for (wrong, says) in [
        (args!["-O", "vmdk"], "streamOptimized"),
        (args!["-O", "vmdk", "-o", "subformat=monolithicFlat"], "streamOptimized"),
        (args!["-O", "vhdx", "-o", "subformat=fixed"], "subformat=dynamic"),
        (args!["-O", "vhdx", "-o", "block_size=3M"], "power of two"),
        (args!["-O", "vhdx", "-o", "cluster_size=64k"], "Invalid parameter"),
        (args!["-O", "vhdx", "-c"], "Compression not supported"),
        (args!["-O", "vdi"], "does not support image creation"),
        (args!["-O", "qed", "-B", "source", "-F", "raw"], "does not support image creation"),
        (args!["-O", "vhdx", "-B", "source", "-F", "raw"], "Backing file not supported"),
        (args!["-O", "vhdx", "--bitmaps"], "bitmaps"),
    ] {
        let arguments = [args!["convert", "-f", "raw"], wrong, args!["source", "copy"]].concat();
        let refused = isobath(directory, arguments).exits(1);
        assert!(refused.stderr.contains(says), "{}", refused.report());
        assert!(!directory.join("copy").exists(), "{}", refused.report());
    }
}

#[test]
fn maps_agree() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    for (format, options) in [
        ("vmdk", "subformat=monolithicSparse"),
        ("vmdk", "subformat=monolithicSparse,zeroed_grain=on"),
        ("vmdk", "subformat=streamOptimized"),
        ("vdi", "static=off"),
        ("vpc", "subformat=dynamic"),
        ("qed", "cluster_size=64k,table_size=2"),
    ] {
        for _ in 0..3 {
            let kind = (format, options.to_owned(), true);
            let directory = random_image(&mut rng, &kind);
            let map = args!["map", "-f", format, "--output=json", "image"];
            let ours = isobath(directory.path(), &map).ok().json();
            let theirs = qemu_img(directory.path(), &map).ok().json();
            assert_eq!(ours, theirs, "{kind:?}");
        }
    }
}
