//! Certificates and keys, in the files of QEMU's `tls-creds-x509`.

use crate::channel::Channel;
use crate::name::distinguished_name;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{
    CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName, UnixTime,
};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier};
use rustls::{
    CertificateError, ClientConfig, ClientConnection, DigitallySignedStruct, DistinguishedName,
    Error, RootCertStore, ServerConfig, ServerConnection, SignatureScheme, SupportedCipherSuite,
};
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use zeroize::Zeroizing;

/// The certificates of the authorities that are trusted.
const AUTHORITIES: &str = "ca-cert.pem";
/// Certificates that the authorities have revoked; may be absent.
const REVOKED: &str = "ca-crl.pem";

/// Why credentials cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CredentialsError {
    /// A file cannot be read.
    #[error("cannot read '{}': {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        error: io::Error,
    },
    /// A file does not contain what its name promises.
    #[error("'{}' contains no usable {what}: {reason}", path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// What it should contain.
        what: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// The certificate and the key do not belong together, or this implementation cannot use them.
    #[error(
        "the certificate in '{}' and the key in '{}' cannot be used: {error}",
        certificate.display(),
        key.display()
    )]
    Pair {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// Why.
        #[source]
        error: Error,
    },
    /// There is a certificate without its key, or the reverse.
    #[error("'{}' is missing; put it beside '{}', or remove that", missing.display(), there.display())]
    Half {
        /// The missing file.
        missing: PathBuf,
        /// The file that is there.
        there: PathBuf,
    },
    /// TLS cannot be set up.
    #[error("TLS cannot be set up: {0}")]
    Setup(#[source] Error),
}

/// The host name by which a server is to be verified is not one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a host name or address that a certificate can be for")]
pub struct NoServerName(String);

/// Who may connect to a server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Admission {
    /// Who has a certificate of the authorities in `ca-cert.pem`.
    #[default]
    Certified,
    /// Who has a certificate of the authorities in `ca-cert.pem` with one of these
    /// [distinguished names](crate::distinguished_name).
    Named(Vec<String>),
    /// Everyone: the connection is encrypted, and the client is not authenticated.
    Everyone,
}

/// A server's certificate and key, and who may connect to it.
#[derive(Clone)]
pub struct ServerCredentials {
    config: Arc<ServerConfig>,
    directory: PathBuf,
}

/// A client's authorities, and its certificate and key, if it has any.
#[derive(Clone)]
pub struct ClientCredentials {
    config: Arc<ClientConfig>,
    directory: PathBuf,
}

impl fmt::Debug for ServerCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerCredentials")
            .field("directory", &self.directory)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for ClientCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientCredentials")
            .field("directory", &self.directory)
            .finish_non_exhaustive()
    }
}

/// What encrypts. The suites of TLS 1.2 whose keys are used up after a number of records are the last choice.
pub(crate) fn provider() -> CryptoProvider {
    let mut provider = ring::default_provider();
    provider.cipher_suites.sort_by_key(|suite| match suite {
        SupportedCipherSuite::Tls12(suite) => suite.common.confidentiality_limit < u64::MAX,
        SupportedCipherSuite::Tls13(_) => false,
    });
    provider
}

impl ServerCredentials {
    /// Reads `server-cert.pem`, with the certificates between it and its authority after it, and `server-key.pem`;
    /// unless everyone is admitted also `ca-cert.pem` and, if it is there, `ca-crl.pem`. Later changes of the files
    /// have no effect.
    ///
    /// # Errors
    /// A file is missing or unusable, or the certificate and the key do not belong together.
    pub fn read(directory: &Path, admission: Admission) -> Result<Self, CredentialsError> {
        Self::read_with(provider(), directory, admission)
    }

