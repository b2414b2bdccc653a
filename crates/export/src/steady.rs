//! Requests to a disk that may pause: those that fail wait, and are tried again, as the disk's policy says.

use crate::give_way::give_way;
use crate::stop::Stop;
use isobath_buf::Lender;
use isobath_disk::pausing::{Held, Inside, Pausing};
use isobath_disk::throttle::Direction;
use isobath_disk::{BlockDevice, DiskError, Result, ZeroFlags};
use isobath_storage::IoBuf;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

/// A device, and what ends the requests that a client has sent.
///
/// While the disk is paused requests wait here. Once the end is requested none waits: those that failed fail, and so do
/// those that have not been tried if the operator has stopped the disk; otherwise they are tried.
pub(crate) struct Steady<'a, D> {
    device: &'a D,
    ending: &'a Stop,
}

/// A request that failed.
#[derive(Debug)]
pub(crate) struct Failed {
    /// Why.
    pub(crate) error: DiskError,
    /// The disk is paused, and the request would have been tried, or tried again, if its frontend did not end.
    pub(crate) held: bool,
}

impl From<DiskError> for Failed {
    fn from(error: DiskError) -> Self {
        Self { error, held: false }
    }
}

impl From<Failed> for DiskError {
    fn from(failed: Failed) -> Self {
        failed.error
    }
}

type Outcome<T> = std::result::Result<T, Failed>;

/// An attempt that may be made now, and which one it is.
pub(crate) struct Attempt<'a> {
    /// `None` on a device that never pauses.
    _inside: Option<Inside<'a>>,
    round: u64,
}

impl<'a, D: BlockDevice> Steady<'a, D> {
    pub(crate) fn new(device: &'a D, ending: &'a Stop) -> Self {
        Self { device, ending }
    }

    /// What may keep requests waiting; `None` as long as nothing can. The other is kept while a request is carried out.
    #[inline]
    fn pausing(&self) -> (Option<&'a Pausing>, Option<Inside<'a>>) {
        match self.device.pausing() {
            None => (None, None),
            Some(pausing) => match pausing.enter() {
                None => (Some(pausing), None),
                inside => (None, inside),
            },
        }
    }

    /// Waits while the disk is paused, and then for its limits. See [`BlockDevice::admit`].
    pub(crate) async fn admit(&self, direction: Direction, bytes: u64) -> Outcome<()> {
        if self.device.pausing().is_some_and(|pausing| !pausing.is_plain()) {
            drop(self.ready(direction).await?);
        }
        self.device.admit(direction, bytes).await;
        Ok(())
    }

