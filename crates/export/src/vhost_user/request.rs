//! Guest requests: parsing and executing them (virtio 1.2, section 5.2.6).

use super::bounce::{Bounces, Taken};
use super::chain::{Chain, Segment, total};
use super::config::{MAX_RANGES, SECTOR};
use super::memory::Memory;
use super::throttle::Throttle;
use crate::pool::{Pool, Pooled};
use crate::steady::{Attempt, Failed, Steady};
use crate::stop::Stop;
use isobath_disk::throttle::Direction;
use isobath_disk::{BlockDevice, DiskError, ZeroFlags};
use isobath_storage::IoBuf;
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD,
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};

/// Bytes of a serial number (`VIRTIO_BLK_ID_BYTES`).
pub(crate) const ID_BYTES: usize = 20;
/// Segments of at least this many bytes on average are passed to the device one by one. Smaller ones are copied, which
/// costs less than a request for each and keeps the request in one piece for the device.
const DIRECT: usize = 64 << 10;
/// How many segments of a request are passed to the device at a time.
const TOGETHER: usize = 16;
/// Bytes copied at a time.
const COPY: usize = 1 << 20;

const OK: u8 = VIRTIO_BLK_S_OK as u8;
const ERROR: u8 = VIRTIO_BLK_S_IOERR as u8;
const UNSUPPORTED: u8 = VIRTIO_BLK_S_UNSUPP as u8;

/// The state shared by the requests of a queue.
pub(crate) struct Context<D> {
    pub(crate) device: Arc<D>,
    pub(crate) memory: Arc<Memory>,
    /// Keeps the guest's memory mapped for as long as an operation uses it.
    pub(crate) owner: Arc<dyn Any + Send + Sync>,
    pub(crate) pool: Rc<Pool>,
    pub(crate) bounces: Arc<Bounces>,
    pub(crate) serial: [u8; ID_BYTES],
    pub(crate) read_only: bool,
    /// Whether writes are made durable before they complete.
    pub(crate) write_through: bool,
    /// Requested once the queue takes no more requests.
    pub(crate) ending: Arc<Stop>,
    /// Whether a list of those in flight keeps requests that are not answered for the next server.
    pub(crate) listed: bool,
    /// Requests that a paused disk has kept until the queue stopped, and that stay in the list.
    pub(crate) left: Cell<usize>,
    /// Requests that have ended, for the used ring.
    pub(crate) done: RefCell<Vec<Done>>,
    pub(crate) complaints: RefCell<Throttle>,
    /// The queue's number, for messages.
    pub(crate) queue: u16,
}

/// A request that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Done {
    pub(crate) head: u16,
    /// Bytes written to the guest's memory, from the start of the writable part.
    pub(crate) written: u32,
}

/// A request in flight.
pub(crate) struct Job {
    head: u16,
    status: NonNull<u8>,
    action: Action,
}

enum Action {
    /// A read into one piece of memory.
    Read {
        offset: u64,
        segment: Segment,
    },
    Other(Other),
}

enum Other {
    ReadMany { offset: u64, segments: Vec<Segment> },
    Write { offset: u64, data: Data },
    Flush,
    Discard(Vec<Range>),
    Zero(Vec<Range>),
}

/// The memory of a write; never empty.
enum Data {
    One(Segment),
    Many(Vec<Segment>),
}

impl Other {
    /// The direction and bytes that count for the disk's limits.
    fn extent(&self) -> Option<(Direction, u64)> {
        let (direction, bytes) = match self {
            Self::ReadMany { segments, .. } => (Direction::Read, total(segments) as u64),
            Self::Write { data: Data::One(segment), .. } => {
                (Direction::Write, segment.length as u64)
            }
            Self::Write { data: Data::Many(segments), .. } => {
                (Direction::Write, total(segments) as u64)
            }
            Self::Flush => return None,
            Self::Discard(ranges) | Self::Zero(ranges) => {
                (Direction::Write, ranges.iter().map(|range| range.length).sum())
            }
        };
        (bytes > 0).then_some((direction, bytes))
    }
}

