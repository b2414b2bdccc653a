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

/// The settings of a list of chains.
#[derive(Clone, Copy, Debug)]
pub struct Listing {
    /// The number of chains.
    pub count: usize,
    /// The sort key.
    pub sort: crate::SortBy,
}
