//! Images that are damaged, or whose files are not those that their headers name: what each command makes of them.

use crate::serving::ISOBATH;
use isobath_testkit::process::{Finished, run, run_program};
use isobath_testkit::{args, qemu};
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Command;

const CLUSTER: u64 = 64 << 10;
/// A disk that ends within a cluster.
const SIZE: u64 = (1 << 20) + 512;

fn isobath(arguments: Vec<OsString>) -> Finished {
    run_program(ISOBATH, arguments)
}

/// Runs the program in a directory.
fn isobath_in(directory: &Path, arguments: &[OsString]) -> Finished {
    run(Command::new(ISOBATH).args(arguments).current_dir(directory))
}

fn number(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// Changes eight bytes of a file.
fn put(image: &Path, at: u64, value: u64) {
    let mut bytes = fs::read(image).unwrap();
    bytes[at as usize..at as usize + 8].copy_from_slice(&value.to_be_bytes());
    fs::write(image, bytes).unwrap();
}

/// Where an image's L1 table is, and where its first L2 table is.
fn tables(image: &Path) -> (u64, u64) {
    let bytes = fs::read(image).unwrap();
    let l1 = number(&bytes, 40);
    (l1, number(&bytes, l1 as usize) & 0x00ff_ffff_ffff_fe00)
}

/// An image with data in its first cluster and in its last, which is damaged.
struct Damaged {
    what: &'static str,
    options: &'static str,
    /// Bytes of an L2 entry.
    entry: u64,
    damage: fn(&Path, u64, u64),
}

/// The number of the last cluster.
const LAST: u64 = SIZE / CLUSTER;

const DAMAGED: &[Damaged] = &[
    Damaged {
        what: "an offset that is not aligned",
        options: "",
        entry: 8,
        damage: |image, _, entry| put(image, entry, 1 << 63 | 0x5_0200),
    },
    Damaged {
        what: "one of a subcluster",
        options: "extended_l2=on",
        entry: 16,
        damage: |image, _, entry| put(image, entry, 1 << 63 | 0x5_0200),
    },
    Damaged {
        what: "subclusters that are data and zeroes",
        options: "extended_l2=on",
        entry: 16,
        damage: |image, _, entry| put(image, entry + 8, u64::MAX),
    },
    Damaged {
        what: "an L1 entry that is not aligned",
        options: "",
        entry: 8,
        damage: |image, l1, _| put(image, l1, 1 << 63 | 0x5_0200),
    },
];

impl Damaged {
    fn make(&self, image: &Path) {
        let options = if self.options.is_empty() { "compat=1.1" } else { self.options };
        qemu::create(image, "qcow2", SIZE, options);
        let write =
            [format!("write -P 7 0 {CLUSTER}"), format!("write -P 9 {} 512", LAST * CLUSTER)];
        let _ = qemu::io(image, "qcow2", &write).ok();
        let (l1, l2) = tables(image);
        (self.damage)(image, l1, l2 + LAST * self.entry);
    }
}

#[test]
fn a_damaged_entry_is_an_error_for_every_command_that_meets_it() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let (image, copy) = (at("image"), at("copy"));
    for damaged in DAMAGED {
        damaged.make(&image);
        let same = fs::read(&image).unwrap();
        let both = [
            args!["map", &image],
            args!["map", "--output=json", &image],
            args!["measure", "-O", "qcow2", &image],
            args!["convert", "-O", "raw", &image, &copy],
            args!["convert", "-c", "-O", "qcow2", &image, &copy],
            args!["convert", "-O", "vmdk", &image, &copy],
            args!["compare", &image, &image],
            args![
                "dd",
                OsString::from(format!("if={}", image.display())),
                OsString::from(format!("of={}", copy.display()))
            ],
            args![
                "dd",
                "-O",
                "vmdk",
                OsString::from(format!("if={}", image.display())),
                OsString::from(format!("of={}", copy.display()))
            ],
        ];
        for arguments in both {
            let theirs = qemu::img(arguments.clone());
            fs::write(&image, &same).unwrap();
            let _ = fs::remove_file(&copy);
            let ours = isobath(arguments);
            let report = format!("{}: {}\n{}", damaged.what, ours.report(), theirs.report());
            assert_eq!(ours.code(), theirs.code(), "{report}");
            assert!(matches!(ours.code(), 1..=4), "{report}");
            assert!(ours.stderr.contains("image'"), "{report}");
            assert!(fs::read(&image).unwrap() == same, "{report}");
        }
        for command in
            ["map".to_owned(), format!("alloc 0 {SIZE}"), format!("alloc {} 512", LAST * CLUSTER)]
        {
            let done = isobath(args!["io", "-r", "-f", "qcow2", "-c", &command, &image]);
            assert_eq!(done.code(), 1, "{}: {}", damaged.what, done.report());
            let theirs = run_program(
                qemu::program("qemu-io"),
                args!["-r", "-f", "qcow2", "-c", &command, &image],
            );
            assert_eq!(theirs.code(), 1, "{}: {}", damaged.what, theirs.report());
        }
    }
}

