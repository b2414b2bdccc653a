//! Files that the operator gives in place of those that an image's header names.

use crate::live::Live;
use crate::programs::{isobath, qemu_img};
use crate::serving::{ISOBATH, QemuIo, Served};
use isobath_testkit::process::{Finished, run};
use isobath_testkit::{args, qemu};
use serde_json::json;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

const SIZE: usize = 1 << 20;

/// The image `top` with something of its own, whose header names `base`, and `other`: another raw disk.
fn laid_out() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    fs::write(path.join("base"), vec![0x11; SIZE]).unwrap();
    fs::write(path.join("other"), vec![0x22; SIZE]).unwrap();
    overlay(path, "top", "base", "raw");
    let _ = qemu::io(&path.join("top"), "qcow2", &["write -P 0x33 0 64k"]).ok();
    directory
}

fn overlay(directory: &Path, name: &str, backing: &str, format: &str) {
    let create = args!["create", "-q", "-u", "-f", "qcow2", "-b", backing, "-F", format, name];
    let _ = qemu_img(directory, [create, args![SIZE.to_string()]].concat()).ok();
}

/// What `top` shows if the bytes below it are these.
fn over(below: u8) -> Vec<u8> {
    let mut bytes = vec![below; SIZE];
    bytes[..64 << 10].fill(0x33);
    bytes
}

/// The options for QEMU that give `top` the backing file `other`.
const OTHER: &str = "driver=qcow2,file.filename=top,backing.driver=raw,backing.file.filename=other";

/// A command for `top`, with `other` below it.
fn given(command: &str, rest: impl AsRef<[OsString]>) -> Vec<OsString> {
    let mut given = args![command, "--backing-file", "other"];
    given.extend_from_slice(rest.as_ref());
    given
}

#[test]
fn commands_read_an_image_over_the_backing_file_that_is_given() {
    let directory = laid_out();
    let path = directory.path();
    let before = fs::read(path.join("top")).unwrap();
    let isobath = |arguments: Vec<OsString>| isobath(path, arguments);
    let bytes = |name: &str| fs::read(path.join(name)).unwrap();
    let _ = isobath(given("convert", args!["-O", "raw", "top", "copy"])).ok();
    let _ = qemu_img(path, args!["convert", "--image-opts", "-O", "raw", OTHER, "qemus"]).ok();
    assert!(bytes("copy") == over(0x22) && bytes("qemus") == over(0x22));
    let _ = isobath(given("dd", args!["if=top", "of=copied"])).ok();
    assert!(bytes("copied") == over(0x22));
    let map = isobath(given("map", args!["--output=json", "top"])).json();
    assert!(map == qemu_img(path, args!["map", "--output=json", "--image-opts", OTHER]).json());
    let measured = isobath(given("measure", args!["-O", "qcow2", "--output=json", "top"])).json();
    let qemus = args!["measure", "-O", "qcow2", "--output=json", "--image-opts", OTHER];
    assert_eq!(measured, qemu_img(path, qemus).json());
    let read = "read -P 0x22 64k 64k";
    let read = ["-r", "-c", read, "-c", "close", "-c", "open -r top", "-c", read];
    let _ = isobath(given("io", [read.map(Into::into).to_vec(), args!["top"]].concat())).ok();
    let _ = isobath(given("bench", args!["-q", "-c", "1", "top"])).ok();
    let info = isobath(given("info", args!["--backing-chain", "--output=json", "top"])).json();
    assert_eq!((&info[1]["filename"], &info[1]["format"]), (&json!("other"), &json!("raw")));
    let two = isobath(given("compare", args!["top", "top"])).exits(2);
    assert!(two.stderr.contains("for one image"), "{}", two.report());
    assert!(bytes("top") == before);
}

