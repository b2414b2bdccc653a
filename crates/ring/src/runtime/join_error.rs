//! Why a task has no result.

use std::any::Any;
use std::fmt;

/// Why a task has no result.
pub struct JoinError {
    /// `None` if the task was ended from outside.
    panic: Option<Box<dyn Any + Send>>,
}

impl JoinError {
    pub(super) fn aborted() -> Self {
        Self { panic: None }
    }

    pub(super) fn panicked(payload: Box<dyn Any + Send>) -> Self {
        Self { panic: Some(payload) }
    }

    /// Whether the task panicked; otherwise it was aborted or its executor ended.
    pub fn is_panic(&self) -> bool {
        self.panic.is_some()
    }

    /// Resumes the task's panic here.
    ///
    /// # Panics
    /// Always: with the task's panic, or with a message that the task was aborted.
    pub fn resume(self) -> ! {
        match self.panic {
            Some(payload) => std::panic::resume_unwind(payload),
            None => panic!("the task was aborted"),
        }
    }

    pub(super) fn message(&self) -> &str {
        let Some(payload) = &self.panic else { return "aborted" };
        payload
            .downcast_ref::<&str>()
            .copied()
            .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
            .unwrap_or("(no message)")
    }
}

impl fmt::Display for JoinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.panic {
            Some(_) => write!(f, "the task panicked: {}", self.message()),
            None => f.write_str("the task was aborted"),
        }
    }
}

impl fmt::Debug for JoinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for JoinError {}
