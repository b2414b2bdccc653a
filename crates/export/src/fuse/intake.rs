//! When a thread reads, when it listens, and when it leaves a message to another thread.

use super::turns::Turns;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

/// After this many consecutive wake-ups with one message each, a thread no longer looks for a second one, since looking
/// in vain costs a system call...
const LONE: u32 = 4;
/// ...except once in this many wake-ups.
const LOOK: u32 = 16;

/// Where messages come from: the kernel's queue, which all threads share.
pub(super) trait Source {
    type Message;
    type Error: From<io::Error>;
    type Listening: Future<Output = io::Result<()>> + Unpin;

    /// Begins to wait until there is a message, of which the kernel may have told nobody else. If there is one already,
    /// the wait ends at once.
    fn listen(&self) -> Self::Listening;

    /// Takes a message; `None` if there is none.
    fn receive(&self) -> Result<Option<Self::Message>, Self::Error>;

    /// Whether there is a message, or an error to be received.
    fn is_waiting(&self) -> bool;
}

/// What a step has brought.
#[derive(Debug)]
pub(super) enum Step<M, E> {
    Message(M),
    /// The next step may bring more.
    Again,
    /// Nothing is left to do until the waker is woken, or there is room again.
    Wait,
    Failed(E),
}

/// One thread's intake of messages.
///
/// The invariant of all intakes of a queue: whenever a message may be unread, a thread with room is going to read (it
/// was woken, told or has got room, and has found no empty queue since), or begins to listen, or listens and the
/// kernel has told no other thread of the message; or every thread is full, and the first that gets room reads.
///
/// So a thread may rest only once it has found the queue empty since it was last woken, or begun to listen, which looks
/// into the queue. A full thread that has done neither looks, and hands on what there is.
pub(super) struct Intake<'a, S: Source> {
    source: &'a S,
    turns: &'a Turns,
    thread: usize,
    /// A wait that has not ended. It may take wake-ups at any time, whether the thread has room or not.
    listening: Option<S::Listening>,
    /// Whether [`Turns`] knows of room.
    entered: bool,
    todo: Todo,
    /// Messages since the last wake-up.
    taken: u32,
    /// Consecutive wake-ups with one message each.
    lone: u32,
}

/// What a thread knows of the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Todo {
    /// It was empty, or has been handed on, after the last wake-up.
    Nothing,
    /// It may have messages of which no other thread has been told.
    Read,
    /// The same, and no wait is under way: beginning one does as well.
    Listen,
    /// As `Read`, but the thread is full, and there are messages.
    HandOn,
}

impl<'a, S: Source> Intake<'a, S> {
    /// A thread's intake; its place in `turns` is its alone.
    pub(super) fn new(source: &'a S, turns: &'a Turns, thread: usize) -> Self {
        Self {
            source,
            turns,
            thread,
            listening: None,
            entered: false,
            todo: Todo::Nothing,
            taken: 0,
            lone: 0,
        }
    }

    /// Does at most one thing that other threads can see. The queue's other readers may do theirs between two steps.
    ///
    /// To be called again after a message or [`Step::Again`]; after [`Step::Wait`] when the waker is woken, or
    /// `has_room`, whether the thread may take a message, changes.
    pub(super) fn step(
        &mut self,
        cx: &mut Context<'_>,
        has_room: bool,
    ) -> Step<S::Message, S::Error> {
        if has_room != self.entered {
            self.change_room(has_room);
            return Step::Again;
        }
        match (self.todo, has_room) {
            (Todo::Nothing, _) => return self.rest(cx, has_room),
            (Todo::Read | Todo::HandOn, true) => return self.read(),
            (Todo::Listen, true) => {
                self.listening = Some(self.source.listen());
                self.todo = Todo::Nothing;
            }
            (Todo::Read | Todo::Listen, false) => {
                let waiting = self.source.is_waiting();
                self.todo = if waiting { Todo::HandOn } else { Todo::Nothing };
            }
            (Todo::HandOn, false) => {
                self.turns.hand_on(self.thread);
                self.todo = Todo::Nothing;
            }
        }
        Step::Again
    }

