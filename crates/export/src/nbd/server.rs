//! The server: exports, connections and their limits.

use super::admission::{Admission, Peer, Place};
use super::context::Contexts;
use super::exports::{Client, Entry, Export, ExportError, ExportState, Exports, RemoveError};
use super::handshake::{Agreement, Encryption, ExportInfo, Handshake};
use super::live::{Gone, Live};
use super::session::{InFlight, Negotiated, Negotiation, Session, SessionError, greet, negotiate};
use super::transport::Transport;
use super::window::Window;
use crate::budget::{ASSURED, Budget, LEAST_PIECE};
use crate::frontend::{Entrance, Offered, RemoveMode};
use crate::pool::Pool;
use crate::stop::Stop;
use crate::tls::{Connection, Security};
use isobath_disk::BlockDevice;
use isobath_ring::net::{Address, Listener, Stream, after_failed_accept};
use isobath_ring::{Handle, first, sleep, spawn, timeout};
use isobath_storage::IoBuf;
use std::future::{Future, pending};
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of free buffers that a thread keeps for its sessions, unless less is wanted.
const FREE_BUFFERS: usize = 32 << 20;
/// Bytes that a connection takes besides its requests: the window of what was received, and replies without data.
const CONNECTION: usize = 192 << 10;
/// The least bytes that a connection is assured of with a limit on memory: those of TLS, and a request of 1 MiB.
const LEAST_ASSURED: usize = Connection::MEMORY + (1 << 20);
/// The least memory of a server, with 27 connections.
const LEAST_MEMORY: usize = 96 << 20;
/// How often to check whether the last replies have arrived.
const DELIVERY_PAUSE: Duration = Duration::from_millis(2);

thread_local! {
    static POOL: Rc<Pool> = Rc::new(Pool::new(FREE_BUFFERS));
}

/// Limits for clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of concurrent connections, over all listeners.
    pub connections: usize,
    /// What happens to further connections.
    pub when_full: WhenFull,
    /// What one connection may have in flight. At the limit, nothing more is received from it until replies are sent.
    pub in_flight: InFlight,
    /// Bytes of memory that the requests in flight of all connections together may take, in addition to those that each
    /// is [assured](Self::assured) of. A connection may hold an eighth of what is free.
    pub memory: usize,
    /// Bytes that the requests in flight of each connection may take, whatever those of the others do; at least enough
    /// for TLS and a request of 64 KiB. A read or write that does not fit into what is left otherwise is carried out in
    /// pieces that fit into this, so that it never waits for other clients.
    pub assured: usize,
    /// Bytes of free buffers that each thread keeps.
    pub free_buffers: usize,
    /// How long a handshake may take.
    pub handshake: Duration,
    /// How long a client may take to receive its last replies after [`Server::stop`].
    pub drain: Duration,
}

/// What happens to connections beyond [`Limits::connections`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenFull {
    /// They are closed immediately, unless one that has not finished its handshake can be closed for them. One peer (a
    /// user of this machine, or another machine) may have seven eighths of the connections.
    #[default]
    Close,
    /// They wait to be accepted until another one ends.
    Wait,
}

impl Default for Limits {
    /// 128 connections with 128 requests and 64 MiB each, 1 GiB together, of which each is assured of 4 MiB; 32 MiB of
    /// free buffers for each thread; 30 s for a handshake, 10 s to drain.
    fn default() -> Self {
        Self {
            connections: 128,
            when_full: WhenFull::default(),
            in_flight: InFlight { requests: 128, bytes: 64 << 20 },
            memory: 512 << 20,
            assured: ASSURED,
            free_buffers: FREE_BUFFERS,
            handshake: Duration::from_secs(30),
            drain: Duration::from_secs(10),
        }
    }
}

impl Limits {
    /// The most memory that requests in flight take, in bytes, whatever clients do.
    pub const fn most_memory(&self) -> usize {
        self.memory.saturating_add(self.connections.saturating_mul(self.guaranteed()))
    }

