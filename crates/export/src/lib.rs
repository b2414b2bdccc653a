//! Frontends for a virtual disk: the protocols through which other programs access a
//! [`BlockDevice`](isobath_disk::BlockDevice).
//!
//! [`frontend`] is their common interface, [`registry`] the table of all frontends. Each can also be used on its own.

mod budget;
mod command_line;
pub mod frontend;
pub mod fuse;
mod give_way;
pub mod keeper;
pub mod nbd;
mod pool;
pub mod registry;
mod slots;
mod steady;
mod stop;
pub mod tls;
pub mod ublk;
pub mod vhost_user;
