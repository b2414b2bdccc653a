//! One thread's loop, which receives requests from the kernel and runs them concurrently.

use super::channel::{Channel, MAX_WRITE, NoMessage};
use super::intake::{Intake, Step};
use super::serve::{Export, Service};
use super::turns::Turns;
use crate::pool::Pool;
use crate::slots::Slots;
use crate::stop::Stop;
use isobath_disk::BlockDevice;
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::task::{Context, Poll};

/// Bytes of free read buffers that a thread keeps.
const POOL_BYTES: usize = 16 << 20;
/// Number of requests to receive before those started are submitted to the ring.
const BURST: usize = 16;

/// Serves a channel, with its place in `turns`, until the kernel ends the connection or `stop` is requested; then waits
/// for the requests in flight. Returns whether the kernel ended the connection.
pub(super) async fn work<D: BlockDevice>(
    export: &Export<D>,
    channel: &Channel,
    (turns, thread): (&Turns, usize),
    stop: &Stop,
) -> io::Result<bool> {
    let most = export.requests.max(1);
    let pool = Pool::new(POOL_BYTES.min(most * MAX_WRITE));
    let running = Cell::new(0);
    let ending = Stop::default();
    let slots = RefCell::new(Slots::new());
    let mut intake = Intake::new(channel, turns, thread);
    let mut receive = |cx: &mut Context<'_>| {
        let mut taken = 0;
        loop {
            match intake.step(cx, running.get() < most) {
                Step::Message((message, payload)) => {
                    running.set(running.get() + 1);
                    let (pool, running, ending) = (&pool, &running, &ending);
                    let service = Service { export, channel, pool, running, ending };
                    slots.borrow_mut().start(|| service.serve(message, payload));
                    taken += 1;
                    if taken == BURST {
                        cx.waker().wake_by_ref();
                        return Poll::Pending;
                    }
                }
                Step::Again => {}
                Step::Wait => return Poll::Pending,
                Step::Failed(NoMessage::Ended) => return Poll::Ready(Ok(true)),
                Step::Failed(error) => return Poll::Ready(Err(io::Error::other(error))),
            }
        }
    };
    let mut stopped = pin!(stop.requested());
    let mut ended = None;
    let mut drained = None;
    poll_fn(|cx| {
        slots.borrow_mut().poll(cx);
        if ended.is_none() {
            if stopped.as_mut().poll(cx).is_ready() {
                ended = Some(Ok(false));
            } else if let Poll::Ready(end) = receive(cx) {
                ended = Some(end);
            }
        }
        if ended.is_none() {
            return Poll::Pending;
        }
        if slots.borrow().is_empty()
            && let Some(end) = ended.take()
        {
            return Poll::Ready(end);
        }
        // Requests that wait for the disk's limits pass now, and those that wait for a paused disk end.
        drained.get_or_insert_with(|| {
            ending.request();
            export.device.drain()
        });
        Poll::Pending
    })
    .await
}
