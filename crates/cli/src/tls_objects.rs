//! QEMU's objects for encrypted connections: `tls-creds-x509`, and `authz-simple`.

use crate::cores;
use crate::options::on_off;
use isobath_tls::{Admission, ClientCredentials};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

type Pairs = [(String, String)];

/// An object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TlsObject {
    /// Certificates and keys in a directory.
    Credentials {
        id: String,
        directory: PathBuf,
        /// Whether they are for a server.
        server: bool,
        verify_peer: bool,
    },
    /// The distinguished name of the clients that are admitted.
    Authorization { id: String, identity: String },
}

/// The kinds of object that are described here.
pub(crate) fn is_kind(kind: &str) -> bool {
    kind.starts_with("tls-creds") || kind.starts_with("authz-")
}

/// The object of this kind that options describe.
///
/// # Errors
/// It is not supported, or an option is missing or unknown.
pub(crate) fn describe(kind: &str, pairs: &Pairs) -> Result<TlsObject, String> {
    let value = |name: &str| {
        let found = pairs.iter().rfind(|(other, _)| other == name);
        found.map(|(_, value)| value.clone())
    };
    let required = |name: &str| value(name).ok_or_else(|| format!("Parameter '{name}' is missing"));
    let known: &[&str] = match kind {
        "tls-creds-x509" => &["id", "dir", "endpoint", "verify-peer", "sanity-check"],
        "authz-simple" => &["id", "identity"],
        _ => {
            return Err(format!(
                "objects of kind '{kind}' are not supported; use tls-creds-x509 and authz-simple"
            ));
        }
    };
    if let Some((name, _)) = pairs.iter().find(|(name, _)| !known.contains(&name.as_str())) {
        return Err(format!("{kind}: the option '{name}' is not supported"));
    }
    let id = required("id")?;
    if kind == "authz-simple" {
        return Ok(TlsObject::Authorization { id, identity: required("identity")? });
    }
    let flag = |name: &str| value(name).map_or(Ok(true), |value| on_off(name, &value));
    flag("sanity-check")?;
    let server = match value("endpoint").as_deref() {
        None | Some("client") => false,
        Some("server") => true,
        Some(other) => {
            return Err(format!("Parameter 'endpoint' does not accept value '{other}'"));
        }
    };
    let (directory, verify_peer) = (required("dir")?.into(), flag("verify-peer")?);
    if !server && !verify_peer {
        return Err(
            "tls-creds-x509: with endpoint=client the server's certificate is always verified; \
             remove verify-peer"
                .into(),
        );
    }
    Ok(TlsObject::Credentials { id, directory, server, verify_peer })
}

/// The directory of a server's credentials, and who is admitted, by the IDs of the objects.
///
/// # Errors
/// In QEMU's words, if there are no such objects, or they contradict each other.
pub(crate) fn server(
    objects: &[TlsObject],
    credentials: &str,
    authorization: Option<&str>,
) -> Result<(PathBuf, Admission), String> {
    let found = objects.iter().rfind(|object| object.id() == credentials);
    let (directory, verify_peer) = match found {
        Some(TlsObject::Credentials { directory, server: true, verify_peer, .. }) => {
            (directory, *verify_peer)
        }
        Some(TlsObject::Credentials { .. }) => {
            return Err("Expecting TLS credentials with a server endpoint".into());
        }
        Some(TlsObject::Authorization { .. }) => {
            return Err(format!("Object with id '{credentials}' is not TLS credentials"));
        }
        None => return Err(format!("No TLS credentials with id '{credentials}'")),
    };
    let Some(authorization) = authorization else {
        let admission = if verify_peer { Admission::Certified } else { Admission::Everyone };
        return Ok((directory.clone(), admission));
    };
    if !verify_peer {
        return Err("clients can only be authorized by name with verify-peer=on".into());
    }
    match objects.iter().rfind(|object| object.id() == authorization) {
        Some(TlsObject::Authorization { identity, .. }) => {
            Ok((directory.clone(), Admission::Named(vec![identity.clone()])))
        }
        _ => Err(format!("No authorization object with id '{authorization}'")),
    }
}

