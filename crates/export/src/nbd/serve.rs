//! Executing requests and queueing their replies.

use super::context::{Context, extents};
use super::reply;
use super::request::Command;
use super::session::{Session, Ticket};
use super::transport::Transport;
use super::wire::NbdError;
use crate::pool::{Pool, Pooled};
use crate::steady::{Failed, Steady};
use isobath_disk::throttle::Direction;
use isobath_disk::{BlockDevice, BlockStatus, DiskError, ZeroFlags};
use std::pin::pin;

/// Bytes read at a time for `CACHE`.
const CACHE_STEP: u32 = 1 << 20;
/// Maximum number of extents to query for one `BLOCK_STATUS`, and for one with `REQ_ONE`. The first is what a context
/// has room for in 32 KiB of the reply.
const MAX_RUNS: (usize, usize) = (4092, 64);

/// Bytes of an extent in a reply, and an upper bound of those before the extents of a context.
const EXTENT: (usize, usize) = (8, 32);

/// How many bytes of memory a request takes until its reply is sent, in which so many contexts are described.
pub(crate) fn memory_of(command: Command, contexts: usize) -> usize {
    match command {
        Command::Read { length, .. } | Command::Write { length, .. } => {
            Pool::footprint(length as usize)
        }
        Command::Cache { length, .. } => Pool::footprint(length.min(CACHE_STEP) as usize),
        Command::BlockStatus { one, .. } => {
            let runs = if one { MAX_RUNS.1 } else { MAX_RUNS.0 };
            // The disk may find one more before it knows that these are too many; its list grows by doubling.
            let found = (runs + 1).next_power_of_two() * size_of::<BlockStatus>();
            let extents = runs * size_of::<(u32, u32)>();
            let replies = contexts * (EXTENT.1 + EXTENT.0 * runs);
            found + extents + replies.next_power_of_two()
        }
        _ => 0,
    }
}

/// Logs the error of a request, and returns its number.
pub(crate) fn note_failure(command: Command, error: &DiskError) -> NbdError {
    let number = NbdError::from_errno(error.errno());
    if number == NbdError::NotSupported {
        tracing::debug!(?command, %error, "request refused");
    } else {
        tracing::warn!(?command, %error, "request failed");
    }
    number
}

