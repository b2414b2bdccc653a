//! JSON as in QMP: consecutive values, with or without whitespace between them.
//!
//! A peer's input is first split into values ([`Splitter`], which bounds their size and nesting), and each is then
//! parsed by `serde_json`, with duplicate keys rejected ([`parse`]).

mod print;
mod split;
mod value;

pub use print::to_line;
pub use split::{Limits, SplitError, Splitter};
pub use value::parse;
