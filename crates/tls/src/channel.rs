//! One encrypted connection, without its socket.

use rustls::{Connection, Error};
use std::fmt;
use std::io::{self, IoSlice, Read, Write};

/// The state of one connection, either side of it.
///
/// Bytes from the socket go to [`received`](Self::received), and what was decrypted is taken by [`read`](Self::read).
/// Data is encrypted by [`write`](Self::write), and [`output`](Self::output) gives the bytes for the socket.
pub struct Channel {
    connection: Connection,
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Channel")
            .field("handshaking", &self.is_handshaking())
            .finish_non_exhaustive()
    }
}

impl Channel {
    /// Bytes that it keeps at most, beside what the caller gives it to send.
    pub const MEMORY: usize = 160 << 10;

    pub(crate) fn new(mut connection: Connection) -> Self {
        // What is written is taken out at once.
        connection.set_buffer_limit(None);
        Self { connection }
    }

    /// Whether the handshake is still going on. Until it has ended, nothing can be written or read.
    pub fn is_handshaking(&self) -> bool {
        self.connection.is_handshaking()
    }

    /// Takes the first of these bytes from the socket, and returns how many: none if what was decrypted must be
    /// [read](Self::read) first, or the peer has sent its last. An empty input stands for the end of the stream.
    ///
    /// # Errors
    /// The peer breaks the protocol, is not admitted, or somebody has changed the bytes: [`output`](Self::output) then
    /// has the alert for it.
    pub fn received(&mut self, mut input: &[u8]) -> Result<usize, Error> {
        let taken = match self.connection.read_tls(&mut input) {
            Ok(taken) => taken,
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                return Err(Error::General("a message is too long".into()));
            }
            // Decrypted bytes wait to be read.
            Err(_) => 0,
        };
        self.connection.process_new_packets()?;
        Ok(taken)
    }

    /// Takes decrypted bytes; 0 if the peer has ended its side.
    ///
    /// # Errors
    /// `WouldBlock` if there are none yet, `UnexpectedEof` if the stream has ended without the peer saying so.
    pub fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.connection.reader().read(buf)
    }

    /// Encrypts these bytes.
    ///
    /// # Errors
    /// The handshake has not ended, so that they would be kept or lost.
    pub fn write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<()> {
        if self.is_handshaking() {
            return Err(io::Error::other("TLS: data before the end of the handshake"));
        }
        let length: usize = parts.iter().map(|part| part.len()).sum();
        let written = self.connection.writer().write_vectored(parts)?;
        if written == length { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    /// Takes bytes for the socket into `buf`, and returns how many there were.
    pub fn output(&mut self, buf: &mut [u8]) -> usize {
        let mut room = &mut *buf;
        let before = room.len();
        while self.connection.wants_write() && !room.is_empty() {
            // Writing to memory does not fail.
            if self.connection.write_tls(&mut room).unwrap_or(0) == 0 {
                break;
            }
        }
        before - room.len()
    }

    /// Tells the peer that nothing more will be sent: [`output`](Self::output) has the bytes for it.
    pub fn end(&mut self) {
        self.connection.send_close_notify();
    }
}
