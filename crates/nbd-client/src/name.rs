//! Names of exports, as QEMU spells them.
//!
//! | name | export |
//! |---|---|
//! | `nbd:HOST:PORT`, `nbd:HOST:PORT:exportname=NAME` | of a TCP server; an IPv6 address is in brackets |
//! | `nbd:unix:PATH`, `nbd:unix:PATH:exportname=NAME` | of the server at a socket file |
//! | `nbd://HOST[:PORT][/NAME]`, `nbd+tcp://...` | of a TCP server, with port 10809 by default |
//! | `nbd+unix://[/NAME]?socket=PATH` | of the server at a socket file |
//!
//! Hosts, names and paths in the last two are percent-encoded.

use crate::wire::MAX_STRING;
use std::fmt::{self, Write};

/// The default port of a TCP server.
pub const DEFAULT_PORT: u16 = 10809;

/// The prefixes of export names, without the colon.
const SCHEMES: [&str; 3] = ["nbd", "nbd+tcp", "nbd+unix"];

/// The maximum length of a socket file's path in bytes: Linux's `sun_path`, including the final NUL.
const MAX_PATH: usize = 107;

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Server {
    /// At a socket file.
    Unix(String),
    /// At a TCP port.
    Tcp {
        /// A host's name or address, an IPv6 address without brackets.
        host: String,
        /// The port.
        port: u16,
    },
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => f.write_str(path),
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
        }
    }
}

/// An export of a server. It is displayed as the URI that QEMU shows for it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ExportName {
    server: Server,
    export: Option<String>,
}

/// Why a name does not stand for an export, with QEMU's message where it has one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NameError(String);

fn refuse<T>(text: impl Into<String>) -> Result<T, NameError> {
    Err(NameError(text.into()))
}

/// Whether a name refers to an export: it begins with `nbd:`, `nbd+tcp:` or `nbd+unix:`. It may still be
/// [invalid](ExportName::parse).
pub fn is_name(name: &str) -> bool {
    name.split_once(':').is_some_and(|(scheme, _)| SCHEMES.contains(&scheme))
}

impl ExportName {
    /// The export of this name on a server; if the name is empty, the server's default export.
    ///
    /// # Errors
    /// The path of the socket is empty or longer than 107 bytes, the host's name is empty, the export's name is longer
    /// than 4096 bytes, or one of them contains a NUL byte.
    pub fn new(server: Server, export: Option<String>) -> Result<Self, NameError> {
        let place = match &server {
            Server::Unix(path) => path,
            Server::Tcp { host, .. } => host,
        };
        if place.is_empty() {
            return refuse("the NBD server's address is empty");
        }
        if let Server::Unix(path) = &server
            && path.len() > MAX_PATH
        {
            return refuse(format!(
                "UNIX socket path '{path}' is too long\nPath must be less than {} bytes",
                MAX_PATH + 1
            ));
        }
        let name = export.as_deref().unwrap_or_default();
        if name.len() > MAX_STRING {
            return refuse(format!("the export's name is longer than {MAX_STRING} bytes"));
        }
        if place.contains('\0') || name.contains('\0') {
            return refuse("the name of an NBD export cannot hold a NUL byte");
        }
        Ok(Self { server, export })
    }

    /// The export that a name stands for.
    ///
    /// # Errors
    /// It is not [the name of an export](is_name), or it cannot be parsed.
    pub fn parse(name: &str) -> Result<Self, NameError> {
        if !is_name(name) {
            return refuse("File name string for NBD must start with 'nbd:'");
        }
        match name.split_once("://") {
            Some((scheme, rest)) if SCHEMES.contains(&scheme) => uri(scheme, rest),
            _ => match name.strip_prefix("nbd:") {
                Some(rest) => legacy(rest),
                None => refuse("No valid URL specified"),
            },
        }
    }

    /// Where its server listens.
    pub fn server(&self) -> &Server {
        &self.server
    }

    /// Its name on the server; empty for the server's default.
    pub fn export(&self) -> &str {
        self.export.as_deref().unwrap_or_default()
    }
}

impl fmt::Display for ExportName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.server {
            Server::Unix(_) => f.write_str("nbd+unix://")?,
            Server::Tcp { host, port } => {
                f.write_str("nbd://")?;
                let (open, close) = if host.contains(':') { ("[", "]") } else { ("", "") };
                f.write_str(open)?;
                encode(f, host, "%/?#@[]")?;
                write!(f, "{close}:{port}")?;
            }
        }
        if let Some(export) = &self.export {
            f.write_char('/')?;
            // Parsers of URIs drop all leading slashes.
            let slashes = export.len() - export.trim_start_matches('/').len();
            f.write_str(&"%2F".repeat(slashes))?;
            encode(f, &export[slashes..], "%?#")?;
        }
        if let Server::Unix(path) = &self.server {
            f.write_str("?socket=")?;
            encode(f, path, "%&;+#")?;
        }
        Ok(())
    }
}

