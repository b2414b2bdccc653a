//! Errors in an image.

use crate::text::is_hidden;
use std::borrow::Cow;
use std::fmt;

/// The kind of a [`FormatError`], for callers that act on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FormatErrorKind {
    /// The file is not a qcow2 image.
    NotQcow2,
    /// The file ends before the structure does.
    Truncated,
    /// A value that no correct image has.
    Invalid,
    /// A version, feature or compression type that this implementation does not know.
    Unsupported,
    /// The image is encrypted.
    Encrypted,
    /// A table or name beyond the limits that QEMU sets.
    TooLarge,
}

/// An invalid value in an image: the field, its value, and what to do.
///
/// It does not name the image; the caller that opened the file does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FormatError {
    kind: FormatErrorKind,
    field: Cow<'static, str>,
    value: String,
    reason: Cow<'static, str>,
}

impl FormatError {
    /// The field of the features that an image needs.
    pub(crate) const FEATURES: &'static str = "incompatible_features";

    /// An error of `kind`: `field` holds `value`, which is wrong for `reason`.
    pub fn new(
        kind: FormatErrorKind,
        field: impl Into<Cow<'static, str>>,
        value: impl fmt::Display,
        reason: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self { kind, field: field.into(), value: value.to_string(), reason: reason.into() }
    }

    /// The kind of error.
    pub fn kind(&self) -> FormatErrorKind {
        self.kind
    }

    /// The field's name, as in the specification.
    pub fn field(&self) -> &str {
        &self.field
    }

    /// The value found, printable.
    pub fn value(&self) -> &str {
        &self.value
    }

    /// The reason, and how to fix it if possible.
    pub fn reason(&self) -> &str {
        &self.reason
    }

    pub(crate) fn invalid(
        field: impl Into<Cow<'static, str>>,
        value: impl fmt::Display,
        reason: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self::new(FormatErrorKind::Invalid, field, value, reason)
    }

    pub(crate) fn truncated(
        field: impl Into<Cow<'static, str>>,
        value: impl fmt::Display,
        reason: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self::new(FormatErrorKind::Truncated, field, value, reason)
    }

    pub(crate) fn unsupported(
        field: impl Into<Cow<'static, str>>,
        value: impl fmt::Display,
        reason: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self::new(FormatErrorKind::Unsupported, field, value, reason)
    }

    pub(crate) fn too_large(
        field: impl Into<Cow<'static, str>>,
        value: impl fmt::Display,
        reason: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self::new(FormatErrorKind::TooLarge, field, value, reason)
    }
}

impl fmt::Display for FormatError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.kind == FormatErrorKind::Unsupported && self.field == Self::FEATURES {
            // QEMU's words, which programs look for.
            return write!(
                f,
                "Unsupported qcow2 feature(s): {} ({}); {}",
                self.value, self.field, self.reason
            );
        }
        write!(f, "{} is {}: {}", self.field, self.value, self.reason)
    }
}

impl std::error::Error for FormatError {}

/// Text from an image made safe to print: control characters and invalid UTF-8 become `?`.
pub(crate) fn printable(text: &[u8]) -> String {
    String::from_utf8_lossy(text)
        .chars()
        .map(|c| if c == char::REPLACEMENT_CHARACTER || is_hidden(c) { '?' } else { c })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_names_field_value_and_reason() {
        let error = FormatError::invalid("cluster_bits", 7, "must be 9 to 21");
        assert_eq!(error.to_string(), "cluster_bits is 7: must be 9 to 21");
        assert_eq!(error.kind(), FormatErrorKind::Invalid);
        assert_eq!((error.field(), error.value()), ("cluster_bits", "7"));
    }

    #[test]
    fn hostile_text_cannot_drive_a_terminal() {
        assert_eq!(printable(b"a\x1b[31m\nb\xff"), "a?[31m?b?");
        assert_eq!(printable("safe\u{202e}txt é".as_bytes()), "safe?txt é");
    }
}
