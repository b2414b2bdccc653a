//! The images that command lines name.

use super::{Described, describe};
use isobath_testkit::qemu;
use std::collections::BTreeSet;
use std::env;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const SIZE: u64 = 32 << 20;

/// An image: its name, those that it needs, and the command lines by which QEMU makes it.
type Image = (&'static str, &'static [&'static str], &'static [&'static str]);

const IMAGES: &[Image] = &[
    ("base.raw", &[], &[]),
    ("base.qcow2", &["base.raw"], &["qemu-img convert -f raw -O qcow2 base.raw base.qcow2"]),
    (
        "mid.qcow2",
        &["base.qcow2"],
        &[
            "qemu-img create -q -f qcow2 -b base.qcow2 -F qcow2 mid.qcow2",
            "qemu-io -c 'write -q -P 17 1M 3M' -c 'write -q -z 6M 1M' mid.qcow2",
        ],
    ),
    (
        "top.qcow2",
        &["mid.qcow2"],
        &[
            "qemu-img create -q -f qcow2 -b mid.qcow2 -F qcow2 top.qcow2",
            "qemu-io -c 'write -q -P 18 2M 5M' -c 'write -q -P 19 20M 64k' top.qcow2",
        ],
    ),
    (
        "rawtop.qcow2",
        &["base.raw"],
        &[
            "qemu-img create -q -f qcow2 -b base.raw -F raw rawtop.qcow2",
            "qemu-io -c 'write -q -P 20 3M 2M' rawtop.qcow2",
        ],
    ),
    (
        "other.qcow2",
        &["base.raw"],
        &[
            "qemu-img convert -f raw -O qcow2 base.raw other.qcow2",
            "qemu-io -c 'write -q -P 21 9M 1M' other.qcow2",
        ],
    ),
    (
        "other.raw",
        &["base.raw"],
        &["cp base.raw other.raw", "qemu-io -f raw -c 'write -q -P 22 9M 1M' other.raw"],
    ),
    (
        "snap.qcow2",
        &["base.raw"],
        &[
            "qemu-img convert -f raw -O qcow2 base.raw snap.qcow2",
            "qemu-img snapshot -c s1 snap.qcow2",
            "qemu-io -c 'write -q -P 23 1M 2M' snap.qcow2",
            "qemu-img snapshot -c s2 snap.qcow2",
            "qemu-io -c 'write -q -P 24 2M 2M' snap.qcow2",
        ],
    ),
    (
        "bitmap.qcow2",
        &["base.raw"],
        &[
            "qemu-img convert -f raw -O qcow2 base.raw bitmap.qcow2",
            "qemu-img bitmap --add bitmap.qcow2 b0",
            "qemu-io -c 'write -q -P 25 4M 1M' bitmap.qcow2",
            "qemu-img bitmap --add --disable bitmap.qcow2 b1",
        ],
    ),
    (
        "v2.qcow2",
        &["base.raw"],
        &["qemu-img convert -f raw -O qcow2 -o compat=0.10 base.raw v2.qcow2"],
    ),
    ("comp.qcow2", &["base.raw"], &["qemu-img convert -c -f raw -O qcow2 base.raw comp.qcow2"]),
    ("leak.qcow2", &["base.qcow2"], &["cp base.qcow2 leak.qcow2"]),
    (
        "data.qcow2",
        &["base.raw"],
        &[
            "qemu-img convert -f raw -O qcow2 -o data_file=data.raw,data_file_raw=on base.raw data.qcow2",
        ],
    ),
    ("data.raw", &["data.qcow2"], &[]),
    (
        "ext.qcow2",
        &["base.raw"],
        &[
            "qemu-img convert -f raw -O qcow2 -o extended_l2=on,cluster_size=128k base.raw ext.qcow2",
        ],
    ),
    ("blank.raw", &[], &["truncate -s 32M blank.raw"]),
    ("blank.img", &[], &["truncate -s 48M blank.img"]),
    ("blank2.img", &[], &["truncate -s 48M blank2.img"]),
    ("blank.qcow2", &[], &["qemu-img create -q -f qcow2 blank.qcow2 32M"]),
    ("disk.vmdk", &["base.raw"], &["qemu-img convert -f raw -O vmdk base.raw disk.vmdk"]),
    (
        "disk.vpc",
        &["base.raw"],
        &["qemu-img convert -f raw -O vpc -o subformat=fixed,force_size base.raw disk.vpc"],
    ),
    ("disk.vhdx", &["base.raw"], &["qemu-img convert -f raw -O vhdx base.raw disk.vhdx"]),
    ("secret", &[], &["printf passphrase > secret"]),
    (
        "luks.img",
        &["secret"],
        &[
            "qemu-img create -q -f luks --object secret,id=s,file=secret -o key-secret=s,iter-time=10 luks.img 8M",
        ],
    ),
    (
        "luks.qcow2",
        &["secret"],
        &["qemu-img create -q -f qcow2 --object secret,id=s,file=secret \
             -o encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10 luks.qcow2 8M"],
    ),
];

/// The directory of QEMU's programs.
pub(super) fn programs() -> PathBuf {
    let directory = env::var_os("ISOBATH_QEMU_DIR").map(PathBuf::from);
    directory.unwrap_or_else(|| qemu::program("qemu-img").parent().unwrap().to_owned())
}

/// Images, made once.
pub(super) struct Fixtures {
    directory: PathBuf,
}

impl Fixtures {
    /// Makes the images that a text names.
    pub(super) fn make(directory: &Path, text: &str) -> Self {
        fs::create_dir(directory).unwrap();
        make_base(&directory.join("base.raw"));
        for name in needed(text) {
            let (_, _, commands) = find(name);
            for command in *commands {
                let mut shell = Command::new("bash");
                let path = env::var("PATH").unwrap();
                shell.env("PATH", format!("{}:{path}", programs().display()));
                shell.current_dir(directory).args(["-c", command]);
                let _ = qemu::run(&mut shell).ok();
            }
            if name == "leak.qcow2" {
                leak(&directory.join(name));
            }
        }
        Self { directory: directory.to_owned() }
    }

    /// Copies the images that a text names.
    pub(super) fn copy(&self, text: &str, to: &Path) {
        for name in needed(text) {
            let mut copy = Command::new("cp");
            copy.arg("-a").arg(self.directory.join(name)).arg(to);
            let _ = isobath_testkit::process::run(&mut copy).ok();
        }
    }

    /// Describes an image; what it shows goes into the directory `shown`.
    pub(super) fn describe(&self, name: &str, shown: &Path) -> Described {
        fs::create_dir_all(shown).unwrap();
        describe(&self.directory, name, &[], shown)
    }

    /// Whether a file is as it was copied.
    pub(super) fn has(&self, name: &str, file: &Path) -> bool {
        let own = self.directory.join(name);
        own.exists() && same(&own, file)
    }
}

fn find(name: &str) -> &'static Image {
    IMAGES.iter().find(|(own, ..)| *own == name).expect("an image of this name")
}

/// The images that a text names, those below them first.
fn needed(text: &str) -> Vec<&'static str> {
    fn add(name: &'static str, needed: &mut Vec<&'static str>) {
        let (name, below, _) = find(name);
        below.iter().for_each(|below| add(below, needed));
        if !needed.contains(name) {
            needed.push(name);
        }
    }
    let part_of_a_name = |c: char| c.is_alphanumeric() || matches!(c, '.' | '-' | '_');
    let words: BTreeSet<&str> = text.split(|c: char| !part_of_a_name(c)).collect();
    let mut found = Vec::new();
    for (name, ..) in IMAGES.iter().filter(|(name, ..)| words.contains(name)) {
        add(name, &mut found);
    }
    found
}

/// Data that does not compress, patterns, zeroes that are written, and holes.
fn make_base(file: &Path) {
    let file = File::create_new(file).unwrap();
    file.set_len(SIZE).unwrap();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut noise = vec![0; 1 << 20];
    for bytes in noise.chunks_exact_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.copy_from_slice(&state.to_le_bytes());
    }
    let pattern = b"isobath ".repeat(1 << 16);
    for (at, bytes) in [
        (0, &noise[..]),
        (5 << 20, &vec![b'A'; 2 << 20]),
        (8 << 20, &vec![0; 1 << 20]),
        (9 << 20, &noise[..512 << 10]),
        (16 << 20, &pattern),
        (31 << 20, &noise[..128 << 10]),
    ] {
        file.write_all_at(bytes, at).unwrap();
    }
}

