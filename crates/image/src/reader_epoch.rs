//! When a freed cluster may be used again.
//!
//! A [`WaitGroup`](isobath_sync::WaitGroup) is not enough: every read is counted, so each thread has its own counters,
//! and a drain waits for the requests before it while later ones enter without waiting. The gate of
//! `isobath_disk::LiveDisk` counts in the same way but keeps new requests out, so it needs no epochs.

use crate::per_thread::PerThread;
use crate::sabotage::{self, Sabotage};
use crate::{lock_order, violated};
use isobath_sync::AsyncMutex;
use isobath_sync::Condition;
use isobath_sync::atomic::{AtomicU64, Ordering};
use isobath_sync::order::Held;

/// Counts the requests that may still use an old mapping.
///
/// A request enters before it looks up a mapping and leaves when its I/O is done. A cluster whose mapping is gone can
/// be reused after [`drain`](ReaderEpoch::drain): by then every request that may have seen the mapping has left.
/// Requests never wait here.
///
/// Requests are counted by the parity of the epoch in which they entered. A drain begins the next epoch and waits for
/// the requests of the one that ended. Drains take turns: two concurrent drains would each wait for the requests of the
/// other's epoch.
#[derive(Default)]
pub struct ReaderEpoch {
    epoch: AtomicU64,
    inside: PerThread<[AtomicU64; 2]>,
    left: Condition,
    draining: AsyncMutex<()>,
}

/// A request's stay; ends when dropped.
pub struct Pass<'a> {
    readers: &'a ReaderEpoch,
    inside: &'a AtomicU64,
    epoch: u64,
    _held: Option<Held>,
}

impl ReaderEpoch {
    /// Lets a request in.
    pub fn enter(&self) -> Pass<'_> {
        let (_, sides) = self.inside.mine();
        loop {
            let epoch = self.epoch.load(Ordering::SeqCst);
            let inside = &sides[(epoch & 1) as usize];
            inside.fetch_add(1, Ordering::SeqCst);
            let held = Held::across_awaits(Some(lock_order::READERS));
            let pass = Pass { readers: self, inside, epoch, _held: held };
            // A drain that began in between may not have counted this request: retry in the new epoch.
            if self.epoch.load(Ordering::SeqCst) == epoch {
                return pass;
            }
        }
    }

    /// Waits until every request has left that was inside when this was called.
    pub async fn drain(&self) {
        let at_once = sabotage::is(Sabotage::DrainsAtOnce);
        let _held = Held::across_awaits(Some(lock_order::DRAIN));
        let _turn = if at_once { None } else { Some(self.draining.lock().await) };
        let ending = self.epoch.load(Ordering::SeqCst);
        if !at_once {
            // Requests of the previous epoch remain if its drain was cancelled.
            self.empty(ending + 1).await;
        }
        let ended = self.epoch.swap(ending + 1, Ordering::SeqCst);
        if ended != ending && !at_once {
            violated("one drain at a time ends an epoch");
        }
        self.empty(ending).await;
    }

    /// Waits until no request is inside that entered in an epoch of this parity, which is not that of the current one:
    /// no request enters there, except one that retries and leaves at once.
    async fn empty(&self, epoch: u64) {
        let side = (epoch & 1) as usize;
        let empty = || self.inside.all().all(|sides| sides[side].load(Ordering::SeqCst) == 0);
        self.left.until(empty).await;
    }
}

