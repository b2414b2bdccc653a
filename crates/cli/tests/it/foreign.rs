//! Images of other programs, made by QEMU, are read as QEMU reads them, alone and below qcow2 images.

use crate::programs::{isobath, qemu_img};
use isobath_testkit::locks::is_written;
use isobath_testkit::seed::Seed;
use isobath_testkit::{args, qemu, until};
use rand::RngExt;
use rand::rngs::StdRng;
use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
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
        let info = args!["info", "-f", *format, "image"];
        let theirs = qemu_img(directory, &info).ok();
        assert_eq!(isobath(directory, info).ok().text(), theirs.text());
        let info = args!["info", "-f", *format, "--output=json", "image"];
        let mut theirs = qemu_img(directory, &info).ok().json();
        // QEMU 8 added them.
        theirs.as_object_mut().unwrap().remove("children");
        let ours = isobath(directory, info).ok().json();
        assert_eq!(ours, theirs);
        assert_eq!(ours["virtual-size"], expected.len());

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
    }
}

/// An image with data in 4 of its blocks.
fn with_four_blocks(directory: &Path, format: &str, options: &str) -> Vec<u8> {
    let create = args!["create", "-q", "-f", format, "-o", options, "image", "8M"];
    let _ = qemu_img(directory, create).ok();
    let image = directory.join("image");
    let _ = qemu::io(&image, format, &["write -P 7 0 4M"]).ok();
    fs::read(image).unwrap()
}

/// The number at an offset, with so many bytes.
fn number_at(image: &[u8], at: usize, bytes: usize) -> u64 {
    let mut number = [0; 8];
    number[..bytes].copy_from_slice(&image[at..at + bytes]);
    u64::from_le_bytes(number)
}

/// The image with other bytes in some places, and cut off or continued.
fn changed(image: &[u8], places: &[(usize, &[u8])], length: usize) -> Vec<u8> {
    let mut image = image.to_vec();
    for (at, bytes) in places {
        image[*at..*at + bytes.len()].copy_from_slice(bytes);
    }
    image.resize(length, 0);
    image
}

/// Checks an image with both programs and all options: exit codes, output and messages are the same, and so is what a
/// repair leaves. Where QEMU finds nothing wrong, Isobath may have found something; that is what it says.
fn both_check(what: &str, format: &str, bytes: &[u8], found_by_isobath_only: &str) {
    let roots = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let link = roots[1].path().join("qemu-img");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_isobath"), &link).unwrap();
    for options in [&[][..], &["--output=json"], &["-q"], &["-r", "leaks"], &["-r", "all"]] {
        let done = [qemu::program("qemu-img"), link.clone()].map(|program| {
            let root = &roots[usize::from(program == link)];
            fs::write(root.path().join("image"), bytes).unwrap();
            let mut command = Command::new(program);
            command.current_dir(root.path()).args(["check", "-f", format]).args(options);
            isobath_testkit::process::run(command.arg("image"))
        });
        let [theirs, ours] = &done;
        let report = || format!("{what} {options:?}\n{}\n{}", theirs.report(), ours.report());
        if found_by_isobath_only.is_empty() {
            assert_eq!(theirs.code(), ours.code(), "{}", report());
            assert_eq!(theirs.text(), ours.text(), "{}", report());
            let said = ours.stderr.starts_with(&theirs.stderr) || format == "qed";
            assert!(said, "{}", report());
        } else {
            assert_eq!((theirs.code(), ours.code()), (0, 2), "{}", report());
            assert!(ours.stderr.contains(found_by_isobath_only), "{}", report());
        }
        let left = [0, 1].map(|side| fs::read(roots[side].path().join("image")).unwrap());
        assert!(left[1] == bytes || left[1] == left[0], "{}", report());
    }
}

