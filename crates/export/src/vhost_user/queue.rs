//! A running queue: a task that takes requests from a ring and puts completions into it.

use super::bounce::{Bounces, FREE};
use super::chain::Chain;
use super::inflight::InFlight;
use super::notify::Notifier;
use super::request::{Context, ID_BYTES, Job};
use super::ring::{Ring, RingError};
use super::throttle::Throttle;
use crate::pool::Pool;
use crate::slots::Slots;
use crate::stop::Stop;
use isobath_buf::guard::losses;
use isobath_disk::BlockDevice;
use isobath_ring::Event;
use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{self, Poll};
use std::time::{Duration, Instant};

/// How many times a queue looks for more requests before it yields to the thread's other tasks.
const ROUNDS: usize = 8;
/// How much work a queue does before it checks whether the thread's other tasks wait, and yields if they do: requests
/// taken, and pieces of this many bytes that were read at once.
const AT_ONCE: usize = 8;
const PIECE: usize = 16 << 10;
/// The shortest time for which polling for requests is worthwhile.
const LEAST_LOOK: Duration = Duration::from_micros(4);

thread_local! {
    static POOL: Rc<Pool> = Rc::new(Pool::new(FREE));
}

/// Everything that a queue needs.
pub(crate) struct Setup<D> {
    pub(crate) index: u16,
    pub(crate) device: Arc<D>,
    pub(crate) bounces: Arc<Bounces>,
    pub(crate) ring: Ring,
    pub(crate) in_flight: Option<InFlight>,
    /// The ring's base is where this session has stopped the queue.
    pub(crate) continues: bool,
    pub(crate) kick: OwnedFd,
    pub(crate) call: Arc<Notifier>,
    pub(crate) error: Arc<Notifier>,
    pub(crate) stop: Arc<Stop>,
    pub(crate) serial: [u8; ID_BYTES],
    pub(crate) read_only: bool,
    pub(crate) write_through: bool,
    pub(crate) poll: Duration,
    pub(crate) lost: Arc<Stop>,
}

/// Serves a queue until it is told to stop and every request that it took has ended. Returns the index of the next
/// available entry.
pub(crate) async fn run<D: BlockDevice>(setup: Setup<D>) -> u16 {
    let Setup { ring, in_flight, .. } = setup;
    let pool = POOL.with(Rc::clone);
    pool.limit_to(setup.bounces.free);
    let context = Rc::new(Context {
        device: setup.device,
        memory: ring.memory().clone(),
        // A separate reference count that no other thread changes.
        owner: Arc::new(ring.memory().clone()),
        pool,
        bounces: setup.bounces,
        serial: setup.serial,
        read_only: setup.read_only,
        write_through: setup.write_through,
        ending: setup.stop.clone(),
        listed: in_flight.is_some(),
        left: Cell::new(0),
        done: RefCell::default(),
        complaints: RefCell::new(Throttle::default()),
        queue: setup.index,
    });
    let mut queue = Queue {
        context,
        ring,
        list: in_flight,
        slots: Slots::new(),
        serve: Context::serve,
        chain: Chain::default(),
        open: 0,
        kick: Event::from(setup.kick),
        call: setup.call,
        error: setup.error,
        look: Look { most: setup.poll, now: Duration::ZERO, since: None },
        yields: false,
        broken: false,
        memory_lost: false,
        losses: None,
        lost: setup.lost,
    };
    queue.recover(setup.continues);
    let mut stopped = pin!(setup.stop.requested());
    poll_fn(|cx| {
        let stopping = stopped.as_mut().poll(cx).is_ready();
        let turn = queue.turn(cx, stopping);
        queue.look_for_losses();
        turn
    })
    .await;
    queue.ring.next_available()
}

struct Queue<D, F, S> {
    context: Rc<Context<D>>,
    ring: Ring,
    list: Option<InFlight>,
    slots: Slots<F>,
    serve: S,
    chain: Chain,
    /// Number of requests taken but not yet put into the used ring.
    open: usize,
    kick: Event,
    call: Arc<Notifier>,
    error: Arc<Notifier>,
    look: Look,
    /// Whether the thread's other tasks are to have their turn.
    yields: bool,
    /// Whether the ring was invalid; nothing more is then taken from it.
    broken: bool,
    /// Whether a part of the client's memory is missing. Nothing more is then shown to the driver, and the requests
    /// that were taken stay in the list of those in flight.
    memory_lost: bool,
    /// How many pages all clients together had lost when this queue last looked for losses.
    losses: Option<usize>,
    lost: Arc<Stop>,
}

