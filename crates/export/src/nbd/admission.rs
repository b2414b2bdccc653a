//! Which connections a server admits, and which of them make room for others.

use super::live::{Guard, Live};
use isobath_ring::net::Stream;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown};
use std::ptr;
use std::sync::{Arc, LazyLock};

/// Disconnected clients that may not have ended yet. They are in excess of the limit on connections.
const MOST_ENDING: usize = 16;
/// One peer leaves the places divided by this to others.
const LEFT_TO_OTHERS: usize = 8;

/// Who is at the other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Peer {
    /// A user of this machine.
    User(u32),
    /// An address; all of this machine's own addresses are one, and so are those of an IPv6 network (64 bits).
    Address(IpAddr),
    Unknown,
}

impl Peer {
    pub(crate) fn of(stream: &Stream) -> Self {
        if let Ok(Some(user)) = stream.peer_user() {
            return Self::User(user);
        }
        let socket = socket2::SockRef::from(stream);
        let address =
            |address: io::Result<socket2::SockAddr>| Some(address.ok()?.as_socket()?.ip());
        let Some(peer) = address(socket.peer_addr()) else { return Self::Unknown };
        let is_own =
            address(socket.local_addr()) == Some(peer) || OWN.contains(&peer.to_canonical());
        Self::at(peer, is_own)
    }

    fn at(address: IpAddr, is_own: bool) -> Self {
        let address = address.to_canonical();
        if address.is_loopback() || is_own {
            return Self::Address(Ipv6Addr::LOCALHOST.into());
        }
        Self::Address(match address {
            IpAddr::V4(_) => address,
            IpAddr::V6(address) => {
                Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into()
            }
        })
    }
}

/// This machine's addresses when the server started, which it may not be able to ask for later.
static OWN: LazyLock<Vec<IpAddr>> = LazyLock::new(own_addresses);

/// The addresses of this machine's interfaces; none if they cannot be had.
fn own_addresses() -> Vec<IpAddr> {
    let mut first = ptr::null_mut();
    // SAFETY: the call fills `first` if it succeeds.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return Vec::new();
    }
    let mut own = Vec::new();
    let mut next = first;
    // SAFETY: the list's entries live until it is freed, and addresses have the type that their family says.
    unsafe {
        while let Some(interface) = next.as_ref() {
            next = interface.ifa_next;
            let Some(address) = interface.ifa_addr.as_ref() else { continue };
            match i32::from(address.sa_family) {
                libc::AF_INET => {
                    let address = interface.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned();
                    own.push(Ipv4Addr::from_bits(u32::from_be(address.sin_addr.s_addr)).into());
                }
                libc::AF_INET6 => {
                    let address = interface.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned();
                    own.push(Ipv6Addr::from(address.sin6_addr.s6_addr).into());
                }
                _ => {}
            }
        }
        libc::freeifaddrs(first);
    }
    own
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User(user) => write!(f, "user {user}"),
            Self::Address(address) => write!(f, "{address}"),
            Self::Unknown => f.write_str("an unknown peer"),
        }
    }
}

/// Why a connection is not admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("there are {0} clients, as many as the limit allows")]
    Full(usize),
    #[error("the peer has {0} connections, as many as the limit allows one peer")]
    PeerFull(usize),
    #[error("too many clients are being disconnected")]
    Ending,
}

/// What a connection is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// It has not chosen an export yet.
    Handshake,
    /// It has, and is never disconnected for another.
    Client,
    /// It was disconnected to make room, and has not ended yet.
    Ending,
}

/// The connections of a server.
pub(crate) struct Admission {
    limit: usize,
    /// How many of them one peer may have.
    of_peer: usize,
    /// Whether a new connection may take the place of one that has not finished its handshake.
    makes_room: bool,
    live: Arc<Live>,
    state: Mutex<Admitted>,
}

#[derive(Default)]
struct Admitted {
    next: u64,
    /// In the order of arrival.
    connections: BTreeMap<u64, Connection>,
}

struct Connection {
    peer: Peer,
    phase: Phase,
    stream: Stream,
}

/// An admitted connection, until this is dropped.
pub(crate) struct Place {
    admission: Arc<Admission>,
    key: u64,
    _counted: Guard,
}

impl Admission {
    /// Admits up to `limit` connections, and counts them in `live`, which stays open. No more are offered.
    pub(crate) fn of_waiting(limit: usize, live: Arc<Live>) -> Self {
        Self { limit, of_peer: limit, makes_room: false, live, state: Mutex::default() }
    }

