//! Sockets on the ring.

use crate::attempts::Attempts;
use crate::place::{self, Identity, Place};
use crate::runtime::{Local, may_go_on, ops, required, sleep};
use isobath_buf::IoBuf;
use rustix::fs::{AtFlags, FileType};
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long to wait before the next `accept` while descriptors or memory are short.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How long to wait before the next attempt to connect to a socket file, where there is no ring that could wait.
const CONNECT_PAUSE: Duration = Duration::from_millis(10);

/// How long to wait for others that bind sockets in the same directory, which takes them microseconds, and how often it
/// is looked whether they have.
const MOST_OF_A_TURN: Duration = Duration::from_secs(2);
const BIND_PAUSE: Duration = Duration::from_millis(2);

/// Bytes that may be on their way to the peer of a Unix socket. The kernel counts twice as many, for its own needs.
const SEND_BUFFER: usize = 1 << 20;

/// The most bytes that are sent or received without the ring: beside a larger transfer, what the ring costs is nothing.
const MOST_AT_ONCE: usize = 256 << 10;

const SEND_NOW: i32 = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;

/// A listening socket: Unix or TCP.
///
/// It may be created on one thread and used on another. A Unix socket's file is removed when it is dropped.
#[derive(Debug)]
pub struct Listener {
    socket: Arc<OwnedFd>,
    address: Address,
    /// Where the socket's file is, and which file that is.
    file: Option<(Place, Identity)>,
}

/// Who may connect to a Unix socket: the permissions of its file, whatever the process's umask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// The permission bits.
    pub mode: u32,
    /// The file's group; without one, the process's.
    pub group: Option<u32>,
}

impl Default for Access {
    /// Only the process's user.
    fn default() -> Self {
        Self { mode: 0o600, group: None }
    }
}

/// Where a [`Listener`] listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A socket file.
    Unix(PathBuf),
    /// A TCP address, with the port actually bound.
    Tcp(SocketAddr),
}

impl Listener {
    /// Listens on a socket file to which only this process's user can connect. A stale one, left by a program that has
    /// ended, is replaced.
    ///
    /// # Errors
    /// `EADDRINUSE` if a program listens there or the path is not a socket; file system errors.
    pub fn bind_unix(path: &Path) -> io::Result<Self> {
        Self::bind_unix_for(path, Access::default())
    }

