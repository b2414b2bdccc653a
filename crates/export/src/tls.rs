//! Connections of clients, encrypted or not.

use isobath_ring::net::{Arrival, Stream};
use isobath_storage::IoBuf;
use isobath_tls::{Channel, ServerCredentials};
use std::cell::{OnceCell, RefCell};
use std::io::{self, ErrorKind, IoSlice};
use std::net::Shutdown;
use std::sync::Arc;

/// Bytes received from the socket at a time.
const RECEIVED: usize = 64 << 10;
/// Bytes that are encrypted at a time: whole records.
const STEP: usize = 64 << 10;
/// Bytes sent at a time.
const SENT: usize = 256 << 10;
/// Room for the bytes that [`STEP`] bytes grow by, and for messages of the protocol itself.
const GROWTH: usize = 8 << 10;
/// The most bytes that a client may send in a handshake.
const MAX_HANDSHAKE: usize = 128 << 10;
/// The most parts that are encrypted as one piece.
const MAX_PARTS: usize = 64;

/// Whether the clients of a listener encrypt their connections.
#[derive(Clone, Debug, Default)]
pub enum Security {
    /// They cannot.
    #[default]
    Plain,
    /// They may.
    Optional(Arc<ServerCredentials>),
    /// They must.
    Required(Arc<ServerCredentials>),
}

impl Security {
    /// The credentials, if there is encryption.
    pub fn credentials(&self) -> Option<&Arc<ServerCredentials>> {
        match self {
            Self::Plain => None,
            Self::Optional(credentials) | Self::Required(credentials) => Some(credentials),
        }
    }

    /// Whether all clients encrypt.
    pub fn is_required(&self) -> bool {
        matches!(self, Self::Required(_))
    }
}

/// A client's connection. It is plain until it is [secured](Self::secure).
///
/// One task may receive while another sends.
#[derive(Debug)]
pub struct Connection {
    stream: Stream,
    secured: OnceCell<Secured>,
}

/// What an encrypted connection has beside its socket.
#[derive(Debug)]
struct Secured {
    channel: RefCell<Channel>,
    received: RefCell<Received>,
    /// Bytes for the socket, empty while they are being sent.
    sent: RefCell<IoBuf>,
}

/// Encrypted bytes from the socket, and which of them are not decrypted yet.
#[derive(Debug)]
struct Received {
    /// Empty while bytes are being received.
    buf: IoBuf,
    start: usize,
    end: usize,
}

impl From<Stream> for Connection {
    fn from(stream: Stream) -> Self {
        Self { stream, secured: OnceCell::new() }
    }
}

impl Connection {
    /// Bytes of memory that a secured connection has.
    pub const MEMORY: usize = RECEIVED + SENT + STEP + GROWTH + Channel::MEMORY;

    /// The socket.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Whether it is encrypted.
    pub fn is_secured(&self) -> bool {
        self.secured.get().is_some()
    }

    /// Performs the server's side of the TLS handshake; everything afterwards is encrypted. Nothing else may be
    /// received or sent meanwhile. If the future is dropped, or fails, the connection can only be closed.
    ///
    /// # Errors
    /// The client does not speak TLS, is not admitted, or disconnects; or the connection is encrypted already.
    pub async fn secure(&self, credentials: &ServerCredentials) -> io::Result<()> {
        self.secure_within(credentials, MAX_HANDSHAKE).await
    }

    /// As [`secure`](Self::secure), with a limit on the bytes that the client may send.
    async fn secure_within(&self, credentials: &ServerCredentials, most: usize) -> io::Result<()> {
        let channel = credentials.channel().map_err(io::Error::other)?;
        let secured = Secured {
            channel: RefCell::new(channel),
            received: RefCell::new(Received { buf: IoBuf::zeroed(RECEIVED), start: 0, end: 0 }),
            sent: RefCell::new(IoBuf::zeroed(SENT + STEP + GROWTH)),
        };
        if self.secured.set(secured).is_err() {
            return Err(io::Error::other("the connection is encrypted already"));
        }
        let Some(secured) = self.secured.get() else { return Err(ErrorKind::NotConnected.into()) };
        let result = secured.handshake(&self.stream, most).await;
        // The alert, if it failed.
        let flushed = secured.flush(&self.stream, 0).await;
        result.and(flushed)
    }

