//! What the tests share.

use isobath_nbd_client::{NbdFile, NbdHost};
use isobath_ring::block_on;
use isobath_storage::{Host, IoBuf, Locking, OpenMode, Result, Storage};
use isobath_testkit::process::{Ready, Server};
use isobath_testkit::tools;
use std::path::{Path, PathBuf};
use std::process::Command;

pub(crate) const WRITABLE: OpenMode =
    OpenMode { writable: true, direct: false, locking: Locking::Exclusive };

/// The name of the default export of the server at a socket.
pub(crate) fn name(socket: &Path) -> PathBuf {
    format!("nbd:unix:{}", socket.display()).into()
}

pub(crate) fn open(socket: &Path) -> Result<NbdFile> {
    block_on(NbdHost::default().open(&name(socket), WRITABLE))
}

pub(crate) async fn read(file: &NbdFile, offset: u64, length: usize) -> Vec<u8> {
    let mut buf = IoBuf::zeroed(length);
    buf.fill(0xEE);
    file.read_at(offset, buf).await.unwrap().to_vec()
}

/// Serves with `nbdkit`: what, and with which filters.
pub(crate) fn nbdkit(socket: &Path, words: &[&str]) -> Server {
    let pid_file = socket.with_extension("pid");
    let mut command = Command::new(tools::require("nbdkit"));
    command.args(["--foreground", "--unix"]).arg(socket).arg("--pidfile").arg(&pid_file);
    Server::start(command.args(words), Ready::File(&pid_file))
}
