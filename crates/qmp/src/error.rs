//! The error reply of a command.

use serde_json::{Value, json};
use std::fmt;

/// QMP's error classes (`QapiErrorClass`). Programs may rely on them, but not on the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorClass {
    /// Any failure without a class of its own.
    GenericError,
    /// The command is unknown, or not allowed in the current mode of the session.
    CommandNotFound,
    /// A device is not in the state that the command needs: it has no such block job.
    DeviceNotActive,
    /// There is no such device.
    DeviceNotFound,
    /// The command needs KVM.
    KvmMissingCap,
}

impl ErrorClass {
    /// The name on the wire.
    pub const fn name(self) -> &'static str {
        match self {
            Self::GenericError => "GenericError",
            Self::CommandNotFound => "CommandNotFound",
            Self::DeviceNotActive => "DeviceNotActive",
            Self::DeviceNotFound => "DeviceNotFound",
            Self::KvmMissingCap => "KVMMissingCap",
        }
    }
}

/// A failed command's reply: a class for programs, a text for users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QmpError {
    /// The kind of failure.
    pub class: ErrorClass,
    /// What went wrong, for users.
    pub description: String,
}

impl QmpError {
    /// A failure of class `GenericError`.
    pub fn new(description: impl fmt::Display) -> Self {
        Self::of(ErrorClass::GenericError, description)
    }

    /// A failure of this class.
    pub fn of(class: ErrorClass, description: impl fmt::Display) -> Self {
        Self { class, description: description.to_string() }
    }

    /// The value of a reply's `error` member.
    pub(crate) fn to_json(&self) -> Value {
        json!({ "class": self.class.name(), "desc": self.description })
    }
}

impl fmt::Display for QmpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.description)
    }
}

impl std::error::Error for QmpError {}
