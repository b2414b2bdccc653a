//! Splits a stream of bytes into JSON values.

/// Limits on one value from a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of one value.
    pub bytes: usize,
    /// How deep objects and arrays may nest; at most 120, since `serde_json` stops at 128.
    pub depth: usize,
}

impl Default for Limits {
    /// 1 MiB and 100 levels; QEMU allows 64 MiB and 1,024.
    fn default() -> Self {
        Self { bytes: 1 << 20, depth: 100 }
    }
}

/// Why input could not be split.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SplitError {
    /// A value is longer than [`Limits::bytes`].
    #[error("JSON token size limit exceeded")]
    TooLong,
    /// A value nests deeper than [`Limits::depth`].
    #[error("JSON nesting depth limit exceeded")]
    TooDeep,
    /// A closing bracket where none is open, or a comma or colon between values.
    #[error("JSON parse error, expecting value")]
    NoValue,
    /// A byte that cannot begin a value.
    #[error("JSON parse error, stray '{0}'")]
    Stray(char),
    /// A byte 0xFF, by which a client discards the value sent so far.
    #[error("JSON parse error, the client aborted the value")]
    Reset,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Position {
    /// Between values.
    Between,
    /// In an object or array.
    Nested,
    /// In a number or keyword outside any object.
    Word,
    /// In a string that ends with this quote.
    String(u8),
    /// After a backslash in such a string.
    Escape(u8),
    /// In a rejected value, up to the next newline or byte 0xFF.
    Skipping,
}

/// Accepts bytes as they arrive, and returns values, each as JSON text.
///
/// Strings in single quotes, which QEMU accepts too, are converted to double quotes. Apart from that, the contents
/// between the brackets are not examined.
#[derive(Debug)]
pub struct Splitter {
    limits: Limits,
    /// Whether only objects may begin.
    only_objects: bool,
    state: Position,
    depth: usize,
    value: Vec<u8>,
}

impl Splitter {
    /// A splitter at the beginning of a stream.
    pub const fn new(limits: Limits) -> Self {
        Self { limits, only_objects: false, state: Position::Between, depth: 0, value: Vec::new() }
    }

    /// Whether the next values must be objects: any other is then rejected at its first byte.
    pub const fn set_only_objects(&mut self, only_objects: bool) {
        self.only_objects = only_objects;
    }

    /// Consumes bytes from the front of `input` until a value is complete or rejected; `None` once all are consumed.
    pub fn next(&mut self, input: &mut &[u8]) -> Option<Result<Vec<u8>, SplitError>> {
        while let Some((&byte, rest)) = input.split_first() {
            if self.state == Position::Word && !is_word(byte) {
                // The byte belongs to the next value.
                self.state = Position::Between;
                return Some(Ok(std::mem::take(&mut self.value)));
            }
            *input = rest;
            match self.take(byte) {
                Ok(false) => {}
                Ok(true) => {
                    self.state = Position::Between;
                    return Some(Ok(std::mem::take(&mut self.value)));
                }
                Err(error) => {
                    self.value = Vec::new();
                    self.depth = 0;
                    return Some(Err(error));
                }
            }
        }
        None
    }

    /// Whether a value has begun and not ended.
    pub fn is_inside(&self) -> bool {
        !matches!(self.state, Position::Between | Position::Skipping)
    }