#[test]
fn vdis_are_checked_as_by_qemu_and_blocks_are_in_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let image = with_four_blocks(directory.path(), "vdi", "static=off");
    let (map, length) = (number_at(&image, 340, 4) as usize, image.len());
    let check = |what: &str, places: &[(usize, &[u8])]| {
        both_check(what, "vdi", &changed(&image, places, length), "");
    };
    let at = |block: usize| map + 4 * block;
    check("as it is", &[]);
    check("a block twice", &[(at(1), &[0; 4])]);
    check("a block that the disk does not have", &[(at(1), &[99, 0, 0, 0])]);
    let more = changed(&image, &[(at(6), &[4, 0, 0, 0])], length + (1 << 20));
    both_check("a block too many", "vdi", &more, "");
    check("a wrong count", &[(388, &[3, 0, 0, 0])]);
    check("everything at once", &[(at(0), &[3, 0, 0, 0]), (at(1), &[99, 0, 0, 0]), (388, &[9])]);
    let directory = directory.path();
    for (cut, says) in
        [(1 << 20, "points after end of file"), (1 << 19, "ends at"), (512, "ends at")]
    {
        fs::write(directory.join("image"), changed(&image, &[], length - cut)).unwrap();
        let done = isobath(directory, args!["check", "image"]).exits(2);
        let told = done.stderr.contains("block index 3 at offset") && done.stderr.contains(says);
        assert!(told, "{}", done.report());
    }
    // A disk of 3.5 blocks needs half of its last one.
    let size = (7_u64 << 19).to_le_bytes();
    for (cut, code) in [(1 << 19, 0), ((1 << 19) + 512, 2)] {
        let bytes = changed(&image, &[(368, &size)], length - cut);
        fs::write(directory.join("image"), bytes).unwrap();
        let _ = isobath(directory, args!["check", "image"]).exits(code);
    }
}

#[test]
fn vhdxs_are_checked_as_by_qemu_and_blocks_do_not_overlap() {
    let directory = tempfile::tempdir().unwrap();
    let image = with_four_blocks(directory.path(), "vhdx", "block_size=1M");
    let region = |id: &[u8]| {
        let table = 192 << 10;
        let mut entries = (0..2).map(|number| table + 16 + 32 * number);
        let entry = entries.find(|at| image[*at..].starts_with(id)).unwrap();
        number_at(&image, entry + 16, 8) as usize
    };
    let (table, metadata) = (region(&[0x66, 0x77, 0xc2, 0x2d]), region(&[0x06, 0xa2, 0x7c, 0x8b]));
    let present = |offset: u64| (offset | 6).to_le_bytes();
    let at = |block: usize| table + 8 * block;
    let length = image.len();
    let check = |what: &str, places: &[(usize, &[u8])], length: usize, only_ours: &str| {
        both_check(what, "vhdx", &changed(&image, places, length), only_ours);
    };
    check("as it is", &[], length, "");
    check("past the end", &[(at(1), &present(100 << 20))], length, "");
    check("at the end", &[(at(1), &present(length as u64))], length, "");
    check("cut off", &[], length - 512, "");
    check("too large", &[(at(1), &present(0xffff_ffff_fff0_0000))], length, "");
    check("in the metadata", &[(at(1), &present(metadata as u64))], length, "");
    check("in the log", &[(at(1), &present(1 << 20))], length, "");
    let two = [(at(1), &present(100 << 20)[..]), (at(2), &present(101 << 20)[..])];
    check("two past the end", &two, length, "");
    check("in the headers", &[(at(1), &present(0))], length, "is that of the image's headers");
    let first = present(number_at(&image, at(0), 8) & !7);
    check("one place for two", &[(at(1), &first)], length, "and overlap");
    check(
        "a state of overlays",
        &[(at(1), &(9_u64 << 20 | 7).to_le_bytes())],
        length,
        "has state 7",
    );
}

