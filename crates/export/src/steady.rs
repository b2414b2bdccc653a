//! Requests to a disk that may pause: those that fail wait, and are tried again, as the disk's policy says.

use crate::stop::Stop;
use isobath_buf::Lender;
use isobath_disk::pausing::{Held, Pausing};
use isobath_disk::throttle::Direction;
use isobath_disk::{BlockDevice, DiskError, Result, ZeroFlags};
use isobath_storage::IoBuf;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

/// A device, and what ends the requests that a client has sent.
///
/// While the disk is paused requests wait here. Once the end is requested none waits: those that have not been tried
/// are, and those that failed fail.
pub(crate) struct Steady<'a, D> {
    device: &'a D,
    ending: &'a Stop,
}

/// A request that failed.
#[derive(Debug)]
pub(crate) struct Failed {
    /// Why.
    pub(crate) error: DiskError,
    /// The disk is paused, and the request would have been tried again if its frontend did not end.
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

impl<'a, D: BlockDevice> Steady<'a, D> {
    pub(crate) fn new(device: &'a D, ending: &'a Stop) -> Self {
        Self { device, ending }
    }

    /// What may keep requests waiting; `None` as long as nothing can.
    #[inline]
    fn pausing(&self) -> Option<&'a Pausing> {
        self.device.pausing().filter(|pausing| !pausing.is_plain())
    }

    /// Waits while the disk is paused, and then for its limits. See [`BlockDevice::admit`].
    pub(crate) async fn admit(&self, direction: Direction, bytes: u64) {
        if let Some(pausing) = self.pausing() {
            Box::pin(self.unless_ending(pausing.pass(direction))).await;
        }
        self.device.admit(direction, bytes).await;
    }

    /// See [`BlockDevice::read`].
    pub(crate) async fn read(&self, offset: u64, buf: IoBuf) -> Outcome<IoBuf> {
        match self.pausing() {
            None => Ok(self.device.read(offset, buf).await?),
            Some(pausing) => Box::pin(self.read_again(pausing, offset, buf)).await,
        }
    }

    async fn read_again(&self, pausing: &Pausing, offset: u64, buf: IoBuf) -> Outcome<IoBuf> {
        let mut lender = Lender::new(buf);
        let mut failed: Option<DiskError> = None;
        loop {
            self.unless_ending(pausing.pass(Direction::Read)).await;
            let round = pausing.round();
            let Some(lent) = lender.to_be_filled() else {
                // What is left of the last attempt may still fill the memory.
                return Err(failed.unwrap_or(DiskError::Closed).into());
            };
            match self.device.read(offset, lent).await {
                Ok(filled) => return Ok(lender.take_back(filled)),
                Err(error) => {
                    failed = Some(self.hold(pausing, round, Direction::Read, error).await?);
                }
            }
        }
    }

    /// See [`BlockDevice::write`].
    pub(crate) async fn write(&self, offset: u64, buf: IoBuf) -> Outcome<IoBuf> {
        match self.pausing() {
            None => Ok(self.device.write(offset, buf).await?),
            Some(pausing) => Box::pin(self.write_again(pausing, offset, buf)).await,
        }
    }

    async fn write_again(&self, pausing: &Pausing, offset: u64, buf: IoBuf) -> Outcome<IoBuf> {
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
            None => Ok(zero().await?),
            Some(pausing) => Box::pin(self.change_again(pausing, zero)).await,
        }
    }

    /// See [`BlockDevice::discard`].
    pub(crate) async fn discard(&self, offset: u64, length: u64) -> Outcome<()> {
        let discard = || self.device.discard(offset, length);
        match self.pausing() {
            None => Ok(discard().await?),
            Some(pausing) => Box::pin(self.change_again(pausing, discard)).await,
        }
    }

    /// Carries out a change until it succeeds, or is to fail. The same change made twice is the same as made once.
    async fn change_again<T, F: Future<Output = Result<T>>>(
        &self,
        pausing: &Pausing,
        attempt: impl Fn() -> F,
    ) -> Outcome<T> {
        loop {
            self.unless_ending(pausing.pass(Direction::Write)).await;
            let round = pausing.round();
            match attempt().await {
                Ok(done) => return Ok(done),
                Err(error) => {
                    self.hold(pausing, round, Direction::Write, error).await?;
                }
            }
        }
    }

    /// See [`BlockDevice::flush`].
    pub(crate) async fn flush(&self) -> Outcome<()> {
        match self.pausing() {
            None => Ok(self.device.flush().await?),
            Some(pausing) => Box::pin(self.flush_again(pausing)).await,
        }
    }

    async fn flush_again(&self, pausing: &Pausing) -> Outcome<()> {
        loop {
            self.unless_ending(pausing.pass_flush()).await;
            let round = pausing.round();
            match self.device.flush().await {
                Ok(()) => return Ok(()),
                Err(error) => {
                    self.hold(pausing, round, Direction::Write, error).await?;
                }
            }
        }
    }

    /// Waits until a request that failed is to be tried again, and gives its error back.
    async fn hold(
        &self,
        pausing: &Pausing,
        round: u64,
        direction: Direction,
        error: DiskError,
    ) -> Outcome<DiskError> {
        match self.unless_ending(pausing.hold(round, direction, &error)).await {
            Some(Held::Again) => Ok(error),
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
