//! One thread's loop, which receives requests from the kernel and runs them concurrently.

use super::channel::{Channel, MAX_WRITE, NoMessage};
use super::serve::{Export, Service};
use crate::pool::Pool;
use crate::slots::Slots;
use crate::stop::Stop;
use isobath_disk::BlockDevice;
use isobath_ring::yield_now;
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::task::Poll;

/// Bytes of free read buffers that a thread keeps.
const POOL_BYTES: usize = 16 << 20;
/// Number of requests to receive before those started are submitted to the ring.
const BURST: usize = 16;

/// After this many consecutive wake-ups with one message each, the thread no longer looks for a second one, since
/// looking in vain costs a system call...
const LONE: u32 = 4;
/// ...except once in this many wake-ups.
const LOOK: u32 = 16;

/// Serves a channel until the kernel ends the connection or `stop` is requested; then waits for the requests in flight.
/// Returns whether the kernel ended the connection.
pub(super) async fn work<D: BlockDevice>(
    export: &Export<D>,
    channel: &Channel,
    stop: &Stop,
) -> io::Result<bool> {
    let most = export.requests.max(1);
    let pool = Pool::new(POOL_BYTES.min(most * MAX_WRITE));
    let running = Cell::new(0);
    let ending = Stop::default();
    let slots = RefCell::new(Slots::new());
    let mut intake = pin!(async {
        let mut lone = 0_u32;
        loop {
            channel.readable().await?;
            let mut taken = 0;
            loop {
                poll_fn(|_| if running.get() < most { Poll::Ready(()) } else { Poll::Pending })
                    .await;
                match channel.receive() {
                    Ok((message, payload)) => {
                        running.set(running.get() + 1);
                        let (pool, running, ending) = (&pool, &running, &ending);
                        let service = Service { export, channel, pool, running, ending };
                        slots.borrow_mut().start(|| service.serve(message, payload));
                    }
                    Err(NoMessage::Empty) => break,
                    Err(NoMessage::Ended) => return Ok(true),
                    Err(error) => return Err(io::Error::other(error)),
                }
                taken += 1;
                if taken == 1 && lone >= LONE && !lone.is_multiple_of(LOOK) {
                    break;
                }
                if taken % BURST == 0 {
                    yield_now().await;
                }
            }
            lone = if taken > 1 { 0 } else { lone.wrapping_add(1) };
        }
    });
    let mut stopped = pin!(stop.requested());
    let mut ended = None;
    let mut drained = None;
    poll_fn(|cx| {
        slots.borrow_mut().poll(cx);
        if ended.is_none() {
            if stopped.as_mut().poll(cx).is_ready() {
                ended = Some(Ok(false));
            } else if let Poll::Ready(end) = intake.as_mut().poll(cx) {
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
