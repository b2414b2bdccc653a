//! Load for the benchmarks.

fn main() {}
