//! A connection to an export, which any number of tasks and threads may use at once.
//!
//! It has two threads: one sends the queued requests, the other receives replies, with their data directly in the
//! requests' buffers. It needs no executor, and may outlive the one whose task opened it. The first thread that fails
//! ends the connection; every request, current or later, then fails with the same error.

use crate::call::{Call, Done};
use crate::encryption::Encryption;
use crate::handshake::{Agreed, HandshakeError, negotiate, negotiate_secured};
use crate::name::{ExportName, Server};
use crate::reply::{
    CHUNK_REST, Chunk, Expected, Extent, MAGIC, SIMPLE_REST, Simple, Step, Style, Violation, errno,
};
use crate::wire::{REQUEST_MAGIC, command};
use isobath_storage::{IoBuf, cause};
use isobath_sync::{AsyncMutex, Condition, WaitGroup};
use isobath_tls::{Channel, Unread};
use parking_lot::{Condvar, Mutex};
use socket2::{Domain, SockAddr, Socket, Type};
use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::future::poll_fn;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::{Shutdown, ToSocketAddrs};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// The maximum number of buffers that one system call sends: Linux's `IOV_MAX`.
const MAX_VECTORS: usize = 1024;
/// Bytes skipped at a time.
const SKIPPED_AT_ONCE: usize = 64 << 10;
/// Bytes encrypted at a time.
const STEP: usize = 64 << 10;
/// Room for the bytes that those grow by.
const GROWTH: usize = 8 << 10;

/// Why a connection has ended.
#[derive(Clone, Debug)]
struct Failure {
    kind: ErrorKind,
    text: Arc<str>,
}

impl Failure {
    fn error(&self) -> io::Error {
        io::Error::new(self.kind, self.text.to_string())
    }
}

/// A request, without its data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    /// One of [`command`].
    pub(crate) command: u16,
    /// A set of [`command_flag`](crate::wire::command_flag).
    pub(crate) flags: u16,
    pub(crate) offset: u64,
    pub(crate) length: u32,
}

impl Request {
    fn header(self, cookie: u64) -> [u8; 28] {
        let mut header = [0; 28];
        header[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        header[4..6].copy_from_slice(&self.flags.to_be_bytes());
        header[6..8].copy_from_slice(&self.command.to_be_bytes());
        header[8..16].copy_from_slice(&cookie.to_be_bytes());
        header[16..24].copy_from_slice(&self.offset.to_be_bytes());
        header[24..].copy_from_slice(&self.length.to_be_bytes());
        header
    }

    /// Whether it changes its range, so that later requests must wait for it even if its future was dropped.
    fn changes(self) -> bool {
        matches!(self.command, command::WRITE | command::WRITE_ZEROES | command::TRIM)
    }
}

struct Queued {
    request: Request,
    cookie: u64,
    call: Arc<Call>,
}

#[derive(Default)]
struct State {
    socket: Option<Arc<Socket>>,
    /// The encryption, if there is any, once the export was chosen.
    channel: Option<Arc<Mutex<Channel>>>,
    agreed: Option<Agreed>,
    failed: Option<Failure>,
    cookies: u64,
    queue: VecDeque<Queued>,
    pending: HashMap<u64, (Request, Arc<Call>)>,
    /// A request is being sent.
    sending: bool,
    closed: bool,
}

/// The state that a connection shares with its threads.
struct Inner {
    name: ExportName,
    encryption: Option<Encryption>,
    state: Mutex<State>,
    /// Notified when there is something to send, and when there never will be again.
    queued: Condvar,
    /// Notified when the connection is established or has failed.
    settled: Condition,
    /// Changes whose futures were dropped.
    landing: Arc<WaitGroup>,
}

/// A connection, which ends when this is dropped.
pub(crate) struct Connection {
    inner: Arc<Inner>,
    /// Held by changes of parts of the server's blocks, which read the blocks first, and briefly by other changes.
    pub(crate) partial: AsyncMutex<()>,
    /// The changes of whole blocks.
    pub(crate) whole: WaitGroup,
}

impl Connection {
    /// Begins to connect. The negotiation must end within `patience`.
    ///
    /// # Errors
    /// No thread can be started.
    pub(crate) fn start(
        name: ExportName,
        encryption: Option<Encryption>,
        patience: Duration,
    ) -> io::Result<Self> {
        let inner = Arc::new(Inner {
            name,
            encryption,
            state: Mutex::default(),
            queued: Condvar::new(),
            settled: Condition::default(),
            landing: Arc::default(),
        });
        let thread = thread::Builder::new().name("nbd-receive".into());
        let receiver = inner.clone();
        thread.spawn(move || receiver.run(patience))?;
        Ok(Self { inner, partial: AsyncMutex::new(()), whole: WaitGroup::default() })
    }

