//! QEMU's options for exports of NBD servers: `driver=nbd` and those of its address.

use crate::{host, tls_objects};
use isobath_nbd_client::Encryption;
use isobath_nbd_client::name::{DEFAULT_PORT, ExportName, Server, port};
use std::path::PathBuf;

/// The name by which the host opens the export of this name.
///
/// # Errors
/// It cannot be parsed, in QEMU's words.
pub(crate) fn named(name: &str) -> Result<PathBuf, String> {
    text_of(&ExportName::parse(name).map_err(|error| error.to_string())?)
}

/// The text by which the host opens this export, and no other.
fn text_of(export: &ExportName) -> Result<PathBuf, String> {
    let text = export.to_string();
    match ExportName::parse(&text) {
        Ok(read) if read.server() == export.server() && read.export() == export.export() => {
            Ok(text.into())
        }
        _ => Err(format!(
            "export '{}' of the NBD server at '{}' has no name by which it can be opened",
            export.export(),
            export.server()
        )),
    }
}

/// The name of the export that options describe. Takes the options, whose names begin with `prefix`, from `pairs`.
///
/// # Errors
/// They do not describe an export, or the credentials for TLS cannot be used.
pub(crate) fn described(
    prefix: &str,
    pairs: &mut Vec<(String, String)>,
) -> Result<PathBuf, String> {
    let mut take = |name: &str| {
        let at = pairs.iter().position(|(other, _)| other.strip_prefix(prefix) == Some(name))?;
        Some(pairs.swap_remove(at).1)
    };
    let (credentials, hostname) = (take("tls-creds"), take("tls-hostname"));
    // These control how QEMU reconnects; here a lost connection is not replaced.
    for ignored in ["reconnect-delay", "open-timeout"] {
        take(ignored);
    }
    let export = take("export");
    if let Some(name) = take("filename") {
        if export.is_some() {
            return Err("the export is named twice".into());
        }
        let export = ExportName::parse(&name).map_err(|error| error.to_string())?;
        return opened(&export, credentials, hostname);
    }
    let (kind, path) = (take("server.type"), take("server.path").or_else(|| take("path")));
    let host = take("server.host").or_else(|| take("host"));
    let number = take("server.port").or_else(|| take("port"));
    for ignored in ["server.ipv4", "server.ipv6", "server.numeric", "server.keep-alive"] {
        take(ignored);
    }
    let server = match (kind.as_deref(), path, host) {
        (_, Some(_), Some(_)) => {
            return Err("path and host may not be used at the same time".into());
        }
        (Some("unix") | None, Some(path), None) if number.is_none() => Server::Unix(path),
        (Some("inet") | None, None, Some(host)) => {
            let port = match number {
                Some(number) => port(&host, &number).map_err(|error| error.to_string())?,
                None if kind.is_some() => return Err("Parameter 'port' is missing".into()),
                None => DEFAULT_PORT,
            };
            Server::Tcp { host, port }
        }
        (Some("unix"), None, _) => return Err("Parameter 'server.path' is missing".into()),
        (Some("inet"), ..) => return Err("Parameter 'server.host' is missing".into()),
        (None, None, None) if number.is_none() => return Err("NBD server address missing".into()),
        (None, ..) => return Err("port may not be used without host".into()),
        (Some(other), ..) => {
            return Err(format!("Parameter 'server.type' does not accept value '{other}'"));
        }
    };
    let export = ExportName::new(server, export).map_err(|error| error.to_string())?;
    opened(&export, credentials, hostname)
}

/// The name by which the host opens an export, over TLS if there is the ID of credentials.
fn opened(
    export: &ExportName,
    credentials: Option<String>,
    hostname: Option<String>,
) -> Result<PathBuf, String> {
    let text = text_of(export)?;
    match (credentials, hostname) {
        (None, None) => {}
        (None, Some(_)) => return Err("tls-hostname may not be used without tls-creds".into()),
        (Some(id), hostname) => {
            let credentials = tls_objects::client(&id)?;
            let host = match (hostname, export.server()) {
                (Some(host), _) => host,
                (None, Server::Tcp { host, .. }) => host.clone(),
                (None, Server::Unix(_)) => {
                    return Err(
                        "a socket file has no host name; give the name in the server's certificate \
                         by tls-hostname"
                            .into(),
                    );
                }
            };
            let encrypted = host::encrypt_export(export, Encryption { credentials, host });
            encrypted.map_err(|error| error.to_string())?;
        }
    }
    Ok(text)
}
