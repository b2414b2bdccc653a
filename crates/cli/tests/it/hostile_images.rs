//! Every command on images that are damaged or made to harm: it ends, in little memory, with an exit
//! code of its own and a message for people; what only reads changes nothing.

use isobath_testkit::process::{Finished, run};
use isobath_testkit::seed::Seed;
use isobath_testkit::{args, qemu};
use rand::rngs::StdRng;
use rand::{Rng, RngExt};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

const ISOBATH: &str = env!("CARGO_BIN_EXE_isobath");

/// The address space of a command, in bytes.
const MEMORY: u64 = 2 << 30;

fn limit_memory() -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: MEMORY, rlim_max: MEMORY };
    // SAFETY: the limit is read during the call only; setrlimit may be called after a fork.
    if unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn isobath(directory: &Path, arguments: &[OsString]) -> Finished {
    let mut command = Command::new(ISOBATH);
    command.args(arguments).current_dir(directory);
    // SAFETY: between fork and exec it makes one system call.
    unsafe { command.pre_exec(limit_memory) };
    run(&mut command)
}

/// Commands that only read, then those that write.
fn commands() -> (Vec<Vec<OsString>>, Vec<Vec<OsString>>) {
    let reading = vec![
        args!["info", "image.qcow2"],
        args!["info", "--backing-chain", "--output=json", "image.qcow2"],
        args!["check", "image.qcow2"],
        args!["map", "image.qcow2"],
        args!["snapshot", "-l", "image.qcow2"],
        args!["measure", "image.qcow2"],
        args!["compare", "image.qcow2", "base.qcow2"],
        args!["convert", "-O", "qcow2", "-c", "image.qcow2", "copy.qcow2"],
        args!["convert", "-O", "raw", "image.qcow2", "copy.raw"],
        args!["io", "-r", "-c", "read 0 1M", "-c", "map", "image.qcow2"],
    ];
    let writing = vec![
        args!["check", "-r", "leaks", "image.qcow2"],
        args!["io", "-c", "write -P 1 0 100k", "-c", "discard 0 64k", "image.qcow2"],
        args!["resize", "image.qcow2", "+1M"],
        args!["check", "-r", "all", "image.qcow2"],
        args!["io", "-c", "write -z 100k 300k", "-c", "write 5 3", "image.qcow2"],
        args!["resize", "--shrink", "image.qcow2", "512k"],
    ];
    (reading, writing)
}

/// Lays out the files, and runs every command on an image of these bytes.
fn try_all(what: &str, image: &[u8], base: &[u8]) {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let file = |name: &str| directory.join(name);
    fs::write(file("image.qcow2"), image).unwrap();
    fs::write(file("base.qcow2"), base).unwrap();
    let (reading, writing) = commands();
    for arguments in &reading {
        judge(what, &isobath(directory, arguments));
        assert!(
            fs::read(file("image.qcow2")).unwrap() == image,
            "{what}: {arguments:?} changed it"
        );
    }
    for arguments in &writing {
        judge(what, &isobath(directory, arguments));
    }
    assert!(fs::read(file("base.qcow2")).unwrap() == base, "{what}: the backing file changed");
}

/// Where both programs read the whole of a damaged image, they read the same.
fn compare_with_qemu(what: &str, image: &[u8], base: &[u8]) {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let file = |name: &str| directory.join(name);
    fs::write(file("image.qcow2"), image).unwrap();
    fs::write(file("base.qcow2"), base).unwrap();
    let info = qemu::img(args!["info", "--output=json", &file("image.qcow2")]);
    if info.code() != 0 || info.json()["virtual-size"].as_u64().unwrap() > 64 << 20 {
        return;
    }
    let convert = |to: &str| args!["convert", "-f", "qcow2", "-O", "raw", "image.qcow2", to];
    let ours = isobath(directory, &convert("ours"));
    let mut command = Command::new(qemu::program("qemu-img"));
    let theirs = run(command.args(convert("theirs")).current_dir(directory));
    if ours.code() == 0 && theirs.code() == 0 {
        let same = fs::read(file("ours")).unwrap() == fs::read(file("theirs")).unwrap();
        assert!(same, "{what}: read otherwise than by QEMU");
    }
}

#[track_caller]
fn judge(what: &str, done: &Finished) {
    let report = || format!("{what}: {}", done.report());
    assert!((0..=100).contains(&done.code()), "{}", report());
    assert!(!done.stderr.contains("panicked"), "{}", report());
    let printable = |text: &str| text.chars().all(|c| c == '\n' || c == '\t' || !c.is_control());
    assert!(printable(&done.stderr) && printable(&done.text()), "{}", report());
    let says = !done.stderr.is_empty() || !done.stdout.is_empty();
    assert!(done.code() == 0 || says, "{}", report());
}

