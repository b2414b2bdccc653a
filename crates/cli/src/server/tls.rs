//! Encryption of the connections to servers.

use super::endpoint::{Endpoint, is_public};
use super::listen::bind;
use crate::cores;
use crate::failure::Failure;
use crate::options;
use crate::tls_objects::{self, TlsObject};
use isobath_export::frontend::{Entrance, Offered};
use isobath_export::tls::Security;
use isobath_ring::net::{Access, Address};
use isobath_tls::{Admission, ServerCredentials};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

/// Whether clients of an address encrypt their connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Off,
    Optional,
    Required,
}

/// An address to listen on, whether its clients encrypt, and which exports it offers:
/// `ADDRESS[,tls=MODE][,export=NAME...]`, where a comma in NAME is doubled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SecuredEndpoint {
    pub(crate) endpoint: Endpoint,
    /// As given. By default, TCP is encrypted if there are credentials, and a socket file is not.
    pub(crate) mode: Option<Mode>,
    /// The names of the exports; all if there are none.
    pub(crate) exports: Vec<String>,
}

impl From<Endpoint> for SecuredEndpoint {
    fn from(endpoint: Endpoint) -> Self {
        Self { endpoint, mode: None, exports: Vec::new() }
    }
}

impl FromStr for SecuredEndpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (address, given) = without_options(text);
        let mut this = Self::from(address.parse::<Endpoint>()?);
        for (name, value) in options::parse(&[given.to_owned()]) {
            match &*name {
                "tls" if this.mode.is_some() => return Err("',tls=' is given twice".into()),
                "tls" => this.mode = Some(value.parse()?),
                "export" if this.exports.contains(&value) => {
                    return Err(format!("',export={value}' is given twice"));
                }
                "export" => this.exports.push(value),
                other => {
                    return Err(format!(
                        "expected ',tls=' or ',export=' behind the address, not ',{other}='"
                    ));
                }
            }
        }
        Ok(this)
    }
}

impl FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            "optional" => Ok(Self::Optional),
            "required" => Ok(Self::Required),
            other => {
                Err(format!("expected required, optional or off after ',tls=', not '{other}'"))
            }
        }
    }
}

/// An address, and the options behind it, which begin with the first `,WORD=`.
fn without_options(text: &str) -> (&str, &str) {
    let is_option = |rest: &str| {
        let word = rest.split_once('=').map_or("", |(word, _)| word);
        !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-')
    };
    let mut commas = text.match_indices(',').filter_map(|(at, _)| {
        let (address, rest) = text.split_at_checked(at)?;
        Some((address, rest.strip_prefix(',')?))
    });
    commas.find(|(_, rest)| is_option(rest)).unwrap_or((text, ""))
}

/// The options for encrypted connections.
#[derive(clap::Args)]
pub(crate) struct TlsArgs {
    /// Encrypt the connections of NBD and QMP over TCP by TLS, with the certificates in this directory, under QEMU's
    /// names: server-cert.pem, server-key.pem, ca-cert.pem, and ca-crl.pem if there is one. A socket file is encrypted
    /// only with ',tls=required'
    #[arg(id = "tls_creds", long = "tls-creds", value_name = "DIR")]
    creds: Option<PathBuf>,
    /// Whether clients need a certificate of an authority in ca-cert.pem [default: yes]
    #[arg(
        long = "tls-verify-peer",
        value_name = "yes|no",
        action = clap::ArgAction::Set,
        value_parser = yes_or_no,
        requires = "tls_creds"
    )]
    verify_peer: Option<bool>,
    /// Admit only clients whose certificate has this distinguished name, such as 'CN=laptop,O=Example Org,C=GB', in the
    /// certificate's order; can be repeated
    #[arg(long = "tls-authz", value_name = "NAME", requires = "tls_creds")]
    authz: Vec<String>,
}

fn yes_or_no(text: &str) -> Result<bool, String> {
    match text {
        "yes" | "on" => Ok(true),
        "no" | "off" => Ok(false),
        _ => Err("expected yes or no".into()),
    }
}

/// The credentials for the addresses of a server, and whether its clients are authenticated by them.
#[derive(Debug)]
pub(crate) struct Tls {
    credentials: Option<Arc<ServerCredentials>>,
    authenticated: bool,
}

impl TlsArgs {
    /// Reads the credentials.
    pub(crate) fn read(&self) -> Result<Tls, Failure> {
        let Some(directory) = &self.creds else {
            return Ok(Tls { credentials: None, authenticated: false });
        };
        let verify_peer = self.verify_peer.unwrap_or(true);
        if !verify_peer && !self.authz.is_empty() {
            return Err(Failure::usage(
                "--tls-authz needs clients' certificates; it cannot be used with \
                 --tls-verify-peer no",
            ));
        }
        let admission = match (verify_peer, self.authz.as_slice()) {
            (false, _) => Admission::Everyone,
            (true, []) => Admission::Certified,
            (true, names) => Admission::Named(names.to_vec()),
        };
        Tls::new(directory, admission).map_err(|failure| failure.context("--tls-creds"))
    }