    /// Listens on a socket file with these permissions. At no time does it have wider ones.
    ///
    /// # Errors
    /// As [`bind_unix`](Self::bind_unix), and `EPERM` if the process may not give the file that group.
    pub fn bind_unix_for(path: &Path, access: Access) -> io::Result<Self> {
        let place = Place::of(path)?;
        // To another server, a socket on which nobody listens yet would be a stale one.
        let _turn = turn(&place, MOST_OF_A_TURN)?;
        let socket = match bind_private(path) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                let Some(stale) = stale(&place) else { return Err(error) };
                place.remove(stale)?;
                bind_private(path)?
            }
            other => other?,
        };
        // What was bound, which is not looked for by its name again.
        let file = place.open_path()?;
        let bound = check_own(&file)?;
        // From here on, the socket's file is removed on failure.
        let address = Address::Unix(path.to_owned());
        let listener =
            Self { socket: Arc::new(socket.into()), address, file: Some((place, bound)) };
        give_access(&file, access)?;
        let socket = socket2::SockRef::from(&listener.socket);
        socket.listen(libc::SOMAXCONN)?;
        socket.set_nonblocking(true)?;
        Ok(listener)
    }

    /// Listens on a TCP address; port 0 picks a free one.
    ///
    /// # Errors
    /// As `bind(2)` and `listen(2)`.
    pub fn bind_tcp(address: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = Address::Tcp(listener.local_addr()?);
        Ok(Self { socket: Arc::new(listener.into()), address, file: None })
    }

    /// Takes over a socket that listens already, such as one that a service manager hands in. A socket's file stays
    /// when it is dropped.
    ///
    /// On a socket file it listens again, with as many waiting connections as the system allows and not as many as the
    /// service manager has said: the kernel tells clients that it was this process which listened, and has no other
    /// way to become that one.
    ///
    /// # Errors
    /// As [`listening_at`].
    pub fn handed_in(socket: OwnedFd) -> io::Result<Self> {
        let address = listening_at(socket.as_fd())?;
        let reference = socket2::SockRef::from(&socket);
        reference.set_nonblocking(true)?;
        if let Address::Unix(_) = address {
            // Clients are told by SO_PEERCRED who has listened last: this process, and not the one that handed it in.
            reference.listen(libc::SOMAXCONN)?;
        }
        Ok(Self { socket: Arc::new(socket), address, file: None })
    }

    /// The address it listens on.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Waits for a connection. TCP connections get `TCP_NODELAY`, others a larger send buffer. Dropping the future
    /// loses no connection.
    ///
    /// # Errors
    /// As `accept(2)`. After `ECONNABORTED` or a lack of descriptors (`EMFILE`, `ENFILE`) the next call may succeed.
    ///
    /// # Panics
    /// Outside [`Executor::block_on`](crate::Executor::block_on).
    pub async fn accept(&self) -> io::Result<Stream> {
        let local = required();
        loop {
            // Polls instead of using IORING_OP_ACCEPT: a cancelled one can swallow the next one's wake-up, since the
            // kernel wakes only one waiter per connection.
            match socket2::SockRef::from(&self.socket).accept() {
                Ok((socket, _)) => {
                    let stream = Stream::from(OwnedFd::from(socket));
                    match self.address {
                        Address::Tcp(_) => stream.reference().set_tcp_nodelay(true)?,
                        Address::Unix(_) => stream.widen(),
                    }
                    return Ok(stream);
                }
                Err(error) if is_transient(&error) => {}
                Err(error) => return Err(error),
            }
            match ops::poll(&local, &self.socket, libc::POLLIN as u32).await {
                Err(error) if !is_transient(&error) => return Err(error),
                _ => {}
            }
        }
    }
}

/// Where a socket of another program listens: on a socket file or a TCP port.
///
/// # Errors
/// It is anything else, such as a file, a connection, or an abstract socket, which has no permissions.
pub fn listening_at(socket: BorrowedFd<'_>) -> io::Result<Address> {
    let refused = |what: &str| {
        let text =
            format!("{what}; a socket that listens for streams, by TCP or on a file, is needed");
        Err(io::Error::new(io::ErrorKind::InvalidInput, text))
    };
    let found = rustix::fs::fstat(socket)?;
    if FileType::from_raw_mode(found.st_mode) != FileType::Socket {
        return refused("it is no socket");
    }
    if socket_option(socket, libc::SO_TYPE)? != libc::SOCK_STREAM {
        return refused("it is a socket for datagrams or packets");
    }
    if socket_option(socket, libc::SO_ACCEPTCONN)? == 0 {
        return refused("it is a socket that does not listen");
    }
    let local = socket2::SockRef::from(&socket).local_addr()?;
    let protocol = socket_option(socket, libc::SO_PROTOCOL)?;
    if let Some(address) = local.as_socket() {
        return match protocol {
            libc::IPPROTO_TCP | libc::IPPROTO_MPTCP => Ok(Address::Tcp(address)),
            _ => refused("it is a socket of another protocol"),
        };
    }
    match local.as_pathname() {
        Some(path) => Ok(Address::Unix(path.to_owned())),
        None if local.is_unix() => refused("it is a socket without a file, which anybody may use"),
        None => refused("it is a socket of another protocol"),
    }
}