#[derive(Clone, Copy, Debug)]
struct Range {
    offset: u64,
    length: u64,
    may_unmap: bool,
}

/// The result of a request.
type Result<T> = std::result::Result<T, Failed>;

impl<D: BlockDevice> Context<D> {
    /// Turns a chain into a job; a request that needs nothing from the device is completed at once.
    pub(crate) fn accept(&self, chain: &mut Chain, head: u16) -> Option<Job> {
        let Some(status) = chain.take_status() else {
            self.complain(&"the request has no status byte");
            self.done.borrow_mut().push(Done { head, written: 0 });
            return None;
        };
        match self.understand(chain) {
            Ok(action) => Some(Job { head, status, action }),
            Err(answer) => {
                self.answer(head, status, answer);
                None
            }
        }
    }

    fn answer(&self, head: u16, status: NonNull<u8>, answer: Answer) {
        // SAFETY: the byte is in the guest's memory, which is mapped as long as `owner` lives.
        unsafe { status.write_volatile(answer.status) };
        self.done.borrow_mut().push(Done { head, written: answer.data.saturating_add(1) });
    }

    fn understand(&self, chain: &mut Chain) -> std::result::Result<Action, Answer> {
        let refuse = |why: &dyn std::fmt::Display| {
            self.complain(why);
            Answer::of(ERROR)
        };
        if let Some(fault) = chain.fault {
            return Err(refuse(&fault));
        }
        let Some(header) = chain.take_header::<16>() else {
            return Err(refuse(&super::chain::ChainError::Short));
        };
        let header = u128::from_le_bytes(header);
        let (kind, sector) = (header as u32, (header >> 64) as u64);
        let changes =
            matches!(kind, VIRTIO_BLK_T_OUT | VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES);
        if changes && self.read_only {
            return Err(refuse(&"the disk is read-only"));
        }
        match kind {
            VIRTIO_BLK_T_IN | VIRTIO_BLK_T_OUT => {
                let (list, other) = if changes {
                    (&mut chain.readable, &chain.writable)
                } else {
                    (&mut chain.writable, &chain.readable)
                };
                let length = total(list) as u64;
                if !other.is_empty() || !length.is_multiple_of(SECTOR) {
                    return Err(refuse(
                        &"the request has buffers of the wrong direction or length",
                    ));
                }
                let Some(offset) = self.offset(sector, length) else {
                    return Err(refuse(&"the request extends past the end of the disk"));
                };
                Ok(match (changes, list.as_slice()) {
                    (_, []) => return Err(Answer::of(OK)),
                    (false, [segment]) => Action::Read { offset, segment: *segment },
                    (true, [segment]) => {
                        Action::Other(Other::Write { offset, data: Data::One(*segment) })
                    }
                    (changes, _) => {
                        let segments = std::mem::take(list);
                        Action::Other(if changes {
                            Other::Write { offset, data: Data::Many(segments) }
                        } else {
                            Other::ReadMany { offset, segments }
                        })
                    }
                })
            }
            VIRTIO_BLK_T_FLUSH => Ok(Action::Other(Other::Flush)),
            VIRTIO_BLK_T_GET_ID => Err(Answer { status: OK, data: self.identify(chain) }),
            VIRTIO_BLK_T_DISCARD => self.ranges(chain, kind).map(Other::Discard).map(Action::Other),
            VIRTIO_BLK_T_WRITE_ZEROES => {
                self.ranges(chain, kind).map(Other::Zero).map(Action::Other)
            }
            _ => Err(Answer::of(UNSUPPORTED)),
        }
    }

    /// The offset of a range in bytes, if the range is within the disk.
    fn offset(&self, sector: u64, length: u64) -> Option<u64> {
        let offset = sector.checked_mul(SECTOR)?;
        let end = offset.checked_add(length)?;
        (end <= self.device.size()).then_some(offset)
    }

    fn identify(&self, chain: &Chain) -> u32 {
        let mut left = self.serial.as_slice();
        for segment in &chain.writable {
            let (now, rest) = left.split_at(left.len().min(segment.length));
            // SAFETY: within the segment, which is the guest's memory.
            unsafe { segment.start.copy_from_nonoverlapping(NonNull::from(now).cast(), now.len()) };
            left = rest;
        }
        (ID_BYTES - left.len()) as u32
    }

