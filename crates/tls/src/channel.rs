//! One encrypted connection, without its socket.

use rustls::{Connection, Error, SupportedCipherSuite};
use std::fmt;
use std::io::{self, ErrorKind, IoSlice, Read, Write};

/// The most bytes of data in a record.
const RECORD: usize = 16 << 10;
/// Records of each key that are left to the handshake, to tickets and to alerts.
const RESERVED: u64 = 32;

/// The state of one connection, either side of it.
///
/// Bytes from the socket go to [`received`](Self::received), and what was decrypted is taken by [`read`](Self::read).
/// Data is encrypted by [`write`](Self::write), and [`output`](Self::output) gives the bytes for the socket.
pub struct Channel {
    connection: Connection,
    /// Records of data that were encrypted since this side has asked for new keys, at least as many as with the
    /// present key.
    records: u64,
    /// Why nothing more is received or encrypted: this side has sent its last, or the connection has failed. rustls
    /// may have queued an alert by then, and sends no more than one: with debug assertions, 0.23 panics at another.
    closed: Option<Closed>,
    /// The peer has sent its last.
    peer_ended: bool,
}

#[derive(Clone, Debug)]
enum Closed {
    Ended,
    Failed(Error),
}

impl Closed {
    fn error(&self) -> Error {
        match self {
            Self::Ended => Error::General("this side has ended the connection".into()),
            Self::Failed(error) => error.clone(),
        }
    }
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
        Self { connection, records: 0, closed: None, peer_ended: false }
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
    /// has the alert for it, and every later call fails as this one did. Or this side has [ended](Self::end), or can
    /// encrypt no more.
    pub fn received(&mut self, input: &[u8]) -> Result<usize, Error> {
        if let Some(closed) = &self.closed {
            return Err(closed.error());
        }
        // rustls 0.23 panics where it is asked for more, if an empty record of a handshake came before the end.
        if self.peer_ended {
            return Ok(0);
        }
        let taken = self.decrypt(input);
        self.closed = taken.as_ref().err().cloned().map(Closed::Failed);
        taken
    }

