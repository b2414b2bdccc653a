//! The names of objects.

use crate::digest::Digest;

/// Where manifests are.
pub(crate) const MANIFESTS: &str = "manifests/";
/// Where pushes that have begun are noted.
pub(crate) const PUSHES: &str = "pushes/";
/// Whoever collects objects has this one.
pub(crate) const COLLECTOR: &str = "gc.lock";
/// Where objects are that are named by their digests.
pub(crate) const KINDS: [&str; 5] = ["layers/", "tables/", "heads/", "indexes/", "traces/"];

const SUFFIX: &str = ".json";

/// The manifest of a chain.
pub(crate) fn manifest(name: &str) -> String {
    format!("{MANIFESTS}{name}{SUFFIX}")
}

/// The name of the chain with this manifest.
pub(crate) fn name(manifest: &str) -> Option<&str> {
    let name = manifest.strip_prefix(MANIFESTS)?.strip_suffix(SUFFIX)?;
    is_name(name).then_some(name)
}

pub(crate) fn layer(digest: &Digest) -> String {
    format!("{}{digest}", KINDS[0])
}

pub(crate) fn table(digest: &Digest) -> String {
    format!("{}{digest}", KINDS[1])
}

pub(crate) fn heads(digest: &Digest) -> String {
    format!("{}{digest}", KINDS[2])
}

pub(crate) fn index(digest: &Digest) -> String {
    format!("{}{digest}", KINDS[3])
}

pub(crate) fn trace(digest: &Digest) -> String {
    format!("{}{digest}", KINDS[4])
}

/// Whether an object may have this name, or a part of it: letters, digits, `.`, `_` and `-`, beginning with none of the
/// last three, at most 200.
pub(crate) fn is_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    name.len() <= 200
        && name.bytes().all(plain)
        && name.bytes().next().is_some_and(|first| first.is_ascii_alphanumeric())
}
