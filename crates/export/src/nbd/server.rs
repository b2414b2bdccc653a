//! The server: exports, connections and their limits.

use super::handshake::ExportInfo;
use super::live::Live;
use super::pool::Pool;
use super::session::{InFlight, Negotiated, Session, SessionError, negotiate};
use super::stop::Stop;
use super::transport::Transport;
use super::wire::MAX_STRING;
use isobath_disk::BlockDevice;
use isobath_storage::IoBuf;
use isobath_storage::ring::net::{Address, Listener, Stream};
use isobath_storage::ring::{Handle, sleep, spawn, timeout};
use std::future::{Future, pending, poll_fn};
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

/// Bytes of free buffers that a thread keeps for its sessions.
const POOL_BYTES: usize = 32 << 20;
/// How long to wait for descriptors to become free before accepting again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long to wait before looking again whether the last replies have arrived.
const DELIVERY_PAUSE: Duration = Duration::from_millis(2);

thread_local! {
    static POOL: Rc<Pool> = Rc::new(Pool::new(POOL_BYTES));
}

/// A disk under a name.
#[derive(Clone, Debug)]
pub struct Export<D> {
    /// The name by which clients choose it, at most 4096 bytes. The first export of a server answers
    /// to the empty name as well.
    pub name: String,
    /// A description for people, at most 4096 bytes; may be empty.
    pub description: String,
    /// The disk.
    pub device: Arc<D>,
}

impl<D: BlockDevice> Export<D> {
    fn info(&self) -> ExportInfo {
        ExportInfo {
            name: self.name.clone(),
            description: self.description.clone(),
            size: self.device.size(),
            read_only: self.device.is_read_only(),
            preferred_block: self.device.preferred_block(),
        }
    }
}

/// What clients may use of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections at a time, over all listeners. Further ones are closed at once.
    pub connections: usize,
    /// What one connection may have in flight. Once it is reached, no more is received from it
    /// until replies are sent.
    pub in_flight: InFlight,
    /// How long a handshake may take.
    pub handshake: Duration,
    /// How long, after [`Server::stop`], a client may take to receive its last replies.
    pub drain: Duration,
}

impl Default for Limits {
    /// 128 connections with 128 requests and 64 MiB each; 30 s for a handshake, 10 s to drain.
    fn default() -> Self {
        Self {
            connections: 128,
            in_flight: InFlight { requests: 128, bytes: 64 << 20 },
            handshake: Duration::from_secs(30),
            drain: Duration::from_secs(10),
        }
    }
}

/// Why a server cannot be set up.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// There is nothing to serve.
    #[error("no export was given")]
    NoExport,
    /// Two exports have one name.
    #[error("two exports are named '{0}'; give each a name of its own")]
    DuplicateName(String),
    /// A name or description is too long.
    #[error("the {field} of an export has {length} bytes; the NBD protocol allows {MAX_STRING}")]
    TooLong {
        /// `name` or `description`.
        field: &'static str,
        /// Its length in bytes.
        length: usize,
    },
    /// A limit of 0, under which no request could ever be served.
    #[error("the limit of {0} is 0; it must be at least 1")]
    ZeroLimit(&'static str),
}

/// An NBD server for one or more disks.
///
/// It may be shared between threads. See the [module](super) for an example.
pub struct Server<D> {
    exports: Vec<Export<D>>,
    limits: Limits,
    stop: Stop,
    live: Arc<Live>,
}

impl<D: BlockDevice> Server<D> {
    /// A server for `exports`; the first is the default one.
    ///
    /// # Errors
    /// If there is no export, two have one name, a string is too long, or a limit is 0.
    pub fn new(exports: Vec<Export<D>>, limits: Limits) -> Result<Self, ServerError> {
        if exports.is_empty() {
            return Err(ServerError::NoExport);
        }
        for (index, export) in exports.iter().enumerate() {
            for (field, text) in [("name", &export.name), ("description", &export.description)] {
                if text.len() > MAX_STRING {
                    return Err(ServerError::TooLong { field, length: text.len() });
                }
            }
            if exports.iter().take(index).any(|other| other.name == export.name) {
                return Err(ServerError::DuplicateName(export.name.clone()));
            }
        }
        for (limit, value) in
            [("connections", limits.connections), ("requests in flight", limits.in_flight.requests)]
        {
            if value == 0 {
                return Err(ServerError::ZeroLimit(limit));
            }
        }
        Ok(Self { exports, limits, stop: Stop::default(), live: Arc::default() })
    }

    /// The exports, the default one first.
    pub fn exports(&self) -> &[Export<D>] {
        &self.exports
    }

    /// How many clients are connected, over all listeners.
    pub fn connections(&self) -> usize {
        self.live.count()
    }

    /// Ends the server: nobody is accepted any more, and each connection takes no further request,
    /// finishes what it has begun, replies, and closes. [`serve`](Self::serve) returns after that.
    /// May be called from any thread, and more than once.
    pub fn stop(&self) {
        self.stop.request();
    }