#[test]
fn vmdks_are_checked_as_by_qemu() {
    for options in ["subformat=monolithicSparse", "subformat=streamOptimized"] {
        let directory = tempfile::tempdir().unwrap();
        let image = if options.ends_with("Sparse") {
            with_four_blocks(directory.path(), "vmdk", options)
        } else {
            fs::write(directory.path().join("raw"), vec![7; 4 << 20]).unwrap();
            let convert =
                args!["convert", "-f", "raw", "-O", "vmdk", "-o", options, "raw", "image"];
            let _ = qemu_img(directory.path(), convert).ok();
            fs::read(directory.path().join("image")).unwrap()
        };
        both_check(options, "vmdk", &image, "");
        if options.ends_with("Sparse") {
            let directory = number_at(&image, 56, 8) as usize * 512;
            let table = number_at(&image, directory, 4) as usize * 512;
            let past = changed(&image, &[(table + 8, &[0, 0, 0xff, 0])], image.len());
            both_check("a grain past the end", "vmdk", &past, "");
            let last = changed(&image, &[], image.len() - (2 << 20));
            both_check("cut off", "vmdk", &last, "");
        }
    }
}

#[test]
fn qeds_are_checked_and_repaired_as_by_qemu() {
    let directory = tempfile::tempdir().unwrap();
    let image = with_four_blocks(directory.path(), "qed", "cluster_size=65536,table_size=2");
    let length = image.len();
    let l1 = number_at(&image, 40, 8) as usize;
    let l2 = number_at(&image, l1, 8) as usize;
    let first = number_at(&image, l2, 8).to_le_bytes();
    let check = |what: &str, places: &[(usize, &[u8])], length: usize| {
        let bytes = changed(&image, places, length);
        both_check(what, "qed", &bytes, "");
        both_check(what, "qed", &changed(&bytes, &[(16, &[2])], length), "");
    };
    check("as it is", &[], length);
    check("a cluster that nothing refers to", &[(l2 + 8, &[0; 8])], length);
    check("some after the end", &[], length + (3 << 16) + 512);
    check("a cluster twice", &[(l2 + 8, &first)], length);
    check("a table that is data", &[(l1 + 8, &first)], length);
    // These are errors that a repair clears; -r leaks leaves them as they are here.
    let bad: [(&str, usize, u64); 5] = [
        ("a cluster past the end", l2 + 8, 1 << 40),
        ("a cluster that is not aligned", l2 + 8, 77_777),
        ("a table past the end", l1 + 8, 1 << 40),
        ("a cluster in the header", l2 + 8, 4096),
        ("a feature that a writer clears", 32, 1 << 7),
    ];
    for (what, at, offset) in bad {
        let wrong = (l2 + 8, &77_777_u64.to_le_bytes()[..]);
        let places = [wrong, (at, &offset.to_le_bytes()), (16, &[2])];
        let bytes = changed(&image, &places[usize::from(at != 32)..], length);
        let roots = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        for options in [&["check"][..], &["check", "-r", "all"], &["check"]] {
            let done = [0, 1].map(|side| {
                let root = roots[side].path();
                if options.len() > 1 || !root.join("image").exists() {
                    fs::write(root.join("image"), &bytes).unwrap();
                }
                let arguments = [options, &["image"]].concat();
                if side == 0 { qemu_img(root, arguments) } else { isobath(root, arguments) }
            });
            let [theirs, ours] = &done;
            let report = || format!("{what} {options:?}\n{}\n{}", theirs.report(), ours.report());
            assert_eq!(theirs.code(), ours.code(), "{}", report());
            assert_eq!(theirs.text(), ours.text(), "{}", report());
        }
        let [theirs, ours] =
            roots.each_ref().map(|root| fs::read(root.path().join("image")).unwrap());
        assert!(theirs == ours, "{what}");
        let root = roots[1].path();
        fs::write(root.join("image"), &bytes).unwrap();
        let _ = isobath(root, args!["check", "-r", "leaks", "image"]).exits(2);
        assert!(fs::read(root.join("image")).unwrap() == bytes, "{what}");
    }
}

