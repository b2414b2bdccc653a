//! A client's session: the handshake, then requests and replies until either side ends it.

use super::bitmap::ExportedBitmap;
use super::exports::{Client, Entry, Exports};
use super::handshake::{Agreement, Handshake, Outcome, Step, Violation};
use super::outbox::Outbox;
use super::request::{BadMagic, Command, Request, Terms};
use super::transport::Transport;
use super::window::{NARROW, WINDOW, Window};
use crate::budget::Share;
use crate::frontend::Offered;
use crate::give_way::give_way;
use crate::pool::{Pool, Pooled};
use crate::slots::Slots;
use crate::stop::Stop;
use isobath_disk::BlockDevice;
use isobath_ring::others_wait;
use isobath_storage::IoBuf;
use std::cell::{Cell, RefCell};
use std::future::{Future, pending, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::task::Poll;

/// Payloads up to this length in bytes are received through the window.
const SMALL_PAYLOAD: usize = 32 << 10;
/// How much work a session does before it checks whether the thread's other tasks wait, and yields if they do: requests
/// received, and pieces of this many bytes that they read or write.
const AT_ONCE: usize = 8;
const PIECE: usize = 16 << 10;
/// While this many bytes or more wait to be sent, no request is started: the disk is faster than the client, and data
/// read just in time is still in the processor's cache when it is sent.
const MAX_QUEUED: usize = 2 << 20;

/// How much a session may have in flight: received and not yet answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InFlight {
    /// Number of requests, at least 1.
    pub requests: usize,
    /// Number of bytes of memory that they take. A larger request is admitted if it is the only one.
    pub bytes: usize,
}

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The client violated the handshake protocol.
    #[error(transparent)]
    Violation(#[from] Violation),
    /// The client sent something that is not a request.
    #[error(transparent)]
    BadMagic(#[from] BadMagic),
    /// The connection failed.
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
    /// The client disconnected in the middle of a message.
    #[error("the client disconnected in the middle of a message")]
    Truncated,
    /// A read failed after a part of its reply was sent, which cannot say so any more.
    #[error(
        "a read failed after a part of its data was sent, which only the end of the connection can tell"
    )]
    HalfAnswered,
    /// There is no room for another client.
    #[error("the client is not admitted: {0}")]
    NotAdmitted(String),
    /// The export that an [attached](super::Server::attach) client is to use does not exist.
    #[error("there is no export named '{0}'")]
    NoExport(String),
}

/// Why no more requests are received.
pub(crate) enum End {
    /// The client requested it, or closed its side between requests.
    Closed,
    /// The server is stopping, or replies can no longer be sent.
    Stopped,
    Failed(SessionError),
}

