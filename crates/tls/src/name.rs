//! Distinguished names as text.

use crate::der::{
    BMP_STRING, Element, IA5_STRING, OBJECT_IDENTIFIER, PRINTABLE_STRING, SEQUENCE, SET,
    TELETEX_STRING, UTF8_STRING, expect, next, object_identifier,
};
use std::borrow::Cow;
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
            Self::Directory => {
                matches!(tag, UTF8_STRING | PRINTABLE_STRING | TELETEX_STRING | BMP_STRING)
            }
            Self::Printable => tag == PRINTABLE_STRING,
            Self::Ia5 => tag == IA5_STRING,
        }
    }
}

/// The attributes that have a name, as `GnuTLS` has it.
const NAMES: [(&str, &str, Kind); 30] = [
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
    ("2.5.4.20", "telephoneNumber", Kind::Printable),
    ("2.5.4.41", "name", Kind::Directory),
    ("2.5.4.42", "givenName", Kind::Directory),
    ("2.5.4.43", "initials", Kind::Directory),
    ("2.5.4.44", "generationQualifier", Kind::Directory),
    ("2.5.4.46", "dnQualifier", Kind::Printable),
    ("2.5.4.65", "pseudonym", Kind::Directory),
    ("0.9.2342.19200300.100.1.1", "UID", Kind::Directory),
    ("0.9.2342.19200300.100.1.25", "DC", Kind::Ia5),
    ("1.2.840.113549.1.9.1", "EMAIL", Kind::Ia5),
    ("1.3.6.1.4.1.311.60.2.1.1", "jurisdictionOfIncorporationLocalityName", Kind::Directory),
    ("1.3.6.1.4.1.311.60.2.1.2", "jurisdictionOfIncorporationStateOrProvinceName", Kind::Directory),
    ("1.3.6.1.4.1.311.60.2.1.3", "jurisdictionOfIncorporationCountryName", Kind::Printable),
    ("1.3.6.1.5.5.7.9.2", "placeOfBirth", Kind::Directory),
    ("1.3.6.1.5.5.7.9.3", "gender", Kind::Printable),
    ("1.3.6.1.5.5.7.9.4", "countryOfCitizenship", Kind::Printable),
    ("1.3.6.1.5.5.7.9.5", "countryOfResidence", Kind::Printable),
];

/// A name as `GnuTLS` and therefore QEMU prints it, such as `CN=laptop.example.com,O=Example Org,C=GB`: in the
/// certificate's order, escaped as in RFC 4514. `contents` are those of the DER sequence, without its tag and length.
///
/// `None` if it is not a name. Attributes and values that have no text are printed in hexadecimal, so that different
/// values have different text.
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
    match (known, string(&value)) {
        (Some((.., kind)), Some(string)) if kind.allows(value.tag) => escape(&string, text),
        _ => {
            text.push('#');
            for byte in value.whole {
                let _ = write!(text, "{byte:02x}");
            }
        }
    }
    Some(())
}

/// The text of a string. `None` for what `GnuTLS` prints in hexadecimal, in its own way: another string may have the
/// same text there.
fn string<'a>(value: &Element<'a>) -> Option<Cow<'a, str>> {
    let contents = value.contents;
    let string: Cow<'_, str> = match value.tag {
        BMP_STRING => {
            let (units, []) = contents.as_chunks::<2>() else { return None };
            let units: Vec<u16> = units.iter().map(|&unit| u16::from_be_bytes(unit)).collect();
            String::from_utf16(&units).ok()?.into()
        }
        TELETEX_STRING if !contents.iter().all(|byte| (b' '..=b'~').contains(byte)) => return None,
        _ => std::str::from_utf8(contents).ok()?.into(),
    };
    Some(string).filter(|string| !string.contains('\0'))
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

#[cfg(test)]
mod tests {
    use super::*;

    fn element(tag: u8, contents: &[u8]) -> Vec<u8> {
        let mut bytes = vec![tag];
        match contents.len() {
            length @ 0..=0x7f => bytes.push(length as u8),
            length => bytes.extend([0x82, (length >> 8) as u8, length as u8]),
        }
        bytes.extend_from_slice(contents);
        bytes
    }

    fn attribute(identifier: &[u8], tag: u8, value: &[u8]) -> Vec<u8> {
        let parts = [element(OBJECT_IDENTIFIER, identifier), element(tag, value)];
        element(SEQUENCE, &parts.concat())
    }

    fn common_name(value: &str) -> Vec<u8> {
        element(SET, &attribute(&[0x55, 4, 3], UTF8_STRING, value.as_bytes()))
    }