    /// Waits until it is connected.
    ///
    /// # Errors
    /// The connection cannot be established.
    pub(crate) async fn connected(&self) -> io::Result<Agreed> {
        let inner = &self.inner;
        inner.settled.until(|| inner.state.lock().is_settled()).await;
        let state = inner.state.lock();
        match (&state.failed, state.agreed) {
            (None, Some(agreed)) => Ok(agreed),
            (Some(failure), _) => Err(failure.error()),
            (None, None) => Err(ErrorKind::NotConnected.into()),
        }
    }

    /// Whether it is usable, or still connecting.
    pub(crate) fn is_alive(&self) -> bool {
        self.inner.state.lock().failed.is_none()
    }

    /// Waits for the changes in flight whose futures were dropped.
    pub(crate) async fn landed(&self) {
        if !self.inner.landing.is_empty() {
            self.inner.landing.ended().await;
        }
    }

    /// Sends a request, and waits for its reply. `bufs` are the buffers to send, or one to read into.
    pub(crate) async fn call(&self, request: Request, bufs: Vec<IoBuf>) -> Done {
        let waiting = match self.inner.begin(request, bufs) {
            Ok(call) => Waiting { call, changes: request.changes(), ended: false },
            Err(done) => return done,
        };
        waiting.done().await
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.inner.close();
    }
}

/// Waits for a call. If this is dropped first, later requests wait for the call's end.
struct Waiting {
    call: Arc<Call>,
    changes: bool,
    ended: bool,
}

impl Waiting {
    async fn done(mut self) -> Done {
        let done = poll_fn(|context| self.call.poll(context)).await;
        self.ended = true;
        done
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if self.changes && !self.ended {
            self.call.abandon();
        }
    }
}

impl State {
    fn is_settled(&self) -> bool {
        self.failed.is_some() || self.agreed.is_some()
    }
}

impl Inner {
    /// Queues a request.
    fn begin(&self, request: Request, bufs: Vec<IoBuf>) -> Result<Arc<Call>, Done> {
        let mut state = self.state.lock();
        if let Some(failure) = &state.failed {
            return Err(Done { bufs, result: Err(failure.error()) });
        }
        let context = state.agreed.and_then(|agreed| agreed.allocation).unwrap_or_default();
        let Request { command, offset, length, .. } = request;
        let expected = Expected::new(command, offset, length, context);
        let call = Arc::new(Call::new(expected, bufs, self.landing.clone()));
        state.cookies += 1;
        let cookie = state.cookies;
        state.pending.insert(cookie, (request, call.clone()));
        state.queue.push_back(Queued { request, cookie, call: call.clone() });
        drop(state);
        self.queued.notify_one();
        Ok(call)
    }

    /// Ends the connection, and every request that waits for it.
    fn fail(&self, kind: ErrorKind, text: &str) {
        let mut state = self.state.lock();
        let failure = state.failed.get_or_insert_with(|| Failure { kind, text: text.into() });
        let failure = failure.clone();
        let pending = std::mem::take(&mut state.pending);
        state.queue.clear();
        if let Some(socket) = &state.socket {
            // The socket may already be shut down.
            let _ = socket.shutdown(Shutdown::Both);
        }
        drop(state);
        for (_, call) in pending.into_values() {
            call.fail(|| failure.error());
        }
        self.queued.notify_all();
        self.settled.changed();
    }

    /// Sends a disconnect request if that does not block, and ends the connection.
    fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        if let (Some(socket), Some(_), None) = (&state.socket, state.agreed, &state.failed)
            // What was answered has been sent, even if the sending thread has not noted that yet.
            && (!state.sending || state.pending.is_empty())
            && state.queue.is_empty()
        {
            let goodbye = Request { command: command::DISC, flags: 0, offset: 0, length: 0 };
            // If it fails, the server notices the end of the stream.
            let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
            let header = goodbye.header(state.cookies + 1);
            let _ = match &state.channel {
                None => socket.send_with_flags(&header, flags),
                Some(channel) => {
                    socket.send_with_flags(&last_words(&mut channel.lock(), &header), flags)
                }
            };
        }
        drop(state);
        self.fail(ErrorKind::NotConnected, "the connection was closed");
    }

