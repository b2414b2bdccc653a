//! Limits the request data that all clients of a server, or all devices, together may keep in memory.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::task::{Context, Poll, Waker};

/// Bytes guaranteed to each client regardless of what the others hold, so that requests of common sizes always proceed;
/// fewer if the process has a memory limit.
pub(crate) const ASSURED: usize = 4 << 20;
/// The least that a client can be guaranteed, besides what it holds anyway.
pub(crate) const LEAST_PIECE: usize = 64 << 10;
/// Beyond that, a client may hold at most the free bytes divided by this.
const PART: usize = 8;

/// Bytes shared among clients. A client that does not receive its replies keeps what it holds, but since it gets only a
/// part of the free bytes, there are always some left for the others. How many is up to all others: only a
/// [piece](Share::piece) of what is guaranteed can always be had.
pub(crate) struct Budget {
    limit: usize,
    /// Bytes guaranteed to each client.
    assured: usize,
    state: Mutex<Shares>,
}

struct Shares {
    /// Bytes that clients hold beyond their guaranteed bytes.
    held: usize,
    next: u64,
    waiting: BTreeMap<u64, Waker>,
}

/// The bytes that one client holds. They are released on drop.
pub(crate) struct Share<'a> {
    budget: &'a Budget,
    held: usize,
    /// Its key in `Shares::waiting`, if it waits.
    key: Option<u64>,
}

impl Budget {
    /// A budget of `limit` bytes in addition to `assured` bytes of each client.
    pub(crate) const fn new(limit: usize, assured: usize) -> Self {
        let none = Shares { held: 0, next: 0, waiting: BTreeMap::new() };
        Self { limit, assured, state: Mutex::new(none) }
    }

    /// How many of `held` bytes exceed the guaranteed bytes.
    fn beyond(&self, held: usize) -> usize {
        held.saturating_sub(self.assured)
    }

    /// Bytes that clients hold beyond their guaranteed bytes.
    #[cfg(test)]
    pub(crate) fn held(&self) -> usize {
        self.state.lock().held
    }

    /// The share of a new client, which holds nothing yet.
    pub(crate) fn share(&self) -> Share<'_> {
        Share { budget: self, held: 0, key: None }
    }
}

impl Share<'_> {
    /// Takes this many more bytes once they are available. One request at a time may wait.
    pub(crate) fn poll_take(&mut self, bytes: usize, cx: &Context<'_>) -> Poll<()> {
        let before = self.budget.beyond(self.held);
        let after = self.budget.beyond(self.held.saturating_add(bytes));
        if before == after && self.key.is_none() {
            self.held += bytes;
            return Poll::Ready(());
        }
        let mut state = self.budget.state.lock();
        let free = self.budget.limit.saturating_sub(state.held);
        if after > before && after > free / PART {
            let key = *self.key.get_or_insert_with(|| {
                state.next += 1;
                state.next
            });
            state.waiting.insert(key, cx.waker().clone());
            return Poll::Pending;
        }
        state.held += after - before;
        self.held += bytes;
        if let Some(key) = self.key.take() {
            state.waiting.remove(&key);
        }
        Poll::Ready(())
    }

    /// Forgets that a request waited, which will not be carried out as a whole.
    pub(crate) fn wait_no_longer(&mut self) {
        if let Some(key) = self.key.take() {
            self.budget.state.lock().waiting.remove(&key);
        }
    }

    /// How many bytes the client can take whatever the others hold, besides those that it holds: a power of two,
    /// rounded down.
    pub(crate) fn piece(&self) -> usize {
        let left = self.budget.assured.saturating_sub(self.held);
        left.checked_ilog2().map_or(0, |bits| 1 << bits).max(LEAST_PIECE)
    }

    /// Counts bytes that the client holds already, whether they are available or not.
    pub(crate) fn hold(&mut self, bytes: usize) {
        let before = self.budget.beyond(self.held);
        self.held = self.held.saturating_add(bytes);
        let more = self.budget.beyond(self.held) - before;
        if more > 0 {
            self.budget.state.lock().held += more;
        }
    }

    /// Releases bytes.
    pub(crate) fn give(&mut self, bytes: usize) {
        let before = self.budget.beyond(self.held);
        self.held = self.held.saturating_sub(bytes);
        let given = before - self.budget.beyond(self.held);
        if given == 0 {
            return;
        }
        let waiting = {
            let mut state = self.budget.state.lock();
            state.held -= given;
            std::mem::take(&mut state.waiting)
        };
        waiting.into_values().for_each(Waker::wake);
    }
}

