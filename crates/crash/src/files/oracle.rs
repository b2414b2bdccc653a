//! What clients wrote and what they were promised, which determines what each sector may hold after a crash.

use isobath_storage_test::recorder;
use isobath_testkit::bytes::first_other_than;
use std::sync::atomic::{AtomicU64, Ordering};

/// The granularity of promises.
pub const SECTOR: usize = 512;
/// The write number of the disk's initial contents, if it was filled.
pub const BEFORE: u64 = 1;

/// A moment, by the clients' clock and in the server's record.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    order: u64,
    /// Entries of the record: at most this many when a request was sent, at least this many when it completed.
    position: usize,
}

/// The clients' common clock.
pub struct Clock {
    order: AtomicU64,
    record: recorder::Record,
}

impl Clock {
    /// A clock for a record.
    pub fn new(record: recorder::Record) -> Self {
        Self { order: AtomicU64::new(0), record }
    }

    /// Call this before a request is sent, and after its reply was received.
    pub fn now(&self) -> Moment {
        let position = self.record.len();
        Moment { order: self.order.fetch_add(1, Ordering::SeqCst), position }
    }
}

/// A client's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Sectors [`fill`]ed with this number.
    Write(u64),
    /// Zeroes.
    Zero,
    /// Zeroes, or the old contents.
    Discard,
    /// Everything before it becomes durable.
    Flush,
}

/// A completed request.
#[derive(Clone, Debug)]
pub struct Completed {
    /// Its kind.
    pub what: What,
    /// The first sector.
    pub sector: usize,
    /// The number of sectors.
    pub count: usize,
    /// Before it was sent.
    pub sent: Moment,
    /// After it completed.
    pub answered: Moment,
}

/// Words of a sector that look random; in three of four writes the other words are equal, so that the sector
/// compresses.
const RANDOM: usize = 24;

/// Fills sectors from number `first` on with bytes that identify write and sector.
pub fn fill(bytes: &mut [u8], number: u64, first: usize) {
    for (at, sector) in bytes.chunks_mut(SECTOR).enumerate() {
        let place = (first + at) as u64;
        let mut state = number.rotate_left(32) ^ place.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        for (word, place_in) in sector.chunks_mut(8).enumerate() {
            let value = match word {
                0 => number,
                1 => place,
                RANDOM.. if !number.is_multiple_of(4) => !number,
                _ => {
                    state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
                    (state ^ (state >> 31)).wrapping_mul(0xBF58_476D_1CE4_E5B9)
                }
            };
            place_in.copy_from_slice(&value.to_be_bytes()[..place_in.len()]);
        }
    }
}

/// Whether these bytes are a sector from [`fill`], of any write to any sector.
pub fn is_filled(sector: &[u8]) -> bool {
    let place = sector.get(8..16).and_then(|bytes| bytes.try_into().ok()).map(u64::from_be_bytes);
    place.is_some_and(|place| number(sector, place as usize).is_some())
}

/// The number of the write whose bytes these are.
fn number(sector: &[u8], place: usize) -> Option<u64> {
    let number = u64::from_be_bytes(*sector.first_chunk()?);
    let mut whole = [0; SECTOR];
    fill(&mut whole, number, place);
    (number >= BEFORE && whole == sector).then_some(number)
}

/// All requests, and what follows from them.
pub struct Sectors {
    requests: Vec<Completed>,
    /// For each sector, the requests that change it, in the order in which they were sent.
    of: Vec<Vec<u32>>,
    /// Whether the disk was filled with [`BEFORE`]; with zeroes otherwise.
    filled: bool,
}

impl Sectors {
    /// From the requests of all clients.
    pub fn new(mut requests: Vec<Completed>, sectors: usize, filled: bool) -> Self {
        requests.sort_by_key(|request| request.sent.order);
        let mut of = vec![Vec::new(); sectors];
        for (index, request) in requests.iter().enumerate() {
            if request.what != What::Flush {
                for sector in &mut of[request.sector..request.sector + request.count] {
                    sector.push(index as u32);
                }
            }
        }
        Self { requests, of, filled }
    }