/// The objects of this process, by which images are named.
static DEFINED: Mutex<Vec<TlsObject>> = Mutex::new(Vec::new());

/// Defines the objects that the names of images may refer to.
pub(crate) fn define(objects: Vec<TlsObject>) {
    if !objects.is_empty() {
        *DEFINED.lock().unwrap_or_else(PoisonError::into_inner) = objects;
    }
}

/// A client's credentials, by the ID of their [defined](define) object.
///
/// # Errors
/// There is no such object, it is a server's, or its files cannot be used.
pub(crate) fn client(id: &str) -> Result<ClientCredentials, String> {
    of_client(&DEFINED.lock().unwrap_or_else(PoisonError::into_inner), id)
}

fn of_client(objects: &[TlsObject], id: &str) -> Result<ClientCredentials, String> {
    match objects.iter().rfind(|object| object.id() == id) {
        Some(TlsObject::Credentials { directory, server: false, .. }) => {
            cores::withhold();
            ClientCredentials::read(directory).map_err(|error| error.to_string())
        }
        Some(TlsObject::Credentials { .. }) => {
            Err("Expecting TLS credentials with a client endpoint".into())
        }
        _ => Err(format!("No TLS credentials with id '{id}'")),
    }
}

impl TlsObject {
    fn id(&self) -> &str {
        match self {
            Self::Credentials { id, .. } | Self::Authorization { id, .. } => id,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(kind: &str, text: &str) -> Result<TlsObject, String> {
        describe(kind, &crate::options::parse(&[text.to_owned()]))
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        for (kind, text, reason) in [
            ("tls-creds-psk", "id=a,dir=/d", "tls-creds-psk"),
            ("authz-list", "id=a", "authz-list"),
            ("tls-creds-x509", "id=a", "'dir' is missing"),
            ("tls-creds-x509", "dir=/d", "'id' is missing"),
            ("tls-creds-x509", "id=a,dir=/d,priority=NORMAL", "'priority'"),
            ("tls-creds-x509", "id=a,dir=/d,passwordid=s", "'passwordid'"),
            ("tls-creds-x509", "id=a,dir=/d,endpoint=both", "'endpoint'"),
            ("tls-creds-x509", "id=a,dir=/d,verify-peer=off", "always verified"),
            ("authz-simple", "id=a", "'identity' is missing"),
        ] {
            let said = object(kind, text).unwrap_err();
            assert!(said.contains(reason), "{said}");
        }
    }

    #[test]
    fn a_server_has_its_credentials_and_those_it_admits() {
        let objects = [
            object("tls-creds-x509", "id=s,dir=/s,endpoint=server").unwrap(),
            object("tls-creds-x509", "id=any,dir=/s,endpoint=server,verify-peer=off").unwrap(),
            object("tls-creds-x509", "id=c,dir=/c,endpoint=client").unwrap(),
            object("authz-simple", "id=z,identity=CN=a,,O=b").unwrap(),
        ];
        let found = |id, authorization| server(&objects, id, authorization);
        assert_eq!(found("s", None), Ok(("/s".into(), Admission::Certified)));
        assert_eq!(found("any", None), Ok(("/s".into(), Admission::Everyone)));
        let named = Admission::Named(vec!["CN=a,O=b".into()]);
        assert_eq!(found("s", Some("z")), Ok(("/s".into(), named)));
        for (id, authorization) in
            [("c", None), ("z", None), ("x", None), ("any", Some("z")), ("s", Some("s"))]
        {
            assert!(found(id, authorization).is_err(), "{id} {authorization:?}");
        }
        assert!(of_client(&objects, "s").is_err() && of_client(&objects, "x").is_err());
    }
}
