//! Events, which are sent to every client.

use super::outbox::Outbox;
use crate::json;
use serde_json::{Value, json};
use std::cell::RefCell;
use std::rc::{Rc, Weak};
use std::time::{SystemTime, UNIX_EPOCH};

/// Sends events; clones share the clients.
#[derive(Clone, Debug, Default)]
pub struct Events {
    listeners: Rc<RefCell<Vec<Weak<Outbox>>>>,
}

impl Events {
    /// Sends an event to every client that has completed capabilities negotiation.
    pub fn emit(&self, event: &str, data: Value) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let (seconds, microseconds) = (now.as_secs(), now.subsec_micros());
        let mut message = json!({
            "timestamp": {"seconds": seconds, "microseconds": microseconds},
            "event": event,
        });
        tracing::debug!(event, %data, "QMP event");
        if let Some(message) = message.as_object_mut()
            && data.as_object().is_none_or(|data| !data.is_empty())
        {
            message.insert("data".into(), data);
        }
        let line = json::to_line(&message);
        self.listeners.borrow_mut().retain(|listener| match listener.upgrade() {
            Some(outbox) => {
                outbox.push_event(&line);
                true
            }
            None => false,
        });
    }

    /// Sends events to a client from now on.
    pub(super) fn listen(&self, outbox: &Rc<Outbox>) {
        self.listeners.borrow_mut().push(Rc::downgrade(outbox));
    }
}