    /// The receiving thread: connects, starts the sending thread, and receives until the end.
    fn run(self: Arc<Self>, patience: Duration) {
        let until = Instant::now() + patience;
        let Connected { socket, agreed, secured } = match self.connect(until) {
            Ok(connected) => connected,
            Err(Failure { kind, text }) => return self.fail(kind, &text),
        };
        let (channel, received) = match secured {
            None => (None, Unread::default()),
            Some((channel, received)) => (Some(Arc::new(Mutex::new(channel))), received),
        };
        {
            let mut state = self.state.lock();
            state.agreed = Some(agreed);
            state.channel.clone_from(&channel);
        }
        let sender = self.clone();
        let to = Wire { socket: socket.clone(), channel: channel.clone() };
        let thread = thread::Builder::new().name("nbd-send".into());
        if let Err(error) = thread.spawn(move || sender.send_all(&to)) {
            return self.fail(error.kind(), &format!("no thread can be started: {error}"));
        }
        self.settled.changed();
        let Err(end) = (Receiver {
            inner: &self,
            wire: Wire { socket, channel },
            received: RefCell::new(received),
            agreed,
        })
        .receive_all();
        let text = match end {
            End::Lost(error) if error.kind() == ErrorKind::UnexpectedEof => {
                format!("the NBD server of '{}' closed the connection", self.name)
            }
            End::Lost(error) => {
                format!(
                    "the connection to the NBD server of '{}' is lost: {}",
                    self.name,
                    cause(&error)
                )
            }
            End::Violation(violation) => {
                format!("the NBD server of '{}' violated the protocol: {violation}", self.name)
            }
        };
        if !self.state.lock().closed {
            tracing::debug!("{text}");
        }
        self.fail(ErrorKind::ConnectionAborted, &text);
    }

    /// Connects, and chooses the export.
    fn connect(&self, until: Instant) -> Result<Connected, Failure> {
        let socket = self.reach(until).map_err(|error| Failure {
            kind: error.kind(),
            text: format!("Failed to connect to '{}': {}", self.name.server(), cause(&error))
                .into(),
        })?;
        let socket = Arc::new(socket);
        {
            let mut state = self.state.lock();
            if state.closed {
                return Err(Failure {
                    kind: ErrorKind::NotConnected,
                    text: "it was closed".into(),
                });
            }
            state.socket = Some(socket.clone());
        }
        let mut stream = Deadline { socket: &socket, until };
        let negotiated = match &self.encryption {
            None => negotiate(&mut stream, self.name.export()).map(|agreed| (agreed, None)),
            Some(encryption) => self.secure(stream, encryption),
        };
        let (agreed, secured) = negotiated.map_err(|error| Failure {
            kind: ErrorKind::ConnectionRefused,
            text: error.to_string().into(),
        })?;
        // From now on the server may take as long as it likes.
        let unlimited = socket.set_read_timeout(None).and_then(|()| socket.set_write_timeout(None));
        unlimited.map_err(|error| Failure { kind: error.kind(), text: cause(&error).into() })?;
        Ok(Connected { socket, agreed, secured })
    }

    /// Encrypts the connection, and chooses the export.
    fn secure(
        &self,
        stream: Deadline<'_>,
        encryption: &Encryption,
    ) -> Result<(Agreed, Option<(Channel, Unread)>), HandshakeError> {
        let channel = encryption.credentials.channel(&encryption.host)?;
        let (agreed, secured) = negotiate_secured(stream, channel, self.name.export())?;
        let (_, channel, received) = secured.into_parts();
        Ok((agreed, Some((channel, received))))
    }

    fn reach(&self, until: Instant) -> io::Result<Socket> {
        match self.name.server() {
            Server::Unix(path) => {
                let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
                // The call blocks if the server does not accept connections.
                socket.set_write_timeout(Some(left(until)?))?;
                socket.connect(&SockAddr::unix(path)?)?;
                Ok(socket)
            }
            Server::Tcp { host, port } => {
                let mut last = io::Error::new(ErrorKind::NotFound, "the host has no address");
                for address in (host.as_str(), *port).to_socket_addrs()? {
                    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
                    match socket.connect_timeout(&address.into(), left(until)?) {
                        Ok(()) => {
                            socket.set_tcp_nodelay(true)?;
                            socket.set_keepalive(true)?;
                            return Ok(socket);
                        }
                        Err(error) => last = error,
                    }
                }
                Err(last)
            }
        }
    }

