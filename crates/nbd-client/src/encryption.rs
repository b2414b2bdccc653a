//! What encrypted connections need.

use isobath_tls::ClientCredentials;

/// How the connections to an export are encrypted.
#[derive(Clone, Debug)]
pub struct Encryption {
    /// The client's certificates.
    pub credentials: ClientCredentials,
    /// The host name or IP address that the server's certificate must be for.
    pub host: String,
}
