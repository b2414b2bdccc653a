//! `isobath measure` prints what `qemu-img measure` prints.

use super::chains::{isobath, qemu_img, random_chain, random_options};
use isobath_testkit::args;
use isobath_testkit::seed::Seed;
use rand::RngExt;
use std::ffi::OsString;
use std::path::Path;

#[track_caller]
fn assert_same(directory: &Path, arguments: &[OsString]) {
    let theirs = qemu_img(directory, arguments).ok();
    let ours = isobath(directory, arguments).ok();
    assert_eq!(theirs.text(), ours.text(), "{}", ours.command);
}

#[test]
fn random_chains_and_sizes() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    for _ in 0..10 {
        let chain = random_chain(&mut rng);
        for output in ["human", "json"] {
            let output = format!("--output={output}");
            let options = random_options(&mut rng);
            let to = args!["measure", &output, "-O", "qcow2", "-o", options, "-f", chain.format];
            assert_same(chain.path(), &[to, args![chain.name()]].concat());
            let to = args!["measure", &output, "-O", "raw", "-f", chain.format, chain.name()];
            assert_same(chain.path(), &to);
            let mut options = random_options(&mut rng);
            if rng.random() {
                options.push_str(",preallocation=falloc");
            }
            let size = (rng.random_range(0..1_u64 << 33)).to_string();
            let empty = args!["measure", &output, "-O", "qcow2", "-o", options, "--size", size];
            assert_same(chain.path(), &empty);
        }
    }
}
