//! One request, from its creation until its reply has arrived.
//!
//! The future that waits for it, the sending thread and the receiving thread share it. It owns its buffers, so the
//! future may be dropped at any time.

use crate::reply::{Expected, Extent};
use isobath_storage::IoBuf;
use isobath_sync::{Mutex, WaitGroup};
use std::fmt;
use std::io;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// The outcome of a request.
pub(crate) struct Done {
    /// Its buffers: the data that was written or read.
    pub(crate) bufs: Vec<IoBuf>,
    pub(crate) result: io::Result<Option<Extent>>,
}

pub(crate) struct Call {
    slot: Mutex<Slot>,
    /// Counts the calls in progress whose futures were dropped.
    landing: Arc<WaitGroup>,
}

struct Slot {
    bufs: Vec<IoBuf>,
    /// Its first byte may have been sent.
    started: bool,
    /// A thread has the buffers.
    lent: bool,
    /// The part of its reply received so far; `None` once the reply is complete.
    expected: Option<Expected>,
    result: Option<io::Result<Option<Extent>>>,
    waker: Option<Waker>,
    abandoned: bool,
}

impl Slot {
    fn has_ended(&self) -> bool {
        self.result.is_some() && !self.lent
    }
}

impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Call").finish_non_exhaustive()
    }
}

impl Call {
    pub(crate) fn new(expected: Expected, bufs: Vec<IoBuf>, landing: Arc<WaitGroup>) -> Self {
        let slot = Slot {
            bufs,
            started: false,
            lent: false,
            expected: Some(expected),
            result: None,
            waker: None,
            abandoned: false,
        };
        Self { slot: Mutex::new(slot), landing }
    }

    /// Changes the slot, and wakes those that wait if this ends the call.
    fn change<T>(&self, change: impl FnOnce(&mut Slot) -> T) -> T {
        let mut slot = self.slot.lock();
        let before = slot.has_ended();
        let value = change(&mut slot);
        if before || !slot.has_ended() {
            return value;
        }
        let (waker, abandoned) = (slot.waker.take(), slot.abandoned);
        drop(slot);
        if let Some(waker) = waker {
            waker.wake();
        }
        if abandoned {
            self.landing.end();
        }
        value
    }

    /// Begins to send it. If it has `data` to send, lends out its buffers until [`give_back`](Self::give_back). `None`
    /// if the call has already failed.
    pub(crate) fn start(&self, data: bool) -> Option<Vec<IoBuf>> {
        self.change(|slot| {
            if slot.result.is_some() {
                return None;
            }
            slot.started = true;
            if !data {
                return Some(Vec::new());
            }
            slot.lent = true;
            Some(std::mem::take(&mut slot.bufs))
        })
    }

    /// Lends out the reply's state and the buffers to receive into; `None` if the request was not sent.
    pub(crate) fn receive(&self, data: bool) -> Option<(Expected, Vec<IoBuf>)> {
        self.change(|slot| {
            if !slot.started {
                return None;
            }
            let expected = slot.expected.take()?;
            let bufs = if data { std::mem::take(&mut slot.bufs) } else { Vec::new() };
            slot.lent |= data;
            Some((expected, bufs))
        })
    }

    /// Returns the buffers lent out by [`start`](Self::start).
    pub(crate) fn give_back(&self, bufs: Vec<IoBuf>) {
        self.change(|slot| {
            slot.bufs = bufs;
            slot.lent = false;
        });
    }

    /// Returns what [`receive`](Self::receive) lent out, with the state of an unfinished reply or the result of a
    /// finished one.
    pub(crate) fn received(
        &self,
        bufs: Option<Vec<IoBuf>>,
        reply: Result<Expected, io::Result<Option<Extent>>>,
    ) {
        self.change(|slot| {
            if let Some(bufs) = bufs {
                slot.bufs = bufs;
                slot.lent = false;
            }
            match reply {
                Ok(expected) => slot.expected = Some(expected),
                Err(result) => {
                    slot.result.get_or_insert(result);
                }
            }
        });
    }

    /// Ends it with an error, unless it already has a result.
    pub(crate) fn fail(&self, error: impl FnOnce() -> io::Error) {
        self.change(|slot| {
            if slot.result.is_none() {
                slot.result = Some(Err(error()));
            }
        });
    }

    /// Its outcome, once it has ended.
    pub(crate) fn poll(&self, context: &Context<'_>) -> Poll<Done> {
        let mut slot = self.slot.lock();
        if !slot.has_ended() {
            slot.waker = Some(context.waker().clone());
            return Poll::Pending;
        }
        match slot.result.take() {
            Some(result) => Poll::Ready(Done { bufs: std::mem::take(&mut slot.bufs), result }),
            None => Poll::Pending,
        }
    }

    /// Notes that its future was dropped: later requests must wait for its end.
    pub(crate) fn abandon(&self) {
        let mut slot = self.slot.lock();
        if !slot.has_ended() {
            slot.abandoned = true;
            slot.waker = None;
            self.landing.begin();
        }
    }
}