    fn ranges(&self, chain: &mut Chain, kind: u32) -> std::result::Result<Vec<Range>, Answer> {
        let length = total(&chain.readable);
        let count = length / 16;
        if count == 0 || count > MAX_RANGES || !length.is_multiple_of(16) {
            self.complain(&"the list of ranges has an invalid length");
            return Err(Answer::of(ERROR));
        }
        let mut ranges = Vec::with_capacity(count);
        while let Some(bytes) = chain.take_header::<16>() {
            let value = u128::from_le_bytes(bytes);
            let (sector, sectors, flags) =
                (value as u64, (value >> 64) as u32, (value >> 96) as u32);
            let unmap = flags == VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP;
            if flags != 0 && !(unmap && kind == VIRTIO_BLK_T_WRITE_ZEROES) {
                return Err(Answer::of(UNSUPPORTED));
            }
            let length = u64::from(sectors) * SECTOR;
            let Some(offset) = self.offset(sector, length) else {
                self.complain(&"a range extends past the end of the disk");
                return Err(Answer::of(ERROR));
            };
            ranges.push(Range { offset, length, may_unmap: unmap });
        }
        Ok(ranges)
    }

    /// The disk, for requests that wait while it is paused, until the queue stops.
    fn steady(&self) -> Steady<'_, D> {
        Steady::new(&*self.device, &self.ending)
    }

    /// Executes a job, and records its completion, unless it is left to the next server.
    pub(crate) async fn serve(self: Rc<Self>, job: Job) {
        let Job { head, status, action } = job;
        let result = self.perform(action).await;
        let answer = match result {
            Ok(data) => Answer { status: OK, data },
            Err(Failed { held: true, .. }) if self.listed => {
                self.left.set(self.left.get() + 1);
                return;
            }
            Err(Failed { error, .. }) if error.errno() == libc::ENOTSUP => Answer::of(UNSUPPORTED),
            Err(Failed { error, .. }) => {
                self.complain(&error);
                Answer::of(ERROR)
            }
        };
        self.answer(head, status, answer);
    }

    /// Executes an action, and returns the number of bytes written to the guest's memory.
    ///
    /// A future is moved into its slot when it starts. To keep it small in the most frequent case, a read into one
    /// piece, the other cases are boxed.
    async fn perform(&self, action: Action) -> Result<u32> {
        match action {
            Action::Read { offset, segment } => {
                self.steady().admit(Direction::Read, segment.length as u64).await?;
                self.steady().read(offset, self.buffer(segment)).await?;
                Ok(u32::try_from(segment.length).unwrap_or(u32::MAX))
            }
            Action::Other(other) => Box::pin(self.perform_other(other)).await,
        }
    }

    async fn perform_other(&self, action: Other) -> Result<u32> {
        if let Some((direction, bytes)) = action.extent() {
            self.steady().admit(direction, bytes).await?;
            self.check_memory()?;
        }
        match action {
            Other::ReadMany { offset, segments } => {
                self.read_many(offset, &segments).await?;
                return Ok(u32::try_from(total(&segments)).unwrap_or(u32::MAX));
            }
            Other::Write { offset, data: Data::One(segment) } => {
                drop(self.steady().write(offset, self.buffer(segment)).await?);
            }
            Other::Write { offset, data: Data::Many(segments) } => {
                self.write_many(offset, &segments).await?;
            }
            Other::Flush => return self.flush().await.map(|()| 0),
            Other::Discard(ranges) => {
                for range in ranges.iter().filter(|range| range.length > 0) {
                    self.steady().discard(range.offset, range.length).await?;
                }
            }
            Other::Zero(ranges) => {
                for range in ranges.iter().filter(|range| range.length > 0) {
                    let flags = ZeroFlags { may_unmap: range.may_unmap, only_fast: false };
                    self.steady().write_zeroes(range.offset, range.length, flags).await?;
                }
            }
        }
        if self.write_through {
            self.flush().await?;
        }
        Ok(0)
    }

    /// Flushes with a boxed future, since it is the largest.
    async fn flush(&self) -> Result<()> {
        Box::pin(self.steady().flush()).await
    }

    fn buffer(&self, Segment { start, length }: Segment) -> IoBuf {
        // SAFETY: the segment is in the guest's memory, which `owner` keeps mapped; in this process, only references
        // that the engine makes from this buffer cover it.
        unsafe { IoBuf::shared(start, length, self.owner.clone()) }
    }

    /// Passes segments to the device. Each takes memory for as long as it is under way.
    async fn direct<F: Future<Output = Result<()>>>(
        &self,
        mut offset: u64,
        segments: &[Segment],
        pass: impl Fn((u64, Segment)) -> F,
    ) -> Result<()> {
        for some in segments.chunks(TOGETHER) {
            let _taken = self.bounces.take(some.len() * size_of::<F>()).await;
            self.check_memory()?;
            all(with_offsets(offset, some).map(&pass)).await?;
            offset += total(some) as u64;
        }
        Ok(())
    }

    async fn read_many(&self, offset: u64, segments: &[Segment]) -> Result<()> {
        if goes_direct(segments) {
            let read = |(offset, segment)| async move {
                self.steady().read(offset, self.buffer(segment)).await.map(drop)
            };
            return self.direct(offset, segments, read).await;
        }
        let mut pieces = Pieces::new(segments);
        let (mut at, mut left) = (offset, total(segments));
        while left > 0 {
            let step = left.min(COPY);
            let (_taken, Pooled { data, spare }) = self.read_step(at, step).await?;
            let mut from = data.get(..step).ok_or(DiskError::Closed)?;
            while let Some(piece) = pieces.next(from.len()) {
                let (now, rest) = from.split_at(piece.length);
                // SAFETY: the piece is in the guest's memory, which does not overlap the pool's.
                unsafe {
                    piece.start.copy_from_nonoverlapping(NonNull::from(now).cast(), now.len());
                }
                from = rest;
            }
            self.pool.put(Pooled { data, spare });
            at += step as u64;
            left -= step;
        }
        Ok(())
    }

    async fn write_many(&self, offset: u64, segments: &[Segment]) -> Result<()> {
        if goes_direct(segments) {
            let write = |(offset, segment)| async move {
                self.steady().write(offset, self.buffer(segment)).await.map(drop)
            };
            return self.direct(offset, segments, write).await;
        }
        let mut pieces = Pieces::new(segments);
        let (mut at, mut left) = (offset, total(segments));
        while left > 0 {
            let step = left.min(COPY);
            self.write_step(at, step, &mut pieces).await?;
            at += step as u64;
            left -= step;
        }
        Ok(())
    }

    /// Waits while the disk is paused, and for memory; for neither with the other.
    async fn ready(&self, direction: Direction, step: usize) -> Result<(Attempt<'_>, Taken<'_>)> {
        loop {
            drop(self.steady().ready(direction).await?);
            let taken = self.bounces.take(Pool::footprint(step)).await;
            if let Some(attempt) = self.steady().ready_now(direction) {
                return Ok((attempt, taken));
            }
        }
    }

    /// Reads `step` bytes into memory of the pool. Nothing is taken while the disk is paused.
    async fn read_step(&self, at: u64, step: usize) -> Result<(Taken<'_>, Pooled)> {
        loop {
            let (attempt, taken) = self.ready(Direction::Read, step).await?;
            let Pooled { data, spare } = self.pool.take(step);
            self.check_memory()?;
            match self.device.read(at, data).await {
                Ok(data) => return Ok((taken, Pooled { data, spare })),
                Err(error) => {
                    drop((taken, spare));
                    self.steady().hold(attempt, Direction::Read, error).await?;
                }
            }
        }
    }

    /// Writes the next `step` bytes of the guest's pieces. Nothing is taken while the disk is paused: they are copied
    /// for each attempt.
    async fn write_step(&self, at: u64, step: usize, pieces: &mut Pieces<'_>) -> Result<()> {
        loop {
            let (attempt, taken) = self.ready(Direction::Write, step).await?;
            let mut following = pieces.clone();
            let Pooled { mut data, spare } = self.pool.take(step);
            let mut to = &mut data[..];
            while let Some(piece) = following.next(to.len()) {
                let (now, rest) = to.split_at_mut(piece.length);
                let now: NonNull<u8> = NonNull::from(now).cast();
                // SAFETY: as above.
                unsafe { now.copy_from_nonoverlapping(piece.start, piece.length) };
                to = rest;
            }
            // The data may be zeroes that the guest never wrote.
            self.check_memory()?;
            match self.device.write(at, data).await {
                Ok(data) => {
                    self.pool.put(Pooled { data, spare });
                    *pieces = following;
                    return Ok(());
                }
                Err(error) => {
                    drop((taken, spare));
                    self.steady().hold(attempt, Direction::Write, error).await?;
                }
            }
        }
    }

    /// Fails if a part of the guest's memory is missing.
    fn check_memory(&self) -> Result<()> {
        if self.memory.is_lost() {
            let error = DiskError::Refused {
                image: "the guest's memory".into(),
                reason: "it was cut short while a request used it".into(),
            };
            return Err(error.into());
        }
        Ok(())
    }

    /// Logs why a request failed, at a limited rate.
    pub(crate) fn complain(&self, why: &dyn std::fmt::Display) {
        if let Some(hidden) = self.complaints.borrow_mut().pass() {
            tracing::warn!(queue = self.queue, hidden, "a guest's request failed: {why}");
        }
    }
}