    fn decrypt(&mut self, mut input: &[u8]) -> Result<usize, Error> {
        let taken = match self.connection.read_tls(&mut input) {
            Ok(taken) => taken,
            Err(error) if error.kind() == ErrorKind::InvalidData => {
                return Err(Error::General("a message is too long".into()));
            }
            // Decrypted bytes wait to be read.
            Err(_) => 0,
        };
        self.peer_ended = self.connection.process_new_packets()?.peer_has_closed();
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
    /// The handshake has not ended, so that they would be kept or lost; this side has ended; the connection has failed;
    /// or the keys are used up and cannot be changed, which closes the connection.
    pub fn write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<()> {
        if self.is_handshaking() {
            return Err(io::Error::other("TLS: data before the end of the handshake"));
        }
        let length: usize = parts.iter().map(|part| part.len()).sum();
        if length == 0 {
            return Ok(());
        }
        match &self.closed {
            None => {}
            Some(Closed::Ended) => {
                return Err(io::Error::new(ErrorKind::BrokenPipe, "TLS: data after the last"));
            }
            Some(Closed::Failed(error)) => return Err(aborted(format!("TLS: {error}"))),
        }
        self.spend(length)?;
        let written = self.connection.writer().write_vectored(parts)?;
        // It accepts and drops what it may not encrypt.
        if written == length && self.connection.wants_write() {
            Ok(())
        } else {
            Err(ErrorKind::WriteZero.into())
        }
    }

    /// Counts the records for so many bytes. Before they are more than a key may encrypt, the keys change; those of
    /// TLS 1.2 cannot.
    fn spend(&mut self, length: usize) -> io::Result<()> {
        let Some(suite) = self.connection.negotiated_cipher_suite() else { return Ok(()) };
        let (common, fixed) = match suite {
            SupportedCipherSuite::Tls12(suite) => (&suite.common, true),
            SupportedCipherSuite::Tls13(suite) => (&suite.common, false),
        };
        let more = length.div_ceil(RECORD) as u64;
        self.records = self.records.saturating_add(more);
        if self.records.saturating_add(RESERVED) <= common.confidentiality_limit {
            return Ok(());
        }
        if fixed {
            self.end();
            return Err(aborted(format!(
                "TLS: version 1.2 with {:?} encrypts no more on this connection; connect again, or use TLS 1.3",
                common.suite
            )));
        }
        // rustls would do so by itself, but hides a failure, and would encrypt more than the key may.
        if let Err(error) = self.connection.refresh_traffic_keys() {
            let text = format!("TLS: the keys are used up and cannot be changed: {error}");
            self.closed = Some(Closed::Failed(error));
            return Err(aborted(text));
        }
        self.records = more;
        Ok(())
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

    /// Tells the peer that nothing more will be sent: [`output`](Self::output) has the bytes for it. Nothing more is
    /// [received](Self::received) either. Does nothing if the connection has failed.
    pub fn end(&mut self) {
        if self.closed.is_none() {
            self.closed = Some(Closed::Ended);
            self.connection.send_close_notify();
        }
    }
}

fn aborted(text: String) -> io::Error {
    io::Error::new(ErrorKind::ConnectionAborted, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::credentials::{Admission, ClientCredentials, ServerCredentials, provider};
    use crate::forging::{changed, instead_of};
    use isobath_testkit::certificates::Keys;
    use rustls::crypto::{CryptoProvider, ring};
    use rustls::{CipherSuite, ContentType};

    /// Records that the keys of [`limited`] may encrypt.
    const LIMIT: u64 = 100;

    /// A suite as this one, whose keys are soon used up.
    fn limited(suite: SupportedCipherSuite) -> SupportedCipherSuite {
        changed(suite, LIMIT, false)
    }

    /// As this, but a peer that can send any records.
    fn hostile(provider: CryptoProvider) -> CryptoProvider {
        let forging = |suite| changed(suite, u64::MAX, true);
        let cipher_suites = provider.cipher_suites.into_iter().map(forging).collect();
        CryptoProvider { cipher_suites, ..provider }
    }

    /// What speaks only this version of TLS, with these suites.
    fn speaking(suites: impl Iterator<Item = SupportedCipherSuite>, old: bool) -> CryptoProvider {
        let of_version = suites.filter(|suite| suite.tls13().is_none() == old);
        CryptoProvider { cipher_suites: of_version.collect(), ..ring::default_provider() }
    }

    /// Hands what one side has to say to the other, and returns what could be decrypted.
    fn hand_over(from: &mut Channel, to: &mut Channel) -> Vec<u8> {
        let mut data = Vec::new();
        let mut bytes = vec![0; 64 << 10];
        loop {
            let count = from.output(&mut bytes);
            if count == 0 {
                return data;
            }
            let mut rest = &bytes[..count];
            while !rest.is_empty() {
                rest = &rest[to.received(rest).unwrap()..];
                let mut room = [0; 4096];
                while let Ok(count @ 1..) = to.read(&mut room) {
                    data.extend_from_slice(&room[..count]);
                }
            }
        }
    }

    /// A server and a client that have shaken hands.
    fn connected(server: CryptoProvider, client: CryptoProvider) -> (Channel, Channel) {
        let keys = Keys::new("/CN=client");
        let admission = Admission::Certified;
        let server = ServerCredentials::read_with(server, &keys.at("server"), admission);
        let client = ClientCredentials::read_with(client, &keys.at("client"));
        let mut server = server.unwrap().channel().unwrap();
        let mut client = client.unwrap().channel("localhost").unwrap();
        while server.is_handshaking() || client.is_handshaking() {
            hand_over(&mut client, &mut server);
            hand_over(&mut server, &mut client);
        }
        (server, client)
    }

    fn all() -> CryptoProvider {
        ring::default_provider()
    }

    fn suite(channel: &Channel) -> CipherSuite {
        channel.connection.negotiated_cipher_suite().unwrap().suite()
    }

    #[test]
    fn nothing_is_written_after_the_end() {
        let (mut server, mut client) = connected(all(), all());
        server.write(&[IoSlice::new(b"last")]).unwrap();
        server.end();
        assert!(server.write(&[IoSlice::new(b"lost")]).is_err());
        server.write(&[IoSlice::new(b"")]).unwrap();
        assert_eq!(hand_over(&mut server, &mut client), b"last");
        assert_eq!(client.read(&mut [0; 9]).unwrap(), 0);
    }

    /// What a channel has for its socket.
    fn output(channel: &mut Channel) -> Vec<u8> {
        let mut room = vec![0; 64 << 10];
        let count = channel.output(&mut room);
        assert!(count < room.len());
        room.truncate(count);
        room
    }

    #[test]
    fn after_the_end_nothing_is_received_and_no_alert_follows() {
        for old in [true, false] {
            let one = || speaking(all().cipher_suites.into_iter(), old);
            let (mut server, mut client) = connected(one(), one());
            client.write(&[IoSlice::new(b"before")]).unwrap();
            let bytes = output(&mut client);
            assert_eq!(server.received(&bytes).unwrap(), bytes.len());
            server.end();
            assert!(!output(&mut server).is_empty());
            // A record that somebody has changed, one of the peer, and the end of the stream.
            client.write(&[IoSlice::new(b"after")]).unwrap();
            let good = output(&mut client);
            let mut bad = good.clone();
            *bad.last_mut().unwrap() ^= 1;
            for bytes in [&bad[..], &good, b""] {
                assert!(server.received(bytes).is_err());
                server.end();
                assert_eq!(output(&mut server), b"");
            }
            let mut room = [0; 100];
            assert_eq!(server.read(&mut room).unwrap(), 6);
            assert!(server.read(&mut room).is_err());
        }
    }

    #[test]
    fn keys_that_cannot_change_end_the_connection_with_one_alert() {
        // A message that the keys change, cut within its header and behind it, and a ticket.
        for part in [&[24, 0][..], &[24, 0, 0, 1], &[4, 0, 0, 15, 0]] {
            for of_server in [true, false] {
                let soon = || speaking(all().cipher_suites.into_iter().map(limited), false);
                let forged = || hostile(speaking(all().cipher_suites.into_iter(), false));
                let (mut channel, mut peer) = if of_server {
                    connected(soon(), forged())
                } else {
                    let (peer, channel) = connected(forged(), soon());
                    (channel, peer)
                };
                let records = [(ContentType::Handshake, part.to_vec())];
                instead_of(ContentType::ApplicationData, records, || {
                    peer.write(&[IoSlice::new(b"-")]).unwrap();
                });
                assert_eq!(hand_over(&mut peer, &mut channel), b"");
                let mut written = 0;
                let error = loop {
                    assert!(written <= LIMIT, "there is no limit");
                    match channel.write(&[IoSlice::new(b"data")]) {
                        Ok(()) => written += 1,
                        Err(error) => break error,
                    }
                };
                assert_eq!(written, LIMIT - RESERVED);
                for _ in 0..3 {
                    assert!(channel.write(&[IoSlice::new(b"data")]).is_err());
                    assert!(channel.received(b"").is_err());
                    channel.end();
                }
                let records = output(&mut channel);
                let mut rest = &records[..];
                let (mut arrived, mut refused) = (Vec::new(), 0);
                while let [_, _, _, high, low, ..] = *rest {
                    let length = 5 + usize::from(u16::from_be_bytes([high, low]));
                    match peer.received(&rest[..length]) {
                        Ok(taken) => assert_eq!(taken, length),
                        Err(Error::AlertReceived(_)) => refused += 1,
                        Err(error) => panic!("{error}"),
                    }
                    let mut room = [0; 100];
                    while let Ok(count @ 1..) = peer.read(&mut room) {
                        arrived.extend_from_slice(&room[..count]);
                    }
                    rest = &rest[length..];
                }
                assert_eq!(arrived, b"data".repeat(written as usize));
                assert_eq!(refused, 1, "the alert is the last record");
                assert!(error.to_string().contains("cannot be changed"), "{error}");
            }
        }
    }

    #[test]
    fn whatever_comes_behind_the_end_is_left() {
        for old in [true, false] {
            let one = || speaking(all().cipher_suites.into_iter(), old);
            let (mut server, mut client) = connected(one(), hostile(one()));
            client.write(&[IoSlice::new(b"data")]).unwrap();
            // An empty record of a handshake, and the message that the client has sent its last.
            let records = [(ContentType::Handshake, Vec::new()), (ContentType::Alert, vec![1, 0])];
            instead_of(ContentType::ApplicationData, records, || {
                client.write(&[IoSlice::new(b"1")]).unwrap();
                client.write(&[IoSlice::new(b"2")]).unwrap();
            });
            let mut room = [0; 200];
            let count = client.output(&mut room);
            assert_eq!(server.received(&room[..count]).unwrap(), count);
            for more in [&b"more"[..], b""] {
                assert_eq!(server.received(more).unwrap(), 0);
            }
            assert_eq!(server.read(&mut room).unwrap(), 4);
            assert_eq!(server.read(&mut room).unwrap(), 0);
        }
    }

    #[test]
    fn after_a_failure_nothing_is_received_and_the_failure_comes_again() {
        for old in [true, false] {
            let one = || speaking(all().cipher_suites.into_iter(), old);
            let (mut server, mut client) = connected(one(), one());
            let mut records = Vec::new();
            for data in [&b"before"[..], b"changed", b"behind"] {
                client.write(&[IoSlice::new(data)]).unwrap();
                let mut room = [0; 100];
                let count = client.output(&mut room);
                records.push(room[..count].to_vec());
            }
            *records[1].last_mut().unwrap() ^= 1;
            let mut bytes = &records.concat()[..];
            let error = loop {
                match server.received(bytes) {
                    Ok(taken) => bytes = &bytes[taken..],
                    Err(error) => break error,
                }
            };
            let mut alert = [0; 100];
            assert!(server.output(&mut alert) > 0);
            for again in [bytes, &records[2], b""].repeat(10_000) {
                assert_eq!(server.received(again), Err(error.clone()));
            }
            assert_eq!(server.output(&mut alert), 0, "there is one alert");
            let mut room = [0; 100];
            assert_eq!(server.read(&mut room).unwrap(), 6);
            assert_eq!(&room[..6], b"before");
            assert!(server.read(&mut room).is_err());
        }
    }

    #[test]
    fn what_was_written_arrives_when_the_keys_of_tls_1_2_are_used_up() {
        let soon = speaking(all().cipher_suites.into_iter().map(limited), true);
        let (mut server, mut client) = connected(soon, all());
        let record = vec![7; 2 * RECORD + 1];
        let (mut written, mut arrived) = (0, 0);
        let error = loop {
            assert!(written < 4 * LIMIT as usize * RECORD, "there is no limit");
            let result = server.write(&[IoSlice::new(&record)]);
            arrived += hand_over(&mut server, &mut client).len();
            match result {
                Ok(()) => written += record.len(),
                Err(error) => break error,
            }
        };
        assert!(error.to_string().contains("TLS 1.3"), "{error}");
        assert_eq!((arrived, written), (written, (LIMIT - RESERVED) as usize / 3 * record.len()));
        assert_eq!(client.read(&mut [0; 9]).unwrap(), 0, "the client knows that it is the end");
        assert!(server.write(&[IoSlice::new(&record)]).is_err());
    }

    #[test]
    fn the_keys_of_tls_1_3_are_never_used_up() {
        let soon = || speaking(all().cipher_suites.into_iter().map(limited), false);
        let (mut server, mut client) = connected(soon(), soon());
        let record = vec![7; 3 * RECORD];
        for _ in 0..3 * LIMIT {
            server.write(&[IoSlice::new(&record)]).unwrap();
            assert!(hand_over(&mut server, &mut client) == record);
            client.write(&[IoSlice::new(b"next")]).unwrap();
            assert_eq!(hand_over(&mut client, &mut server), b"next");
        }
    }

    #[test]
    fn of_tls_1_2_the_suite_without_a_limit_is_preferred() {
        let unlimited = CipherSuite::TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256;
        let old = || speaking(all().cipher_suites.into_iter(), true);
        let (server, _) = connected(provider(), old());
        assert_eq!(suite(&server), unlimited);
        let only = old()
            .cipher_suites
            .into_iter()
            .filter(|suite| !format!("{suite:?}").contains("CHACHA"));
        let (server, _) = connected(provider(), speaking(only, true));
        assert_eq!(suite(&server), CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384);
    }
}