    /// As [`of_waiting`](Self::of_waiting), of any number that are offered.
    pub(crate) fn of_any(limit: usize, live: Arc<Live>) -> Self {
        LazyLock::force(&OWN);
        let of_peer = limit - limit / LEFT_TO_OTHERS;
        Self { limit, of_peer, makes_room: true, live, state: Mutex::default() }
    }

    /// Admits a new connection. If there are too many, or too many of this peer, one that has not finished its
    /// handshake is disconnected for it: the oldest one of the peer that has the most of them.
    pub(crate) fn admit(self: &Arc<Self>, stream: &Stream, peer: Peer) -> Result<Place, Refusal> {
        let mut state = self.state.lock();
        state.make_room(peer, self)?;
        let counted = self.live.enter(usize::MAX).ok_or(Refusal::Full(0))?;
        let key = state.next;
        state.next += 1;
        let connection = Connection { peer, phase: Phase::Handshake, stream: stream.clone() };
        state.connections.insert(key, connection);
        Ok(Place { admission: self.clone(), key, _counted: counted })
    }
}

impl Admitted {
    fn make_room(&mut self, peer: Peer, limits: &Admission) -> Result<(), Refusal> {
        let staying = || self.connections.values().filter(|one| one.phase != Phase::Ending);
        let (all, own) = (staying().count(), staying().filter(|one| one.peer == peer).count());
        let (refusal, victim) = if own >= limits.of_peer {
            (Refusal::PeerFull(own), self.oldest_unfinished(peer))
        } else if all >= limits.limit {
            (
                Refusal::Full(all),
                self.most_unfinished().and_then(|peer| self.oldest_unfinished(peer)),
            )
        } else {
            return Ok(());
        };
        if self.connections.len() - all >= MOST_ENDING {
            return Err(Refusal::Ending);
        }
        let victim = victim.filter(|_| limits.makes_room);
        let victim = victim.and_then(|key| self.connections.get_mut(&key)).ok_or(refusal)?;
        tracing::warn!(
            peer = %victim.peer,
            "{refusal}; disconnecting one that has not finished its handshake"
        );
        victim.phase = Phase::Ending;
        let _ = victim.stream.shutdown(Shutdown::Both);
        Ok(())
    }

    /// The oldest connection of a peer that has not finished its handshake.
    fn oldest_unfinished(&self, peer: Peer) -> Option<u64> {
        let is_it = |one: &Connection| one.phase == Phase::Handshake && one.peer == peer;
        self.connections.iter().find(|(_, one)| is_it(one)).map(|(key, _)| *key)
    }

    /// The peer with the most connections that have not finished their handshake.
    fn most_unfinished(&self) -> Option<Peer> {
        let mut counts = BTreeMap::<Peer, usize>::new();
        for one in self.connections.values().filter(|one| one.phase == Phase::Handshake) {
            *counts.entry(one.peer).or_default() += 1;
        }
        counts.into_iter().max_by_key(|(_, count)| *count).map(|(peer, _)| peer)
    }
}

