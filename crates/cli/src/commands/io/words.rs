//! A command's words: options as in `getopt`, numbers as in qemu-io.

use crate::size;

/// Options and arguments of one command.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Words<'a> {
    flags: Vec<char>,
    values: Vec<(char, &'a str)>,
    /// The arguments that are not options, in order.
    pub(super) arguments: Vec<&'a str>,
}

/// An option that a command does not have, or one without its value.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum BadOption {
    Unknown(char),
    NoValue(char),
}

impl<'a> Words<'a> {
    /// Parses `words`. `options` are the letters allowed; those with a value are followed by a colon. Options and
    /// arguments may be mixed; after `--`, and for a command without options, there are only arguments.
    pub(super) fn parse(options: &str, words: &[&'a str]) -> Result<Self, BadOption> {
        let mut parsed = Self { flags: Vec::new(), values: Vec::new(), arguments: Vec::new() };
        let mut words = words.iter().copied();
        while let Some(word) = words.next() {
            if word == "--" {
                parsed.arguments.extend(words);
                break;
            }
            let letters = word.strip_prefix('-').filter(|letters| !letters.is_empty());
            let Some(letters) = letters.filter(|_| !options.is_empty()) else {
                parsed.arguments.push(word);
                continue;
            };
            for (at, letter) in letters.char_indices() {
                let known = options.find(letter).filter(|_| letter != ':');
                let known = known.ok_or(BadOption::Unknown(letter))?;
                if options.as_bytes().get(known + letter.len_utf8()) != Some(&b':') {
                    parsed.flags.push(letter);
                    continue;
                }
                let rest = &letters[at + letter.len_utf8()..];
                let value = if rest.is_empty() { words.next() } else { Some(rest) };
                parsed.values.push((letter, value.ok_or(BadOption::NoValue(letter))?));
                break;
            }
        }
        Ok(parsed)
    }

    /// Whether an option without a value was given.
    pub(super) fn has(&self, letter: char) -> bool {
        self.flags.contains(&letter)
    }

    /// All values of an option, in order.
    pub(super) fn values(&self, letter: char) -> impl Iterator<Item = &'a str> {
        self.values.iter().filter(move |(name, _)| *name == letter).map(|(_, value)| *value)
    }

    /// An option's value; the last one if it was given several times.
    pub(super) fn value(&self, letter: char) -> Option<&'a str> {
        self.values.iter().rev().find(|(name, _)| *name == letter).map(|(_, value)| *value)
    }
}

/// A number of bytes: `65536`, `64k`, `1.5M`, `0x200`.
///
/// # Errors
/// qemu-io's message.
pub(super) fn number(text: &str) -> Result<u64, String> {
    size::parse(text).map_err(|_| {
        let digits = text.trim_end_matches(|c: char| "bkmgtpe".contains(c.to_ascii_lowercase()));
        if !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()) {
            format!("Parsing error: argument too large -- {text}")
        } else {
            format!(
                "Parsing error: non-numeric argument, or extraneous/unrecognized suffix -- {text}"
            )
        }
    })
}

/// A byte, decimal, octal (`0102`) or hexadecimal (`0x42`).
///
/// # Errors
/// qemu-io's message.
pub(super) fn pattern(text: &str) -> Result<u8, String> {
    let hexadecimal = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"));
    let octal = text.strip_prefix('0').filter(|digits| !digits.is_empty());
    let value = match (hexadecimal, octal) {
        (Some(digits), _) => u8::from_str_radix(digits, 16),
        (None, Some(digits)) => u8::from_str_radix(digits, 8),
        (None, None) => text.parse(),
    };
    value.map_err(|_| format!("{text} is not a valid pattern byte"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_bundled_mixed_and_ended() {
        let words = Words::parse("qzP:", &["0", "-qP7", "4k", "-P", "8", "--", "-z"]).unwrap();
        assert!(words.has('q') && !words.has('z'));
        assert_eq!(words.value('P'), Some("8"));
        assert_eq!(words.arguments, ["0", "4k", "-z"]);
        assert_eq!(Words::parse("qP:", &["-"]).unwrap().arguments, ["-"]);
        assert_eq!(Words::parse("", &["-1"]).unwrap().arguments, ["-1"]);
        assert_eq!(Words::parse("qP:", &["-qx"]), Err(BadOption::Unknown('x')));
        assert_eq!(Words::parse("qP:", &["-:"]), Err(BadOption::Unknown(':')));
        assert_eq!(Words::parse("qP:", &["-P"]), Err(BadOption::NoValue('P')));
    }

    #[test]
    fn numbers_and_patterns() {
        assert_eq!(number("1.5k"), Ok(1536));
        assert!(number("1e3").unwrap_err().contains("non-numeric argument"));
        assert!(number("99999999999999999999").unwrap_err().contains("argument too large"));
        assert_eq!(pattern("0x41"), Ok(0x41));
        assert_eq!(pattern("0102"), Ok(0o102));
        assert_eq!(pattern("0"), Ok(0));
        for text in ["256", "-1", "x", "", "0x", "08"] {
            assert!(pattern(text).is_err(), "{text}");
        }
    }
}
