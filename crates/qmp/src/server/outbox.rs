//! Output waiting to be sent to one client.

use event_listener::Event;
use isobath_export::tls::Connection;
use isobath_storage::IoBuf;
use std::cell::{Cell, RefCell};
use std::net::Shutdown;
use std::rc::Rc;

/// Bytes per send.
const SEND: usize = 256 << 10;

/// Replies and events for a client, in order.
#[derive(Debug)]
pub(super) struct Outbox {
    pub(super) connection: Connection,
    /// Bytes beyond which the client is disconnected.
    limit: usize,
    waiting: RefCell<Vec<u8>>,
    /// Bytes in the send in progress.
    sending: Cell<usize>,
    /// Nothing more will be added.
    finished: Cell<bool>,
    /// Sending has failed.
    broken: Cell<bool>,
    changed: Event,
}

impl Outbox {
    pub(super) fn new(connection: Connection, limit: usize) -> Rc<Self> {
        Rc::new(Self {
            connection,
            limit,
            waiting: RefCell::default(),
            sending: Cell::new(0),
            finished: Cell::new(false),
            broken: Cell::new(false),
            changed: Event::new(),
        })
    }

    /// Adds a reply, however long.
    pub(super) fn push(&self, line: &[u8]) {
        if !self.broken.get() && !self.finished.get() {
            self.waiting.borrow_mut().extend_from_slice(line);
            self.changed.notify(usize::MAX);
        }
    }

    /// Adds an event; disconnects the client if too much is already waiting.
    pub(super) fn push_event(&self, line: &[u8]) {
        if self.queued().saturating_add(line.len()) > self.limit && !self.broken.get() {
            tracing::warn!(
                waiting = self.queued(),
                "a QMP client does not read its replies; disconnecting it"
            );
            self.cut();
        }
        self.push(line);
    }

    /// Ends the connection at once, in both directions.
    pub(super) fn cut(&self) {
        self.broken.set(true);
        self.waiting.borrow_mut().clear();
        let _ = self.connection.shutdown(Shutdown::Both);
        self.changed.notify(usize::MAX);
    }

    /// Notes that nothing more will be added.
    pub(super) fn finish(&self) {
        self.finished.set(true);
        self.changed.notify(usize::MAX);
    }

    pub(super) fn is_broken(&self) -> bool {
        self.broken.get()
    }

    fn queued(&self) -> usize {
        self.waiting.borrow().len() + self.sending.get()
    }

    /// Waits until at most `bytes` wait to be sent, or sending has failed.
    pub(super) async fn below(&self, bytes: usize) {
        loop {
            let changed = self.changed.listen();
            if self.queued() <= bytes || self.broken.get() {
                return;
            }
            changed.await;
        }
    }

    /// Sends everything that is added, until [`finish`](Self::finish) is called and everything is sent.
    pub(super) async fn send(&self) {
        while !self.broken.get() {
            let changed = self.changed.listen();
            let piece = {
                let mut waiting = self.waiting.borrow_mut();
                let length = waiting.len().min(SEND);
                let piece = IoBuf::copy_of(&waiting[..length]);
                waiting.drain(..length);
                piece
            };
            if piece.is_empty() {
                if self.finished.get() {
                    return;
                }
                changed.await;
                continue;
            }
            self.sending.set(piece.len());
            let (result, _) = self.connection.send(vec![piece]).await;
            self.sending.set(0);
            if let Err(error) = result {
                tracing::debug!(%error, "a QMP client disconnected");
                self.cut();
            }
            self.changed.notify(usize::MAX);
        }
    }
}
