//! Exports of NBD servers as storage for disk images.
//!
//! [`NbdHost`] opens exports by QEMU's [names](name) for them: each is an [`NbdFile`] of a fixed length. It negotiates
//! fixed newstyle, structured replies, the block sizes and the context `base:allocation`, and does without what a
//! server lacks. TLS is not supported.
//!
//! Requests of any number of tasks are in flight on one connection, which has two threads of its own: futures run on
//! any executor, and the connection does not end with the one that opened it. A request owns its buffers until its
//! reply has come; if the future of a change is dropped, every later request of the export waits for its end.
//!
//! A server is hostile until its bytes have been checked: whatever it says, a connection fails with a reason, and
//! nothing is allocated because of a length that it claims. A lost connection is not replaced. Every request then
//! fails, and so does what uses the file; the next open connects anew.

mod call;
mod connection;
mod file;
pub mod handshake;
mod host;
pub mod name;
pub mod reply;
pub mod wire;

pub use file::NbdFile;
pub use host::{NbdHost, identity};
pub use name::is_name;
