//! Arguments already checked against the schema.

use serde_json::{Map, Value};

/// A command's arguments.
pub(super) type Arguments = Map<String, Value>;

/// A string; empty if missing.
pub(super) fn text<'a>(arguments: &'a Arguments, name: &str) -> &'a str {
    optional_text(arguments, name).unwrap_or("")
}

pub(super) fn optional_text<'a>(arguments: &'a Arguments, name: &str) -> Option<&'a str> {
    arguments.get(name).and_then(Value::as_str)
}

pub(super) fn flag(arguments: &Arguments, name: &str) -> Option<bool> {
    arguments.get(name).and_then(Value::as_bool)
}

pub(super) fn integer(arguments: &Arguments, name: &str) -> Option<i64> {
    arguments.get(name).and_then(Value::as_i64)
}

pub(super) fn number(arguments: &Arguments, name: &str) -> Option<f64> {
    arguments.get(name).and_then(Value::as_f64)
}

/// Whether a name is a valid identifier (QEMU's `id_wellformed`): a letter, then letters, digits and `-._`, at most
/// `longest` bytes in all.
pub(super) fn is_well_formed(name: &str, longest: usize) -> bool {
    let mut bytes = name.bytes();
    bytes.next().is_some_and(|first| first.is_ascii_alphabetic())
        && name.len() <= longest
        && bytes.all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_begin_with_a_letter() {
        for good in ["a", "A1-._z"] {
            assert!(is_well_formed(good, 31), "{good}");
        }
        for bad in ["", "1a", "#block1", "a b", "a/b", "é", &"a".repeat(32)] {
            assert!(!is_well_formed(bad, 31), "{bad}");
        }
    }
}