    /// What `GnuTLS` 3.7 prints for these values (`gnutls_x509_crt_get_dn`).
    #[test]
    fn values_are_escaped_as_by_gnutls() {
        for (value, text) in [
            ("laptop.example.com", "CN=laptop.example.com"),
            ("a, b", r"CN=a\, b"),
            ("a+b", r"CN=a\+b"),
            ("a\"b", r#"CN=a\"b"#),
            ("a\\b", r"CN=a\\b"),
            ("a<b>c;d", r"CN=a\<b\>c\;d"),
            ("a=b", "CN=a=b"),
            ("#hash", r"CN=\#hash"),
            ("a#b", "CN=a#b"),
            ("  two  ", r"CN=\  two \ "),
            (" ", r"CN=\ "),
            ("é", "CN=é"),
            ("a\x01b", "CN=a\x01b"),
        ] {
            assert_eq!(distinguished_name(&common_name(value)).as_deref(), Some(text));
        }
    }

    /// What `GnuTLS` 3.7 prints for these, too.
    #[test]
    fn strings_of_other_kinds_are_printed_as_by_gnutls() {
        for (tag, value, text) in [
            (TELETEX_STRING, &b"a, b"[..], r"CN=a\, b"),
            (TELETEX_STRING, b"#a\\b", r"CN=\#a\\b"),
            (BMP_STRING, b"\0a\0,\0b", r"CN=a\,b"),
            (BMP_STRING, b"\0#\0\xe9", r"CN=\#é"),
            (BMP_STRING, b"\xd8\x3d\xde\0\0\x01", "CN=\u{1f600}\x01"),
            (BMP_STRING, b"\xfe\xff\0a", "CN=\u{feff}a"),
        ] {
            let name = element(SET, &attribute(&[0x55, 4, 3], tag, value));
            assert_eq!(distinguished_name(&name).as_deref(), Some(text));
        }
    }

    #[test]
    fn attributes_of_persons_and_companies_have_gnutls_names() {
        let personal = |last| [0x2b, 6, 1, 5, 5, 7, 9, last];
        let company = |last| [0x2b, 6, 1, 4, 1, 0x82, 0x37, 0x3c, 2, 1, last];
        for (identifier, tag, name) in [
            (&personal(2)[..], UTF8_STRING, "placeOfBirth"),
            (&personal(3), PRINTABLE_STRING, "gender"),
            (&personal(4), PRINTABLE_STRING, "countryOfCitizenship"),
            (&personal(5), PRINTABLE_STRING, "countryOfResidence"),
            (&company(1), UTF8_STRING, "jurisdictionOfIncorporationLocalityName"),
            (&company(2), BMP_STRING, "jurisdictionOfIncorporationStateOrProvinceName"),
            (&company(3), PRINTABLE_STRING, "jurisdictionOfIncorporationCountryName"),
        ] {
            let value = if tag == BMP_STRING { &b"\0G\0B"[..] } else { b"GB" };
            let named = distinguished_name(&element(SET, &attribute(identifier, tag, value)));
            assert_eq!(named, Some(format!("{name}=GB")));
        }
    }

    #[test]
    fn attributes_are_in_the_certificates_order() {
        let country = element(SET, &attribute(&[0x55, 4, 6], PRINTABLE_STRING, b"GB"));
        let several = [
            attribute(&[0x55, 4, 3], UTF8_STRING, b"x"),
            attribute(&[0x55, 4, 10], PRINTABLE_STRING, b"y"),
        ];
        let several = element(SET, &several.concat());
        let mail = [0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 9, 1];
        let mail = element(SET, &attribute(&mail, IA5_STRING, b"a@b.c"));
        let name = distinguished_name(&[country, several, mail].concat());
        assert_eq!(name.as_deref(), Some("C=GB,CN=x+O=y,EMAIL=a@b.c"));
    }

    /// Else a value could be made to look like another name.
    #[test]
    fn what_has_no_text_is_in_hexadecimal() {
        let one = |identifier: &[u8], tag, value: &[u8]| {
            distinguished_name(&element(SET, &attribute(identifier, tag, value))).unwrap()
        };
        assert_eq!(one(&[0x2a, 3, 4, 5], UTF8_STRING, b"hello"), "1.2.3.4.5=#0c0568656c6c6f");
        assert_eq!(one(&[0x55, 4, 72], UTF8_STRING, b"rl"), "2.5.4.72=#0c02726c");
        assert_eq!(one(&[0x55, 4, 20], UTF8_STRING, b"1"), "telephoneNumber=#0c0131");
        assert_eq!(one(&[0x55, 4, 3], UTF8_STRING, b"a\0b"), "CN=#0c03610062");
        assert_eq!(one(&[0x55, 4, 3], UTF8_STRING, b"\xff"), "CN=#0c01ff");
        assert_eq!(one(&[0x55, 4, 3], 0x04, b"a"), "CN=#040161");
        assert_eq!(one(&[0x55, 4, 3], TELETEX_STRING, b"\xe9"), "CN=#1401e9");
        assert_eq!(one(&[0x55, 4, 3], TELETEX_STRING, b"a\n"), "CN=#1402610a");
        assert_eq!(one(&[0x55, 4, 3], BMP_STRING, b"\0a\0\0"), "CN=#1e0400610000");
        assert_eq!(one(&[0x55, 4, 3], BMP_STRING, b"\0a\0"), "CN=#1e03006100");
        assert_eq!(one(&[0x55, 4, 3], BMP_STRING, b"\xd8\x3d"), "CN=#1e02d83d");
        assert_eq!(one(&[0x55, 4, 6], BMP_STRING, b"\0G"), "C=#1e020047");
        // UniversalString.
        assert_eq!(one(&[0x55, 4, 3], 0x1c, b"\0\0\0a"), "CN=#1c0400000061");
        assert_eq!(one(&[0x55, 4, 6], UTF8_STRING, b"GB"), "C=#0c024742");
    }

    #[test]
    fn what_is_not_a_name_has_no_text() {
        let whole = common_name("abc");
        assert_eq!(distinguished_name(&[]).as_deref(), Some(""));
        for length in 1..whole.len() {
            assert_eq!(distinguished_name(&whole[..length]), None);
        }
        assert_eq!(distinguished_name(&element(SET, &[])), None);
        let trailing = [&attribute(&[0x55, 4, 3], UTF8_STRING, b"a")[2..], &[0]].concat();
        assert_eq!(distinguished_name(&element(SET, &element(SEQUENCE, &trailing))), None);
    }
}