    /// Receives what has arrived, at least one byte, into `buf[from..]`. The count is 0 once the client has closed its
    /// side, or if there is no room.
    ///
    /// Dropping the future cancels it; the connection can then only be sent to, or closed.
    ///
    /// # Errors
    /// The connection failed; or it is encrypted, and somebody has changed or cut what the client sent.
    pub async fn receive(&self, mut buf: IoBuf, from: usize) -> (io::Result<usize>, IoBuf) {
        if let Some(secured) = self.secured.get() {
            return secured.receive(&self.stream, buf, from).await;
        }
        let mut front = buf.split_to(from);
        let (result, back) = self.stream.recv(buf).await;
        front.unsplit(back);
        (result, front)
    }

    /// As [`receive`](Self::receive), and at most `most` descriptors that came with the bytes. There are none over TCP,
    /// or if the connection is encrypted.
    ///
    /// # Errors
    /// As [`receive`](Self::receive).
    pub async fn receive_with_files(
        &self,
        buf: IoBuf,
        most: usize,
    ) -> (io::Result<Arrival>, IoBuf) {
        if self.is_secured() {
            let (result, buf) = self.receive(buf, 0).await;
            let arrival = |count| Arrival { count, files: Vec::new(), lost: false };
            return (result.map(arrival), buf);
        }
        self.stream.recv_with_files(buf, most).await
    }

    /// Sends all of the buffers in order, and returns them.
    ///
    /// Dropping the future cancels it; how much was sent is then unknown.
    ///
    /// # Errors
    /// The connection failed.
    pub async fn send(&self, bufs: Vec<IoBuf>) -> (io::Result<()>, Vec<IoBuf>) {
        match self.secured.get() {
            Some(secured) => (secured.send(&self.stream, &bufs).await, bufs),
            None => self.stream.send_vectored(bufs).await,
        }
    }

    /// Tells the client of an encrypted connection that nothing more follows.
    ///
    /// # Errors
    /// The connection failed, or the last [`send`](Self::send) was cancelled.
    pub async fn end(&self) -> io::Result<()> {
        let Some(secured) = self.secured.get() else { return Ok(()) };
        secured.channel.borrow_mut().end();
        secured.flush(&self.stream, 0).await
    }

    /// Shuts down one or both directions of the socket, which also ends receives and sends in flight.
    ///
    /// # Errors
    /// As `shutdown(2)`: `ENOTCONN` if the peer has already shut down both.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        self.stream.shutdown(how)
    }
}

/// A failure of the encryption.
fn failed(error: &isobath_tls::TlsError) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("TLS: {error}"))
}

impl Secured {
    async fn handshake(&self, stream: &Stream, most: usize) -> io::Result<()> {
        let mut left = most;
        while self.channel.borrow().is_handshaking() {
            self.flush(stream, 0).await?;
            if self.received.borrow().is_empty() {
                match self.fill(stream).await? {
                    0 => return Err(ErrorKind::UnexpectedEof.into()),
                    count if count > left => {
                        return Err(io::Error::other("TLS: the client's handshake is too long"));
                    }
                    count => left -= count,
                }
            }
            if self.decrypt()? == 0 {
                return Err(io::Error::other(
                    "TLS: the client sent data before its handshake ended",
                ));
            }
        }
        Ok(())
    }

