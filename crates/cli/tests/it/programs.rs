//! `isobath` and `qemu-img`, run in a directory.

use isobath_testkit::process::{Finished, run};
use isobath_testkit::qemu;
use std::cell::Cell;
use std::ffi::OsStr;
use std::panic::catch_unwind;
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
    if let Some(defect) = DEFECT.get() {
        command.env("ISOBATH_DEFECT", defect);
    }
    run(command.current_dir(directory).env("ISOBATH_LOG", level).args(arguments))
}

thread_local! {
    static DEFECT: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// Runs a test while each `isobath` that it starts has this defect. Returns why the test fails, if it does.
pub(crate) fn fails_with(defect: &'static str, test: fn()) -> Option<String> {
    DEFECT.set(Some(defect));
    let failed = catch_unwind(test).err();
    DEFECT.set(None);
    failed.map(|reason| match reason.downcast::<String>() {
        Ok(text) => *text,
        Err(reason) => reason.downcast_ref::<&str>().map(ToString::to_string).unwrap_or_default(),
    })
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