/// The value of a socket's option.
fn socket_option(socket: BorrowedFd<'_>, option: libc::c_int) -> io::Result<libc::c_int> {
    let mut value: libc::c_int = 0;
    let mut length = size_of::<libc::c_int>() as libc::socklen_t;
    let descriptor = socket.as_raw_fd();
    // SAFETY: the descriptor is open; the call writes at most `length` bytes to `value`.
    let result = unsafe {
        libc::getsockopt(
            descriptor,
            libc::SOL_SOCKET,
            option,
            (&raw mut value).cast(),
            &raw mut length,
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(value) }
}

/// Waits until `accept` is worth retrying after it failed with `error`: not at all if the connection was aborted or a
/// signal arrived; 100 ms if descriptors or memory are short, after calling `short`.
///
/// # Errors
/// Returns any other `error`.
///
/// # Panics
/// Outside [`Executor::block_on`](crate::Executor::block_on).
pub async fn after_failed_accept(
    error: io::Error,
    short: impl FnOnce(&io::Error),
) -> io::Result<()> {
    match error.raw_os_error() {
        Some(libc::ECONNABORTED | libc::EINTR) => Ok(()),
        Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) => {
            short(&error);
            sleep(ACCEPT_PAUSE).await;
            Ok(())
        }
        _ => Err(error),
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some((place, bound)) = &self.file {
            let _ = place.remove(*bound);
        }
    }
}

/// Binds a socket whose file only this process's user may use. Linux creates the file with the permissions of the
/// socket itself, less those in the umask: other than by changing the umask, no other thread's files are affected.
fn bind_private(path: &Path) -> io::Result<socket2::Socket> {
    let socket = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None)?;
    rustix::fs::fchmod(&socket, mode(Access::default().mode))?;
    socket.bind(&socket2::SockAddr::unix(path)?)?;
    Ok(socket)
}

/// Checks that a file is a socket as [`bind_private`] makes it, and tells which one it is: between that and its
/// opening another program may have put something else in its place.
fn check_own(file: &OwnedFd) -> io::Result<Identity> {
    let stat = rustix::fs::fstat(file)?;
    let is_socket = FileType::from_raw_mode(stat.st_mode) == FileType::Socket;
    let is_private = stat.st_mode & 0o7777 & !Access::default().mode == 0;
    if !is_socket || stat.st_uid != own_user() || stat.st_nlink != 1 || !is_private {
        let message = "the socket was replaced by another file";
        return Err(io::Error::other(message));
    }
    Ok(place::identity(&stat))
}

/// Sets the permissions of a socket file just created.
fn give_access(file: &OwnedFd, access: Access) -> io::Result<()> {
    let stat = rustix::fs::fstat(file)?;
    if let Some(group) = access.group {
        let group = Some(rustix::fs::Gid::from_raw(group));
        rustix::fs::chownat(file, "", None, group, AtFlags::EMPTY_PATH)?;
    }
    if stat.st_mode & 0o7777 != access.mode {
        // A descriptor of a path alone has its permissions changed only by this name.
        let name = format!("/proc/self/fd/{}", file.as_raw_fd());
        rustix::fs::chmod(name, mode(access.mode))?;
    }
    Ok(())
}

/// This process's effective user.
pub fn own_user() -> u32 {
    // SAFETY: the call has no preconditions and cannot fail.
    unsafe { libc::geteuid() }
}

/// The permissions in these bits.
const fn mode(bits: u32) -> rustix::fs::Mode {
    rustix::fs::Mode::from_bits_truncate(bits)
}

/// Keeps other servers of this network namespace from binding a socket at a place until it is dropped: an abstract
/// socket, whose name only one can have, and which is gone with its process. Any user can have it: nobody is waited for
/// longer than `most`, and what is bound then is as without.
fn turn(place: &Place, most: Duration) -> io::Result<socket2::Socket> {
    let socket = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None)?;
    let (device, inode) = place::identity(&place.directory()?);
    let name = format!("\0isobath-bind-{device:x}-{inode:x}");
    let address = socket2::SockAddr::unix(name)?;
    let begin = Instant::now();
    loop {
        match socket.bind(&address) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                if begin.elapsed() >= most {
                    tracing::warn!(
                        "another program takes long to bind a socket in the directory of '{}': not waiting for it",
                        place.path().display()
                    );
                    return Ok(socket);
                }
                std::thread::sleep(BIND_PAUSE);
            }
            // Where there are no such sockets nobody is waited for.
            _ => return Ok(socket),
        }
    }
}

/// The socket file at a place, if nothing listens on it.
fn stale(place: &Place) -> Option<Identity> {
    let found = place.stat().ok()?;
    let is_socket = FileType::from_raw_mode(found.st_mode) == FileType::Socket;
    (is_socket && is_refused(place.path())).then(|| place::identity(&found))
}

