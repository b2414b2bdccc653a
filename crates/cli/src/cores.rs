//! Core dumps of processes that hold keys or guests' data.

use rustix::process::{DumpableBehavior, Resource, Rlimit};
use std::env;

/// The environment variable that leaves core dumps and debuggers on, if its value is `on`.
const VARIABLE: &str = "ISOBATH_CORE_DUMPS";

/// From now on this process leaves no core dump, and programs of the same user can neither trace it nor read its
/// memory. Root's can.
///
/// It may be called again, and has to be after a change of the user, which undoes it.
pub(crate) fn withhold() {
    if env::var_os(VARIABLE).is_some_and(|value| value == "on") {
        return;
    }
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    let limited = rustix::process::setrlimit(Resource::Core, none);
    // The limit does not concern a program to which the kernel pipes core dumps.
    let hidden = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
    if let Err(error) = limited.and(hidden) {
        tracing::warn!(%error, "the process may leave a core dump, with keys and guests' data");
    }
}
