//! The server side of QMP: sessions, capabilities, events.
//!
//! Everything runs as tasks of one thread's [ring](isobath_ring). A session executes one request after
//! another; sessions run concurrently.
//!
//! For bounds, see [`Limits`]. If a client sends more than it reads, the server stops reading from it until it has
//! taken its replies; a client that does not read its events is disconnected. Neither blocks other clients.

mod events;
mod files;
mod outbox;
mod session;

pub use events::Events;
pub use files::ClientFiles;
pub(crate) use files::check_length;

use crate::error::QmpError;
use crate::json;
use crate::schema::{Command, Member, Object, Schema, Type, object, opt, req};
use event_listener::Event;
use isobath_export::tls::{Connection, Security};
use isobath_ring::net::{Listener, Stream, after_failed_accept, own_user};
use isobath_ring::{first, spawn, timeout};
use outbox::Outbox;
use serde_json::{Map, Value, json};
use session::Session;
use std::cell::Cell;
use std::future::Future;
use std::io;
use std::rc::Rc;
use std::time::Duration;

/// The user who may do everything anyway.
const ROOT: u32 = 0;

/// Executes the commands.
pub trait Service: 'static {
    /// The commands and events. The server itself executes those in [`CONTROL`].
    fn schema(&self) -> &'static Schema;

    /// Executes a command whose arguments have been checked against the schema. It may take descriptors that the
    /// client has sent.
    fn execute(
        &self,
        command: &'static str,
        arguments: Map<String, Value>,
        client: &ClientFiles,
    ) -> impl Future<Output = Result<Value, QmpError>>;

    /// No client is connected any more.
    fn all_clients_left(&self) {}
}

/// Limits for clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Concurrent sessions, over all listeners. Further connections are closed at once.
    pub sessions: usize,
    /// The longest and deepest request.
    pub request: json::Limits,
    /// Bytes of replies that may wait for a client before the server stops accepting its requests.
    pub replies: usize,
    /// Bytes of replies and events that may wait for a client before it is disconnected.
    pub events: usize,
    /// How long a TLS handshake may take.
    pub handshake: Duration,
    /// How long a client may take to receive its last replies when its session ends.
    pub drain: Duration,
    /// The users whose processes may connect to a Unix socket, whatever its permissions; `None`: any.
    pub users: Option<[u32; 2]>,
}

impl Default for Limits {
    /// 64 sessions, requests as [`json::Limits::default`], 1 MiB of replies, 8 MiB with events, 30 s for a TLS
    /// handshake, 2 s to drain; only this process's user and root.
    fn default() -> Self {
        Self {
            sessions: 64,
            request: json::Limits::default(),
            replies: 1 << 20,
            events: 8 << 20,
            handshake: Duration::from_secs(30),
            drain: Duration::from_secs(2),
            users: Some([own_user(), ROOT]),
        }
    }
}

/// A QMP server.
#[derive(Debug)]
pub struct Server<S> {
    service: S,
    events: Events,
    limits: Limits,
    stopping: Cell<bool>,
    sessions: Cell<usize>,
    /// Notified when the server should stop, and when a session ends.
    changed: Event,
}

impl<S: Service> Server<S> {
    /// A server whose clients receive `events`.
    pub fn new(service: S, events: Events, limits: Limits) -> Rc<Self> {
        let (stopping, sessions) = (Cell::new(false), Cell::new(0));
        Rc::new(Self { service, events, limits, stopping, sessions, changed: Event::new() })
    }

    /// The service that executes the commands.
    pub fn service(&self) -> &S {
        &self.service
    }

    /// How many clients are connected.
    pub fn sessions(&self) -> usize {
        self.sessions.get()
    }

    /// Stops the server: no more clients are accepted; sessions finish the request in progress, send pending output,
    /// and close.
    pub fn stop(&self) {
        self.stopping.set(true);
        self.changed.notify(usize::MAX);
    }

    /// Accepts clients until [`stop`](Self::stop), and returns once every session has ended. Several
    /// listeners may be served at the same time.
    ///
    /// # Errors
    /// If the listener fails. Sessions continue.
    ///
    /// # Panics
    /// Outside a ring's `block_on`.
    pub async fn serve(self: &Rc<Self>, listener: Listener) -> io::Result<()> {
        self.serve_secured(listener, Security::Plain).await
    }