    /// As [`read`](Self::read), with another provider of cryptography, for tests.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_with(
        provider: CryptoProvider,
        directory: &Path,
        admission: Admission,
    ) -> Result<Self, CredentialsError> {
        let provider = Arc::new(provider);
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(CredentialsError::Setup)?;
        let builder = match admission {
            Admission::Everyone => builder.with_no_client_auth(),
            admission => {
                let verifier = client_verifier(&provider, directory, admission)?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let pair = Pair::read(directory, "server")?;
        let built = builder.with_single_cert(pair.certificates, pair.key);
        let mut config = built.map_err(|error| CredentialsError::Pair {
            certificate: pair.certificate_file,
            key: pair.key_file,
            error,
        })?;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        config.ignore_client_order = true;
        Ok(Self { config: Arc::new(config), directory: directory.to_owned() })
    }

    /// The directory that they were read from.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The server's side of a new connection.
    ///
    /// # Errors
    /// TLS cannot be set up.
    pub fn channel(&self) -> Result<Channel, Error> {
        ServerConnection::new(self.config.clone()).map(|connection| Channel::new(connection.into()))
    }
}

impl ClientCredentials {
    /// Reads `ca-cert.pem` and, if they are there, `ca-crl.pem` and `client-cert.pem` with `client-key.pem`. Later
    /// changes of the files have no effect.
    ///
    /// # Errors
    /// A file is missing or unusable, or the certificate and the key do not belong together.
    pub fn read(directory: &Path) -> Result<Self, CredentialsError> {
        Self::read_with(provider(), directory)
    }

    /// As [`read`](Self::read), with another provider of cryptography, for tests.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_with(provider: CryptoProvider, directory: &Path) -> Result<Self, CredentialsError> {
        let provider = Arc::new(provider);
        // One directory has one name. If there is none, the first file that is missing says so.
        let real = fs::canonicalize(directory).unwrap_or_else(|_| directory.to_owned());
        let directory = real.as_path();
        let verifier = Arc::new(server_verifier(&provider, directory)?);
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(CredentialsError::Setup)?
            .dangerous()
            .with_custom_certificate_verifier(verifier);
        let mut config = match Pair::read_if_there(directory, "client")? {
            None => builder.with_no_client_auth(),
            Some(pair) => {
                let built = builder.with_client_auth_cert(pair.certificates, pair.key);
                built.map_err(|error| CredentialsError::Pair {
                    certificate: pair.certificate_file,
                    key: pair.key_file,
                    error,
                })?
            }
        };
        config.resumption = rustls::client::Resumption::disabled();
        Ok(Self { config: Arc::new(config), directory: real })
    }

    /// The directory that they were read from, without symbolic links.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The client's side of a new connection to a server, which must show a certificate for this host name or IP
    /// address.
    ///
    /// # Errors
    /// It is no such name, or TLS cannot be set up.
    pub fn channel(&self, host: &str) -> io::Result<Channel> {
        let name = ServerName::try_from(host.to_owned())
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, NoServerName(host.into())))?;
        let connection = ClientConnection::new(self.config.clone(), name);
        let connection = connection.map_err(io::Error::other)?;
        Ok(Channel::new(connection.into()))
    }
}

fn read(path: &Path) -> Result<Zeroizing<Vec<u8>>, CredentialsError> {
    let read = fs::read(path).map(Zeroizing::new);
    read.map_err(|error| CredentialsError::Read { path: path.to_owned(), error })
}

fn unusable(path: &Path, what: &'static str, reason: &dyn fmt::Display) -> CredentialsError {
    CredentialsError::Unusable { path: path.to_owned(), what, reason: reason.to_string() }
}

/// The PEM sections of one kind in a file, at least one.
fn sections<T: PemObject>(path: &Path, what: &'static str) -> Result<Vec<T>, CredentialsError> {
    let text = read(path)?;
    let found: Result<Vec<T>, pem::Error> = T::pem_slice_iter(&text).collect();
    let found = found.map_err(|error| unusable(path, what, &error))?;
    if found.is_empty() {
        return Err(unusable(path, what, &"there is no section of that kind in PEM form"));
    }
    Ok(found)
}

/// The authorities.
fn roots(directory: &Path) -> Result<Arc<RootCertStore>, CredentialsError> {
    let path = directory.join(AUTHORITIES);
    let mut roots = RootCertStore::empty();
    for certificate in sections::<CertificateDer<'_>>(&path, "certificates")? {
        roots.add(certificate).map_err(|error| unusable(&path, "certificates", &error))?;
    }
    Ok(Arc::new(roots))
}

