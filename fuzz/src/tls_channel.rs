//! Encrypted connections after the handshake, with a client or a server and a network that are not to be trusted.

#[path = "../../crates/tls/src/forging.rs"]
mod forging;

use crate::take;
use isobath_tls::{Admission, Channel, ClientCredentials, ServerCredentials};
use rustls::crypto::{
    ActiveKeyExchange, CryptoProvider, GetRandomFailed, SecureRandom, SharedSecret,
    SupportedKxGroup, ring,
};
use rustls::{ContentType, Error, NamedGroup, SupportedCipherSuite};
use std::io::{ErrorKind, IoSlice};
use std::path::Path;
use std::sync::OnceLock;

/// Bits of the first byte of input.
const SERVER: u8 = 1;
const OLD: u8 = 2;
const LAZY: u8 = 4;
const SOON: u8 = 8;

/// The most data that the peer sends as such.
const MOST_DATA: usize = 400_000;
/// Records that the keys encrypt where they change soon: a few more than a channel leaves to what is no data.
const SOON_LIMIT: u64 = 38;
/// Bytes of a record's header.
const HEADER: usize = 5;
/// Bytes that a record grows by at most, with a message that the keys change.
const GROWTH: usize = 128;
/// Bytes of the alerts and other messages that a channel sends of its own accord at most.
const OWN: usize = 4096;

const CLOSE_NOTIFY: u8 = 0;

/// Records that a peer sends, also such as no implementation sends, and what a network makes of them: whatever they
/// are, a channel delivers only what the peer has sent as data, in its order and without a gap, and says that this is
/// all only where the peer has said so. It keeps little, and makes progress.
pub fn tls_channel(mut input: &[u8]) {
    let [mode, suite] = take(&mut input);
    let (channel, peer) = connected(mode, suite);
    let mut session = Session {
        old: mode & OLD != 0,
        tested: Receiver::new(channel, mode & LAZY != 0),
        peer: Receiver::new(peer, false),
        wire: Vec::new(),
        allowance: OWN,
    };
    while !input.is_empty() {
        session.step(&mut input);
    }
    session.deliver(usize::MAX, 0);
    session.hand_back();
    session.tested.end_of_stream();
}

/// A connection, and what is on its way.
struct Session {
    /// TLS 1.2.
    old: bool,
    tested: Receiver,
    peer: Receiver,
    /// Records from the peer.
    wire: Vec<Vec<u8>>,
    /// Bytes that the tested side may have for its socket.
    allowance: usize,
}

/// One side.
struct Receiver {
    channel: Channel,
    /// Whether it reads only when it must.
    lazy: bool,
    unread: Vec<u8>,
    /// What it has decrypted, and what the other side has sent.
    data: Vec<u8>,
    sent: Vec<u8>,
    /// Lengths of `sent` at which the other side has said that this was all.
    ends: Vec<usize>,
    ended: bool,
    failed: bool,
}

impl Session {
    fn step(&mut self, input: &mut &[u8]) {
        match take::<1>(input)[0] % 16 {
            0 => {
                let length = usize::from(u16::from_le_bytes(take(input))) % 40_000;
                if self.tested.sent.len() < MOST_DATA {
                    self.send(length);
                }
            }
            1 => {
                let [kind, length] = take(input);
                self.forge(kind, &bytes(input, length.into()));
            }
            2 => {
                let [length] = take(input);
                self.wire.push(bytes(input, length.into()));
            }
            3 => {
                let [kind, length] = take(input);
                let header = [kind, 3, 3, 0, length];
                self.wire.push([&header[..], &bytes(input, length.into())].concat());
            }
            4 => {
                let [record, low, high, change] = take(input);
                let at = usize::from(u16::from_le_bytes([low, high]));
                if let Some(record) = self.record(record) {
                    let length = record.len();
                    if let Some(byte) = record.get_mut(at % length.max(1)) {
                        *byte ^= change;
                    }
                }
            }
            5 => {
                let [record, low, high] = take(input);
                let at = usize::from(u16::from_le_bytes([low, high]));
                if let Some(record) = self.record(record) {
                    record.truncate(at);
                }
            }
            6 => {
                let [record] = take(input);
                if let Some(again) = self.record(record).cloned() {
                    self.wire.push(again);
                }
            }
            7 => {
                let [one, other] = take(input).map(usize::from);
                if !self.wire.is_empty() {
                    let length = self.wire.len();
                    self.wire.swap(one % length, other % length);
                }
            }
            8 => {
                let [record] = take(input).map(usize::from);
                if !self.wire.is_empty() {
                    self.wire.remove(record % self.wire.len());
                }
            }
            9 => {
                let [records, part] = take(input).map(usize::from);
                self.deliver(records, part);
            }
            10 => {
                let length = usize::from(u16::from_le_bytes(take(input))) % 20_000;
                self.write(length);
            }
            11 => self.hand_back(),
            12 => {
                if !self.peer.failed {
                    self.peer.channel.end();
                    self.tested.ends.push(self.tested.sent.len());
                    self.fill_wire();
                }
            }
            13 => {
                self.tested.channel.end();
                self.peer.ends.push(self.peer.sent.len());
            }
            14 => self.tested.read(),
            _ => {
                // A record whose header is of one length, and whose bytes are of another.
                let [kind, high, low, length] = take(input);
                let header = [kind, 3, 3, high, low];
                self.wire.push([&header[..], &bytes(input, length.into())].concat());
            }
        }
    }

