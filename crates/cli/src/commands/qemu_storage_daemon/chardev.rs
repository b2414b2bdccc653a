//! Channels for QMP, and the addresses of servers.

use super::Daemons;
use crate::failure::Failure;
use crate::options::{on_off, printable};
use crate::server::endpoint::{Endpoint, PORT};
use crate::server::listen;
use crate::server::tls::{SecuredEndpoint, Tls};
use crate::tls_objects::TlsObject;
use isobath_ring::net::Access;
use isobath_ring::net::{Listener, Stream};
use isobath_ring::{JoinHandle, sleep, spawn};
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::thread;
use std::time::{Duration, Instant};

/// How long to wait for standard output at the end.
const PATIENCE: Duration = Duration::from_secs(2);

/// A channel.
pub(super) struct Chardev {
    id: String,
    kind: Kind,
}

enum Kind {
    Socket(Endpoint),
    Stdio,
}

type Pairs = Vec<(String, String)>;

/// The last value given for a name.
fn value<'a>(pairs: &'a Pairs, name: &str) -> Option<&'a str> {
    pairs.iter().rev().find(|(other, _)| other == name).map(|(_, value)| value.as_str())
}

/// Refuses names that are not `known`.
fn only(pairs: &Pairs, known: &[&str]) -> Result<(), Failure> {
    match pairs.iter().find(|(name, _)| !known.contains(&name.as_str())) {
        Some((name, _)) => {
            Err(Failure::new(format_args!("Parameter '{}' is unexpected", printable(name))))
        }
        None => Ok(()),
    }
}

fn required<'a>(pairs: &'a Pairs, name: &str) -> Result<&'a str, Failure> {
    let missing = || Failure::new(format_args!("Parameter '{name}' is missing"));
    value(pairs, name).ok_or_else(missing)
}

fn port(text: &str) -> Result<u16, Failure> {
    text.parse().map_err(|_| Failure::new(format_args!("'{}' is not a TCP port", printable(text))))
}

/// The address in `--nbd-server`, and its encryption, by the objects that it names.
pub(super) fn nbd_address(
    text: &str,
    objects: &[TlsObject],
) -> Result<(SecuredEndpoint, Tls), Failure> {
    let pairs = super::pairs(text, "");
    let known = [
        "addr.type",
        "addr.path",
        "addr.host",
        "addr.port",
        "max-connections",
        "tls-creds",
        "tls-authz",
    ];
    only(&pairs, &known).map_err(|failure| failure.context("--nbd-server"))?;
    if value(&pairs, "max-connections").is_some_and(|most| most != "0") {
        return Err(Failure::new(
            "--nbd-server: only max-connections=0 is supported; up to 128 clients are served at a \
             time",
        ));
    }
    let address = match required(&pairs, "addr.type")? {
        "unix" => Endpoint::Unix(required(&pairs, "addr.path")?.into()),
        "inet" => Endpoint::Tcp {
            host: required(&pairs, "addr.host")?.to_owned(),
            port: value(&pairs, "addr.port").map_or(Ok(PORT), port)?,
        },
        other => {
            return Err(Failure::new(format_args!(
                "--nbd-server: Parameter 'addr.type' does not accept value '{}'",
                printable(other)
            )));
        }
    };
    let (credentials, authorization) = (value(&pairs, "tls-creds"), value(&pairs, "tls-authz"));
    let secured = Tls::of_objects(objects, credentials, authorization);
    let (mode, tls) = secured.map_err(|failure| failure.context("--nbd-server"))?;
    Ok((SecuredEndpoint { mode: Some(mode), ..address.into() }, tls))
}

impl Chardev {
    pub(super) fn parse(pairs: &Pairs) -> Result<Self, Failure> {
        let id = required(pairs, "id")?.to_owned();
        let flag = |name: &str, default| {
            value(pairs, name)
                .map_or(Ok(default), |value| on_off(name, value))
                .map_err(Failure::new)
        };
        let kind = match required(pairs, "backend")? {
            "stdio" => {
                only(pairs, &["backend", "id", "signal"])?;
                Kind::Stdio
            }
            "socket" => {
                only(pairs, &["backend", "id", "path", "host", "port", "server", "wait"])?;
                let _ = flag("wait", true)?;
                if !flag("server", false)? {
                    return Err(Failure::new(format_args!(
                        "chardev '{id}': connecting to a socket is not supported; listen on it \
                         with server=on"
                    )));
                }
                Kind::Socket(match value(pairs, "path") {
                    Some(path) => Endpoint::Unix(path.into()),
                    None => Endpoint::Tcp {
                        host: required(pairs, "host")?.to_owned(),
                        port: port(required(pairs, "port")?)?,
                    },
                })
            }
            other => {
                return Err(Failure::new(format_args!(
                    "chardev backend '{}' is not supported; use socket or stdio",
                    printable(other)
                )));
            }
        };
        Ok(Self { id, kind })
    }
}

/// The channels on which QMP is served.
#[derive(Default)]
pub(super) struct Monitors {
    listeners: Vec<Listener>,
    stdio: bool,
}