    /// The sending thread.
    fn send_all(&self, wire: &Wire) {
        let mut encrypted = Vec::new();
        loop {
            let next = {
                let mut state = self.state.lock();
                state.sending = false;
                loop {
                    if state.failed.is_some() {
                        return;
                    }
                    if let Some(next) = state.queue.pop_front() {
                        state.sending = true;
                        break next;
                    }
                    self.queued.wait(&mut state);
                }
            };
            let Queued { request, cookie, call } = next;
            let data = request.command == command::WRITE;
            let Some(bufs) = call.start(data) else { continue };
            let sent = wire.send(&request.header(cookie), &bufs, &mut encrypted);
            if data {
                call.give_back(bufs);
            }
            if let Err(error) = sent {
                let text = format!(
                    "the connection to the NBD server of '{}' is lost: {}",
                    self.name,
                    cause(&error)
                );
                return self.fail(ErrorKind::ConnectionAborted, &text);
            }
        }
    }
}

/// The time left until the deadline.
fn left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// A socket with a deadline.
struct Deadline<'a> {
    socket: &'a Socket,
    until: Instant,
}

impl Read for Deadline<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.socket.set_read_timeout(Some(left(self.until)?))?;
        let mut socket = self.socket;
        socket.read(buf)
    }
}

impl Write for Deadline<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.socket.set_write_timeout(Some(left(self.until)?))?;
        self.socket.send_with_flags(buf, libc::MSG_NOSIGNAL)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An established connection.
struct Connected {
    socket: Arc<Socket>,
    agreed: Agreed,
    /// If it is encrypted: the channel, and what was received and not decrypted.
    secured: Option<(Channel, Unread)>,
}

/// What the two threads send to and receive from.
struct Wire {
    socket: Arc<Socket>,
    channel: Option<Arc<Mutex<Channel>>>,
}

impl Wire {
    /// Sends a header and the data that follows it. Only one thread may do so. `encrypted` is reused memory.
    fn send(&self, header: &[u8], bufs: &[IoBuf], encrypted: &mut Vec<u8>) -> io::Result<()> {
        let Some(channel) = &self.channel else { return send(&self.socket, header, bufs) };
        let parts = std::iter::once(header).chain(bufs.iter().map(|buf| &buf[..]));
        let mut waiting: Vec<IoSlice<'_>> = Vec::new();
        let mut length = 0;
        for piece in parts.flat_map(|part| part.chunks(STEP)) {
            if length + piece.len() > STEP {
                self.send_encrypted(channel, &waiting, encrypted)?;
                waiting.clear();
                length = 0;
            }
            waiting.push(IoSlice::new(piece));
            length += piece.len();
        }
        self.send_encrypted(channel, &waiting, encrypted)
    }

