//! Core dumps of processes that hold keys or guests' data.

use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior};
use std::os::fd::AsRawFd;
use std::{env, fs, io};

/// The environment variable that leaves core dumps and debuggers on, if its value is `on`.
const VARIABLE: &str = "ISOBATH_CORE_DUMPS";

/// From now on this process leaves no core dump, and programs of the same user can neither trace it nor read its
/// memory. Root's can.
///
/// Before Linux 5.14 a process that is closed to its user's programs cannot read its own `/proc/self/fdinfo` either,
/// unless it is root's. It says there which locks the descriptors hold that were handed in, so that the process stays
/// open where it could not.
///
/// It may be called again, and has to be after a change of the user, which undoes it.
pub(crate) fn withhold() {
    if env::var_os(VARIABLE).is_some_and(|value| value == "on") {
        return;
    }
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    let limited = rustix::process::setrlimit(Resource::Core, none);
    // The limit does not concern a program to which the kernel pipes core dumps.
    let hidden = set_dumpable_behavior(DumpableBehavior::NotDumpable);
    if let Err(error) = limited.and(hidden) {
        tracing::warn!(%error, "the process may leave a core dump, with keys and guests' data");
    }
    if !is_barred_from_itself() {
        return;
    }
    match set_dumpable_behavior(DumpableBehavior::Dumpable) {
        Ok(()) => tracing::warn!(
            "programs of the same user can trace this process and read its memory: this kernel (before Linux 5.14) \
             would not let it read its own /proc/self/fdinfo otherwise"
        ),
        Err(error) => tracing::warn!(%error, "the process cannot read its own /proc/self/fdinfo"),
    }
}

/// Whether the process may not read what the kernel says of its descriptors.
fn is_barred_from_itself() -> bool {
    let read = io::pipe()
        .and_then(|(pipe, _end)| fs::read(format!("/proc/self/fdinfo/{}", pipe.as_raw_fd())));
    // Any other error says nothing of its rights.
    read.is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
}