impl<D: BlockDevice, T: Transport> Session<'_, D, T> {
    /// How many bytes of memory a request takes until its reply is sent.
    pub(crate) fn memory(&self, command: Command) -> usize {
        memory_of(command, self.agreement.contexts.iter().count())
    }

    /// Executes one request and queues the reply.
    pub(crate) async fn serve(&self, ticket: Ticket, command: Command, payload: Option<Pooled>) {
        let done = match command {
            Command::Read { offset, length } => {
                return self.serve_read(ticket, offset, length).await;
            }
            Command::BlockStatus { offset, length, one } => {
                return self.serve_block_status(ticket, offset, length, one).await;
            }
            Command::Write { offset, length, fua } => {
                let result = match self.admit_change(length).await {
                    Ok(()) => self.serve_write(offset, payload).await,
                    Err(error) => Err(error),
                };
                self.durable(fua, result).await
            }
            Command::Trim { offset, length, fua } => {
                let result = self.serve_trim(offset, length).await;
                self.durable(fua, result).await
            }
            Command::WriteZeroes { offset, length, flags, fua } => {
                let result = self.serve_zero(offset, length, flags).await;
                self.durable(fua, result).await
            }
            Command::Flush => self.steady().flush().await.map_err(DiskError::from),
            Command::Cache { offset, length } => self.serve_cache(offset, length).await,
            Command::Disconnect => Ok(()),
        };
        match done {
            Ok(()) => self.reply(ticket, &reply::simple(ticket.cookie, None), None),
            Err(error) => self.fail_device(ticket, command, &error),
        }
    }

    /// The disk, for requests that wait while it is paused, until the server or the export ends, or the client sends no
    /// more.
    ///
    /// A client that has left may come back, and send what was not answered once more. It must not be carried out again
    /// after that. One that has only closed its side gets an error.
    pub(crate) fn steady(&self) -> Steady<'_, D> {
        Steady::new(self.device, &self.ending)
    }

    /// Waits for the disk's limits, also when the client has left: what it has sent is carried out, and counts.
    pub(crate) async fn admit_change(&self, length: u32) -> Result<(), DiskError> {
        if length > 0 {
            self.steady().admit(Direction::Write, u64::from(length)).await?;
        }
        Ok(())
    }

    pub(crate) async fn durable(
        &self,
        fua: bool,
        result: Result<(), DiskError>,
    ) -> Result<(), DiskError> {
        if fua && result.is_ok() { Ok(self.steady().flush().await?) } else { result }
    }

    async fn serve_read(&self, ticket: Ticket, offset: u64, length: u32) {
        let Ticket { cookie, .. } = ticket;
        if length == 0 {
            return if self.agreement.structured {
                self.reply(ticket, &reply::empty_read(cookie), None);
            } else {
                self.reply(ticket, &reply::simple(cookie, None), None);
            };
        }
        let read = pin!(async {
            let steady = self.steady();
            steady.admit(Direction::Read, u64::from(length)).await?;
            let Pooled { data, spare } = self.pool.take(length as usize);
            Ok(Pooled { data: steady.read(offset, data).await?, spare })
        });
        let Some(read) = self.while_wanted(read).await else {
            return self.forget(ticket);
        };
        match read {
            Ok(read) if read.data.len() == length as usize => {
                let data = Some(read);
                if self.agreement.structured {
                    self.reply(ticket, &reply::read_header(cookie, offset, length), data);
                } else {
                    self.reply(ticket, &reply::simple(cookie, None), data);
                }
            }
            Ok(read) => {
                let got = read.data.len();
                tracing::error!(offset, length, got, "a read returned the wrong length");
                self.fail(ticket, NbdError::Io);
            }
            Err(Failed { error, .. }) => {
                self.fail_device(ticket, Command::Read { offset, length }, &error);
            }
        }
    }

    pub(crate) async fn serve_write(
        &self,
        offset: u64,
        payload: Option<Pooled>,
    ) -> Result<(), DiskError> {
        if let Some(Pooled { data, spare }) = payload
            && !data.is_empty()
        {
            let data = self.steady().write(offset, data).await?;
            self.pool.put(Pooled { data, spare });
        }
        Ok(())
    }

    async fn serve_trim(&self, offset: u64, length: u32) -> Result<(), DiskError> {
        self.admit_change(length).await?;
        if length > 0 {
            self.steady().discard(offset, u64::from(length)).await?;
        }
        Ok(())
    }

    async fn serve_zero(
        &self,
        offset: u64,
        length: u32,
        flags: ZeroFlags,
    ) -> Result<(), DiskError> {
        self.admit_change(length).await?;
        if length > 0 {
            self.steady().write_zeroes(offset, u64::from(length), flags).await?;
        }
        Ok(())
    }

    /// Reads the range and drops the data. Stopping early does no harm.
    async fn serve_cache(&self, mut offset: u64, mut length: u32) -> Result<(), DiskError> {
        if length > 0 {
            let steady = self.steady();
            let admitted = steady.admit(Direction::Read, u64::from(length));
            let Some(admitted) = self.while_wanted(pin!(admitted)).await else { return Ok(()) };
            admitted?;
        }
        while length > 0 && !self.stop.is_requested() && !self.is_unheard() {
            let step = length.min(CACHE_STEP);
            let Pooled { data, spare } = self.pool.take(step as usize);
            let steady = self.steady();
            let read = pin!(steady.read(offset, data));
            let Some(read) = self.while_wanted(read).await else { break };
            self.pool.put(Pooled { data: read?, spare });
            offset += u64::from(step);
            length -= step;
        }
        Ok(())
    }

    async fn serve_block_status(&self, ticket: Ticket, offset: u64, length: u32, one: bool) {
        let max = if one { MAX_RUNS.1 } else { MAX_RUNS.0 };
        let is_bitmap = |context| matches!(context, Context::Bitmap(_));
        let runs = if self.agreement.contexts.iter().all(is_bitmap) {
            None
        } else {
            let status = pin!(self.device.block_status(offset, u64::from(length), max));
            let Some(status) = self.while_wanted(status).await else { return self.forget(ticket) };
            match status {
                Ok(runs) => Some(runs),
                Err(error) => {
                    let command = Command::BlockStatus { offset, length, one };
                    return self.fail_device(ticket, command, &error);
                }
            }
        };
        if let Some(runs) = &runs
            && runs.first().is_none_or(|run| run.length == 0)
        {
            tracing::error!(offset, length, "the disk returned no extents");
            return self.fail(ticket, NbdError::Io);
        }
        let mut chunks = Vec::new();
        let mut contexts = self.agreement.contexts.iter().peekable();
        while let Some(context) = contexts.next() {
            let extents = match context {
                Context::Bitmap(number) => {
                    let Some(bitmap) = self.bitmaps.get(usize::from(number)) else {
                        tracing::error!(number, "a client selected a bitmap that does not exist");
                        return self.fail(ticket, NbdError::Io);
                    };
                    bitmap.extents(offset, length, if one { 1 } else { MAX_RUNS.0 })
                }
                Context::Allocation | Context::Depth => {
                    extents(context, runs.as_deref().unwrap_or_default(), length, one)
                }
            };
            let last = contexts.peek().is_none();
            reply::block_status(&mut chunks, ticket.cookie, context.id(), &extents, last);
        }
        self.reply(ticket, &chunks, None);
    }

    fn fail_device(&self, ticket: Ticket, command: Command, error: &DiskError) {
        self.fail(ticket, note_failure(command, error));
    }

    pub(crate) fn fail(&self, ticket: Ticket, error: NbdError) {
        if self.agreement.structured {
            let message = error.message();
            self.reply(ticket, &reply::structured_error(ticket.cookie, error, message), None);
        } else {
            self.reply(ticket, &reply::simple(ticket.cookie, Some(error)), None);
        }
    }

    pub(crate) fn reply(&self, ticket: Ticket, header: &[u8], data: Option<Pooled>) {
        self.outbox.borrow_mut().push(header, data, ticket.reserved);
    }
}