/// Overwrites the data of a compressed cluster.
fn spoil(image: &Path, cluster: u64) {
    let (_, l2) = tables(image);
    let bytes = fs::read(image).unwrap();
    let entry = number(&bytes, (l2 + cluster * 8) as usize);
    assert!(entry >> 62 & 1 == 1, "the cluster is compressed");
    put(image, entry & ((1 << 54) - 1), u64::MAX);
}

/// Bytes of a target that is there before.
const TARGET: usize = 4 << 20;

#[test]
fn a_salvage_copies_what_can_be_read() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let mut images = Vec::new();
    for (number, damaged) in DAMAGED.iter().enumerate() {
        let image = at(&format!("damaged{number}"));
        damaged.make(&image);
        images.push(image);
    }
    for (name, cluster) in [("first", 0), ("last", LAST)] {
        let image = at(name);
        qemu::create(&image, "qcow2", SIZE, "");
        let write = ["write -c -P 7 0 64k", "write -P 5 512k 64k", "write -c -P 9 1M 512"];
        let _ = qemu::io(&image, "qcow2", &write).ok();
        spoil(&image, cluster);
        let overlay = at(&format!("above-{name}"));
        qemu::create_overlay(&overlay, &image, "qcow2", "cluster_size=2M");
        let longer = at(&format!("longer-{name}"));
        let make =
            args!["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", &image, &longer, "1100k"];
        let _ = qemu::img(make).ok();
        images.extend([image, overlay, longer]);
    }
    let good = at("good");
    qemu::create(&good, "qcow2", SIZE, "");
    let _ = qemu::io(&good, "qcow2", &["write -P 3 0 1M"]).ok();
    let ways: &[&[&str]] = &[
        &["-O", "raw"],
        &["-O", "raw", "-m", "3", "-W"],
        &["-O", "raw", "-S", "0"],
        &["-O", "raw", "-r", "1G"],
        &["-O", "raw", "-n"],
        &["-O", "qcow2"],
        &["-O", "qcow2", "-S", "64k"],
        &["-O", "qcow2", "-c"],
        &["-O", "qcow2", "-c", "-m", "4", "-W"],
        &["-O", "qcow2", "-c", "-o", "cluster_size=512"],
        &["-O", "qcow2", "-c", "-o", "cluster_size=2M"],
        &["-O", "vmdk"],
        &["-O", "vmdk", "-c", "-o", "subformat=streamOptimized"],
        &["-O", "vmdk", "-r", "1G", "-o", "subformat=twoGbMaxExtentSparse"],
        &["-O", "vhdx"],
        &["-O", "vdi"],
        &["-O", "vpc", "-o", "force_size=on"],
        &["-O", "qed"],
    ];
    let target = at("target");
    for image in &images {
        for sources in [vec![image], vec![image, &good], vec![&good, image]] {
            let salvage = |way: &[&str]| {
                let _ = fs::remove_file(&target);
                if way.contains(&"-n") {
                    fs::write(&target, vec![1; TARGET]).unwrap();
                }
                let mut arguments = args!["convert", "--salvage"];
                arguments.extend(way.iter().map(OsString::from));
                arguments.extend(sources.iter().map(OsString::from));
                arguments.push(target.as_path().into());
                arguments
            };
            // What QEMU copies is the same in each way.
            let _ = qemu::img(salvage(&["-O", "raw"])).ok();
            let expected = fs::read(&target).unwrap();
            for way in ways.iter().step_by(if sources.len() > 1 { 4 } else { 1 }) {
                let done = isobath(salvage(way)).ok();
                let warned = done.stderr.matches("cannot be read, and is copied as zeroes").count();
                assert!(warned > 0, "{}", done.report());
                let copied = match way[1] {
                    "raw" => fs::read(&target).unwrap(),
                    format => qemu::read_disk(&target, format),
                };
                let (copied, rest) = copied.split_at(expected.len());
                assert!(copied == expected, "{}", done.report());
                let more = if way.contains(&"-n") { TARGET - expected.len() } else { 0 };
                assert!(*rest == vec![1; more], "{}", done.report());
            }
        }
    }
}