impl<D, F, S> Queue<D, F, S>
where
    D: BlockDevice,
    F: Future<Output = ()>,
    S: Fn(Rc<Context<D>>, Job) -> F,
{
    /// Starts the requests that the last server left in flight, and continues where it stopped.
    fn recover(&mut self, continues: bool) {
        let used = self.ring.used_index();
        self.look_for_losses();
        let Some(list) = self.list.as_mut().filter(|_| !self.memory_lost) else { return };
        if list.size() < self.ring.size() {
            self.give_up(RingError::Inflight("it is too short"));
            return;
        }
        let heads = list.recover(used);
        if heads.iter().any(|head| *head >= self.ring.size()) {
            self.give_up(RingError::Inflight("it refers to descriptors that do not exist"));
            return;
        }
        if !heads.is_empty() {
            tracing::info!(
                queue = self.context.queue,
                requests = heads.len(),
                "resubmitting requests that were in flight when the previous server ended"
            );
        }
        // Every available entry is used, in the list, or not yet taken. This gives the position, which a client that
        // lost its last server does not know. Where this session stopped the queue, all before is used, or was left in
        // the list; if that is empty now it is another, and what was left is given up.
        if !(continues && heads.is_empty()) {
            self.ring.set_next_available(used.wrapping_add(heads.len() as u16));
        }
        for head in heads {
            self.begin(head);
        }
        // The last server may have ended before it notified the guest of completions.
        self.call.notify();
    }

    fn turn(&mut self, cx: &mut task::Context<'_>, stopping: bool) -> Poll<()> {
        self.yields = false;
        for _ in 0..ROUNDS {
            self.slots.poll(cx);
            self.finish();
            if stopping && self.open == 0 {
                return Poll::Ready(());
            }
            if stopping || self.broken {
                return Poll::Pending;
            }
            match self.fetch(cx) {
                Ok(Poll::Ready(())) if self.yields => break,
                Ok(Poll::Ready(())) => {}
                Ok(Poll::Pending) => return Poll::Pending,
                Err(error) => self.give_up(error),
            }
        }
        self.finish();
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Takes available requests, or arranges to be woken when there are any.
    fn fetch(&mut self, cx: &mut task::Context<'_>) -> Result<Poll<()>, RingError> {
        let (mut taken, mut work) = (false, 0);
        // A driver cannot have more requests in flight than there are descriptors.
        while self.open < usize::from(self.ring.size()) {
            if work >= AT_ONCE {
                if isobath_ring::others_wait(cx.waker()) {
                    self.yields = true;
                    break;
                }
                work = 0;
                if self.is_half_done() {
                    break;
                }
            }
            let Some(head) = self.ring.take()? else { break };
            taken = true;
            self.look_for_losses();
            if self.memory_lost {
                break;
            }
            if let Some(list) = &mut self.list {
                list.begin(head);
            }
            work += 1 + self.begin(head) / PIECE;
        }
        if taken {
            self.look.found();
            return Ok(Poll::Ready(()));
        }
        if self.open >= usize::from(self.ring.size()) {
            return Ok(Poll::Pending);
        }
        if self.open == 0 && self.look.goes_on() {
            cx.waker().wake_by_ref();
            return Ok(Poll::Pending);
        }
        if self.ring.listen()? {
            self.ring.hush();
            return Ok(Poll::Ready(()));
        }
        match self.kick.poll_take(cx) {
            Poll::Pending => Ok(Poll::Pending),
            Poll::Ready(Ok(_)) => {
                self.ring.hush();
                Ok(Poll::Ready(()))
            }
            Poll::Ready(Err(error)) => {
                let queue = self.context.queue;
                tracing::warn!(queue, %error, "cannot read a queue's kick eventfd");
                self.broken = true;
                Ok(Poll::Ready(()))
            }
        }
    }

    /// Whether as much has ended as is still to be done of what is known. The driver then hears of it, so that it can
    /// prepare new requests meanwhile: otherwise the two sides would take turns, each asleep while the other works.
    fn is_half_done(&self) -> bool {
        2 * self.context.done.borrow().len() >= self.open + self.ring.left()
    }

    /// Starts a request, unless what describes it is in lost memory; gives the bytes that it has read at once.
    fn begin(&mut self, head: u16) -> usize {
        let ended = self.context.done.borrow().len();
        self.open += 1;
        self.chain.follow(&self.ring, head);
        let job = self.context.accept(&mut self.chain, head);
        self.look_for_losses();
        match job {
            Some(_) if self.memory_lost => self.open -= 1,
            Some(job) => self.slots.start(|| (self.serve)(self.context.clone(), job)),
            None => {}
        }
        self.context.done.borrow().iter().skip(ended).map(|end| end.written as usize).sum()
    }

    /// Shows completed requests to the driver; those left to the next server stay in the list.
    fn finish(&mut self) {
        self.open -= self.context.left.take();
        let mut done = self.context.done.take();
        if done.is_empty() {
            return;
        }
        self.open -= done.len();
        for end in &done {
            self.ring.put(end.head, end.written);
        }
        // The requests may have used what is lost.
        self.look_for_losses();
        if self.memory_lost {
            return;
        }
        let (ring, known) = (&mut self.ring, self.losses);
        match &mut self.list {
            None => drop(ring.publish()),
            Some(list) => list.end(done.iter().map(|end| end.head), || {
                let used = ring.publish();
                // If the ring was lost meanwhile, the driver may not see this.
                let is_same = known == Some(losses()) || !ring.memory().is_lost();
                is_same.then_some(used)
            }),
        }
        done.clear();
        self.context.done.replace(done);
        if self.ring.needs_notification() {
            self.call.notify();
        }
    }

    /// Stops the queue if a part of the client's memory is missing: what was read there since were zeroes.
    fn look_for_losses(&mut self) {
        let losses = losses();
        if self.losses.replace(losses) == Some(losses) {
            return;
        }
        let lost =
            self.ring.memory().is_lost() || self.list.as_ref().is_some_and(InFlight::is_lost);
        if lost && !self.lost.is_requested() {
            tracing::warn!(queue = self.context.queue, "a client has cut its memory short");
            self.lost.request();
        }
        self.memory_lost |= lost;
        self.broken |= lost;
    }

    fn give_up(&mut self, error: RingError) {
        tracing::warn!(queue = self.context.queue, %error, "stopping a guest's queue");
        self.broken = true;
        self.error.notify();
    }
}

/// How long to poll for requests before sleeping.
struct Look {
    most: Duration,
    now: Duration,
    /// When the queue became idle.
    since: Option<Instant>,
}

impl Look {
    /// Requests were found: the time that it took determines how long to poll from now on.
    fn found(&mut self) {
        if let Some(since) = self.since.take() {
            self.found_after(since.elapsed());
        }
    }

    fn found_after(&mut self, waited: Duration) {
        if waited > self.most {
            self.now /= 2;
            if self.now < LEAST_LOOK {
                self.now = Duration::ZERO;
            }
        } else if waited > self.now {
            self.now = (self.now * 2).max(LEAST_LOOK).min(self.most);
        }
    }

    /// No requests were found: returns whether to continue polling.
    fn goes_on(&mut self) -> bool {
        if self.most.is_zero() {
            return false;
        }
        let since = *self.since.get_or_insert_with(Instant::now);
        !self.now.is_zero() && since.elapsed() < self.now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_to_look_follows_the_guest() {
        let most = Duration::from_micros(32);
        let mut look = Look { most, now: Duration::ZERO, since: None };
        let mut found_after = |waited: Duration| {
            look.found_after(waited);
            look.now
        };
        let soon = Duration::from_micros(9);
        assert_eq!(found_after(Duration::from_secs(1)), Duration::ZERO);
        assert_eq!(found_after(soon), LEAST_LOOK);
        let grown = found_after(soon);
        assert!(grown > LEAST_LOOK);
        assert!(found_after(Duration::from_secs(1)) < grown);
        for _ in 0..4 {
            found_after(Duration::from_secs(1));
        }
        assert_eq!(found_after(Duration::from_secs(1)), Duration::ZERO);
        let mut never = Look { most: Duration::ZERO, now: Duration::ZERO, since: None };
        assert!(!never.goes_on() && never.since.is_none());
    }
}
