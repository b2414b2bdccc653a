//! Zeroes that are written to an overlay are the overlay's, whatever is below it then or later.

use crate::serving::ISOBATH;
use isobath_testkit::process::{Finished, run_program};
use isobath_testkit::{args, qemu};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// A disk that ends within a cluster.
const SIZE: u64 = (1 << 20) + 5 * 512;

fn isobath(arguments: Vec<OsString>) -> Finished {
    run_program(ISOBATH, arguments)
}

/// Does to an image what the commands of `qemu-io` say. Some of them are refused.
fn io(image: &Path, commands: &[&str]) {
    let mut arguments = args!["io", "-f", "qcow2"];
    arguments.extend(commands.iter().flat_map(|command| args!["-c", command]));
    arguments.push(image.into());
    let _ = isobath(arguments);
}

/// The bytes of an overlay above a disk of ones.
fn above_ones(overlay: &Path) -> Vec<u8> {
    let ones = overlay.with_file_name("ones.raw");
    fs::write(&ones, vec![1; SIZE as usize]).unwrap();
    let _ = qemu::img(args!["rebase", "-u", "-b", &ones, "-F", "raw", overlay]).ok();
    qemu::read_disk(overlay, "qcow2")
}

/// Base images that read as zeroes in different ways, and one with data here and there.
fn bases(directory: &Path) -> Vec<(PathBuf, &'static str)> {
    let at = |name: &str| directory.join(name);
    qemu::create(&at("empty.qcow2"), "qcow2", SIZE, "");
    qemu::create(&at("short.qcow2"), "qcow2", 192 << 10, "");
    qemu::create(&at("zero.qcow2"), "qcow2", SIZE, "");
    let _ = qemu::io(&at("zero.qcow2"), "qcow2", &[format!("write -z 0 {SIZE}")]).ok();
    qemu::create(&at("hole.raw"), "raw", SIZE, "");
    fs::write(at("written.raw"), vec![0; SIZE as usize]).unwrap();
    qemu::create(&at("some.qcow2"), "qcow2", SIZE, "");
    let some = ["write -P 9 0 512", "write -P 9 70k 3k", "write -P 9 256k 64k", "write -P 9 1M 5b"];
    let _ = qemu::io(&at("some.qcow2"), "qcow2", &some.map(|c| c.replace("5b", "2560"))).ok();
    let formats =
        ["empty.qcow2", "short.qcow2", "zero.qcow2", "hole.raw", "written.raw", "some.qcow2"];
    formats.map(|name| (at(name), if name.ends_with("raw") { "raw" } else { "qcow2" })).into()
}

/// What is done to an overlay.
const WRITES: &[&[&str]] = &[
    &["write -z 0 64k"],
    &["write -z -u 0 64k"],
    &["write -z 512 512"],
    &["write -z -u 1k 3k"],
    &["write -z 60k 8k"],
    &["write -z 60k 80k", "write -z -u 252k 72k"],
    &["write -z 1M 2560"],
    &["write -z -u 1049088 2048", "write -z 1049088 512"],
    &["write -z 1000k 27136"],
    &["write -z 100 3000"],
    &["write -P 5 128k 4k", "write -z 130k 1k", "write -z -u 128k 4k", "write -z 140k 4k"],
    &["write -c -P 5 128k 64k", "write -z 130k 1k", "write -z 140k 2k"],
    &["write -P 5 0 64k", "discard 0 64k", "write -z 1k 1k"],
    &["discard 0 64k", "discard 128k 100k", "discard 1M 2560"],
    &["write 0 64k", "write -P 0 300k 1k", "aio_write -z 400k 10k", "aio_flush"],
];

/// Does to each image, in one run of a program that is `qemu-io` or like it, one of the things in `WRITES`. Some are
/// refused.
fn write_all(program: &Path, images: &[PathBuf]) {
    let mut arguments = if program == Path::new(ISOBATH) { args!["io"] } else { args![] };
    for (writes, image) in WRITES.iter().zip(images) {
        let open = format!("open -t unsafe -o driver=qcow2 {}", image.display());
        let commands = [open.as_str()].into_iter().chain(writes.iter().copied()).chain(["close"]);
        arguments.extend(commands.flat_map(|command| args!["-c", command]));
    }
    let done = run_program(program, arguments);
    assert!(!done.report().contains("no file open"), "{}", done.report());
}

/// The bytes of disks, of `SIZE` each, as QEMU reads them.
fn read_disks(images: &[PathBuf]) -> Vec<Vec<u8>> {
    let directory = tempfile::tempdir().unwrap();
    let raw = directory.path().join("raw");
    let mut convert = args!["convert", "-f", "qcow2", "-O", "raw"];
    convert.extend(images.iter().map(OsString::from));
    convert.push(raw.as_path().into());
    let _ = qemu::img(convert).ok();
    let bytes = fs::read(raw).unwrap();
    assert_eq!(bytes.len() as u64, images.len() as u64 * SIZE);
    bytes.chunks(SIZE as usize).map(<[u8]>::to_vec).collect()
}

