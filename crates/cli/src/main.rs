//! The `isobath` command.
fn main() {}