/// What the authorities have revoked; nothing if there is no such file.
fn revocations(
    directory: &Path,
) -> Result<Vec<CertificateRevocationListDer<'static>>, CredentialsError> {
    let path = directory.join(REVOKED);
    match sections(&path, "revocation lists") {
        Err(CredentialsError::Read { error, .. }) if error.kind() == io::ErrorKind::NotFound => {
            Ok(Vec::new())
        }
        found => found,
    }
}

/// A certificate, with those between it and its authority, and its key.
struct Pair {
    certificates: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    certificate_file: PathBuf,
    key_file: PathBuf,
}

impl Pair {
    fn files(directory: &Path, endpoint: &str) -> (PathBuf, PathBuf) {
        let file = |what: &str| directory.join(format!("{endpoint}-{what}.pem"));
        (file("cert"), file("key"))
    }

    fn read(directory: &Path, endpoint: &str) -> Result<Self, CredentialsError> {
        let (certificate_file, key_file) = Self::files(directory, endpoint);
        let certificates = sections(&certificate_file, "certificate")?;
        let text = read(&key_file)?;
        let key = PrivateKeyDer::from_pem_slice(&text).map_err(|error| match error {
            pem::Error::NoItemsFound => {
                let reason = "there is no unencrypted private key in PEM form";
                unusable(&key_file, "private key", &reason)
            }
            error => unusable(&key_file, "private key", &error),
        })?;
        Ok(Self { certificates, key, certificate_file, key_file })
    }

    /// `None` if neither file is there.
    fn read_if_there(directory: &Path, endpoint: &str) -> Result<Option<Self>, CredentialsError> {
        let (certificate, key) = Self::files(directory, endpoint);
        let is_there = |path: &Path| {
            let found = path.try_exists();
            found.map_err(|error| CredentialsError::Read { path: path.to_owned(), error })
        };
        match (is_there(&certificate)?, is_there(&key)?) {
            (false, false) => Ok(None),
            (true, true) => Self::read(directory, endpoint).map(Some),
            (true, false) => Err(CredentialsError::Half { missing: key, there: certificate }),
            (false, true) => Err(CredentialsError::Half { missing: certificate, there: key }),
        }
    }
}

/// The lists of what is revoked, in as many orders as there are lists, each of them first in one. A verifier looks only
/// at the first of the lists that speak of a certificate.
fn orders(
    mut lists: Vec<CertificateRevocationListDer<'static>>,
) -> Vec<Vec<CertificateRevocationListDer<'static>>> {
    let mut orders = vec![lists.clone()];
    for _ in 1..lists.len() {
        lists.rotate_left(1);
        orders.push(lists.clone());
    }
    orders
}

/// One verifier for each list of what is revoked, or one if there is no list.
fn verifiers<V>(
    directory: &Path,
    build: impl Fn(
        Arc<RootCertStore>,
        Vec<CertificateRevocationListDer<'static>>,
    ) -> Result<V, VerifierBuilderError>,
) -> Result<Vec<V>, CredentialsError> {
    let roots = roots(directory)?;
    let lists = orders(revocations(directory)?);
    let built = lists.into_iter().map(|lists| build(roots.clone(), lists));
    built.collect::<Result<_, _>>().map_err(|error| match error {
        VerifierBuilderError::InvalidCrl(_) => {
            unusable(&directory.join(REVOKED), "revocation lists", &error)
        }
        error => unusable(&directory.join(AUTHORITIES), "certificates", &error),
    })
}

/// What verifies the certificates of servers.
fn server_verifier(
    provider: &Arc<CryptoProvider>,
    directory: &Path,
) -> Result<Every<WebPkiServerVerifier>, CredentialsError> {
    let verifiers = verifiers(directory, |roots, lists| {
        WebPkiServerVerifier::builder_with_provider(roots, provider.clone())
            .with_crls(lists)
            .allow_unknown_revocation_status()
            .enforce_revocation_expiration()
            .build()
    });
    Every::new(verifiers?)
}