/// A QED of which all entries of both levels are wrong: 2 Mi entries each.
#[test]
fn a_check_of_a_qed_takes_no_memory_for_what_is_wrong() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let options = "cluster_size=1M,table_size=16";
    let _ =
        qemu_img(directory, args!["create", "-q", "-f", "qed", "-o", options, "image", "8M"]).ok();
    let image = directory.join("image");
    let _ = qemu::io(&image, "qed", &["write -P 7 0 1M"]).ok();
    let mut bytes = fs::read(&image).unwrap();
    let table = 16 << 20;
    let l1 = number_at(&bytes, 40, 8) as usize;
    let l2 = number_at(&bytes, l1, 8) as usize;
    for at in [l1 + 8..l1 + table, l2 + 8..l2 + table] {
        bytes[at].fill(0x77);
    }
    fs::write(&image, &bytes).unwrap();
    let wrong = 2 * ((table as u64 >> 3) - 1);
    let check = |options: &[&str], code: i32| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_isobath"));
        command.args(["check", "--output", "json"]).args(options).arg(&image);
        // SAFETY: between fork and exec it makes one system call.
        unsafe { command.pre_exec(limit_memory) };
        isobath_testkit::process::run(&mut command).exits(code)
    };
    let done = check(&[], 2);
    assert_eq!(done.json()["corruptions"], wrong, "{}", done.report());
    let told = done.stderr.lines().filter(|line| line.contains("refers to offset")).count();
    assert_eq!(told, 1000);
    assert!(done.stderr.contains("only counted"), "{}", done.stderr);
    let done = check(&["-r", "all"], 0);
    assert_eq!(done.json()["corruptions-fixed"], wrong, "{}", done.report());
    let _ = check(&[], 0);
    let after = fs::read(&image).unwrap();
    for at in [l1 + 8..l1 + table, l2 + 8..l2 + table] {
        bytes[at].fill(0);
    }
    assert!(after == bytes);
}

/// Limits a command's address space to less than what the wrong entries of the test above would take.
fn limit_memory() -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: 300 << 20, rlim_max: 300 << 20 };
    // SAFETY: the limit is read during the call only; setrlimit may be called after a fork.
    if unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[test]
fn vhds_have_no_check() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let _ = qemu_img(directory, args!["create", "-q", "-f", "vpc", "image", "8M"]).ok();
    let check = isobath(directory, args!["check", "image"]).exits(63);
    assert!(check.stderr.contains("does not support checks"), "{}", check.report());
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

/// Options for a new image, as [`random_kind`], of formats and sizes that QEMU can check.
fn random_target(rng: &mut StdRng) -> Kind {
    let (format, options, detected) = random_kind(rng);
    let more = match format {
        "vmdk" => {
            let adapters = ["ide", "lsilogic", "buslogic", "legacyESX"];
            format!(",adapter_type={}", adapters[rng.random_range(0..4)])
        }
        "vhdx" => {
            let zero = ["on", "off"][rng.random_range(0..2)];
            format!(",block_state_zero={zero},log_size={}M", rng.random_range(1..4))
        }
        _ => String::new(),
    };
    (format, options + &more, detected)
}