/// Makes the last cluster of a longer file a leaked one: it has a refcount, and nothing refers to it.
fn leak(image: &Path) {
    let file = File::options().read(true).write(true).open(image).unwrap();
    let length = file.metadata().unwrap().len().next_multiple_of(65536) + (1 << 20);
    file.set_len(length).unwrap();
    let number = |at: u64| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).unwrap();
        u64::from_be_bytes(bytes)
    };
    let block = number(number(48));
    file.write_all_at(&[0, 1], block + (length / 65536 - 1) * 2).unwrap();
}

/// The names of the files in a directory, without those of servers.
pub(super) fn files(directory: &Path) -> BTreeSet<String> {
    let names = fs::read_dir(directory).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let of_server = |name: &String| [".sock", ".pid", ".log"].iter().any(|end| name.ends_with(end));
    names.filter(|name| !of_server(name)).collect()
}

/// Whether a copy was not changed since, or holds the same bytes; those of large files are not looked at.
fn same(own: &Path, copy: &Path) -> bool {
    let [one, other] = [own, copy].map(|file| fs::metadata(file).unwrap());
    if one.len() != other.len() {
        return false;
    }
    one.modified().unwrap() == other.modified().unwrap()
        || one.len() <= 2 * SIZE && fs::read(own).unwrap() == fs::read(copy).unwrap()
}