/// Whether nobody listens on a socket file. Somebody does who accepts no more connections.
fn is_refused(path: &Path) -> bool {
    let connect = || {
        let socket = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        socket.connect(&socket2::SockAddr::unix(path)?)
    };
    connect().is_err_and(|error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused)
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN))
}

/// A connected socket.
///
/// What need not wait is mostly sent and received at once by a system call, which costs less than going through the
/// ring, as long as the executor's other tasks have their turns.
///
/// Clones share the connection, so that one task may receive while another sends; concurrent sends would mix their
/// bytes. It may move between threads; each operation runs on the ring of the thread that polls it.
#[derive(Clone, Debug)]
pub struct Stream {
    socket: Arc<OwnedFd>,
    /// Receives without waiting.
    receives: Arc<Attempts>,
}

impl From<OwnedFd> for Stream {
    /// Takes over a connected stream socket, such as a `std` `UnixStream`'s.
    ///
    /// It is set to blocking mode: in non-blocking mode the ring would not wait for data.
    fn from(socket: OwnedFd) -> Self {
        let stream = Self { socket: Arc::new(socket), receives: Arc::default() };
        // This fails only if it is not a socket, which the first operation then reports.
        let _ = stream.reference().set_nonblocking(false);
        stream
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Stream {
    /// Connects to a socket file.
    ///
    /// # Errors
    /// As `connect(2)`.
    ///
    /// # Panics
    /// Outside [`Executor::block_on`](crate::Executor::block_on), like every operation here.
    pub async fn connect_unix(path: &Path) -> io::Result<Self> {
        Self::connect(socket2::Domain::UNIX, socket2::SockAddr::unix(path)?).await
    }

    /// Connects to a TCP address and sets `TCP_NODELAY`.
    ///
    /// # Errors
    /// As `connect(2)`.
    pub async fn connect_tcp(address: SocketAddr) -> io::Result<Self> {
        let stream = Self::connect(socket2::Domain::for_address(address), address.into()).await?;
        stream.reference().set_tcp_nodelay(true)?;
        Ok(stream)
    }

    async fn connect(domain: socket2::Domain, address: socket2::SockAddr) -> io::Result<Self> {
        let socket = socket2::Socket::new(domain, socket2::Type::STREAM, None)?;
        let stream = Self::from(OwnedFd::from(socket));
        let local = required();
        loop {
            match ops::connect(&local, &stream.socket, address.clone()).await {
                // So many wait for the listener that it has no room; nothing tells when it has.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && address.is_unix() => {
                    sleep(CONNECT_PAUSE).await;
                }
                result => return result.map(|()| stream),
            }
        }
    }

    /// The user of the process that connected; `None` if that is not known, as over TCP.
    ///
    /// # Errors
    /// As `getsockopt(2)`.
    pub fn peer_user(&self) -> io::Result<Option<u32>> {
        if !self.reference().local_addr()?.is_unix() {
            return Ok(None);
        }
        let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut length = size_of::<libc::ucred>() as libc::socklen_t;
        let descriptor = self.socket.as_raw_fd();
        // SAFETY: the descriptor is open; the call writes at most `length` bytes to `peer`.
        let result = unsafe {
            libc::getsockopt(
                descriptor,
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut peer).cast(),
                &raw mut length,
            )
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(Some(peer.uid)) }
    }

    /// Waits for data and receives available bytes, up to the buffer's length. 0 bytes means that the peer has shut
    /// down its side (or that the buffer is empty).
    ///
    /// Dropping the future cancels it; data that arrives at that moment is lost, so the stream can then only be closed.
    pub async fn recv(&self, buf: IoBuf) -> (io::Result<usize>, IoBuf) {
        self.recv_from(buf, 0).await
    }

    async fn recv_from(&self, mut buf: IoBuf, from: usize) -> (io::Result<usize>, IoBuf) {
        if from == buf.len() {
            return (Ok(0), buf);
        }
        let local = required();
        if let Some(result) = self.receive_now(&local, &mut buf[from..]) {
            return (result, buf);
        }
        loop {
            let (result, back) = ops::recv(&local, &self.socket, buf, from).await;
            match result {
                Err(error) if is_transient(&error) => buf = back,
                result => return (result, back),
            }
        }
    }

