//! Distinguished names as text.

use crate::der::{
    IA5_STRING, OBJECT_IDENTIFIER, PRINTABLE_STRING, SEQUENCE, SET, UTF8_STRING, expect, next,
    object_identifier,
};
use std::fmt::Write as _;

/// The kinds of string that the value of an attribute may be; any other is printed in hexadecimal.
#[derive(Clone, Copy)]
enum Kind {
    /// `DirectoryString`.
    Directory,
    Printable,
    Ia5,
}

impl Kind {
    fn allows(self, tag: u8) -> bool {
        match self {
            Self::Directory => matches!(tag, UTF8_STRING | PRINTABLE_STRING),
            Self::Printable => tag == PRINTABLE_STRING,
            Self::Ia5 => tag == IA5_STRING,
        }
    }
}

/// The attributes that have a name, in GnuTLS.
const NAMES: [(&str, &str, Kind); 22] = [
    ("2.5.4.3", "CN", Kind::Directory),
    ("2.5.4.4", "surName", Kind::Directory),
    ("2.5.4.5", "serialNumber", Kind::Printable),
    ("2.5.4.6", "C", Kind::Printable),
    ("2.5.4.7", "L", Kind::Directory),
    ("2.5.4.8", "ST", Kind::Directory),
    ("2.5.4.9", "street", Kind::Directory),
    ("2.5.4.10", "O", Kind::Directory),
    ("2.5.4.11", "OU", Kind::Directory),
    ("2.5.4.12", "title", Kind::Directory),
    ("2.5.4.13", "description", Kind::Directory),
    ("2.5.4.15", "businessCategory", Kind::Directory),
    ("2.5.4.17", "postalCode", Kind::Directory),
    ("2.5.4.41", "name", Kind::Directory),
    ("2.5.4.42", "givenName", Kind::Directory),
    ("2.5.4.43", "initials", Kind::Directory),
    ("2.5.4.44", "generationQualifier", Kind::Directory),
    ("2.5.4.46", "dnQualifier", Kind::Printable),
    ("2.5.4.65", "pseudonym", Kind::Directory),
    ("0.9.2342.19200300.100.1.1", "UID", Kind::Directory),
    ("0.9.2342.19200300.100.1.25", "DC", Kind::Ia5),
    ("1.2.840.113549.1.9.1", "EMAIL", Kind::Ia5),
];

/// A name as GnuTLS and therefore QEMU prints it, such as `CN=laptop.example.com,O=Example Org,C=GB`: in the
/// certificate's order, escaped as in RFC 4514. `contents` are those of the DER sequence, without its tag and length.
///
/// `None` if it is not a name. Attributes and values that have no text are printed in hexadecimal, so that different
/// names have different text.
pub fn distinguished_name(mut contents: &[u8]) -> Option<String> {
    let mut text = String::new();
    while !contents.is_empty() {
        if !text.is_empty() {
            text.push(',');
        }
        let mut attributes = expect(&mut contents, SET)?.contents;
        loop {
            attribute(expect(&mut attributes, SEQUENCE)?.contents, &mut text)?;
            if attributes.is_empty() {
                break;
            }
            text.push('+');
        }
    }
    Some(text)
}

/// Appends one attribute: its name, and its value.
fn attribute(mut contents: &[u8], text: &mut String) -> Option<()> {
    let identifier = object_identifier(expect(&mut contents, OBJECT_IDENTIFIER)?.contents)?;
    let value = next(&mut contents)?;
    if !contents.is_empty() {
        return None;
    }
    let known = NAMES.iter().find(|(known, ..)| *known == identifier);
    text.push_str(known.map_or(identifier.as_str(), |(_, name, _)| name));
    text.push('=');
    let string = std::str::from_utf8(value.contents).ok().filter(|string| !string.contains('\0'));
    match (known, string) {
        (Some((.., kind)), Some(string)) if kind.allows(value.tag) => escape(string, text),
        _ => {
            text.push('#');
            for byte in value.whole {
                let _ = write!(text, "{byte:02x}");
            }
        }
    }
    Some(())
}

/// Appends a value with what has a meaning in a name escaped.
fn escape(value: &str, text: &mut String) {
    let last = value.chars().count().saturating_sub(1);
    for (at, character) in value.chars().enumerate() {
        let special = match character {
            ',' | '+' | '"' | '\\' | '<' | '>' | ';' => true,
            '#' => at == 0,
            ' ' => at == 0 || at == last,
            _ => false,
        };
        if special {
            text.push('\\');
        }
        text.push(character);
    }
}
