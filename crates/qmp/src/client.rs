//! A blocking QMP client, for the command line.

use crate::json::{self, Limits, Splitter};
use isobath_tls::{Blocking, ClientCredentials};
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The longest reply accepted, enough for a disk with many thousands of layers.
const LONGEST: usize = 256 << 20;

/// Bytes of a socket file's path, by `sockaddr_un`.
const LONGEST_PATH: usize = 107;

/// How long a server may take to answer in a TLS handshake.
const HANDSHAKE: Duration = Duration::from_secs(30);

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The server cannot be reached.
    #[error("cannot connect to '{address}': {}", unreachable(address, error))]
    Connect {
        /// The server's address.
        address: String,
        /// The system's error.
        #[source]
        error: io::Error,
    },
    /// The connection failed.
    #[error("the connection failed: {}", isobath_storage::cause(.0))]
    Io(#[from] io::Error),
    /// The server closed the connection.
    #[error("the server closed the connection")]
    Closed,
    /// The data received is not QMP.
    #[error("this is not a QMP server: {0}")]
    NotQmp(String),
    /// The server refused the command.
    #[error("{description}")]
    Refused {
        /// The error's class, such as `DeviceNotFound`.
        class: String,
        /// The server's message.
        description: String,
    },
}

/// Why a server cannot be reached.
fn unreachable(address: &str, error: &io::Error) -> String {
    if let Address::Unix(path) = Address::parse(address) {
        let length = path.as_os_str().len();
        if length > LONGEST_PATH {
            return format!("its path has {length} bytes; a socket's has at most {LONGEST_PATH}");
        }
        if error.kind() == io::ErrorKind::ConnectionRefused {
            let is_socket = path.metadata().is_ok_and(|found| found.file_type().is_socket());
            return if is_socket {
                "no server listens there; the one that made the socket has ended".into()
            } else {
                "it is no socket; give the path of the server's --qmp".into()
            };
        }
    }
    isobath_storage::cause(error)
}

impl ClientError {
    /// Whether the server refused the command with an error of this class.
    pub fn is_of(&self, wanted: &str) -> bool {
        matches!(self, Self::Refused { class, .. } if class == wanted)
    }
}

/// An event from the server.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Its name.
    pub name: String,
    /// Its data; an empty object if there is none.
    pub data: Value,
}

/// The address of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A socket file.
    Unix(PathBuf),
    /// `HOST:PORT`.
    Tcp(String),
}

impl Address {
    /// Parses `unix:PATH`, `HOST:PORT`, or the path of a socket file.
    pub fn parse(text: &str) -> Self {
        if let Some(path) = text.strip_prefix("unix:") {
            return Self::Unix(path.into());
        }
        let is_port =
            |port: &str| !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
        match text.rsplit_once(':') {
            Some((host, port)) if !host.contains('/') && is_port(port) => Self::Tcp(text.into()),
            _ => Self::Unix(text.into()),
        }
    }

    /// The host of a TCP address, without brackets.
    pub fn host(&self) -> Option<&str> {
        let Self::Tcp(text) = self else { return None };
        let host = text.rsplit_once(':').map_or(text.as_str(), |(host, _)| host);
        Some(host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host))
    }
}

enum Socket {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Socket {
    fn set_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.set_read_timeout(timeout),
            Self::Tcp(stream) => stream.set_read_timeout(timeout),
        }
    }
}

impl Read for Socket {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.read(buf),
            Self::Tcp(stream) => stream.read(buf),
        }
    }
}

impl Write for Socket {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.write(buf),
            Self::Tcp(stream) => stream.write(buf),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A connection, encrypted or not.
enum Connection {
    Plain(Socket),
    Secured(Box<Blocking<Socket>>),
}

impl Connection {
    fn socket(&self) -> &Socket {
        match self {
            Self::Plain(socket) => socket,
            Self::Secured(secured) => secured.stream(),
        }
    }

    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.read(buf),
            Self::Secured(secured) => secured.read(buf),
        }
    }

    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Plain(socket) => socket.write_all(bytes),
            Self::Secured(secured) => secured.write_all(bytes),
        }
    }
}