    /// One of the records on the way.
    fn record(&mut self, number: u8) -> Option<&mut Vec<u8>> {
        let length = self.wire.len();
        self.wire.get_mut(usize::from(number) % length.max(1))
    }

    /// The peer sends data.
    fn send(&mut self, length: usize) {
        let before = self.tested.sent.len();
        let data: Vec<u8> = (before..before + length).map(pattern).collect();
        if self.peer.channel.write(&[IoSlice::new(&data)]).is_ok() {
            self.tested.sent.extend(data);
        }
        self.fill_wire();
    }

    /// The peer sends one record of any type.
    fn forge(&mut self, kind: u8, content: &[u8]) {
        let record = (ContentType::from(kind), content.to_vec());
        let sent = forging::instead_of(ContentType::ApplicationData, [record], || {
            self.peer.channel.write(&[IoSlice::new(b"-")])
        });
        if sent.is_ok() {
            match self.meaning(kind, content) {
                (23, data) => self.tested.sent.extend_from_slice(data),
                (21, [_, CLOSE_NOTIFY]) => self.tested.ends.push(self.tested.sent.len()),
                _ => {}
            }
        }
        self.fill_wire();
    }

    /// What such a record is. In TLS 1.3 the type stands behind the content, with any number of zeroes after it.
    fn meaning<'a>(&self, kind: u8, content: &'a [u8]) -> (u8, &'a [u8]) {
        if self.old || kind != 0 {
            return (kind, content);
        }
        let end = content.iter().rposition(|byte| *byte != 0).unwrap_or(0);
        content.get(end).map_or((0, content), |kind| (*kind, &content[..end]))
    }

    /// Puts what the peer has encrypted on the way.
    fn fill_wire(&mut self) {
        let output = output(&mut self.peer.channel);
        let mut rest = &output[..];
        while let [_, _, _, high, low, ..] = *rest {
            let length = HEADER + usize::from(u16::from_be_bytes([high, low]));
            let (record, after) = rest.split_at(length);
            self.wire.push(record.to_vec());
            rest = after;
        }
        assert!(rest.is_empty(), "the peer sends no part of a record");
    }

    /// Delivers the first records on the way, and a part of the next.
    fn deliver(&mut self, records: usize, part: usize) {
        let records = records.min(self.wire.len());
        let mut delivered = self.wire.drain(..records).collect::<Vec<_>>().concat();
        if let Some(next) = self.wire.first_mut() {
            delivered.extend(next.drain(..part.min(next.len())));
        }
        self.tested.receive(&delivered);
    }

    /// The tested side sends data.
    fn write(&mut self, length: usize) {
        let data = vec![7; length];
        if self.tested.channel.write(&[IoSlice::new(&data)]).is_ok() {
            self.peer.sent.extend(data);
            self.allowance += length + GROWTH * (1 + length / (16 << 10));
        }
    }

    /// The peer receives what the tested side has sent, and may answer.
    fn hand_back(&mut self) {
        let output = output(&mut self.tested.channel);
        assert!(output.len() <= self.allowance, "{} bytes are sent unasked", output.len());
        self.allowance = OWN;
        self.peer.receive(&output);
        self.fill_wire();
    }
}

impl Receiver {
    fn new(channel: Channel, lazy: bool) -> Self {
        let (data, sent, unread) = (Vec::new(), Vec::new(), Vec::new());
        let (ended, failed, ends) = (false, false, Vec::new());
        Self { channel, lazy, unread, data, sent, ends, ended, failed }
    }

    fn receive(&mut self, bytes: &[u8]) {
        if self.failed {
            return;
        }
        self.unread.extend_from_slice(bytes);
        loop {
            if !self.lazy {
                self.read();
            }
            if self.unread.is_empty() || self.ended {
                return;
            }
            match self.channel.received(&self.unread) {
                Err(_) => self.fail(),
                Ok(0) if self.lazy => {
                    let before = self.data.len();
                    self.read();
                    assert!(self.ended || self.data.len() > before, "nothing goes on");
                }
                Ok(0) => {
                    self.read();
                    assert!(self.ended, "bytes are neither taken nor refused");
                }
                Ok(taken) => drop(self.unread.drain(..taken)),
            }
            if self.failed {
                return;
            }
        }
    }

