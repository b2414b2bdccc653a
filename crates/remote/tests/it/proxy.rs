//! Something between a client and a server that cuts, holds, refuses and changes what goes through it.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;

/// Where what comes in goes.
#[derive(Clone)]
pub(crate) enum Upstream {
    /// An address.
    Tcp(String),
    /// A socket of this machine.
    Unix(PathBuf),
}

/// A direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// From the client to the server.
    Up,
    /// From the server to the client.
    Down,
}

/// What is done to what goes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rule {
    /// Nothing.
    Pass,
    /// When so many bytes have gone this way, on all connections, the one that carries them ends. The others go on.
    CutOnce(Way, u64),
    /// Each connection ends when so many bytes have gone this way on it: one on which more have gone before, with the
    /// next.
    CutEach(Way, u64),
    /// One bit changes of the byte of this number, of all in the bodies of answers to GET.
    Flip(u64),
    /// So many connections end at their beginning.
    Refuse(u64),
    /// Nothing goes on before there is another rule.
    Hold,
}

struct Rules {
    rule: Rule,
    /// What the rule counts.
    counted: u64,
    /// Connections so far.
    connections: u64,
}

struct Shared {
    upstream: Upstream,
    rules: Mutex<Rules>,
    changed: Condvar,
}

/// The proxy, on a port of this machine, until the process ends.
pub(crate) struct Proxy {
    pub(crate) endpoint: String,
    shared: Arc<Shared>,
}

impl Proxy {
    pub(crate) fn start(upstream: Upstream) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let rules = Mutex::new(Rules { rule: Rule::Pass, counted: 0, connections: 0 });
        let shared = Arc::new(Shared { upstream, rules, changed: Condvar::new() });
        let accepting = Arc::clone(&shared);
        thread::spawn(move || {
            for client in listener.incoming() {
                let shared = Arc::clone(&accepting);
                thread::spawn(move || shared.connect(client.unwrap()));
            }
        });
        Self { endpoint, shared }
    }

    /// From now on; it begins to count.
    pub(crate) fn set(&self, rule: Rule) {
        let mut rules = self.shared.rules();
        (rules.rule, rules.counted) = (rule, 0);
        self.shared.changed.notify_all();
    }

    /// How much the rule has counted: bytes, or connections.
    pub(crate) fn counted(&self) -> u64 {
        self.shared.rules().counted
    }

    /// Connections so far.
    pub(crate) fn connections(&self) -> u64 {
        self.shared.rules().connections
    }
}

/// Both ends of a connection, to end it.
#[derive(Clone)]
struct Ends(Arc<dyn Fn() + Send + Sync>);

