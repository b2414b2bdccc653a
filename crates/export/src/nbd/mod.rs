//! NBD, the network block device protocol: a server for any
//! [`BlockDevice`](isobath_disk::BlockDevice).

pub mod context;
pub mod handshake;
pub mod reply;
pub mod request;
pub mod wire;