    /// Checks a disk's contents after a crash at which the record had `position` entries.
    ///
    /// If a flush completed before the crash, then each write that completed before that flush was sent is there, or
    /// something sent after it.
    pub fn check(&self, position: usize, disk: &[u8]) -> Result<(), String> {
        let flushed = self
            .requests
            .iter()
            .filter(|flush| flush.what == What::Flush && flush.answered.position <= position)
            .map(|flush| flush.sent.order)
            .max()
            .unwrap_or(0);
        if disk.len() != self.of.len() * SECTOR {
            return Err(format!("the disk has {} bytes", disk.len()));
        }
        for (place, (sector, changes)) in disk.chunks(SECTOR).zip(&self.of).enumerate() {
            let requests = || changes.iter().map(|index| &self.requests[*index as usize]);
            let promised = requests()
                .filter(|one| one.what != What::Discard && one.answered.order < flushed)
                .map(|one| one.sent.order)
                .max();
            let may_be = |one: &&Completed| {
                one.sent.position <= position && promised.is_none_or(|by| one.answered.order >= by)
            };
            let mut allowed = requests().filter(may_be);
            let found = if first_other_than(0, sector).is_none() {
                None
            } else if let Some(number) = number(sector, place) {
                Some(number)
            } else {
                return Err(format!("sector {place} holds what nobody wrote there: {sector:x?}"));
            };
            let as_before = promised.is_none() && found == self.filled.then_some(BEFORE);
            let is_there = allowed.any(|one| match (one.what, found) {
                (What::Write(number), Some(found)) => number == found,
                (What::Zero | What::Discard, None) => true,
                _ => false,
            });
            if !as_before && !is_there {
                let found = found.map_or("zeroes".into(), |number| format!("write {number}"));
                let told: Vec<String> =
                    requests().map(|one| format!("\n    {}", one.tell())).collect();
                return Err(format!(
                    "sector {place} holds {found}, but a flush sent at {flushed} was answered \
                     before the crash (entry {position}); its requests:{}",
                    told.concat()
                ));
            }
        }
        Ok(())
    }
}

impl Completed {
    fn tell(&self) -> String {
        format!(
            "{:?} sent {} (entry {}) answered {} (entry {})",
            self.what,
            self.sent.order,
            self.sent.position,
            self.answered.order,
            self.answered.position
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moment(order: u64, position: usize) -> Moment {
        Moment { order, position }
    }

    fn disk(sectors: [u64; 2]) -> Vec<u8> {
        let mut disk = vec![0; 2 * SECTOR];
        for (place, number) in sectors.into_iter().enumerate().filter(|(_, number)| *number > 0) {
            fill(&mut disk[place * SECTOR..][..SECTOR], number, place);
        }
        disk
    }

    #[test]
    fn flushed_writes_and_later_ones_are_allowed() {
        let request =
            |what, count, sent, answered| Completed { what, sector: 0, count, sent, answered };
        let requests = vec![
            request(What::Write(2), 2, moment(0, 0), moment(1, 1)),
            request(What::Flush, 0, moment(2, 1), moment(3, 3)),
            request(What::Write(3), 1, moment(4, 3), moment(5, 4)),
            request(What::Zero, 2, moment(6, 4), moment(7, 5)),
        ];
        let sectors = Sectors::new(requests, 2, false);
        let allowed = |position, held| sectors.check(position, &disk(held)).is_ok();
        // Before the flush completes: each sector as before, or written.
        assert!(allowed(2, [0, 2]) && allowed(2, [2, 0]) && allowed(2, [2, 2]));
        assert!(!allowed(2, [3, 2]), "from the future");
        // After it: the write, or what was sent later.
        assert!(allowed(3, [2, 2]) && allowed(3, [3, 2]));
        assert!(!allowed(3, [2, 0]), "a flushed write is lost");
        assert!(!allowed(3, [2, 3]), "not written there");
        assert!(allowed(4, [0, 2]) && allowed(4, [3, 0]));
        let mut torn = disk([2, 2]);
        torn[100] ^= 1;
        assert!(sectors.check(4, &torn).is_err());
        assert!(is_filled(&disk([2, 2])[SECTOR..]) && !is_filled(&torn[..SECTOR]));
    }
}