/// The deepest nesting accepted: `query-block` nests the first hundred images of a chain. The parser accepts 127.
const DEEPEST: usize = 120;

/// A session with an Isobath or QEMU server.
pub struct Client {
    connection: Connection,
    splitter: Splitter,
    /// Received but not yet processed.
    input: Vec<u8>,
    events: VecDeque<Event>,
    next_id: u64,
}

impl Client {
    /// Connects and negotiates capabilities.
    ///
    /// # Errors
    /// Nothing listens there, or it is not a QMP server.
    pub fn connect(address: &Address) -> Result<Self, ClientError> {
        Self::begin(Connection::Plain(Self::connect_socket(address)?))
    }

    /// As [`connect`](Self::connect), over TLS: the server must show a certificate for `host`.
    ///
    /// # Errors
    /// Nothing listens there; it is not a QMP server, or not one with TLS; or it refuses the credentials.
    pub fn connect_secured(
        address: &Address,
        credentials: &ClientCredentials,
        host: &str,
    ) -> Result<Self, ClientError> {
        let socket = Self::connect_socket(address)?;
        let secured = credentials.channel(host).and_then(|channel| {
            socket.set_timeout(Some(HANDSHAKE))?;
            Blocking::handshake(socket, channel)
        });
        let address = match address {
            Address::Unix(path) => path.display().to_string(),
            Address::Tcp(host) => host.clone(),
        };
        let secured = secured.map_err(|error| ClientError::Connect { address, error })?;
        Self::begin(Connection::Secured(Box::new(secured)))
    }

    fn connect_socket(address: &Address) -> Result<Socket, ClientError> {
        match address {
            Address::Unix(path) => Self::connect_unix(path),
            Address::Tcp(host) => TcpStream::connect(host)
                .map(Socket::Tcp)
                .map_err(|error| ClientError::Connect { address: host.clone(), error }),
        }
    }

    /// Negotiates capabilities.
    fn begin(connection: Connection) -> Result<Self, ClientError> {
        let limits = Limits { bytes: LONGEST, depth: DEEPEST };
        let splitter = Splitter::new(limits);
        let mut client =
            Self { connection, splitter, input: Vec::new(), events: VecDeque::new(), next_id: 0 };
        let greeting = client.receive(None)?.unwrap_or_default();
        if greeting.get("QMP").is_none() {
            return Err(ClientError::NotQmp(format!(
                "unexpected greeting {}",
                Value::Object(greeting)
            )));
        }
        client.execute("qmp_capabilities", json!({}))?;
        Ok(client)
    }

    fn connect_unix(path: &Path) -> Result<Socket, ClientError> {
        UnixStream::connect(path)
            .map(Socket::Unix)
            .map_err(|error| ClientError::Connect { address: path.display().to_string(), error })
    }