/// An overlay with everything in it, and its base.
fn valid() -> (Vec<u8>, Vec<u8>) {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name);
    let (base, image) = (file("base.qcow2"), file("image.qcow2"));
    qemu::create(&base, "qcow2", 1 << 20, "cluster_size=4k");
    let _ = qemu::io(&base, "qcow2", &["write -P 9 0 200k"]).ok();
    qemu::create_overlay(&image, &base, "qcow2", "cluster_size=4k");
    let _ = qemu::io(&image, "qcow2", &["write -P 1 0 100k", "write -c -P 3 400k 16k"]).ok();
    let _ = qemu::img(args!["snapshot", "-c", "first", &image]).ok();
    let _ = qemu::img(args!["bitmap", "--add", "-g", "4096", &image, "changes"]).ok();
    let _ = qemu::io(&image, "qcow2", &["write -P 2 50k 100k", "write -z 8k 8k"]).ok();
    let _ = qemu::img(args!["rebase", "-u", "-b", "base.qcow2", "-F", "qcow2", &image]).ok();
    (fs::read(image).unwrap(), fs::read(base).unwrap())
}

fn put(image: &[u8], place: usize, bytes: &[u8]) -> Vec<u8> {
    let mut image = image.to_vec();
    image[place..place + bytes.len()].copy_from_slice(bytes);
    image
}

#[test]
fn every_command_ends_with_a_message() {
    let (image, base) = valid();
    let huge = [0xff; 8];
    for (what, damaged) in [
        ("empty", Vec::new()),
        ("only a magic number", image[..4].to_vec()),
        ("cut in the header", image[..80].to_vec()),
        ("cut in the tables", image[..0x3800].to_vec()),
        ("cut in the data", image[..image.len() / 2].to_vec()),
        ("version", put(&image, 4, &[0, 0, 0, 9])),
        ("cluster_bits", put(&image, 20, &[0, 0, 0, 63])),
        ("size", put(&image, 24, &huge)),
        ("encrypted", put(&image, 32, &[0, 0, 0, 2])),
        ("l1_size", put(&image, 36, &[0, 0x40, 0, 0])),
        ("l1_table_offset", put(&image, 40, &huge)),
        ("refcount_table_offset", put(&image, 48, &huge)),
        ("refcount_table_clusters", put(&image, 56, &huge[..4])),
        ("nb_snapshots", put(&image, 60, &[0, 1, 0, 0])),
        ("snapshots_offset", put(&image, 64, &[0, 0, 1, 0, 0, 0, 0, 0])),
        ("unknown features", put(&image, 72, &[0x40])),
        ("corrupt", put(&image, 79, &[2])),
        ("dirty", put(&image, 79, &[1])),
        ("refcount_order", put(&image, 99, &[7])),
    ] {
        try_all(what, &damaged, &base);
    }
}

#[test]
fn an_image_that_is_its_own_backing_file() {
    let (image, base) = valid();
    let place = u64::from_be_bytes(image[8..16].try_into().unwrap()) as usize;
    assert_eq!(image[place..place + 10], *b"base.qcow2");
    // The name is as long as it may be in its place.
    let mut looping = put(&image, place, b"image.qcow");
    looping.splice(place + 10..place + 11, *b"2");
    looping[16..20].copy_from_slice(&11_u32.to_be_bytes());
    try_all("a loop", &looping, &base);
    for name in [&b"json:{}bas"[..], b"nbd:base.q", b"/dev/zero\0", b"\x1b[2J\nevil."] {
        try_all("a name", &put(&image, place, name), &base);
    }
}

#[test]
fn an_untrusted_image_is_not_served_with_the_hosts_files() {
    for (backing, format, word) in [
        ("/etc/shadow", "raw", "outside"),
        ("../../../../../../../etc/shadow", "raw", "outside"),
        ("json:{\"driver\":\"file\",\"filename\":\"/etc/shadow\"}", "raw", "json:"),
        ("nbd:localhost:10809", "raw", "protocols"),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let create = args!["create", "-q", "-u", "-f", "qcow2", "-b", backing, "-F", format];
        let image = directory.path().join("image.qcow2");
        let _ = qemu::img([create, args![&image, "1M"]].concat()).ok();
        let socket = format!("unix:{}", directory.path().join("socket").display());
        let arguments = args!["serve", "--untrusted", "--nbd", socket, "image.qcow2"];
        let done = isobath(directory.path(), &arguments);
        judge(backing, &done);
        let refused = done.code() == 1 && done.stderr.contains(word);
        assert!(refused, "{}", done.report());
    }
}

#[test]
fn images_damaged_at_random() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    let (image, base) = valid();
    for number in 0..80 {
        let damaged = damage(&image, &mut rng);
        let what = format!("number {number} of seed {:#x}", seed.value());
        compare_with_qemu(&what, &damaged, &base);
        if number < 12 {
            try_all(&what, &damaged, &base);
        }
    }
}

/// Changes bytes where the tables are: at the starts of clusters.
fn damage(image: &[u8], rng: &mut StdRng) -> Vec<u8> {
    let mut image = image.to_vec();
    for _ in 0..rng.random_range(1..6) {
        let cluster = rng.random_range(0..image.len() / 4096) * 4096;
        let place = cluster + 8 * rng.random_range(0..24);
        if rng.random() {
            image[place + rng.random_range(0..8)] ^= 1 << rng.random_range(0..8);
        } else {
            let value = rng.next_u64() >> rng.random_range(0..60);
            image[place..place + 8].copy_from_slice(&value.to_be_bytes());
        }
    }
    image
}
