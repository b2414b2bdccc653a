//! What is to be fetched, and in which order.
//!
//! A block is here once, whoever wants it, until it has been fetched. What a request waits for comes first; blocks that
//! are read ahead come only when no other waits, and then not on all threads. A request for a block that is to be read
//! ahead promotes it.

use super::flight::Flight;
use super::wanted::{Awaited, Fetched, Wanted};
use std::collections::{BTreeMap, VecDeque, btree_map};
use std::ops::Range;
use std::sync::Arc;

/// Most blocks of one request to the store.
pub(super) const MOST_AT_ONCE: usize = 8;

/// A layer's number, and a block of it.
type Place = (u64, u64);

/// How far a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// A request waits for it.
    Wanted,
    /// It is to be read ahead.
    Ahead,
    /// It is being fetched.
    Flying,
}

struct Entry {
    layer: Arc<dyn Wanted>,
    flight: Arc<Flight<Fetched>>,
    stage: Stage,
}

/// Neighbouring blocks that are fetched together.
pub(super) struct Run {
    pub(super) layer: Arc<dyn Wanted>,
    /// The first of them.
    pub(super) first: u64,
    pub(super) flights: Vec<Arc<Flight<Fetched>>>,
    /// No request waited for them.
    pub(super) ahead: bool,
}

/// Other work that waits for the store; it is told if nobody does it any more.
pub(super) type Job<S> = Box<dyn FnOnce(Option<&S>) + Send>;

/// What a thread does next.
pub(super) enum Next<S> {
    Job(Job<S>),
    Blocks(Run),
}

/// What is to be fetched; other work gets an `S`.
pub(super) struct Queue<S> {
    blocks: BTreeMap<Place, Entry>,
    /// The blocks that are wanted, and those that are read ahead, in order. A block that is no longer in that stage is
    /// passed over.
    wanted: VecDeque<Place>,
    ahead: VecDeque<Place>,
    jobs: VecDeque<Job<S>>,
    /// Threads that read ahead now.
    reading_ahead: usize,
    /// Nobody fetches any more.
    pub(super) closed: bool,
}

impl<S> Default for Queue<S> {
    fn default() -> Self {
        Self {
            blocks: BTreeMap::new(),
            wanted: VecDeque::new(),
            ahead: VecDeque::new(),
            jobs: VecDeque::new(),
            reading_ahead: 0,
            closed: false,
        }
    }
}

impl<S> Queue<S> {
    /// The flight of a block that a request waits for. `None` if the block has landed by now.
    pub(super) fn want(&mut self, layer: &Arc<dyn Wanted>, block: u64) -> Option<Awaited> {
        let place = (layer.number(), block);
        let known = self.blocks.get_mut(&place).filter(|entry| !entry.flight.has_ended());
        if let Some(entry) = known {
            if entry.stage == Stage::Ahead {
                entry.stage = Stage::Wanted;
                self.wanted.push_back(place);
            }
            let is_fresh = entry.stage != Stage::Flying;
            return Some(Awaited { block, flight: Arc::clone(&entry.flight), is_fresh });
        }
        // A block is in the cache before its flight is forgotten, which takes the lock of this queue.
        if !layer.is_missing(block) {
            return None;
        }
        let flight = Arc::<Flight<Fetched>>::default();
        let (layer, stage) = (Arc::clone(layer), Stage::Wanted);
        let entry = Entry { layer, flight: Arc::clone(&flight), stage };
        self.blocks.insert(place, entry);
        self.wanted.push_back(place);
        Some(Awaited { block, flight, is_fresh: true })
    }

    /// Reads a block ahead, unless it is here or on its way already.
    pub(super) fn read_ahead(&mut self, layer: &Arc<dyn Wanted>, block: u64) {
        let place = (layer.number(), block);
        if let btree_map::Entry::Vacant(vacant) = self.blocks.entry(place)
            && layer.is_absent(block)
        {
            let (layer, flight) = (Arc::clone(layer), Arc::default());
            vacant.insert(Entry { layer, flight, stage: Stage::Ahead });
            self.ahead.push_back(place);
        }
    }

