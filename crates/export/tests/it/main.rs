//! The exports' tests, in one program: each of its own would compile the server again.

#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]
#![allow(clippy::large_stack_arrays)]

#[path = "../common/client.rs"]
mod client;
mod fuse_file;
mod fuse_frontends;
mod fuse_loop;
#[path = "../common/fuse_mount.rs"]
mod fuse_mount;
mod fuse_mounting;
mod fuse_pauses;
mod fuse_random;
mod fuse_turns;
#[path = "../common/memory_disk.rs"]
mod memory_disk;
mod memory_limit;
mod nbd_clients;
mod nbd_exports;
mod nbd_large;
mod nbd_pauses;
mod nbd_session;
mod nbd_tls;
mod nbd_torture;
#[path = "../common/script.rs"]
mod script;
#[path = "../common/served.rs"]
mod served;
mod vhost_driver;
mod vhost_guest;
mod vhost_hostile;
mod vhost_killed;
mod vhost_limits;
mod vhost_neighbours;
mod vhost_pauses;
#[path = "../common/vhost_process.rs"]
mod vhost_process;
#[path = "../common/vhost_raw.rs"]
mod vhost_raw;
#[path = "../common/vhost_served.rs"]
mod vhost_served;
