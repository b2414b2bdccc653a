//! Where objects are.

#[cfg(feature = "buckets")]
mod answers;
#[cfg(feature = "buckets")]
mod bucket;
mod directory;
#[cfg(feature = "buckets")]
mod hedge;
#[cfg(feature = "buckets")]
mod profile;

#[cfg(feature = "buckets")]
pub use bucket::Bucket;
pub use directory::Directory;

use crate::address::Place;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::progress::Progress;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Which contents of an object were read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// The entity tag; for a directory, the digest.
    pub tag: Option<String>,
    /// The version of stores that count them.
    pub number: Option<String>,
}

/// What is known of an object without reading it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its length in bytes.
    pub length: u64,
    /// When it was last put, by the store's clock.
    pub modified: SystemTime,
}

/// An object of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub key: String,
    /// What is known of it.
    pub found: Found,
}

/// What became of a conditional put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The object has the new contents.
    Done,
    /// Somebody else has changed it; it is as that has left it.
    Changed,
    /// The store has no conditional puts.
    Unsupported,
}

/// A store of objects. Each method may be called by several threads at once, returns within the
/// time limits as long as the store does not keep it busy with answers, and
/// repeats what failed for a while. An object appears whole or not at all, and is seen by everybody from then on.
#[allow(clippy::missing_errors_doc, reason = "errors are those of the store")]
pub trait Store: Send + Sync {
    /// What is known of an object; `None` if there is none.
    fn head(&self, key: &str) -> Result<Option<Found>>;

    /// All of an object, of at most `most` bytes.
    ///
    /// # Errors
    /// It is longer.
    fn get(&self, key: &str, most: u64) -> Result<Option<(Vec<u8>, Version)>>;

    /// So many bytes of an object.
    ///
    /// # Errors
    /// There is no such object, or it ends before.
    fn read(&self, key: &str, offset: u64, length: usize) -> Result<Vec<u8>>;

    /// Makes an object with these bytes, whatever it was.
    fn put(&self, key: &str, bytes: &[u8]) -> Result<()>;

    /// Makes an object with these bytes if it is still what was read, or `None` if there was none. After an
    /// interruption it takes as long as [`Limits::hurried`] says to find out whether it has.
    ///
    /// # Errors
    /// [`Error::Interrupted`], [`Error::Store`]: the object is as it was, as far as this put goes.
    /// [`Error::Unknown`], [`Error::Unsettled`]: that is unknown. [`Error::Local`]: what was put may not be durable.
    fn put_if(&self, key: &str, bytes: &[u8], was: Option<&Version>) -> Result<Outcome>;

    /// Makes sure that the objects that were found stay, also those whose writer was killed before it did. A store
    /// whose objects appear when they are durable has nothing to do.
    fn settle(&self) -> Result<()> {
        Ok(())
    }

    /// Begins an object of so many bytes, whatever it was.
    fn begin<'a>(&'a self, key: &str, length: u64) -> Result<Box<dyn Parts + 'a>>;

    /// All objects whose names begin so.
    fn list(&self, prefix: &str) -> Result<Vec<Entry>>;

    /// Removes an object. That there is none is no error.
    fn delete(&self, key: &str) -> Result<()>;

    /// Removes what writers left who were killed before this time, and says how many pieces that were.
    fn sweep(&self, before: SystemTime) -> Result<u64>;
}

/// An object that is written in parts, and appears when it is finished. Dropped before, it never does.
#[allow(clippy::missing_errors_doc, reason = "errors are those of the store")]
pub trait Parts: Send + Sync {
    /// Bytes of each part but the last.
    fn size(&self) -> u64;

    /// Writes a part.
    fn put(&self, number: u64, bytes: Vec<u8>) -> Result<()>;

    /// Makes the object appear. All parts were written.
    fn finish(self: Box<Self>) -> Result<()>;

    /// Removes the parts that were written.
    fn abandon(self: Box<Self>) -> Result<()>;
}

/// Time limits of requests to an object store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// For one operation, however often it is tried.
    pub overall: Duration,
    /// For the silence of the store in one attempt: a request that sends data has more for these bytes, one that
    /// receives data as long as some arrive.
    pub attempt: Duration,
    /// The pause before the second attempt; it doubles from one to the next, up to five seconds.
    pub pause: Duration,
    /// For what must still be done or found out after an interruption.
    pub hurried: Duration,
    /// Whether a read whose answer begins far later than is usual is asked for a second time.
    pub hedged: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self::within(Duration::from_mins(5))
    }
}

impl Limits {
    /// The usual ones within an overall limit.
    pub fn within(overall: Duration) -> Self {
        let attempt = overall.min(Duration::from_mins(1));
        Self {
            overall,
            attempt,
            pause: Duration::from_millis(200),
            hurried: overall.min(Duration::from_secs(5)),
            hedged: false,
        }
    }

    /// Those of short reads that somebody waits for: one that the store does not answer is tried again, at least twice
    /// within the overall limit, and one that it answers late is asked for twice.
    pub fn of_reads(overall: Duration) -> Self {
        let attempt = (overall / 3).min(Duration::from_secs(10));
        Self { attempt, hedged: true, ..Self::within(overall) }
    }
}

/// Opens a store. Its operations end early when `progress` is cancelled.
///
/// # Errors
/// It cannot be reached, or its configuration in the environment is wrong.
pub fn open(place: &Place, limits: Limits, progress: &Arc<Progress>) -> Result<Box<dyn Store>> {
    match place {
        Place::Directory(path) => Ok(Box::new(Directory::within(path, limits, progress)?)),
        #[cfg(feature = "buckets")]
        Place::Bucket { scheme, bucket, prefix } => {
            Ok(Box::new(Bucket::open(scheme, bucket, prefix, limits, progress)?))
        }
        #[cfg(not(feature = "buckets"))]
        Place::Bucket { scheme, .. } => Err(crate::Error::refused(format_args!(
            "this program was built without object stores ({scheme}://); a directory (file:///) works"
        ))),
    }
}