/// The answer to a request.
#[derive(Clone, Copy)]
struct Answer {
    status: u8,
    /// Bytes written before the status.
    data: u32,
}

impl Answer {
    fn of(status: u8) -> Self {
        Self { status, data: 0 }
    }
}

/// Whether the segments are passed to the device without copying.
fn goes_direct(segments: &[Segment]) -> bool {
    let aligned = |segment: &Segment| segment.length.is_multiple_of(SECTOR as usize);
    total(segments) / segments.len().max(1) >= DIRECT && segments.iter().all(aligned)
}

fn with_offsets(mut offset: u64, segments: &[Segment]) -> impl Iterator<Item = (u64, Segment)> {
    segments.iter().map(move |segment| {
        let at = offset;
        offset += segment.length as u64;
        (at, *segment)
    })
}

/// Runs futures concurrently to completion; returns the first error.
async fn all<F: Future<Output = Result<()>>>(futures: impl Iterator<Item = F>) -> Result<()> {
    let mut open: Vec<Option<Pin<Box<F>>>> = futures.map(|future| Some(Box::pin(future))).collect();
    let mut result = Ok(());
    poll_fn(|cx| {
        let mut waiting = false;
        for place in &mut open {
            let Some(future) = place else { continue };
            match future.as_mut().poll(cx) {
                Poll::Pending => waiting = true,
                Poll::Ready(ended) => {
                    *place = None;
                    if result.is_ok() {
                        result = ended;
                    }
                }
            }
        }
        if waiting { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    result
}

/// Splits segments into pieces.
#[derive(Clone)]
struct Pieces<'a> {
    segments: std::slice::Iter<'a, Segment>,
    now: Option<Segment>,
}

impl<'a> Pieces<'a> {
    fn new(segments: &'a [Segment]) -> Self {
        Self { segments: segments.iter(), now: None }
    }

    /// The next piece of at most `most` bytes; `None` if that is 0, or at the end.
    fn next(&mut self, most: usize) -> Option<Segment> {
        if most == 0 {
            return None;
        }
        let Segment { start, length } =
            self.now.take().or_else(|| self.segments.next().copied())?;
        let piece = Segment { start, length: length.min(most) };
        if piece.length < length {
            // SAFETY: the piece is shorter than the segment.
            let rest = unsafe { start.add(piece.length) };
            self.now = Some(Segment { start: rest, length: length - piece.length });
        }
        Some(piece)
    }
}
