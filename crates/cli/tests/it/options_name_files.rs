//! Files that options name: parts of files, and those below an image in place of the ones that its header names.

use crate::programs::{isobath, qemu_img};
use isobath_testkit::args;
use isobath_testkit::process::Finished;
use isobath_testkit::qemu;
use std::ffi::OsString;
use std::fs;
use std::path::Path;

/// A part of the file `whole`, from 1 MiB on.
const PART: &str =
    r#"json:{"driver":"raw","offset":1048576,"size":1048576,"file":{"filename":"whole"}}"#;

fn directory() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = (1..=3_u8).flat_map(|byte| vec![byte; 1 << 20]).collect();
    fs::write(directory.path().join("whole"), bytes).unwrap();
    directory
}

/// Runs commands of qemu-io.
fn io(directory: &Path, options: &[&str], commands: &[&str]) -> Finished {
    let mut arguments = args!["io"];
    arguments.extend(options.iter().map(Into::into));
    for command in commands {
        arguments.extend(args!["-c", *command]);
    }
    isobath(directory, arguments)
}

#[test]
fn a_part_is_read_and_written_within_its_bounds() {
    let directory = directory();
    let directory = directory.path();
    let _ = io(directory, &[PART], &["read -P 2 0 1M", "write -P 9 1044480 4k", "flush"]).ok();
    let _ = io(directory, &[PART], &["write -P 9 1M 512"]).exits(1);
    let whole = fs::read(directory.join("whole")).unwrap();
    assert!(whole[..1 << 20].iter().all(|byte| *byte == 1));
    assert!(whole[(2 << 20) - 4096..2 << 20].iter().all(|byte| *byte == 9));
    assert!(whole[2 << 20..].iter().all(|byte| *byte == 3));
    let copy = args!["convert", "-O", "qcow2", PART, "copy"];
    let _ = isobath(directory, copy).ok();
    let copy = qemu::read_disk(&directory.join("copy"), "qcow2");
    assert!(copy == whole[1 << 20..2 << 20]);
}

#[test]
fn a_temporary_overlay_of_a_part_shows_it_and_leaves_it() {
    let directory = directory();
    let directory = directory.path();
    let before = fs::read(directory.join("whole")).unwrap();
    let commands = ["read -P 2 0 1M", "write -P 9 0 4k", "read -P 9 0 4k", "read -P 2 4k 4k"];
    let _ = io(directory, &["-s", PART], &commands).ok();
    assert!(fs::read(directory.join("whole")).unwrap() == before);
}

#[test]
fn a_part_is_no_place_for_a_new_image_of_another_format_nor_for_a_copy_of_its_file() {
    let directory = directory();
    let directory = directory.path();
    let before = fs::read(directory.join("whole")).unwrap();
    for command in [
        args!["create", "-f", "vdi", PART, "1M"],
        args!["convert", "-f", "raw", "-O", "vpc", "whole", PART],
        args!["convert", "-U", "-n", "-f", "raw", "-O", "raw", "whole", PART],
    ] {
        let _ = isobath(directory, command).exits(1);
    }
    assert!(fs::read(directory.join("whole")).unwrap() == before);
    assert_eq!(fs::read_dir(directory).unwrap().count(), 1);
}

/// A base and another with other bytes, and an overlay of the first.
fn overlay(directory: &Path) {
    for (name, byte) in [("base", 4), ("other", 5)] {
        fs::write(directory.join(name), vec![byte; 1 << 20]).unwrap();
    }
    let _ =
        isobath(directory, args!["create", "-f", "qcow2", "-b", "base", "-F", "raw", "top"]).ok();
}

