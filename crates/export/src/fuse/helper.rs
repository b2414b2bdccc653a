//! `fusermount3`, which mounts on behalf of unprivileged users.

use super::channel::DEVICE;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

/// The program's name, searched for in `PATH`.
pub(super) const PROGRAM: &str = "fusermount3";
/// The environment variable with the descriptor number of the program's socket.
const SOCKET: &str = "_FUSE_COMMFD";

/// Mounts through the helper, and returns the connection. `options` is the value of its `-o`.
///
/// # Errors
/// `NotFound` if there is no helper; its error message if it fails.
pub(super) fn mount(path: &Path, options: &str) -> io::Result<OwnedFd> {
    let (ours, theirs) = UnixStream::pair()?;
    let number = theirs.as_raw_fd();
    let mut command = Command::new(PROGRAM);
    command.arg("-o").arg(options).arg("--").arg(path).env(SOCKET, number.to_string());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    // SAFETY: the closure runs in the child before `exec`, and only makes a system call.
    unsafe {
        command.pre_exec(move || match libc::fcntl(number, libc::F_SETFD, 0) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        });
    }
    let child = command.spawn()?;
    drop(theirs);
    let received = ours.recv_with_fd(&mut [0; 1]);
    let output = child.wait_with_output()?;
    match received {
        Ok((_, Some(device))) if output.status.success() => {
            let device = OwnedFd::from(device);
            prepare(&device)?;
            Ok(device)
        }
        _ => Err(failure(&output)),
    }
}

/// Unmounts through the helper, now or when the file is no longer in use.
pub(super) fn unmount(path: &Path) -> io::Result<()> {
    let arguments = ["-u", "-z", "-q", "--"].map(OsString::from);
    let output = Command::new(PROGRAM).args(arguments).arg(path).output()?;
    if output.status.success() { Ok(()) } else { Err(failure(&output)) }
}

fn failure(output: &Output) -> io::Error {
    let said = String::from_utf8_lossy(&output.stderr);
    match said.trim() {
        "" => io::Error::other(format!("{} (no error message)", output.status)),
        said => io::Error::other(said.to_owned()),
    }
}

/// Sets our own flags on a descriptor of `/dev/fuse` that another program opened.
fn prepare(device: &OwnedFd) -> io::Result<()> {
    let number = device.as_raw_fd();
    // SAFETY: plain system calls on an open descriptor.
    let done = unsafe {
        libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) >= 0
            && libc::fcntl(number, libc::F_SETFL, libc::O_NONBLOCK) >= 0
    };
    if done {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    Err(io::Error::new(error.kind(), format!("cannot set up the helper's {DEVICE}: {error}")))
}