#[test]
fn random_images_written_are_read_by_qemu() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    for _ in 0..40 {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        random_disk(&mut rng, &directory.join("source"));
        let source = fs::read(directory.join("source")).unwrap();
        let (format, options, _) = random_target(&mut rng);
        println!("{format} {options}");
        let tasks = rng.random_range(1..4).to_string();
        let cache = ["writeback", "none", "unsafe"][rng.random_range(0..3)];
        let convert = args!["convert", "-m", tasks, "-t", cache, "-O", format, "-o", &options];
        let one = args!["-f", "raw", "source", "image"];
        let _ = isobath(directory, [convert.clone(), one].concat()).ok();
        let image = directory.join("image");
        let theirs = qemu::read_disk(&image, format);
        // A VHD may be larger.
        let (disk, rest) = theirs.split_at(source.len());
        assert!(disk == source && rest.iter().all(|byte| *byte == 0));
        assert!(rest.is_empty() || format == "vpc" && !options.contains("force_size=on"));
        let check = qemu::img(args!["check", "-f", format, &image]);
        // QEMU cannot check some of them.
        assert!(matches!(check.code(), 0 | 63), "{}", check.report());
        let back = args!["convert", "-f", format, "-O", "raw", "image", "copy"];
        let _ = isobath(directory, back).ok();
        assert!(fs::read(directory.join("copy")).unwrap() == theirs);
        if !options.contains("streamOptimized") {
            // QEMU writes to it.
            let at = rng.random_range(0..source.len() / 512) * 512;
            let _ = qemu::io(&image, format, &[format!("write -P 7 {at} 512")]).ok();
            let mut expected = theirs;
            expected[at..at + 512].fill(7);
            assert!(qemu::read_disk(&image, format) == expected);
        }

        // From a chain of two disks, one after another.
        let _ = qemu_img(directory, args!["convert", "-O", "qcow2", "source", "qcow2"]).ok();
        let two = args!["-f", "qcow2", "qcow2", "qcow2", "twice"];
        let _ = isobath(directory, [convert, two].concat()).ok();
        let twice = qemu::read_disk(&directory.join("twice"), format);
        assert!(twice.starts_with(&[&source[..], &source[..]].concat()));
    }
}

#[test]
fn new_disks_have_the_sizes_that_qemu_gives_them() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    for round in 0..60 {
        let bits = rng.random_range(1..42);
        // Around the largest geometry, too.
        let size = match round {
            0..4 => (65535 * 16 * 255 - 2 + round) * 512,
            4..8 => (65535 * 16 * 63 - 6 + round) * 512,
            _ => rng.random_range(1..1_u64 << bits),
        };
        for (format, options) in [
            ("vpc", "subformat=dynamic"),
            ("vpc", "subformat=fixed"),
            ("vpc", "subformat=dynamic,force_size"),
            ("vdi", "static=off"),
            ("vhdx", "subformat=dynamic"),
            ("vmdk", "subformat=monolithicFlat"),
            ("qed", "table_size=4"),
        ] {
            // QEMU's tables of VHDX are written, and a QED's size must be a multiple of a sector.
            let size = if format == "qed" { size.next_multiple_of(512) } else { size };
            if format == "vhdx" && round > 20 {
                continue;
            }
            let info = args!["info", "-f", format, "--output=json", "image"];
            let create = args!["create", "-f", format, "-o", options, "image", size.to_string()];
            let theirs = qemu_img(directory, &create).ok();
            let their_info = qemu_img(directory, &info).ok().json();
            let ours = isobath(directory, &create).ok();
            let our_info = qemu_img(directory, &info).ok().json();
            assert_eq!(ours.text(), theirs.text());
            for key in ["virtual-size", "cluster-size"] {
                assert_eq!(our_info[key], their_info[key], "{format} {options} {size} {key}");
            }
            assert_eq!(
                isobath(directory, &info).ok().json()["virtual-size"],
                our_info["virtual-size"]
            );
        }
    }
}

