//! TLS for NBD and QMP, without I/O on sockets.
//!
//! [`ServerCredentials`] and [`ClientCredentials`] are read from a directory with the file names of QEMU's
//! `tls-creds-x509`. A [`Channel`] is one encrypted connection: bytes from the socket go in, bytes for the socket come
//! out.
//!
//! TLS 1.2 and 1.3 are spoken. Sessions are not resumed, so each connection shows its certificate.

mod blocking;
mod channel;
mod credentials;
mod der;
#[cfg(test)]
mod forging;
mod name;

pub use blocking::{Blocking, Unread, send_output};
pub use channel::Channel;
pub use credentials::{
    Admission, ClientCredentials, CredentialsError, NoServerName, ServerCredentials,
};
pub use name::distinguished_name;
/// Why a connection failed.
pub use rustls::Error as TlsError;
