//! Limits on the requests of disks: bytes and requests per second, with bursts, for one disk or a group of disks.
//!
//! The limits are QEMU's, with its meanings (its `docs/throttle.txt`): leaky buckets that all disks of a group fill,
//! and the disks of a group take turns. Reads and writes count, zero-writes and discards as writes; flushes and
//! queries do not.
//!
//! A request that must wait does so before it reaches the disk: a frontend asks [`Throttle`]
//! ([`BlockDevice::admit`](crate::BlockDevice::admit)), once for each request of a client, in how many pieces ever it
//! is carried out. While it waits it holds no lock and no buffer, is not inside the gate, and is not counted as in
//! flight, so no change of the chain, job or flush waits for it. Whoever must wait for the requests of a frontend to
//! end lets them pass meanwhile ([`Throttle::drain`]).

mod bucket;
mod group;
mod limits;
#[cfg(test)]
mod tests;

pub use group::{Group, Groups};
pub use limits::{Limit, LimitKind, Limits, LimitsError};

use group::{MemberId, Outcome};
use isobath_sync::Mutex;
use isobath_sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::fmt;
use std::sync::Arc;

/// The two directions that limits distinguish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Reads.
    Read,
    /// Writes, zero-writes and discards.
    Write,
}

impl Direction {
    const ALL: [Self; 2] = [Self::Read, Self::Write];

    const fn other(self) -> Self {
        match self {
            Self::Read => Self::Write,
            Self::Write => Self::Read,
        }
    }
}

/// A disk's membership in a group.
struct Member {
    group: Arc<Group>,
    id: MemberId,
}

impl Drop for Member {
    fn drop(&mut self) {
        self.group.leave(self.id);
    }
}

/// What a disk shares with its requests that wait.
#[derive(Default)]
struct Shared {
    member: Mutex<Option<Arc<Member>>>,
    /// While it is not 0, no request waits.
    drains: AtomicUsize,
}

/// The limits of one disk; none at first.
#[derive(Default)]
pub struct Throttle {
    /// Whether the disk is in a group: all that a request looks at if it is not.
    limited: AtomicBool,
    shared: Arc<Shared>,
}

/// While it exists, requests of a disk pass without waiting for its limits. They are still counted.
#[must_use = "requests wait again once it is dropped"]
#[derive(Default)]
pub struct Drained(Option<Arc<Shared>>);

impl fmt::Debug for Drained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Drained").field(&self.0.is_some()).finish()
    }
}

impl Drop for Drained {
    fn drop(&mut self) {
        if let Some(shared) = &self.0 {
            shared.drains.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

impl Throttle {
    /// Whether requests are counted, and may have to wait.
    #[inline]
    fn is_limited(&self) -> bool {
        self.limited.load(Ordering::Relaxed)
    }

    /// The group that the disk is in.
    pub fn group(&self) -> Option<Arc<Group>> {
        self.shared.member.lock().as_ref().map(|member| Arc::clone(&member.group))
    }

    /// Puts the disk into a group, or into none. Requests that wait then wait in the new group, or pass.
    pub fn set_group(&self, group: Option<Arc<Group>>) {
        let member = group.map(|group| {
            let id = group.join();
            Arc::new(Member { group, id })
        });
        let left = {
            let mut current = self.shared.member.lock();
            self.limited.store(member.is_some(), Ordering::Relaxed);
            std::mem::replace(&mut *current, member)
        };
        if let Some(left) = left {
            // A request that has just looked it up still holds it.
            left.group.leave(left.id);
        }
    }

    /// Lets all requests pass, those that wait too, until the returned value is dropped. They are counted, so later
    /// ones wait for longer.
    pub fn drain(&self) -> Drained {
        let shared = &self.shared;
        shared.drains.fetch_add(1, Ordering::SeqCst);
        // A request that begins to wait after this has seen the count, in the group's lock.
        let member = shared.member.lock().clone();
        if let Some(member) = member {
            member.group.release(member.id);
        }
        Drained(Some(Arc::clone(shared)))
    }

    /// The requests that wait.
    pub fn waiting(&self) -> usize {
        let member = self.shared.member.lock().clone();
        member.map_or(0, |member| member.group.waiting(member.id))
    }

    /// Waits until the limits let a request of `bytes` bytes pass, and counts it. A request whose future is dropped
    /// while it waits is not counted.
    pub async fn admit(&self, direction: Direction, bytes: u64) {
        if self.is_limited() {
            Box::pin(self.pass(direction, bytes)).await;
        }
    }

    async fn pass(&self, direction: Direction, bytes: u64) {
        loop {
            let Some(member) = self.shared.member.lock().clone() else { return };
            let request = (direction, bytes);
            match member.group.enter(member.id, request, &self.shared.drains).await {
                Outcome::Passed => return,
                // The disk has been moved to another group.
                Outcome::Left => {}
            }
        }
    }
}
