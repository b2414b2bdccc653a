//! The part of DER that a distinguished name needs.

/// An element's tag and contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Element<'a> {
    pub(crate) tag: u8,
    pub(crate) contents: &'a [u8],
    /// The element with its tag and length.
    pub(crate) whole: &'a [u8],
}

pub(crate) const SEQUENCE: u8 = 0x30;
pub(crate) const SET: u8 = 0x31;
pub(crate) const OBJECT_IDENTIFIER: u8 = 0x06;
pub(crate) const UTF8_STRING: u8 = 0x0c;
pub(crate) const PRINTABLE_STRING: u8 = 0x13;
pub(crate) const TELETEX_STRING: u8 = 0x14;
pub(crate) const IA5_STRING: u8 = 0x16;
pub(crate) const BMP_STRING: u8 = 0x1e;

/// Takes the next element from `input`; `None` if it is malformed or incomplete.
pub(crate) fn next<'a>(input: &mut &'a [u8]) -> Option<Element<'a>> {
    let (&tag, rest) = input.split_first()?;
    let (&first, mut rest) = rest.split_first()?;
    let length = if first < 0x80 {
        usize::from(first)
    } else {
        let (bytes, after) = rest.split_at_checked(usize::from(first & 0x7f))?;
        if bytes.is_empty() || bytes.len() > 4 {
            return None;
        }
        rest = after;
        bytes.iter().fold(0, |length, byte| length << 8 | usize::from(*byte))
    };
    let (contents, after) = rest.split_at_checked(length)?;
    let whole = input.get(..input.len() - after.len())?;
    *input = after;
    Some(Element { tag, contents, whole })
}

/// Takes the next element, which must have this tag.
pub(crate) fn expect<'a>(input: &mut &'a [u8], tag: u8) -> Option<Element<'a>> {
    next(input).filter(|element| element.tag == tag)
}

/// An object identifier in its usual form, such as `2.5.4.3`.
pub(crate) fn object_identifier(contents: &[u8]) -> Option<String> {
    let mut numbers = Vec::new();
    let mut number: u64 = 0;
    let mut open = false;
    for byte in contents {
        number = number.checked_mul(128)? | u64::from(byte & 0x7f);
        open = byte & 0x80 != 0;
        if !open {
            numbers.push(std::mem::take(&mut number));
        }
    }
    let (&first, rest) = numbers.split_first()?;
    if open {
        return None;
    }
    let root = (first / 40).min(2);
    let parts = [root, first - root * 40].into_iter().chain(rest.iter().copied());
    Some(parts.map(|number| number.to_string()).collect::<Vec<_>>().join("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_cut_or_malformed_is_no_element() {
        let whole = [0x0c, 0x81, 0x03, b'a', b'b', b'c', 0x99];
        let mut input = &whole[..];
        let element = next(&mut input).unwrap();
        assert_eq!((element.tag, element.contents, input), (0x0c, &b"abc"[..], &[0x99][..]));
        assert_eq!(element.whole, &whole[..6]);
        for length in 0..6 {
            assert_eq!(next(&mut &whole[..length]), None, "{length} bytes");
        }
        for bytes in
            [&[0x0c, 0x80, 0][..], &[0x0c, 0x85, 0, 0, 0, 0, 0], &[0x0c, 0x84, 255, 255, 255, 255]]
        {
            assert_eq!(next(&mut &*bytes), None, "{bytes:x?}");
        }
    }

    #[test]
    fn object_identifiers() {
        let name = |bytes: &[u8]| object_identifier(bytes);
        assert_eq!(name(&[0x55, 4, 3]).as_deref(), Some("2.5.4.3"));
        assert_eq!(name(&[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d]).as_deref(), Some("1.2.840.113549"));
        assert_eq!(name(&[0x88, 0x37]).as_deref(), Some("2.999"));
        assert_eq!(name(&[]), None);
        assert_eq!(name(&[0x55, 0x84]), None);
        assert_eq!(name(&[0xff; 12]), None);
    }
}
