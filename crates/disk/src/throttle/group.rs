//! Disks that share limits.

use super::Direction;
use super::bucket::{Bucket, UNIT};
use super::limits::{LimitKind, Limits};
use crate::clock::Clock;
use isobath_sync::Mutex;
use isobath_sync::atomic::{AtomicUsize, Ordering};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// The longest time between two looks at the limits, so that no timer is set for a time that no clock reaches.
const LONGEST_WAIT: u128 = 3600 * UNIT;

/// A disk in a group.
pub(super) type MemberId = u64;
/// A request that waits.
type Ticket = u64;
/// Those to wake once the lock is released.
type Wakers = SmallVec<[Waker; 4]>;

/// How a request's wait ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It may pass, and is counted.
    Passed,
    /// Its disk has left the group.
    Left,
}

/// The groups of a server, by name. A group is forgotten when nobody has it any longer.
pub struct Groups {
    clock: Arc<dyn Clock>,
    groups: Mutex<BTreeMap<String, Weak<Group>>>,
}

impl Groups {
    /// None yet. Their requests wait by this clock.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self { clock, groups: Mutex::new(BTreeMap::new()) }
    }

    /// The group of this name, if there is one.
    pub fn find(&self, name: &str) -> Option<Arc<Group>> {
        self.groups.lock().get(name).and_then(Weak::upgrade)
    }

    /// The group of this name. A new one has no limits.
    pub fn get(&self, name: &str) -> Arc<Group> {
        let mut groups = self.groups.lock();
        groups.retain(|_, group| group.strong_count() > 0);
        if let Some(group) = groups.get(name).and_then(Weak::upgrade) {
            return group;
        }
        let group = Arc::new(Group::new(name, Arc::clone(&self.clock)));
        groups.insert(name.to_owned(), Arc::downgrade(&group));
        group
    }
}

/// Disks that share limits, and take turns.
///
/// Each direction has its own turns, as in QEMU. The request that is next in a direction has a timer; whoever looks
/// lets pass what may, and wakes the one that has become the next.
pub struct Group {
    name: String,
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group").field("name", &self.name).finish_non_exhaustive()
    }
}

#[derive(Default)]
struct State {
    limits: Limits,
    buckets: [Bucket; 6],
    /// Until when they have leaked.
    leaked: Duration,
    /// The disks, with their requests that wait, in each direction in order of arrival.
    members: FxHashMap<MemberId, [VecDeque<Ticket>; 2]>,
    /// The disks with requests that wait, in each direction in the order of their turns.
    turns: [VecDeque<MemberId>; 2],
    tickets: FxHashMap<Ticket, Waiter>,
    /// The requests in each direction that have been woken to set a timer.
    timed: [Option<Ticket>; 2],
    /// The direction of the last request that waited.
    last: Option<Direction>,
    next: u64,
}

/// A request that waits, or whose wait has ended unknown to it.
struct Waiter {
    member: MemberId,
    request: Request,
    passed: bool,
    waker: Option<Waker>,
}

/// A request's direction and bytes.
type Request = (Direction, u64);

impl State {
    fn new_id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// The request that is next in a direction.
    fn first(&self, direction: Direction) -> Option<Ticket> {
        let member = self.turns[direction as usize].front()?;
        self.members.get(member)?[direction as usize].front().copied()
    }

    /// The nanoseconds until a request may pass.
    fn wait(&self, direction: Direction) -> u128 {
        let waits = kinds(direction).map(|kind| self.buckets[kind as usize].wait());
        waits.into_iter().max().unwrap_or(0)
    }

    fn leak_until(&mut self, now: Duration) {
        let time = now.saturating_sub(self.leaked);
        self.leaked = self.leaked.max(now);
        self.buckets.iter_mut().for_each(|bucket| bucket.leak(time));
    }

    /// Counts a request that passes.
    fn count(&mut self, (direction, bytes): Request) {
        let size = self.limits.iops_size;
        let requests = match size {
            1.. if bytes > size => (u128::from(bytes) * UNIT).div_ceil(u128::from(size)),
            _ => UNIT,
        };
        for kind in kinds(direction) {
            let amount = if kind.counts_bytes() { u128::from(bytes) * UNIT } else { requests };
            self.buckets[kind as usize].add(amount);
        }
    }

