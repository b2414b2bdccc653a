//! Reporting of findings.

use super::report::{CheckEvent, CheckReport};
use std::fmt::Display;

/// The report in the making, and who is told meanwhile.
pub(crate) struct Log<'a> {
    events: Option<&'a mut dyn FnMut(CheckEvent<'_>)>,
    pub(crate) report: CheckReport,
}

impl<'a> Log<'a> {
    pub(crate) fn new(events: &'a mut dyn FnMut(CheckEvent<'_>)) -> Self {
        Self { events: Some(events), report: CheckReport::default() }
    }

    /// Counts, and tells nobody.
    pub(crate) fn quiet() -> Self {
        Self { events: None, report: CheckReport::default() }
    }

    /// Tells a line, and counts nothing.
    pub(crate) fn say(&mut self, text: impl Display) {
        if let Some(events) = &mut self.events {
            events(CheckEvent::Finding(&text.to_string()));
        }
    }

    /// An error in the image.
    pub(crate) fn corruption(&mut self, text: impl Display) {
        self.report.corruptions += 1;
        self.say(text);
    }

    /// Something that could not be examined.
    pub(crate) fn check_error(&mut self, text: impl Display) {
        self.report.check_errors += 1;
        self.say(text);
    }

    pub(crate) fn progress(&mut self, done: u64, total: u64) {
        if let Some(events) = &mut self.events {
            events(CheckEvent::Progress { done, total });
        }
    }
}