    /// Waits while the disk is paused, until an attempt may be made. If it fails, see [`hold`](Self::hold).
    pub(crate) async fn ready(&self, direction: Direction) -> Outcome<Attempt<'a>> {
        match self.pausing() {
            (None, inside) => Ok(Attempt { _inside: inside, round: 0 }),
            (Some(pausing), _) => Box::pin(self.pass(pausing, pausing.pass(direction))).await,
        }
    }

    /// As [`ready`](Self::ready); `None` if that would wait, or fail.
    pub(crate) fn ready_now(&self, direction: Direction) -> Option<Attempt<'a>> {
        let (pausing, inside) = self.pausing();
        let Some(pausing) = pausing else { return Some(Attempt { _inside: inside, round: 0 }) };
        let inside = if self.ending.is_requested() {
            pausing.enter_unless_stopped()?
        } else {
            pausing.try_pass(direction)?
        };
        Some(Attempt { _inside: Some(inside), round: pausing.round() })
    }

    /// As [`ready`](Self::ready), with this wait.
    async fn pass(
        &self,
        pausing: &'a Pausing,
        wait: impl Future<Output = Inside<'a>>,
    ) -> Outcome<Attempt<'a>> {
        let inside = self.unless_ending(wait).await.or_else(|| pausing.enter_unless_stopped());
        match inside {
            Some(inside) => Ok(Attempt { _inside: Some(inside), round: pausing.round() }),
            None => Err(Failed { error: DiskError::Closed, held: true }),
        }
    }

    /// See [`BlockDevice::read`].
    pub(crate) async fn read(&self, offset: u64, buf: IoBuf) -> Outcome<IoBuf> {
        match self.pausing() {
            (None, _inside) => Ok(self.device.read(offset, buf).await?),
            (Some(pausing), _) => Box::pin(self.read_again(pausing, offset, buf)).await,
        }
    }

    async fn read_again(&self, pausing: &'a Pausing, offset: u64, buf: IoBuf) -> Outcome<IoBuf> {
        let mut lender = Lender::new(buf);
        loop {
            let attempt = self.pass(pausing, pausing.pass(Direction::Read)).await?;
            let lent = loop {
                match lender.to_be_filled() {
                    Some(lent) => break lent,
                    // What is left of the last attempt may still fill the memory.
                    None => give_way().await,
                }
            };
            match self.device.read(offset, lent).await {
                Ok(filled) => return Ok(lender.take_back(filled)),
                Err(error) => self.hold(attempt, Direction::Read, error).await?,
            }
        }
    }

    /// See [`BlockDevice::write`].
    pub(crate) async fn write(&self, offset: u64, buf: IoBuf) -> Outcome<IoBuf> {
        match self.pausing() {
            (None, _inside) => Ok(self.device.write(offset, buf).await?),
            (Some(pausing), _) => Box::pin(self.write_again(pausing, offset, buf)).await,
        }
    }

    async fn write_again(&self, pausing: &'a Pausing, offset: u64, buf: IoBuf) -> Outcome<IoBuf> {
        let lender = Lender::new(buf);
        let written =
            self.change_again(pausing, || self.device.write(offset, lender.to_be_read())).await?;
        Ok(lender.take_back(written))
    }

    /// See [`BlockDevice::write_zeroes`].
    pub(crate) async fn write_zeroes(
        &self,
        offset: u64,
        length: u64,
        flags: ZeroFlags,
    ) -> Outcome<()> {
        let zero = || self.device.write_zeroes(offset, length, flags);
        match self.pausing() {
            (None, _inside) => Ok(zero().await?),
            (Some(pausing), _) => Box::pin(self.change_again(pausing, zero)).await,
        }
    }

    /// See [`BlockDevice::discard`].
    pub(crate) async fn discard(&self, offset: u64, length: u64) -> Outcome<()> {
        let discard = || self.device.discard(offset, length);
        match self.pausing() {
            (None, _inside) => Ok(discard().await?),
            (Some(pausing), _) => Box::pin(self.change_again(pausing, discard)).await,
        }
    }

    /// Carries out a change until it succeeds, or is to fail. The same change made twice is the same as made once.
    async fn change_again<T, F: Future<Output = Result<T>>>(
        &self,
        pausing: &'a Pausing,
        change: impl Fn() -> F,
    ) -> Outcome<T> {
        loop {
            let attempt = self.pass(pausing, pausing.pass(Direction::Write)).await?;
            match change().await {
                Ok(done) => return Ok(done),
                Err(error) => self.hold(attempt, Direction::Write, error).await?,
            }
        }
    }

    /// See [`BlockDevice::flush`].
    pub(crate) async fn flush(&self) -> Outcome<()> {
        match self.pausing() {
            (None, _inside) => Ok(self.device.flush().await?),
            (Some(pausing), _) => Box::pin(self.flush_again(pausing)).await,
        }
    }

    async fn flush_again(&self, pausing: &'a Pausing) -> Outcome<()> {
        loop {
            let attempt = self.pass(pausing, pausing.pass_flush()).await?;
            match self.device.flush().await {
                Ok(()) => return Ok(()),
                Err(error) => self.hold(attempt, Direction::Write, error).await?,
            }
        }
    }

    /// Waits until a request that failed is to be tried again.
    pub(crate) async fn hold(
        &self,
        attempt: Attempt<'a>,
        direction: Direction,
        error: DiskError,
    ) -> Outcome<()> {
        let Attempt { _inside: inside, round } = attempt;
        drop(inside);
        let Some(pausing) = self.device.pausing() else { return Err(error.into()) };
        let wait = self.unless_ending(pausing.hold(round, direction, &error));
        match Box::pin(wait).await {
            Some(Held::Again) => Ok(()),
            Some(Held::Fails) => Err(error.into()),
            None => Err(Failed { error, held: true }),
        }
    }

    /// The result of a wait, or `None` once the end is requested. What needs no wait is never cut short.
    async fn unless_ending<F: Future>(&self, wait: F) -> Option<F::Output> {
        let mut wait = pin!(wait);
        let mut ending = pin!(self.ending.requested());
        poll_fn(|cx| match wait.as_mut().poll(cx) {
            Poll::Ready(done) => Poll::Ready(Some(done)),
            Poll::Pending => ending.as_mut().poll(cx).map(|()| None),
        })
        .await
    }
}
