//! `isobath` and `qemu-img`, run in a directory.

use isobath_testkit::process::{Finished, run};
use isobath_testkit::qemu;
use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

/// Runs `isobath` in a directory.
#[track_caller]
pub(crate) fn isobath<I>(directory: &Path, arguments: I) -> Finished
where
    I: IntoIterator,
    I::Item: AsRef<OsStr>,
{
    logged(directory, arguments, "warn")
}

/// Runs `isobath` in a directory; its log has this level.
#[track_caller]
pub(crate) fn logged<I>(directory: &Path, arguments: I, level: &str) -> Finished
where
    I: IntoIterator,
    I::Item: AsRef<OsStr>,
{
    let mut command = Command::new(env!("CARGO_BIN_EXE_isobath"));
    run(command.current_dir(directory).env("ISOBATH_LOG", level).args(arguments))
}

/// Runs `qemu-img` in a directory.
#[track_caller]
pub(crate) fn qemu_img<I>(directory: &Path, arguments: I) -> Finished
where
    I: IntoIterator,
    I::Item: AsRef<OsStr>,
{
    qemu::run(Command::new(qemu::program("qemu-img")).current_dir(directory).args(arguments))
}
