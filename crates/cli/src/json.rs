//! JSON as QEMU prints it: indented by four spaces, with non-ASCII characters escaped.

use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};
use std::io::{self, Write};

/// JSON as QEMU reads it, as standard JSON: strings may have single quotes, too.
pub(crate) fn standard(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut quote = None;
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match (quote, c) {
            (None, '\'' | '"') => {
                quote = Some(c);
                out.push('"');
            }
            (Some(_), '\\') => match chars.next() {
                Some('\'') => out.push('\''),
                escaped => {
                    out.push('\\');
                    out.extend(escaped);
                }
            },
            (Some(end), c) if c == end => {
                quote = None;
                out.push('"');
            }
            (Some(_), '"') => out.push_str("\\\""),
            _ => out.push(c),
        }
    }
    out
}

/// Prints a value and a newline.
pub(crate) fn print(out: &mut dyn Write, value: &impl Serialize) -> io::Result<()> {
    let mut bytes = Vec::new();
    value.serialize(&mut Serializer::with_formatter(&mut bytes, Qemu::default()))?;
    bytes.push(b'\n');
    out.write_all(&bytes)
}

/// The formatter's state.
#[derive(Default)]
struct Qemu {
    depth: usize,
}

impl Qemu {
    fn new_line<W: ?Sized + Write>(&self, writer: &mut W) -> io::Result<()> {
        write!(writer, "\n{:1$}", "", self.depth * 4)
    }

    fn begin<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &str) -> io::Result<()> {
        self.depth += 1;
        writer.write_all(bracket.as_bytes())
    }

    /// Even empty arrays and objects end on a line of their own.
    fn end<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &str) -> io::Result<()> {
        self.depth -= 1;
        self.new_line(writer)?;
        writer.write_all(bracket.as_bytes())
    }

    fn next<W: ?Sized + Write>(&self, writer: &mut W, first: bool) -> io::Result<()> {
        writer.write_all(if first { b"" } else { b"," })?;
        self.new_line(writer)
    }
}

impl Formatter for Qemu {
    fn write_string_fragment<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        for c in fragment.chars() {
            if c.is_ascii() && c != '\x7f' {
                writer.write_all(&[c as u8])?;
            } else {
                let mut units = [0; 2];
                for unit in c.encode_utf16(&mut units) {
                    write!(writer, "\\u{unit:04X}")?;
                }
            }
        }
        Ok(())
    }

    fn begin_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.begin(writer, "[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.end(writer, "]")
    }

    fn begin_array_value<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.next(writer, first)
    }

    fn begin_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.begin(writer, "{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.end(writer, "}")
    }

    fn begin_object_key<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.next(writer, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn indented_by_four_and_ascii() {
        let mut out = Vec::new();
        print(&mut out, &json!({"b": [1, {"é\u{1f4be}": true}], "a": {}})).unwrap();
        let text = String::from_utf8(out).unwrap();
        let expected = r#"{
    "b": [
        1,
        {
            "\u00E9\uD83D\uDCBE": true
        }
    ],
    "a": {
    }
}
"#;
        assert_eq!(text, expected);
    }
}
