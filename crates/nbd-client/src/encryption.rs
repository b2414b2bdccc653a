//! What encrypted connections need.

use crate::name::ExportName;
use isobath_tls::ClientCredentials;
use std::path::PathBuf;

/// How the connections to an export are encrypted.
#[derive(Clone, Debug)]
pub struct Encryption {
    /// The client's certificates.
    pub credentials: ClientCredentials,
    /// The host name or IP address that the server's certificate must be for.
    pub host: String,
}

/// An export is to be encrypted in two ways.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{export}' is already used with the credentials in '{}' for a server named '{host}'; use these \
     for all names of this export",
    directory.display()
)]
pub struct OtherEncryption {
    /// The export.
    pub export: ExportName,
    /// The directory of the credentials that are used.
    pub directory: PathBuf,
    /// The host name that is used.
    pub host: String,
}

impl Encryption {
    /// Whether both have the same effect. Credentials are told apart by their directories.
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        self.credentials.directory() == other.credentials.directory() && self.host == other.host
    }
}