    fn change_room(&mut self, has_room: bool) {
        self.entered = has_room;
        if has_room {
            self.turns.enter(self.thread);
            (self.todo, self.taken) = (Todo::Read, 0);
        } else {
            self.turns.leave(self.thread);
        }
    }

    fn read(&mut self) -> Step<S::Message, S::Error> {
        match self.source.receive() {
            Ok(Some(message)) => {
                self.taken += 1;
                let single = self.taken == 1 && self.lone >= LONE;
                self.todo = Todo::Read;
                // A wait that is under way would not look into the queue again.
                if single && self.listening.is_none() && !self.lone.is_multiple_of(LOOK) {
                    self.lone = self.lone.wrapping_add(1);
                    self.todo = Todo::Listen;
                }
                Step::Message(message)
            }
            Ok(None) => {
                self.lone = if self.taken > 1 { 0 } else { self.lone.wrapping_add(1) };
                self.todo = Todo::Nothing;
                Step::Again
            }
            Err(error) => Step::Failed(error),
        }
    }

    /// Waits, unless something has come.
    fn rest(&mut self, cx: &mut Context<'_>, has_room: bool) -> Step<S::Message, S::Error> {
        if let Some(listening) = &mut self.listening
            && let Poll::Ready(heard) = Pin::new(listening).poll(cx)
        {
            self.listening = None;
            if let Err(error) = heard {
                return Step::Failed(error.into());
            }
            (self.todo, self.taken) = (Todo::Read, 0);
            return Step::Again;
        }
        if self.turns.told(self.thread, cx.waker()) {
            self.todo = Todo::Read;
            return Step::Again;
        }
        if has_room && self.listening.is_none() {
            self.todo = Todo::Listen;
            return Step::Again;
        }
        Step::Wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::collections::HashMap;
    use std::rc::Rc;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
    use std::task::{Wake, Waker};

    /// Where a thread's wait is.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Wait {
        None,
        /// Not yet in the kernel.
        Begun,
        /// In the kernel's list; `woken` once the kernel has told it of a message and the thread has not noticed.
        Listed {
            woken: bool,
        },
        Ended,
    }

