//! Exports of NBD servers as storage for disk images.
//!
//! [`NbdHost`] opens exports by QEMU's [names](name) for them: each is an [`NbdFile`] of a fixed length. It negotiates
//! fixed newstyle, structured replies, block sizes and the context `base:allocation`, and works without those that a
//! server lacks. A connection is encrypted by TLS if [`NbdHost::encrypt`] says so.
//!
//! Any number of tasks may have requests in flight on one connection, which has two threads of its own: futures run on
//! any executor, and the connection may outlive the one that opened it. A request owns its buffers until its reply has
//! arrived; if the future of a change is dropped, every later request to the export waits for the change to end.
//!
//! Servers are not trusted: their messages are checked before they are used, a message that violates the protocol ends
//! the connection with a reason, and no length that a server claims determines an allocation. A lost connection is not
//! replaced: every request then fails until the export is opened again.

mod call;
mod connection;
mod encryption;
mod file;
pub mod handshake;
mod host;
pub mod name;
pub mod reply;
pub mod wire;

pub use encryption::{Encryption, OtherEncryption};
pub use file::NbdFile;
pub use host::{NbdHost, identity};
pub use name::is_name;
