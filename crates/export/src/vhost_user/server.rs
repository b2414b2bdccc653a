//! The server: one disk on one socket, one client at a time.

use super::bounce::{BUDGET, Bounces};
use super::options::{Options, OptionsError};
use super::session::{Served, Session};
use crate::give_way::give_way;
use crate::stop::Stop;
use isobath_disk::BlockDevice;
use isobath_ring::net::after_failed_accept;
use isobath_ring::{Handle, Readiness};
use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

/// A vhost-user-blk server for one disk.
///
/// It can be shared between threads. See the [module](super) for an example.
pub struct Server<D> {
    served: Served<D>,
    connected: AtomicBool,
}

impl<D: BlockDevice> Server<D> {
    /// A server for a disk.
    ///
    /// # Errors
    /// An option is out of range.
    pub fn new(device: Arc<D>, options: Options) -> Result<Arc<Self>, OptionsError> {
        Self::bouncing(device, options, Bounces::of(&BUDGET))
    }

    /// As [`new`](Self::new), with another share of memory for bounce buffers.
    pub(super) fn bouncing(
        device: Arc<D>,
        options: Options,
        bounces: Bounces,
    ) -> Result<Arc<Self>, OptionsError> {
        options.check()?;
        let connected = AtomicBool::new(false);
        let bounces = Arc::new(bounces);
        let served = Served { device, bounces, options, stop: Stop::default() };
        Ok(Arc::new(Self { served, connected }))
    }

    /// Serves clients, one after another, until [`stop`](Self::stop); the next one waits until the current one has
    /// left. Queues are assigned to `workers` in turn, or stay on this thread if there are none.
    ///
    /// The socket file, if there is one, is not removed.
    ///
    /// # Errors
    /// The listener fails.
    ///
    /// # Panics
    /// If called outside [`Executor::block_on`](isobath_ring::Executor::block_on).
    pub async fn serve(
        self: &Arc<Self>,
        listener: UnixListener,
        workers: &[Handle],
    ) -> io::Result<()> {
        listener.set_nonblocking(true)?;
        let ready = Readiness::from(OwnedFd::from(listener.try_clone()?));
        let own = [isobath_ring::handle()];
        let workers = if workers.is_empty() { &own } else { workers };
        while !self.served.stop.is_requested() {
            match listener.accept() {
                Ok((socket, _)) => {
                    self.connected.store(true, Ordering::Release);
                    Session::new(&self.served, workers).run(socket).await;
                    self.connected.store(false, Ordering::Release);
                    // The next may have connected already.
                    give_way().await;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.unless_stopped(ready.ready(libc::POLLIN)).await.transpose()?;
                }
                Err(error) => {
                    let recovered = after_failed_accept(error, |error| {
                        tracing::warn!(%error, "cannot accept a connection; retrying");
                    });
                    self.unless_stopped(recovered).await.transpose()?;
                }
            }
        }
        Ok(())
    }

    /// Shuts the server down: requests in flight are completed and shown to the guest, the queues are stopped, and the
    /// connection is closed. [`serve`](Self::serve) then returns. May be called from any thread, and more than once.
    pub fn stop(&self) {
        self.served.stop.request();
    }

    /// Whether a client is connected.
    pub fn connected(&self) -> bool {
        self.connected.load(Ordering::Acquire)
    }

    /// The future's output, or `None` once the server should stop.
    async fn unless_stopped<F: Future>(&self, future: F) -> Option<F::Output> {
        let mut stopped = pin!(self.served.stop.requested());
        let mut future = pin!(future);
        poll_fn(|cx| {
            if stopped.as_mut().poll(cx).is_ready() {
                return Poll::Ready(None);
            }
            future.as_mut().poll(cx).map(Some)
        })
        .await
    }
}
