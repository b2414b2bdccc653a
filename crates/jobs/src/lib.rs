//! Block jobs: long work on a disk in use.
//!
//! A job is a [`Job`], by which its user sees and steers it, and a future that does the work beside
//! the disk's requests. [`pace`] says when it copies; what it copies is what the map says is needed.
//! When all is copied the chain changes, in one step that a crash leaves done or not done.

mod commit;
mod follow;
mod job;
mod mirror;
pub mod pace;
pub mod record;
mod run;
mod scan;
mod stream;

pub use commit::{CommitOptions, commit};
pub use job::{
    IoStatus, Job, JobEvent, JobKind, JobOptions, JobStatus, Listener, OnError, Progress, Verb,
    VerbRefused,
};
pub use mirror::{MirrorOptions, MirrorSync, mirror};
pub use stream::{StreamOptions, stream};