    /// Bytes that each connection is assured of.
    const fn guaranteed(&self) -> usize {
        let least = Connection::MEMORY + LEAST_PIECE;
        if self.assured < least { least } else { self.assured }
    }

    /// Limits with which a server on `threads` threads takes at most so many bytes of memory, and how many it then
    /// takes. Fewer than [`LEAST_MEMORY`] become as many. With little memory there are fewer connections.
    pub(super) fn within(bytes: usize, threads: usize) -> (Self, u64) {
        let mut limits = Self::default();
        let bytes = bytes.max(LEAST_MEMORY);
        let (each, all) = (CONNECTION + LEAST_ASSURED, bytes / 2);
        limits.connections = limits.connections.min(all / each);
        limits.assured = limits.assured.min(all / limits.connections - CONNECTION);
        limits.free_buffers = limits.free_buffers.min(bytes / 8 / threads.max(1));
        limits.memory = limits.memory.min(bytes - all - bytes / 8);
        let besides = limits.connections * CONNECTION + limits.free_buffers * threads.max(1);
        let most = limits.most_memory() + besides;
        (limits, most as u64)
    }
}

/// Why a server cannot be created.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// An export cannot be added.
    #[error(transparent)]
    Export(#[from] ExportError),
    /// A limit is 0, so that no request could ever be served.
    #[error("the limit on {0} is 0; it must be at least 1")]
    ZeroLimit(&'static str),
}

/// A client that is admitted without a handshake, by [`Server::attach`].
pub struct Attached<D> {
    stream: Stream,
    /// The export's index, and what a handshake would say of it.
    index: usize,
    info: ExportInfo,
    client: Client<D>,
    place: Place,
}

impl<D> Attached<D> {
    /// What a handshake would say of the export.
    pub fn info(&self) -> &ExportInfo {
        &self.info
    }
}

/// An NBD server for any number of disks.
///
/// It can be shared between threads. See the [module](super) for an example.
pub struct Server<D> {
    exports: Exports<D>,
    limits: Limits,
    budget: Budget,
    stop: Stop,
    live: Arc<Live>,
    admission: Arc<Admission>,
    /// Clients that have chosen an export.
    chosen: Arc<Live>,
}

impl<D: BlockDevice> Server<D> {
    /// A server for `exports`; the first is the default one. There may be none yet.
    ///
    /// # Errors
    /// If two exports have the same name, a string is too long, or a limit is 0.
    pub fn new(exports: Vec<Export<D>>, limits: Limits) -> Result<Self, ServerError> {
        for (limit, value) in
            [("connections", limits.connections), ("requests in flight", limits.in_flight.requests)]
        {
            if value == 0 {
                return Err(ServerError::ZeroLimit(limit));
            }
        }
        let live = Arc::<Live>::default();
        let admission = match limits.when_full {
            WhenFull::Close => Admission::of_any(limits.connections, live.clone()),
            WhenFull::Wait => Admission::of_waiting(limits.connections, live.clone()),
        };
        let server = Self {
            exports: Exports::new(limits.connections > 1),
            limits,
            budget: Budget::new(limits.memory, limits.guaranteed()),
            stop: Stop::default(),
            admission: Arc::new(admission),
            live,
            chosen: Arc::default(),
        };
        for export in exports {
            server.add(export)?;
        }
        Ok(server)
    }

    /// Adds an export after the others; clients can choose it from now on. The returned future waits until it has been
    /// removed, by [`remove`](Self::remove) or [`stop`](Self::stop), and its last client has left.
    ///
    /// # Errors
    /// If there is already an export of that name, a string is too long, or the server is stopping.
    pub fn add(&self, export: Export<D>) -> Result<Gone, ExportError> {
        self.exports.add(export)
    }

    /// Removes an export. Clients can no longer choose it; if it was the first, the next export becomes the default
    /// one. The returned future waits until its last client has left.
    ///
    /// # Errors
    /// If there is no export of that name, or it has clients and the mode is [`RemoveMode::Safe`].
    pub fn remove(&self, name: &str, mode: RemoveMode) -> Result<Gone, RemoveError> {
        self.exports.remove(name, mode)
    }

    /// The current exports, the default one first. There are none once the server is stopping.
    pub fn exports(&self) -> Vec<ExportState> {
        self.exports.states()
    }

    /// How many clients have chosen the export of this name; `None` if there is no such export.
    pub fn clients(&self, name: &str) -> Option<usize> {
        self.exports.clients(name)
    }

    /// How many clients are connected, over all listeners.
    pub fn connections(&self) -> usize {
        self.live.count()
    }

    /// Waits until some client has chosen an export, and no client is connected any longer.
    pub async fn left(&self) {
        self.chosen.left().await;
        self.live.empty().await;
    }

    /// Shuts the server down: no more clients are accepted, every export is removed, and each connection reads no
    /// further request, completes those in flight, and closes. [`serve`](Self::serve) then returns. May be called from
    /// any thread, and more than once.
    pub fn stop(&self) {
        self.stop.request();
        self.exports.end();
    }

    /// Accepts clients until [`stop`](Self::stop), and returns once every connection of the server has ended.
    /// Connections are assigned to `workers` in turn, or stay on this thread if there are none. Several listeners may
    /// be served at the same time.
    ///
    /// # Errors
    /// If the listener fails. Connections continue; call `stop` to end them.
    pub async fn serve(self: &Arc<Self>, listener: Listener, workers: &[Handle]) -> io::Result<()> {
        self.serve_at(listener.into(), workers).await
    }

    /// As [`serve`](Self::serve), to clients that may or must encrypt their connections, or can choose only some of the
    /// exports.
    ///
    /// # Errors
    /// If the listener fails. Connections continue; call `stop` to end them.
    pub async fn serve_at(
        self: &Arc<Self>,
        entrance: Entrance,
        workers: &[Handle],
    ) -> io::Result<()> {
        let Entrance { listener, security, offered } = entrance;
        let mut turn = workers.iter().cycle();
        while let Some(stream) = self.accept(&listener).await? {
            let peer = Peer::of(&stream);
            let place = match self.admission.admit(&stream, peer) {
                Ok(place) => place,
                Err(refusal) => {
                    tracing::warn!(%peer, "{refusal}; closing a new connection");
                    continue;
                }
            };
            let server = self.clone();
            let (security, offered) = (security.clone(), offered.clone());
            let connection = move || async move {
                server.attend(stream, (&security, &offered), Some(&place)).await;
                drop(place);
            };
            match turn.next() {
                Some(worker) => drop(worker.spawn_with(connection)),
                None => drop(spawn(connection())),
            }
        }
        drop(listener);
        self.live.empty().await;
        Ok(())
    }

    /// The next client; `None` once the server stops.
    async fn accept(&self, listener: &Listener) -> io::Result<Option<Stream>> {
        loop {
            if self.limits.when_full == WhenFull::Wait {
                let room = self.live.below(self.limits.connections);
                if self.unless_stopped(room).await.is_none() {
                    return Ok(None);
                }
            }
            let Some(accepted) = self.unless_stopped(listener.accept()).await else {
                return Ok(None);
            };
            match accepted {
                Ok(stream) => {
                    if let Address::Tcp(_) = listener.address()
                        && let Err(error) = socket2::SockRef::from(&stream).set_keepalive(true)
                    {
                        tracing::debug!(%error, "cannot enable TCP keep-alive");
                    }
                    return Ok(Some(stream));
                }
                Err(error) => {
                    let recovered = after_failed_accept(error, |error| {
                        tracing::warn!(%error, "cannot accept a connection; retrying");
                    });
                    match self.unless_stopped(recovered).await {
                        Some(recovered) => recovered?,
                        None => return Ok(None),
                    }
                }
            }
        }
    }

    async fn unless_stopped<F: Future>(&self, future: F) -> Option<F::Output> {
        first(async { Some(future.await) }, async {
            self.stop.requested().await;
            None
        })
        .await
    }

    /// Serves one client over a connected socket, from the greeting to the end, with time limits. The connection is not
    /// counted.
    pub async fn connection(&self, stream: Stream, security: &Security) {
        self.attend(stream, (security, &Offered::All), None).await;
    }

    async fn attend(&self, stream: Stream, terms: (&Security, &Offered), place: Option<&Place>) {
        let connection = Connection::from(stream);
        let keeps = || place.is_none_or(Place::keep);
        let handshake = timeout(self.limits.handshake, self.handshake(&connection, terms, keeps));
        let result = match self.unless_stopped(handshake).await {
            None => return,
            Some(Err(_)) => {
                tracing::warn!(limit = ?self.limits.handshake, "a client's handshake timed out");
                return;
            }
            Some(Ok(Ok(None))) => Ok(()),
            Some(Ok(Ok(Some(negotiated)))) => self.serve_chosen(&connection, negotiated).await,
            Some(Ok(Err(error))) => Err(error),
        };
        self.deliver(&connection).await;
        match result {
            Ok(()) => tracing::debug!("a client disconnected"),
            Err(error) => tracing::info!(%error, "a connection ended with an error"),
        }
    }

    /// Admits a client that is told elsewhere what a handshake says, such as the kernel: it has chosen the export of
    /// this name, and sends requests from the first byte on. It gets simple replies.
    ///
    /// # Errors
    /// If there is no room for another client, or no such export.
    pub fn attach(&self, stream: Stream, export: &str) -> Result<Attached<D>, SessionError> {
        let peer = Peer::of(&stream);
        let admitted = self.admission.admit(&stream, peer);
        let place = admitted.map_err(|refusal| SessionError::NotAdmitted(refusal.to_string()))?;
        let (chosen, client) = self.exports.choose(&Offered::All, |infos| {
            let index = infos.iter().position(|info| info.name == export);
            let info = index.and_then(|index| infos.get(index)).cloned();
            (index.zip(info), index)
        });
        let no_export = || SessionError::NoExport(export.to_owned());
        let ((index, info), client) = chosen.zip(client).ok_or_else(no_export)?;
        // It may have been disconnected for another since it was admitted; from now on it cannot be.
        if !place.keep() {
            return Err(SessionError::NotAdmitted("its place was given to another client".into()));
        }
        Ok(Attached { stream, index, info, client, place })
    }

    /// Serves the requests of an attached client, until it leaves or the server stops.
    ///
    /// # Errors
    /// If the client violates the protocol or the connection fails.
    pub async fn serve_attached(&self, attached: Attached<D>) -> Result<(), SessionError> {
        let Attached { stream, index, info: _, client, place: _place } = attached;
        let contexts = Contexts::default();
        let agreement = Agreement { export: index, structured: false, contexts };
        let negotiated = Negotiated { agreement, client, window: Window::new() };
        self.serve_chosen(&Connection::from(stream), negotiated).await
    }

    /// Serves the requests of a client that has chosen an export. Once that is removed, the client has a limited time
    /// to receive its last replies.
    async fn serve_chosen(
        &self,
        connection: &Connection,
        negotiated: Negotiated<D>,
    ) -> Result<(), SessionError> {
        let Negotiated { agreement, client, window } = negotiated;
        let _chosen = self.chosen.enter(usize::MAX);
        let overdue = async {
            client.entry.stop.requested().await;
            sleep(self.limits.drain).await;
            tracing::warn!("a client did not receive its last replies in time");
            let _ = connection.shutdown(Shutdown::Both);
            pending().await
        };
        let held = if connection.is_secured() { Connection::MEMORY } else { 0 };
        let served = self.transmit(connection, agreement, &client.entry, window, held);
        first(served, overdue).await
    }

    /// The handshake, in which the client may encrypt the connection. Returns `None` if the client ended it, or left
    /// before choosing an export.
    async fn handshake(
        &self,
        connection: &Connection,
        (security, offered): (&Security, &Offered),
        keeps: impl Fn() -> bool,
    ) -> Result<Option<Negotiated<D>>, SessionError> {
        let mut handshake = Handshake::new(match security {
            Security::Plain => Encryption::Unsupported,
            Security::Optional(_) => Encryption::Optional,
            Security::Required(_) => Encryption::Required,
        });
        let exports = (&self.exports, offered);
        greet(connection).await?;
        loop {
            let negotiation = negotiate(&mut handshake, connection, exports, &keeps).await?;
            match (negotiation, security.credentials()) {
                (Negotiation::Done(negotiated), _) => return Ok(Some(negotiated)),
                (Negotiation::StartTls, Some(credentials)) => {
                    connection.secure(credentials).await?;
                }
                (Negotiation::Over | Negotiation::StartTls, _) => return Ok(None),
            }
        }
    }

    /// Waits until the peer's kernel has received the last replies: closing a TCP socket with unread input discards
    /// pending output.
    async fn deliver(&self, connection: &Connection) {
        if connection.is_secured() {
            // The client is told that nothing was cut off. It may have left.
            let _ = timeout(self.limits.drain, connection.end()).await;
        }
        let stream = connection.stream();
        let is_unix = |address: socket2::SockAddr| address.is_unix();
        if socket2::SockRef::from(stream).local_addr().is_ok_and(is_unix) {
            return;
        }
        let delivered = async {
            // Of a connection that was reset nothing arrives any more.
            while unsent(stream) > 0 && !connection.is_gone() {
                sleep(DELIVERY_PAUSE).await;
            }
        };
        let _ = timeout(self.limits.drain, delivered).await;
    }

    /// Serves one client over any transport, from the greeting to the end, without time limits.
    ///
    /// # Errors
    /// If the client violates the protocol or the transport fails.
    pub async fn session<T: Transport>(&self, transport: &T) -> Result<(), SessionError> {
        greet(transport).await?;
        let exports = (&self.exports, &Offered::All);
        match negotiate(&mut Handshake::default(), transport, exports, || true).await? {
            Negotiation::Done(Negotiated { agreement, client, window }) => {
                self.transmit(transport, agreement, &client.entry, window, 0).await
            }
            Negotiation::Over | Negotiation::StartTls => Ok(()),
        }
    }

    /// Serves a client's requests. Its connection holds `held` bytes of memory.
    async fn transmit<T: Transport>(
        &self,
        transport: &T,
        agreement: Agreement,
        entry: &Entry<D>,
        window: Window,
        held: usize,
    ) -> Result<(), SessionError> {
        tracing::debug!(export = entry.export.name, ?agreement, "a client selected an export");
        let pool = POOL.with(Rc::clone);
        pool.limit_to(self.limits.free_buffers);
        let limit = self.limits.in_flight;
        let mut share = self.budget.share();
        share.hold(held);
        let session = Session::new(entry, transport, agreement, limit, &pool, share);
        session.run(window).await
    }
}

/// Bytes that the peer has not acknowledged; 0 if the connection is gone.
fn unsent(stream: &Stream) -> i32 {
    let mut bytes = 0;
    // SAFETY: the descriptor is open, and TIOCOUTQ writes one int.
    let result = unsafe { libc::ioctl(stream.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if result < 0 { 0 } else { bytes }
}

impl Transport for Connection {
    fn is_gone(&self) -> bool {
        let descriptor = self.stream().as_fd().as_raw_fd();
        let mut poll = libc::pollfd { fd: descriptor, events: 0, revents: 0 };
        // SAFETY: the call reads and writes one valid `pollfd`.
        let found = unsafe { libc::poll(&raw mut poll, 1, 0) };
        found == 1 && poll.revents & (libc::POLLHUP | libc::POLLERR) != 0
    }

    async fn sends_no_more(&self) {
        if let Err(error) = self.stream().sends_no_more().await {
            tracing::debug!(%error, "cannot watch a connection");
            pending::<()>().await;
        }
    }

    async fn hung_up(&self) {
        if let Err(error) = self.stream().hung_up().await {
            tracing::debug!(%error, "cannot watch a connection");
            pending::<()>().await;
        }
    }

    async fn receive(&self, buf: IoBuf, from: usize) -> (io::Result<usize>, IoBuf) {
        self.receive(buf, from).await
    }

    async fn send(&self, bufs: Vec<IoBuf>) -> (io::Result<()>, Vec<IoBuf>) {
        self.send(bufs).await
    }
}

#[cfg(test)]
mod tests {
    use super::super::bitmap::MAX_BITMAPS;
    use super::super::request::Command;
    use super::super::serve::memory_of;
    use super::*;
    use isobath_disk::{BlockStatus, Result, ZeroFlags};

    #[test]
    fn a_server_takes_no_more_than_the_memory_that_it_is_given() {
        const MIB: usize = 1 << 20;
        for threads in [0, 1, 2, 8] {
            for bytes in [0, 96 * MIB, 128 * MIB, 512 * MIB, 16 << 30] {
                let (limits, most) = Limits::within(bytes, threads);
                assert!(most as usize <= bytes.max(LEAST_MEMORY), "{bytes} {limits:?}");
                assert!(limits.assured >= Connection::MEMORY + MIB && limits.connections > 20);
            }
        }
        assert_eq!(Limits::within(0, 1).0.connections, 27, "the number is documented");
        let (limits, most) = Limits::within(16 << 30, 8);
        assert_eq!((limits, most as usize), (Limits::default(), (1024 + 24 + 8 * 32) * MIB));
    }

    #[test]
    fn what_is_not_carried_out_in_pieces_fits_into_what_a_client_is_assured_of() {
        let cache = Command::Cache { offset: 0, length: u32::MAX };
        let status = |one| Command::BlockStatus { offset: 0, length: u32::MAX, one };
        for command in [cache, status(false), status(true)] {
            assert!(!command.can_be_divided());
            // With a limit on memory no bitmaps are exported.
            assert!(memory_of(command, 2) + Connection::MEMORY <= LEAST_ASSURED);
            assert!(memory_of(command, 2 + MAX_BITMAPS) + Connection::MEMORY <= ASSURED);
        }
    }

    struct NoDisk;

    impl BlockDevice for NoDisk {
        fn size(&self) -> u64 {
            0
        }

        fn is_read_only(&self) -> bool {
            true
        }

        fn preferred_block(&self) -> u32 {
            0
        }

        async fn read(&self, _: u64, buf: IoBuf) -> Result<IoBuf> {
            Ok(buf)
        }

        async fn write(&self, _: u64, buf: IoBuf) -> Result<IoBuf> {
            Ok(buf)
        }

        async fn write_zeroes(&self, _: u64, _: u64, _: ZeroFlags) -> Result<()> {
            Ok(())
        }

        async fn discard(&self, _: u64, _: u64) -> Result<()> {
            Ok(())
        }

        async fn flush(&self) -> Result<()> {
            Ok(())
        }

        async fn block_status(&self, _: u64, _: u64, _: usize) -> Result<Vec<BlockStatus>> {
            Ok(Vec::new())
        }
    }

    fn new(names: &[&str], description: &str, limits: Limits) -> Option<ServerError> {
        let export = |name: &&str| Export {
            name: (*name).into(),
            description: description.into(),
            read_only: false,
            allocation_depth: true,
            bitmaps: Arc::default(),
            device: Arc::new(NoDisk),
        };
        Server::new(names.iter().map(export).collect(), limits).err()
    }

    #[test]
    fn what_cannot_be_served_is_refused() {
        let limits = Limits::default();
        assert_eq!(new(&["", "a"], &"d".repeat(4096), limits), None);
        assert_eq!(new(&[], "", limits), None, "exports may come later");
        let twice = ExportError::DuplicateName("a".into()).into();
        assert_eq!(new(&["a", "b", "a"], "", limits), Some(twice));
        let long = |field| Some(ExportError::TooLong { field, length: 4097 }.into());
        assert_eq!(new(&[&"n".repeat(4097)], "", limits), long("name"));
        assert_eq!(new(&["a"], &"d".repeat(4097), limits), long("description"));
        let none = Limits { connections: 0, ..limits };
        assert_eq!(new(&["a"], "", none), Some(ServerError::ZeroLimit("connections")));
    }
}