/// Has the header of an image say that it has the largest L1 table, of which the file, then one cluster longer, has the
/// first entry.
fn give_the_largest_table(image: &Path) {
    let mut bytes = fs::read(image).unwrap();
    let end = (bytes.len() as u64).next_multiple_of(CLUSTER);
    bytes.resize(end as usize + 8, 0);
    bytes[36..40].copy_from_slice(&(4_u32 << 20).to_be_bytes());
    bytes[40..48].copy_from_slice(&end.to_be_bytes());
    fs::write(image, bytes).unwrap();
}

#[test]
fn a_table_past_the_end_of_the_file_takes_no_memory() {
    const LAYERS: usize = 30;
    let directory = tempfile::tempdir().unwrap();
    let at = |number: usize| directory.path().join(number.to_string());
    qemu::create(&at(0), "qcow2", 512, "");
    for number in 1..LAYERS {
        qemu::create_overlay(&at(number), &at(number - 1), "qcow2", "");
    }
    for number in 0..LAYERS {
        give_the_largest_table(&at(number));
    }
    let top = at(LAYERS - 1);
    // The tables of all layers would take 960 MiB.
    let limited = "ulimit -v 921600; exec \"$@\"";
    for arguments in [
        args!["io", "-r", "-f", "qcow2", "-c", "read -P 0 0 512", &top],
        args!["map", &top],
        args!["convert", "-O", "raw", &top, directory.path().join("copy")],
    ] {
        let mut command = Command::new("sh");
        let _ = run(command.args(args!["-c", limited, "sh", ISOBATH]).args(arguments)).ok();
    }
    assert!(fs::read(directory.path().join("copy")).unwrap() == vec![0; 512]);
}

/// Removes the extra data of an image's only snapshot, as programs before QEMU 1.1 wrote it: that has the disk's size.
fn without_extra_data(image: &Path) {
    let mut bytes = fs::read(image).unwrap();
    let entry = number(&bytes, 64) as usize;
    let two = |at: usize| usize::from(u16::from_be_bytes(bytes[at..at + 2].try_into().unwrap()));
    let strings = two(entry + 12) + two(entry + 14);
    let extra = u32::from_be_bytes(bytes[entry + 36..entry + 40].try_into().unwrap()) as usize;
    assert!(extra >= 16, "the entry has the disk's size");
    let start = entry + 40;
    bytes.copy_within(start + extra..start + extra + strings, start);
    bytes[start + strings..start + extra + strings].fill(0);
    bytes[entry + 36..start].fill(0);
    fs::write(image, bytes).unwrap();
}

