//! Printing a survey as text, JSON, CSV, Parquet or an HTML page.

mod csv;
mod format;
mod html;
mod json;
#[cfg(feature = "parquet")]
mod parquet;
mod text;

pub use self::csv::csv;
pub use html::html;
pub use json::json;
#[cfg(feature = "parquet")]
pub use parquet::parquet;
pub use text::text;

/// Whether [`parquet`] works: whether the feature of that name is enabled.
pub const HAS_PARQUET: bool = cfg!(feature = "parquet");

/// Fails, since the feature `parquet` is disabled.
///
/// # Errors
/// Always.
#[cfg(not(feature = "parquet"))]
pub fn parquet(_: &crate::Survey, _: &mut (dyn std::io::Write + Send)) -> std::io::Result<()> {
    Err(std::io::ErrorKind::Unsupported.into())
}

/// The settings of a list of chains.
#[derive(Clone, Copy, Debug)]
pub struct Listing {
    /// The number of chains.
    pub count: usize,
    /// The sort key.
    pub sort: crate::SortBy,
}