#[test]
fn a_new_image_replaces_none_in_use_and_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let _ = qemu_img(directory, args!["create", "-q", "-f", "raw", "source", "8M"]).ok();
    for (format, options, files) in [
        ("vmdk", "subformat=monolithicSparse", &["new.vmdk"][..]),
        ("vmdk", "subformat=streamOptimized", &["new.vmdk"]),
        ("vmdk", "subformat=monolithicFlat", &["new.vmdk", "new-flat.vmdk"]),
        ("vmdk", "subformat=twoGbMaxExtentSparse", &["new.vmdk", "new-s001.vmdk"]),
        ("vpc", "subformat=fixed", &["new.vmdk"]),
        ("vhdx", "subformat=fixed", &["new.vmdk"]),
        ("vdi", "static=on", &["new.vmdk"]),
        ("qed", "table_size=4", &["new.vmdk"]),
    ] {
        for used in files {
            fs::write(directory.join(used), "something of another program").unwrap();
            let mut holder = Command::new(qemu::program("qemu-io"))
                .args(args!["-f", "raw", directory.join(used)])
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            until("the lock", || is_written(&directory.join(used)));
            for command in [
                args!["create", "-f", format, "-o", options, "new.vmdk", "8M"],
                args!["convert", "-f", "raw", "-O", format, "-o", options, "source", "new.vmdk"],
            ] {
                let refused = isobath(directory, command).exits(1);
                assert!(refused.stderr.contains("lock"), "{}", refused.report());
                let kept = fs::read(directory.join(used)).unwrap();
                assert_eq!(kept, b"something of another program");
                for other in files.iter().filter(|other| *other != used) {
                    assert!(!directory.join(other).exists(), "{}", refused.report());
                }
            }
            drop(holder.stdin.take());
            let _ = holder.wait().unwrap();
            fs::remove_file(directory.join(used)).unwrap();
        }
    }
}

#[test]
fn a_flat_target_does_not_overwrite_its_source() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    fs::write(directory.join("a-flat.vmdk"), [7; 4096]).unwrap();
    let convert = args!["convert", "-f", "raw", "-O", "vmdk", "-o", "subformat=monolithicFlat"];
    let refused = isobath(directory, [convert, args!["a-flat.vmdk", "a.vmdk"]].concat()).exits(1);
    assert!(refused.stderr.contains("one of the images to copy"), "{}", refused.report());
    assert_eq!(fs::read(directory.join("a-flat.vmdk")).unwrap(), [7; 4096]);
    assert!(!directory.join("a.vmdk").exists());
}

#[test]
fn an_extent_of_a_source_or_of_a_backing_file_is_not_overwritten() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    fs::write(directory.join("raw"), vec![7; 1 << 20]).unwrap();
    let flat = args!["convert", "-f", "raw", "-O", "vmdk", "-o", "subformat=monolithicFlat"];
    let _ = isobath(directory, [flat, args!["raw", "a.vmdk"]].concat()).ok();
    let extent = directory.join("a-flat.vmdk");
    for command in [
        args!["convert", "-U", "-f", "vmdk", "-O", "raw", "a.vmdk", "a-flat.vmdk"],
        args!["convert", "-U", "-f", "vmdk", "-O", "qcow2", "a.vmdk", "a-flat.vmdk"],
        args!["convert", "-U", "-f", "vmdk", "-O", "vpc", "a.vmdk", "a-flat.vmdk"],
        args!["dd", "-U", "-f", "vmdk", "-O", "raw", "if=a.vmdk", "of=a-flat.vmdk", "bs=1M"],
        args!["create", "-f", "qcow2", "-b", "a.vmdk", "-F", "vmdk", "a-flat.vmdk"],
    ] {
        let refused = isobath(directory, command).exits(1);
        let why = ["one of the images to copy", "part of its chain"];
        assert!(why.iter().any(|why| refused.stderr.contains(why)), "{}", refused.report());
        assert!(fs::read(&extent).unwrap().iter().all(|byte| *byte == 7), "{}", refused.report());
    }
}

#[test]
fn a_new_image_of_several_files_is_refused_before_the_old_one_is_touched() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    fs::write(directory.join("d.vmdk"), "old").unwrap();
    fs::create_dir(directory.join("d-flat.vmdk")).unwrap();
    let create = args!["create", "-f", "vmdk", "-o", "subformat=monolithicFlat", "d.vmdk", "1M"];
    let _ = isobath(directory, create).exits(1);
    assert_eq!(fs::read(directory.join("d.vmdk")).unwrap(), b"old");
}

