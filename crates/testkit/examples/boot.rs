//! A guest for measurements: `bench/run --part boot chain_depth` runs it.
//!
//! `boot root RAW MIB` makes the guest's disk, of so many MiB; `boot nbd SOCKET` and `boot qcow2 IMAGE`
//! boot from it by an NBD server, or with QEMU opening the image, read the large file there, and print
//! the seconds from the start of QEMU to the guest's end as JSON. With `boot nbd SOCKET MIB` the guest
//! reads so much of the file.
#![allow(clippy::expect_used, reason = "a measurement fails by a panic")]

use isobath_testkit::fs;
use isobath_testkit::guest::Guest;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::path::Path;
use std::time::Instant;

const FIELD: usize = 96 << 20;
/// Reads all of it.
const WHOLE: &str = "cat /data/field";

fn main() {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let words: Vec<_> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["root", raw, mib] => make_root(Path::new(raw), mib.parse().expect("a number of MiB")),
        ["nbd", socket] => boot(nbd(socket), WHOLE, FIELD),
        ["nbd", socket, mib] => {
            let mib: usize = mib.parse().expect("a number of MiB");
            boot(nbd(socket), &format!("dd if=/data/field bs=1M count={mib}"), mib << 20);
        }
        ["qcow2", image] => {
            boot(Guest::new().drive(&format!("file={image},format=qcow2")), WHOLE, FIELD);
        }
        _ => panic!("usage: boot root RAW MIB | boot nbd SOCKET [MIB] | boot qcow2 IMAGE"),
    }
}

/// Fills a disk with the file that is read, and as many others of its size as leave a sixteenth for the file system.
fn make_root(raw: &Path, mib: u64) {
    let mut field = vec![0; FIELD];
    StdRng::seed_from_u64(1).fill_bytes(&mut field);
    let others = ((mib << 20) / 16 * 15 / FIELD as u64).saturating_sub(1);
    let others: Vec<String> = (0..others).map(|number| format!("other-{number}")).collect();
    let names = std::iter::once("field").chain(others.iter().map(String::as_str));
    let files: Vec<(&str, &[u8])> = names.map(|name| (name, &field[..])).collect();
    fs::make_root(raw, mib << 20, &files);
}

fn nbd(socket: &str) -> Guest {
    Guest::new().nbd(Path::new(socket), "")
}

/// Boots, and runs a command that reads so many bytes.
fn boot(guest: Guest, command: &str, bytes: usize) {
    let began = Instant::now();
    let done = guest.root().run(&format!("echo read=$({command} | wc -c)"));
    let seconds = began.elapsed().as_secs_f64();
    assert_eq!(done.values("read"), [bytes.to_string()], "{}", done.console);
    println!("{}", serde_json::json!({ "seconds": seconds }));
}