    /// Receives more encrypted bytes, once all that there are were decrypted. Returns how many there are, 0 at the end
    /// of the stream.
    async fn fill(&self, stream: &Stream) -> io::Result<usize> {
        let buf = std::mem::replace(&mut self.received.borrow_mut().buf, IoBuf::empty());
        if buf.is_empty() {
            return Err(io::Error::other("an earlier receive was cancelled"));
        }
        let (result, buf) = stream.recv(buf).await;
        let count = *result.as_ref().unwrap_or(&0);
        *self.received.borrow_mut() = Received { buf, start: 0, end: count };
        result
    }

    /// Decrypts some of the bytes received, and returns how many.
    fn decrypt(&self) -> io::Result<usize> {
        let mut received = self.received.borrow_mut();
        let input = received.buf.get(received.start..received.end).unwrap_or_default();
        let taken = self.channel.borrow_mut().received(input).map_err(|error| failed(&error))?;
        received.start += taken;
        Ok(taken)
    }

    async fn receive(
        &self,
        stream: &Stream,
        mut buf: IoBuf,
        from: usize,
    ) -> (io::Result<usize>, IoBuf) {
        let mut at = from;
        let result = loop {
            let Some(room) = buf.get_mut(at..).filter(|room| !room.is_empty()) else {
                break Ok(());
            };
            let read = self.channel.borrow_mut().read(room);
            let step = match read {
                Ok(0) => break Ok(()),
                Ok(count) => {
                    at += count;
                    continue;
                }
                Err(error) if error.kind() != ErrorKind::WouldBlock => break Err(error),
                Err(_) if !self.received.borrow().is_empty() => match self.decrypt() {
                    Ok(0) => Err(io::Error::other("TLS: the client's data cannot be decrypted")),
                    decrypted => decrypted,
                },
                Err(_) if at > from => break Ok(()),
                Err(_) => match self.fill(stream).await {
                    // The end of the stream is passed on, to be told from one that was cut.
                    Ok(0) => self.decrypt(),
                    filled => filled,
                },
            };
            if let Err(error) = step {
                break Err(error);
            }
        };
        match result {
            // What came before an error is used first; the error comes again.
            Err(error) if at == from => (Err(error), buf),
            _ => (Ok(at - from), buf),
        }
    }

    async fn send(&self, stream: &Stream, bufs: &[IoBuf]) -> io::Result<()> {
        let mut parts = bufs.iter().map(|buf| &buf[..]).filter(|part| !part.is_empty());
        let mut part: &[u8] = &[];
        let mut filled = 0;
        loop {
            let mut piece: Vec<IoSlice<'_>> = Vec::with_capacity(MAX_PARTS);
            let mut room = STEP;
            while room > 0 && piece.len() < MAX_PARTS {
                if part.is_empty() {
                    let Some(next) = parts.next() else { break };
                    part = next;
                }
                let (now, later) = part.split_at(part.len().min(room));
                piece.push(IoSlice::new(now));
                room -= now.len();
                part = later;
            }
            if piece.is_empty() {
                return self.flush(stream, filled).await;
            }
            let written = self.channel.borrow_mut().write(&piece);
            filled = self.take_output(filled)?;
            if let Err(error) = written {
                // Also the message that this is the end.
                self.flush(stream, filled).await?;
                return Err(error);
            }
            if filled >= SENT {
                self.flush(stream, filled).await?;
                filled = 0;
            }
        }
    }

    /// Moves encrypted bytes behind the first `filled` bytes that wait to be sent; returns how many those are now.
    fn take_output(&self, filled: usize) -> io::Result<usize> {
        let mut sent = self.sent.borrow_mut();
        if sent.is_empty() {
            return Err(io::Error::other("an earlier send was cancelled"));
        }
        let room = sent.get_mut(filled..).unwrap_or_default();
        Ok(filled + self.channel.borrow_mut().output(room))
    }

    /// Sends the first `filled` bytes that wait, and all other output.
    async fn flush(&self, stream: &Stream, mut filled: usize) -> io::Result<()> {
        loop {
            filled = self.take_output(filled)?;
            if filled == 0 {
                return Ok(());
            }
            let mut rest = self.sent.replace(IoBuf::empty());
            let first = rest.split_to(filled);
            let (result, mut first) = stream.send_all(first).await;
            first.unsplit(rest);
            self.sent.replace(first);
            result?;
            filled = 0;
        }
    }
}

