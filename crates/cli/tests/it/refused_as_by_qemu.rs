//! What QEMU refuses is refused here too, and where a header is ambiguous both mean the same.

use crate::serving::ISOBATH;
use isobath_testkit::process::{Finished, run, run_program};
use isobath_testkit::{args, qemu};
use serde_json::Value;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const MIB: u64 = 1 << 20;

fn isobath(arguments: Vec<OsString>) -> Finished {
    run_program(ISOBATH, arguments)
}

/// An overlay of 1 MiB whose header names a backing file without a format.
fn over(directory: &Path, backing: &str) -> PathBuf {
    let image = directory.join("over.qcow2");
    let _ = fs::remove_file(&image);
    let make = args!["create", "-q", "-u", "-f", "qcow2", "-b", backing, "-F", "raw", &image, "1M"];
    let _ = qemu::img(make).ok();
    let mut bytes = fs::read(&image).unwrap();
    let place = bytes.windows(4).position(|four| four == [0xe2, 0x79, 0x2a, 0xca]).unwrap();
    bytes[place..place + 4].copy_from_slice(b"none");
    fs::write(&image, bytes).unwrap();
    image
}

#[test]
fn images_of_other_formats_are_not_taken_for_raw() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    for format in ["qcow", "parallels"] {
        let image = at(&format!("image.{format}"));
        let _ = qemu::img(args!["create", "-q", "-f", format, &image, "1M"]).ok();
        let image = image.as_path();
        let name = image.file_name().unwrap().to_str().unwrap();
        let overlay = over(directory.path(), name);
        let overlay = overlay.as_path();
        let mut commands =
            vec![args!["info", image], args!["convert", "-O", "raw", overlay, at("copy")]];
        let every = [
            args!["check", image],
            args!["map", image],
            args!["measure", image],
            args!["compare", image, image],
            args!["convert", "-O", "raw", image, at("copy")],
            args!["io", "-r", "-c", "read 0 512", image],
            args!["io", "-c", "write 0 512", image],
            args!["serve", "-r", "--nbd", "unix:/no/such/directory/s", image],
            args!["resize", image, "2M"],
            args!["info", "--backing-chain", overlay],
            args!["map", overlay],
            args!["io", "-r", "-c", "read 0 512", overlay],
            args!["serve", "-r", "--nbd", "unix:/no/such/directory/s", overlay],
        ];
        // What a format is called is all that tells them apart.
        commands.extend(every.into_iter().filter(|_| format == "parallels"));
        for arguments in commands {
            let done = isobath(arguments);
            assert!(matches!(done.code(), 1 | 2), "{}", done.report());
            let says = [format!("({format})"), format!("convert -f {format}"), "-f raw".into()];
            assert!(says.iter().all(|word| done.stderr.contains(word)), "{}", done.report());
            assert!(!at("copy").exists(), "{}", done.report());
        }
        // Who says that it is raw is believed.
        let _ = isobath(args!["convert", "-f", "raw", "-O", "raw", image, at("copy")]).ok();
        assert!(fs::read(at("copy")).unwrap().starts_with(&fs::read(image).unwrap()));
        fs::remove_file(at("copy")).unwrap();
        let _ = qemu::img(args!["rebase", "-u", "-b", name, "-F", "raw", overlay]).ok();
        let _ = isobath(args!["io", "-r", "-c", "read 0 512", overlay]).ok();
        let survey = isobath(args!["chain", "survey", directory.path()]).ok();
        assert!(!survey.text().contains("not supported"), "{}", survey.report());
        let overlay = over(directory.path(), name);
        let survey = isobath(args!["chain", "survey", directory.path()]).ok();
        assert!(survey.text().contains("not supported"), "{}", survey.report());
        fs::remove_file(overlay).unwrap();
    }
}