#[test]
fn commands_write_to_an_image_over_the_backing_file_that_is_given() {
    let directory = laid_out();
    let path = directory.path();
    let isobath = |arguments: Vec<OsString>| isobath(path, arguments).ok();
    let shown = |expected: &[u8]| {
        let _ = qemu_img(path, args!["convert", "--image-opts", "-O", "raw", OTHER, "copy"]).ok();
        assert!(fs::read(path.join("copy")).unwrap() == expected);
        assert_eq!(qemu::info(&path.join("top"))["backing-filename"], "base");
        qemu::assert_clean(&path.join("top"));
    };
    // A part of a cluster: the rest of it comes from below.
    let _ = isobath(given("io", args!["-c", "write -P 0x44 128k 512", "top"]));
    let mut expected = over(0x22);
    expected[128 << 10..][..512].fill(0x44);
    shown(&expected);
    let _ = isobath(given("resize", args!["-q", "top", "2M"]));
    expected.resize(2 * SIZE, 0);
    shown(&expected);
    let _ = isobath(given("amend", args!["-o", "compat=0.10", "top"]));
    shown(&expected);
    // Its contents stay, while it comes to name 'base' for what was 'other' below it.
    let _ = isobath(given("rebase", args!["-b", "base", "-F", "raw", "top"]));
    assert!(qemu::read_disk(&path.join("top"), "qcow2") == expected);
    assert!(fs::read(path.join("other")).unwrap() == vec![0x22; SIZE]);
}

#[test]
fn a_commit_writes_to_the_backing_file_that_is_given_even_below_an_untrusted_image() {
    let directory = laid_out();
    let path = directory.path();
    let untrusted = args!["--untrusted", "--backing-file-format", "raw", "top"];
    let other_base = given("commit", [args!["-b", "base"], untrusted.clone()].concat());
    let refused = isobath(path, other_base).exits(1);
    assert!(refused.stderr.contains("--untrusted"), "{}", refused.report());
    let _ = isobath(path, given("commit", &untrusted)).ok();
    assert!(fs::read(path.join("base")).unwrap() == vec![0x11; SIZE]);
    assert!(fs::read(path.join("other")).unwrap() == over(0x22));
}

/// A raw disk whose guest has made it look like an image of another file.
fn disguised(path: &Path) -> Vec<u8> {
    fs::write(path.join("secret"), vec![0x5e; SIZE]).unwrap();
    overlay(path, "disguised", "secret", "raw");
    let bytes = fs::read(path.join("disguised")).unwrap();
    let mut disk = bytes.clone();
    disk.resize(SIZE, 0);
    fs::write(path.join("disguised"), &disk).unwrap();
    disk
}

/// An overlay on a raw file whose header says that it is raw only in a name that describes the file, or not at all.
fn without_format(path: &Path, name: &str, backing: &str) {
    let create = args!["create", "-q", "-u", "-f", "qcow2", "-b", backing, "-F", "raw", name, "1M"];
    let _ = qemu_img(path, create).ok();
    let mut bytes = fs::read(path.join(name)).unwrap();
    let extension = 0xE279_2ACA_u32.to_be_bytes();
    let at = bytes.windows(4).position(|window| window == extension).unwrap();
    // Of a type that nobody knows.
    bytes[at..at + 4].copy_from_slice(&0x1234_5678_u32.to_be_bytes());
    fs::write(path.join(name), bytes).unwrap();
}