    /// Whether everything that is wanted or read ahead is being fetched.
    pub(super) fn is_calm(&self) -> bool {
        self.wanted.is_empty() && self.ahead.is_empty() && self.jobs.is_empty()
    }

    /// The first of these blocks that are neither here nor on their way, with its neighbours. Who calls it fetches
    /// them.
    pub(super) fn take(&mut self, layer: &Arc<dyn Wanted>, blocks: Range<u64>) -> Option<Run> {
        let number = layer.number();
        let is_free =
            |block: &u64| !self.blocks.contains_key(&(number, *block)) && layer.is_absent(*block);
        let first = blocks.clone().find(is_free)?;
        let count = (first..blocks.end).take(MOST_AT_ONCE).take_while(is_free).count() as u64;
        let mut take = |block| {
            let (layer, flight) = (Arc::clone(layer), Arc::<Flight<Fetched>>::default());
            let entry = Entry { layer, flight: Arc::clone(&flight), stage: Stage::Flying };
            self.blocks.insert((number, block), entry);
            flight
        };
        let flights = (first..first + count).map(&mut take).collect();
        Some(Run { layer: Arc::clone(layer), first, flights, ahead: false })
    }

    /// Gives up reading these blocks ahead, as far as nobody has begun.
    pub(super) fn leave(&mut self, layer: u64, blocks: Range<u64>) {
        let places: Vec<Place> = self
            .blocks
            .range((layer, blocks.start)..(layer, blocks.end))
            .filter(|(_, entry)| entry.stage == Stage::Ahead)
            .map(|(place, _)| *place)
            .collect();
        if places.is_empty() {
            return;
        }
        for place in places {
            self.blocks.remove(&place);
        }
        let blocks = &self.blocks;
        self.ahead
            .retain(|place| blocks.get(place).is_some_and(|entry| entry.stage == Stage::Ahead));
    }

    /// Adds other work, which comes first.
    pub(super) fn job(&mut self, job: Job<S>) {
        self.jobs.push_back(job);
    }

    /// What is to be done next, if anything. No more than `most_ahead` threads read ahead.
    pub(super) fn next(&mut self, most_ahead: usize) -> Option<Next<S>> {
        if let Some(job) = self.jobs.pop_front() {
            return Some(Next::Job(job));
        }
        if let Some(run) = self.run(Stage::Wanted) {
            return Some(Next::Blocks(run));
        }
        if self.reading_ahead < most_ahead
            && let Some(run) = self.run(Stage::Ahead)
        {
            self.reading_ahead += 1;
            return Some(Next::Blocks(run));
        }
        None
    }

    /// The first block in this stage, with its neighbours. What was wanted by those who have all left is forgotten:
    /// their time was over while others were served.
    fn run(&mut self, stage: Stage) -> Option<Run> {
        let is_in = |blocks: &BTreeMap<Place, Entry>, place: &Place| {
            blocks.get(place).is_some_and(|entry| entry.stage == stage)
        };
        let (layer, block) = loop {
            let order = if stage == Stage::Ahead { &mut self.ahead } else { &mut self.wanted };
            let place = order.pop_front()?;
            if !is_in(&self.blocks, &place) {
                continue;
            }
            // Flights are only handed out under the lock of this queue.
            let is_left = |entry: &Entry| Arc::strong_count(&entry.flight) == 1;
            if stage == Stage::Wanted && self.blocks.get(&place).is_some_and(is_left) {
                self.blocks.remove(&place);
                continue;
            }
            break place;
        };
        let (mut first, mut last) = (block, block);
        while ((last - first + 1) as usize) < MOST_AT_ONCE {
            if is_in(&self.blocks, &(layer, last + 1)) {
                last += 1;
            } else if first > 0 && is_in(&self.blocks, &(layer, first - 1)) {
                first -= 1;
            } else {
                break;
            }
        }
        let mut flights = Vec::new();
        let mut of = None;
        for (_, entry) in self.blocks.range_mut((layer, first)..=(layer, last)) {
            entry.stage = Stage::Flying;
            flights.push(Arc::clone(&entry.flight));
            of.get_or_insert_with(|| Arc::clone(&entry.layer));
        }
        Some(Run { layer: of?, first, flights, ahead: stage == Stage::Ahead })
    }