#[test]
fn what_begins_as_an_image_does_is_probed_as_by_qemu() {
    let directory = tempfile::tempdir().unwrap();
    let text = |text: &str| text.as_bytes().to_vec();
    let at = |place: usize, bytes: &[u8]| [vec![0; place], bytes.to_vec()].concat();
    let mut bochs = at(64, &[0, 0, 2, 0]);
    bochs[..22].copy_from_slice(b"Bochs Virtual HD Image");
    bochs[32..39].copy_from_slice(b"Redolog");
    bochs[48..55].copy_from_slice(b"Growing");
    let mut strange = bochs.clone();
    strange[66] = 3;
    let cloop =
        "#!/bin/sh\n#V2.0 Format\nmodprobe cloop file=$0 && mount -r -t iso9660 /dev/cloop $1\n";
    for (number, bytes) in [
        text("# Disk DescriptorFile\nversion=1\n"),
        text("#x\r\n\r\nversion=3\r\nmore"),
        text("#x\r\n \r\n  \nversion=3\r\nmore"),
        text("\nversion=1\n"),
        text("# Disk DescriptorFile\nversion=4\n"),
        text("# Disk DescriptorFile\nversion=1"),
        text("version=2\n"),
        text("#only a comment\nand text\n"),
        text("KDMV"),
        text("COWD"),
        text("conectix"),
        text("Conectix"),
        text("vhdxfile"),
        text("QED\0"),
        text("QFI\u{fb}"),
        b"QFI\xfb\0\0\0\x01".to_vec(),
        b"QFI\xfb\0\0\0\0".to_vec(),
        b"LUKS\xba\xbe\0\x01".to_vec(),
        b"LUKS\xba\xbe\0\x02".to_vec(),
        at(64, &[0x7f, 0x10, 0xda, 0xbe]),
        at(63, &[0x7f, 0x10, 0xda, 0xbe]),
        [&b"WithoutFreeSpace"[..], &[2, 0, 0, 0]].concat(),
        [&b"WithouFreSpacExt"[..], &[2, 0, 0, 0]].concat(),
        [&b"WithoutFreeSpace"[..], &[1, 0, 0, 0]].concat(),
        bochs,
        strange,
        text(cloop),
        text(&cloop[1..]),
        at(508, b"koly"),
        vec![0; 512],
    ]
    .into_iter()
    .enumerate()
    {
        let image = directory.path().join(format!("{number}"));
        fs::write(&image, bytes).unwrap();
        // A file of whole sectors, for QEMU's formats.
        fs::File::options().write(true).open(&image).unwrap().set_len(64 << 10).unwrap();
        let theirs = qemu::img(args!["info", "--output=json", &image]);
        let raw = theirs.code() == 0 && theirs.json()["format"] == "raw";
        let ours = isobath(args!["info", &image]);
        let report = || format!("{}{}", ours.report(), theirs.report());
        assert_eq!(ours.code() == 0, raw, "{}", report());
        if raw {
            assert!(ours.text().contains("file format: raw"), "{}", report());
        } else if theirs.code() == 0 {
            let format = theirs.json()["format"].as_str().unwrap().to_owned();
            // Nothing but the header's beginning is there: those that are read are damaged, too.
            let read = ["vmdk", "vdi", "vhdx", "vpc", "qed"].contains(&&*format);
            let says = ours.stderr.contains(&format!("({format})"));
            assert_eq!(says, !read, "{}", report());
        }
    }
}

#[test]
fn nothing_is_written_without_locks() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image.qcow2");
    qemu::create(&image, "qcow2", MIB, "");
    let before = fs::read(&image).unwrap();
    for arguments in [
        args!["io", "-U", "-c", "write 0 4k", &image],
        args!["io", "-U", "-f", "raw", "-c", "write 0 4k", &image],
        args!["check", "-U", "-r", "all", &image],
        args!["index", "-U", &image],
    ] {
        let done = isobath(arguments).exits(1);
        assert!(done.stderr.contains("force-share"), "{}", done.report());
        assert!(fs::read(&image).unwrap() == before, "{}", done.report());
    }
    let theirs = Command::new(qemu::program("qemu-io"))
        .args(["-U", "-c", "write 0 4k"])
        .arg(&image)
        .output()
        .unwrap();
    assert!(String::from_utf8_lossy(&theirs.stderr).contains("force-share"));
    let _ = isobath(args!["io", "-U", "-r", "-c", "read 0 4k", &image]).ok();
    let _ = isobath(args!["info", "-U", &image]).ok();
}