    /// Accepts clients until [`stop`](Self::stop), and returns once every connection of the server
    /// has ended. Connections are given to `workers` in turn, or stay on this thread if there are
    /// none. Several listeners may be served at the same time.
    ///
    /// # Errors
    /// If the listener fails. Connections go on; call `stop` to end them.
    pub async fn serve(self: &Arc<Self>, listener: Listener, workers: &[Handle]) -> io::Result<()> {
        let mut turn = workers.iter().cycle();
        while let Some(stream) = self.accept(&listener).await? {
            let Some(guard) = self.live.enter(self.limits.connections) else {
                tracing::warn!(limit = self.limits.connections, "too many connections; closed one");
                continue;
            };
            let server = self.clone();
            let connection = move || async move {
                server.connection(&stream).await;
                drop(guard);
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
            let Some(accepted) = self.unless_stopped(listener.accept()).await else {
                return Ok(None);
            };
            match accepted {
                Ok(stream) => {
                    if let Address::Tcp(_) = listener.address()
                        && let Err(error) = socket2::SockRef::from(&stream).set_keepalive(true)
                    {
                        tracing::debug!(%error, "keep-alive could not be set");
                    }
                    return Ok(Some(stream));
                }
                Err(error) => match error.raw_os_error() {
                    Some(libc::ECONNABORTED) => {}
                    Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) => {
                        tracing::warn!(%error, "could not accept a connection; trying again");
                        self.unless_stopped(sleep(ACCEPT_PAUSE)).await;
                    }
                    _ => return Err(error),
                },
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

    /// Serves one client over a connected socket, from the greeting to the end, under the time
    /// limits. The connection is not counted.
    pub async fn connection(&self, stream: &Stream) {
        let infos = self.infos();
        let handshake = timeout(self.limits.handshake, negotiate(stream, &infos));
        let result = match self.unless_stopped(handshake).await {
            None => return,
            Some(Err(_)) => {
                tracing::warn!(limit = ?self.limits.handshake, "a handshake took too long");
                return;
            }
            Some(Ok(Ok(None))) => Ok(()),
            Some(Ok(Ok(Some(negotiated)))) => {
                let overdue = async {
                    self.stop.requested().await;
                    sleep(self.limits.drain).await;
                    tracing::warn!("a client did not receive its last replies in time");
                    let _ = stream.shutdown(Shutdown::Both);
                    pending().await
                };
                first(self.transmit(stream, negotiated), overdue).await
            }
            Some(Ok(Err(error))) => Err(error),
        };
        self.deliver(stream).await;
        match result {
            Ok(()) => tracing::debug!("a client has left"),
            Err(error) => tracing::info!(%error, "a connection ended"),
        }
    }

    /// Waits until the peer's kernel has the last replies: closing a TCP socket that holds unread
    /// input throws away what is still to be sent.
    async fn deliver(&self, stream: &Stream) {
        let is_unix = |address: socket2::SockAddr| address.is_unix();
        if socket2::SockRef::from(stream).local_addr().is_ok_and(is_unix) {
            return;
        }
        let delivered = async {
            while unsent(stream) > 0 {
                sleep(DELIVERY_PAUSE).await;
            }
        };
        let _ = timeout(self.limits.drain, delivered).await;
    }

    /// Serves one client over any transport, from the greeting to the end, without time limits.
    ///
    /// # Errors
    /// If the client breaks the protocol or the transport fails.
    pub async fn session<T: Transport>(&self, transport: &T) -> Result<(), SessionError> {
        match negotiate(transport, &self.infos()).await? {
            Some(negotiated) => self.transmit(transport, negotiated).await,
            None => Ok(()),
        }
    }

    fn infos(&self) -> Vec<ExportInfo> {
        self.exports.iter().map(Export::info).collect()
    }

    async fn transmit<T: Transport>(
        &self,
        transport: &T,
        negotiated: Negotiated,
    ) -> Result<(), SessionError> {
        let Negotiated { agreement, window } = negotiated;
        let Some(export) = self.exports.get(agreement.export) else { return Ok(()) };
        tracing::debug!(export = export.name, ?agreement, "a client has chosen an export");
        let pool = POOL.with(Rc::clone);
        let device = &*export.device;
        let limit = self.limits.in_flight;
        Session::new(device, transport, agreement, limit, &pool, &self.stop).run(window).await
    }
}

/// Bytes that the peer has not acknowledged; 0 if the connection is gone.
fn unsent(stream: &Stream) -> i32 {
    let mut bytes = 0;
    // SAFETY: the descriptor is open, and TIOCOUTQ writes one int.
    let result = unsafe { libc::ioctl(stream.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if result < 0 { 0 } else { bytes }
}

/// The output of whichever future ends first; the first one if both do.
async fn first<O>(one: impl Future<Output = O>, other: impl Future<Output = O>) -> O {
    let (mut one, mut other) = (pin!(one), pin!(other));
    poll_fn(|cx| match one.as_mut().poll(cx) {
        Poll::Ready(output) => Poll::Ready(output),
        Poll::Pending => other.as_mut().poll(cx),
    })
    .await
}

impl Transport for Stream {
    async fn receive(&self, mut buf: IoBuf, from: usize) -> (io::Result<usize>, IoBuf) {
        let mut front = buf.split_to(from);
        let (result, back) = self.recv(buf).await;
        front.unsplit(back);
        (result, front)
    }

    async fn send(&self, bufs: Vec<IoBuf>) -> (io::Result<()>, Vec<IoBuf>) {
        self.send_vectored(bufs).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use isobath_disk::{BlockStatus, Result, ZeroFlags};

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
            device: Arc::new(NoDisk),
        };
        Server::new(names.iter().map(export).collect(), limits).err()
    }

    #[test]
    fn what_cannot_be_served_is_refused() {
        let limits = Limits::default();
        assert_eq!(new(&["", "a"], &"d".repeat(4096), limits), None);
        assert_eq!(new(&[], "", limits), Some(ServerError::NoExport));
        let twice = ServerError::DuplicateName("a".into());
        assert_eq!(new(&["a", "b", "a"], "", limits), Some(twice));
        let long = |field| Some(ServerError::TooLong { field, length: 4097 });
        assert_eq!(new(&[&"n".repeat(4097)], "", limits), long("name"));
        assert_eq!(new(&["a"], &"d".repeat(4097), limits), long("description"));
        let none = Limits { connections: 0, ..limits };
        assert_eq!(new(&["a"], "", none), Some(ServerError::ZeroLimit("connections")));
    }
}
