//! A load whose every write is recorded, and what an image may hold after it.
//!
//! Each sector written holds a stamp, a number of its write, in every 8 bytes, beside its own number.

use super::nbd::Nbd;
use rand::RngExt;
use rand::rngs::StdRng;
use std::io;
use std::ops::Range;
use std::path::Path;
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
pub(crate) struct Log(Vec<Write>);

impl Log {
    /// Writes the first sector and flushes.
    pub(crate) fn put(&mut self, client: &mut Nbd, clock: &Clock, stamp: u32) -> io::Result<()> {
        let sent = clock.now();
        client.send(&[Nbd::write(0, SECTOR as u32, Some(&content(stamp, 0..1)))])?;
        let done = clock.now();
        client.flush()?;
        self.0.push(Write { sectors: 0..1, stamp, sent, done, flushed: clock.now() });
        Ok(())
    }
}

/// What a write puts into sectors.
fn content(stamp: u32, sectors: Range<u32>) -> Vec<u8> {
    let words = sectors.flat_map(|sector| [(stamp, sector); SECTOR / 8]);
    let bytes = words.flat_map(|(stamp, sector)| [stamp, sector].map(u32::to_le_bytes));
    bytes.flatten().collect()
}

/// Writes to a range of sectors, in batches each of which is flushed or not, until it is told to end or
/// the server is gone.
pub(crate) fn run(
    server: (&Path, &str),
    sectors: Range<u32>,
    (clock, stop): (&Clock, &AtomicBool),
    mut stamp: u32,
    rng: &mut StdRng,
) -> Log {
    let mut log = Log::default();
    let Ok(mut client) = Nbd::connect(server.0, server.1) else { return log };
    while !stop.load(Ordering::SeqCst) {
        let first = log.0.len();
        let mut requests = Vec::new();
        for _ in 0..rng.random_range(1..12) {
            // Mostly whole pages; each batch writes no sector twice.
            let unit = if rng.random_ratio(1, 4) { 1 } else { 8 };
            let length = unit * rng.random_range(1..=16);
            let start = rng.random_range(sectors.start..sectors.end - length) / unit * unit;
            let range = start.max(sectors.start)..start + length;
            let overlaps =
                |write: &Write| write.sectors.start < range.end && range.start < write.sectors.end;
            if log.0[first..].iter().any(overlaps) {
                continue;
            }
            stamp += 1;
            let zero = rng.random_ratio(1, 8);
            let data = (!zero).then(|| content(stamp, range.clone()));
            let bytes = (range.end - range.start) * SECTOR as u32;
            let offset = u64::from(range.start) * SECTOR as u64;
            requests.push(Nbd::write(offset, bytes, data.as_deref()));
            let stamp = if zero { 0 } else { stamp };
            let (sent, done, flushed) = (clock.now(), NEVER, NEVER);
            log.0.push(Write { sectors: range, stamp, sent, done, flushed });
        }
        if client.send(&requests).is_err() {
            break;
        }
        let done = clock.now();
        log.0[first..].iter_mut().for_each(|write| write.done = done);
        if rng.random_ratio(1, 2) {
            if client.flush().is_err() {
                break;
            }
            let flushed = clock.now();
            let open = log.0.iter_mut().rev().take_while(|write| write.flushed == NEVER);
            open.for_each(|write| write.flushed = flushed);
        }
    }
    log
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
            let whole = sector
                .chunks_exact(8)
                .all(|chunk| word(&chunk[..4]) == stamp && word(&chunk[4..]) == expected);
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
    /// Only flushes count.
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
    for write in logs.iter().flat_map(|log| &log.0) {
        let done = if window.flushed { write.flushed } else { write.done };
        for sector in write.sectors.clone().map(|sector| sector as usize) {
            if done < window.from {
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