impl Drop for Share<'_> {
    fn drop(&mut self) {
        self.give(self.held);
        self.wait_no_longer();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    const MIB: usize = 1 << 20;

    fn takes(share: &mut Share<'_>, bytes: usize) -> bool {
        share.poll_take(bytes, &Context::from_waker(Waker::noop())).is_ready()
    }

    #[test]
    fn however_much_some_hold_there_is_something_left() {
        let budget = Budget::new(512 * MIB, ASSURED);
        // Each takes as much as it can get, in requests of every size.
        let mut greedy: Vec<_> = (0..128).map(|_| budget.share()).collect();
        for share in &mut greedy {
            for bytes in [32 * MIB, 8 * MIB, MIB, 64 << 10, 4096] {
                while takes(share, bytes) {}
            }
        }
        let held = || budget.held();
        assert!(held() > 400 * MIB && held() <= 512 * MIB, "{}", held());
        let mut other = budget.share();
        assert!(takes(&mut other, ASSURED), "a common request goes on");
        assert!(!takes(&mut other, 32 * MIB));
        greedy.truncate(20);
        assert!(takes(&mut budget.share(), 8 * MIB), "and larger ones beside fewer of them");
        drop((greedy, other));
        assert_eq!(held(), 0);
        assert!(takes(&mut budget.share(), 32 * MIB));
    }

    #[test]
    fn what_a_client_holds_anyway_counts() {
        let budget = Budget::new(16 * MIB, ASSURED);
        let held = || budget.state.lock().held;
        let mut share = budget.share();
        share.hold(MIB);
        assert_eq!(held(), 0, "within what is guaranteed");
        assert!(takes(&mut share, 3 * MIB));
        assert!(!takes(&mut share, 3 * MIB), "less is left of it");
        drop(share);
        let mut share = budget.share();
        share.hold(ASSURED + MIB);
        assert_eq!(held(), MIB);
        share.give(MIB);
        assert_eq!(held(), 0);
    }

    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn who_waits_is_woken_and_who_leaves_is_forgotten() {
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(count.clone());
        let budget = Budget::new(64 * MIB, ASSURED);
        let (mut one, mut other) = (budget.share(), budget.share());
        assert!(takes(&mut one, 12 * MIB));
        assert!(other.poll_take(12 * MIB, &Context::from_waker(&waker)).is_pending());
        assert!(other.poll_take(12 * MIB, &Context::from_waker(&waker)).is_pending());
        assert_eq!(budget.state.lock().waiting.len(), 1);
        one.give(4 * MIB);
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        assert!(other.poll_take(13 * MIB, &Context::from_waker(&waker)).is_pending());
        drop(other);
        assert!(budget.state.lock().waiting.is_empty());
        one.give(100 * MIB);
        assert_eq!(budget.held(), 0);
    }

    #[test]
    fn a_piece_is_there_whatever_others_hold() {
        let budget = Budget::new(0, 3 * MIB / 2);
        let mut greedy = budget.share();
        greedy.hold(100 * MIB);
        let mut share = budget.share();
        assert_eq!(share.piece(), MIB);
        share.hold(MIB / 2);
        assert_eq!(share.piece(), MIB, "beside what it holds anyway");
        assert!(takes(&mut share, MIB));
        assert!(!takes(&mut share, 4096));
        assert_eq!(budget.state.lock().waiting.len(), 1);
        share.wait_no_longer();
        assert!(budget.state.lock().waiting.is_empty());
        assert_eq!(share.piece(), LEAST_PIECE);
    }
}
