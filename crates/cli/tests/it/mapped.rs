//! Servers read what is in the page cache through mappings of the images' files.

use crate::serving::{QemuIo, Served};
use std::fs::{self, OpenOptions};
use std::path::Path;
use tempfile::TempDir;

/// An image of 1 MiB, all of it the byte `pattern`.
fn image(directory: &TempDir, name: &str, pattern: u8) -> std::path::PathBuf {
    let path = directory.path().join(name);
    fs::write(&path, vec![pattern; 1 << 20]).unwrap();
    path
}

fn maps(served: &Served, path: &Path) -> bool {
    let maps = fs::read_to_string(format!("/proc/{}/maps", served.server.pid())).unwrap();
    maps.contains(path.to_str().unwrap())
}

fn open(served: &Served, export: &str) -> QemuIo {
    QemuIo::open("raw", served.uri(export))
}

/// Reads all of a disk several times, a page at a time.
fn read_often(client: &mut QemuIo, pattern: u8) {
    for _ in 0..3 {
        for page in 0..64 {
            let found = client.run(&format!("read -q -P {pattern} {}k 4k", page * 4));
            assert!(!found.contains("failed"), "{found}");
        }
    }
}

#[test]
fn a_disk_whose_file_is_cut_short_harms_no_other() {
    let directory = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (one, two) = (image(&directory, "one.raw", 1), image(&directory, "two.raw", 2));
    let served = Served::start(&[&one, &two], &["--format", "raw"]);
    let (mut first, mut second) = (open(&served, "one"), open(&served, "two"));
    read_often(&mut first, 1);
    read_often(&mut second, 2);
    assert!(maps(&served, &one) && maps(&served, &two));
    // What is written is read, also by others.
    assert!(!first.run("write -q -P 7 0 8k").contains("failed"));
    assert!(!first.run("read -q -P 7 0 8k").contains("failed"));
    OpenOptions::new().write(true).open(&one).unwrap().set_len(64 << 10).unwrap();
    for page in 16..64 {
        let found = first.run(&format!("read -q -P 0 {}k 4k", page * 4));
        assert!(!found.contains("failed"), "{found}");
    }
    assert!(!first.run("read -q -P 7 0 8k").contains("failed"));
    assert!(!maps(&served, &one) && maps(&served, &two));
    read_often(&mut second, 2);
    drop((first, second));
    served.stop();
}

#[test]
fn nothing_is_mapped_if_the_server_is_told_so_or_bypasses_the_page_cache() {
    let directory = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let one = image(&directory, "one.raw", 1);
    for options in [&["--map-reads", "0"], &["--cache", "none"]] {
        let served = Served::start(&[&one], &[&["--format", "raw"][..], options].concat());
        let mut client = open(&served, "one");
        read_often(&mut client, 1);
        assert!(!maps(&served, &one), "{options:?}");
        drop(client);
        served.stop();
    }
}
