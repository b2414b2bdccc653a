//! A guest for measurements: `bench/run --part boot chain_depth` runs it.
//!
//! `boot root RAW` makes the guest's disk; `boot nbd SOCKET` and `boot qcow2 IMAGE` boot from it by
//! an NBD server, or with QEMU opening the image, read the large file there, and print the seconds
//! from the start of QEMU to the guest's end as JSON.
#![allow(clippy::expect_used, reason = "a measurement fails by a panic")]

use isobath_testkit::fs;
use isobath_testkit::guest::Guest;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::path::Path;
use std::time::Instant;

const DISK: u64 = 160 << 20;
const FIELD: usize = 96 << 20;

fn main() {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let words: Vec<_> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["root", raw] => make_root(Path::new(raw)),
        ["nbd", socket] => boot(Guest::new().nbd(Path::new(socket), "")),
        ["qcow2", image] => boot(Guest::new().drive(&format!("file={image},format=qcow2"))),
        _ => panic!("usage: boot root RAW | boot nbd SOCKET | boot qcow2 IMAGE"),
    }
}

fn make_root(raw: &Path) {
    let mut field = vec![0; FIELD];
    StdRng::seed_from_u64(1).fill_bytes(&mut field);
    fs::make_root(raw, DISK, &[("field", &field)]);
}

fn boot(guest: Guest) {
    let began = Instant::now();
    let done = guest.root().run("echo read=$(cat /data/field | wc -c)");
    let seconds = began.elapsed().as_secs_f64();
    assert_eq!(done.values("read"), [FIELD.to_string()], "{}", done.console);
    println!("{}", serde_json::json!({ "seconds": seconds }));
}