impl<E: Into<SessionError>> From<E> for End {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// A connection whose handshake is complete, and the input received after it.
pub(crate) struct Negotiated<D> {
    /// The negotiated settings.
    pub(crate) agreement: Agreement,
    /// The export chosen.
    pub(crate) client: Client<D>,
    pub(crate) window: Window,
}

/// What a negotiation led to.
pub(crate) enum Negotiation<D> {
    /// The client ended it, left before choosing an export, or was not kept.
    Over,
    /// The client begins a TLS handshake; the negotiation continues encrypted.
    StartTls,
    /// The client has chosen an export.
    Done(Negotiated<D>),
}

/// Sends the greeting.
///
/// # Errors
/// If the connection failed.
pub(crate) async fn greet<T: Transport>(transport: &T) -> io::Result<()> {
    transport.send(vec![IoBuf::copy_of(&Handshake::greeting())]).await.0
}

/// Negotiates until the client has chosen an export, begins a TLS handshake, or ends, or is not kept by
/// `keeps`, which is asked before the client hears that its choice was successful.
///
/// # Errors
/// If the client violated the protocol, or the connection failed.
pub(crate) async fn negotiate<D: BlockDevice, T: Transport>(
    handshake: &mut Handshake,
    transport: &T,
    (exports, offered): (&Exports<D>, &Offered),
    keeps: impl Fn() -> bool,
) -> Result<Negotiation<D>, SessionError> {
    let mut window = Window::new();
    let mut output = Vec::new();
    loop {
        if !output.is_empty() {
            transport.send(vec![IoBuf::copy_of(&output)]).await.0?;
            output.clear();
        }
        let (step, client) = exports.choose(offered, |infos| {
            let step = handshake.advance(infos, window.unread(), &mut output);
            let index = match &step {
                Ok(Step { outcome: Outcome::Transmission(agreement), .. }) => {
                    Some(agreement.export)
                }
                _ => None,
            };
            (step, index)
        });
        let step = step?;
        window.skip(step.consumed);
        if client.is_some() && !keeps() {
            return Ok(Negotiation::Over);
        }
        if step.outcome != Outcome::More && !output.is_empty() {
            transport.send(vec![IoBuf::copy_of(&output)]).await.0?;
            output.clear();
        }
        match step.outcome {
            Outcome::Transmission(agreement) => {
                return Ok(client.map_or(Negotiation::Over, |client| {
                    Negotiation::Done(Negotiated { agreement, client, window })
                }));
            }
            Outcome::Aborted => return Ok(Negotiation::Over),
            // Nothing unread is left in the window.
            Outcome::StartTls => return Ok(Negotiation::StartTls),
            Outcome::More if !output.is_empty() => {}
            Outcome::More => {
                if window.fill(transport, WINDOW).await? == 0 {
                    return Ok(Negotiation::Over);
                }
            }
        }
    }
}

/// The transmission phase of one connection.
pub(crate) struct Session<'a, D, T> {
    pub(crate) device: &'a D,
    pub(crate) bitmaps: &'a [ExportedBitmap],
    /// Whether writes are refused even if the device accepts them.
    read_only: bool,
    transport: &'a T,
    pub(crate) agreement: Agreement,
    limit: InFlight,
    pub(crate) pool: &'a Pool,
    pub(crate) stop: &'a Stop,
    /// Requested once the server stops, or the client sends no more, or hears no replies: no request waits for a paused
    /// disk then.
    pub(crate) ending: Stop,
    pub(crate) outbox: RefCell<Outbox>,
    requests: Cell<usize>,
    bytes: Cell<usize>,
    /// This session's share of the server's memory.
    share: RefCell<Share<'a>>,
    /// The number of completed sends, to detect that there is room again.
    sends: Cell<u64>,
    /// Why sending has failed.
    broken: RefCell<Option<io::Error>>,
    /// The work since the last check.
    work: Cell<usize>,
    /// Whether the thread's other tasks are to have their turn.
    yields: Cell<bool>,
    /// Whether the reader goes on once the writer has had its turn.
    sends_first: Cell<bool>,
    /// Whether the session is over: replies are then dropped, and nothing more is received.
    gone: Cell<bool>,
    /// Whether the client was seen to disconnect while requests may still be received that it sent before.
    hung_up: Cell<bool>,
}

/// A request in flight: what is needed for its reply.
#[derive(Clone, Copy)]
pub(crate) struct Ticket {
    pub(crate) cookie: u64,
    pub(crate) reserved: usize,
}

impl<'a, D: BlockDevice, T: Transport> Session<'a, D, T> {
    pub(crate) fn new(
        entry: &'a Entry<D>,
        transport: &'a T,
        agreement: Agreement,
        limit: InFlight,
        pool: &'a Pool,
        share: Share<'a>,
    ) -> Self {
        Self {
            device: &entry.export.device,
            bitmaps: &entry.export.bitmaps,
            read_only: entry.export.read_only,
            transport,
            agreement,
            limit,
            pool,
            stop: &entry.stop,
            ending: Stop::default(),
            outbox: RefCell::new(Outbox::new()),
            requests: Cell::new(0),
            bytes: Cell::new(0),
            share: RefCell::new(share),
            sends: Cell::new(0),
            broken: RefCell::new(None),
            work: Cell::new(0),
            yields: Cell::new(false),
            sends_first: Cell::new(false),
            gone: Cell::new(false),
            hung_up: Cell::new(false),
        }
    }

