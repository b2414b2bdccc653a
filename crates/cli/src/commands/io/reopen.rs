//! What `reopen -o` changes.

use super::opening::{Opened, Opening};
use crate::cache::CacheMode;
use crate::host::is_export;
use crate::{null, options};
use isobath_storage::window::Part;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

/// The options that are changed. Others are known and have no effect, or keep their values.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Changes {
    read_only: Option<bool>,
    direct: Option<bool>,
    no_flush: Option<bool>,
}

impl Changes {
    /// Parses the options of a command that has `-r` or `-w` (`has_rw`), or `-c` (`has_cache`).
    ///
    /// # Errors
    /// In qemu-io's words.
    pub(super) fn parse(
        pairs: &[(String, String)],
        (has_rw, has_cache): (bool, bool),
        opened: &Opened,
    ) -> Result<Self, String> {
        let has = |option: &str| pairs.iter().any(|(name, _)| name == option);
        if has_rw && has("read-only") {
            return Err("Cannot set both -r/-w and 'read-only'".into());
        }
        if has_cache && (has("cache.direct") || has("cache.no-flush")) {
            return Err("Cannot set both -c and the cache options".into());
        }
        let mut changes = Self::default();
        for (name, value) in pairs {
            let on = || options::on_off(name, value);
            match name.as_str() {
                "read-only" => changes.read_only = Some(on()?),
                "cache.direct" => changes.direct = Some(on()?),
                "cache.no-flush" => changes.no_flush = Some(on()?),
                "auto-read-only" | "lazy-refcounts" => {
                    on()?;
                }
                name if has_no_effect(name) || opened.is(name, value) => {}
                name => return Err(format!("Cannot change the option '{}'", own(name))),
            }
        }
        Ok(changes)
    }

    /// Applies them.
    pub(super) fn apply(&self, opening: &mut Opening) {
        if let Some(read_only) = self.read_only {
            opening.set_read_only(read_only);
        }
        if self.direct.is_none() && self.no_flush.is_none() {
            return;
        }
        let direct = self.direct.unwrap_or(opening.is_direct());
        let no_flush = self.no_flush.unwrap_or(opening.cache == CacheMode::Unsafe);
        let through = matches!(opening.cache, CacheMode::Writethrough | CacheMode::Directsync);
        opening.set_cache(match (no_flush, direct, through) {
            (true, _, _) => CacheMode::Unsafe,
            (false, true, true) => CacheMode::Directsync,
            (false, true, false) => CacheMode::None,
            (false, false, true) => CacheMode::Writethrough,
            (false, false, false) => CacheMode::Writeback,
        });
    }
}

fn has_no_effect(option: &str) -> bool {
    matches!(option, "discard" | "detect-zeroes")
        || option.starts_with("overlap-check")
        || option.starts_with("pass-discard-")
        || option.contains("cache-")
}

/// An option as the image, or the file, that it is of calls it.
fn own(option: &str) -> &str {
    let mut own = option;
    while let Some(inner) = own.strip_prefix("backing.") {
        own = inner;
    }
    own.strip_prefix("file.").unwrap_or(own)
}

impl Opened {
    /// Whether an option that names something, or its driver, has this value.
    fn is(&self, option: &str, value: &str) -> bool {
        let own = own(option);
        let of = option.strip_suffix(own).unwrap_or_default();
        let layer = self.disk.layers().nth(of.matches("backing.").count());
        match (own, layer) {
            ("node-name", _) => self.opening().image.node_name(option) == Some(value),
            ("driver", Some(layer)) if of.ends_with("file.") => driver_of(layer.name()) == value,
            ("driver", Some(layer)) => layer.format().name() == value,
            _ => false,
        }
    }
}

/// The driver that QEMU has for a file.
pub(super) fn driver_of(name: &Path) -> &'static str {
    let is_device = |name: &Path| {
        let kind = std::fs::metadata(name).map(|found| found.file_type());
        kind.is_ok_and(|kind| kind.is_block_device() || kind.is_char_device())
    };
    match Part::of_name(name) {
        Some(_) => "raw",
        None if is_export(name) => "nbd",
        None if null::is_name(name) => "null-co",
        None if is_device(name) => "host_device",
        None => "file",
    }
}