/// What verifies the certificates of clients.
fn client_verifier(
    provider: &Arc<CryptoProvider>,
    directory: &Path,
    admission: Admission,
) -> Result<Arc<dyn ClientCertVerifier>, CredentialsError> {
    let verifiers = verifiers(directory, |roots, lists| {
        WebPkiClientVerifier::builder_with_provider(roots, provider.clone())
            .with_crls(lists)
            .allow_unknown_revocation_status()
            .enforce_revocation_expiration()
            .build()
    });
    let names = match admission {
        Admission::Named(names) => Some(names),
        Admission::Certified | Admission::Everyone => None,
    };
    Ok(Arc::new(Clients { every: Every::new(verifiers?)?, names }))
}

/// Accepts only certificates that every one of these verifiers accepts.
#[derive(Debug)]
struct Every<V: ?Sized> {
    first: Arc<V>,
    others: Vec<Arc<V>>,
}

impl<V: ?Sized> Every<V> {
    fn new(verifiers: Vec<Arc<V>>) -> Result<Self, CredentialsError> {
        let mut verifiers = verifiers.into_iter();
        let none = || CredentialsError::Setup(Error::General("there is no verifier".into()));
        let first = verifiers.next().ok_or_else(none)?;
        Ok(Self { first, others: verifiers.collect() })
    }
}

impl ServerCertVerifier for Every<WebPkiServerVerifier> {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let verify = |verifier: &WebPkiServerVerifier| {
            verifier.verify_server_cert(certificate, intermediates, name, ocsp, now)
        };
        for other in &self.others {
            verify(other)?;
        }
        verify(&self.first)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.first.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.first.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.first.supported_verify_schemes()
    }
}

/// Admits clients whose certificates every verifier accepts, and, if there are names, that have one of these.
#[derive(Debug)]
struct Clients {
    every: Every<dyn ClientCertVerifier>,
    names: Option<Vec<String>>,
}