    /// As [`serve`](Self::serve), to clients whose connections are encrypted from the first byte if there are
    /// credentials: QMP has no negotiation of its own for that, so [`Security::Optional`] is refused.
    ///
    /// # Errors
    /// If the listener fails, or encryption is optional. Sessions continue.
    ///
    /// # Panics
    /// Outside a ring's `block_on`.
    pub async fn serve_secured(
        self: &Rc<Self>,
        listener: Listener,
        security: Security,
    ) -> io::Result<()> {
        if matches!(security, Security::Optional(_)) {
            let message = "QMP is encrypted from the first byte or not at all";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        while let Some(accepted) = self.unless_stopped(listener.accept()).await {
            match accepted {
                Ok(stream) if self.is_admitted(&stream) => {
                    self.begin_secured(stream, security.clone());
                }
                Ok(_) => {}
                Err(error) => {
                    let recovered = after_failed_accept(error, |error| {
                        tracing::warn!(%error, "cannot accept a QMP client; retrying");
                    });
                    match self.unless_stopped(recovered).await {
                        Some(recovered) => recovered?,
                        None => break,
                    }
                }
            }
        }
        drop(listener);
        loop {
            let changed = self.changed.listen();
            if self.sessions.get() == 0 {
                return Ok(());
            }
            changed.await;
        }
    }

    /// Starts a session with an already connected client.
    pub fn begin(self: &Rc<Self>, stream: Stream) {
        self.begin_secured(stream, Security::Plain);
    }

    fn begin_secured(self: &Rc<Self>, stream: Stream, security: Security) {
        if self.sessions.get() >= self.limits.sessions {
            tracing::warn!(
                limit = self.limits.sessions,
                "too many QMP clients; closing a new connection"
            );
            return;
        }
        self.sessions.set(self.sessions.get() + 1);
        let counted = Counted(self.clone());
        drop(spawn(async move {
            let connection = Connection::from(stream);
            if !counted.0.secure(&connection, &security).await {
                return;
            }
            let outbox = Outbox::new(connection, counted.0.limits.events);
            // Disconnects the client even if a command panics.
            let connected = Connected(outbox.clone());
            Session::new(&counted.0, &outbox).run().await;
            drop(connected);
            drop(counted);
        }));
    }

    /// Performs the TLS handshake, if there is to be one. Returns whether the session may begin.
    async fn secure(&self, connection: &Connection, security: &Security) -> bool {
        let Some(credentials) = security.credentials() else { return true };
        let handshake = timeout(self.limits.handshake, connection.secure(credentials));
        match self.unless_stopped(handshake).await {
            None => false,
            Some(Err(_)) => {
                tracing::warn!("a QMP client's TLS handshake timed out; closing its connection");
                false
            }
            Some(Ok(Err(error))) => {
                tracing::warn!(%error, "a QMP client's TLS handshake failed; closing its connection");
                false
            }
            Some(Ok(Ok(()))) => true,
        }
    }

    /// Whether a client's user may give commands.
    fn is_admitted(&self, stream: &Stream) -> bool {
        let Some(users) = self.limits.users else { return true };
        match stream.peer_user() {
            Ok(None) => true,
            Ok(Some(user)) if users.contains(&user) => true,
            Ok(Some(user)) => {
                tracing::warn!(
                    user,
                    "a QMP client belongs to another user; closing its connection"
                );
                false
            }
            Err(error) => {
                tracing::warn!(%error, "cannot determine a QMP client's user; closing its connection");
                false
            }
        }
    }

    async fn unless_stopped<F: Future>(&self, future: F) -> Option<F::Output> {
        let stopped = async {
            loop {
                let changed = self.changed.listen();
                if self.stopping.get() {
                    return None;
                }
                changed.await;
            }
        };
        first(async { Some(future.await) }, stopped).await
    }

    /// Executes a command in [`CONTROL`], or passes it to the service.
    async fn execute(
        &self,
        command: &'static Command,
        arguments: Map<String, Value>,
        files: &ClientFiles,
    ) -> Result<Value, QmpError> {
        let name = || arguments.get("fdname").and_then(Value::as_str).unwrap_or_default();
        match command.name {
            "getfd" => files.keep(name()).map(|()| json!({})),
            "closefd" => files.close(name()).map(|()| json!({})),
            "qmp_capabilities" => match arguments.get("enable").and_then(Value::as_array) {
                Some(wanted) if !wanted.is_empty() => {
                    Err(QmpError::new("Capability 'oob' is not available"))
                }
                _ => Ok(json!({})),
            },
            "query-version" => Ok(version()),
            "query-commands" => {
                let names = self.service.schema().commands();
                Ok(names.map(|command| json!({"name": command.name})).collect())
            }
            "query-qmp-schema" => Ok(crate::schema::introspect(self.service.schema())),
            name => self.service.execute(name, arguments, files).await,
        }
    }
}

struct Connected(Rc<Outbox>);

impl Drop for Connected {
    fn drop(&mut self) {
        self.0.cut();
    }
}

struct Counted<S: Service>(Rc<Server<S>>);

impl<S: Service> Drop for Counted<S> {
    fn drop(&mut self) {
        self.0.sessions.set(self.0.sessions.get() - 1);
        if self.0.sessions.get() == 0 {
            self.0.service.all_clients_left();
        }
        self.0.changed.notify(usize::MAX);
    }
}

/// The version of QEMU whose QMP this implements, for programs that check versions; `package` has Isobath's own.
fn version() -> Value {
    let package = concat!("isobath ", env!("CARGO_PKG_VERSION"));
    json!({"qemu": {"micro": 0, "minor": 2, "major": 7}, "package": package})
}

static CAPABILITY: Type = Type::Enum(&["oob"]);
static CAPABILITIES: Object = object(&[opt("enable", Type::List(&CAPABILITY))]);
static VERSION_TRIPLE: Object =
    object(&[req("major", Type::Int), req("minor", Type::Int), req("micro", Type::Int)]);
static VERSION: Object =
    object(&[req("qemu", Type::Object(&VERSION_TRIPLE)), req("package", Type::Str)]);
static COMMAND: Object = object(&[req("name", Type::Str)]);
static META_TYPE: Type =
    Type::Enum(&["builtin", "enum", "array", "object", "alternate", "command", "event"]);
const SCHEMA_MEMBERS: &[Member] = &[req("name", Type::Str), req("meta-type", META_TYPE)];
static SCHEMA_INFO: Object = Object {
    members: SCHEMA_MEMBERS,
    variants: Some(crate::schema::Variants {
        tag: "meta-type",
        cases: &[
            ("builtin", &BUILTIN),
            ("enum", &ENUM),
            ("array", &ARRAY),
            ("object", &OBJECT),
            ("alternate", &ALTERNATE),
            ("command", &COMMAND_INFO),
            ("event", &EVENT_INFO),
        ],
    }),
};
static JSON_TYPE: Type =
    Type::Enum(&["string", "number", "int", "boolean", "null", "object", "array", "value"]);
static BUILTIN: Object = object(&[req("json-type", JSON_TYPE)]);
static ENUM: Object =
    object(&[req("members", Type::List(&ENUM_MEMBER)), req("values", Type::List(&Type::Str))]);
static ENUM_MEMBER: Type = Type::Object(&COMMAND);
static ARRAY: Object = object(&[req("element-type", Type::Str)]);
static OBJECT: Object = object(&[
    req("members", Type::List(&Type::Object(&OBJECT_MEMBER))),
    opt("tag", Type::Str),
    opt("variants", Type::List(&Type::Object(&VARIANT))),
]);
static OBJECT_MEMBER: Object =
    object(&[req("name", Type::Str), req("type", Type::Str), opt("default", Type::Any)]);
static VARIANT: Object = object(&[req("case", Type::Str), req("type", Type::Str)]);
static ALTERNATE: Object = object(&[req("members", Type::List(&Type::Object(&ALTERNATE_MEMBER)))]);
static ALTERNATE_MEMBER: Object = object(&[req("type", Type::Str)]);
static COMMAND_INFO: Object = object(&[req("arg-type", Type::Str), req("ret-type", Type::Str)]);
static EVENT_INFO: Object = object(&[req("arg-type", Type::Str)]);

static FD_NAME: Object = object(&[req("fdname", Type::Str)]);

/// The commands of the protocol itself.
pub static CONTROL: &[Command] = &[
    Command { name: "getfd", arguments: &FD_NAME, returns: None },
    Command { name: "closefd", arguments: &FD_NAME, returns: None },
    Command { name: "qmp_capabilities", arguments: &CAPABILITIES, returns: None },
    Command {
        name: "query-version",
        arguments: &crate::schema::EMPTY,
        returns: Some(Type::Object(&VERSION)),
    },
    Command {
        name: "query-commands",
        arguments: &crate::schema::EMPTY,
        returns: Some(Type::List(&Type::Object(&COMMAND))),
    },
    Command {
        name: "query-qmp-schema",
        arguments: &crate::schema::EMPTY,
        returns: Some(Type::List(&Type::Object(&SCHEMA_INFO))),
    },
];