impl Shared {
    fn rules(&self) -> MutexGuard<'_, Rules> {
        self.rules.lock().unwrap()
    }

    fn connect(self: Arc<Self>, client: TcpStream) {
        {
            let mut rules = self.rules();
            rules.connections += 1;
            if let Rule::Refuse(most) = rules.rule
                && rules.counted < most
            {
                rules.counted += 1;
                return;
            }
        }
        // A server that is not there is a connection that ends.
        match &self.upstream {
            Upstream::Tcp(address) => {
                let Ok(server) = TcpStream::connect(address) else { return };
                let ends = [&client, &server].map(|stream| stream.try_clone().unwrap());
                let end = move || ends.iter().for_each(|end| drop(end.shutdown(Shutdown::Both)));
                let copies = (client.try_clone().unwrap(), server.try_clone().unwrap());
                self.carry(copies, (client, server), &Ends(Arc::new(end)));
            }
            Upstream::Unix(path) => {
                let Ok(server) = UnixStream::connect(path) else { return };
                let ends = (client.try_clone().unwrap(), server.try_clone().unwrap());
                let end = move || {
                    drop(ends.0.shutdown(Shutdown::Both));
                    drop(ends.1.shutdown(Shutdown::Both));
                };
                let copies = (client.try_clone().unwrap(), server.try_clone().unwrap());
                self.carry(copies, (client, server), &Ends(Arc::new(end)));
            }
        }
    }

    /// Carries bytes both ways until one end closes.
    fn carry<S: Read + Write + Send + 'static>(
        self: &Arc<Self>,
        (mut from_client, mut to_server): (TcpStream, S),
        (mut to_client, mut from_server): (TcpStream, S),
        ends: &Ends,
    ) {
        let asked = Arc::new(Mutex::new(Asked::default()));
        let (shared, up_asked, up_ends) = (Arc::clone(self), Arc::clone(&asked), ends.clone());
        let up = thread::spawn(move || {
            shared.pump(Way::Up, &mut from_client, &mut to_server, &up_asked);
            (up_ends.0)();
        });
        self.pump(Way::Down, &mut from_server, &mut to_client, &asked);
        (ends.0)();
        up.join().unwrap();
    }

    fn pump(&self, way: Way, from: &mut impl Read, to: &mut impl Write, asked: &Mutex<Asked>) {
        let (mut buffer, mut carried) = ([0; 4096], 0);
        loop {
            let Ok(read @ 1..) = from.read(&mut buffer) else { return };
            let bytes = &mut buffer[..read];
            let (length, goes_on) = self.apply(way, bytes, carried, &mut asked.lock().unwrap());
            carried += length as u64;
            if to.write_all(&bytes[..length]).is_err() || !goes_on {
                return;
            }
        }
    }

    /// Does what the rule says to these bytes: how many of them go on, and whether the connection does.
    fn apply(&self, way: Way, bytes: &mut [u8], carried: u64, asked: &mut Asked) -> (usize, bool) {
        let rules = self.rules();
        let mut rules = self.changed.wait_while(rules, |rules| rules.rule == Rule::Hold).unwrap();
        let length = bytes.len() as u64;
        let bodies = match way {
            Way::Up => {
                asked.asks(bytes);
                Vec::new()
            }
            Way::Down => asked.answered(bytes),
        };
        match rules.rule {
            Rule::CutOnce(cut, at) if cut == way => {
                let before = rules.counted;
                rules.counted += length;
                if (before..before + length).contains(&at) {
                    return ((at - before) as usize, false);
                }
            }
            Rule::CutEach(cut, at) if cut == way && carried + length > at => {
                rules.counted += 1;
                return (at.saturating_sub(carried) as usize, false);
            }
            Rule::Flip(number) => {
                for place in bodies {
                    if rules.counted == number {
                        bytes[place] ^= 1;
                    }
                    rules.counted += 1;
                }
            }
            _ => {}
        }
        (bytes.len(), true)
    }
}

/// What was asked on a connection, as far as it must be known to find the bodies of answers to GET. Of the requests of
/// a connection, one is asked when the one before was answered.
#[derive(Default)]
struct Asked {
    method: Vec<u8>,
    head: Vec<u8>,
    /// Bytes of the body that are to come.
    body: u64,
}

impl Asked {
    fn asks(&mut self, bytes: &[u8]) {
        let missing = 4_usize.saturating_sub(self.method.len());
        self.method.extend(bytes.iter().take(missing));
    }

    /// The places of a body's bytes.
    fn answered(&mut self, bytes: &[u8]) -> Vec<usize> {
        let mut places = Vec::new();
        for (place, byte) in bytes.iter().enumerate() {
            if self.body > 0 {
                if self.method == b"GET " {
                    places.push(place);
                }
                self.body -= 1;
                if self.body == 0 {
                    self.method.clear();
                }
                continue;
            }
            self.head.push(*byte);
            if self.head.ends_with(b"\r\n\r\n") {
                let head = String::from_utf8_lossy(&self.head).to_lowercase();
                let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
                let length = length.map_or(0, |length| length.trim().parse().unwrap());
                let interim = head.starts_with("http/1.1 100");
                self.body = if self.method == b"HEAD" { 0 } else { length };
                if self.body == 0 && !interim {
                    self.method.clear();
                }
                self.head.clear();
            }
        }
        places
    }
}

#[test]
fn a_connection_beyond_its_limit_carries_nothing_more() {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let proxy = Proxy::start(Upstream::Tcp(server.local_addr().unwrap().to_string()));
    let address = proxy.endpoint.strip_prefix("http://").unwrap();
    for (limit, more) in [(3, 0), (10, 0), (12, 2)] {
        proxy.set(Rule::Pass);
        let mut client = TcpStream::connect(address).unwrap();
        let (mut served, _) = server.accept().unwrap();
        client.write_all(&[1; 10]).unwrap();
        served.read_exact(&mut [0; 10]).unwrap();
        proxy.set(Rule::CutEach(Way::Up, limit));
        client.write_all(&[2; 4]).unwrap();
        let mut rest = Vec::new();
        served.read_to_end(&mut rest).unwrap();
        assert_eq!(rest, vec![2; more], "{limit}");
        assert_eq!(proxy.counted(), 1);
    }
}
