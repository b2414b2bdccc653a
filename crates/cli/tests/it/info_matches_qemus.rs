//! `isobath info` and `isobath snapshot -l` print what qemu-img prints, as text and as JSON.

use isobath_testkit::process::{Finished, run};
use isobath_testkit::{args, qemu};
use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

fn by(program: &Path, directory: &Path, arguments: &[&str]) -> Finished {
    run(Command::new(program).args(arguments).current_dir(directory))
}

/// Runs both programs in the directory and compares what they print, to the letter.
fn same(directory: &Path, arguments: &[&str]) -> String {
    let theirs = by(&qemu::program("qemu-img"), directory, arguments).ok();
    let ours = by(Path::new(env!("CARGO_BIN_EXE_isobath")), directory, arguments).ok();
    assert_eq!(ours.text(), theirs.text(), "{}", ours.command);
    ours.text()
}

#[test]
fn every_kind_of_image_is_described_alike() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::create_dir(at("sub")).unwrap();
    fs::write(at("raw"), vec![1; 1_000_000]).unwrap();
    // What it takes is settled now.
    File::open(at("raw")).unwrap().sync_all().unwrap();
    qemu::create(&at("plain"), "qcow2", 10 << 20, "");
    qemu::create(&at("old"), "qcow2", 1 << 40, "compat=0.10,cluster_size=2M");
    qemu::create(&at("wide"), "qcow2", 1_000_448, "refcount_bits=64,lazy_refcounts=on");
    qemu::create(&at("zstd"), "qcow2", 5 << 30, "compression_type=zstd,extended_l2=on");
    let data = format!("data_file={},data_file_raw=on", at("data").display());
    qemu::create(&at("external"), "qcow2", 1 << 20, &data);
    qemu::create_overlay(&at("top"), Path::new("plain"), "qcow2", "");
    qemu::create_overlay(&at("sub/over"), Path::new("../raw"), "raw", "");
    for name in ["first", "a name longer than its column", "né 🙂"] {
        let _ = qemu::img(args!["snapshot", "-c", name, at("old")]).ok();
        let _ = qemu::img(args!["snapshot", "-c", name, at("top")]).ok();
    }
    for bitmap in ["one", "two"] {
        let _ = qemu::img(args!["bitmap", "--add", "-g", "4k", at("top"), bitmap]).ok();
    }
    let _ = qemu::img(args!["bitmap", "--disable", at("top"), "two"]).ok();
    // Not closed: the dirty bit.
    let mut bytes = fs::read(at("wide")).unwrap();
    bytes[79] |= 1;
    fs::write(at("wide"), bytes).unwrap();
    let images = ["raw", "plain", "old", "wide", "zstd", "external", "top", "sub/over"];
    for image in images.into_iter().chain(["sub/../plain", "./plain"]) {
        for output in ["--output=human", "--output=json"] {
            same(directory.path(), &["info", output, image]);
            same(directory.path(), &["info", output, "--backing-chain", image]);
            same(directory.path(), &["info", "-U", output, image]);
        }
        same(directory.path(), &["snapshot", "-l", image]);
    }
    assert!(same(directory.path(), &["info", "-f", "raw", "plain"]).contains("format: raw"));
    assert!(same(directory.path(), &["snapshot", "-l", "old"]).contains("né"));
}

#[test]
fn under_qemus_name_an_index_is_not_shown() {
    let directory = tempfile::tempdir().unwrap();
    let ours = Path::new(env!("CARGO_BIN_EXE_isobath"));
    let link = directory.path().join("qemu-img");
    std::os::unix::fs::symlink(ours, &link).unwrap();
    qemu::create(&directory.path().join("base"), "qcow2", 1 << 20, "");
    let create = ["create", "-q", "-f", "qcow2", "-b", "base", "-F", "qcow2", "top"];
    let _ = by(&link, directory.path(), &create).ok();
    for output in ["--output=human", "--output=json"] {
        let info = ["info", "--backing-chain", output, "top"];
        let theirs = by(&qemu::program("qemu-img"), directory.path(), &info).ok().text();
        assert_eq!(by(&link, directory.path(), &info).ok().text(), theirs);
        assert!(by(ours, directory.path(), &info).ok().text().contains("direct-access"));
    }
}

#[test]
fn an_overlay_of_what_is_missing_or_loops_is_still_described() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    for (image, backing) in [("orphan", "missing"), ("self", "self"), ("odd", "nbd:localhost:1")] {
        let arguments = args!["create", "-q", "-f", "qcow2", "-u", "-b", backing, "-F", "raw"];
        let _ = qemu::img([arguments, args![at(image), "1M"]].concat()).ok();
        same(directory.path(), &["info", image]);
        same(directory.path(), &["info", "--output=json", image]);
    }
    let ours = |arguments: &[&str]| {
        let mut all = vec!["info", "--backing-chain"];
        all.extend(arguments);
        by(Path::new(env!("CARGO_BIN_EXE_isobath")), directory.path(), &all).exits(1).stderr
    };
    assert!(ours(&["orphan"]).contains("'missing': No such file or directory"));
    assert!(ours(&["odd"]).contains("Failed to connect to 'localhost:1'"));
    let arguments = args!["rebase", "-u", "-b", "self", "-F", "qcow2", at("self")];
    let _ = qemu::img(arguments).ok();
    assert!(ours(&["self"]).contains("loop"));
}

#[test]
fn what_cannot_be_described_is_refused_with_a_reason() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    qemu::create(&image, "qcow2", 1 << 20, "");
    let good = fs::read(&image).unwrap();
    let ours =
        || by(Path::new(env!("CARGO_BIN_EXE_isobath")), directory.path(), &["info", "image"]);
    for (at, byte, message) in [
        (7, 9, "version"),
        (23, 40, "cluster_bits"),
        (35, 1, "encrypted"),
        (72, 128, "incompatible_features"),
    ] {
        let mut bytes = good.clone();
        bytes[at] = byte;
        fs::write(&image, bytes).unwrap();
        let error = ours().exits(1).stderr;
        assert!(
            error.contains(message) && error.starts_with("isobath: Could not open 'image'"),
            "{error}"
        );
    }
}
