//! Frontends to a virtual disk: the protocols through which other programs access a
//! [`BlockDevice`](isobath_disk::BlockDevice).
//!
//! [`frontend`] is what they have in common, [`registry`] the table of those there are. Each can also be used
//! by itself.

mod budget;
mod command_line;
pub mod frontend;
pub mod fuse;
pub mod nbd;
mod pool;
pub mod registry;
mod slots;
mod stop;
pub mod vhost_user;