impl Place {
    /// The handshake is about to be finished; `false` if the connection was disconnected before.
    pub(crate) fn keep(&self) -> bool {
        let mut state = self.admission.state.lock();
        let connection = state.connections.get_mut(&self.key);
        let is_kept = |connection: &&mut Connection| connection.phase != Phase::Ending;
        let Some(connection) = connection.filter(is_kept) else { return false };
        connection.phase = Phase::Client;
        true
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.admission.state.lock().connections.remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{ErrorKind, Read};
    use std::net::UdpSocket;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    const ONE: Peer = Peer::User(1);
    const OTHER: Peer = Peer::User(2);

    struct Test(Arc<Admission>);

    impl Test {
        fn new(limit: usize) -> Self {
            Self(Arc::new(Admission::of_any(limit, Arc::default())))
        }

        fn admit(&self, peer: Peer) -> Result<(Place, UnixStream), Refusal> {
            let (near, far) = UnixStream::pair().unwrap();
            far.set_nonblocking(true).unwrap();
            let stream = Stream::from(OwnedFd::from(near));
            self.0.admit(&stream, peer).map(|place| (place, far))
        }

        fn client(&self, peer: Peer) -> (Place, UnixStream) {
            let admitted = self.admit(peer).unwrap();
            assert!(admitted.0.keep());
            admitted
        }
    }

    fn is_closed(mut far: &UnixStream) -> bool {
        match far.read(&mut [0]) {
            Ok(count) => count == 0,
            Err(error) => error.kind() != ErrorKind::WouldBlock,
        }
    }

    #[test]
    fn a_client_is_never_disconnected_for_another() {
        let test = Test::new(3);
        let clients = [test.client(ONE), test.client(ONE), test.client(OTHER)];
        assert_eq!(test.admit(OTHER).err(), Some(Refusal::Full(3)));
        assert!(clients.iter().all(|(_, far)| !is_closed(far)));
        drop(clients);
        assert!(test.admit(OTHER).is_ok());
    }

    #[test]
    fn the_oldest_unfinished_handshake_of_the_peer_with_most_of_them_makes_room() {
        let test = Test::new(5);
        let other = test.admit(OTHER).unwrap();
        let client = test.client(ONE);
        let unfinished = [(); 3].map(|()| test.admit(ONE).unwrap());
        let new = test.admit(OTHER).unwrap();
        let closed = [&unfinished[0], &unfinished[1], &unfinished[2], &other, &client, &new]
            .map(|(_, far)| is_closed(far));
        assert_eq!(closed, [true, false, false, false, false, false]);
        assert!(!unfinished[0].0.keep(), "it is too late to finish it");
        assert!(unfinished[1].0.keep() && new.0.keep());
    }

    #[test]
    fn one_peer_cannot_take_all_places() {
        let test = Test::new(16);
        let mut clients: Vec<_> = (0..14).map(|_| test.client(ONE)).collect();
        assert_eq!(test.admit(ONE).err(), Some(Refusal::PeerFull(14)));
        let others = [test.client(OTHER), test.client(OTHER)];
        assert_eq!(test.admit(Peer::Unknown).err(), Some(Refusal::Full(16)));
        clients.pop();
        let unfinished = test.admit(ONE).unwrap();
        let next = test.admit(ONE).unwrap();
        assert!(is_closed(&unfinished.1), "a peer makes room for itself");
        assert!(others.iter().chain([&next]).all(|(_, far)| !is_closed(far)));
    }

    #[test]
    fn where_others_wait_none_makes_room_and_one_peer_may_have_all() {
        let test = Test(Arc::new(Admission::of_waiting(8, Arc::default())));
        let all: Vec<_> = (0..8).map(|_| test.admit(ONE).unwrap()).collect();
        assert_eq!(test.admit(OTHER).err(), Some(Refusal::Full(8)));
        assert!(all.iter().all(|(_, far)| !is_closed(far)));
    }

    #[test]
    fn connections_that_do_not_end_are_bounded_too() {
        let test = Test::new(4);
        let mut all: Vec<_> = (0..4 + MOST_ENDING).map(|_| test.admit(ONE).unwrap()).collect();
        assert_eq!(test.admit(ONE).err(), Some(Refusal::Ending));
        assert_eq!(test.0.live.count(), 4 + MOST_ENDING);
        all.remove(0);
        assert!(test.admit(ONE).is_ok());
        drop(all);
        assert_eq!(test.0.live.count(), 0);
    }

    #[test]
    fn own_addresses_are_one_peer_and_so_are_those_of_one_network() {
        let own = |address: &str| Peer::at(address.parse().unwrap(), true);
        let at = |address: &str| Peer::at(address.parse().unwrap(), false);
        assert_eq!(at("127.0.0.1"), at("127.9.9.9"));
        assert_eq!(at("127.0.0.1"), at("::1"));
        assert_eq!(own("10.0.0.1"), at("::1"));
        assert_eq!(at("10.0.0.1"), at("::ffff:10.0.0.1"));
        assert_ne!(at("10.0.0.1"), at("10.0.0.2"));
        assert_eq!(at("fd00::1"), at("fd00::2:0:0:1"));
        assert_ne!(at("fd00::1"), at("fd00:0:0:1::1"));
    }

    #[test]
    fn own_addresses_are_known() {
        let own = own_addresses();
        assert!(own.contains(&Ipv4Addr::LOCALHOST.into()), "{own:?}");
        // The address from which this machine would reach another, one for documentation, if it can.
        let source = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).and_then(|socket| {
            socket.connect((Ipv4Addr::new(198, 51, 100, 1), 9))?;
            socket.local_addr()
        });
        if let Ok(source) = source {
            assert!(own.contains(&source.ip()), "{source} of {own:?}");
        }
    }
}
