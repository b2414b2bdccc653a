//! Images by which other programs were harmed: each is refused. `SECURITY.md` lists them.

use crate::serving::ISOBATH;
use isobath_testkit::nbd::Nbd;
use isobath_testkit::process::{Ready, Server, run};
use isobath_testkit::{args, qemu};
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Command;

/// An image, a command that is to refuse it, and what that says.
struct Case {
    /// The vulnerability's number, as in the list.
    name: &'static str,
    image: Vec<u8>,
    command: Vec<OsString>,
    says: &'static str,
}

/// An image with data and a snapshot.
fn valid() -> Vec<u8> {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    qemu::create(&image, "qcow2", 1 << 20, "cluster_size=4k");
    let _ = qemu::io(&image, "qcow2", &["write -P 1 0 100k"]).ok();
    let _ = qemu::img(args!["snapshot", "-c", "first", &image]).ok();
    fs::read(image).unwrap()
}

/// An image whose external data file has this name in its header.
fn with_data_file(name: &str) -> Vec<u8> {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    let data = "x".repeat(name.len());
    let data = directory.path().join(data);
    let options = format!("data_file={},data_file_raw=on", data.display());
    qemu::create(&image, "qcow2", 1 << 20, &options);
    let mut bytes = fs::read(image).unwrap();
    let found = bytes.windows(4).position(|bytes| bytes == b"DATA").expect("the header extension");
    let length = data.as_os_str().len();
    assert!(name.len() <= length);
    bytes[found + 4..found + 8].copy_from_slice(&(name.len() as u32).to_be_bytes());
    let padded = |length: usize| length.next_multiple_of(8);
    // What follows comes after the new name.
    let rest = bytes[found + 8 + padded(length)..4096].to_vec();
    bytes[found + 8..4096].fill(0);
    bytes[found + 8..][..name.len()].copy_from_slice(name.as_bytes());
    let after = found + 8 + padded(name.len());
    let fits = rest.len().min(4096 - after);
    bytes[after..after + fits].copy_from_slice(&rest[..fits]);
    bytes
}

fn cases() -> Vec<Case> {
    let valid = valid();
    let put = |place: usize, bytes: &[u8]| {
        let mut image = valid.clone();
        image[place..place + bytes.len()].copy_from_slice(bytes);
        image
    };
    let snapshots = u64::from_be_bytes(valid[64..72].try_into().unwrap()) as usize;
    let convert = || args!["convert", "-f", "qcow2", "-O", "raw", "image", "out"];
    let case = |name, image, says| Case { name, image, command: convert(), says };
    let mut qcow1 = b"QFI\xfb\0\0\0\x01".to_vec();
    qcow1.extend([0; 16]);
    qcow1.extend((1_u64 << 60).to_be_bytes());
    // 2^31 entries in an L2 table.
    qcow1.extend([16, 31, 0, 0, 0, 0, 0, 0]);
    qcow1.resize(4096, 0);
    let descriptor = "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\n\
         createType=\"monolithicFlat\"\nRW 2048 FLAT \"/etc/passwd\" 0\n";
    let untrusted = args!["convert", "--untrusted", "-O", "raw", "image", "out"];
    let json = r#"json:{"driver":"file","filename":"/etc/passwd"}"#;
    vec![
        Case {
            name: "CVE-2008-2004",
            // A guest has written a header to its raw disk.
            image: valid[..512].iter().map(|byte| byte ^ 0xff).collect(),
            command: args!["serve", "image", "--nbd", "unix:n"],
            says: "was detected as raw",
        },
        case("CVE-2014-0143", put(60, &[0xff; 4]), "nb_snapshots is 4294967295"),
        case("CVE-2014-0144", put(20, &[0, 0, 0, 32]), "cluster_bits is 32"),
        case("CVE-2014-0144", put(36, &[0xff; 4]), "l1_size is 4294967295"),
        case("CVE-2014-0144", put(64, &[0xff; 8]), "snapshots_offset is 0xffffffffffffffff"),
        case("CVE-2014-0144", put(100, &[0xff, 0xff, 0xff, 0xf8]), "header_length is 4294967288"),
        Case {
            name: "CVE-2014-0145",
            image: put(snapshots + 8, &[0x0f, 0xff, 0xff, 0xff]),
            command: args!["snapshot", "-a", "first", "image"],
            says: "l1_size",
        },
        case(
            "CVE-2014-0146",
            put(112, &[0x68, 3, 0xf8, 0x57, 0x7f, 0xff, 0xff, 0xff]),
            "extension",
        ),
        case("CVE-2014-0147", put(48, &[0x80, 0, 0, 0, 0, 0, 0, 0]), "refcount_table_offset is"),
        case("CVE-2014-0147", put(56, &[0x7f, 0xff, 0xff, 0xff]), "refcount_table_clusters is"),
        case("CVE-2014-0222", qcow1.clone(), "version is 1"),
        case("CVE-2014-0223", qcow1, "version is 1"),
        Case {
            name: "CVE-2022-47951",
            image: descriptor.into(),
            command: untrusted.clone(),
            says: "outside the directories",
        },
        case("CVE-2024-4467", with_data_file(json), "'json:' descriptions are not supported there"),
        Case {
            name: "CVE-2024-32498",
            image: with_data_file("/etc/passwd"),
            command: untrusted,
            says: "which an untrusted image does not choose",
        },
    ]
}

#[test]
fn images_that_harmed_other_programs_are_refused() {
    for Case { name, image, command, says } in cases() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        fs::write(&path, &image).unwrap();
        let done = run(Command::new(ISOBATH).args(command).current_dir(directory.path())).exits(1);
        assert!(done.stderr.contains(says), "{name}: {}", done.report());
        assert!(!directory.path().join("out").exists(), "{name}");
        assert!(fs::read(path).unwrap() == image, "{name}");
    }
}

/// The attack of CVE-2008-2004 itself: with its format given, a raw disk is one whatever its guest writes.
#[test]
fn a_raw_disk_stays_one_when_its_guest_writes_another_formats_header() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::write(at("secret"), vec![9; 1 << 20]).unwrap();
    qemu::create_overlay(&at("header"), &at("secret"), "raw", "");
    fs::write(at("disk"), vec![0; 1 << 20]).unwrap();
    let serve = || {
        let mut command = Command::new(ISOBATH);
        command.current_dir(directory.path());
        command.args(["serve", "disk", "--format", "raw", "--nbd", "unix:n"]);
        Server::start(&mut command, Ready::Line("-blockdev"))
    };
    let connect = || Nbd::connect(&at("n"), "disk").unwrap();
    let header = fs::read(at("header")).unwrap();
    let server = serve();
    connect().write(0, &header).unwrap();
    let _ = server.stop().ok();
    let server = serve();
    let seen = connect().read_all().unwrap();
    assert_eq!(seen[..header.len()], header);
    assert!(seen[header.len()..].iter().all(|byte| *byte == 0));
    let _ = server.stop().ok();
}

#[test]
fn the_page_lists_them() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../SECURITY.md");
    let page = fs::read_to_string(page).unwrap();
    let mut listed: Vec<_> = page
        .lines()
        .filter_map(|line| line.strip_prefix("| CVE-"))
        .map(|line| format!("CVE-{}", line.split_once(' ').unwrap().0))
        .collect();
    listed.sort();
    let mut tested: Vec<_> = cases().iter().map(|case| case.name.to_owned()).collect();
    tested.sort();
    tested.dedup();
    assert_eq!(listed, tested);
}