    /// Receives what has arrived, if it is worth trying; `None` if that has to wait.
    fn receive_now(&self, local: &Local, space: &mut [u8]) -> Option<io::Result<usize>> {
        let most = space.len().min(MOST_AT_ONCE);
        if !self.receives.is_due() || !may_make_call(local, most) {
            return None;
        }
        local.submit_queued();
        // SAFETY: the descriptor is open, and the memory may be written.
        let result = without_wait(unsafe {
            let start = space.as_mut_ptr().cast();
            libc::recv(self.socket.as_raw_fd(), start, most, libc::MSG_DONTWAIT)
        });
        match result {
            Some(_) => self.receives.succeeded(),
            None => self.receives.failed(),
        }
        result
    }

    /// As [`recv`](Self::recv), and at most `most` descriptors that a Unix socket's peer has sent with the data.
    pub async fn recv_with_files(
        &self,
        mut buf: IoBuf,
        most: usize,
    ) -> (io::Result<Arrival>, IoBuf) {
        let local = required();
        loop {
            if may_go_on(buf.len()) {
                match receive_files(self.socket.as_fd(), &mut buf, most) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) if is_transient(&error) => continue,
                    result => return (result, buf),
                }
            }
            match ops::poll(&local, &self.socket, libc::POLLIN as u32).await {
                Err(error) if !is_transient(&error) => return (Err(error), buf),
                _ => {}
            }
        }
    }

    /// Fills the whole buffer. Returns `UnexpectedEof` if the peer shuts down its side first.
    pub async fn recv_exact(&self, mut buf: IoBuf) -> (io::Result<()>, IoBuf) {
        let mut done = 0;
        while done < buf.len() {
            let (result, back) = self.recv_from(buf, done).await;
            buf = back;
            match result {
                Ok(0) => return (Err(io::ErrorKind::UnexpectedEof.into()), buf),
                Ok(count) => done += count,
                Err(error) => return (Err(error), buf),
            }
        }
        (Ok(()), buf)
    }

    /// Sends the whole buffer. If the peer is gone, it fails with `EPIPE` and raises no signal.
    ///
    /// Dropping the future cancels it; how much was sent is then unknown.
    pub async fn send_all(&self, mut buf: IoBuf) -> (io::Result<()>, IoBuf) {
        let local = required();
        let mut done = 0;
        if !buf.is_empty() && may_make_call(&local, buf.len()) {
            // SAFETY: the descriptor is open, and the buffer readable for its length.
            let sent = without_wait(unsafe {
                libc::send(self.socket.as_raw_fd(), buf.as_ptr().cast(), buf.len(), SEND_NOW)
            });
            match sent {
                Some(Ok(count)) => done = count,
                Some(Err(error)) => return (Err(error), buf),
                None => {}
            }
        }
        while done < buf.len() {
            let (result, back) = ops::send(&local, &self.socket, buf, done).await;
            buf = back;
            match result {
                Ok(count) => done += count,
                Err(error) if is_transient(&error) => {}
                Err(error) => return (Err(error), buf),
            }
        }
        (Ok(()), buf)
    }

    /// Sends all buffers in order, with one `sendmsg` where possible. In other respects like
    /// [`send_all`](Self::send_all).
    pub async fn send_vectored(&self, bufs: Vec<IoBuf>) -> (io::Result<()>, Vec<IoBuf>) {
        let local = required();
        let mut vectored = local.vectored(bufs);
        let mut done = 0;
        let bytes = vectored.describe(0);
        if bytes > 0 && may_make_call(&local, bytes) {
            // SAFETY: the descriptor is open; the message describes buffers that are there.
            let sent = without_wait(unsafe {
                libc::sendmsg(self.socket.as_raw_fd(), vectored.header(), SEND_NOW)
            });
            match sent {
                Some(Ok(count)) => done = count,
                Some(Err(error)) => return (Err(error), local.reuse(vectored)),
                None => {}
            }
        }
        while vectored.describe(done) > 0 {
            let (result, back) = ops::sendmsg(&local, &self.socket, vectored).await;
            vectored = back;
            match result {
                Ok(count) => done += count,
                Err(error) if is_transient(&error) => {}
                Err(error) => return (Err(error), local.reuse(vectored)),
            }
        }
        (Ok(()), local.reuse(vectored))
    }

    /// Waits until the peer sends no more: it has shut down its side, or the connection is closed or has failed. What
    /// it has sent before may still have to be received.
    ///
    /// # Errors
    /// The socket cannot be polled.
    pub async fn sends_no_more(&self) -> io::Result<()> {
        poll(&self.socket, libc::POLLRDHUP as u32).await.map(drop)
    }

    /// Waits until the connection is closed or has failed. A peer that shuts down its side only does not end the wait.
    ///
    /// # Errors
    /// The socket cannot be polled.
    pub async fn hung_up(&self) -> io::Result<()> {
        const OVER: u32 = (libc::POLLHUP | libc::POLLERR) as u32;
        if poll(&self.socket, 0).await? & OVER != 0 {
            return Ok(());
        }
        // A ring always tells that the peer has shut down its side; epoll does not unless it is asked to.
        let watch = Arc::new(epoll_of(&self.socket)?);
        poll(&watch, libc::POLLIN as u32).await.map(drop)
    }

    /// Shuts down one or both directions, which also ends receives and sends in flight.
    ///
    /// # Errors
    /// As `shutdown(2)`: `ENOTCONN` if the peer has already shut down both.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        self.reference().shutdown(how)
    }

    fn reference(&self) -> socket2::SockRef<'_> {
        socket2::SockRef::from(&self.socket)
    }

    /// Lets more bytes be on their way, as far as the system allows (`net.core.wmem_max`): with the default, the sender
    /// of large replies and their receiver wait for each other. TCP adapts its buffers by itself.
    fn widen(&self) {
        if let Err(error) = self.reference().set_send_buffer_size(SEND_BUFFER) {
            tracing::debug!(%error, "cannot enlarge a socket's send buffer");
        }
    }
}