    /// The ID of the process that listens on the server's socket file, in this process's PID namespace.
    pub fn server(&self) -> Option<u32> {
        let Socket::Unix(stream) = self.connection.socket() else { return None };
        let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut length = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: `peer` has room for `length` bytes.
        let asked = unsafe {
            libc::getsockopt(
                stream.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut peer).cast(),
                &raw mut length,
            )
        };
        // 0 for a process in another namespace.
        if asked == 0 { u32::try_from(peer.pid).ok().filter(|id| *id != 0) } else { None }
    }

    /// Executes a command and returns its result. Events received meanwhile are kept for
    /// [`event`](Self::event).
    ///
    /// # Errors
    /// The server refused it or closed the connection.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, ClientError> {
        self.next_id += 1;
        let id = Value::from(self.next_id);
        let mut request = json!({"execute": command, "id": id});
        if arguments.as_object().is_none_or(|arguments| !arguments.is_empty())
            && let Some(request) = request.as_object_mut()
        {
            request.insert("arguments".into(), arguments);
        }
        self.connection.write_all(&json::to_line(&request))?;
        loop {
            let Some(mut message) = self.receive(None)? else { continue };
            if message.contains_key("event") {
                self.events.push_back(to_event(message));
            } else if message.get("id") != Some(&id) {
                let message = Value::Object(message);
                return Err(ClientError::NotQmp(format!("unexpected reply {message}")));
            } else if let Some(value) = message.shift_remove("return") {
                return Ok(value);
            } else {
                let text = |key: &str| {
                    let value = message.get("error").and_then(|error| error.get(key));
                    value.and_then(Value::as_str).unwrap_or("unknown error").to_owned()
                };
                return Err(ClientError::Refused {
                    class: text("class"),
                    description: text("desc"),
                });
            }
        }
    }

    /// The next event; `None` if none arrives within the timeout.
    ///
    /// # Errors
    /// The server is gone.
    pub fn event(&mut self, patience: Duration) -> Result<Option<Event>, ClientError> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(Some(event));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            if let Some(message) = self.receive(Some(left))?
                && message.contains_key("event")
            {
                self.events.push_back(to_event(message));
            }
        }
    }

    /// The next message; `None` if none is complete within the timeout.
    fn receive(
        &mut self,
        patience: Option<Duration>,
    ) -> Result<Option<Map<String, Value>>, ClientError> {
        let not_qmp = |error: &dyn std::fmt::Display| ClientError::NotQmp(error.to_string());
        self.connection.socket().set_timeout(patience)?;
        loop {
            let mut input = self.input.as_slice();
            let found = self.splitter.next(&mut input);
            let rest = input.len();
            self.input.drain(..self.input.len() - rest);
            if let Some(value) = found {
                let text = value.map_err(|error| not_qmp(&error))?;
                return match json::parse(&text).map_err(|error| not_qmp(&error))? {
                    Value::Object(message) => Ok(Some(message)),
                    other => Err(ClientError::NotQmp(format!("unexpected message {other}"))),
                };
            }
            let mut buf = vec![0; 64 << 10];
            match self.connection.read(&mut buf) {
                Ok(0) => return Err(ClientError::Closed),
                Ok(count) => self.input.extend(buf.get(..count).unwrap_or_default()),
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => return Ok(None),
                    io::ErrorKind::Interrupted if patience.is_some() => return Ok(None),
                    io::ErrorKind::Interrupted => {}
                    _ => return Err(error.into()),
                },
            }
        }
    }
}

fn to_event(mut message: Map<String, Value>) -> Event {
    let name = message.get("event").and_then(Value::as_str).unwrap_or_default().to_owned();
    let data = message.shift_remove("data").unwrap_or_else(|| json!({}));
    Event { name, data }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_about_long_chains_are_understood() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("qmp.sock");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 4096];
            stream.write_all(b"{\"QMP\": {}}\r\n").unwrap();
            let _ = stream.read(&mut request).unwrap();
            stream.write_all(b"{\"return\": {}, \"id\": 1}\r\n").unwrap();
            let _ = stream.read(&mut request).unwrap();
            let nested = format!("{}{}", "{\"image\": ".repeat(105), "{}") + &"}".repeat(105);
            stream.write_all(format!("{{\"return\": {nested}, \"id\": 2}}").as_bytes()).unwrap();
        });
        let mut client = Client::connect(&Address::Unix(path)).unwrap();
        let reply = client.execute("query-block", json!({})).unwrap();
        assert!(reply["image"]["image"].is_object());
        server.join().unwrap();
    }

    #[test]
    fn addresses_are_sockets_unless_they_end_in_a_port() {
        let unix = |path: &str| Address::Unix(path.into());
        let tcp = |text: &str| Address::Tcp(text.into());
        for (text, address) in [
            ("unix:a:1", unix("a:1")),
            ("/run/a.sock", unix("/run/a.sock")),
            ("./a:1", unix("./a:1")),
            ("qmp.sock", unix("qmp.sock")),
            ("a:", unix("a:")),
            ("localhost:4444", tcp("localhost:4444")),
            ("[::1]:1", tcp("[::1]:1")),
        ] {
            assert_eq!(Address::parse(text), address, "{text}");
        }
        assert_eq!(tcp("localhost:4444").host(), Some("localhost"));
        assert_eq!(tcp("[::1]:1").host(), Some("::1"));
        assert_eq!(unix("a").host(), None);
    }
}
