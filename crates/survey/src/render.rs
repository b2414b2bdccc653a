//! Printing a survey: as text, JSON, CSV, Parquet, or a page for a browser.

mod csv;
mod format;
mod html;
mod json;
mod parquet;
mod text;

pub use self::csv::csv;
pub use html::html;
pub use json::json;
pub use parquet::parquet;
pub use text::text;

/// What a list of chains holds.
#[derive(Clone, Copy, Debug)]
pub struct Listing {
    /// How many chains.
    pub count: usize,
    /// Which.
    pub sort: crate::SortBy,
}
