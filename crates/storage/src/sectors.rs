//! A file that holds ciphertext, as a file of what it stands for.
//!
//! A cipher works on sectors of 512 bytes, each by its number. A change of a part of a sector reads the rest of it
//! first. Meanwhile nobody else may use the sector: another change would be lost, and a read could find the sector
//! torn, of which not only the changed bytes would be wrong. `SectorLocks` sees to that.

use crate::Result;
use crate::SECTOR;
use parking_lot::Mutex;
use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};

/// Encrypts and decrypts sectors of 512 bytes.
pub trait SectorCipher: fmt::Debug + Send + Sync {
    /// Encrypts whole sectors in place, of which the first has this number.
    fn encrypt(&self, sector: u64, bytes: &mut [u8]);

    /// Decrypts whole sectors in place, of which the first has this number.
    fn decrypt(&self, sector: u64, bytes: &mut [u8]);
}

/// The encryption of a file.
#[derive(Debug)]
pub(crate) struct Sectors {
    /// `None` if it is not known: nothing is read or written.
    pub(crate) cipher: Option<Arc<dyn SectorCipher>>,
    pub(crate) locks: SectorLocks,
    /// Bytes when last asked.
    length: AtomicU64,
}

impl Sectors {
    pub(crate) fn new(cipher: Option<Arc<dyn SectorCipher>>, length: u64) -> Self {
        Self { cipher, locks: SectorLocks::default(), length: AtomicU64::new(length) }
    }

    /// Where the last sector ends, which may be longer than the file.
    pub(crate) fn end(&self) -> u64 {
        self.length.load(Ordering::Acquire).next_multiple_of(SECTOR)
    }

    /// A write has made the file at least this long.
    pub(crate) fn extend_to(&self, length: u64) {
        self.length.fetch_max(length, Ordering::AcqRel);
    }

    pub(crate) fn set_length(&self, length: u64) {
        self.length.store(length, Ordering::Release);
    }
}

/// The sectors that a range of bytes touches, in bytes.
pub(crate) fn around(range: &Range<u64>) -> Range<u64> {
    range.start / SECTOR * SECTOR..range.end.next_multiple_of(SECTOR)
}

/// The sectors in use by requests. Those that change a part of a sector have theirs to themselves; all others share.
///
/// A request waits for every earlier one that it cannot share with, held or still waiting, so none starves. Cost is
/// linear in the number of requests in flight.
#[derive(Debug, Default)]
pub(crate) struct SectorLocks(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    next_ticket: u64,
    uses: Vec<Use>,
}

#[derive(Debug)]
struct Use {
    ticket: u64,
    range: Range<u64>,
    alone: bool,
    /// Earlier uses that this one waits for.
    blockers: usize,
    waker: Option<Waker>,
}

impl Use {
    fn excludes(&self, range: &Range<u64>, alone: bool) -> bool {
        (self.alone || alone) && self.range.start < range.end && range.start < self.range.end
    }
}

impl SectorLocks {
    /// Waits for the use of a range of sectors, `alone` or with others. It ends when the guard is dropped.
    pub(crate) fn lock(&self, range: Range<u64>, alone: bool) -> SectorLock<'_> {
        let mut state = self.0.lock();
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        let blockers = state.uses.iter().filter(|other| other.excludes(&range, alone)).count();
        state.uses.push(Use { ticket, range, alone, blockers, waker: None });
        SectorLock(Some(SectorGuard { locks: self, ticket }))
    }
}

/// A wait for sectors.
pub(crate) struct SectorLock<'a>(Option<SectorGuard<'a>>);

impl<'a> Future for SectorLock<'a> {
    type Output = SectorGuard<'a>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<SectorGuard<'a>> {
        if let Some(SectorGuard { locks, ticket }) = &self.0 {
            let mut state = locks.0.lock();
            if let Some(own) = state.uses.iter_mut().find(|other| other.ticket == *ticket)
                && own.blockers > 0
            {
                own.waker = Some(context.waker().clone());
                return Poll::Pending;
            }
        }
        self.0.take().map_or(Poll::Pending, Poll::Ready)
    }
}

/// The use of sectors.
pub(crate) struct SectorGuard<'a> {
    locks: &'a SectorLocks,
    ticket: u64,
}

impl Drop for SectorGuard<'_> {
    fn drop(&mut self) {
        let mut state = self.locks.0.lock();
        let Some(at) = state.uses.iter().position(|own| own.ticket == self.ticket) else { return };
        let gone = state.uses.swap_remove(at);
        for later in state.uses.iter_mut().filter(|other| other.ticket > gone.ticket) {
            if gone.excludes(&later.range, later.alone) {
                later.blockers -= 1;
                if later.blockers == 0
                    && let Some(waker) = later.waker.take()
                {
                    waker.wake();
                }
            }
        }
    }
}

/// What a storage says that has no way to keep ciphertext.
pub(crate) fn unsupported<T>(name: &std::path::Path) -> Result<T> {
    let text = "this storage does not encrypt files; open the image through a WindowHost";
    let error = std::io::Error::new(std::io::ErrorKind::Unsupported, text);
    Err(crate::StorageError::new(crate::Operation::Open, name, error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;

    fn ready<'a>(lock: &mut Pin<&mut SectorLock<'a>>) -> Option<SectorGuard<'a>> {
        match lock.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(guard) => Some(guard),
            Poll::Pending => None,
        }
    }

    #[test]
    fn who_changes_a_part_of_a_sector_has_it_alone() {
        let locks = SectorLocks::default();
        let mut one = pin!(locks.lock(0..1024, false));
        let mut other = pin!(locks.lock(512..2048, false));
        let mut part = pin!(locks.lock(512..1024, true));
        let mut late = pin!(locks.lock(0..1024, false));
        let mut apart = pin!(locks.lock(2048..4096, true));
        let (first, second) = (ready(&mut one), ready(&mut other));
        assert!(first.is_some() && second.is_some());
        assert!(ready(&mut part).is_none());
        assert!(ready(&mut late).is_none(), "it overlaps one that still waits");
        assert!(ready(&mut apart).is_some());
        drop(first);
        assert!(ready(&mut part).is_none());
        drop(second);
        let alone = ready(&mut part);
        assert!(alone.is_some());
        assert!(ready(&mut late).is_none());
        drop(alone);
        assert!(ready(&mut late).is_some());
        assert!(locks.0.lock().uses.is_empty());
    }

    #[test]
    fn a_wait_given_up_lets_others_pass() {
        let locks = SectorLocks::default();
        let mut one = pin!(locks.lock(0..512, true));
        let held = ready(&mut one);
        let waiting = locks.lock(0..512, true);
        let mut last = pin!(locks.lock(0..512, false));
        drop(waiting);
        assert!(ready(&mut last).is_none());
        drop(held);
        assert!(ready(&mut last).is_some());
    }

    #[test]
    fn sectors_are_whole() {
        assert_eq!(around(&(0..1)), 0..512);
        assert_eq!(around(&(511..513)), 0..1024);
        assert_eq!(around(&(512..1024)), 512..1024);
    }
}
