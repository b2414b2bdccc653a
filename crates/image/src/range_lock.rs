//! Ordering of requests that change overlapping parts of a disk.

use crate::sabotage::{self, Sabotage};
use crate::{lock_order, violated};
use isobath_sync::order::{Held, Rank};
use isobath_sync::{CheckedMutex, Invariants};
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

/// Gives requests exclusive use of ranges of guest bytes, first come, first served.
///
/// A request waits for every earlier one that it overlaps, held or still waiting, so overlapping
/// requests proceed in the order of their arrival and none starves. Cost is linear in the number of
/// requests in flight.
#[derive(Default)]
pub struct RangeLocks {
    state: CheckedMutex<LockState>,
    rank: Option<Rank>,
}

#[derive(Default)]
struct LockState {
    next_ticket: u64,
    entries: Vec<Entry>,
}

struct Entry {
    ticket: u64,
    range: Range<u64>,
    /// Earlier overlapping entries that still exist; the range is held when there are none.
    blockers: usize,
    waker: Option<Waker>,
}

impl Invariants for LockState {
    const RANK: Option<Rank> = Some(lock_order::WAITING);

    fn check_invariants(&self) {
        for entry in self.entries.iter().take(MOST_EXAMINED) {
            if entry.ticket >= self.next_ticket {
                violated("each request has a ticket");
            }
            let before = |e: &&Entry| e.ticket < entry.ticket && overlap(&e.range, &entry.range);
            if self.entries.iter().filter(before).count() != entry.blockers {
                violated("a request waits for each earlier one that it overlaps");
            }
        }
    }
}

/// Requests of which the invariants are checked.
const MOST_EXAMINED: usize = 16;

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

impl RangeLocks {
    /// Locks with a place in the order of locks.
    pub fn ranked(rank: Rank) -> Self {
        Self { rank: Some(rank), ..Self::default() }
    }

    /// Waits for the range. It is released when the guard is dropped.
    pub fn lock(&self, range: Range<u64>) -> RangeLock<'_> {
        let held = Held::across_awaits(self.rank);
        let mut state = self.state.lock();
        let ticket = state.next_ticket;
        state.next_ticket += 1;
        let blockers = state.entries.iter().filter(|e| overlap(&e.range, &range)).count();
        state.entries.push(Entry { ticket, range, blockers, waker: None });
        RangeLock { guard: Some(RangeGuard { locks: self, ticket, _held: held }) }
    }
}

/// A wait for a range.
pub struct RangeLock<'a> {
    guard: Option<RangeGuard<'a>>,
}

impl<'a> Future for RangeLock<'a> {
    type Output = RangeGuard<'a>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<RangeGuard<'a>> {
        if let Some(guard) = &self.guard {
            let mut state = guard.locks.state.lock();
            let entry = state.entries.iter_mut().find(|e| e.ticket == guard.ticket);
            let Some(entry) = entry else { violated("a request that waits for a range is listed") };
            if entry.blockers > 0 && !sabotage::is(Sabotage::NoRangeLocks) {
                entry.waker = Some(context.waker().clone());
                return Poll::Pending;
            }
        }
        self.guard.take().map_or(Poll::Pending, Poll::Ready)
    }
}

/// Exclusive use of a range of guest bytes.
pub struct RangeGuard<'a> {
    locks: &'a RangeLocks,
    ticket: u64,
    _held: Option<Held>,
}