impl Received {
    fn is_empty(&self) -> bool {
        self.start == self.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use isobath_ring::net::Listener;
    use isobath_ring::{Config, Executor, spawn, yield_now};
    use isobath_testkit::certificates::Keys;
    use isobath_tls::{Admission, Blocking, ClientCredentials};
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::rc::Rc;
    use std::sync::mpsc;
    use std::thread;

    #[test]
    fn what_was_encrypted_before_a_failure_is_sent_with_the_message_that_it_is_the_end() {
        let keys = Keys::new("/CN=client");
        let at = |name: &str| keys.at(name);
        let credentials = ServerCredentials::read(&at("server"), Admission::Certified).unwrap();
        let trusted = ClientCredentials::read(&at("client")).unwrap();
        let (socket, place) = (at("socket"), at("socket"));
        let (listen, listens) = mpsc::channel();
        Executor::new(&Config::default()).unwrap().block_on(async move {
            let listener = Listener::bind_unix(&socket).unwrap();
            let client = thread::spawn(move || {
                let stream = UnixStream::connect(place).unwrap();
                let channel = trusted.channel("localhost").unwrap();
                let mut stream = Blocking::handshake(stream, channel).unwrap();
                listens.recv().unwrap();
                let mut all = Vec::new();
                // An end that was not announced would be an error.
                stream.read_to_end(&mut all).unwrap();
                all
            });
            let stream = listener.accept().await.unwrap();
            // Less than is sent at a time, whatever the system allows.
            socket2::SockRef::from(&stream).set_send_buffer_size(SENT / 8).unwrap();
            let connection = Rc::new(Connection::from(stream));
            connection.secure(&credentials).await.unwrap();
            let sender = connection.clone();
            let data = || IoBuf::copy_of(&vec![7; 4 * SENT]);
            let sent = spawn(async move { sender.send(vec![data()]).await.0 });
            // The socket has no room for so much at once.
            for _ in 0..10 {
                yield_now().await;
            }
            assert!(!sent.is_finished());
            connection.secured.get().unwrap().channel.borrow_mut().end();
            listen.send(()).unwrap();
            let error = sent.await.unwrap().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::BrokenPipe);
            assert_eq!(connection.send(vec![data()]).await.0.unwrap_err().kind(), error.kind());
            drop(connection);
            let received = client.join().unwrap();
            assert!(received == vec![7; SENT], "{}", received.len());
        });
    }

    #[test]
    fn a_handshake_has_a_limit() {
        const MOST: usize = 10_000;
        let keys = Keys::new("/CN=client");
        let at = |name: &str| keys.at(name);
        let credentials = ServerCredentials::read(&at("server"), Admission::Everyone).unwrap();
        let (socket, place) = (at("socket"), at("socket"));
        let result = Executor::new(&Config::default()).unwrap().block_on(async move {
            let listener = Listener::bind_unix(&socket).unwrap();
            let client = thread::spawn(move || {
                let mut stream = UnixStream::connect(place).unwrap();
                // The begin of a ClientHello of 64 KiB.
                let mut hello = vec![1, 0, 0xff, 0xff];
                hello.resize(2 * MOST, 0);
                for piece in hello.chunks(1000) {
                    let header = [0x16, 3, 1, (piece.len() >> 8) as u8, piece.len() as u8];
                    // The connection ends while they are being sent.
                    let _ = stream.write_all(&[&header[..], piece].concat());
                }
                stream
            });
            let connection = Connection::from(listener.accept().await.unwrap());
            let result = connection.secure_within(&credentials, MOST).await;
            drop(connection);
            drop(client.join().unwrap());
            result
        });
        assert_eq!(result.unwrap_err().to_string(), "TLS: the client's handshake is too long");
    }
}