    /// Takes a byte; `true` if it ends a value.
    fn take(&mut self, byte: u8) -> Result<bool, SplitError> {
        if byte == 0xff {
            let was_inside = self.is_inside();
            self.state = Position::Between;
            return if was_inside { Err(SplitError::Reset) } else { Ok(false) };
        }
        match self.state {
            Position::Skipping => {
                if byte == b'\n' {
                    self.state = Position::Between;
                }
                return Ok(false);
            }
            Position::Between => match byte {
                b' ' | b'\t' | b'\r' | b'\n' => return Ok(false),
                _ if self.only_objects && byte != b'{' => return Err(self.stray(byte)),
                b'{' | b'[' | b'"' | b'\'' => {}
                _ if is_word(byte) => self.state = Position::Word,
                b'}' | b']' | b',' | b':' => return Err(SplitError::NoValue),
                _ => return Err(self.stray(byte)),
            },
            _ => {}
        }
        if self.value.len() >= self.limits.bytes {
            self.state = Position::Skipping;
            return Err(SplitError::TooLong);
        }
        match (self.state, byte) {
            (Position::Escape(quote), _) => {
                self.state = Position::String(quote);
                if byte == b'\'' {
                    // JSON has no such escape.
                    self.value.pop();
                }
                self.value.push(byte);
            }
            (Position::String(quote), b'\\') => {
                self.state = Position::Escape(quote);
                self.value.push(byte);
            }
            (Position::String(quote), _) if byte == quote => {
                self.value.push(b'"');
                self.state = Position::Nested;
                return Ok(self.depth == 0);
            }
            (Position::String(b'\''), b'"') => self.value.extend(br#"\""#),
            (Position::String(_) | Position::Word, _) => self.value.push(byte),
            (_, b'"' | b'\'') => {
                self.state = Position::String(byte);
                self.value.push(b'"');
            }
            (_, b'{' | b'[') => {
                if self.depth >= self.limits.depth {
                    self.state = Position::Skipping;
                    return Err(SplitError::TooDeep);
                }
                self.depth += 1;
                self.state = Position::Nested;
                self.value.push(byte);
            }
            (_, b'}' | b']') => {
                self.value.push(byte);
                self.depth -= 1;
                return Ok(self.depth == 0);
            }
            _ => self.value.push(byte),
        }
        Ok(false)
    }

    /// Rejects a value at its first byte.
    const fn stray(&mut self, byte: u8) -> SplitError {
        self.state = Position::Skipping;
        SplitError::Stray(if byte.is_ascii() { byte as char } else { '\u{fffd}' })
    }
}

const fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'+' | b'.' | b'_')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn split(limits: Limits, pieces: &[&[u8]]) -> Vec<Result<String, SplitError>> {
        let mut splitter = Splitter::new(limits);
        let mut found = Vec::new();
        for mut piece in pieces.iter().copied() {
            while let Some(value) = splitter.next(&mut piece) {
                found.push(value.map(|text| String::from_utf8_lossy(&text).into_owned()));
            }
        }
        found
    }

    fn all(input: &[u8]) -> Vec<Result<String, SplitError>> {
        split(Limits::default(), &[input])
    }

    #[allow(clippy::unnecessary_wraps, reason = "compared with results")]
    fn ok(text: &str) -> Result<String, SplitError> {
        Ok(text.to_owned())
    }

    #[test]
    fn values_need_nothing_between_them() {
        let input = br#"{"a":"}{"}{"b":[1,{"c":"\""}]} 3 null"x" [] "#;
        let values =
            [r#"{"a":"}{"}"#, r#"{"b":[1,{"c":"\""}]}"#, "3", "null", r#""x""#, "[]"].map(ok);
        assert_eq!(all(input), values);
    }

    #[test]
    fn single_quotes_become_double_ones() {
        assert_eq!(
            all(br#"{'a':'say "it\'s"','b\"':"'"}"#),
            [ok(r#"{"a":"say \"it's\"","b\"":"'"}"#)]
        );
    }

    #[test]
    fn what_is_refused_ends_with_its_line() {
        assert_eq!(all(b"@ {\n{}"), [Err(SplitError::Stray('@')), ok("{}")]);
        assert_eq!(all(b"]{}"), [Err(SplitError::NoValue), ok("{}")]);
        assert_eq!(all(b"{\"a\xff{}\xff"), [Err(SplitError::Reset), ok("{}")]);
        let small = Limits { bytes: 8, depth: 2 };
        assert_eq!(
            split(small, &[b"[[[]]]\n[[]]\n{\"a\":12345}\n\"123456\""]),
            [Err(SplitError::TooDeep), ok("[[]]"), Err(SplitError::TooLong), ok("\"123456\"")]
        );
    }

    proptest! {
        #[test]
        fn where_the_stream_is_cut_makes_no_difference(
            input in prop::collection::vec(
                prop::sample::select(&b"{}[]\"'\\:, \nan1@\xff\xc3"[..]), 0..60),
            cut in 0usize..60,
        ) {
            let limits = Limits { bytes: 20, depth: 4 };
            let whole = split(limits, &[&input]);
            let (front, back) = input.split_at(cut.min(input.len()));
            prop_assert_eq!(&whole, &split(limits, &[front, back]));
            for value in whole.into_iter().flatten() {
                prop_assert!(!value.is_empty() && value.len() <= 40);
            }
        }
    }
}