impl Drop for Pass<'_> {
    #[inline]
    fn drop(&mut self) {
        let inside = self.inside.fetch_sub(1, Ordering::SeqCst);
        if inside == 0 {
            violated("a request leaves where it entered");
        }
        let last = inside == 1;
        // A drain that begins after this load sees the current count.
        if last && self.readers.epoch.load(Ordering::SeqCst) != self.epoch {
            self.readers.left.changed();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    #[test]
    fn a_drain_waits_for_those_inside_and_not_for_later_ones() {
        let readers = ReaderEpoch::default();
        let mut context = Context::from_waker(Waker::noop());
        let early = readers.enter();
        let mut drain = pin!(readers.drain());
        assert_eq!(drain.as_mut().poll(&mut context), Poll::Pending);
        let _late = readers.enter();
        assert_eq!(drain.as_mut().poll(&mut context), Poll::Pending);
        drop(early);
        assert_eq!(drain.as_mut().poll(&mut context), Poll::Ready(()));
    }

    #[test]
    fn a_drain_beside_another_waits_for_all_that_were_inside_before_it() {
        let readers = ReaderEpoch::default();
        let mut context = Context::from_waker(Waker::noop());
        let early = readers.enter();
        let mut first = pin!(readers.drain());
        assert_eq!(first.as_mut().poll(&mut context), Poll::Pending);
        let late = readers.enter();
        let mut second = pin!(readers.drain());
        assert_eq!(second.as_mut().poll(&mut context), Poll::Pending);
        drop(late);
        // The early one has not left.
        assert_eq!(second.as_mut().poll(&mut context), Poll::Pending);
        assert_eq!(first.as_mut().poll(&mut context), Poll::Pending);
        drop(early);
        assert_eq!(first.as_mut().poll(&mut context), Poll::Ready(()));
        assert_eq!(second.as_mut().poll(&mut context), Poll::Ready(()));
    }

    #[test]
    fn a_drain_after_one_that_was_given_up_waits_for_the_same_requests() {
        let readers = ReaderEpoch::default();
        let mut context = Context::from_waker(Waker::noop());
        let early = readers.enter();
        {
            let mut given_up = pin!(readers.drain());
            assert_eq!(given_up.as_mut().poll(&mut context), Poll::Pending);
        }
        let mut drain = pin!(readers.drain());
        assert_eq!(drain.as_mut().poll(&mut context), Poll::Pending);
        drop(early);
        assert_eq!(drain.as_mut().poll(&mut context), Poll::Ready(()));
    }

    #[test]
    #[should_panic(expected = "one drain at a time ends an epoch")]
    fn an_epoch_that_something_else_ends_is_noticed() {
        let readers = ReaderEpoch::default();
        let mut context = Context::from_waker(Waker::noop());
        let early = readers.enter();
        {
            let mut given_up = pin!(readers.drain());
            assert_eq!(given_up.as_mut().poll(&mut context), Poll::Pending);
        }
        let mut drain = pin!(readers.drain());
        assert_eq!(drain.as_mut().poll(&mut context), Poll::Pending);
        readers.epoch.store(7, Ordering::SeqCst);
        drop(early);
        let _ = drain.as_mut().poll(&mut context);
    }

    #[test]
    fn an_empty_epoch_drains_at_once() {
        let readers = ReaderEpoch::default();
        for _ in 0..3 {
            drop(readers.enter());
            let mut drain = pin!(readers.drain());
            let polled = drain.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            assert_eq!(polled, Poll::Ready(()));
        }
    }

    #[test]
    #[should_panic(expected = "a request leaves where it entered")]
    fn a_request_that_leaves_elsewhere_is_noticed() {
        let (readers, elsewhere) = (ReaderEpoch::default(), AtomicU64::new(0));
        drop(Pass { readers: &readers, inside: &elsewhere, epoch: 0, _held: None });
    }
}

#[cfg(all(test, loom))]
mod interleavings {
    use super::*;
    use futures_util::FutureExt;
    use isobath_sync::{Cell, explore, explore_within, wait};

    /// A cluster, and whether a mapping names it.
    struct Cluster {
        mapped: AtomicU64,
        content: Cell<u8>,
    }

    struct Disk {
        readers: ReaderEpoch,
        clusters: [Cluster; 2],
    }

    fn disk() -> Disk {
        let cluster = || Cluster { mapped: AtomicU64::new(1), content: Cell::new(0) };
        Disk { readers: ReaderEpoch::default(), clusters: [cluster(), cluster()] }
    }

    /// A request reads a cluster that it finds mapped.
    fn read(disk: &Disk, number: usize) {
        let _pass = disk.readers.enter();
        let Cluster { mapped, content } = &disk.clusters[number];
        if mapped.load(Ordering::Acquire) == 1 {
            assert_eq!(content.get(), 0, "the cluster belongs to somebody else");
        }
    }

    /// A commit frees a cluster, and a write takes it.
    fn reuse(disk: &Disk, number: usize) {
        let Cluster { mapped, content } = &disk.clusters[number];
        mapped.store(0, Ordering::Release);
        wait(disk.readers.drain());
        content.set(1);
    }

    #[test]
    fn no_cluster_is_used_again_while_a_request_reads_it() {
        let name = "ReaderEpoch, a drain and two requests";
        explore(name, 2, disk, &[|d| reuse(d, 0), |d| read(d, 0), |d| read(d, 0)], |_| ());
    }

    #[test]
    fn drains_follow_one_another() {
        let tasks: &[fn(&Disk)] = &[|d| [0, 1].iter().for_each(|n| reuse(d, *n)), |d| read(d, 1)];
        explore("ReaderEpoch, a drain after another and a request", 3, disk, tasks, |_| ());
    }

    #[test]
    fn two_drains_at_once_wait_for_those_inside() {
        let name = "ReaderEpoch, two drains at once and a request";
        explore(name, 2, disk, &[|d| reuse(d, 0), |d| reuse(d, 1), |d| read(d, 1)], |_| ());
    }

    #[test]
    #[should_panic(expected = "Concurrent read and write accesses")]
    fn drains_that_do_not_take_turns_are_found() {
        let _broken = Sabotage::DrainsAtOnce.begin();
        let name = "ReaderEpoch with a defect, two drains at once and a request";
        explore_within(
            name,
            Some(2),
            disk,
            &[|d| reuse(d, 0), |d| reuse(d, 1), |d| read(d, 1)],
            |_| (),
        );
    }

    #[test]
    fn a_drain_that_is_given_up_is_made_up_for_by_the_next() {
        let tasks: &[fn(&Disk)] = &[
            |disk| {
                let Cluster { mapped, content } = &disk.clusters[0];
                mapped.store(0, Ordering::Release);
                if disk.readers.drain().now_or_never().is_some() {
                    content.set(1);
                }
            },
            |disk| (0..2).for_each(|_| reuse(disk, 1)),
            |disk| read(disk, 1),
        ];
        explore("ReaderEpoch, a drain given up, two drains and a request", 2, disk, tasks, |_| ());
    }
}