#[test]
fn a_raw_data_file_keeps_what_lies_behind_the_old_end() {
    let directory = tempfile::tempdir().unwrap();
    let (image, data) = (directory.path().join("image.qcow2"), directory.path().join("data"));
    let old = MIB + 512;
    let content: Vec<u8> = (0..3 * MIB / 2).map(|n| (n % 251) as u8 + 1).collect();
    for cluster in ["4k", "64k"] {
        for how in ["off", "metadata", "falloc", "full", "truncate"] {
            let _ = fs::remove_file(&image);
            let options =
                format!("data_file={},data_file_raw=on,cluster_size={cluster}", data.display());
            let _ = qemu::img(args![
                "create",
                "-q",
                "-f",
                "qcow2",
                "-o",
                options,
                &image,
                old.to_string()
            ])
            .ok();
            fs::write(&data, &content).unwrap();
            let _ = if how == "truncate" {
                isobath(args!["io", "-c", "truncate 2M", &image]).ok()
            } else {
                isobath(args!["resize", format!("--preallocation={how}"), &image, "2M"]).ok()
            };
            let mut whole = content.clone();
            whole.resize(2 * MIB as usize, 0);
            assert!(fs::read(&data).unwrap() == whole, "{how} {cluster}");
            assert!(qemu::read_disk(&image, "qcow2") == whole, "{how} {cluster}");
            qemu::assert_clean(&image);
        }
    }
}

/// A header's extensions as type and data, and where they begin.
fn extensions(bytes: &[u8]) -> (usize, Vec<(u32, Vec<u8>)>) {
    let be32 = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
    let first = be32(100) as usize;
    let (mut at, mut found) = (first, Vec::new());
    while be32(at) != 0 {
        let length = be32(at + 4) as usize;
        found.push((be32(at), bytes[at + 8..at + 8 + length].to_vec()));
        at += 8 + length.next_multiple_of(8);
    }
    (first, found)
}

/// Writes other extensions into an image, and its backing file's name behind them.
fn with_extensions(image: &Path, list: &[(u32, Vec<u8>)], backing: &str) {
    let mut bytes = fs::read(image).unwrap();
    let (first, _) = extensions(&bytes);
    let mut area = Vec::new();
    for (magic, data) in list {
        area.extend(magic.to_be_bytes());
        area.extend((data.len() as u32).to_be_bytes());
        area.extend(data);
        area.resize(area.len().next_multiple_of(8), 0);
    }
    area.extend([0; 8]);
    bytes[first..first + area.len()].copy_from_slice(&area);
    let at = first + area.len();
    bytes[at..at + backing.len()].copy_from_slice(backing.as_bytes());
    let place = if backing.is_empty() { 0 } else { at as u64 };
    bytes[8..16].copy_from_slice(&place.to_be_bytes());
    bytes[16..20].copy_from_slice(&(backing.len() as u32).to_be_bytes());
    fs::write(image, bytes).unwrap();
}

const BACKING_FORMAT: u32 = 0xe279_2aca;
const BITMAPS: u32 = 0x2385_2875;
const DATA_FILE: u32 = 0x4441_5441;
const FEATURE_NAMES: u32 = 0x6803_f857;

fn info(program: &str, image: &Path) -> Value {
    let done = match program {
        "qemu-img" => qemu::img(args!["info", "--output=json", image]).ok(),
        _ => isobath(args!["info", "--output=json", image]).ok(),
    };
    done.json()
}

