//! Reporting of findings.

use super::{CheckEvent, CheckReport};

/// The report so far, and the callback that receives events.
pub(super) struct Log<'a> {
    events: &'a mut dyn FnMut(CheckEvent<'_>),
    pub(super) report: CheckReport,
}

impl<'a> Log<'a> {
    pub(super) fn new(events: &'a mut dyn FnMut(CheckEvent<'_>)) -> Self {
        Self { events, report: CheckReport::default() }
    }

    /// Reports a line without counting it.
    pub(super) fn say(&mut self, text: &str) {
        (self.events)(CheckEvent::Finding(text));
    }

    /// An error in the image.
    pub(super) fn corruption(&mut self, text: &str) {
        self.report.corruptions += 1;
        self.say(text);
    }

    /// Something that could not be examined.
    pub(super) fn check_error(&mut self, text: &str) {
        self.report.check_errors += 1;
        self.say(text);
    }

    pub(super) fn progress(&mut self, done: u64, total: u64) {
        (self.events)(CheckEvent::Progress { done, total });
    }
}