    /// How the kernel tells of a message.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Way {
        /// It tells the first in the list, whether that has noticed the last time or not: `io_poll_wake`.
        Ring,
        /// It tells the first in the list that it has not told: `ep_poll_callback`.
        Epoll,
    }

    /// The kernel's queue and list of those that listen.
    #[derive(Clone, Debug)]
    struct Kernel {
        way: Way,
        messages: usize,
        waits: Vec<Wait>,
        /// The waits whose end wakes their thread: those that were looked at since they began.
        watched: Vec<bool>,
        list: Vec<usize>,
    }

    impl Kernel {
        fn arrive(&mut self) {
            self.messages += 1;
            let told = self.list.iter().copied().find(|thread| {
                self.way == Way::Ring || self.waits[*thread] == Wait::Listed { woken: false }
            });
            if let Some(thread) = told {
                self.waits[thread] = Wait::Listed { woken: true };
            }
        }

        /// Puts a wait into the list, or ends it.
        fn submit(&mut self, thread: usize) {
            if self.messages > 0 {
                self.waits[thread] = Wait::Ended;
            } else {
                self.waits[thread] = Wait::Listed { woken: false };
                self.list.push(thread);
            }
        }

        /// What a thread that was told does in the kernel: ends its wait, or goes on with it if the queue is empty.
        fn notice(&mut self, thread: usize) {
            if self.messages > 0 {
                self.waits[thread] = Wait::Ended;
                self.list.retain(|listed| *listed != thread);
            } else {
                self.waits[thread] = Wait::Listed { woken: false };
            }
        }
    }

    struct End(Rc<RefCell<Kernel>>, usize);

    impl Future for End {
        type Output = io::Result<()>;

        fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            let mut kernel = self.0.borrow_mut();
            if kernel.waits[self.1] != Wait::Ended {
                kernel.watched[self.1] = true;
                return Poll::Pending;
            }
            kernel.waits[self.1] = Wait::None;
            Poll::Ready(Ok(()))
        }
    }

    impl Source for End {
        type Message = ();
        type Error = io::Error;
        type Listening = Self;

        fn listen(&self) -> Self {
            let mut kernel = self.0.borrow_mut();
            assert_eq!(kernel.waits[self.1], Wait::None, "one wait at a time");
            kernel.waits[self.1] = Wait::Begun;
            kernel.watched[self.1] = false;
            Self(self.0.clone(), self.1)
        }

        fn receive(&self) -> io::Result<Option<()>> {
            let messages = &mut self.0.borrow_mut().messages;
            let some = *messages > 0;
            *messages -= usize::from(some);
            Ok(some.then_some(()))
        }

        fn is_waiting(&self) -> bool {
            self.0.borrow().messages > 0
        }
    }

    #[derive(Debug, Default)]
    struct Flag(AtomicBool);

    impl Wake for Flag {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Relaxed);
        }
    }

    /// What may happen next.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Event {
        /// A thread does a step.
        Step(usize),
        Submit(usize),
        Notice(usize),
        Arrive,
        /// A request is answered.
        Answer(usize),
    }

    #[derive(Clone, Copy, Debug)]
    struct Case {
        way: Way,
        threads: usize,
        /// How many requests each takes.
        most: usize,
        messages: usize,
        /// How many single messages each has had before every step.
        lone: u32,
    }

    /// All that is known between two events.
    #[derive(Clone, Debug)]
    struct State {
        kernel: Kernel,
        turns: Turns,
        threads: Vec<Thread>,
        /// Messages that have not arrived.
        left: usize,
    }

    #[derive(Clone, Copy, Debug)]
    struct Thread {
        entered: bool,
        todo: Todo,
        taken: u32,
        running: usize,
        /// Whether it does a step unless something else comes first.
        awake: bool,
    }

    impl State {
        fn new(case: Case) -> Self {
            let Case { way, threads, messages, .. } = case;
            let waits = vec![Wait::None; threads];
            let watched = vec![false; threads];
            let kernel = Kernel { way, messages: 0, waits, watched, list: Vec::new() };
            let todo = Todo::Nothing;
            let thread = Thread { entered: false, todo, taken: 0, running: 0, awake: true };
            let threads = vec![thread; threads];
            Self { kernel, turns: Turns::new(threads.len()), threads, left: messages }
        }

        /// What may happen next without a message's arrival or a request's answer, and with those.
        fn next(&self) -> (Vec<Event>, Vec<Event>) {
            let mut next = Vec::new();
            let mut outer = Vec::new();
            for (number, thread) in self.threads.iter().enumerate() {
                match self.kernel.waits[number] {
                    Wait::Begun => next.push(Event::Submit(number)),
                    Wait::Listed { woken: true } => next.push(Event::Notice(number)),
                    _ => {}
                }
                if thread.awake {
                    next.push(Event::Step(number));
                }
                if thread.running > 0 {
                    outer.push(Event::Answer(number));
                }
            }
            if self.left > 0 {
                outer.push(Event::Arrive);
            }
            (next, outer)
        }

        fn after(&self, event: Event, case: Case, flags: &[Arc<Flag>]) -> Self {
            let mut state = self.clone();
            match event {
                Event::Step(number) => state.step(number, case, flags),
                Event::Submit(number) => state.kernel.submit(number),
                Event::Notice(number) => state.kernel.notice(number),
                Event::Arrive => {
                    state.left -= 1;
                    state.kernel.arrive();
                }
                Event::Answer(number) => {
                    state.threads[number].running -= 1;
                    state.threads[number].awake = true;
                }
            }
            for (number, thread) in state.threads.iter_mut().enumerate() {
                let ends = state.kernel.waits[number] == Wait::Ended
                    && self.kernel.waits[number] != Wait::Ended;
                // A thread is woken once.
                thread.awake |= ends && state.kernel.watched[number];
            }
            state
        }

        fn step(&mut self, number: usize, case: Case, flags: &[Arc<Flag>]) {
            let thread = self.threads[number];
            let kernel = Rc::new(RefCell::new(self.kernel.clone()));
            let end = End(kernel.clone(), number);
            let listens = self.kernel.waits[number] != Wait::None;
            let mut intake = Intake {
                listening: listens.then(|| End(kernel.clone(), number)),
                entered: thread.entered,
                todo: thread.todo,
                taken: thread.taken,
                lone: case.lone,
                ..Intake::new(&end, &self.turns, number)
            };
            for flag in flags {
                flag.0.store(false, Relaxed);
            }
            let waker = Waker::from(flags[number].clone());
            let mut cx = Context::from_waker(&waker);
            let step = intake.step(&mut cx, thread.running < case.most);
            let (entered, todo) = (intake.entered, intake.todo);
            let (taken, listens) = (intake.taken.min(1), intake.listening.is_some());
            drop(intake);
            let took = matches!(step, Step::Message(()));
            let running = thread.running + usize::from(took);
            let awake = took || matches!(step, Step::Again);
            self.threads[number] = Thread { entered, todo, taken, running, awake };
            for (thread, flag) in self.threads.iter_mut().zip(flags) {
                thread.awake |= flag.0.load(Relaxed);
            }
            self.kernel = kernel.borrow().clone();
            assert_eq!(listens, self.kernel.waits[number] != Wait::None);
        }
    }

    /// Visits every state that can be reached, and returns their number.
    fn explore(case: Case) -> usize {
        let flags: Vec<_> = (0..case.threads).map(|_| Arc::<Flag>::default()).collect();
        let first = State::new(case);
        let mut places = HashMap::from([(format!("{first:?}"), 0)]);
        // With the place of the one before and what happened then, to show the shortest way to a failure.
        let mut states = vec![(0, Event::Arrive, first)];
        // Where the threads and the kernel come to by themselves, without a message or an answer.
        let mut by_themselves: Vec<Vec<usize>> = Vec::new();
        while let Some((_, _, state)) = states.get(by_themselves.len()).cloned() {
            let at = by_themselves.len();
            let (next, outer) = state.next();
            let has_room = state.threads.iter().any(|thread| thread.running < case.most);
            if next.is_empty() && state.kernel.messages > 0 && has_room {
                let way = way_to(&states, at);
                panic!("a message stays unread, and a thread has room: {case:?}, {way:?}");
            }
            let inner = next.len();
            let mut leads = Vec::new();
            for (number, event) in next.into_iter().chain(outer).enumerate() {
                let after = state.after(event, case, &flags);
                let known = places.len();
                let place = *places.entry(format!("{after:?}")).or_insert(known);
                if place == known {
                    states.push((at, event, after));
                }
                if number < inner {
                    leads.push(place);
                }
            }
            by_themselves.push(leads);
        }
        if let Some(at) = endless(&by_themselves) {
            let way = way_to(&states, at);
            panic!("the threads go on for ever with nothing to do: {case:?}, {way:?}");
        }
        states.len()
    }

    /// What has happened before a state.
    fn way_to(states: &[(usize, Event, State)], mut at: usize) -> Vec<Event> {
        let mut way = Vec::new();
        while at > 0 {
            way.push(states[at].1);
            at = states[at].0;
        }
        way.reverse();
        way
    }

    /// A state that leads to itself, or to one that does, if there is one.
    fn endless(leads: &[Vec<usize>]) -> Option<usize> {
        let mut before = vec![Vec::new(); leads.len()];
        for (from, to) in leads.iter().enumerate() {
            for to in to {
                before[*to].push(from);
            }
        }
        // Those that lead only to ends are taken away, until none is left.
        let mut left: Vec<usize> = leads.iter().map(Vec::len).collect();
        let mut ends: Vec<usize> = (0..leads.len()).filter(|at| left[*at] == 0).collect();
        while let Some(end) = ends.pop() {
            for from in &before[end] {
                left[*from] -= 1;
                if left[*from] == 0 {
                    ends.push(*from);
                }
            }
        }
        left.iter().position(|left| *left > 0)
    }

    #[test]
    fn no_message_stays_unread_and_no_thread_works_in_vain_in_whatever_order_things_happen() {
        for way in [Way::Ring, Way::Epoll] {
            for lone in [0, LONE] {
                for (threads, most, messages) in [(1, 1, 3), (2, 1, 3), (2, 2, 3), (3, 1, 2)] {
                    let states = explore(Case { way, threads, most, messages, lone });
                    println!("{way:?}, {threads} threads, {most} each, after {lone}: {states}");
                    assert!(states > 100);
                }
            }
        }
    }
}
