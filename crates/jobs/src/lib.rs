//! Block jobs: long-running operations on a disk in use.
//!
//! A job is a [`Job`], through which its user monitors and controls it, and a future that does the work concurrently
//! with the disk's requests. [`pace`] decides when it copies; the map determines what it copies. When everything is
//! copied the chain changes, in one step that a crash leaves either done or not done.

mod commit;
mod error;
mod follow;
mod job;
mod mirror;
pub mod pace;
pub mod record;
mod run;
mod scan;
mod stream;

pub use commit::{CommitOptions, commit};
pub use error::JobError;
pub use job::{
    IoStatus, Job, JobEvent, JobKind, JobOptions, JobStatus, Listener, OnError, Progress, Verb,
    VerbRefused,
};
pub use mirror::{MirrorOptions, MirrorSync, mirror};
pub use stream::{StreamOptions, stream};
