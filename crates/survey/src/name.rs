//! File names: resolving names in headers, and displaying names.

use isobath_qcow2::text::is_hidden;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Why a backing file's name is not followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// It begins with `json:`.
    Json,
    /// It has a protocol prefix, such as `nbd:`.
    Protocol,
    /// It is that of the lower layers of a chain in an object store.
    Stored,
    /// It contains a NUL byte, or is empty.
    NoFileName,
}

/// Resolves a backing file's name in the header of `referrer` to a path. Relative names are relative to the referrer's
/// directory; only plain names are followed (a `file:` prefix is allowed).
pub(crate) fn resolve(referrer: &Path, name: &str) -> Result<PathBuf, Refused> {
    if name.contains('\0') {
        return Err(Refused::NoFileName);
    }
    if is_stored(name) {
        return Err(Refused::Stored);
    }
    let plain = name.strip_prefix("file:").unwrap_or(name);
    match plain.split('/').next().and_then(|first| first.split_once(':')) {
        Some(("json", _)) => Err(Refused::Json),
        Some(_) => Err(Refused::Protocol),
        None if plain.is_empty() => Err(Refused::NoFileName),
        None => Ok(referrer
            .parent()
            .map_or_else(|| PathBuf::from(plain), |directory| directory.join(plain))),
    }
}

/// Whether a name has the form of layers in an object store that an image above them has in its header, as
/// `docs/format.md` specifies it.
fn is_stored(name: &str) -> bool {
    let Some((place, digests)) = name.rsplit_once("@sha256:") else { return false };
    let mut digests = digests.splitn(2, '+');
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let bucket = ["s3://", "gs://", "az://"].iter().find_map(|scheme| place.strip_prefix(scheme));
    let is_chain = match (bucket, place.strip_prefix("file:///")) {
        (Some(path), _) => {
            path.split('/').count() > 1 && path.split('/').all(|part| !part.is_empty())
        }
        (None, Some(path)) => !path.is_empty() && !path.ends_with('/'),
        (None, None) => false,
    };
    is_chain && digests.all(|digest| digest.len() == 64 && digest.bytes().all(is_digit))
}

/// A file name for programs: only bytes that are not UTF-8 (`\xff`) and backslashes (`\\`) are escaped, so that it can
/// be parsed.
pub fn exact(name: &[u8]) -> String {
    escaped(name, |_| false)
}

/// A file name for users: like [`exact`], but with control characters and characters that reorder or hide text escaped
/// (`\u{202e}`).
pub fn shown(name: &[u8]) -> String {
    escaped(name, is_hidden)
}

fn escaped(name: &[u8], unsafe_to_show: impl Fn(char) -> bool) -> String {
    let mut text = String::with_capacity(name.len());
    for chunk in name.utf8_chunks() {
        for c in chunk.valid().chars() {
            if c == '\\' {
                text.push_str("\\\\");
            } else if unsafe_to_show(c) {
                text.extend(c.escape_unicode());
            } else {
                text.push(c);
            }
        }
        for byte in chunk.invalid() {
            // Writing to a string cannot fail.
            let _ = write!(text, "\\x{byte:02x}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_names_are_followed() {
        let resolve = |name: &str| resolve(Path::new("/pool/vm/a.qcow2"), name);
        for (name, path) in [
            ("base.raw", "/pool/vm/base.raw"),
            ("/a/b:c", "/a/b:c"),
            ("./x:y", "/pool/vm/./x:y"),
            ("file:../b", "/pool/vm/../b"),
            ("dir/nbd:x", "/pool/vm/dir/nbd:x"),
        ] {
            assert_eq!(resolve(name), Ok(PathBuf::from(path)));
        }
        assert_eq!(resolve("json:{\"driver\":\"file\"}"), Err(Refused::Json));
        for name in ["nbd:localhost:1", "http://x/y", "fat:/etc", "file:nbd:x"] {
            assert_eq!(resolve(name), Err(Refused::Protocol), "{name}");
        }
        let digest = "0123456789abcdef".repeat(4);
        for place in ["s3://bucket/a/vm", "gs://bucket/vm", "az://bucket/vm", "file:///pool/vm"] {
            let name = format!("{place}@sha256:{digest}");
            assert_eq!(resolve(&name), Err(Refused::Stored));
            assert_eq!(resolve(&format!("{name}+{digest}")), Err(Refused::Stored));
        }
        assert_eq!(resolve(&format!("s3://b/vm@sha256:{}", &digest[1..])), Err(Refused::Protocol));
        for place in ["vm", "s3://bucket", "s3://", "s3:///vm", "s3://bucket/", "http://host/vm"] {
            let name = format!("{place}@sha256:{digest}");
            assert_eq!(resolve(&name), Err(Refused::Protocol), "{name}");
        }
        for name in ["", "a\0b", "file:"] {
            assert_eq!(resolve(name), Err(Refused::NoFileName), "{name:?}");
        }
    }

    #[test]
    fn names_are_shown_without_harm_and_can_be_read_back() {
        assert_eq!(exact("né 🙂\n".as_bytes()), "né 🙂\n");
        assert_eq!(exact(b"a\\x\xff"), "a\\\\x\\xff");
        assert_eq!(shown("a\x1b[31m\u{202e}b".as_bytes()), "a\\u{1b}[31m\\u{202e}b");
        assert_eq!(shown(b"<script>"), "<script>");
    }
}
