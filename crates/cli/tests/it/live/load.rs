//! A load whose every write is recorded, and what an image may hold after it.
//!
//! Each sector written holds a stamp, a number of its write, in every 8 bytes, beside its own number.

use super::clients::{Client, Frontend, Kill};
use isobath_testkit::nbd::Request;
use rand::RngExt;
use rand::rngs::StdRng;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Bytes of a sector.
pub(crate) const SECTOR: usize = 512;
/// A moment that has not come.
const NEVER: u64 = u64::MAX;

/// A write of the load, and the moments of a [`Clock`] at which it was sent, answered, and answered
/// for by a flush.
#[derive(Clone, Debug)]
struct Write {
    sectors: Range<u32>,
    stamp: u32,
    sent: u64,
    done: u64,
    flushed: u64,
    /// The sectors may hold what they held before as well.
    discard: bool,
}

/// Counts moments.
#[derive(Default)]
pub(crate) struct Clock(AtomicU64);

impl Clock {
    pub(crate) fn now(&self) -> u64 {
        self.0.fetch_add(1, Ordering::SeqCst)
    }
}

/// What a client wrote.
#[derive(Default)]
pub(crate) struct Log {
    writes: Vec<Write>,
    /// What was answered outlives a server that is killed, whether it was flushed or not.
    survives: bool,
}

impl Log {
    /// Whether answers outlive the server.
    pub(crate) fn survives(&self) -> bool {
        self.survives
    }

    /// Writes the first sector and flushes.
    pub(crate) fn put(
        &mut self,
        client: &mut dyn Client,
        clock: &Clock,
        stamp: u32,
    ) -> io::Result<()> {
        let sent = clock.now();
        let data = content(stamp, 0..1);
        client.submit(&[Request::Write { offset: 0, data: &data, fua: false }])?;
        let done = clock.now();
        client.submit(&[Request::Flush])?;
        let flushed = clock.now();
        self.writes.push(Write { sectors: 0..1, stamp, sent, done, flushed, discard: false });
        Ok(())
    }
}

/// What a write puts into sectors.
fn content(stamp: u32, sectors: Range<u32>) -> Vec<u8> {
    let words = sectors.flat_map(|sector| [(stamp, sector); SECTOR / 8]);
    let bytes = words.flat_map(|(stamp, sector)| [stamp, sector].map(u32::to_le_bytes));
    bytes.flatten().collect()
}

/// What loads have in common: the clock, what ends them, and the kill of the server.
#[derive(Default)]
pub(crate) struct Shared {
    pub(crate) clock: Clock,
    pub(crate) stop: AtomicBool,
    pub(crate) kill: Kill,
}

/// Writes to a range of sectors through a frontend, in batches each of which is flushed or not, until it is
/// told to end or the server is gone.
pub(crate) fn run(
    frontend: &Frontend,
    sectors: Range<u32>,
    shared: &Shared,
    stamp: u32,
    survives: bool,
    rng: &mut StdRng,
) -> Log {
    let mut log = Log { writes: Vec::new(), survives };
    let _ = frontend.with(&shared.kill, |client| {
        let mut gone = false;
        while !gone && !shared.stop.load(Ordering::SeqCst) {
            gone = log.batch(client, sectors.clone(), &shared.clock, stamp, rng).is_err();
        }
    });
    log
}

