//! Quotes words of command lines, for pasting into a shell.

use isobath_qcow2::text::is_hidden;
use std::borrow::Cow;
use std::fmt::Write as _;
use std::path::Path;

/// The absolute path, which is valid in every directory.
pub(crate) fn absolute(path: &Path) -> Cow<'_, Path> {
    std::path::absolute(path).map_or(Cow::Borrowed(path), Cow::Owned)
}

/// A path as a value in a QEMU option.
pub(crate) fn option_value(path: &Path) -> String {
    absolute(path).to_string_lossy().replace(',', ",,")
}

/// A word quoted for a shell. Control characters and misleading characters are written as escaped bytes, in a form that
/// bash, zsh and POSIX.1-2024 shells understand.
pub(crate) fn quoted(word: &str) -> Cow<'_, str> {
    if word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._~/:,=+%@".contains(&byte)) {
        return Cow::Borrowed(word);
    }
    if !word.chars().any(is_hidden) {
        return Cow::Owned(format!("'{}'", word.replace('\'', r"'\''")));
    }
    let mut text = String::from("$'");
    for c in word.chars() {
        match c {
            '\'' | '\\' => text.extend(['\\', c]),
            _ if is_hidden(c) => {
                for byte in c.encode_utf8(&mut [0; 4]).bytes() {
                    // An escape has at most three octal digits, so nothing that follows can extend it.
                    let _ = write!(text, "\\{byte:03o}");
                }
            }
            _ => text.push(c),
        }
    }
    text.push('\'');
    Cow::Owned(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_reads_what_was_quoted() {
        for name in ["plain", "it's, é", "it's\x1b[2J\u{202e}7\\"] {
            let word = quoted(name);
            assert!(!word.chars().any(is_hidden), "{word:?}");
            let shell = std::process::Command::new("bash")
                .args(["-c", &format!("printf %s {word}")])
                .output();
            assert_eq!(shell.unwrap().stdout, name.as_bytes());
        }
    }
}