    /// Refuses what cannot be had for an address of QMP, which has no exports, and no negotiation in which a client
    /// could ask for encryption; and a port where everybody could control the server, unless that is meant.
    pub(crate) fn check_qmp(
        &self,
        endpoints: &[SecuredEndpoint],
        insecure: bool,
    ) -> Result<(), Failure> {
        if let Some(endpoint) = endpoints.iter().find(|endpoint| !endpoint.exports.is_empty()) {
            return Err(Failure::usage(format!(
                "--qmp {}: ',export=' is for --nbd; QMP controls all exports",
                endpoint.endpoint
            )));
        }
        let is_optional = |endpoint: &&SecuredEndpoint| endpoint.mode == Some(Mode::Optional);
        if let Some(endpoint) = endpoints.iter().find(is_optional) {
            return Err(Failure::usage(format!(
                "--qmp {}: QMP is encrypted from the first byte or not at all; write tls=required \
                 or tls=off",
                endpoint.endpoint
            )));
        }
        let is_open = |endpoint: &&SecuredEndpoint| {
            let mode = endpoint.mode(self.creds.is_some());
            let authenticated = mode == Mode::Required && self.verify_peer != Some(false);
            endpoint.endpoint.is_tcp() && !authenticated
        };
        if let Some(endpoint) = endpoints.iter().find(is_open).filter(|_| !insecure) {
            return Err(Failure::usage(format!(
                "--qmp {}: everybody who can connect to the port, every user of this machine at \
                 least, could control the server. Use a socket file (unix:PATH), or --tls-creds, by \
                 which clients are authenticated; --insecure does without",
                endpoint.endpoint
            )));
        }
        Ok(())
    }

    /// Refuses credentials that none of these addresses uses, and to select clients where plain ones are admitted.
    pub(crate) fn check<'a>(
        &self,
        endpoints: impl Iterator<Item = &'a SecuredEndpoint>,
    ) -> Result<(), Failure> {
        let endpoints: Vec<_> = endpoints.collect();
        let selecting = match (self.authz.as_slice(), self.verify_peer) {
            ([_, ..], _) => Some("--tls-authz"),
            ([], Some(true)) => Some("--tls-verify-peer yes"),
            ([], _) => None,
        };
        let optional = endpoints.iter().find(|endpoint| endpoint.mode == Some(Mode::Optional));
        if let (Some(option), Some(SecuredEndpoint { endpoint, .. })) = (selecting, optional) {
            return Err(Failure::usage(format!(
                "{option} cannot be used with '{endpoint},tls=optional', where clients that do not \
                 encrypt are admitted without a certificate; write tls=required"
            )));
        }
        if self.creds.is_some()
            && !endpoints.iter().any(|endpoint| endpoint.mode(true) != Mode::Off)
        {
            return Err(Failure::usage(
                "--tls-creds is given, but no address is encrypted: give a TCP address, or a socket \
                 file as unix:PATH,tls=required",
            ));
        }
        Ok(())
    }
}

impl SecuredEndpoint {
    /// Whether clients encrypt; `has_credentials` decides where nothing is said.
    fn mode(&self, has_credentials: bool) -> Mode {
        match self.mode {
            Some(mode) => mode,
            None if has_credentials && self.endpoint.is_tcp() => Mode::Required,
            None => Mode::Off,
        }
    }
}

impl Tls {
    /// Reads credentials from a directory.
    pub(crate) fn new(directory: &std::path::Path, admission: Admission) -> Result<Self, Failure> {
        cores::withhold();
        let authenticated = admission != Admission::Everyone;
        let credentials = ServerCredentials::read(directory, admission).map_err(Failure::new)?;
        Ok(Self { credentials: Some(Arc::new(credentials)), authenticated })
    }

    /// The encryption that QEMU's programs are asked for by the IDs of objects.
    ///
    /// # Errors
    /// There are no such objects, or their files cannot be used.
    pub(crate) fn of_objects(
        objects: &[TlsObject],
        credentials: Option<&str>,
        authorization: Option<&str>,
    ) -> Result<(Mode, Self), Failure> {
        match (credentials, authorization) {
            (None, None) => Ok((Mode::Off, Self { credentials: None, authenticated: false })),
            (None, Some(_)) => Err(Failure::new("TLS authorization is not permitted without TLS")),
            (Some(id), authorization) => {
                let found = tls_objects::server(objects, id, authorization);
                let (directory, admission) = found.map_err(Failure::new)?;
                Ok((Mode::Required, Self::new(&directory, admission)?))
            }
        }
    }