impl Log {
    fn batch(
        &mut self,
        client: &mut dyn Client,
        sectors: Range<u32>,
        clock: &Clock,
        stamp: u32,
        rng: &mut StdRng,
    ) -> io::Result<()> {
        let first = self.writes.len();
        let mut contents = Vec::new();
        for _ in 0..rng.random_range(1..12) {
            // Mostly whole pages; each batch writes no sector twice.
            let unit = if rng.random_ratio(1, 4) { 1 } else { 8 };
            let length = unit * rng.random_range(1..=16);
            let start = rng.random_range(sectors.start..sectors.end - length) / unit * unit;
            let range = start.max(sectors.start)..start + length;
            let overlaps =
                |write: &Write| write.sectors.start < range.end && range.start < write.sectors.end;
            if self.writes[first..].iter().any(overlaps) {
                continue;
            }
            let kind = rng.random_range(0..16);
            let number = if kind < 3 { 0 } else { stamp + self.writes.len() as u32 + 1 };
            contents.push(content(number, range.clone()));
            let (sent, done, flushed) = (clock.now(), NEVER, NEVER);
            let (sectors, stamp, discard) = (range, number, kind == 0);
            self.writes.push(Write { sectors, stamp, sent, done, flushed, discard });
        }
        let requests: Vec<Request<'_>> = self.writes[first..]
            .iter()
            .zip(&contents)
            .map(|(write, data)| {
                let offset = u64::from(write.sectors.start) * SECTOR as u64;
                let length = data.len() as u32;
                match write.stamp {
                    0 if write.discard => Request::Discard { offset, length },
                    0 => Request::Zero { offset, length, unmap: write.sent % 2 == 0 },
                    _ => Request::Write { offset, data, fua: false },
                }
            })
            .collect();
        client.submit(&requests)?;
        let done = clock.now();
        self.writes[first..].iter_mut().for_each(|write| write.done = done);
        if rng.random_ratio(1, 2) {
            client.submit(&[Request::Flush])?;
            let flushed = clock.now();
            let open = self.writes.iter_mut().rev().take_while(|write| write.flushed == NEVER);
            open.for_each(|write| write.flushed = flushed);
        }
        Ok(())
    }
}

/// The stamps of a disk's sectors.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Stamps(Vec<u32>);

impl Stamps {
    /// A disk of zeroes.
    pub(crate) fn none(sectors: usize) -> Self {
        Self(vec![0; sectors])
    }

    /// Reads a disk; fails where a sector is not as it was written at some time.
    pub(crate) fn of(disk: &[u8]) -> Result<Self, String> {
        let stamp = |(number, sector): (usize, &[u8])| {
            let number = number as u32;
            let word = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
            let stamp = word(&sector[..4]);
            let expected = if stamp == 0 { 0 } else { number };
            let repeated = sector[8..] == sector[..SECTOR - 8];
            let whole = repeated && word(&sector[4..8]) == expected;
            if whole { Ok(stamp) } else { Err(format!("sector {number} is torn: {sector:x?}")) }
        };
        disk.chunks_exact(SECTOR).enumerate().map(stamp).collect::<Result<_, _>>().map(Self)
    }

    /// Says where another disk differs.
    pub(crate) fn compare(&self, other: &Self) -> Result<(), String> {
        match self.0.iter().zip(&other.0).position(|(one, other)| one != other) {
            None => Ok(()),
            Some(at) => Err(format!("sector {at}: {} is not {}", other.0[at], self.0[at])),
        }
    }
}

/// What may be found in an image.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    /// What was answered before this moment, or answered for by a flush, is there or written over.
    pub(crate) from: u64,
    /// Nothing is there that was sent later.
    pub(crate) until: u64,
    /// Only flushes count, but for a log whose answers outlive the server.
    pub(crate) flushed: bool,
}

/// Fails unless a disk that held `before` may hold `now`, after writes of which some range is the log's.
pub(crate) fn judge(
    before: &Stamps,
    logs: &[Log],
    window: Window,
    now: &Stamps,
) -> Result<(), String> {
    // For each sector, what it must hold unless it is one of the later ones.
    let mut settled = before.0.clone();
    let mut later: Vec<Vec<u32>> = vec![Vec::new(); settled.len()];
    let writes =
        logs.iter().flat_map(|log| log.writes.iter().map(move |write| (write, log.survives)));
    for (write, survives) in writes {
        let answered = !window.flushed || survives && window.until == NEVER;
        let done = if answered { write.done } else { write.flushed };
        for sector in write.sectors.clone().map(|sector| sector as usize) {
            if write.discard {
                if write.sent < window.until {
                    later[sector].push(0);
                }
            } else if done < window.from {
                settled[sector] = write.stamp;
                later[sector].clear();
            } else if write.sent < window.until {
                later[sector].push(write.stamp);
            }
        }
    }
    for (sector, found) in now.0.iter().enumerate() {
        if *found != settled[sector] && !later[sector].contains(found) {
            return Err(format!(
                "sector {sector} holds {found}, not {} or one of {:?} ({window:?})",
                settled[sector], later[sector]
            ));
        }
    }
    Ok(())
}