    /// Whatever came before may be read, but nothing else is decrypted.
    fn fail(&mut self) {
        self.failed = true;
        self.read();
        let before = self.data.len();
        let _ = self.channel.received(&std::mem::take(&mut self.unread));
        self.read();
        assert_eq!(self.data.len(), before, "data is taken after a failure");
    }

    /// Takes all that was decrypted.
    fn read(&mut self) {
        let before = self.data.len();
        let mut room = [0; 4096];
        loop {
            match self.channel.read(&mut room) {
                Ok(0) => {
                    assert!(self.ends.contains(&self.data.len()), "an end that was not sent");
                    self.ended = true;
                    break;
                }
                Ok(count) => {
                    assert!(!self.ended, "data after the end");
                    self.data.extend_from_slice(&room[..count]);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::UnexpectedEof, "{error}");
                    break;
                }
            }
        }
        assert!(self.data.len() - before <= Channel::MEMORY, "much was kept");
        assert!(self.sent.get(before..).is_some_and(|sent| sent.starts_with(&self.data[before..])));
    }

    /// The connection is closed. Without a word from the other side that is an error.
    fn end_of_stream(&mut self) {
        let _ = self.channel.received(&[]);
        self.read();
        let result = self.channel.read(&mut [0; 1]);
        assert!(self.ended || self.failed || result.is_err(), "the end was cut, and nobody knows");
    }
}

/// The peer's data at one place.
fn pattern(at: usize) -> u8 {
    (at % 251 % 240) as u8
}

/// So many bytes of input, or all that there are.
fn bytes(input: &mut &[u8], length: usize) -> Vec<u8> {
    let (bytes, rest) = input.split_at(length.min(input.len()));
    *input = rest;
    bytes.to_vec()
}

fn output(channel: &mut Channel) -> Vec<u8> {
    let mut output = Vec::new();
    let mut room = vec![0; 64 << 10];
    loop {
        let count = channel.output(&mut room);
        if count == 0 {
            return output;
        }
        output.extend_from_slice(&room[..count]);
    }
}

/// The tested side and its peer, after a handshake that is the same in every run.
fn connected(mode: u8, suite: u8) -> (Channel, Channel) {
    let (honest, forging) = pair(mode, suite);
    let (server, client) = if mode & SERVER != 0 {
        (&honest.server, &forging.client)
    } else {
        (&forging.server, &honest.client)
    };
    let mut server = server.channel().expect("a server's side");
    let mut client = client.channel("localhost").expect("a client's side");
    while server.is_handshaking() || client.is_handshaking() {
        shake_hands(&mut client, &mut server);
        shake_hands(&mut server, &mut client);
    }
    if mode & SERVER != 0 { (server, client) } else { (client, server) }
}

fn shake_hands(from: &mut Channel, to: &mut Channel) {
    let output = output(from);
    let mut rest = &output[..];
    while !rest.is_empty() {
        let taken = to.received(rest).expect("a handshake");
        rest = &rest[taken..];
    }
}

/// Credentials for both sides.
struct Credentials {
    server: ServerCredentials,
    client: ClientCredentials,
}

/// Credentials of a side that is as others, and of one that can send any record, for these versions and suites.
fn pair(mode: u8, suite: u8) -> &'static (Credentials, Credentials) {
    const SUITES: usize = 3;
    static PAIRS: [OnceLock<(Credentials, Credentials)>; 4 * SUITES] =
        [const { OnceLock::new() }; 4 * SUITES];
    let (old, soon) = (mode & OLD != 0, mode & SOON != 0);
    let number = usize::from(suite) % SUITES;
    let place = number * 4 + usize::from(old) * 2 + usize::from(soon);
    PAIRS[place].get_or_init(|| {
        // The certificate is for Ed25519, which the other suites of TLS 1.2 have nothing to do with.
        let fits = |suite: &SupportedCipherSuite| match suite {
            SupportedCipherSuite::Tls12(_) => old && format!("{suite:?}").contains("ECDSA"),
            SupportedCipherSuite::Tls13(_) => !old,
        };
        let all = ring::default_provider().cipher_suites;
        let suite = all.into_iter().filter(fits).nth(number).expect("three suites of each version");
        let credentials = |forging| {
            let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("credentials");
            let provider = || provider(suite, soon, forging);
            let server = ServerCredentials::read_with(provider(), &directory, Admission::Everyone);
            let client = ClientCredentials::read_with(provider(), &directory);
            Credentials {
                server: server.expect("credentials"),
                client: client.expect("credentials"),
            }
        };
        (credentials(false), credentials(true))
    })
}

