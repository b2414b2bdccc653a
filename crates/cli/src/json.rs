//! JSON as QEMU prints it: indented by four, with everything but ASCII escaped.

use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
use std::io::{self, Write};

/// Prints a value and a newline.
pub(crate) fn print(out: &mut dyn Write, value: &impl Serialize) -> io::Result<()> {
    let mut bytes = Vec::new();
    let formatter = Qemu(PrettyFormatter::with_indent(b"    "));
    value.serialize(&mut Serializer::with_formatter(&mut bytes, formatter))?;
    bytes.push(b'\n');
    out.write_all(&bytes)
}

struct Qemu(PrettyFormatter<'static>);

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
        self.0.begin_array(writer)
    }

    fn end_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_array(writer)
    }

    fn begin_array_value<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.0.begin_array_value(writer, first)
    }

    fn end_array_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_array_value(writer)
    }

    fn begin_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.begin_object(writer)
    }

    fn end_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_object(writer)
    }

    fn begin_object_key<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.0.begin_object_key(writer, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.begin_object_value(writer)
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.0.end_object_value(writer)
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
    "a": {}
}
"#;
        assert_eq!(text, expected);
    }
}