/// A name that describes a raw file.
fn description(path: &Path, name: &str) -> String {
    let file = path.join(name);
    format!(r#"json:{{"driver":"raw","file":{{"driver":"file","filename":"{}"}}}}"#, file.display())
}

#[test]
fn a_backing_file_that_is_given_has_the_format_that_the_header_names() {
    let directory = laid_out();
    let path = directory.path();
    let raw = disguised(path);
    overlay(path, "empty", "base", "raw");
    let options = "driver=qcow2,file.filename=empty,backing.file.filename=disguised";
    let described = args!["--image-opts", "-O", "raw", options, "copy"];
    let plain = args!["--backing-file", "disguised", "-O", "raw", "empty", "copy"];
    let read = |done: Finished| {
        let _ = done.ok();
        fs::read(path.join("copy")).unwrap()
    };
    assert!(read(qemu_img(path, [args!["convert"], described.clone()].concat())) == raw);
    assert!(read(isobath(path, [args!["convert"], described].concat())) == raw);
    assert!(read(isobath(path, [args!["convert"], plain.clone()].concat())) == raw);
    let info = ["--backing-chain", "--output=json", "--backing-file", "disguised", "empty"];
    let info = isobath(path, [args!["info"], info.map(Into::into).to_vec()].concat()).json();
    assert_eq!(info.as_array().unwrap().len(), 2);
    assert_eq!(info[1]["format"], "raw");
    let said = args!["convert", "--backing-file-format", "qcow2"];
    assert!(read(isobath(path, [said, plain].concat())) == vec![0x5e; SIZE]);
    without_format(path, "described", &description(path, "base"));
    let described = args!["--backing-file", "disguised", "-O", "raw", "described", "copy"];
    assert!(read(isobath(path, [args!["convert"], described].concat())) == raw);
    let info = args!["info", "--backing-chain", "--backing-file", "disguised", "described"];
    let info = isobath(path, info).ok().text();
    assert_eq!(info.matches("file format: ").count(), 2, "{info}");
}

#[test]
fn an_untrusted_image_decides_neither_on_a_given_backing_file_nor_on_what_is_below_that() {
    let directory = laid_out();
    let path = directory.path();
    let _ = disguised(path);
    let convert = |more: &[&str]| {
        let more = more.iter().map(Into::into).collect();
        let command = [args!["convert", "--untrusted", "-O", "raw"], more, args!["top", "copy"]];
        isobath(path, command.concat())
    };
    let raw = ["--backing-file", "other", "--backing-file-format", "raw"];
    let _ = convert(&raw).ok();
    assert!(fs::read(path.join("copy")).unwrap() == over(0x22));
    fs::remove_file(path.join("copy")).unwrap();
    let create = ["create", "-q", "-f", "qcow2", "-o", "data_file=data", "apart", "1M"];
    let _ = qemu_img(path, create).ok();
    for (more, told) in [
        (&raw[..2], "--backing-file-format"),
        (&["--backing-file", "disguised", "--backing-file-format", "qcow2"], "outside the directo"),
        (&["--backing-file", "apart", "--backing-file-format", "qcow2"], "does not choose"),
    ] {
        let refused = convert(more).exits(1);
        assert!(refused.stderr.contains(told), "{}", refused.report());
        assert!(!path.join("copy").exists());
    }
    let allowed = ["--backing-dir", path.to_str().unwrap()];
    let deeper = ["--backing-file", "disguised", "--backing-file-format", "qcow2"];
    let _ = convert(&[&allowed[..], &deeper].concat()).ok();
    assert!(fs::read(path.join("copy")).unwrap() == over(0x5e));
}

#[test]
fn what_the_options_for_given_files_cannot_mean_is_refused() {
    let directory = laid_out();
    let path = directory.path();
    overlay(path, "alone", "base", "raw");
    let _ = qemu_img(path, args!["rebase", "-u", "-b", "", "alone"]).ok();
    let bytes = |name: &str| fs::read(path.join(name)).unwrap();
    let before = (bytes("top"), bytes("alone"));
    let none = r#"json:{"driver":"qcow2","file":{"filename":"top"},"backing":null}"#;
    for (command, told) in [
        (given("map", args!["--no-backing", "top"]), "cannot be used with"),
        (args!["map", "--backing-file-format", "raw", "top"], "also require"),
        (args!["map", "--backing-file", "", "top"], "names no file"),
        (given("map", args!["missing"]), "No such file"),
        (given("map", args!["base"]), "no backing file"),
        (given("map", args!["alone"]), "no backing file"),
        (given("map", args![none]), "says itself what is below"),
        (given("map", args!["--image-opts", OTHER]), "cannot be used with"),
        (given("info", args!["top"]), "without --backing-chain"),
        (given("check", args!["top"]), "'check' opens no backing file"),
        (given("snapshot", args!["-c", "one", "top"]), "'snapshot' opens no backing file"),
        (given("bitmap", args!["--add", "top", "one"]), "'bitmap' opens no backing file"),
        (given("rebase", args!["-u", "-F", "raw", "top"]), "the present backing file"),
        (given("rebase", args!["-F", "raw", "top"]), "--backing-file is the present one"),
        (given("serve", args!["--no-backing", "top"]), "cannot be used with"),
        (given("serve", args!["--backing-file", "base", "top"]), "2 times for 1 images"),
        (args!["serve", "--no-backing", "top"], "requires --read-only"),
        (
            args!["serve", "--backing-file", "", "--backing-file-format", "raw", "top"],
            "for image 1, which has no --backing-file",
        ),
    ] {
        let done = isobath(path, &command);
        assert!(done.code() != 0, "{}", done.report());
        assert!(done.stderr.contains(told), "{}", done.report());
    }
    // The option was another name of convert's -B once.
    let target = given("convert", args!["-F", "raw", "-O", "qcow2", "top", "copy"]);
    let target = isobath(path, target).exits(1);
    assert!(target.stderr.contains("without backing file"), "{}", target.report());
    assert!(!path.join("copy").exists());
    assert!((bytes("top"), bytes("alone")) == before);
}

#[test]
fn a_data_file_is_refused_by_commands_that_open_none() {
    let directory = laid_out();
    let path = directory.path();
    let create = ["create", "-q", "-f", "qcow2", "-o", "data_file=data", "apart", "1M"];
    let _ = qemu_img(path, create).ok();
    let before = fs::read(path.join("apart")).unwrap();
    for (command, rest) in [
        ("info", &[][..]),
        ("info", &["--backing-chain"]),
        ("check", &[]),
        ("check", &["-r", "all"]),
        ("snapshot", &["-l"]),
        ("snapshot", &[]),
    ] {
        let mut arguments = args![command, "--data-file", "other"];
        arguments.extend(rest.iter().map(Into::into));
        arguments.push("apart".into());
        let refused = isobath(path, arguments).exits(1);
        assert!(refused.stderr.contains("leave out --data-file"), "{}", refused.report());
    }
    assert!(fs::read(path.join("apart")).unwrap() == before);
    // Where it is opened, it is the one that is given.
    fs::rename(path.join("data"), path.join("moved")).unwrap();
    let add = args!["bitmap", "--data-file", "moved", "--add", "apart", "changed"];
    let _ = isobath(path, add).ok();
    for trust in [&[][..], &["--untrusted"]] {
        let rebase = |more: Vec<OsString>| {
            let mut rebase = args!["rebase", "-u", "-f", "qcow2", "-b", "base", "-F", "raw"];
            rebase.extend(trust.iter().map(Into::into));
            rebase.extend(more);
            isobath(path, rebase)
        };
        let _ = rebase(args!["apart"]).exits(1);
        let _ = rebase(args!["--data-file", "moved", "apart"]).ok();
        let remove = args!["rebase", "-u", "-b", "", "--data-file", "moved", "apart"];
        let _ = isobath(path, remove).ok();
    }
    let mut snapshot = args!["snapshot", "--data-file", "moved", "-c", "one"];
    snapshot.push("apart".into());
    let refused = isobath(path, snapshot).exits(1);
    assert!(!refused.stderr.contains("leave out"), "{}", refused.report());
    fs::rename(path.join("moved"), path.join("data")).unwrap();
    let bitmaps = &qemu::info(&path.join("apart"))["format-specific"]["data"]["bitmaps"];
    assert_eq!(bitmaps[0]["name"], "changed");
}

#[test]
fn a_data_file_is_not_given_to_an_image_that_keeps_its_data() {
    let directory = laid_out();
    let path = directory.path();
    for (image, options) in [
        ("top", "driver=qcow2,file.filename=top,data-file.driver=file,data-file.filename=other"),
        ("base", ""),
    ] {
        let given = isobath(path, args!["map", "--data-file", "other", image]).exits(1);
        let told = "'data-file' can only be set for images with an external data file";
        assert!(given.stderr.contains(told), "{}", given.report());
        if !options.is_empty() {
            let described = args!["map", "--image-opts", options];
            let qemus = qemu_img(path, &described).exits(1).stderr.replace("qemu-img:", "isobath:");
            assert_eq!(isobath(path, &described).exits(1).stderr, qemus);
        }
    }
}

#[test]
fn links_have_qemus_options_and_their_beginnings_alone() {
    let directory = laid_out();
    let path = directory.path();
    symlink(ISOBATH, path.join("qemu-img")).unwrap();
    let link = |arguments: Vec<OsString>| {
        run(Command::new(path.join("qemu-img")).args(arguments).current_dir(path))
    };
    // What begins so are other options, too, under the name isobath.
    let chain = args!["info", "--backing", "--output=json", "top"];
    assert_eq!(link(chain.clone()).json(), qemu_img(path, chain).json());
    let benchmark = args!["bench", "--no", "-w", "-q", "-c", "1", "-f", "raw", "other"];
    let _ = qemu_img(path, &benchmark).ok();
    let _ = link(benchmark).ok();
    for option in ["--backing-file=other", "--no-backing", "--untrusted", "--data-file=other"] {
        let refused = link(args!["map", option, "top"]).exits(1);
        assert!(refused.stderr.contains("unrecognized option"), "{}", refused.report());
    }
}

/// The index describes what the headers name, and says nothing of a disk over another file.
#[test]
fn an_index_is_used_over_no_backing_file_that_is_given() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    // Their tables differ as well as their bytes.
    for (name, byte, at) in [("base", "0x11", "0"), ("other", "0x22", "512k")] {
        qemu::create(&path.join(name), "qcow2", SIZE as u64, "");
        let write = format!("write -P {byte} {at} 256k");
        let _ = qemu::io(&path.join(name), "qcow2", &[write]).ok();
    }
    overlay(path, "middle", "base", "qcow2");
    overlay(path, "top", "middle", "qcow2");
    let _ = isobath(path, args!["index", "middle"]).ok();
    let _ = isobath(path, args!["index", "top"]).ok();
    let same = |arguments: Vec<OsString>, options: &str| {
        let copy = [args!["convert", "-O", "raw"], arguments, args!["copy"]].concat();
        let _ = isobath(path, copy).ok();
        let _ =
            qemu_img(path, args!["convert", "--image-opts", "-O", "raw", options, "qemus"]).ok();
        let copies = ["copy", "qemus"].map(|name| fs::read(path.join(name)).unwrap());
        assert!(copies[0] == copies[1], "{options}");
    };
    let middle = "driver=qcow2,file.filename=middle,backing.file.filename=other";
    same(args!["--backing-file", "other", "middle"], middle);
    same(args!["--no-backing", "middle"], "driver=qcow2,file.filename=middle,backing=");
    let deeper = "driver=qcow2,file.filename=top,backing.backing.file.filename=other";
    same(args!["--image-opts", deeper], deeper);
    // What the index was made of has come to be another file.
    fs::rename(path.join("other"), path.join("base")).unwrap();
    same(args!["top"], "driver=qcow2,file.filename=top");
    let info = isobath(path, args!["info", "--no-backing", "top"]).ok();
    assert!(!info.text().contains("base"), "{}", info.report());
}