/// Whether a call may be made now that transfers up to `bytes` bytes and does not wait. Without a ring, operations make
/// such calls themselves.
fn may_make_call(local: &Local, bytes: usize) -> bool {
    local.has_ring() && !local.has_ended() && bytes <= MOST_AT_ONCE && may_go_on(bytes)
}

/// The result of a call on a socket that does not wait; `None` if it would have to, or was interrupted.
fn without_wait(count: isize) -> Option<io::Result<usize>> {
    match usize::try_from(count) {
        Ok(count) => Some(Ok(count)),
        Err(_) => Some(io::Error::last_os_error()).filter(|error| !is_transient(error)).map(Err),
    }
}

/// Waits until any of `events` is ready, and returns those that are.
async fn poll(file: &Arc<OwnedFd>, events: u32) -> io::Result<u32> {
    let local = required();
    loop {
        match ops::poll(&local, file, events).await {
            Err(error) if is_transient(&error) => {}
            result => return result,
        }
    }
}

/// An epoll instance that is readable once a socket is closed or has failed.
fn epoll_of(socket: &OwnedFd) -> io::Result<OwnedFd> {
    let mut event = libc::epoll_event { events: 0, u64: 0 };
    // SAFETY: plain system calls; the new descriptor has no other owner, and the event is a live value.
    unsafe {
        let epoll = libc::epoll_create1(libc::EPOLL_CLOEXEC);
        if epoll < 0 {
            return Err(io::Error::last_os_error());
        }
        let epoll = OwnedFd::from_raw_fd(epoll);
        let (instance, socket) = (epoll.as_raw_fd(), socket.as_raw_fd());
        match libc::epoll_ctl(instance, libc::EPOLL_CTL_ADD, socket, &raw mut event) {
            0 => Ok(epoll),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// What arrived at a Unix socket.
#[derive(Debug)]
pub struct Arrival {
    /// Bytes; 0 at the end of the stream.
    pub count: usize,
    /// The descriptors that came with them.
    pub files: Vec<OwnedFd>,
    /// The kernel has closed others: there were more than asked for, or this process can have no more.
    pub lost: bool,
}

/// Receives the available bytes that fit into `space`, and at most `most` descriptors that come with them. Never waits.
///
/// # Errors
/// As `recvmsg(2)`: `WouldBlock` if nothing has arrived.
pub fn receive_files(socket: BorrowedFd<'_>, space: &mut [u8], most: usize) -> io::Result<Arrival> {
    let mut vector = libc::iovec { iov_base: space.as_mut_ptr().cast(), iov_len: space.len() };
    // SAFETY: it only computes.
    let room = unsafe { libc::CMSG_LEN((most * size_of::<RawFd>()) as u32) } as usize;
    // Aligned as the kernel requires.
    let mut control = vec![0_u64; room.div_ceil(size_of::<u64>())];
    // SAFETY: a message header of zeroes is valid and empty.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = &raw mut vector;
    header.msg_iovlen = 1;
    header.msg_control = control.as_mut_ptr().cast();
    header.msg_controllen = room;
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the header describes memory that is alive and may be written.
    let count = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, flags) };
    let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
    let mut files = Vec::new();
    // SAFETY: the kernel has filled in the control messages that the header now describes, each as long as it says, and
    // has made the descriptors for this process.
    unsafe {
        let mut message = libc::CMSG_FIRSTHDR(&raw const header);
        while let Some(one) = message.as_ref() {
            if (one.cmsg_level, one.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let bytes = one.cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
                let data = libc::CMSG_DATA(message).cast::<[u8; size_of::<RawFd>()]>();
                for number in 0..bytes / size_of::<RawFd>() {
                    let number = RawFd::from_ne_bytes(data.add(number).read());
                    files.push(OwnedFd::from_raw_fd(number));
                }
            }
            message = libc::CMSG_NXTHDR(&raw const header, message);
        }
    }
    Ok(Arrival { count, files, lost: header.msg_flags & libc::MSG_CTRUNC != 0 })
}

/// A descriptor whose readiness can be awaited, such as an eventfd or a pipe.
#[derive(Clone, Debug)]
pub struct Readiness {
    file: Arc<OwnedFd>,
}

impl From<OwnedFd> for Readiness {
    fn from(file: OwnedFd) -> Self {
        Self { file: Arc::new(file) }
    }
}

impl AsFd for Readiness {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Readiness {
    /// The descriptor's number, for system calls outside the ring.
    pub fn number(&self) -> i32 {
        self.file.as_raw_fd()
    }

    /// Waits until any of `events` (`libc::POLLIN` and so on) is ready, and returns those that are.
    ///
    /// # Errors
    /// The descriptor cannot be polled.
    ///
    /// # Panics
    /// Outside [`Executor::block_on`](crate::Executor::block_on).
    pub async fn ready(&self, events: i16) -> io::Result<i16> {
        let ready = poll(&self.file, u32::from(events as u16)).await;
        ready.map(|events| events as i16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_keeps_the_turn_for_long_is_not_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let place = Place::of(&directory.path().join("socket")).unwrap();
        let has_turn = |socket: &socket2::Socket| !socket.local_addr().unwrap().is_unnamed();
        let kept = turn(&place, MOST_OF_A_TURN).unwrap();
        assert!(has_turn(&kept));
        assert!(!has_turn(&turn(&place, BIND_PAUSE).unwrap()));
        drop(kept);
        assert!(has_turn(&turn(&place, MOST_OF_A_TURN).unwrap()));
    }

    #[test]
    fn somebody_listens_who_accepts_no_more_connections() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let address = socket2::SockAddr::unix(&path).unwrap();
        let new = || socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None);
        let listener = new().unwrap();
        listener.bind(&address).unwrap();
        listener.listen(0).unwrap();
        let mut clients = Vec::new();
        loop {
            let client = new().unwrap();
            client.set_nonblocking(true).unwrap();
            match client.connect(&address) {
                Ok(()) => clients.push(client),
                Err(error) => {
                    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                    break;
                }
            }
        }
        let error = Listener::bind_unix(&path).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert!(path.exists());
    }
}
