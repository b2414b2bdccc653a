//! Names from images, shown to people.

use std::fmt;

/// Whether a character must be escaped where people read it: a terminal would obey it (control
/// characters), or it reorders, hides or breaks what is around it (bidirectional and other format
/// characters, odd spaces, line separators, what Unicode has not assigned).
pub fn is_hidden(c: char) -> bool {
    if c.is_ascii() {
        return c.is_ascii_control();
    }
    // Behind a letter, so that combining characters count as what they are.
    let mut letter_and = [b'a', 0, 0, 0, 0];
    let length = c.encode_utf8(&mut letter_and[1..]).len();
    let text = std::str::from_utf8(letter_and.get(..=length).unwrap_or_default());
    text.is_ok_and(|text| text.escape_debug().nth(1) == Some('\\'))
}

/// Text with what [is hidden](is_hidden) escaped: `\u{202e}`, `\n`. Backslashes stay as they are.
#[derive(Clone, Copy, Debug)]
pub struct Shown<T>(pub T);

impl<T: AsRef<str>> fmt::Display for Shown<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        escape(f, self.0.as_ref(), is_hidden)
    }
}

/// Writes text, with the characters escaped that `wanted` chooses.
///
/// # Errors
/// If `out` fails.
pub fn escape(out: &mut impl fmt::Write, text: &str, wanted: impl Fn(char) -> bool) -> fmt::Result {
    let mut rest = text;
    while let Some((at, c)) = rest.char_indices().find(|&(_, c)| wanted(c)) {
        out.write_str(rest.get(..at).unwrap_or_default())?;
        match c {
            '\n' | '\r' | '\t' => write!(out, "{}", c.escape_default())?,
            _ => write!(out, "{}", c.escape_unicode())?,
        }
        rest = rest.get(at + c.len_utf8()..).unwrap_or_default();
    }
    out.write_str(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_deceives_is_escaped_and_what_is_read_is_not() {
        for harmless in
            ["disk.qcow2", "né 🙂", "e\u{301}", "磁盤", "a\\b'\"", "ディスク", "دیسک", ""]
        {
            assert_eq!(Shown(harmless).to_string(), harmless);
        }
        for (text, shown) in [
            ("a\u{202e}b", "a\\u{202e}b"),
            ("\u{2066}x\u{2069}", "\\u{2066}x\\u{2069}"),
            ("\x1b[31m", "\\u{1b}[31m"),
            ("a\nb\tc\r", "a\\nb\\tc\\r"),
            ("\u{9b}31m\x7f", "\\u{9b}31m\\u{7f}"),
            ("a\u{200b}b\u{200d}\u{feff}\u{ad}", "a\\u{200b}b\\u{200d}\\u{feff}\\u{ad}"),
            ("\u{2028}\u{a0}\u{e0041}\u{e000}", "\\u{2028}\\u{a0}\\u{e0041}\\u{e000}"),
        ] {
            assert_eq!(Shown(text).to_string(), shown);
        }
    }

    #[test]
    fn every_bidirectional_and_control_character_is_hidden() {
        let bidi = ['\u{61c}', '\u{200e}', '\u{200f}'].into_iter();
        let bidi = bidi.chain('\u{202a}'..='\u{202e}').chain('\u{2066}'..='\u{2069}');
        for c in bidi.chain('\0'..='\x1f').chain('\x7f'..='\u{9f}') {
            assert!(is_hidden(c), "{c:?}");
        }
    }
}