/// Writes text with these characters, spaces and control characters percent-encoded.
fn encode(f: &mut fmt::Formatter<'_>, text: &str, special: &str) -> fmt::Result {
    for c in text.chars() {
        if c.is_control() || c == ' ' || special.contains(c) {
            let mut bytes = [0; 4];
            for byte in c.encode_utf8(&mut bytes).bytes() {
                write!(f, "%{byte:02X}")?;
            }
        } else {
            f.write_char(c)?;
        }
    }
    Ok(())
}

/// Decodes percent-encoded text.
fn decode(text: &str) -> Result<String, NameError> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = after;
        let digits = after.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
        let hex = digits.filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()));
        match hex.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) if *first == b'%' => {
                bytes.push(byte);
                rest = &after[2..];
            }
            _ => bytes.push(*first),
        }
    }
    String::from_utf8(bytes).or_else(|_| refuse("the name of an NBD export is not UTF-8"))
}

/// Parses the part after `nbd:`.
fn legacy(rest: &str) -> Result<ExportName, NameError> {
    let (place, export) = match rest.split_once(":exportname=") {
        Some((_, "")) => return refuse("the export's name after 'exportname=' is empty"),
        Some((place, export)) => (place, Some(export.to_owned())),
        None => (rest, None),
    };
    let server = if let Some(path) = place.strip_prefix("unix:") {
        Server::Unix(path.to_owned())
    } else {
        let (host, port) = tcp(place, None)?;
        Server::Tcp { host: host.to_owned(), port }
    };
    ExportName::new(server, export)
}

/// Parses the part after `://`.
fn uri(scheme: &str, rest: &str) -> Result<ExportName, NameError> {
    let invalid = || refuse("No valid URL specified");
    let (rest, _fragment) = rest.split_once('#').unwrap_or((rest, ""));
    let (rest, query) = match rest.split_once('?') {
        Some((rest, query)) => (rest, Some(query)),
        None => (rest, None),
    };
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let path = path.trim_start_matches('/');
    let export = if path.is_empty() { None } else { Some(decode(path)?) };
    let server = if scheme == "nbd+unix" {
        let socket = query.and_then(|query| query.strip_prefix("socket="));
        match socket {
            Some(socket) if authority.is_empty() && !socket.contains(['&', ';']) => {
                Server::Unix(decode(socket)?)
            }
            _ => return invalid(),
        }
    } else {
        if authority.is_empty() || authority.contains('@') || query.is_some_and(|q| !q.is_empty()) {
            return invalid();
        }
        let (host, port) = tcp(authority, Some(DEFAULT_PORT))?;
        Server::Tcp { host: decode(host)?, port }
    };
    ExportName::new(server, export)
}

