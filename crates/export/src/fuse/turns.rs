//! Which thread reads the messages that another cannot read.

use parking_lot::Mutex;
use std::fmt;
use std::task::Waker;

/// The threads of an export, of which each reads only while it has room for a request.
///
/// The kernel tells one of those that listen of each message. It may tell one thread of several, which then takes one
/// and is full. What a thread was told of and has not read, it hands on here to another that has room. If none has,
/// nothing need be remembered: a thread that gets room reads.
#[derive(Debug)]
pub(super) struct Turns {
    places: Box<[Mutex<Place>]>,
}

/// A thread's part.
#[derive(Default)]
#[cfg_attr(test, derive(Clone))]
struct Place {
    has_room: bool,
    /// Whether it has been told to read since it last asked.
    told: bool,
    waker: Option<Waker>,
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { has_room, told, waker: _ } = self;
        f.debug_struct("Place").field("has_room", has_room).field("told", told).finish()
    }
}

#[cfg(test)]
impl Clone for Turns {
    fn clone(&self) -> Self {
        Self { places: self.places.iter().map(|place| Mutex::new(place.lock().clone())).collect() }
    }
}

impl Turns {
    /// For this many threads, none of which has room yet.
    pub(super) fn new(threads: usize) -> Self {
        Self { places: (0..threads).map(|_| Mutex::default()).collect() }
    }

    /// A thread has room from now on. It must read after this.
    pub(super) fn enter(&self, thread: usize) {
        if let Some(place) = self.places.get(thread) {
            place.lock().has_room = true;
        }
    }

    /// A thread is full from now on. What it has been told stays to be asked for.
    pub(super) fn leave(&self, thread: usize) {
        if let Some(place) = self.places.get(thread) {
            place.lock().has_room = false;
        }
    }

    /// Whether a thread has been told to read since it last asked; if not, `waker` is woken when it is.
    #[must_use = "it must read, or hand that on"]
    pub(super) fn told(&self, thread: usize, waker: &Waker) -> bool {
        let Some(place) = self.places.get(thread) else { return false };
        let mut place = place.lock();
        if !place.waker.as_ref().is_some_and(|known| known.will_wake(waker)) {
            place.waker = Some(waker.clone());
        }
        std::mem::take(&mut place.told)
    }

    /// Tells one of the other threads that have room to read.
    pub(super) fn hand_on(&self, from: usize) {
        let (before, after) = self.places.split_at(from.min(self.places.len()));
        for place in after.iter().skip(1).chain(before) {
            let mut place = place.lock();
            if place.has_room {
                place.told = true;
                let waker = place.waker.clone();
                drop(place);
                if let Some(waker) = waker {
                    waker.wake();
                }
                return;
            }
        }
    }
}