    /// Serves requests until the client leaves or violates the protocol, or the server stops. Then waits for the
    /// requests in flight and sends the replies if possible; if not, cancels the reads in flight.
    pub(crate) async fn run(&self, mut window: Window) -> Result<(), SessionError> {
        let slots = RefCell::new(Slots::new());
        let start = |ticket: Ticket, command: Command, payload: Option<Pooled>| {
            slots.borrow_mut().start(|| self.serve(ticket, command, payload));
        };
        let busy = || !slots.borrow().is_empty();
        let mut reader = pin!(self.read(&mut window, start, busy));
        let mut writer = pin!(self.write());
        let mut stop = pin!(self.stop.requested());
        let mut watch = pin!(self.watch());
        let mut ended = None;
        let mut stopped = false;
        let mut drained = None;
        let mut given_up = false;
        poll_fn(|cx| {
            stopped = stopped || stop.as_mut().poll(cx).is_ready();
            if stopped && drained.is_none() {
                drained = Some(self.device.drain());
            }
            let _ = watch.as_mut().poll(cx);
            if stopped || ended.is_some() || self.is_unheard() {
                self.ending.request();
            }
            loop {
                slots.borrow_mut().poll(cx);
                let _ = writer.as_mut().poll(cx);
                if ended.is_none()
                    && let Poll::Ready(end) = reader.as_mut().poll(cx)
                {
                    self.note_end(&end);
                    ended = Some(end);
                    self.ending.request();
                }
                if self.is_unheard() && !std::mem::replace(&mut given_up, true) {
                    // That makes room for requests that wait to be received.
                    self.ending.request();
                    slots.borrow_mut().poll_all(cx);
                    continue;
                }
                let sends = self.sends.get();
                let yields = self.yields.replace(false);
                let waits = writer.as_mut().poll(cx).is_ready() || self.sends.get() == sends;
                if yields || waits && !self.sends_first.get() {
                    break;
                }
            }
            let idle = slots.borrow().is_empty() && self.requests.get() == 0;
            if ended.is_some() && idle { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        if let Some(error) = self.broken.take() {
            return Err(error.into());
        }
        match ended {
            Some(End::Failed(error)) => Err(error),
            _ => Ok(()),
        }
    }

    /// Notices that the client disconnects while requests are in flight, or wait to be received. Never completes.
    async fn watch(&self) {
        self.transport.sends_no_more().await;
        // Requests that a paused disk holds may be what keeps the reader from the end.
        self.ending.request();
        self.transport.hung_up().await;
        self.hung_up.set(self.transport.is_gone());
        pending::<()>().await;
    }

    /// Checks whether a client that closed its side has disconnected.
    fn note_end(&self, end: &End) {
        let failed = matches!(end, End::Failed(SessionError::Io(_)));
        let silent = matches!(end, End::Closed | End::Failed(SessionError::Truncated));
        if failed || silent && self.transport.is_gone() {
            self.gone.set(true);
        }
    }

    fn terms(&self) -> Terms {
        Terms {
            size: self.device.size(),
            read_only: self.read_only || self.device.is_read_only(),
            structured: self.agreement.structured,
            contexts: self.agreement.contexts,
        }
    }

    /// Receives requests from the connection and starts them.
    async fn read(
        &self,
        window: &mut Window,
        start: impl Fn(Ticket, Command, Option<Pooled>),
        busy: impl Fn() -> bool,
    ) -> End {
        let mut size = WINDOW;
        loop {
            while let Some(header) = window.unread().first_chunk().copied() {
                self.give_others_their_turn().await;
                match self.read_one(header, window, &start).await {
                    Ok(large) => size = if large { NARROW } else { WINDOW },
                    Err(end) => return end,
                }
            }
            // What completes at once, such as reads of cached data, is answered first, and by then more requests have
            // arrived that can be received together. Other requests are submitted to the kernel before.
            if busy() {
                give_way().await;
            } else {
                self.send_replies().await;
            }
            match self.unless_stopped(window.fill(self.transport, size)).await {
                Ok(Ok(0)) if window.unread().is_empty() => return End::Closed,
                Ok(Ok(0)) => return SessionError::Truncated.into(),
                Ok(Ok(_)) => size = WINDOW,
                Ok(Err(error)) => return error.into(),
                Err(end) => return end,
            }
        }
    }

    /// Gives the writer a turn if replies wait. If they can be sent at once, the client has them before anything else
    /// is done; otherwise the session goes on meanwhile.
    async fn send_replies(&self) {
        poll_fn(|_| {
            let waits = self.outbox.borrow().queued() > 0;
            if waits && !self.sends_first.replace(true) {
                return Poll::Pending;
            }
            self.sends_first.set(false);
            Poll::Ready(())
        })
        .await;
    }

    /// Lets the thread's other tasks run if any of them is ready, and enough work was done since the last time.
    pub(crate) async fn give_others_their_turn(&self) {
        if self.work.get() < AT_ONCE {
            return;
        }
        self.work.set(0);
        let mut first = true;
        poll_fn(|cx| {
            if std::mem::take(&mut first) && others_wait(cx.waker()) {
                self.yields.set(true);
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            Poll::Ready(())
        })
        .await;
    }

    /// Receives one request; returns whether it had a large payload.
    async fn read_one(
        &self,
        header: [u8; Request::SIZE],
        window: &mut Window,
        start: &impl Fn(Ticket, Command, Option<Pooled>),
    ) -> Result<bool, End> {
        let request = Request::parse(&header)?;
        window.skip(Request::SIZE);
        let command = request.check(&self.terms());
        let (reserved, can_be_divided) = match command {
            Ok(Command::Disconnect) => return Err(End::Closed),
            Ok(command) => (self.memory(command), command.can_be_divided()),
            Err(_) => (0, false),
        };
        let length = request.payload() as usize;
        let as_a_whole = self.reserve(reserved, can_be_divided).await?;
        if let (Ok(command), false) = (command, as_a_whole) {
            Box::pin(self.serve_in_pieces(&request, command, window)).await?;
            return Ok(length > SMALL_PAYLOAD);
        }
        let ticket = Ticket { cookie: request.cookie, reserved };
        let payload = match command {
            Ok(Command::Write { .. }) => self.payload(window, length).await.map(Some),
            _ => self.discard(window, length).await.map(|()| None),
        };
        let payload = payload.inspect_err(|_| self.release(1, reserved))?;
        match command {
            Ok(command) => start(ticket, command, payload),
            Err(error) => self.fail(ticket, error),
        }
        Ok(length > SMALL_PAYLOAD)
    }

    /// Waits for input until the session should stop. A cancelled receive loses its data.
    async fn unless_stopped<F: Future>(&self, receive: F) -> Result<F::Output, End> {
        let mut receive = pin!(receive);
        poll_fn(|cx| match receive.as_mut().poll(cx) {
            Poll::Ready(received) => Poll::Ready(Ok(received)),
            Poll::Pending if self.is_broken() || self.stop.is_requested() => {
                Poll::Ready(Err(End::Stopped))
            }
            Poll::Pending => Poll::Pending,
        })
        .await
    }

    /// Receives more into the window in the middle of a message.
    async fn fill(&self, window: &mut Window) -> Result<(), End> {
        match self.unless_stopped(window.fill(self.transport, WINDOW)).await?? {
            0 => Err(SessionError::Truncated.into()),
            _ => Ok(()),
        }
    }

    /// Collects a write's payload: the part in the window is copied, the rest is received in place.
    pub(crate) async fn payload(&self, window: &mut Window, length: usize) -> Result<Pooled, End> {
        let mut pooled = self.pool.take(length);
        while length <= SMALL_PAYLOAD && window.unread().len() < length {
            self.fill(window).await?;
        }
        let have = window.unread().len().min(length);
        if let (Some(to), Some(from)) = (pooled.data.get_mut(..have), window.unread().get(..have)) {
            to.copy_from_slice(from);
        }
        let mut filled = window.skip(have);
        while filled < length {
            let data = std::mem::replace(&mut pooled.data, IoBuf::empty());
            let received = self.unless_stopped(self.transport.receive(data, filled)).await?;
            pooled.data = received.1;
            match received.0? {
                0 => return Err(SessionError::Truncated.into()),
                count => filled += count,
            }
        }
        Ok(pooled)
    }

    /// Receives and drops the payload of a refused request.
    pub(crate) async fn discard(&self, window: &mut Window, length: usize) -> Result<(), End> {
        let mut left = length - window.skip(length);
        while left > 0 {
            self.fill(window).await?;
            left -= window.skip(left);
        }
        Ok(())
    }

    /// Whether nothing more can be sent or received.
    fn is_broken(&self) -> bool {
        self.gone.get()
    }

    /// Whether the client hears no reply any longer.
    pub(crate) fn is_unheard(&self) -> bool {
        self.gone.get() || self.hung_up.get()
    }

    /// The result of `read`, or `None` once it is no longer wanted; it is then not begun either. The caller pins
    /// it, so that it is not moved: it may have several KiB.
    pub(crate) fn while_wanted<F: Future>(
        &self,
        mut read: Pin<&mut F>,
    ) -> impl Future<Output = Option<F::Output>> {
        poll_fn(move |cx| {
            if self.is_unheard() {
                return Poll::Ready(None);
            }
            read.as_mut().poll(cx).map(Some)
        })
    }

    /// Drops a request whose reply is no longer wanted.
    pub(crate) fn forget(&self, ticket: Ticket) {
        self.release(1, ticket.reserved);
    }

    /// Waits until one more request of `bytes` bytes may be in flight. The task is polled again whenever a send has
    /// made room. Returns `false`, and reserves nothing, if the request `can_be_divided`, is the only one, and its
    /// bytes would have to be waited for: others may keep those for as long as they like.
    async fn reserve(&self, bytes: usize, can_be_divided: bool) -> Result<bool, End> {
        poll_fn(|cx| {
            let (requests, held) = (self.requests.get(), self.bytes.get());
            let fits = held.saturating_add(bytes) <= self.limit.bytes
                && self.outbox.borrow().queued() < MAX_QUEUED;
            if self.is_broken() || self.stop.is_requested() {
                return Poll::Ready(Err(End::Stopped));
            }
            if requests > 0 && (requests >= self.limit.requests || !fits) {
                return Poll::Pending;
            }
            let mut share = self.share.borrow_mut();
            if share.poll_take(bytes, cx).is_ready() {
                self.note(bytes);
                return Poll::Ready(Ok(true));
            }
            if requests == 0 && can_be_divided && bytes > share.piece() {
                share.wait_no_longer();
                return Poll::Ready(Ok(false));
            }
            Poll::Pending
        })
        .await
    }

    /// Begins a request, or a piece of one, of at most [`piece`](Self::piece) bytes when no other is in flight.
    pub(crate) fn begin(&self, cookie: u64, bytes: usize) -> Ticket {
        self.share.borrow_mut().hold(bytes);
        self.note(bytes);
        Ticket { cookie, reserved: bytes }
    }

    /// Counts a request whose memory is reserved.
    fn note(&self, bytes: usize) {
        self.requests.set(self.requests.get() + 1);
        self.work.set(self.work.get() + 1 + bytes / PIECE);
        self.bytes.set(self.bytes.get() + bytes);
    }

    /// Bytes that a request may take while no other is in flight, whatever other clients hold: a power of two.
    pub(crate) fn piece(&self) -> usize {
        self.share.borrow().piece()
    }

    /// Waits until every request has been answered, and the replies were sent.
    pub(crate) async fn until_answered(&self) -> Result<(), End> {
        poll_fn(|_| match self.requests.get() {
            0 => Poll::Ready(Ok(())),
            _ if self.is_broken() => Poll::Ready(Err(End::Stopped)),
            _ => Poll::Pending,
        })
        .await
    }

    fn release(&self, requests: usize, bytes: usize) {
        self.requests.set(self.requests.get() - requests);
        self.bytes.set(self.bytes.get() - bytes);
        self.share.borrow_mut().give(bytes);
    }

    /// Sends replies as they accumulate. Never completes; once sending has failed, replies are dropped.
    async fn write(&self) {
        loop {
            let batch =
                poll_fn(|_| self.outbox.borrow_mut().take().map_or(Poll::Pending, Poll::Ready));
            let mut batch = batch.await;
            if !self.is_unheard() {
                let bufs = std::mem::take(&mut batch.bufs);
                let (result, bufs) = self.transport.send(bufs).await;
                batch.bufs = bufs;
                if let Err(error) = result {
                    self.broken.replace(Some(error));
                    // What a client sent before it left is received up to its end. A connection that is still open has
                    // no end, and its client would wait for replies.
                    let has_left = self.transport.is_gone();
                    let state = if has_left { &self.hung_up } else { &self.gone };
                    state.set(true);
                }
            }
            self.release(batch.replies, batch.reserved);
            self.outbox.borrow_mut().recycle(batch, self.pool);
            self.sends.set(self.sends.get() + 1);
        }
    }
}
