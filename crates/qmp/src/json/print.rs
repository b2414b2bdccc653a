//! Prints JSON in ASCII, on one line, spaced as QEMU does.

use serde::Serialize;
use serde_json::Value;
use serde_json::ser::{Formatter, Serializer};
use std::io::{self, Write};

/// A value as ASCII text on one line, ending in `\r\n` as QEMU's lines do.
pub fn to_line(value: &Value) -> Vec<u8> {
    let mut text = Vec::new();
    // Writing a Value to memory cannot fail: its keys are strings.
    let _ = value.serialize(&mut Serializer::with_formatter(&mut text, Qemus));
    text.extend(b"\r\n");
    text
}

struct Qemus;

impl Formatter for Qemus {
    fn begin_array_value<W: Write + ?Sized>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: Write + ?Sized>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }

    fn write_string_fragment<W: Write + ?Sized>(
        &mut self,
        out: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        if fragment.is_ascii() {
            return out.write_all(fragment.as_bytes());
        }
        for unit in fragment.encode_utf16() {
            match u8::try_from(unit) {
                Ok(byte) if byte.is_ascii() => out.write_all(&[byte])?,
                _ => write!(out, "\\u{unit:04X}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn text_is_spaced_and_in_ascii() {
        let value = json!({"a": [1, -2, null], "é\n\"": "x😀", "c": {}});
        let line = to_line(&value);
        let text = "{\"a\": [1, -2, null], \"\\u00E9\\n\\\"\": \"x\\uD83D\\uDE00\", \"c\": {}}\r\n";
        assert_eq!(String::from_utf8(line.clone()).unwrap(), text);
        assert_eq!(crate::json::parse(&line), Ok(value));
    }
}
