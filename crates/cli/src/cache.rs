//! How the host caches images.

use clap::ValueEnum;

/// `--cache`: whether the host's page cache is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Cache {
    /// `O_DIRECT`
    None,
    /// The page cache; a flush makes writes durable
    Writeback,
}

/// qemu-img's cache modes: `-t` for images written, `-T` for images read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
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
    /// Whether the page cache is bypassed.
    pub(crate) fn is_direct(self) -> bool {
        matches!(self, Self::None | Self::Directsync)
    }
}