#[track_caller]
fn assert_same_info(image: &Path) -> Value {
    let (mut ours, mut theirs) = (info("isobath", image), info("qemu-img", image));
    for value in [&mut ours, &mut theirs] {
        value.as_object_mut().unwrap().remove("actual-size");
    }
    assert_eq!(ours, theirs);
    ours
}

#[test]
fn of_repeated_extensions_the_last_counts() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    // A base that is another disk as raw than as qcow2.
    qemu::create(&at("base"), "qcow2", MIB, "");
    let _ = qemu::io(&at("base"), "qcow2", &["write -P 7 0 1M"]).ok();
    let image = at("image");
    for formats in [["raw", "qcow2"], ["qcow2", "raw"]] {
        qemu::create(&image, "qcow2", MIB, "");
        let list: Vec<_> =
            formats.iter().map(|format| (BACKING_FORMAT, format.as_bytes().to_vec())).collect();
        with_extensions(&image, &list, "base");
        let said = assert_same_info(&image);
        assert_eq!(said["backing-filename-format"], formats[1]);
        let _ = isobath(args!["convert", "-O", "raw", &image, at("ours")]).ok();
        assert!(fs::read(at("ours")).unwrap() == qemu::read_disk(&image, "qcow2"), "{formats:?}");
        // A new backing file replaces both.
        let _ = isobath(args!["io", "-c", "write -P 9 0 4k", &image]).ok();
        assert_eq!(assert_same_info(&image)["backing-filename-format"], formats[1]);
    }
    for files in [["one", "two"], ["two", "one"]] {
        let _ = fs::remove_file(&image);
        qemu::create(&image, "qcow2", MIB, &format!("data_file={}", at("one").display()));
        fs::copy(at("one"), at("two")).unwrap();
        let list: Vec<_> =
            files.map(|file| (DATA_FILE, at(file).into_os_string().into_encoded_bytes())).into();
        with_extensions(&image, &list, "");
        assert_same_info(&image);
        let _ = isobath(args!["io", "-c", "write -P 5 0 64k", &image]).ok();
        let mut first = [0; 4];
        fs::File::open(at(files[1])).unwrap().read_exact_at(&mut first, 0).unwrap();
        assert_eq!(first, [5; 4], "the last named one is written");
        let _ = qemu::io(&image, "qcow2", &["read -P 5 0 64k"]).ok();
        fs::remove_file(at(files[0])).unwrap();
        fs::remove_file(at(files[1])).unwrap();
    }
    // Two bitmap directories: the second has one bitmap less.
    qemu::create(&image, "qcow2", MIB, "");
    let _ = qemu::img(args!["bitmap", "--add", &image, "one"]).ok();
    let bytes = fs::read(&image).unwrap();
    let (_, list) = extensions(&bytes);
    let bitmaps = list.iter().find(|(magic, _)| *magic == BITMAPS).unwrap().clone();
    let mut other = bitmaps.clone();
    let directory_at = u64::from_be_bytes(bitmaps.1[16..24].try_into().unwrap());
    // A copy of the directory with another name in it, behind the end.
    let end = (bytes.len() as u64).next_multiple_of(64 << 10);
    other.1[16..24].copy_from_slice(&end.to_be_bytes());
    let mut copy = bytes[directory_at as usize..][..32].to_vec();
    let name = copy.windows(3).position(|three| three == b"one").unwrap();
    copy[name..name + 3].copy_from_slice(b"two");
    let file = fs::File::options().write(true).open(&image).unwrap();
    file.write_all_at(&copy, end).unwrap();
    file.set_len(end + (64 << 10)).unwrap();
    for (list, expected) in [([bitmaps.clone(), other.clone()], "two"), ([other, bitmaps], "one")] {
        with_extensions(&image, &list, "");
        let said = assert_same_info(&image);
        assert_eq!(said["format-specific"]["data"]["bitmaps"][0]["name"], expected);
    }
    // Two tables of feature names, and a bit that neither program knows.
    let table = |name: &str| {
        let mut entry = vec![0, 50];
        entry.extend(name.as_bytes());
        entry.resize(48, 0);
        (FEATURE_NAMES, entry)
    };
    qemu::create(&image, "qcow2", MIB, "");
    with_extensions(&image, &[table("first"), table("last")], "");
    let file = fs::File::options().write(true).open(&image).unwrap();
    file.write_all_at(&(1_u64 << 50).to_be_bytes(), 72).unwrap();
    for done in [isobath(args!["info", &image]), qemu::img(args!["info", &image])] {
        let done = done.exits(1);
        assert!(
            done.stderr.contains("last") && !done.stderr.contains("first"),
            "{}",
            done.report()
        );
    }
    // A table is read in its order, and ends at an entry without a name.
    let entry = |(bit, name): (u8, &str)| {
        let mut entry = vec![0, bit];
        entry.extend(name.as_bytes());
        entry.resize(48, 0);
        entry
    };
    let entries = [(51, "second"), (50, "first"), (52, ""), (52, "behind the end")].map(entry);
    qemu::create(&image, "qcow2", MIB, "");
    with_extensions(&image, &[(FEATURE_NAMES, entries.concat())], "");
    let file = fs::File::options().write(true).open(&image).unwrap();
    file.write_all_at(&(7_u64 << 50).to_be_bytes(), 72).unwrap();
    for done in [isobath(args!["info", &image]), qemu::img(args!["info", &image])] {
        let done = done.exits(1);
        let named = "second, first, Unknown incompatible feature: 10000000000000";
        assert!(done.stderr.contains(named), "{}", done.report());
    }
}

