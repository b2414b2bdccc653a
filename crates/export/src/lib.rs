//! Frontends to a virtual disk: the protocols by which other programs reach a
//! [`BlockDevice`](isobath_disk::BlockDevice).

mod budget;
pub mod fuse;
pub mod nbd;
mod pool;
mod slots;
mod stop;
pub mod vhost_user;
