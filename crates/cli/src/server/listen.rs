//! Listening on the addresses given by options.

use super::endpoint::{Endpoint, is_public};
use crate::failure::Failure;
use isobath_ring::net::{Access, Listener};
use std::os::unix::fs::FileTypeExt as _;
use std::time::{Duration, Instant};
use std::{io, thread};

/// How long to wait for an address in use: on a busy machine, a killed server that others inspect may take seconds to
/// disappear.
const BIND_PATIENCE: Duration = Duration::from_secs(5);

/// Bytes of the longest path that a socket can have.
const LONGEST_PATH: usize = 107;

/// Binds the endpoints of an option.
pub(crate) fn listen(
    endpoints: &[Endpoint],
    option: &str,
    access: Access,
) -> Result<Vec<Listener>, Failure> {
    let bind = |endpoint: &Endpoint| -> Result<Listener, Failure> {
        let listener = bind(endpoint, option, access)?;
        if is_public(listener.address()) {
            tracing::warn!(
                "{endpoint} may be reachable from other machines, without authentication or \
                 encryption"
            );
        }
        Ok(listener)
    };
    let mut listeners = Vec::new();
    for endpoint in endpoints {
        for one in &endpoint.each()? {
            listeners.push(bind(one)?);
        }
    }
    Ok(listeners)
}

/// Binds the endpoint of an option.
pub(crate) fn bind(endpoint: &Endpoint, option: &str, access: Access) -> Result<Listener, Failure> {
    bind_soon(endpoint, access).map_err(|error| {
        let reason = reason(endpoint, &error, option);
        Failure::new(format_args!("cannot listen on {endpoint}: {reason}"))
    })
}

/// Why an endpoint cannot be bound.
fn reason(endpoint: &Endpoint, error: &io::Error, option: &str) -> String {
    let cause = isobath_storage::cause(error);
    if let Endpoint::Unix(path) = endpoint {
        let length = path.as_os_str().len();
        if length > LONGEST_PATH {
            return format!("its path has {length} bytes; a socket's has at most {LONGEST_PATH}");
        }
        let is_other = |found: std::fs::Metadata| !found.file_type().is_socket();
        if error.kind() == io::ErrorKind::AddrInUse && path.symlink_metadata().is_ok_and(is_other) {
            return format!(
                "there is a file that is no socket; remove it, or choose another address with {option}"
            );
        }
    }
    if error.kind() == io::ErrorKind::AddrInUse {
        return format!(
            "{cause}; another program already listens there; choose another address with {option}"
        );
    }
    cause
}

/// Binds an endpoint, and retries while a killed server still holds it: the kernel closes its sockets a moment after
/// the process is gone.
fn bind_soon(endpoint: &Endpoint, access: Access) -> io::Result<Listener> {
    let until = Instant::now() + BIND_PATIENCE;
    loop {
        match endpoint.bind(access) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < until => {
                thread::sleep(Duration::from_millis(10));
            }
            result => return result,
        }
    }
}
