//! One client's session.

use super::files::MOST_AT_ONCE;
use super::outbox::Outbox;
use super::{ClientFiles, Server, Service};
use crate::error::{ErrorClass, QmpError};
use crate::json::{self, SplitError, Splitter, to_line};
use crate::schema;
use isobath_ring::net::Arrival;
use isobath_ring::{spawn, timeout};
use isobath_storage::IoBuf;
use serde_json::{Map, Value, json};
use std::rc::Rc;

/// Bytes received at a time.
const RECEIVE: usize = 16 << 10;
/// The methods of HTTP. A web page can make its visitor's browser send a request to any TCP port, with a body that
/// contains QMP commands.
const HTTP_METHODS: [&str; 9] =
    ["CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"];

/// A session, from the greeting to the end.
pub(super) struct Session<'a, S> {
    server: &'a Server<S>,
    outbox: &'a Rc<Outbox>,
    files: ClientFiles,
    negotiated: bool,
}

impl<'a, S: Service> Session<'a, S> {
    pub(super) fn new(server: &'a Server<S>, outbox: &'a Rc<Outbox>) -> Self {
        Self { server, outbox, files: ClientFiles::default(), negotiated: false }
    }

    pub(super) async fn run(mut self) {
        let outbox = self.outbox.clone();
        let sender = spawn(async move { outbox.send().await });
        let greeting = json!({"QMP": {"version": super::version(), "capabilities": []}});
        self.outbox.push(&to_line(&greeting));
        self.receive().await;
        self.outbox.finish();
        if timeout(self.server.limits.drain, sender).await.is_err() {
            tracing::warn!("a QMP client did not receive its last replies in time");
            self.outbox.cut();
        }
        // The client is told that nothing was cut off. It may have left.
        let _ = timeout(self.server.limits.drain, self.outbox.connection.end()).await;
    }

    /// Receives requests until the client leaves, the server stops, or the client turns out not to speak QMP.
    async fn receive(&mut self) {
        let mut splitter = Splitter::new(self.server.limits.request);
        let mut buf = IoBuf::zeroed(RECEIVE);
        loop {
            let received = self.outbox.connection.receive_with_files(buf, MOST_AT_ONCE);
            let Some((result, back)) = self.server.unless_stopped(received).await else { return };
            let count = match result {
                Ok(Arrival { count: 0, .. }) => return,
                Ok(Arrival { count, files, lost }) => {
                    self.files.arrive(files, lost);
                    count
                }
                Err(error) => {
                    tracing::debug!(%error, "a QMP client disconnected");
                    return;
                }
            };
            buf = back;
            let received = buf.get(..count).unwrap_or_default().to_vec();
            let mut input = received.as_slice();
            let mut answered = false;
            loop {
                splitter.set_only_objects(!self.negotiated);
                let Some(value) = splitter.next(&mut input) else { break };
                let foreign = self.is_foreign(&value);
                let reply = match value {
                    Ok(text) if is_http(&text) => {
                        to_reply(None, Err(QmpError::new("QMP is not HTTP")))
                    }
                    Ok(text) => self.reply(&text).await,
                    Err(error) => to_reply(None, Err(QmpError::new(error))),
                };
                self.outbox.push(&to_line(&reply));
                answered = true;
                if foreign {
                    tracing::warn!(
                        "a client of the control socket does not speak QMP; disconnecting it"
                    );
                    return;
                }
                let room = self.outbox.below(self.server.limits.replies);
                if self.server.unless_stopped(room).await.is_none() || self.outbox.is_broken() {
                    return;
                }
            }
            // They came with these requests. One that has only begun may be about to use them.
            if answered && !splitter.is_inside() {
                self.files.close_arrived();
            }
        }
    }

    /// Whether what a client sent shows that it does not speak QMP: it began an HTTP request, or what it sent before
    /// the negotiation is not JSON.
    fn is_foreign(&self, value: &Result<Vec<u8>, SplitError>) -> bool {
        match value {
            Ok(text) => is_http(text) || !self.negotiated && json::parse(text).is_err(),
            Err(_) => !self.negotiated,
        }
    }

    async fn reply(&mut self, text: &[u8]) -> Value {
        let before = self.negotiated;
        let reply = self.server.answer(&mut self.negotiated, &self.files, text).await;
        if self.negotiated && !before {
            self.server.events.listen(self.outbox);
        }
        reply
    }
}

impl<S: Service> Server<S> {
    /// Answers the text of one request; `negotiated` says whether capabilities were negotiated, and is set by the
    /// command that does so. `files` are the descriptors that the client has sent.
    pub async fn answer(&self, negotiated: &mut bool, files: &ClientFiles, text: &[u8]) -> Value {
        let mut request = match json::parse(text) {
            Ok(Value::Object(request)) => request,
            Ok(_) => {
                let error = QmpError::new("QMP input must be a JSON object");
                return to_reply(None, Err(error));
            }
            Err(error) => return to_reply(None, Err(QmpError::new(error))),
        };
        let id = request.shift_remove("id");
        let result = self.request(negotiated, files, request).await;
        to_reply(id, result)
    }

    async fn request(
        &self,
        negotiated: &mut bool,
        files: &ClientFiles,
        mut request: Map<String, Value>,
    ) -> Result<Value, QmpError> {
        let unexpected = |key: &&String| !matches!(key.as_str(), "execute" | "arguments");
        if let Some(key) = request.keys().find(unexpected) {
            return Err(QmpError::new(format_args!("QMP input member '{key}' is unexpected")));
        }
        let name = match request.shift_remove("execute") {
            Some(Value::String(name)) => name,
            Some(_) => return Err(QmpError::new("QMP input member 'execute' must be a string")),
            None => return Err(QmpError::new("QMP input lacks member 'execute'")),
        };
        let arguments = match request.shift_remove("arguments") {
            Some(Value::Object(arguments)) => arguments,
            Some(_) => return Err(QmpError::new("QMP input member 'arguments' must be an object")),
            None => Map::new(),
        };
        let negotiates = name == "qmp_capabilities";
        let refused = |text: &str| Err(QmpError::of(ErrorClass::CommandNotFound, text));
        if !*negotiated && !negotiates {
            return refused("Expecting capabilities negotiation with 'qmp_capabilities'");
        }
        if *negotiated && negotiates {
            return refused("Capabilities negotiation is already complete, command ignored");
        }
        let Some(command) = self.service.schema().command(&name) else {
            return refused(&format!("The command {name} has not been found"));
        };
        schema::check(command.arguments, &arguments)?;
        tracing::debug!(command = name, "QMP command");
        let result = Box::pin(self.execute(command, arguments, files)).await;
        if negotiates && result.is_ok() {
            *negotiated = true;
        }
        if let Err(error) = &result {
            tracing::info!(command = name, %error, "QMP command failed");
        }
        result
    }
}

/// Whether a value is the first word of an HTTP request.
fn is_http(text: &[u8]) -> bool {
    HTTP_METHODS.iter().any(|method| text.eq_ignore_ascii_case(method.as_bytes()))
}

/// A reply in QEMU's order: an error's id comes first, a result's last.
fn to_reply(id: Option<Value>, result: Result<Value, QmpError>) -> Value {
    let mut reply = Map::new();
    match result {
        Ok(value) => {
            reply.insert("return".into(), value);
            reply.extend(id.map(|id| ("id".to_owned(), id)));
        }
        Err(error) => {
            reply.extend(id.map(|id| ("id".to_owned(), id)));
            reply.insert("error".into(), error.to_json());
        }
    }
    Value::Object(reply)
}