    /// Whether clients of an address encrypt.
    fn security(&self, endpoint: &SecuredEndpoint, option: &str) -> Result<Security, Failure> {
        let mode = endpoint.mode(self.credentials.is_some());
        match (mode, &self.credentials) {
            (Mode::Off, _) => Ok(Security::Plain),
            (Mode::Optional, Some(credentials)) => Ok(Security::Optional(credentials.clone())),
            (Mode::Required, Some(credentials)) => Ok(Security::Required(credentials.clone())),
            (Mode::Optional | Mode::Required, None) => Err(Failure::new(format_args!(
                "{option} {} asks for encryption; name the directory with the server's certificate \
                 by --tls-creds",
                endpoint.endpoint
            ))),
        }
    }

    /// Binds the addresses of an option.
    pub(crate) fn listen(
        &self,
        endpoints: &[SecuredEndpoint],
        option: &str,
        access: Access,
    ) -> Result<Vec<Entrance>, Failure> {
        let bind = |endpoint: SecuredEndpoint| -> Result<Entrance, Failure> {
            let security = self.security(&endpoint, option)?;
            let listener = bind(&endpoint.endpoint, option, access)?;
            self.warn(&endpoint.endpoint, listener.address(), &security);
            let offered = match &*endpoint.exports {
                [] => Offered::All,
                names => Offered::Named(names.into()),
            };
            Ok(Entrance { listener, security, offered })
        };
        let mut entrances = Vec::new();
        for endpoint in endpoints {
            for one in endpoint.endpoint.each()? {
                entrances.push(bind(SecuredEndpoint { endpoint: one, ..endpoint.clone() })?);
            }
        }
        Ok(entrances)
    }

    /// Warns of an address that others can reach and use.
    fn warn(&self, endpoint: &Endpoint, address: &Address, security: &Security) {
        let lacks = match security {
            Security::Plain | Security::Optional(_) => "without authentication or encryption",
            Security::Required(_) if !self.authenticated => "without authentication",
            Security::Required(_) => return,
        };
        if is_public(address) {
            tracing::warn!("{endpoint} may be reachable from other machines, {lacks}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_may_say_whether_it_is_encrypted() {
        let unix = Endpoint::Unix("/run/a".into());
        for (text, mode) in [
            ("unix:/run/a", None),
            ("unix:/run/a,tls=required", Some(Mode::Required)),
            ("unix:/run/a,tls=optional", Some(Mode::Optional)),
            ("unix:/run/a,tls=off", Some(Mode::Off)),
        ] {
            let exports = Vec::new();
            let endpoint = unix.clone();
            assert_eq!(text.parse(), Ok(SecuredEndpoint { endpoint, mode, exports }));
        }
        for text in ["1,tls=", "1,tls=on", "unix:,tls=off", "1,tls=off,tls=on"] {
            assert!(text.parse::<SecuredEndpoint>().is_err(), "{text}");
        }
    }

    #[test]
    fn an_address_may_name_its_exports() {
        let parsed = |text: &str| text.parse::<SecuredEndpoint>();
        for (text, path, names) in [
            ("unix:/a,export=x", "/a", &["x"][..]),
            ("unix:/a,tls=off,export=x+y,export=", "/a", &["x+y", ""]),
            ("unix:/a,export=x,,tls=on,tls=off", "/a", &["x,tls=on"]),
            ("unix:/a,b,export=x=y", "/a,b", &["x=y"]),
            ("unix:/a,B=,9=", "/a,B=,9=", &[]),
        ] {
            let found = parsed(text).unwrap();
            assert_eq!(found.endpoint, Endpoint::Unix(path.into()), "{text}");
            assert_eq!(found.exports, names, "{text}");
        }
        // A mistake must not have all exports offered.
        for text in ["unix:/a,exports=x", "unix:/a,export=x,y", "unix:/a,export=x,export=x"] {
            assert!(parsed(text).is_err(), "{text}");
        }
    }

    #[test]
    fn tcp_is_encrypted_where_there_are_credentials() {
        let mode = |text: &str, has: bool| text.parse::<SecuredEndpoint>().unwrap().mode(has);
        assert_eq!(mode("1", true), Mode::Required);
        assert_eq!(mode("1", false), Mode::Off);
        assert_eq!(mode("unix:/a", true), Mode::Off);
        assert_eq!(mode("unix:/a,tls=optional", true), Mode::Optional);
        assert_eq!(mode("1,tls=off", true), Mode::Off);
    }

    #[test]
    fn encryption_without_credentials_is_refused() {
        let endpoint = "1,tls=required".parse().unwrap();
        let (_, none) = Tls::of_objects(&[], None, None).unwrap();
        assert!(none.security(&endpoint, "--nbd").is_err());
    }
}
