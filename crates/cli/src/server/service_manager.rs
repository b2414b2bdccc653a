//! What a service manager is told (`sd_notify(3)`).

use std::env;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Tells the service manager, if one waits to hear, such as `READY=1`.
///
/// # Errors
/// It cannot be told.
pub(crate) fn tell(state: &str) -> io::Result<()> {
    let Some(name) = env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty()) else {
        return Ok(());
    };
    let address = match name.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(&name)?,
    };
    // Not connected: a confined server may not connect.
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address).map(drop)
}