impl Monitors {
    /// Binds the channels that monitors use.
    pub(super) fn bind(
        monitors: impl Iterator<Item = Pairs>,
        chardevs: &[Chardev],
    ) -> Result<Self, Failure> {
        let mut bound = Self::default();
        for monitor in monitors {
            only(&monitor, &["chardev", "mode", "pretty", "id"])
                .map_err(|failure| failure.context("--monitor"))?;
            if value(&monitor, "mode").is_some_and(|mode| mode != "control") {
                return Err(Failure::new("--monitor: only QMP (mode=control) is supported"));
            }
            let id = required(&monitor, "chardev")?;
            let Some(chardev) = chardevs.iter().find(|chardev| chardev.id == id) else {
                return Err(Failure::new(format_args!("chardev \"{}\" not found", printable(id))));
            };
            match &chardev.kind {
                Kind::Stdio => bound.stdio = true,
                Kind::Socket(endpoint) => {
                    let listener = listen::bind(endpoint, "--chardev", Access::default())?;
                    bound.listeners.push(listener);
                }
            }
        }
        Ok(bound)
    }

    /// Serves QMP; on standard input and output only if the process `stays` in the foreground.
    pub(super) fn serve(self, control: &Rc<Daemons>, stays: bool) -> Result<Controlling, Failure> {
        let mut output = None;
        if self.stdio && stays {
            let (stream, thread) = stdio().map_err(|error| Failure::new(error).context("stdio"))?;
            control.begin(stream);
            output = Some(thread);
        }
        let serve = |listener| {
            let control = Rc::clone(control);
            spawn(async move {
                if let Err(error) = control.serve(listener).await {
                    tracing::error!(%error, "a control socket failed");
                }
            })
        };
        Ok(Controlling { listening: self.listeners.into_iter().map(serve).collect(), output })
    }
}

/// Sessions of QMP clients.
pub(super) struct Controlling {
    listening: Vec<JoinHandle<()>>,
    /// Copies what a session sends to standard output.
    output: Option<thread::JoinHandle<()>>,
}

impl Controlling {
    /// Waits until the last session has ended, after the server was told to stop.
    pub(super) async fn ended(self, control: &Daemons) {
        for ended in self.listening {
            if let Err(panicked) = ended.await {
                panicked.resume();
            }
        }
        // Closing the session's socket, which ends the output, needs this thread. The server limits how long a session
        // may take; the output may have no reader.
        let until = Instant::now() + PATIENCE;
        let writes = || self.output.as_ref().is_some_and(|output| !output.is_finished());
        while control.sessions() > 0 || (writes() && Instant::now() < until) {
            sleep(Duration::from_millis(1)).await;
        }
    }
}

/// A stream that threads connect to standard input and output. The daemon keeps running after the end of the input.
fn stdio() -> io::Result<(Stream, thread::JoinHandle<()>)> {
    let (ours, theirs) = UnixStream::pair()?;
    let (mut input, mut output) = (theirs.try_clone()?, theirs);
    // The program's own handle stays locked while its command runs.
    let mut stdout = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    thread::Builder::new().name("stdin".into()).spawn(move || {
        let _ = copy(&mut io::stdin().lock(), &mut input);
        let _ = input.shutdown(Shutdown::Write);
    })?;
    let output = thread::Builder::new().name("stdout".into()).spawn(move || {
        let _ = copy(&mut output, &mut stdout);
    })?;
    Ok((Stream::from(OwnedFd::from(ours)), output))
}

/// Like `io::copy`, but without `splice(2)`, which keeps a pipe locked while it waits for input, so that nobody can
/// read what is in it.
fn copy(from: &mut impl Read, to: &mut impl Write) -> io::Result<()> {
    let mut buf = vec![0; 64 << 10];
    loop {
        match from.read(&mut buf) {
            Ok(0) => return Ok(()),
            Ok(read) => to.write_all(buf.get(..read).unwrap_or_default())?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Chardev, Failure> {
        Chardev::parse(&super::super::pairs(text, "backend"))
    }

    #[test]
    fn channels_are_described_as_to_qemu() {
        assert!(matches!(parsed("stdio,id=a").unwrap().kind, Kind::Stdio));
        let socket = parsed("socket,id=b,path=/run/a,,b,server=on,wait=off").unwrap();
        assert!(matches!(socket.kind, Kind::Socket(Endpoint::Unix(path)) if path.ends_with("a,b")));
        for text in ["stdio", "socket,id=a,path=x", "null,id=a", "socket,id=a,server=on", "x=y"] {
            assert!(parsed(text).is_err(), "{text}");
        }
        let (tcp, _) = nbd_address("addr.type=inet,addr.host=localhost,addr.port=7", &[]).unwrap();
        assert_eq!(tcp.endpoint, Endpoint::Tcp { host: "localhost".into(), port: 7 });
        for text in [
            "",
            "addr.type=vsock",
            "addr.type=unix",
            "addr.type=inet,addr.host=a,addr.port=x",
            "addr.type=inet,addr.host=a,addr.port=1,tls-creds=t",
            "addr.type=inet,addr.host=a,addr.port=1,tls-authz=z",
        ] {
            assert!(nbd_address(text, &[]).is_err(), "{text}");
        }
    }
}
