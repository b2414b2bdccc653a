//! The addresses that a server listens on, and how they are written.

use super::handed_in::HandedIn;
use crate::failure::Failure;
use isobath_ring::net::{Access, Address, Listener};
use std::io;
use std::net::{Ipv4Addr, ToSocketAddrs};
use std::path::PathBuf;
use std::str::FromStr;

/// NBD's port.
pub(crate) const PORT: u16 = 10809;

/// The value of `--nbd`, `--qmp` or `--metrics`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// `unix:PATH`
    Unix(PathBuf),
    /// `HOST:PORT`, `HOST`, `:PORT` or `PORT`
    Tcp { host: String, port: u16 },
    /// `fd:NAME` or `fd:NUMBER`: a socket that listens already
    HandedIn(HandedIn),
}

impl Default for Endpoint {
    fn default() -> Self {
        Self::Tcp { host: Ipv4Addr::LOCALHOST.to_string(), port: PORT }
    }
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return if path.is_empty() {
                Err("missing socket path after 'unix:'".into())
            } else {
                Ok(Self::Unix(path.into()))
            };
        }
        if let Some(descriptor) = text.strip_prefix("fd:") {
            return descriptor.parse().map(Self::HandedIn);
        }
        let number = |port: &str| {
            port.parse::<u16>().map_err(|_| format!("'{port}' is not a port (0 to 65535)"))
        };
        let (host, port) = if let Some(rest) = text.strip_prefix('[') {
            let (host, rest) = rest.split_once(']').ok_or("missing ']' after '['")?;
            match rest.strip_prefix(':') {
                Some(port) => (host, number(port)?),
                None if rest.is_empty() => (host, PORT),
                None => return Err(format!("expected ':PORT' after ']', not '{rest}'")),
            }
        } else if let Some((host, port)) = text.rsplit_once(':') {
            if host.contains(':') {
                return Err("write IPv6 addresses in brackets, as in [::1]:10809".into());
            }
            (host, number(port)?)
        } else if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
            ("", number(text)?)
        } else {
            (text, PORT)
        };
        if host.is_empty() {
            let Self::Tcp { host, .. } = Self::default() else { return Err(String::new()) };
            return Ok(Self::Tcp { host, port });
        }
        if host.contains('/') {
            return Err("write a socket file as unix:PATH".into());
        }
        Ok(Self::Tcp { host: host.to_owned(), port })
    }
}

impl Endpoint {
    /// Whether clients connect by TCP.
    pub(crate) fn is_tcp(&self) -> bool {
        match self {
            Self::Unix(_) => false,
            Self::Tcp { .. } => true,
            // One that cannot be used is refused when it is taken.
            Self::HandedIn(descriptor) => {
                descriptor.address().is_ok_and(|address| matches!(address, Address::Tcp(_)))
            }
        }
    }

    /// The same as endpoints of one socket each: descriptors handed in may share a name.
    ///
    /// # Errors
    /// There is no such descriptor.
    pub(crate) fn each(&self) -> Result<Vec<Self>, Failure> {
        let Self::HandedIn(descriptor) = self else { return Ok(vec![self.clone()]) };
        let numbers = descriptor.numbers()?.into_iter();
        Ok(numbers.map(|number| Self::HandedIn(HandedIn::Number(number))).collect())
    }

    /// The descriptor that it is, if it is one.
    pub(crate) fn handed_in(&self) -> Option<&HandedIn> {
        match self {
            Self::HandedIn(descriptor) => Some(descriptor),
            Self::Unix(_) | Self::Tcp { .. } => None,
        }
    }

    /// Listens on it, for a socket file with these permissions; for a host name, on the first of its addresses that can
    /// be bound.
    pub(crate) fn bind(&self, access: Access) -> io::Result<Listener> {
        let (host, port) = match self {
            Self::Unix(path) => return Listener::bind_unix_for(path, access),
            Self::Tcp { host, port } => (host.as_str(), *port),
            Self::HandedIn(descriptor) => {
                let taken =
                    descriptor.take().map_err(|failure| io::Error::other(failure.to_string()))?;
                return Listener::handed_in(taken);
            }
        };
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
        for address in (host, port).to_socket_addrs()? {
            match Listener::bind_tcp(address) {
                Ok(listener) => return Ok(listener),
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::HandedIn(descriptor) => descriptor.fmt(f),
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
        }
    }
}

/// Whether other machines may reach a listener.
pub(crate) fn is_public(address: &Address) -> bool {
    match address {
        Address::Unix(_) => false,
        Address::Tcp(address) => !address.ip().is_loopback(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_read_in_every_form() {
        let tcp = |host: &str, port| Ok(Endpoint::Tcp { host: host.into(), port });
        for (text, endpoint) in [
            ("unix:/run/a b.sock", Ok(Endpoint::Unix("/run/a b.sock".into()))),
            ("0.0.0.0:1", tcp("0.0.0.0", 1)),
            ("example:0", tcp("example", 0)),
            ("example", tcp("example", PORT)),
            (":2", tcp("127.0.0.1", 2)),
            ("fd:7", Ok(Endpoint::HandedIn(HandedIn::Number(7)))),
            ("fd:a.b", Ok(Endpoint::HandedIn(HandedIn::Name("a.b".into())))),
            ("2", tcp("127.0.0.1", 2)),
            ("[::1]:3", tcp("::1", 3)),
            ("[::]", tcp("::", PORT)),
        ] {
            assert_eq!(text.parse(), endpoint, "{text}");
        }
        for text in [
            "unix:",
            "fd:",
            "fd:1",
            "::1",
            "a:b",
            "a:65536",
            "[::1",
            "[::1]3",
            "/run/a.sock",
            "70000",
        ] {
            assert!(text.parse::<Endpoint>().is_err(), "{text}");
        }
    }
}
