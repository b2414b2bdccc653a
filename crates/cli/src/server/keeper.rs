//! The keepers of block devices: this program again, under a name by which it knows what it is for.

use crate::server::io_flusher;
use isobath_export::keeper::{self, Keeper};
use std::env;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

/// The name, which process lists show.
const NAME: &str = "isobath-ublk-keeper";

/// Starts the keeper of a device with this number, or of any that is free, which may wait so many seconds for another
/// server. From then on this process can write what the kernel's reclaim of memory waits for.
///
/// # Errors
/// See [`Keeper::start`].
pub(crate) fn start(number: Option<u32>, outlives: Option<u32>) -> Result<Keeper, String> {
    io_flusher::become_one();
    let mut program = Command::new("/proc/self/exe");
    program.arg0(NAME).env_clear();
    Keeper::start(program, number, outlives)
}

/// If this process is a keeper, is one until the server has ended.
pub(crate) fn keep() -> Option<ExitCode> {
    let mut arguments = env::args_os();
    (arguments.next()? == NAME).then(|| keeper::keep(arguments))
}
