//! Chains deeper than a process may have files open: the same bytes as with a descriptor for each
//! layer, with an index and without.

use isobath_testkit::process::run;
use isobath_testkit::{args, qemu};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

const ISOBATH: &str = env!("CARGO_BIN_EXE_isobath");

/// Runs a command that may open so many files.
fn limited(files: u64, arguments: impl IntoIterator<Item = OsString>) {
    let mut command = Command::new(ISOBATH);
    command.args(arguments);
    let limit = move || {
        let limit = libc::rlimit { rlim_cur: files, rlim_max: files };
        // SAFETY: the limit is read during the call only.
        if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    };
    // SAFETY: between fork and exec it makes one system call.
    unsafe { command.pre_exec(limit) };
    let _ = run(&mut command).ok();
}

fn generate(directory: &Path, layers: u32, more: &[&str]) {
    let layers = layers.to_string();
    let mut arguments = args!["chain", "generate", "--layers", layers, "--size", "4M"];
    arguments.extend(args!["--cluster-size", "4k", "--data", "pattern"]);
    arguments.extend(more.iter().map(OsString::from));
    arguments.push(directory.into());
    limited(1024, arguments);
}

#[test]
fn descriptors_are_shared_out() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    generate(&at("plain"), 400, &[]);
    generate(&at("indexed"), 400, &["--indexed"]);
    let few = at("few.raw");
    let many = at("many.raw");
    let active = |chain: &str| at(chain).join("layer-00399.qcow2");
    limited(1024, args!["convert", "-O", "raw", active("plain"), &many]);
    for chain in ["plain", "indexed"] {
        limited(128, args!["convert", "-O", "raw", active(chain), &few]);
        assert!(fs::read(&few).unwrap() == fs::read(&many).unwrap(), "{chain}");
    }
    limited(128, args!["index", "--verify", active("indexed")]);
    limited(128, args!["info", "--backing-chain", active("indexed")]);
}

#[test]
fn qemu_reads_the_same_from_an_indexed_chain() {
    let directory = tempfile::tempdir().unwrap();
    let chain = directory.path().join("chain");
    generate(&chain, 70, &["--indexed", "--distribution", "zipf"]);
    let active = chain.join("layer-00069.qcow2");
    let raw = directory.path().join("disk.raw");
    limited(64 + 70, args!["convert", "-O", "raw", &active, &raw]);
    qemu::assert_clean(&active);
    assert!(qemu::read_disk(&active, "qcow2") == fs::read(&raw).unwrap());
}