impl ClientCertVerifier for Clients {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.every.first.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        for other in &self.every.others {
            other.verify_client_cert(certificate, intermediates, now)?;
        }
        let verified = self.every.first.verify_client_cert(certificate, intermediates, now)?;
        let Some(names) = &self.names else { return Ok(verified) };
        let refused = Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure);
        let parsed = webpki::EndEntityCert::try_from(certificate).map_err(|_| refused.clone())?;
        match distinguished_name(parsed.subject()) {
            Some(name) if names.contains(&name) => Ok(verified),
            _ => Err(refused),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.every.first.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.every.first.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.every.first.supported_verify_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Blocking;
    use isobath_testkit::certificates::{Authority, Keys};
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::thread;

    /// Sends a word from a client to a server, and returns what came of it on each side.
    fn talk(
        server: &ServerCredentials,
        client: &ClientCredentials,
        host: &str,
    ) -> (io::Result<String>, io::Result<()>) {
        let (here, there) = UnixStream::pair().unwrap();
        let channel = server.channel().unwrap();
        let listening = thread::spawn(move || {
            let mut text = [0; 5];
            Blocking::handshake(there, channel)?.read_exact(&mut text)?;
            Ok(String::from_utf8_lossy(&text).into_owned())
        });
        let channel = client.channel(host).unwrap();
        let sent =
            Blocking::handshake(here, channel).and_then(|mut stream| stream.write_all(b"hello"));
        (listening.join().unwrap(), sent)
    }

    #[test]
    fn a_client_verifies_the_servers_name_and_authority() {
        let keys = Keys::new("/CN=client");
        let at = |name: &str| keys.at(name);
        let foreign = Authority::new(&at("other"));
        foreign.client(&at("stranger"), "/CN=client");
        let server = ServerCredentials::read(&at("server"), Admission::Everyone).unwrap();
        let client = ClientCredentials::read(&at("client")).unwrap();
        for host in ["localhost", "127.0.0.1", "::1"] {
            assert_eq!(talk(&server, &client, host).0.unwrap(), "hello");
        }
        assert!(talk(&server, &client, "example.org").1.is_err());
        let stranger = ClientCredentials::read(&at("stranger")).unwrap();
        assert!(talk(&server, &stranger, "localhost").1.is_err());
        assert!(client.channel("not a name").is_err());
    }

    #[test]
    fn a_client_refuses_a_revoked_server() {
        let keys = Keys::new("/CN=client");
        let at = |name: &str| keys.at(name);
        let server = ServerCredentials::read(&at("server"), Admission::Certified).unwrap();
        let client = || ClientCredentials::read(&at("client")).unwrap();
        assert!(talk(&server, &client(), "localhost").0.is_ok());
        // The list of revocations is read as a client's certificate is.
        fs::copy(at("server/server-cert.pem"), at("server/client-cert.pem")).unwrap();
        keys.authority.revoke(&at("server"), &at("client"));
        assert!(talk(&server, &client(), "localhost").1.is_err());
    }

    #[test]
    fn one_list_that_revokes_a_certificate_is_enough() {
        let keys = Keys::new("/CN=client");
        let at = |name: &str| keys.at(name);
        fs::copy(at("server/server-cert.pem"), at("server/client-cert.pem")).unwrap();
        keys.authority.revoke_nothing(&at("authority"));
        let nothing = fs::read_to_string(at("authority/ca-crl.pem")).unwrap();
        for (revoked, who) in [("client", "server"), ("server", "client")] {
            keys.authority.revoke(&at(revoked), &at("authority"));
            let revoking = fs::read_to_string(at("authority/ca-crl.pem")).unwrap();
            for (lists, admitted) in [
                (format!("{nothing}{revoking}"), false),
                (format!("{revoking}{nothing}"), false),
                (format!("{nothing}{nothing}"), true),
            ] {
                let file = at(who).join("ca-crl.pem");
                fs::write(&file, lists).unwrap();
                let named = Admission::Named(vec!["CN=client".into()]);
                for admission in [Admission::Certified, named] {
                    let server = ServerCredentials::read(&at("server"), admission).unwrap();
                    let client = ClientCredentials::read(&at("client")).unwrap();
                    let (received, sent) = talk(&server, &client, "localhost");
                    assert_eq!(received.is_ok() && sent.is_ok(), admitted, "{revoked} is revoked");
                }
                fs::remove_file(file).unwrap();
            }
        }
    }

    #[test]
    fn files_that_cannot_be_used_are_named() {
        let keys = Keys::new("/CN=client");
        let at = |name: &str| keys.at(name);
        let server = || ServerCredentials::read(&at("server"), Admission::Certified);
        let said = |error: CredentialsError| error.to_string();
        fs::write(at("server/ca-crl.pem"), "nothing").unwrap();
        assert!(said(server().unwrap_err()).contains("ca-crl.pem"));
        fs::write(
            at("server/ca-crl.pem"),
            "-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n",
        )
        .unwrap();
        assert!(said(server().unwrap_err()).contains("ca-crl.pem"));
        fs::copy(at("server/ca-crl.pem"), at("client/ca-crl.pem")).unwrap();
        assert!(said(ClientCredentials::read(&at("client")).unwrap_err()).contains("ca-crl.pem"));
        fs::remove_file(at("client/ca-crl.pem")).unwrap();
        fs::remove_file(at("server/ca-crl.pem")).unwrap();
        fs::copy(at("client/client-key.pem"), at("server/server-key.pem")).unwrap();
        assert!(said(server().unwrap_err()).contains("server-key.pem"));
        fs::write(at("server/server-key.pem"), "").unwrap();
        assert!(said(server().unwrap_err()).contains("unencrypted private key"));
        fs::remove_file(at("server/ca-cert.pem")).unwrap();
        assert!(said(server().unwrap_err()).contains("ca-cert.pem"));
        fs::remove_file(at("client/client-key.pem")).unwrap();
        let half = ClientCredentials::read(&at("client")).unwrap_err();
        assert!(matches!(half, CredentialsError::Half { .. }), "{half}");
    }
}