/// The host and the port in `HOST:PORT` or `[ADDRESS]:PORT`, not decoded.
fn tcp(text: &str, default: Option<u16>) -> Result<(&str, u16), NameError> {
    let invalid = || refuse(format!("error parsing address '{text}'"));
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => match rest.split_once(']') {
            Some((host, "")) => (host, None),
            Some((host, port)) => match port.strip_prefix(':') {
                Some(port) => (host, Some(port)),
                None => return invalid(),
            },
            None => return invalid(),
        },
        None => match text.split_once(':') {
            Some((_, port)) if port.contains(':') => return invalid(),
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    let port = match (port, default) {
        (Some(port), _) => self::port(host, port)?,
        (None, Some(default)) => default,
        (None, None) => return invalid(),
    };
    Ok((host, port))
}

/// Parses a port number.
///
/// # Errors
/// It is not a number: names of services are not looked up.
pub fn port(host: &str, text: &str) -> Result<u16, NameError> {
    let number = text.parse().ok().filter(|_| text.bytes().all(|digit| digit.is_ascii_digit()));
    number.map_or_else(
        || refuse(format!("address resolution failed for {host}:{text}: the port is not a number")),
        Ok,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shown(name: &str) -> String {
        ExportName::parse(name).unwrap().to_string()
    }

    #[test]
    fn names_are_shown_as_by_qemu() {
        for (name, uri) in [
            ("nbd:unix:/x/s", "nbd+unix://?socket=/x/s"),
            ("nbd+unix:///?socket=/x/s", "nbd+unix://?socket=/x/s"),
            ("nbd+unix://?socket=/x/s", "nbd+unix://?socket=/x/s"),
            ("nbd:unix:/x/s:exportname=a b", "nbd+unix:///a%20b?socket=/x/s"),
            ("nbd+unix:///a%20b%2fc?socket=/x%20s", "nbd+unix:///a b/c?socket=/x s"),
            ("nbd:localhost:10809", "nbd://localhost:10809"),
            ("nbd:[::1]:7:exportname=e", "nbd://[::1]:7/e"),
            ("nbd://h", "nbd://h:10809"),
            ("nbd+tcp://h:1//e/f", "nbd://h:1/e/f"),
            ("nbd://[::1]/e", "nbd://[::1]:10809/e"),
            ("nbd:[fe80::1%eth0]:7", "nbd://[fe80::1%25eth0]:7"),
            ("nbd://[fe80::1%eth0]:7", "nbd://[fe80::1%25eth0]:7"),
            ("nbd://127%2E0.0.1:7", "nbd://127.0.0.1:7"),
            ("nbd:127%2E0.0.1:7", "nbd://127%252E0.0.1:7"),
            ("nbd:a/b?c@d#:7", "nbd://a%2Fb%3Fc%40d%23:7"),
        ] {
            assert_eq!(shown(name), uri.replace(' ', "%20"), "{name}");
            assert_eq!(shown(uri), shown(name), "{name}");
        }
        let name = ExportName::parse("nbd+unix:///a%20b%2fc?socket=/x%20s").unwrap();
        assert_eq!((name.export(), name.server()), ("a b/c", &Server::Unix("/x s".into())));
    }

    #[test]
    fn what_is_no_name_is_refused() {
        for (name, text) in [
            ("file.raw", "must start with 'nbd:'"),
            ("nbd:foo", "error parsing address 'foo'"),
            ("nbd:", "error parsing address ''"),
            ("nbd::10809", "address is empty"),
            ("nbd:h:10x", "address resolution failed for h:10x"),
            ("nbd:h:+1", "address resolution failed"),
            ("nbd:h:65536", "address resolution failed"),
            ("nbd:::1:10809", "error parsing address"),
            ("nbd:unix:", "address is empty"),
            ("nbd:unix:/x:exportname=", "is empty"),
            ("nbd+unix:///?foo=1", "No valid URL specified"),
            ("nbd+unix:///e", "No valid URL specified"),
            ("nbd+unix:/x", "No valid URL specified"),
            ("nbd+unix://host/?socket=/x", "No valid URL specified"),
            ("nbd+unix:///?socket=/x&socket=/y", "No valid URL specified"),
            ("nbd://h/e?socket=/x", "No valid URL specified"),
            ("nbd:///e", "No valid URL specified"),
            ("nbd://h:%31", "address resolution failed"),
            ("nbd://%ff:1", "not UTF-8"),
            ("nbd+unix:///a%00b?socket=/x", "NUL byte"),
            ("nbd+unix:///%ff?socket=/x", "not UTF-8"),
        ] {
            let error = ExportName::parse(name).unwrap_err().to_string();
            assert!(error.contains(text), "{name}: {error}");
        }
        let long = "x".repeat(MAX_PATH + 1);
        assert!(ExportName::new(Server::Unix(long), None).is_err());
        let long = Some("x".repeat(MAX_STRING + 1));
        assert!(ExportName::new(Server::Unix("s".into()), long).is_err());
        for name in ["./nbd:x", "/x/nbd:y", "nbds://h", "nbd", "NBD:h:1"] {
            assert!(!is_name(name), "{name}");
        }
    }

    proptest! {
        #[test]
        fn what_is_shown_is_the_same_export(
            path in "[^\0]{1,30}",
            host in "[^\0]{1,30}|[a-f0-9:.%@/?#\\[\\]]{1,12}",
            port in any::<u16>(),
            export in proptest::option::of("[^\0]{1,30}"),
        ) {
            for server in [Server::Unix(path), Server::Tcp { host, port }] {
                let name = ExportName::new(server, export.clone()).unwrap();
                prop_assert_eq!(ExportName::parse(&name.to_string()).unwrap(), name);
            }
        }

        #[test]
        fn no_text_panics(text in ".{0,60}") {
            for name in [text.clone(), format!("nbd:{text}"), format!("nbd+unix://{text}")] {
                let _ = ExportName::parse(&name);
            }
        }
    }
}
