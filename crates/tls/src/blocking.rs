//! An encrypted stream over one that blocks.

use crate::channel::Channel;
use std::io::{self, ErrorKind, IoSlice, Read, Write};

/// Bytes received at a time.
const RECEIVED: usize = 64 << 10;
/// Bytes encrypted at a time.
const STEP: usize = 64 << 10;
/// Room for the bytes that those grow by.
const GROWTH: usize = 8 << 10;

/// A stream whose other side decrypts what is written, after a handshake that the constructor performs.
#[derive(Debug)]
pub struct Blocking<S> {
    stream: S,
    channel: Channel,
    received: Unread,
    sent: Vec<u8>,
}

/// Encrypted bytes from the socket.
#[derive(Debug, Default)]
pub struct Unread {
    buf: Vec<u8>,
    start: usize,
    end: usize,
}

impl Unread {
    /// Whether all bytes were decrypted.
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Receives more bytes, once all were decrypted; 0 at the end of the stream.
    ///
    /// # Errors
    /// Those of the stream, which may be repeated.
    pub fn fill(&mut self, stream: &mut impl Read) -> io::Result<usize> {
        self.buf.resize(RECEIVED, 0);
        let count = stream.read(&mut self.buf)?;
        (self.start, self.end) = (0, count);
        Ok(count)
    }

    /// Decrypts some of the bytes; if there are none, tells the channel that the stream has ended.
    ///
    /// # Errors
    /// The peer breaks the protocol or refuses, or somebody has changed the bytes.
    pub fn decrypt(&mut self, channel: &mut Channel) -> io::Result<usize> {
        let input = self.buf.get(self.start..self.end).unwrap_or_default();
        let taken = channel.received(input);
        let taken = taken
            .map_err(|error| io::Error::new(ErrorKind::InvalidData, format!("TLS: {error}")))?;
        self.start += taken;
        Ok(taken)
    }
}

/// Sends all output of a channel.
///
/// # Errors
/// Those of the stream.
pub fn send_output(
    channel: &mut Channel,
    sent: &mut Vec<u8>,
    stream: &mut impl Write,
) -> io::Result<()> {
    sent.resize(STEP + GROWTH, 0);
    loop {
        let count = channel.output(sent);
        let Some(output) = sent.get(..count).filter(|output| !output.is_empty()) else {
            return Ok(());
        };
        stream.write_all(output)?;
    }
}

impl<S: Read + Write> Blocking<S> {
    /// Performs the handshake.
    ///
    /// # Errors
    /// The peer is not admitted, does not admit this side, or does not speak TLS; or the stream fails.
    pub fn handshake(stream: S, channel: Channel) -> io::Result<Self> {
        let (received, sent) = (Unread::default(), Vec::new());
        let mut secured = Self { stream, channel, received, sent };
        let result = secured.run_handshake();
        // The alert, if it failed.
        let sent = secured.flush();
        result.and(sent)?;
        Ok(secured)
    }

    fn run_handshake(&mut self) -> io::Result<()> {
        while self.channel.is_handshaking() {
            self.flush()?;
            if self.received.is_empty() && self.received.fill(&mut self.stream)? == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            if self.received.decrypt(&mut self.channel)? == 0 {
                return Err(io::Error::other("TLS: data before the end of the handshake"));
            }
        }
        Ok(())
    }
}

impl<S> Blocking<S> {
    /// The stream below.
    pub fn stream(&self) -> &S {
        &self.stream
    }

    /// The stream, the channel, and what was received and not decrypted.
    pub fn into_parts(self) -> (S, Channel, Unread) {
        (self.stream, self.channel, self.received)
    }
}

impl<S: Read> Read for Blocking<S> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.channel.read(buf) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                result => return result,
            }
            if self.received.is_empty() {
                // The end of the stream is passed on, to be told from one that was cut.
                self.received.fill(&mut self.stream)?;
            }
            self.received.decrypt(&mut self.channel)?;
        }
    }
}

impl<S: Write> Write for Blocking<S> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let piece = buf.get(..STEP).unwrap_or(buf);
        self.channel.write(&[IoSlice::new(piece)])?;
        self.flush()?;
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        send_output(&mut self.channel, &mut self.sent, &mut self.stream)
    }
}