    /// Lets pass what may, and collects those to wake: these, and those that are now the next.
    fn advance(&mut self, now: Duration, wakers: &mut Wakers) {
        self.leak_until(now);
        while let Some(direction) = self.ready() {
            self.last = Some(direction);
            if let Some(ticket) = self.take_first(direction) {
                self.let_pass(ticket, wakers);
            }
        }
        for direction in Direction::ALL {
            let first = self.first(direction);
            if self.timed[direction as usize] != first {
                self.timed[direction as usize] = first;
                let waiter = first.and_then(|first| self.tickets.get_mut(&first));
                wakers.extend(waiter.and_then(|waiter| waiter.waker.take()));
            }
        }
    }

    /// A direction in which a request waits and may pass; not the last one, if both do.
    fn ready(&self) -> Option<Direction> {
        let last = self.last.unwrap_or(Direction::Write);
        let ready = |direction: &Direction| {
            !self.turns[*direction as usize].is_empty() && self.wait(*direction) == 0
        };
        [last.other(), last].into_iter().find(ready)
    }

    /// Takes the request that is next in a direction, and gives the turn to the next disk.
    fn take_first(&mut self, direction: Direction) -> Option<Ticket> {
        let turns = &mut self.turns[direction as usize];
        let member = turns.pop_front()?;
        let queue = &mut self.members.get_mut(&member)?[direction as usize];
        let ticket = queue.pop_front();
        if !queue.is_empty() {
            turns.push_back(member);
        }
        ticket
    }

    fn let_pass(&mut self, ticket: Ticket, wakers: &mut Wakers) {
        let Some(waiter) = self.tickets.get_mut(&ticket) else { return };
        waiter.passed = true;
        wakers.extend(waiter.waker.take());
        let request = waiter.request;
        self.count(request);
    }

    fn enqueue(&mut self, member: MemberId, request: Request) -> Option<Ticket> {
        let ticket = self.new_id();
        let direction = request.0 as usize;
        let queue = &mut self.members.get_mut(&member)?[direction];
        if queue.is_empty() {
            self.turns[direction].push_back(member);
        }
        queue.push_back(ticket);
        self.tickets.insert(ticket, Waiter { member, request, passed: false, waker: None });
        Some(ticket)
    }

    /// Removes a request that may still wait. The caller drops it without the lock, which its waker may need.
    fn remove(&mut self, ticket: Ticket) -> Option<Waiter> {
        let waiter = self.tickets.remove(&ticket)?;
        let direction = waiter.request.0 as usize;
        // One that has passed is in no queue.
        if !waiter.passed
            && let Some(queues) = self.members.get_mut(&waiter.member)
        {
            let queue = &mut queues[direction];
            // Tickets grow, and a queue is in order of arrival.
            if let Ok(place) = queue.binary_search(&ticket) {
                queue.remove(place);
            }
            if queue.is_empty() {
                self.turns[direction].retain(|other| *other != waiter.member);
            }
        }
        Some(waiter)
    }

    /// Takes all waiting requests of a disk, in order of arrival in each direction.
    fn take_all(&mut self, member: MemberId) -> Vec<Ticket> {
        self.turns.iter_mut().for_each(|turns| turns.retain(|other| *other != member));
        let queues = self.members.get_mut(&member);
        queues.map_or_else(Vec::new, |queues| {
            queues.iter_mut().flat_map(|queue| queue.drain(..)).collect()
        })
    }
}

/// The limits that apply in a direction.
const fn kinds(direction: Direction) -> [LimitKind; 4] {
    use LimitKind::{BpsRead, BpsTotal, BpsWrite, IopsRead, IopsTotal, IopsWrite};
    match direction {
        Direction::Read => [BpsTotal, BpsRead, IopsTotal, IopsRead],
        Direction::Write => [BpsTotal, BpsWrite, IopsTotal, IopsWrite],
    }
}

