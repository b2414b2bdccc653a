//! QEMU's programs, and checks of images with them.

use crate::args;
use crate::process::{self, Finished, Ready, Server, run_program};
use crate::tools;
use serde_json::Value;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The path of one of QEMU's programs: in `ISOBATH_QEMU_DIR` if that is set, else in `PATH`.
#[track_caller]
pub fn program(name: &str) -> PathBuf {
    let Some(directory) = env::var_os("ISOBATH_QEMU_DIR") else { return tools::require(name) };
    let path = Path::new(&directory).join(name);
    assert!(
        path.exists(),
        "ISOBATH_QEMU_DIR: {} does not exist; run scripts/qemu10",
        path.display()
    );
    path
}

/// The version of the chosen QEMU, such as `(7, 2)`.
#[track_caller]
pub fn version() -> (u32, u32) {
    let text = img(["--version"]).ok().text();
    let numbers = text.split_once("version ").map_or("", |(_, rest)| rest);
    let mut parts = numbers.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    match (parts.next(), parts.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor),
        _ => panic!("no version in {text:?}"),
    }
}

/// Runs `qemu-img`.
#[track_caller]
pub fn img<I>(arguments: I) -> Finished
where
    I: IntoIterator,
    I::Item: AsRef<OsStr>,
{
    run(Command::new(program("qemu-img")).args(arguments))
}

/// Runs a QEMU program that may create an encrypted image.
///
/// To choose the number of hash iterations for a passphrase, QEMU divides by the CPU time that it has used, and gives
/// up if that is still 0, as it can be in the first milliseconds on some machines. The command is then repeated.
///
/// # Panics
///
/// If QEMU gives up every time.
#[track_caller]
pub fn run(command: &mut Command) -> Finished {
    for _ in 0..1000 {
        let done = process::run(command);
        if !done.stderr.contains("Unable to get accurate CPU usage") {
            return done;
        }
    }
    panic!("QEMU cannot measure its processor time on this machine");
}

/// Runs `qemu-io` with commands on an image of the given format.
#[track_caller]
pub fn io<S: AsRef<OsStr>>(image: &Path, format: &str, commands: &[S]) -> Finished {
    let mut arguments = args!["-f", format];
    for command in commands {
        arguments.extend([OsString::from("-c"), command.as_ref().to_owned()]);
    }
    arguments.push(image.into());
    run_program(program("qemu-io"), arguments)
}

/// Creates an image of `size` bytes; `options` as for `qemu-img create -o`, or empty.
#[track_caller]
pub fn create(image: &Path, format: &str, size: u64, options: &str) {
    let mut arguments = args!["create", "-q", "-f", format];
    if !options.is_empty() {
        arguments.extend(args!["-o", options]);
    }
    arguments.extend(args![image, size.to_string()]);
    let _ = img(arguments).ok();
}

/// Creates a qcow2 overlay over `backing`, of the same size.
#[track_caller]
pub fn create_overlay(image: &Path, backing: &Path, backing_format: &str, options: &str) {
    let mut arguments = args!["create", "-q", "-f", "qcow2", "-b", backing, "-F", backing_format];
    if !options.is_empty() {
        arguments.extend(args!["-o", options]);
    }
    arguments.push(image.into());
    let _ = img(arguments).ok();
}

/// The output of `qemu-img info` for one image, which may be open elsewhere.
#[track_caller]
pub fn info(image: &Path) -> Value {
    img(args!["info", "-U", "--output=json", image]).ok().json()
}

/// The output of `qemu-img map` for a chain.
#[track_caller]
pub fn map(image: &Path) -> Value {
    img(args!["map", "--output=json", image]).ok().json()
}

/// Runs `qemu-img check` on one layer. Exit codes: 0 if it is clean, 2 if corrupt, 3 if it has leaks.
#[track_caller]
pub fn check(image: &Path) -> Finished {
    img(args!["check", "-f", "qcow2", "--output=json", image])
}

/// Fails the test unless `qemu-img check` finds neither errors nor leaks in the layer.
#[track_caller]
pub fn assert_clean(image: &Path) {
    let _ = check(image).ok();
}

/// Fails the test unless two disks have the same size and bytes.
#[track_caller]
pub fn assert_identical(one: &Path, one_format: &str, other: &Path, other_format: &str) {
    let _ = img(args!["compare", "-s", "-f", one_format, "-F", other_format, one, other]).ok();
}

/// Every byte of a disk, as QEMU reads it.
#[track_caller]
pub fn read_disk(image: &Path, format: &str) -> Vec<u8> {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let raw = directory.path().join("raw");
    to_raw(image, format, &raw);
    fs::read(raw).expect("read what qemu-img has written")
}

/// Writes a disk's bytes, as QEMU reads them, to a sparse file.
#[track_caller]
pub fn to_raw(image: &Path, format: &str, raw: &Path) {
    let _ = img(args!["convert", "-f", format, "-O", "raw", image, raw]).ok();
}

/// Serves an image with `qemu-nbd` on a unix socket, to any number of clients until stopped.
///
/// `options` are additional arguments, such as `--export-name` or `--read-only`.
#[track_caller]
pub fn nbd(image: &Path, format: &str, socket: &Path, options: &[&str]) -> Server {
    let mut command = Command::new(program("qemu-nbd"));
    let pid_file = socket.with_extension("pid");
    command.args(["--persistent", "--shared=0", "--discard=unmap", "--format", format]);
    command.arg("--socket").arg(socket).arg("--pid-file").arg(&pid_file).args(options).arg(image);
    Server::start(&mut command, Ready::File(&pid_file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_qemu_io_writes_is_read_back_and_judged() {
        let directory = tempfile::tempdir().unwrap();
        let (base, top) = (directory.path().join("base"), directory.path().join("top"));
        create(&base, "qcow2", 1 << 20, "cluster_size=4k");
        create_overlay(&top, &base, "qcow2", "");
        let _ = io(&top, "qcow2", &["write -P 0x5a 3 70000"]).ok();
        let bytes = read_disk(&top, "qcow2");
        assert_eq!(bytes.len(), 1 << 20);
        assert!(bytes[3..70003].iter().all(|byte| *byte == 0x5a));
        assert!(bytes[..3].iter().chain(&bytes[70003..]).all(|byte| *byte == 0));
        assert_clean(&top);
        assert_eq!(info(&top)["full-backing-filename"], base.to_str().unwrap());
        assert!(version() >= (7, 2));
    }

    #[test]
    #[should_panic(expected = "expected exit code 0")]
    fn a_leaking_image_is_not_clean() {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("image");
        create(&image, "qcow2", 1 << 20, "refcount_bits=16");
        // The refcount block is at cluster 2: give cluster 9 a reference that nothing holds.
        let mut bytes = fs::read(&image).unwrap();
        bytes.resize(10 << 16, 0);
        bytes[(2 << 16) + 2 * 9 + 1] = 1;
        fs::write(&image, bytes).unwrap();
        assert_clean(&image);
    }
}
