//! Copying disks into another one, without reading what is known to be zero.

mod sources;
mod zeroes;

use crate::clock::{Clock, SystemClock};
use crate::device::ZeroFlags;
use crate::disk::Disk;
use crate::parts::Parts;
use event_listener::Event;
use futures_util::future::{Either, select};
use isobath_image::{DiskError, Result, invariant};
use isobath_storage::{Host, IoBuf};
use isobath_sync::AsyncMutex;
use isobath_sync::order::in_order;
pub use sources::{Content, Sources};
use std::future::{Future, poll_fn};
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;
pub use zeroes::is_zero;
use zeroes::runs;

/// Bytes read and written at once.
const CHUNK: u64 = 2 << 20;
/// How many bytes are copied before the target's host is asked to write them back.
const WRITE_BACK: u64 = 32 << 20;
/// The minimum read at once for compression.
const COMPRESSED_CHUNK: u64 = 256 << 10;

/// How to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyOptions {
    /// Start writes to the target in the order of the disk.
    pub in_order: bool,
    /// The minimum run of zeroes, in bytes and a multiple of 512, that is not written as data. With 0 everything is
    /// written as data, including known zeroes.
    pub sparse: u64,
    /// Write compressed clusters.
    pub compressed: bool,
    /// The target reads as zeroes where nothing is written.
    pub target_is_zero: bool,
    /// The target has a backing file of this many bytes, with the contents of the source's backing file: only the data
    /// in the source's active layer is copied.
    pub backing: Option<u64>,
    /// Copy what cannot be read as zeroes, sector by sector, and go on.
    pub salvage: bool,
    /// The most bytes to copy in a second; 0 is no limit. A limit needs the executor of `isobath_ring`.
    pub speed: u64,
}

impl Default for CopyOptions {
    fn default() -> Self {
        Self {
            in_order: true,
            sparse: 4096,
            compressed: false,
            target_is_zero: false,
            backing: None,
            salvage: false,
            speed: 0,
        }
    }
}

/// A copy of concatenated disks to one target, done by any number of concurrent [`work`](Self::work)ers, on any
/// threads.
pub struct DiskCopy<H: Host> {
    sources: Sources<H>,
    target: Arc<Disk<H>>,
    options: CopyOptions,
    /// Every piece except the last is a multiple of this many bytes.
    chunk: u64,
    planned: AsyncMutex<Planned>,
    /// The ticket whose turn it is to write.
    turn: AtomicU64,
    next_turn: Event,
    stopped: AtomicBool,
    writing_back: AtomicBool,
    done: AtomicU64,
    total: AtomicU64,
    /// When the next piece may be read, if the speed is limited.
    due: AsyncMutex<Duration>,
    clock: SystemClock,
}

#[derive(Default)]
struct Planned {
    offset: u64,
    tickets: u64,
}

struct Piece {
    ticket: u64,
    range: Range<u64>,
    zero: bool,
}

impl<H: Host> DiskCopy<H> {
    /// Copies `sources` to the start of `target`.
    ///
    /// # Errors
    /// If the target is too small, or options exclude each other.
    pub fn new(
        sources: Vec<Arc<Disk<H>>>,
        target: Arc<Disk<H>>,
        options: CopyOptions,
    ) -> Result<Self> {
        let sources = Sources::new(sources, options.backing, options.salvage);
        let refuse = |reason: &str| Err(DiskError::Unsupported(reason.into()));
        if target.size() < sources.size() {
            return refuse("output file is smaller than input file");
        }
        if options.backing.is_some() && sources.count() != 1 {
            return refuse(
                "Having a base image makes no sense when concatenating multiple input images",
            );
        }
        if !options.sparse.is_multiple_of(512) {
            return refuse("the minimum run of zeroes must be a multiple of 512 bytes");
        }
        let chunk = match target.active_qcow2() {
            Some(image) if options.compressed => {
                image.geometry.cluster_size().max(COMPRESSED_CHUNK)
            }
            None if options.compressed => {
                return refuse("Compression not supported for this file format");
            }
            _ => CHUNK,
        };
        let total = AtomicU64::new(sources.size());
        Ok(Self {
            sources,
            target,
            options,
            chunk,
            planned: AsyncMutex::default(),
            turn: AtomicU64::new(0),
            next_turn: Event::new(),
            stopped: AtomicBool::new(false),
            writing_back: AtomicBool::new(false),
            done: AtomicU64::new(0),
            total,
            due: AsyncMutex::default(),
            clock: SystemClock::default(),
        })
    }

