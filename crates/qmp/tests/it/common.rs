//! A server with a small service, and a client that sends bytes as they are.

use isobath_qmp::QmpError;
use isobath_qmp::schema::{Command, EventType, Object, Schema, Type, object, opt, req};
use isobath_qmp::server::{CONTROL, ClientFiles, Events, Limits, Server, Service};
use isobath_ring::net::Listener;
use isobath_ring::{Config, Executor, sleep};
use isobath_testkit::process::PATIENCE;
use serde_json::{Map, Value, json};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;
use tempfile::TempDir;

static ECHO: Object = object(&[req("text", Type::Str), opt("times", Type::Size)]);
static ANY: Object = object(&[opt("text", Type::Str), opt("times", Type::Size)]);
static COMMANDS: &[Command] = &[
    Command { name: "echo", arguments: &ECHO, returns: Some(Type::Str) },
    Command { name: "emit", arguments: &ANY, returns: None },
    Command { name: "pause", arguments: &ANY, returns: None },
    Command { name: "fail", arguments: &ANY, returns: None },
    Command { name: "quit", arguments: &ANY, returns: None },
];
static SCHEMA: Schema =
    Schema { commands: &[CONTROL, COMMANDS], events: &[EventType { name: "TOLD", data: &ANY }] };

struct Toy {
    events: Events,
    quit: mpsc::Sender<()>,
}

impl Service for Toy {
    fn schema(&self) -> &'static Schema {
        &SCHEMA
    }

    async fn execute(
        &self,
        command: &'static str,
        arguments: Map<String, Value>,
        _client: &ClientFiles,
    ) -> Result<Value, QmpError> {
        let text = arguments.get("text").and_then(Value::as_str).unwrap_or("x");
        let times = arguments.get("times").and_then(Value::as_u64).unwrap_or(1);
        match command {
            "echo" => Ok(text.repeat(times as usize).into()),
            "emit" => {
                for _ in 0..times {
                    self.events.emit("TOLD", json!({"text": text.repeat(1000)}));
                }
                Ok(json!({}))
            }
            "pause" => {
                sleep(Duration::from_millis(times)).await;
                Ok(json!({}))
            }
            "quit" => {
                let _ = self.quit.send(());
                Ok(json!({}))
            }
            _ => Err(QmpError::new("it fails")),
        }
    }
}

/// A server on a thread of its own; it ends by `quit`.
pub(crate) struct Served {
    pub(crate) socket: PathBuf,
    thread: Option<JoinHandle<()>>,
    _directory: TempDir,
}

impl Served {
    pub(crate) fn start(limits: Limits) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("qmp.sock");
        let listener = Listener::bind_unix(&socket).unwrap();
        let thread = thread::spawn(move || {
            let executor = Executor::new(&Config::default()).unwrap();
            executor.block_on(async {
                let (quit, wanted) = mpsc::channel();
                let events = Events::default();
                let server = Server::new(Toy { events: events.clone(), quit }, events, limits);
                let watched = server.clone();
                drop(isobath_ring::spawn(async move {
                    while wanted.try_recv().is_err() {
                        sleep(Duration::from_millis(1)).await;
                    }
                    watched.stop();
                }));
                server.serve(listener).await.unwrap();
                assert_eq!(server.sessions(), 0);
            });
        });
        Self { socket, thread: Some(thread), _directory: directory }
    }

    /// Waits for the end of the server.
    pub(crate) fn ended(mut self) {
        self.thread.take().unwrap().join().unwrap();
        assert!(!self.socket.exists());
    }
}

/// A connection that says nothing by itself.
pub(crate) struct Raw {
    stream: UnixStream,
    input: Vec<u8>,
}

impl Raw {
    pub(crate) fn connect(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { stream, input: Vec::new() }
    }

    /// A connection after the greeting and the negotiation.
    pub(crate) fn negotiated(socket: &Path) -> Self {
        let mut raw = Self::connect(socket);
        assert!(raw.line()["QMP"].is_object());
        assert_eq!(raw.ask(r#"{"execute":"qmp_capabilities"}"#), json!({"return": {}}));
        raw
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// Sends as much as the other side takes; `false` once it takes no more.
    pub(crate) fn try_send(&mut self, bytes: &[u8]) -> bool {
        self.stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
        self.stream.write_all(bytes).is_ok()
    }

    pub(crate) fn finish(&mut self) {
        self.stream.shutdown(std::net::Shutdown::Write).unwrap();
    }

    /// The next line as JSON; null once the other side has closed.
    pub(crate) fn line(&mut self) -> Value {
        loop {
            if let Some(end) = self.input.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.input.drain(..=end).collect();
                return serde_json::from_slice(&line).unwrap();
            }
            let mut buf = vec![0; 64 << 10];
            match self.stream.read(&mut buf) {
                Ok(0) => return Value::Null,
                Ok(count) => self.input.extend(&buf[..count]),
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {
                    return Value::Null;
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Sends a request and gives the next line.
    pub(crate) fn ask(&mut self, request: impl AsRef<[u8]>) -> Value {
        self.send(request.as_ref());
        self.line()
    }
}
