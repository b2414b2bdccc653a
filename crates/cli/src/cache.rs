//! How the host caches images.

use clap::ValueEnum;

/// `--cache`: whether the host's page cache is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Cache {
    #[value(help = "Bypass the page cache (O_DIRECT)")]
    None,
    /// Use the page cache; a flush makes writes durable
    Writeback,
}

/// qemu-img's cache modes: `-t` for images written, `-T` for images read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CacheMode {
    /// `O_DIRECT`
    None,
    /// The page cache
    Writeback,
    /// The page cache
    Writethrough,
    /// `O_DIRECT`
    Directsync,
    /// The page cache
    Unsafe,
}

impl CacheMode {
    fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "none" | "off" => Self::None,
            "writeback" => Self::Writeback,
            "writethrough" => Self::Writethrough,
            "directsync" => Self::Directsync,
            "unsafe" => Self::Unsafe,
            _ => return None,
        })
    }

    /// Parses the mode of an image that is written.
    pub(crate) fn parse(name: &str) -> Result<Self, String> {
        Self::from_name(name).ok_or_else(|| format!("Invalid cache option: {name}"))
    }

    /// Parses the mode of an image that is only read.
    pub(crate) fn parse_source(name: &str) -> Result<Self, String> {
        Self::from_name(name).ok_or_else(|| format!("Invalid source cache option: {name}"))
    }

    /// Whether the page cache is bypassed.
    pub(crate) fn is_direct(self) -> bool {
        matches!(self, Self::None | Self::Directsync)
    }
}

/// Whether discards reach the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Discard {
    Ignore,
    Unmap,
}

impl Discard {
    /// Parses `-d`.
    pub(crate) fn parse(name: &str) -> Result<Self, String> {
        match name {
            "ignore" | "off" => Ok(Self::Ignore),
            "unmap" | "on" => Ok(Self::Unmap),
            _ => Err(format!("Invalid discard option: {name}")),
        }
    }
}

/// Parses `-i`: whether it is `native`, which needs direct I/O in QEMU. Here the mode makes no other difference.
pub(crate) fn is_native(mode: &str) -> Result<bool, String> {
    match mode {
        "native" => Ok(true),
        "threads" | "io_uring" => Ok(false),
        _ => Err(format!("Invalid aio option: {mode}")),
    }
}