#[test]
fn new_images_are_sparse() {
    use std::os::unix::fs::MetadataExt;
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let _ = qemu_img(directory, args!["create", "-q", "-f", "qcow2", "source", "4G"]).ok();
    let _ = qemu::io(&directory.join("source"), "qcow2", &["write -P 1 3G 1M"]).ok();
    for (format, options) in [
        ("vmdk", "subformat=monolithicSparse"),
        ("vmdk", "subformat=monolithicFlat"),
        ("vmdk", "subformat=twoGbMaxExtentSparse"),
        ("vpc", "subformat=fixed"),
        ("vpc", "subformat=dynamic"),
        ("vhdx", "subformat=fixed"),
        ("vdi", "static=on"),
        ("qed", "cluster_size=64k"),
    ] {
        let target = directory.join("target");
        fs::create_dir(&target).unwrap();
        let convert = args!["convert", "-O", format, "-o", options, "source", "target/image"];
        let _ = isobath(directory, convert).ok();
        let files = fs::read_dir(&target).unwrap();
        let used: u64 = files.map(|file| file.unwrap().metadata().unwrap().blocks() * 512).sum();
        assert!(used < 6 << 20, "{format} {options}: {used} bytes");
        fs::remove_dir_all(&target).unwrap();
    }
}

#[test]
fn what_cannot_be_written_is_refused_and_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let _ = qemu_img(directory, args!["create", "-q", "-f", "raw", "source", "8M"]).ok();
    for (wrong, says) in [
        (args!["-O", "vmdk", "-B", "source", "-F", "raw"], "Backing file not supported"),
        (args!["-O", "vmdk", "-o", "hwversion=\"4"], "quotation marks"),
        (args!["-O", "vmdk", "-n"], "-n not supported"),
        (args!["-O", "vhdx", "-o", "block_size=3M"], "power of two"),
        (args!["-O", "vhdx", "-o", "cluster_size=64k"], "Invalid parameter"),
        (args!["-O", "vhdx", "-c"], "Compression not supported"),
        (args!["-O", "qed", "-B", "source", "-F", "raw"], "Backing file not supported"),
        (args!["-O", "qed", "-o", "backing_file=source"], "Backing file not supported"),
        (args!["-O", "vhdx", "-B", "source", "-F", "raw"], "Backing file not supported"),
        (args!["-O", "vhdx", "--bitmaps"], "bitmaps"),
    ] {
        let arguments = [args!["convert", "-f", "raw"], wrong, args!["source", "copy"]].concat();
        let refused = isobath(directory, arguments).exits(1);
        assert!(refused.stderr.contains(says), "{}", refused.report());
        assert!(!directory.join("copy").exists(), "{}", refused.report());
    }
    for (wrong, says) in [
        (args!["-f", "vmdk", "copy", "0"], "from 512 bytes"),
        (args!["-f", "vmdk", "-o", "subformat=monolithicFlat", "a:b", "1M"], ""),
        (args!["-f", "vmdk", "-o", "subformat=monolithicFlat", "a\"b", "1M"], "quotation marks"),
        (args!["-f", "vmdk", "-o", "subformat=twoGbMaxExtentSparse", "copy", "2T"], "512 extents"),
        (args!["-f", "vhdx", "copy", "0"], "from 512 bytes"),
        (args!["-f", "vpc", "copy", "3T"], "2040 GiB"),
        (args!["-f", "qed", "-o", "cluster_size=4k,table_size=2", "copy", "8T"], "at most"),
    ] {
        let refused = isobath(directory, [args!["create"], wrong].concat()).exits(1);
        assert!(refused.stderr.contains(says), "{}", refused.report());
        let left = fs::read_dir(directory).unwrap().count();
        assert_eq!(left, 1, "{}", refused.report());
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