    /// A run of blocks that were read ahead has ended.
    pub(super) fn ended_ahead(&mut self) {
        let Some(left) = self.reading_ahead.checked_sub(1) else {
            unreachable!("whoever reads ahead was counted")
        };
        self.reading_ahead = left;
    }

    /// Forgets a block whose flight has ended.
    pub(super) fn ended(&mut self, layer: u64, block: u64, flight: &Arc<Flight<Fetched>>) {
        let place = (layer, block);
        // Somebody may have wanted it anew.
        if self.blocks.get(&place).is_some_and(|entry| Arc::ptr_eq(&entry.flight, flight)) {
            self.blocks.remove(&place);
        }
    }

    /// Ends everything that nobody has begun.
    pub(super) fn close(&mut self) -> (Vec<Arc<Flight<Fetched>>>, Vec<Job<S>>) {
        self.closed = true;
        self.wanted.clear();
        self.ahead.clear();
        let blocks = std::mem::take(&mut self.blocks);
        let flights = blocks.into_values().map(|entry| entry.flight).collect();
        (flights, std::mem::take(&mut self.jobs).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Result;

    /// A layer of which nothing is here.
    struct Absent(u64);

    impl Wanted for Absent {
        fn number(&self) -> u64 {
            self.0
        }

        fn key(&self) -> &'static str {
            "layers/x"
        }

        fn range(&self, block: u64) -> (u64, usize) {
            (block, 1)
        }

        fn is_missing(&self, _: u64) -> bool {
            true
        }

        fn is_absent(&self, _: u64) -> bool {
            true
        }

        fn accept(&self, _: u64, _: &[u8]) -> Result<bool> {
            Ok(true)
        }
    }

    fn layer(number: u64) -> Arc<dyn Wanted> {
        Arc::new(Absent(number))
    }

    /// The layer, the blocks and whether they are read ahead of what is done next.
    fn next(queue: &mut Queue<()>) -> Option<(u64, Range<u64>, bool)> {
        match queue.next(1)? {
            Next::Blocks(run) => {
                let end = run.first + run.flights.len() as u64;
                Some((run.layer.number(), run.first..end, run.ahead))
            }
            Next::Job(_) => None,
        }
    }

    #[test]
    fn what_is_wanted_comes_first_with_its_neighbours() {
        let (mut queue, one, other) = (Queue::default(), layer(1), layer(2));
        (0..4).for_each(|block| queue.read_ahead(&one, block));
        let blocks = [20, 9, 8, 21, 10, 30];
        let _awaited: Vec<_> =
            blocks.iter().filter_map(|block| queue.want(&other, *block)).collect();
        assert_eq!(next(&mut queue), Some((2, 20..22, false)));
        assert_eq!(next(&mut queue), Some((2, 8..11, false)));
        assert_eq!(next(&mut queue), Some((2, 30..31, false)));
        assert_eq!(next(&mut queue), Some((1, 0..4, true)));
        queue.read_ahead(&one, 7);
        assert_eq!(next(&mut queue), None, "no more threads read ahead");
        queue.ended_ahead();
        assert_eq!(next(&mut queue), Some((1, 7..8, true)));
    }

    #[test]
    fn so_many_blocks_are_fetched_together_and_no_more() {
        let (mut queue, layer) = (Queue::default(), layer(1));
        let _awaited: Vec<_> = (0..20).filter_map(|block| queue.want(&layer, block)).collect();
        let runs: Vec<_> = std::iter::from_fn(|| next(&mut queue)).map(|(_, run, _)| run).collect();
        assert_eq!(runs, [0..8, 8..16, 16..20]);
    }

    #[test]
    fn a_block_that_is_read_ahead_is_promoted_and_one_that_flies_is_shared() {
        let (mut queue, layer) = (Queue::<()>::default(), layer(1));
        (0..4).for_each(|block| queue.read_ahead(&layer, block));
        let first = queue.want(&layer, 2).unwrap();
        assert!(first.is_fresh, "nobody has begun");
        assert_eq!(next(&mut queue), Some((1, 2..3, false)));
        let again = queue.want(&layer, 2).unwrap();
        assert!(Arc::ptr_eq(&first.flight, &again.flight) && !again.is_fresh);
        assert_eq!(next(&mut queue), Some((1, 0..2, true)));
        queue.ended(1, 2, &first.flight);
        let anew = queue.want(&layer, 2).unwrap();
        assert!(!Arc::ptr_eq(&first.flight, &anew.flight) && anew.is_fresh);
    }

    #[test]
    fn what_is_read_ahead_for_nobody_is_given_up_and_nothing_else() {
        let (mut queue, layer) = (Queue::<()>::default(), layer(1));
        (0..8).for_each(|block| queue.read_ahead(&layer, block));
        let _awaited = queue.want(&layer, 3);
        queue.leave(1, 2..6);
        queue.leave(2, 0..8);
        assert_eq!(next(&mut queue), Some((1, 3..4, false)));
        assert_eq!(next(&mut queue), Some((1, 0..2, true)));
        queue.ended_ahead();
        assert_eq!(next(&mut queue), Some((1, 6..8, true)));
    }

    #[test]
    fn what_is_taken_is_what_nobody_fetches() {
        let (mut queue, layer) = (Queue::<()>::default(), layer(1));
        (4..6).for_each(|block| queue.read_ahead(&layer, block));
        let mut taken = |blocks: Range<u64>| {
            let run = queue.take(&layer, blocks)?;
            Some(run.first..run.first + run.flights.len() as u64)
        };
        assert_eq!(taken(2..20), Some(2..4));
        assert_eq!(taken(2..20), Some(6..14));
        assert_eq!(taken(2..20), Some(14..20));
        assert_eq!(taken(2..20), None);
        assert!(!queue.is_calm());
        assert_eq!(next(&mut queue), Some((1, 4..6, true)));
        queue.ended_ahead();
        assert!(next(&mut queue).is_none() && queue.is_calm());
        let joined = queue.want(&layer, 7).unwrap();
        assert!(!joined.is_fresh && queue.is_calm(), "it is on its way");
        let _wanted = queue.want(&layer, 30);
        assert!(!queue.is_calm());
    }

    #[test]
    fn what_all_have_stopped_to_wait_for_is_not_fetched() {
        let (mut queue, layer) = (Queue::<()>::default(), layer(1));
        drop(queue.want(&layer, 5));
        let (first, second) = (queue.want(&layer, 9), queue.want(&layer, 9));
        drop(first);
        assert_eq!(next(&mut queue), Some((1, 9..10, false)), "one has stayed");
        assert_eq!(next(&mut queue), None);
        drop(second);
        let again = queue.want(&layer, 5).unwrap();
        assert!(again.is_fresh);
        assert_eq!(next(&mut queue), Some((1, 5..6, false)));
    }

    #[test]
    fn a_flight_that_has_ended_is_not_joined() {
        let (mut queue, layer) = (Queue::<()>::default(), layer(1));
        let late = queue.want(&layer, 5).unwrap();
        late.flight.end(Err(Arc::new(crate::Error::Interrupted)));
        let anew = queue.want(&layer, 5).unwrap();
        assert!(!anew.flight.has_ended() && anew.is_fresh);
    }
}