#[test]
fn what_an_overlay_has_after_zero_writes_is_what_it_has_in_qemu() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let ones = at("ones.qcow2");
    qemu::create(&ones, "qcow2", SIZE, "");
    let _ = qemu::io(&ones, "qcow2", &[format!("write -P 1 0 {SIZE}")]).ok();
    for (base, format) in bases(directory.path()) {
        let few = !base.ends_with("some.qcow2") && !base.ends_with("hole.raw");
        let options: &[_] =
            if few { &["compat=1.1"] } else { &["compat=1.1", "compat=0.10", "extended_l2=on"] };
        let before = fs::read(&base).unwrap();
        for options in options {
            let new = at("new.qcow2");
            let make =
                args!["create", "-q", "-f", "qcow2", "-b", &base, "-F", format, "-o", options];
            let _ = qemu::img(make.into_iter().chain(args![&new, SIZE.to_string()])).ok();
            let ours: Vec<_> =
                (0..WRITES.len()).map(|number| at(&format!("ours{number}"))).collect();
            let qemus: Vec<_> =
                (0..WRITES.len()).map(|number| at(&format!("qemus{number}"))).collect();
            for image in ours.iter().chain(&qemus) {
                fs::copy(&new, image).unwrap();
            }
            write_all(Path::new(ISOBATH), &ours);
            write_all(&qemu::program("qemu-io"), &qemus);
            let empty = fs::read(&new).unwrap();
            for images in [&ours, &qemus] {
                let changed = images.iter().filter(|image| fs::read(image).unwrap() != empty);
                assert!(changed.count() > WRITES.len() / 2, "{options:?} over {}", base.display());
            }
            for image in &ours {
                qemu::assert_clean(image);
            }
            let same = |when: &str| {
                for ((writes, ours), qemus) in
                    WRITES.iter().zip(read_disks(&ours)).zip(read_disks(&qemus))
                {
                    let differs = ours.iter().zip(&qemus).position(|(one, other)| one != other);
                    let base = base.display();
                    assert_eq!(differs, None, "{writes:?} with {options:?} over {base}, {when}");
                    let shows = when == "as it was" || qemus.contains(&1);
                    assert!(shows, "{writes:?} with {options:?} over {base}, {when}");
                }
            };
            same("as it was");
            // Ones come below in its place.
            if format == "qcow2" {
                fs::copy(&ones, &base).unwrap();
            } else {
                fs::write(&base, vec![1; SIZE as usize]).unwrap();
            }
            same("which has become one of ones");
            fs::write(&base, &before).unwrap();
        }
    }
}

#[test]
fn an_image_of_version_2_without_a_backing_file_has_what_it_has_in_qemu() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let (ours, qemus) = (at("ours.qcow2"), at("qemus.qcow2"));
    for writes in WRITES {
        qemu::create(&qemus, "qcow2", SIZE, "compat=0.10");
        fs::copy(&qemus, &ours).unwrap();
        let _ = qemu::io(&qemus, "qcow2", writes);
        io(&ours, writes);
        qemu::assert_clean(&ours);
        assert!(above_ones(&ours) == above_ones(&qemus), "{writes:?}");
    }
}

#[test]
fn what_is_converted_into_an_overlay_is_in_it() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let source = at("source.qcow2");
    qemu::create(&source, "qcow2", SIZE, "");
    let _ = qemu::io(&source, "qcow2", &["write -P 3 0 64k", "write -z 128k 64k"]).ok();
    for options in ["compat=0.10", "compat=1.1", "extended_l2=on"] {
        for (base, format) in bases(directory.path()) {
            let target = at("target.qcow2");
            let make =
                args!["create", "-q", "-f", "qcow2", "-b", &base, "-F", format, "-o", options];
            let make = make.into_iter().chain(args![&target, SIZE.to_string()]);
            let _ = qemu::img(make).ok();
            let _ = isobath(args!["convert", "-n", "-O", "qcow2", &source, &target]).ok();
            let expected = qemu::read_disk(&source, "qcow2");
            assert!(above_ones(&target) == expected, "{options} over {}", base.display());
            // What is below would show where the source has zeroes.
            let before = fs::read(&target).unwrap();
            let mut convert = args!["convert", "-n", "--target-is-zero", "-B", &base, "-F", format];
            convert.extend(args!["-O", "qcow2", &source, &target]);
            let refused = isobath(convert).exits(1).stderr;
            assert!(refused.contains("Cannot use --target-is-zero when"), "{refused}");
            assert!(fs::read(&target).unwrap() == before);
        }
    }
}