#[test]
fn a_server_takes_a_backing_file_for_each_image() {
    let directory = laid_out();
    let path = directory.path();
    overlay(path, "second", "base", "raw");
    let images = [path.join("top"), path.join("second")];
    let other = path.join("other").display().to_string();
    let files = ["--backing-file", "", "--backing-file", &other, "--backing-file-format", ""];
    let format = ["--backing-file-format", "raw"];
    let served = Served::start(&images, &[&files[..], &format].concat());
    for (export, command) in [
        ("top", "read -P 0x11 64k 64k"),
        ("second", "write -P 0x44 0 512"),
        ("second", "read -P 0x22 512 64k"),
    ] {
        QemuIo::open("raw", served.uri(export)).ok(command);
    }
    let _ = served.stop();
    assert!(fs::read(&other).unwrap() == vec![0x22; SIZE]);
    let alone = Served::start(&images, &["--no-backing", "--read-only"]);
    let read = args!["io", "-r", "-f", "raw", "-c", "read -P 0 64k 64k", alone.uri("top")];
    let _ = isobath(path, read).ok();
    let _ = alone.stop();
}

#[test]
fn a_server_takes_no_snapshot_of_a_disk_that_its_headers_do_not_lead_to() {
    let directory = laid_out();
    let path = directory.path();
    let given = |name: &str| path.join(name).display().to_string();
    let snapshot = |options: &[&str], image: &str| {
        let live = Live::start(path, image, options);
        let done = isobath(path, args!["ctl", "qmp", "snapshot", "new"]);
        let _ = live.stop();
        done
    };
    let told = |done: Finished, what: &str| {
        assert!(done.code() != 0 && done.stderr.contains(what), "{}", done.report());
        assert!(!path.join("new").exists());
    };
    told(snapshot(&["--backing-file", &given("other")], "top"), "does not name the backing file");
    // The right file, but not what the header says of it.
    overlay(path, "unlike", "other", "qcow2");
    let raw = ["--backing-file", &given("other"), "--backing-file-format", "raw"];
    told(snapshot(&raw, "unlike"), "does not name the format of the backing file");
    without_format(path, "described", &description(path, "base"));
    without_format(path, "detected", "base");
    let create = ["create", "-q", "-f", "qcow2", "-o", "data_file=data", "apart", "1M"];
    let _ = qemu_img(path, create).ok();
    fs::copy(path.join("data"), path.join("moved")).unwrap();
    told(snapshot(&["--data-file", &given("moved")], "apart"), "does not name the data file");
    let (base, data) = (given("base"), given("data"));
    for (options, image) in [
        (&["--backing-file", &base][..], "top"),
        (&["--backing-file", &base], "described"),
        (&["--backing-file", &base, "--backing-file-format", "raw"], "described"),
        (&["--backing-file", &base], "detected"),
        (&["--data-file", &data], "apart"),
    ] {
        let _ = snapshot(options, image).ok();
        fs::remove_file(path.join("new")).unwrap();
    }
}