#[test]
fn a_snapshot_that_does_not_say_its_size_is_read_after_the_disk_has_grown() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let (image, ours, theirs) = (at("image"), at("ours"), at("theirs"));
    // With clusters of 512 bytes a table describes 32 KiB.
    qemu::create(&image, "qcow2", 128 << 10, "cluster_size=512");
    let write = ["write -P 7 0 5k", "write -P 9 120k 8k"];
    let _ = qemu::io(&image, "qcow2", &write).ok();
    let _ = qemu::img(args!["snapshot", "-c", "snap", &image]).ok();
    let _ = qemu::img(args!["resize", "-q", &image, "16M"]).ok();
    let _ = qemu::io(&image, "qcow2", &["write -P 5 0 16M"]).ok();
    without_extra_data(&image);
    let convert = |target: &Path| args!["convert", "-l", "snap", "-O", "raw", &image, target];
    let _ = isobath(convert(&ours)).ok();
    let _ = qemu::img(convert(&theirs)).ok();
    let (ours, theirs) = (fs::read(ours).unwrap(), fs::read(theirs).unwrap());
    assert_eq!((ours.len(), theirs.len()), (16 << 20, 16 << 20));
    assert!(ours == theirs && ours[..5 << 10] == [7; 5 << 10]);
}

/// What is wrong with a table, the size of the disk, and how it comes to be.
type UnneededTable = (&'static str, u64, fn(&Path));

#[test]
fn reading_needs_no_table_but_those_of_the_disk() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let (image, copy) = (at("image"), at("copy"));
    let damage: &[UnneededTable] = &[
        ("a refcount table at the header", SIZE, |image| put(image, 48, 0)),
        ("a refcount table past the end", SIZE, |image| put(image, 48, 1 << 40)),
        ("no snapshots, and a place for them", SIZE, |image| put(image, 64, 1 << 55)),
        ("a snapshot table at the header", SIZE, |image| {
            let mut bytes = fs::read(image).unwrap();
            bytes[60..72].copy_from_slice(&[0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
            fs::write(image, bytes).unwrap();
        }),
        ("an L1 table of a disk of no bytes past the end", 0, |image| {
            put(image, 40, 1 << 40);
        }),
        ("an L1 table of which only what the disk needs is there", SIZE, |image| {
            // The table comes last, with one entry; the header says that it has more.
            let mut bytes = fs::read(image).unwrap();
            let (l1, _) = tables(image);
            let entry = bytes[l1 as usize..l1 as usize + 8].to_vec();
            let end = (bytes.len() as u64).next_multiple_of(CLUSTER);
            bytes.resize(end as usize, 0);
            bytes.extend(entry);
            bytes[36..40].copy_from_slice(&100_u32.to_be_bytes());
            bytes[40..48].copy_from_slice(&end.to_be_bytes());
            fs::write(image, bytes).unwrap();
        }),
    ];
    for (what, size, damage) in damage {
        qemu::create(&image, "qcow2", *size, "");
        if *size > 0 {
            let _ = qemu::io(&image, "qcow2", &["write -P 7 0 100k", "write -P 9 1M 512"]).ok();
        }
        let before = qemu::read_disk(&image, "qcow2");
        damage(&image);
        let same = fs::read(&image).unwrap();
        let _ = fs::remove_file(&copy);
        let done = isobath(args!["convert", "-O", "raw", &image, &copy]).ok();
        assert!(fs::read(&copy).unwrap() == before, "{what}: {}", done.report());
        let _ = isobath(args!["map", &image]).ok();
        let _ = isobath(args!["info", "-f", "qcow2", "-U", &image]);
        // Of these QEMU reads all but the table of snapshots.
        let theirs = qemu::img(args!["convert", "-O", "raw", &image, &copy]);
        assert!(theirs.code() == 0 || what.contains("snapshot"), "{what}: {}", theirs.report());
        if *size > 0 && !what.starts_with("no snapshots") || what.contains("past the end") {
            let refused = isobath(args!["io", "-f", "qcow2", "-c", "write 0 512", &image]);
            assert_eq!(refused.code(), 1, "{what}: {}", refused.report());
        }
        assert!(fs::read(&image).unwrap() == same, "{what}");
    }
}

#[test]
fn a_data_file_that_qemu_takes_elsewhere_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let here = directory.path();
    let at = |name: &str| here.join(name);
    fs::create_dir(at("sub")).unwrap();
    let make = args!["create", "-q", "-f", "qcow2", "-o", "data_file=data", "image", "1M"];
    let _ = isobath_in(&at("sub"), &make).ok();
    let write = args!["io", "-f", "qcow2", "-c", "write -P 7 0 64k", "image"];
    let _ = isobath_in(&at("sub"), &write).ok();
    let convert = args!["convert", "-O", "raw", "sub/image", "copy"];
    let _ = isobath_in(here, &convert).ok();
    let expected = fs::read(at("copy")).unwrap();
    // The same file by another name.
    std::os::unix::fs::symlink("sub/data", at("data")).unwrap();
    let _ = isobath_in(here, &convert).ok();
    fs::remove_file(at("data")).unwrap();
    fs::write(at("data"), vec![1; 1 << 20]).unwrap();
    let (data, other) = (fs::read(at("sub/data")).unwrap(), fs::read(at("data")).unwrap());
    for arguments in [
        convert.clone(),
        args!["map", "sub/image"],
        args!["measure", "-O", "qcow2", "sub/image"],
        args!["compare", "sub/image", "copy"],
        args!["resize", "sub/image", "2M"],
        args!["bitmap", "--add", "sub/image", "b"],
        args!["amend", "-o", "lazy_refcounts=on", "sub/image"],
        args!["io", "-f", "qcow2", "-c", "write 0 512", "sub/image"],
        args!["serve", "-r", "--nbd", "unix:/no/such/directory/s", "sub/image"],
        args!["create", "-f", "qcow2", "-b", "image", "-F", "qcow2", "sub/overlay"],
        args!["create", "-f", "qcow2", "-o", "data_file=data", "sub/new", "1M"],
    ] {
        let done = isobath_in(here, &arguments);
        assert!(matches!(done.code(), 1 | 2), "{}", done.report());
        assert!(done.stderr.contains("in the current directory"), "{}", done.report());
        assert!(done.stderr.contains("sub/data"), "{}", done.report());
    }
    assert!(fs::read(at("sub/data")).unwrap() == data && fs::read(at("data")).unwrap() == other);
    assert!(!at("sub/new").exists());
    // The option is no way out for the data file of an image below.
    let make = args!["create", "-q", "-f", "qcow2", "-b", "image", "-F", "qcow2", "overlay"];
    let _ = isobath_in(&at("sub"), &make).ok();
    let map = args!["map", "sub/overlay"];
    let below = isobath_in(here, &map).exits(1);
    let amend = "'isobath amend --data-file FILE -o data_file=PATH sub/image'";
    assert!(below.stderr.contains(amend), "{}", below.report());
    assert!(below.stderr.contains("as its active image"), "{}", below.report());
    let map = args!["map", "--data-file", "sub/data", "sub/overlay"];
    let given = isobath_in(here, &map).exits(1);
    assert!(given.stderr.contains("with an external data file"), "{}", given.report());
    let named = args!["convert", "--data-file", "sub/data", "-O", "raw", "sub/image", "copy"];
    let _ = isobath_in(here, &named).ok();
    assert!(fs::read(at("copy")).unwrap() == expected);
    let path = format!("data_file={}", at("sub/data").display());
    let amend = args!["amend", "--data-file", "sub/data", "-o", path, "sub/image"];
    let _ = isobath_in(here, &amend).ok();
    for name in ["sub/image", "sub/overlay"] {
        let named = args!["convert", "-O", "raw", name, "copy"];
        let _ = isobath_in(here, &named).ok();
        assert!(fs::read(at("copy")).unwrap() == expected, "{name}");
    }
    assert!(qemu::read_disk(&at("sub/image"), "qcow2") == expected);
}

/// An overlay over `one`, and another image, `other`, in a directory.
fn overlay_and_another(directory: &Path) {
    let at = |name: &str| directory.join(name);
    for (name, write) in [("one", "write -P 1 0 1M"), ("other", "write -P 2 0 512k")] {
        qemu::create(&at(name), "qcow2", 1 << 20, "");
        let _ = qemu::io(&at(name), "qcow2", &[write]).ok();
    }
    let make = args!["create", "-q", "-f", "qcow2", "-b", "one", "-F", "qcow2", at("overlay")];
    let _ = qemu::img(make).ok();
    let _ = qemu::io(&at("overlay"), "qcow2", &["write -P 3 64k 64k"]).ok();
}

#[test]
fn a_given_backing_file_takes_the_place_of_the_named_one_in_each_command() {
    let directory = tempfile::tempdir().unwrap();
    let here = directory.path();
    let at = |name: &str| here.join(name);
    let options =
        "driver=qcow2,file.filename=overlay,backing.driver=qcow2,backing.file.filename=other";
    let none =
        r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"overlay"},"backing":null}"#;
    let run = |arguments: Vec<OsString>| isobath_in(here, &arguments);
    let mut above_other = vec![2; 512 << 10];
    above_other.resize(1 << 20, 0);
    above_other[64 << 10..128 << 10].fill(3);
    let mut alone = vec![0; 1 << 20];
    alone[64 << 10..128 << 10].fill(3);
    overlay_and_another(here);
    let chain =
        run(args!["info", "--backing-chain", "--output=json", "--image-opts", options]).ok();
    let chain = chain.json();
    let names: Vec<_> = chain.as_array().unwrap().iter().map(|i| i["filename"].as_str()).collect();
    assert_eq!(names, [Some("overlay"), Some("other")]);
    let chain = run(args!["info", "--backing-chain", "--output=json", none]).ok().json();
    assert_eq!(chain.as_array().unwrap().len(), 1);
    for (name, expected) in [(&["--image-opts", options][..], &above_other), (&[none], &alone)] {
        let mut convert = args!["convert", "-O", "raw"];
        convert.extend(name.iter().map(OsString::from));
        convert.push("copy".into());
        let _ = run(convert).ok();
        assert!(fs::read(at("copy")).unwrap() == *expected, "{name:?}");
    }
    let _ =
        run(args!["compare", "--image-opts", options, "driver=raw,file.filename=copy"]).exits(1);

    // What the disk reads stays, whatever is named below it.
    let _ = run(args!["rebase", "-b", "one", "-F", "qcow2", "--image-opts", options]).ok();
    assert!(qemu::read_disk(&at("overlay"), "qcow2") == above_other);
    for base in ["", "one"] {
        overlay_and_another(here);
        let _ = run(args!["rebase", "-b", base, "-F", "qcow2", none]).ok();
        assert!(qemu::read_disk(&at("overlay"), "qcow2") == alone, "{base:?}");
    }

    // A commit writes to the given one, and knows no other.
    overlay_and_another(here);
    let one = fs::read(at("one")).unwrap();
    let other = fs::read(at("other")).unwrap();
    let unknown = run(args!["commit", "-b", "one", "--image-opts", options]).exits(1);
    assert!(unknown.stderr.contains("Did not find 'one'"), "{}", unknown.report());
    let _ = run(args!["commit", none]).exits(1);
    assert!(fs::read(at("one")).unwrap() == one && fs::read(at("other")).unwrap() == other);
    let _ = run(args!["commit", "-d", "--image-opts", options]).ok();
    assert!(fs::read(at("one")).unwrap() == one);
    assert!(qemu::read_disk(&at("other"), "qcow2") == above_other);
}

#[test]
fn a_new_backing_file_is_beside_the_image_however_the_image_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let sub = directory.path().join("sub");
    fs::create_dir(&sub).unwrap();
    let named = "driver=qcow2,file.filename=sub/overlay";
    for unsafely in [false, true] {
        overlay_and_another(&sub);
        let before = qemu::read_disk(&sub.join("overlay"), "qcow2");
        let mut arguments = args!["rebase", "-b", "other", "-F", "qcow2"];
        arguments.extend(args!["-u"].into_iter().filter(|_| unsafely));
        arguments.extend(args!["--image-opts", named]);
        let _ = isobath_in(directory.path(), &arguments).ok();
        let after = qemu::read_disk(&sub.join("overlay"), "qcow2");
        assert_eq!(after == before, !unsafely);
        assert_eq!(qemu::info(&sub.join("overlay"))["backing-filename"], "other");
    }
}
