//! Images and clients by which other programs were harmed: each is refused. `SECURITY.md` lists them, with the tests.

use crate::serving::ISOBATH;
use isobath_testkit::nbd::Nbd;
use isobath_testkit::process::{Ready, Server, run};
use isobath_testkit::{args, qemu};
use std::ffi::OsString;
use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
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

/// A VHDX image whose blocks have no length.
fn without_blocks() -> Vec<u8> {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    qemu::create(&image, "vhdx", 64 << 20, "");
    let mut bytes = fs::read(image).unwrap();
    // The entry for the file's parameters, whose place counts from the table that it is in.
    let id = [0x37, 0x67, 0xa1, 0xca, 0x36, 0xfa, 0x43, 0x4d];
    let found = bytes.windows(8).position(|eight| eight == id).unwrap();
    let place = u32::from_le_bytes(bytes[found + 16..found + 20].try_into().unwrap()) as usize;
    let table = found - 32;
    bytes[table + place..][..4].fill(0);
    bytes
}

/// An overlay of a file of the host.
fn over_a_hosts_file() -> Vec<u8> {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    let create = args!["create", "-q", "-u", "-f", "qcow2", "-b", "/etc/passwd", "-F", "raw"];
    let _ = qemu::img([create, args![&image, "1M"]].concat()).ok();
    fs::read(image).unwrap()
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
    // A table that reading does not need.
    let write = || args!["io", "-f", "qcow2", "-c", "write 0 4k", "image"];
    let unneeded = |name, image, says| Case { name, image, command: write(), says };
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
        unneeded("CVE-2014-0143", put(60, &[0xff; 4]), "nb_snapshots is 4294967295"),
        case("CVE-2014-0144", put(20, &[0, 0, 0, 32]), "cluster_bits is 32"),
        case("CVE-2014-0144", put(36, &[0xff; 4]), "l1_size is 4294967295"),
        unneeded("CVE-2014-0144", put(64, &[0xff; 8]), "snapshots_offset is 0xffffffffffffffff"),
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
        unneeded(
            "CVE-2014-0147",
            put(48, &[0x80, 0, 0, 0, 0, 0, 0, 0]),
            "refcount_table_offset is",
        ),
        unneeded("CVE-2014-0147", put(56, &[0x7f, 0xff, 0xff, 0xff]), "refcount_table_clusters is"),
        Case {
            name: "CVE-2014-0148",
            image: without_blocks(),
            command: args!["convert", "-f", "vhdx", "-O", "raw", "image", "out"],
            says: "block size",
        },
        case("CVE-2014-0222", qcow1.clone(), "version is 1"),
        case("CVE-2014-0223", qcow1, "version is 1"),
        Case {
            name: "CVE-2015-5163",
            image: over_a_hosts_file(),
            command: untrusted.clone(),
            says: "outside the directories",
        },
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

/// What a client says first, after the server's greeting, and then nothing more.
fn clients() -> Vec<(&'static str, Vec<u8>)> {
    let flags = 3_u32.to_be_bytes();
    let option = |number: u32, length: u32, data: &[u8]| {
        let head = [b"IHAVEOPT".as_slice(), &number.to_be_bytes(), &length.to_be_bytes()].concat();
        [&flags, head.as_slice(), data].concat()
    };
    let (by_name, list, info) = (1, 3, 6);
    let named = [&4096_u32.to_be_bytes(), vec![b'x'; 4096].as_slice(), &[0, 0]].concat();
    vec![
        // It ends within an option, and after none.
        ("CVE-2017-7539", option(list, 0, &[])[..15].to_vec()),
        ("CVE-2017-9524", Vec::new()),
        // A name that is longer than any buffer for names.
        ("CVE-2017-15118", option(by_name, 100_000, &[b'x'; 100_000])),
        // An option that would be kept until it is whole.
        ("CVE-2017-15119", option(list, u32::MAX, &[])),
        // A name that does not fit into the answer that there is no such export.
        ("CVE-2020-10761", option(info, named.len() as u32, &named)),
    ]
}

/// A server goes on after each of them, and ends while others are still there.
#[test]
fn clients_that_harmed_other_servers_do_no_harm() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::write(at("disk"), vec![7; 1 << 20]).unwrap();
    let mut command = Command::new(ISOBATH);
    command.current_dir(directory.path());
    command.args(["serve", "disk", "--format", "raw", "--nbd", "unix:n"]);
    let server = Server::start(&mut command, Ready::Line("-blockdev"));
    for (name, says) in clients() {
        let mut client = UnixStream::connect(at("n")).unwrap();
        client.read_exact(&mut [0; 18]).unwrap();
        // The server may have heard enough before it has heard all.
        let _ = client.write_all(&says);
        let _ = client.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let _ = client.read_to_end(&mut answer);
        assert!(answer.len() < 1 << 16, "{name}: {} bytes", answer.len());
        let all = Nbd::connect(&at("n"), "disk").unwrap().read_all().unwrap();
        assert!(all == vec![7; 1 << 20], "{name}");
    }
    // CVE-2024-7409: clients that have not said yet what they want when the server ends.
    let _waiting: Vec<UnixStream> =
        (0..20).map(|_| UnixStream::connect(at("n")).unwrap()).collect();
    let _ = server.stop().ok();
}

/// Each is listed with the test that tries it, and the test is there.
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
    let clients = clients().into_iter().map(|(name, _)| name).chain(["CVE-2024-7409"]);
    let mut tested: Vec<_> =
        cases().iter().map(|case| case.name).chain(clients).map(str::to_owned).collect();
    tested.sort();
    tested.dedup();
    assert_eq!(listed, tested);
    assert!(page.contains("`images_that_harmed_other_programs_are_refused`"));
    assert!(page.contains("`clients_that_harmed_other_servers_do_no_harm`"));
}

/// The page names tests of this repository as `file.rs`: `name`.
#[test]
fn every_test_that_the_page_names_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = fs::read_to_string(root.join("SECURITY.md")).unwrap();
    let mut files = Vec::new();
    let mut directories = vec![root.join("crates")];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                directories.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(fs::read_to_string(path).unwrap());
            }
        }
    }
    let quoted = page.split('`').skip(1).step_by(2);
    // A test's name is a sentence.
    let is_name = |text: &str| {
        let letters = text.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
        letters && text.matches('_').count() >= 2
    };
    let named: Vec<&str> = quoted.filter(|text| is_name(text)).collect();
    assert!(named.len() > 20, "{named:?}");
    for name in named {
        let function = format!("fn {name}(");
        assert!(files.iter().any(|file| file.contains(&function)), "{name}");
    }
}