#[test]
fn an_area_of_extensions_that_is_cut_in_one_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (image, base) = (directory.path().join("image"), directory.path().join("base"));
    qemu::create(&base, "qcow2", MIB, "");
    qemu::create_overlay(&image, &base, "qcow2", "");
    let bytes = fs::read(&image).unwrap();
    let first = u32::from_be_bytes(bytes[100..104].try_into().unwrap()) as usize;
    for cut in 0..40 {
        let mut cut_off = bytes.clone();
        cut_off[8..16].copy_from_slice(&((first + cut) as u64).to_be_bytes());
        fs::write(&image, cut_off).unwrap();
        let ours = isobath(args!["info", &image]);
        let theirs = qemu::img(args!["info", &image]);
        // A name that is no text is refused here, and a file that is not there is found out later.
        let words = ["extension", "Header extension too large"];
        let by_area =
            [&ours, &theirs].map(|done| words.iter().any(|word| done.stderr.contains(word)));
        assert_eq!(by_area[0], by_area[1], "{cut}: {}{}", ours.report(), theirs.report());
    }
}

#[test]
fn bitmaps_that_are_not_understood_keep_writers_out() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    for flags in [0_u32, 1, 2, 4, 8, 1 << 31] {
        let _ = fs::remove_file(&image);
        qemu::create(&image, "qcow2", MIB, "");
        let _ = qemu::img(args!["bitmap", "--add", &image, "b"]).ok();
        let mut bytes = fs::read(&image).unwrap();
        let (_, list) = extensions(&bytes);
        let bitmaps = &list.iter().find(|(magic, _)| *magic == BITMAPS).unwrap().1;
        let at = u64::from_be_bytes(bitmaps[16..24].try_into().unwrap()) as usize + 12;
        bytes[at..at + 4].copy_from_slice(&flags.to_be_bytes());
        fs::write(&image, &bytes).unwrap();
        let known = flags < 4;
        for arguments in [args!["info", &image], args!["io", "-c", "write 0 4k", &image]] {
            let ours = isobath(arguments);
            let theirs = qemu::img(args!["info", &image]);
            assert_eq!((ours.code() == 0, theirs.code() == 0), (known, known), "{}", ours.report());
            assert!(known || ours.stderr.contains("flags"), "{}", ours.report());
            assert!(known || fs::read(&image).unwrap() == bytes, "{flags}");
        }
        // Reading is the way out.
        let _ =
            isobath(args!["convert", "-O", "qcow2", &image, directory.path().join("copy")]).ok();
    }
}

