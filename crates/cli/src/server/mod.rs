//! Parts common to servers: addresses to listen on, threads for clients, signals, running in the background.

pub(crate) mod add_fd;
pub(crate) mod claimed;
pub(crate) mod daemon;
pub(crate) mod endpoint;
pub(crate) mod group;
pub(crate) mod handed_in;
pub(crate) mod io_flusher;
pub(crate) mod keeper;
pub(crate) mod listen;
pub(crate) mod log_file;
mod owned;
pub(crate) mod pid_file;
pub(crate) mod runtime_directory;
pub(crate) mod sandbox;
pub(crate) mod service_manager;
pub(crate) mod signals;
pub(crate) mod threads;
pub(crate) mod tls;