#[test]
fn an_image_shows_the_backing_file_that_options_name() {
    let directory = directory();
    let directory = directory.path();
    overlay(directory);
    let other = "driver=qcow2,file.filename=top,backing.driver=raw,backing.file.filename=other";
    let none = r#"json:{"driver":"qcow2","file":{"filename":"top"},"backing":null}"#;
    for options in [&["--image-opts", other][..], &["-s", "--image-opts", other]] {
        let _ = io(directory, options, &["read -P 5 0 1M"]).ok();
    }
    for options in [&[none][..], &["-s", none]] {
        let _ = io(directory, options, &["read -P 0 0 1M"]).ok();
    }
    let _ = io(directory, &["top"], &["read -P 4 0 1M"]).ok();
    // The index is of the chain by the headers' names.
    let _ = isobath(directory, args!["index", "top"]).ok();
    let _ = io(directory, &["--image-opts", other], &["read -P 5 0 1M"]).ok();
    let alone = "driver=qcow2,file.filename=alone,backing.driver=raw,backing.file.filename=other";
    let _ = isobath(directory, args!["create", "-f", "qcow2", "alone", "1M"]).ok();
    let refused = io(directory, &["--image-opts", alone], &["read 0 512"]).exits(1);
    assert!(refused.stderr.contains("no backing file"), "{}", refused.report());
}

#[test]
fn a_commit_goes_to_the_backing_file_that_options_name() {
    let directory = directory();
    let directory = directory.path();
    overlay(directory);
    let _ = io(directory, &["top"], &["write -P 6 0 64k"]).ok();
    let other = "driver=qcow2,file.filename=top,backing.driver=raw,backing.file.filename=other";
    let _ = isobath(directory, args!["commit", "--image-opts", other]).ok();
    let bytes = |name: &str| fs::read(directory.join(name)).unwrap();
    assert!(bytes("base").iter().all(|byte| *byte == 4));
    assert!(bytes("other")[..64 << 10].iter().all(|byte| *byte == 6));
    assert!(bytes("other")[64 << 10..].iter().all(|byte| *byte == 5));
}

#[test]
fn an_image_writes_to_the_data_file_that_options_name() {
    let directory = directory();
    let directory = directory.path();
    let create = args!["create", "-f", "qcow2", "-o", "data_file=data", "image", "1M"];
    let _ = isobath(directory, create).ok();
    fs::copy(directory.join("data"), directory.join("moved")).unwrap();
    let moved = "driver=qcow2,file.filename=image,data-file.driver=file,data-file.filename=moved";
    let commands = ["write -P 8 0 64k", "read -P 8 0 64k"];
    let _ = io(directory, &["--image-opts", moved], &commands).ok();
    assert!(fs::read(directory.join("data")).unwrap().iter().all(|byte| *byte == 0));
    assert!(fs::read(directory.join("moved")).unwrap()[..64 << 10].iter().all(|byte| *byte == 8));
    let _ = io(directory, &["-s", "--image-opts", moved], &["read 0 512"]).exits(1);
}

#[test]
fn commands_that_read_no_data_check_the_data_file_that_options_name() {
    let directory = directory();
    let directory = directory.path();
    let create = args!["create", "-q", "-f", "qcow2", "-o", "data_file=data", "apart", "1M"];
    let _ = qemu_img(directory, create).ok();
    let _ = qemu_img(directory, args!["create", "-q", "-f", "qcow2", "own", "1M"]).ok();
    fs::rename(directory.join("data"), directory.join("moved")).unwrap();
    for image in ["apart", "own"] {
        let files: &[_] = if image == "own" { &["moved"] } else { &["moved", "gone"] };
        for file in files {
            let options = format!("driver=qcow2,file.filename={image},data-file.filename={file}");
            for command in
                [&["info"][..], &["info", "--backing-chain"], &["check"], &["snapshot", "-l"]]
            {
                let mut arguments: Vec<OsString> = command.iter().map(Into::into).collect();
                arguments.extend(args!["--image-opts", &options]);
                let ours = isobath(directory, arguments.clone());
                let theirs = qemu_img(directory, arguments);
                assert_eq!(ours.code(), theirs.code(), "{}{}", ours.report(), theirs.report());
                assert_eq!(ours.stderr, theirs.stderr.replace("qemu-img:", "isobath:"));
            }
        }
    }
}