/// Cryptography without chance, with one suite.
fn provider(suite: SupportedCipherSuite, soon: bool, forging: bool) -> CryptoProvider {
    // The keys of TLS 1.2 do not change.
    let limit = if soon && suite.tls13().is_some() { SOON_LIMIT } else { u64::MAX };
    let suite = forging::changed(suite, limit, forging);
    CryptoProvider {
        cipher_suites: vec![suite],
        kx_groups: vec![&Known],
        secure_random: &Known,
        ..ring::default_provider()
    }
}

/// Randomness and an exchange of keys that everybody knows.
#[derive(Debug)]
struct Known;

impl SecureRandom for Known {
    fn fill(&self, buf: &mut [u8]) -> Result<(), GetRandomFailed> {
        buf.fill(0x5a);
        Ok(())
    }
}

impl SupportedKxGroup for Known {
    fn start(&self) -> Result<Box<dyn ActiveKeyExchange>, Error> {
        Ok(Box::new(Self))
    }

    fn name(&self) -> NamedGroup {
        NamedGroup::X25519
    }
}

impl ActiveKeyExchange for Known {
    fn complete(self: Box<Self>, _peer: &[u8]) -> Result<SharedSecret, Error> {
        Ok(SharedSecret::from(&[0xa5; 32][..]))
    }

    fn pub_key(&self) -> &[u8] {
        &[0x33; 32]
    }

    fn group(&self) -> NamedGroup {
        NamedGroup::X25519
    }
}

/// Sessions of each version and suite, of both sides: data in both directions, ends, keys that change, forged records,
/// and each thing that a network may do.
pub(crate) fn valid_inputs() -> Vec<Vec<u8>> {
    let data = |length: u16| [&[0][..], &length.to_le_bytes()].concat();
    let write = |length: u16| [&[10][..], &length.to_le_bytes()].concat();
    let forged = |kind: u8, content: &[u8]| [&[1, kind, content.len() as u8][..], content].concat();
    let (deliver, end, hand_back) = (vec![9, 255, 0], vec![12], vec![11]);
    let both =
        [data(100), write(50), deliver.clone(), hand_back.clone(), data(39_999), deliver.clone()]
            .concat();
    let many = [data(1), write(1), deliver.clone(), hand_back.clone()].concat().repeat(20);
    let closed = [data(10), end.clone(), deliver.clone(), vec![13], hand_back.clone()].concat();
    // Messages that the keys change, with and without an answer; of a renegotiation; tickets; alerts.
    let update =
        [forged(22, &[24, 0, 0, 1, 1]), deliver.clone(), write(5), hand_back.clone()].concat();
    let renegotiation = [forged(22, &[0, 0, 0, 0]), deliver.clone(), data(5)].concat();
    let ticket = [&[4, 0, 0, 15][..], &[0, 0, 1, 0, 1, 2, 3, 4, 0, 0, 2, 9, 9, 0, 0]].concat();
    let ticket = [forged(22, &ticket), data(5)].concat();
    let alerts = [forged(21, &[1, 90]), forged(21, &[1, 0]), data(7)].concat();
    let padded = forged(0, &[b'a', b'b', 23, 0, 0]);
    let empty = forged(23, &[]).repeat(5);
    let nothing =
        [forged(22, &[]), data(9), forged(22, &[]), end.clone(), deliver.clone(), data(9)].concat();
    let parts = [forged(22, &[4, 0, 0]), forged(22, &[200]), data(5)].concat();
    // The keys are to change while the other side has sent a part of a message.
    let cut = [forged(22, &[24, 0, 0]), deliver.clone(), write(1).repeat(40)].concat();
    let after_the_end = [vec![13], forged(22, &[24, 0, 0, 1, 9]), deliver.clone()].concat();
    let network: [&[u8]; 9] = [
        &[4, 0, 9, 0, 1],
        &[5, 1, 30, 0],
        &[6, 0],
        &[7, 0, 1],
        &[8, 0],
        &[9, 0, 7],
        &[2, 3, 1, 2, 3],
        &[3, 21, 2, 1, 0],
        &[15, 23, 0x48, 0, 3, 1, 2, 3],
    ];
    let network = network.map(|change| {
        [data(20), data(30), end.clone(), change.to_vec(), deliver.clone(), data(9)].concat()
    });
    let sessions = [
        both,
        many,
        closed,
        update,
        renegotiation,
        ticket,
        alerts,
        padded,
        empty,
        nothing,
        parts,
        cut,
        after_the_end,
    ];
    let mut inputs = Vec::new();
    for (number, session) in sessions.into_iter().chain(network).enumerate() {
        for mode in [0, SERVER, OLD, OLD | SERVER, LAZY, SOON, SOON | SERVER | LAZY] {
            inputs.push([&[mode, number as u8][..], &session].concat());
        }
    }
    inputs
}
