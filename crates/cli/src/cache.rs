//! How the host caches images.

use clap::ValueEnum;

/// `--cache`: whether the host's page cache is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Cache {
    /// `O_DIRECT`
    None,
    /// The page cache; a flush makes durable
    Writeback,
}