    /// Bytes of data copied so far, and in total: an estimate until [`count_data`](Self::count_data) has been called.
    pub fn progress(&self) -> (u64, u64) {
        (self.done.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed))
    }

    /// Determines how much data there is to copy, for [`progress`](Self::progress). Call it before any worker begins.
    ///
    /// # Errors
    /// If a source's tables cannot be read.
    pub async fn count_data(&self) -> Result<()> {
        let (mut offset, mut data) = (0, 0);
        while offset < self.sources.size() {
            let (content, length) = self.sources.content(offset).await?;
            if self.moves(content) {
                data += length;
            }
            offset += length;
        }
        self.total.store(data, Ordering::Relaxed);
        Ok(())
    }

    /// Ends the copy early: the workers complete what they have started.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
        self.next_turn.notify(usize::MAX);
    }

    /// Whether the copy was ended early.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Takes part in the copy until it is done. The target is not flushed.
    ///
    /// # Errors
    /// If a source cannot be read or the target cannot be written; the others then stop too.
    pub async fn work(&self) -> Result<()> {
        let result = in_order(self.copy_pieces()).await;
        if result.is_err() {
            self.stop();
        }
        result
    }

    /// Whether a run's bytes must be copied, because they are not known zeroes.
    fn moves(&self, content: Content) -> bool {
        match content {
            Content::Data => true,
            Content::Zero => self.options.sparse == 0,
            Content::Backing => false,
        }
    }

    async fn copy_pieces(&self) -> Result<()> {
        let mut spare = IoBuf::empty();
        while let Some(piece) = self.next_piece().await? {
            let length = piece.range.end - piece.range.start;
            if piece.zero {
                if self.wait_for(piece.ticket).await {
                    let flags = ZeroFlags { may_unmap: true, only_fast: false };
                    self.target.write_zeroes(piece.range.start, length, flags).await?;
                    self.pass_on(piece.ticket)?;
                }
                continue;
            }
            if (spare.len() as u64) < length {
                spare = IoBuf::zeroed(self.chunk.max(length) as usize);
            }
            self.keep_speed(length).await;
            let buf = spare.split_to(length as usize);
            let (buf, is_salvaged) = self.sources.read(piece.range.start, buf).await?;
            let mut buf = if self.options.compressed {
                self.write_compressed(piece.range.start, buf).await?
            } else if self.wait_for(piece.ticket).await {
                let mut write = pin!(self.write(piece.range.start, buf));
                let begun = poll_fn(|context| Poll::Ready(write.as_mut().poll(context))).await;
                // It is enough to start in order: that determines the places of the target's clusters.
                self.pass_on(piece.ticket)?;
                match begun {
                    Poll::Ready(written) => written?,
                    Poll::Pending => write.await?,
                }
            } else {
                return Ok(());
            };
            // What was salvaged is in a buffer of its own: the failed read kept the other.
            if !is_salvaged {
                buf.unsplit(spare);
                spare = buf;
            }
            let done = self.done.fetch_add(length, Ordering::Relaxed);
            if done / WRITE_BACK != (done + length) / WRITE_BACK {
                self.write_back().await;
            }
        }
        Ok(())
    }

    /// Asks the target's host to begin to write back, unless it is still at it. A copy that ends early does not wait.
    async fn write_back(&self) {
        if self.writing_back.swap(true, Ordering::Relaxed) {
            return;
        }
        let mut begun = pin!(self.target.begin_write_back());
        loop {
            let listener = self.next_turn.listen();
            if self.is_stopped() {
                return;
            }
            match select(begun.as_mut(), listener).await {
                Either::Left(_) => break,
                Either::Right(_) => {}
            }
        }
        self.writing_back.store(false, Ordering::Relaxed);
    }

    /// Waits until this many more bytes do not exceed the speed.
    async fn keep_speed(&self, bytes: u64) {
        if self.options.speed == 0 {
            return;
        }
        let takes = Duration::from_secs_f64(bytes as f64 / self.options.speed as f64);
        let start = {
            let mut due = self.due.lock().await;
            let start = self.clock.now().max(*due);
            *due = start + takes;
            start
        };
        self.clock.sleep_until(start).await;
    }

    /// Waits for a piece's turn to be written; `false` if the copy has ended.
    async fn wait_for(&self, ticket: u64) -> bool {
        loop {
            let listener = self.next_turn.listen();
            if self.is_stopped() {
                return false;
            }
            if !self.in_turns() || self.turn.load(Ordering::SeqCst) == ticket {
                return true;
            }
            listener.await;
        }
    }

    /// Ends a piece's turn.
    fn pass_on(&self, ticket: u64) -> Result<()> {
        if self.in_turns() {
            let turn = self.turn.swap(ticket + 1, Ordering::SeqCst);
            self.next_turn.notify(usize::MAX);
            let ours = turn == ticket;
            invariant(ours, self.target.name(), "a piece is written when it is its turn")?;
        }
        Ok(())
    }

    /// Compressed clusters are packed in any order.
    fn in_turns(&self) -> bool {
        self.options.in_order && !self.options.compressed
    }

    async fn write(&self, start: u64, mut rest: IoBuf) -> Result<IoBuf> {
        if self.options.sparse == 0 {
            return self.target.write(start, rest).await;
        }
        let mut whole = IoBuf::empty();
        let mut written = Parts::of(start..start + rest.len() as u64, self.target.name());
        for (zero, length) in runs(&rest, start, self.options.sparse) {
            let at = start + whole.len() as u64;
            written.add(at, length as u64)?;
            let part = rest.split_to(length);
            let part = if zero {
                self.write_zero(at, part).await?
            } else {
                self.target.write(at, part).await?
            };
            whole.unsplit(part);
        }
        written.end()?;
        Ok(whole)
    }

    async fn write_zero(&self, at: u64, part: IoBuf) -> Result<IoBuf> {
        if !self.options.target_is_zero {
            let flags = ZeroFlags { may_unmap: true, only_fast: false };
            self.target.write_zeroes(at, part.len() as u64, flags).await?;
        }
        Ok(part)
    }

    async fn write_compressed(&self, start: u64, mut rest: IoBuf) -> Result<IoBuf> {
        let cluster = self.target.active_qcow2().map_or(CHUNK, |q| q.geometry.cluster_size());
        let mut whole = IoBuf::empty();
        while !rest.is_empty() {
            let at = start + whole.len() as u64;
            let part = rest.split_to((cluster as usize).min(rest.len()));
            let ends_within =
                (part.len() as u64) < cluster && at + (part.len() as u64) < self.target.size();
            let part = if self.options.sparse > 0 && is_zero(&part) {
                self.write_zero(at, part).await?
            } else if ends_within {
                self.target.write(at, part).await?
            } else {
                self.target.write_compressed(at, part).await?
            };
            whole.unsplit(part);
        }
        Ok(whole)
    }

    /// The next piece to copy. Runs that need no work are skipped.
    async fn next_piece(&self) -> Result<Option<Piece>> {
        let mut planned = self.planned.lock().await;
        while planned.offset < self.sources.size() && !self.is_stopped() {
            let start = planned.offset;
            let (content, end) = self.plan(start).await?;
            self.check_piece(&(start..end))?;
            planned.offset = end;
            let zero = !self.moves(content);
            if zero && (content == Content::Backing || self.options.target_is_zero) {
                continue;
            }
            let ticket = planned.tickets;
            planned.tickets += 1;
            return Ok(Some(Piece { ticket, range: start..end, zero }));
        }
        Ok(None)
    }

    /// Checks that a piece can be copied as it is.
    fn check_piece(&self, piece: &Range<u64>) -> Result<()> {
        let name = self.target.name();
        let within = piece.start < piece.end && piece.end <= self.sources.size();
        invariant(within, name, "a piece has bytes of the sources, and no others")?;
        let aligned = !self.options.compressed || piece.start.is_multiple_of(self.chunk);
        invariant(aligned, name, "what is compressed begins with a cluster")
    }

    /// What to do from `start` on, and where that ends.
    async fn plan(&self, start: u64) -> Result<(Content, u64)> {
        let size = self.sources.size();
        let border = size.min(start - start % self.chunk + self.chunk);
        let (content, length) = self.sources.content(start).await?;
        let mut end = start + length;
        if self.options.compressed {
            // Only whole clusters count: a cluster of which only a part is known is read.
            return Ok(if self.moves(content) || end < border {
                (Content::Data, border)
            } else if end < size {
                (content, end - end % self.chunk)
            } else {
                (content, end)
            });
        }
        if !self.moves(content) {
            return Ok((content, end));
        }
        while end < border {
            let (content, length) = self.sources.content(end).await?;
            if !self.moves(content) {
                break;
            }
            end += length;
        }
        Ok((content, end.min(border)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{CLUSTER, SIZE, disk, must_violate};
    use futures_executor::block_on;
    use isobath_storage::memory::MemoryHost;

    fn copy(compressed: bool) -> DiskCopy<MemoryHost> {
        let options = CopyOptions { compressed, ..CopyOptions::default() };
        DiskCopy::new(vec![Arc::new(disk())], Arc::new(disk()), options).unwrap()
    }

    #[test]
    fn pieces_are_parts_of_the_sources() {
        let plain = copy(false);
        plain.check_piece(&(512..SIZE)).unwrap();
        let within = "a piece has bytes of the sources, and no others";
        must_violate(plain.check_piece(&(512..512)), within);
        must_violate(plain.check_piece(&(512..SIZE + 1)), within);
        let compressed = copy(true);
        compressed.check_piece(&(COMPRESSED_CHUNK..SIZE)).unwrap();
        let begins = "what is compressed begins with a cluster";
        must_violate(compressed.check_piece(&(CLUSTER / 2..SIZE)), begins);
        block_on(compressed.planned.lock()).offset = CLUSTER / 2;
        must_violate(block_on(Box::pin(compressed.work())), begins);
    }

    #[test]
    fn pieces_take_turns() {
        let copy = copy(false);
        copy.pass_on(0).unwrap();
        copy.pass_on(1).unwrap();
        must_violate(copy.pass_on(1), "a piece is written when it is its turn");
    }

    #[test]
    fn what_is_read_is_in_the_sources() {
        let copy = copy(false);
        let read = |start, length| {
            block_on(Box::pin(copy.sources.read(start, IoBuf::zeroed(length))))
                .map(|(buf, _)| buf.len())
        };
        assert_eq!(read(SIZE - 512, 512).unwrap(), 512);
        must_violate(read(SIZE - 512, 513), "the sources have every byte that is copied");
    }
}
