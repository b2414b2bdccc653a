//! What servers need: where they listen, threads for their clients, signals, the background.

pub(crate) mod daemon;
pub(crate) mod endpoint;
pub(crate) mod listen;
pub(crate) mod pid_file;
pub(crate) mod signals;
pub(crate) mod threads;