#[test]
fn a_snapshot_table_of_more_than_64_mib_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    qemu::create(&image, "qcow2", MIB, "");
    let file = fs::File::options().write(true).open(&image).unwrap();
    // Entries of the longest names, in a hole but for their heads.
    let at = 16 * MIB;
    let entry = (40_u64 + 2 * 65535).next_multiple_of(8);
    for count in [500_u64, 520] {
        for number in 0..count {
            let mut head = vec![0; 40];
            head[..8].copy_from_slice(&(3_u64 << 16).to_be_bytes());
            head[12..16].copy_from_slice(&[0xff; 4]);
            file.write_all_at(&head, at + number * entry).unwrap();
        }
        file.set_len(at + count * entry).unwrap();
        file.write_all_at(&(count as u32).to_be_bytes(), 60).unwrap();
        file.write_all_at(&at.to_be_bytes(), 64).unwrap();
        let ours = isobath(args!["info", &image]);
        let theirs = qemu::img(args!["info", &image]);
        assert_eq!(ours.code() == 0, theirs.code() == 0, "{count} {}", theirs.stderr);
        assert_eq!(ours.code() == 0, count * entry <= 64 * MIB, "{count} {}", ours.stderr);
        let writer = isobath(args!["io", "-c", "write 0 512", &image]);
        assert!(ours.code() == 0 || writer.code() == 1, "{}", writer.report());
    }
}

#[test]
fn a_pattern_file_without_an_end_is_read_as_far_as_it_is_written() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    qemu::create(&image, "qcow2", MIB, "");
    fs::write(directory.path().join("abc"), "abc").unwrap();
    for file in ["/dev/zero", "abc", "/dev/null", "missing", "/"] {
        for length in ["0", "512", "64k"] {
            let command = format!("write -q -s {file} 0 {length}");
            let io = |program: &Path, first: &[&str]| {
                let mut io = Command::new(program);
                io.current_dir(directory.path()).args(first).args(["-c", &command]);
                run(io.arg(&image))
            };
            let ours = io(Path::new(ISOBATH), &["io"]);
            let theirs = io(&qemu::program("qemu-io"), &[]);
            assert_eq!(
                (ours.code(), &ours.stderr, &ours.stdout),
                (theirs.code(), &theirs.stderr, &theirs.stdout),
                "{command}"
            );
        }
    }
}

#[test]
fn every_command_means_the_same_by_a_backing_files_name() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::write(at("base"), vec![3; MIB as usize]).unwrap();
    for (name, opens) in [
        ("base", true),
        ("file:base", true),
        ("./base", true),
        ("ssh://localhost/base", false),
        ("json:{\"driver\":\"raw\",\"file\":{\"driver\":\"file\",\"filename\":\"base\"}}", false),
        ("base:1", false),
    ] {
        let image = at("image");
        let _ = fs::remove_file(&image);
        let make =
            args!["create", "-q", "-u", "-f", "qcow2", "-b", name, "-F", "raw", &image, "1M"];
        let _ = qemu::img(make).ok();
        let _ = isobath(args!["info", &image]).ok();
        for arguments in [
            args!["info", "--backing-chain", &image],
            args!["convert", "-O", "raw", &image, at("copy")],
            args!["map", &image],
        ] {
            let done = isobath(arguments);
            assert_eq!(done.code() == 0, opens, "{}", done.report());
            assert!(opens || done.stderr.contains("backing file is"), "{}", done.report());
        }
    }
}