    /// Encrypts and sends at most [`STEP`] bytes. The channel is not locked while they are sent: the other thread must
    /// receive meanwhile.
    fn send_encrypted(
        &self,
        channel: &Mutex<Channel>,
        parts: &[IoSlice<'_>],
        encrypted: &mut Vec<u8>,
    ) -> io::Result<()> {
        encrypted.resize(STEP + GROWTH, 0);
        channel.lock().write(parts)?;
        loop {
            let count = channel.lock().output(encrypted);
            match encrypted.get(..count).filter(|output| !output.is_empty()) {
                Some(output) => send(&self.socket, output, &[])?,
                None => return Ok(()),
            }
        }
    }

    /// Fills `buf`. Only one thread may do so. `received` has what was not decrypted before.
    fn fill(&self, mut buf: &mut [u8], received: &mut Unread) -> io::Result<()> {
        let mut socket = &*self.socket;
        let Some(channel) = &self.channel else { return socket.read_exact(buf) };
        while !buf.is_empty() {
            let read = channel.lock().read(buf);
            match read {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => buf = buf.get_mut(count..).unwrap_or_default(),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if received.is_empty() {
                        match received.fill(&mut socket) {
                            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                            filled => filled?,
                        };
                    }
                    received.decrypt(&mut channel.lock())?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// A last message, encrypted, and the end of the encrypted stream.
fn last_words(channel: &mut Channel, message: &[u8]) -> Vec<u8> {
    let mut encrypted = vec![0; GROWTH];
    let written = channel.write(&[IoSlice::new(message)]);
    channel.end();
    let count = if written.is_ok() { channel.output(&mut encrypted) } else { 0 };
    encrypted.truncate(count);
    encrypted
}

/// Sends a header and the data that follows it.
fn send(socket: &Socket, header: &[u8], bufs: &[IoBuf]) -> io::Result<()> {
    let mut parts: Vec<IoSlice<'_>> = Vec::with_capacity(bufs.len() + 1);
    parts.push(IoSlice::new(header));
    parts.extend(bufs.iter().filter(|buf| !buf.is_empty()).map(|buf| IoSlice::new(buf)));
    let mut parts = &mut parts[..];
    while !parts.is_empty() {
        let most = parts.len().min(MAX_VECTORS);
        match socket.send_vectored_with_flags(&parts[..most], libc::MSG_NOSIGNAL) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(count) => IoSlice::advance_slices(&mut parts, count),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Why the receiving thread ends.
enum End {
    Lost(io::Error),
    Violation(Violation),
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> Self {
        Self::Lost(error)
    }
}

impl From<Violation> for End {
    fn from(violation: Violation) -> Self {
        Self::Violation(violation)
    }
}

struct Receiver<'a> {
    inner: &'a Inner,
    wire: Wire,
    received: RefCell<Unread>,
    agreed: Agreed,
}

impl Receiver<'_> {
    fn array<const N: usize>(&self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&self, buf: &mut [u8]) -> io::Result<()> {
        self.wire.fill(buf, &mut self.received.borrow_mut())
    }

    fn receive_all(&self) -> Result<std::convert::Infallible, End> {
        loop {
            match Style::of(self.array::<MAGIC>()?, self.agreed.structured)? {
                Style::Simple => {
                    let reply = Simple::parse(self.array::<SIMPLE_REST>()?);
                    let structured = self.agreed.structured;
                    self.receive(reply.cookie, true, |expected| {
                        expected.simple(reply.error, structured)
                    })?;
                }
                Style::Chunk => {
                    let chunk = Chunk::parse(self.array::<CHUNK_REST>()?);
                    let mut head = vec![0; chunk.head()?];
                    self.fill(&mut head)?;
                    self.receive(chunk.cookie, chunk.is_last(), |expected| {
                        expected.chunk(&chunk, &head)
                    })?;
                }
            }
        }
    }

    /// Receives a part of the reply with this cookie: `step` interprets it, and determines what happens to the bytes
    /// that follow.
    fn receive(
        &self,
        cookie: u64,
        is_last: bool,
        step: impl FnOnce(&mut Expected) -> Result<Step, Violation>,
    ) -> Result<(), End> {
        let found = self.inner.state.lock().pending.get(&cookie).cloned();
        let unknown = || Violation("it answered a request that was not made".into());
        let (request, call) = found.ok_or_else(unknown)?;
        let reads = request.command == command::READ;
        let (mut expected, mut bufs) = call.receive(reads).ok_or_else(unknown)?;
        let taken = self.take(&mut expected, bufs.first_mut(), step);
        let ended = taken.and_then(|()| Ok(if is_last { Some(expected.finish()?) } else { None }));
        let bufs = reads.then_some(bufs);
        match ended {
            Ok(None) => call.received(bufs, Ok(expected)),
            Ok(Some(())) => {
                self.inner.state.lock().pending.remove(&cookie);
                call.received(bufs, Err(result(&expected)));
            }
            Err(end) => {
                // The end of the connection makes the call fail.
                call.received(bufs, Ok(expected));
                return Err(end);
            }
        }
        Ok(())
    }

    fn take(
        &self,
        expected: &mut Expected,
        buf: Option<&mut IoBuf>,
        step: impl FnOnce(&mut Expected) -> Result<Step, Violation>,
    ) -> Result<(), End> {
        let mut nothing = IoBuf::empty();
        let buf = buf.unwrap_or(&mut nothing);
        let outside = || Violation("it sent bytes outside of a buffer".into());
        match step(expected)? {
            Step::Nothing => {}
            Step::Data { at, length } => {
                self.fill(buf.get_mut(at..at + length).ok_or_else(outside)?)?;
            }
            Step::Zeroes { at, length } => {
                buf.get_mut(at..at + length).ok_or_else(outside)?.fill(0);
            }
            Step::Skip { mut length } => {
                let mut waste = vec![0; length.min(SKIPPED_AT_ONCE)];
                while length > 0 {
                    let most = waste.len().min(length);
                    self.fill(&mut waste[..most])?;
                    length -= most;
                }
            }
        }
        Ok(())
    }
}

/// The result of a complete reply.
fn result(expected: &Expected) -> io::Result<Option<Extent>> {
    match expected.error() {
        Some(error) => Err(io::Error::from_raw_os_error(errno(error))),
        None => Ok(expected.extent()),
    }
}
