//! Reads and writes that are larger than the memory which a client can have now: they are carried out in pieces.
//!
//! A piece fits into the memory that the client is assured of, so that it never waits for what others hold, whatever
//! they do. The client's other requests have been answered before, and those after it are received when it is done.

use super::reply;
use super::request::{Command, Request};
use super::serve::note_failure;
use super::session::{End, Session, SessionError, Ticket};
use super::transport::Transport;
use super::window::Window;
use super::wire::{NbdError, command_flag};
use crate::pool::{Pool, Pooled};
use isobath_disk::BlockDevice;
use isobath_disk::throttle::Direction;
use std::pin::pin;

/// A read that is carried out in pieces.
#[derive(Clone, Copy)]
struct LargeRead {
    cookie: u64,
    offset: u64,
    length: u32,
    /// Whether the reply must be one chunk.
    unfragmented: bool,
}

/// A write that is carried out in pieces.
#[derive(Clone, Copy)]
struct LargeWrite {
    cookie: u64,
    offset: u64,
    length: u32,
    fua: bool,
}

/// Ranges of at most `piece` bytes of a range, in order.
fn pieces(offset: u64, length: u32, piece: usize) -> impl Iterator<Item = (u64, usize)> {
    let length = length as usize;
    (0..length).step_by(piece).map(move |at| (offset + at as u64, piece.min(length - at)))
}

impl<D: BlockDevice, T: Transport> Session<'_, D, T> {
    /// Carries out a read or a write when no other request is in flight.
    pub(crate) async fn serve_in_pieces(
        &self,
        request: &Request,
        command: Command,
        window: &mut Window,
    ) -> Result<(), End> {
        let cookie = request.cookie;
        match command {
            Command::Read { offset, length } => {
                let unfragmented = request.flags & command_flag::DF != 0;
                self.read_in_pieces(LargeRead { cookie, offset, length, unfragmented }).await
            }
            Command::Write { offset, length, fua } => {
                self.write_in_pieces(LargeWrite { cookie, offset, length, fua }, window).await
            }
            command => {
                tracing::error!(?command, "only reads and writes are carried out in pieces");
                self.fail(self.begin(cookie, 0), NbdError::Io);
                Ok(())
            }
        }
    }

    /// Reads each piece once the one before it has been sent.
    async fn read_in_pieces(&self, read: LargeRead) -> Result<(), End> {
        let LargeRead { cookie, offset, length, .. } = read;
        let command = Command::Read { offset, length };
        let steady = self.steady();
        let admitted = steady.admit(Direction::Read, u64::from(length));
        let Some(admitted) = self.while_wanted(pin!(admitted)).await else { return Ok(()) };
        if let Err(failed) = admitted {
            self.fail(self.begin(cookie, 0), note_failure(command, &failed.error));
            return Ok(());
        }
        for (at, step) in pieces(offset, length, self.piece()) {
            self.give_others_their_turn().await;
            let ticket = self.begin(cookie, Pool::footprint(step));
            let Pooled { data, spare } = self.pool.take(step);
            let Some(done) = self.while_wanted(pin!(steady.read(at, data))).await else {
                self.forget(ticket);
                return Ok(());
            };
            let error = match done {
                Ok(data) if data.len() == step => {
                    let header = self.piece_header(read, (at, step));
                    self.reply(ticket, &header, Some(Pooled { data, spare }));
                    self.until_answered().await?;
                    continue;
                }
                Ok(data) => {
                    tracing::error!(at, step, got = data.len(), "a read returned the wrong length");
                    NbdError::Io
                }
                Err(failed) => note_failure(command, &failed.error),
            };
            return self.fail_piece(ticket, read, at, error);
        }
        Ok(())
    }

    /// What precedes the data of a piece in the reply.
    fn piece_header(&self, read: LargeRead, (at, step): (u64, usize)) -> Vec<u8> {
        let LargeRead { cookie, offset, length, unfragmented } = read;
        if self.agreement.structured && !unfragmented {
            let is_last = at + step as u64 == offset + u64::from(length);
            return reply::read_part(cookie, at, step as u32, is_last).to_vec();
        }
        match (at == offset, self.agreement.structured) {
            (false, _) => Vec::new(),
            (true, true) => reply::read_header(cookie, offset, length).to_vec(),
            (true, false) => reply::simple(cookie, None).to_vec(),
        }
    }

    /// Answers a read with an error. If its reply has begun and cannot say so any more, the connection ends.
    fn fail_piece(
        &self,
        ticket: Ticket,
        read: LargeRead,
        at: u64,
        error: NbdError,
    ) -> Result<(), End> {
        if at == read.offset || self.agreement.structured && !read.unfragmented {
            self.fail(ticket, error);
            return Ok(());
        }
        self.forget(ticket);
        Err(SessionError::HalfAnswered.into())
    }

    /// Writes each piece when it has been received. After a failure the rest is dropped.
    async fn write_in_pieces(&self, write: LargeWrite, window: &mut Window) -> Result<(), End> {
        let LargeWrite { cookie, offset, length, fua } = write;
        let piece = self.piece();
        let ticket = self.begin(cookie, piece);
        let mut left = length as usize;
        let mut result = self.admit_change(length).await;
        for (at, step) in pieces(offset, length, piece) {
            if result.is_err() {
                break;
            }
            self.give_others_their_turn().await;
            let payload = self.payload(window, step).await.inspect_err(|_| self.forget(ticket))?;
            left -= step;
            result = self.serve_write(at, Some(payload)).await;
        }
        self.discard(window, left).await.inspect_err(|_| self.forget(ticket))?;
        match self.durable(fua, result).await {
            Ok(()) => self.reply(ticket, &reply::simple(cookie, None), None),
            Err(error) => {
                let command = Command::Write { offset, length, fua };
                self.fail(ticket, note_failure(command, &error));
            }
        }
        Ok(())
    }
}