impl Group {
    /// A group without disks and without limits.
    pub fn new(name: &str, clock: Arc<dyn Clock>) -> Self {
        let state = State { leaked: clock.now(), ..State::default() };
        Self { name: name.to_owned(), clock, state: Mutex::new(state) }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its limits.
    pub fn limits(&self) -> Limits {
        self.state.lock().limits
    }

    /// Replaces the limits. Nothing that passed before counts against the new ones. Requests that wait do so by the new
    /// limits.
    pub fn set_limits(&self, limits: &Limits) {
        self.change(|state, now, _| {
            state.limits = *limits;
            state.buckets = LimitKind::ALL.map(|kind| Bucket::new(limits.get(kind)));
            state.leaked = now;
            // Their timers are for other times.
            state.timed = [None; 2];
        });
    }

    /// Changes the state, lets pass what may, and then wakes whom it concerns.
    fn change<T>(&self, change: impl FnOnce(&mut State, Duration, &mut Wakers) -> T) -> T {
        let mut wakers = Wakers::new();
        let result = {
            let mut state = self.state.lock();
            let now = self.clock.now();
            let result = change(&mut state, now, &mut wakers);
            state.advance(now, &mut wakers);
            result
        };
        wakers.into_iter().for_each(Waker::wake);
        result
    }

    pub(super) fn join(&self) -> MemberId {
        let mut state = self.state.lock();
        let id = state.new_id();
        state.members.insert(id, [VecDeque::new(), VecDeque::new()]);
        id
    }

    /// Removes a disk, if it is still there. Its waiting requests learn that it has left.
    pub(super) fn leave(&self, member: MemberId) {
        self.change(|state, _, wakers| {
            for ticket in state.take_all(member) {
                wakers.extend(state.tickets.remove(&ticket).and_then(|waiter| waiter.waker));
            }
            state.members.remove(&member);
        });
    }

    /// Lets all waiting requests of a disk pass.
    pub(super) fn release(&self, member: MemberId) {
        self.change(|state, now, wakers| {
            state.leak_until(now);
            for ticket in state.take_all(member) {
                state.let_pass(ticket, wakers);
            }
        });
    }

    /// How many requests of a disk wait.
    pub(super) fn waiting(&self, member: MemberId) -> usize {
        let state = self.state.lock();
        state.members.get(&member).map_or(0, |queues| queues.iter().map(VecDeque::len).sum())
    }

    /// Waits until a request of a disk may pass, and counts it. It does not wait while `drains` is not 0.
    pub(super) async fn enter(
        &self,
        member: MemberId,
        request: Request,
        drains: &AtomicUsize,
    ) -> Outcome {
        let begun = self.change(|state, now, wakers| {
            if !state.members.contains_key(&member) {
                return Err(Outcome::Left);
            }
            // Those before it first.
            state.advance(now, wakers);
            let none_waits = state.turns[request.0 as usize].is_empty();
            if drains.load(Ordering::SeqCst) > 0 || none_waits && state.wait(request.0) == 0 {
                state.count(request);
                return Err(Outcome::Passed);
            }
            state.enqueue(member, request).ok_or(Outcome::Left)
        });
        match begun {
            Ok(ticket) => Waiting { group: self, ticket, timer: None }.await,
            Err(outcome) => outcome,
        }
    }
}

type Timer = Pin<Box<dyn Future<Output = ()>>>;

/// A request's wait.
struct Waiting<'a> {
    group: &'a Group,
    ticket: Ticket,
    /// When the request may pass, if it is the next.
    timer: Option<(Duration, Timer)>,
}

impl Waiting<'_> {
    /// Ends the wait if it is over. Otherwise returns when to look again, if the request is the next.
    fn look(&self, waker: &Waker) -> Result<Outcome, Option<Duration>> {
        let waker = waker.clone();
        let (result, _former) = self.group.change(|state, now, wakers| {
            // It is awake already.
            let waiter = state.tickets.get_mut(&self.ticket);
            let former = waiter.and_then(|waiter| waiter.waker.take());
            state.advance(now, wakers);
            let Some(waiter) = state.tickets.get_mut(&self.ticket) else {
                return (Ok(Outcome::Left), former);
            };
            if waiter.passed {
                return (Ok(Outcome::Passed), former);
            }
            waiter.waker = Some(waker);
            let direction = waiter.request.0;
            let is_first = state.first(direction) == Some(self.ticket);
            let wait = state.wait(direction).min(LONGEST_WAIT) as u64;
            let at = is_first.then(|| now.saturating_add(Duration::from_nanos(wait)));
            (Err(at), former)
        });
        result
    }
}

impl Future for Waiting<'_> {
    type Output = Outcome;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Outcome> {
        loop {
            let at = match self.look(context.waker()) {
                Ok(outcome) => return Poll::Ready(outcome),
                Err(at) => at,
            };
            let Some(at) = at else {
                self.timer = None;
                return Poll::Pending;
            };
            if self.timer.as_ref().is_none_or(|(time, _)| *time != at) {
                let sleep = self.group.clock.sleep_until(at);
                self.timer = Some((at, sleep));
            }
            if let Some((_, timer)) = &mut self.timer
                && timer.as_mut().poll(context).is_pending()
            {
                return Poll::Pending;
            }
            self.timer = None;
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        drop(self.group.change(|state, _, _| state.remove(self.ticket)));
    }
}