impl Drop for RangeGuard<'_> {
    fn drop(&mut self) {
        let mut state = self.locks.state.lock();
        let Some(position) = state.entries.iter().position(|e| e.ticket == self.ticket) else {
            violated("a range that is held is listed");
        };
        let gone = state.entries.swap_remove(position);
        for entry in &mut state.entries {
            if entry.ticket > gone.ticket && overlap(&entry.range, &gone.range) {
                entry.blockers -= 1;
                if entry.blockers == 0
                    && let Some(waker) = entry.waker.take()
                {
                    waker.wake();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broken::{assert_violated, must_panic};
    use std::pin::pin;

    fn ready<'a>(lock: &mut Pin<&mut RangeLock<'a>>) -> Option<RangeGuard<'a>> {
        match lock.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(guard) => Some(guard),
            Poll::Pending => None,
        }
    }

    #[test]
    fn overlapping_requests_go_in_order_of_arrival() {
        let locks = RangeLocks::default();
        let mut first = pin!(locks.lock(0..10));
        let mut second = pin!(locks.lock(5..15));
        let mut third = pin!(locks.lock(12..20));
        let mut apart = pin!(locks.lock(20..30));
        let held = ready(&mut first);
        assert!(held.is_some());
        assert!(ready(&mut second).is_none());
        assert!(ready(&mut third).is_none(), "it overlaps one that still waits");
        assert!(ready(&mut apart).is_some());
        drop(held);
        let held = ready(&mut second);
        assert!(held.is_some());
        assert!(ready(&mut third).is_none());
        drop(held);
        assert!(ready(&mut third).is_some());
    }

    #[test]
    fn a_wait_given_up_lets_others_pass() {
        let locks = RangeLocks::default();
        let mut first = pin!(locks.lock(0..10));
        let held = ready(&mut first);
        let second = locks.lock(5..15);
        let mut third = pin!(locks.lock(12..20));
        drop(second);
        assert!(ready(&mut third).is_some());
        drop(held);
        assert!(locks.state.lock().entries.is_empty());
    }

    #[test]
    fn broken_locks_are_noticed() {
        let entry = |ticket, blockers| Entry { ticket, range: 0..10, blockers, waker: None };
        let state = || LockState { next_ticket: 2, entries: vec![entry(0, 0), entry(1, 1)] };
        assert_violated("has a ticket", state(), |state| state.next_ticket = 1);
        assert_violated("waits for each", state(), |state| state.entries[1].blockers = 0);
        assert_violated("waits for each", state(), |state| {
            state.entries.remove(0);
        });
    }

    #[test]
    fn who_waits_for_a_range_or_holds_it_is_listed() {
        let locks = RangeLocks::default();
        let mut lock = pin!(locks.lock(0..10));
        locks.state.lock().entries.clear();
        let waits = || drop(ready(&mut lock));
        must_panic(waits, "a request that waits for a range is listed");
        let guard = lock.guard.take().unwrap();
        must_panic(|| drop(guard), "a range that is held is listed");
    }
}

#[cfg(all(test, loom))]
mod interleavings {
    use super::*;
    use futures_util::FutureExt;
    use isobath_sync::{Cell, explore, wait};

    struct Disk {
        locks: RangeLocks,
        bytes: [Cell<u8>; 4],
    }

    fn disk() -> Disk {
        Disk { locks: RangeLocks::default(), bytes: [0; 4].map(Cell::new) }
    }

    fn change(disk: &Disk, range: Range<u64>) {
        for byte in &disk.bytes[range.start as usize..range.end as usize] {
            byte.set(byte.get() + 1);
        }
    }

    fn write(disk: &Disk, range: Range<u64>) {
        let _held = wait(disk.locks.lock(range.clone()));
        change(disk, range);
    }

    /// Waits briefly, then cancels.
    fn give_up(disk: &Disk, range: Range<u64>) {
        if let Some(_held) = disk.locks.lock(range.clone()).now_or_never() {
            change(disk, range);
        }
    }

    fn all_is_released(disk: &Disk) {
        assert!(disk.locks.state.lock().entries.is_empty());
    }

    #[test]
    fn a_range_is_held_by_one() {
        let tasks: &[fn(&Disk)] = &[|d| write(d, 0..2), |d| write(d, 1..3), |d| write(d, 2..4)];
        explore("RangeLocks, three writes in a row", 3, disk, tasks, |disk| {
            assert_eq!(disk.bytes.each_ref().map(Cell::get), [1, 2, 2, 1]);
            all_is_released(disk);
        });
    }

    #[test]
    fn a_wait_that_is_given_up_holds_nobody() {
        let tasks: &[fn(&Disk)] = &[|d| write(d, 0..3), |d| give_up(d, 1..4), |d| write(d, 2..4)];
        explore("RangeLocks, two writes and one given up", 3, disk, tasks, all_is_released);
    }

    #[test]
    fn two_apart_and_two_over_all() {
        let tasks: &[fn(&Disk)] =
            &[|d| give_up(d, 0..4), |d| write(d, 0..1), |d| write(d, 0..4), |d| write(d, 3..4)];
        explore("RangeLocks, four requests", 2, disk, tasks, all_is_released);
    }
}
