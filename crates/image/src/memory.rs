//! A bound on the memory of disks and of what serves them.

pub use crate::out_of_memory::OutOfMemory;

use crate::{DiskError, violated};
use parking_lot::Mutex;
use std::path::Path;
use std::sync::Arc;

/// Bytes that a layer takes besides its L1 table.
const LAYER: u64 = 4200;

/// Bytes of memory that several disks and frontends share: each reserves what it may take, and is refused if that is
/// more than is left.
#[derive(Debug)]
pub struct MemoryLimit {
    bytes: u64,
    reserved: Mutex<u64>,
    /// What a part holds of the whole limit.
    _whole: Option<Reserved>,
}

/// Bytes that are reserved until this is dropped.
#[derive(Debug)]
pub struct Reserved {
    limit: Arc<MemoryLimit>,
    bytes: u64,
}

impl MemoryLimit {
    /// A limit of so many bytes.
    pub fn new(bytes: u64) -> Arc<Self> {
        Arc::new(Self { bytes, reserved: Mutex::new(0), _whole: None })
    }

    /// A limit of so many bytes for what is not known yet, which are reserved from this one until the part and
    /// everything in it is dropped.
    ///
    /// # Errors
    /// Less is left.
    pub fn part(
        self: &Arc<Self>,
        what: impl Into<String>,
        bytes: u64,
    ) -> Result<Arc<Self>, OutOfMemory> {
        let whole = self.reserve(what, bytes)?;
        Ok(Arc::new(Self { bytes, reserved: Mutex::new(0), _whole: Some(whole) }))
    }

    /// The limit in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes that are reserved.
    pub fn reserved(&self) -> u64 {
        *self.reserved.lock()
    }

    /// Reserves what something may take.
    ///
    /// # Errors
    /// Less is left.
    pub fn reserve(
        self: &Arc<Self>,
        what: impl Into<String>,
        bytes: u64,
    ) -> Result<Reserved, OutOfMemory> {
        let mut reserved = self.reserved.lock();
        let Some(left) = self.bytes.checked_sub(*reserved) else {
            violated("no more memory is reserved than the limit has");
        };
        if bytes > left {
            return Err(OutOfMemory { what: what.into(), needed: bytes, limit: self.bytes, left });
        }
        *reserved += bytes;
        Ok(Reserved { limit: Arc::clone(self), bytes })
    }

    /// The part for an image that is yet to be created, whose L1 table will have so many bytes.
    ///
    /// # Errors
    /// Less is left.
    pub fn part_for_layer(self: &Arc<Self>, image: &Path, l1: u64) -> Result<Arc<Self>, DiskError> {
        self.part("its L1 table", l1 + LAYER).map_err(|error| refused(image, error))
    }

    /// Reserves what an image takes whose L1 table has so many bytes.
    pub(crate) fn reserve_layer(
        self: &Arc<Self>,
        image: &Path,
        l1: u64,
    ) -> Result<Reserved, DiskError> {
        self.reserve("its L1 table", l1 + LAYER).map_err(|error| refused(image, error))
    }
}

impl Reserved {
    /// How many bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let mut reserved = self.limit.reserved.lock();
        match reserved.checked_sub(self.bytes) {
            Some(left) => *reserved = left,
            None => violated("memory that is given back was reserved"),
        }
    }
}

/// The error of an image that does not fit.
pub fn refused(image: &Path, source: OutOfMemory) -> DiskError {
    DiskError::Memory { image: image.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broken::must_panic;

    #[test]
    fn what_is_reserved_is_never_more_than_the_limit() {
        let limit = MemoryLimit::new(3 << 20);
        let first = limit.reserve("one", 2 << 20).unwrap();
        let refused = limit.reserve("the other", 3 << 19).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "the other may take 1.5 MiB of memory, but of the limit of 3.0 MiB only 1.0 MiB are \
             left; raise the memory limit, or serve less"
        );
        let second = limit.reserve("the other", 1 << 20).unwrap();
        assert_eq!(limit.reserved(), 3 << 20);
        assert!(limit.reserve("anything", 1).is_err());
        drop(first);
        assert_eq!(limit.reserved(), 1 << 20);
        drop(second);
        assert!(limit.reserve("all", 3 << 20).is_ok());
        assert!(limit.reserve("too much", u64::MAX).is_err());
    }

    #[test]
    fn a_part_is_reserved_until_everything_in_it_is_given_back() {
        let limit = MemoryLimit::new(10);
        assert!(limit.part("too much", 11).is_err());
        let part = limit.part("a part", 6).unwrap();
        assert_eq!((limit.reserved(), part.reserved()), (6, 0));
        let one = part.reserve("one", 4).unwrap();
        assert!(part.reserve("more than the part", 3).is_err());
        drop(part);
        assert_eq!(limit.reserved(), 6);
        drop(one);
        assert_eq!(limit.reserved(), 0);
    }

    #[test]
    fn what_was_not_reserved_is_noticed() {
        let limit = |reserved| {
            Arc::new(MemoryLimit { bytes: 2, reserved: Mutex::new(reserved), _whole: None })
        };
        must_panic(|| limit(3).reserve("", 1), "no more memory is reserved than the limit has");
        let given_back = || drop(Reserved { limit: limit(1), bytes: 2 });
        must_panic(given_back, "memory that is given back was reserved");
    }
}
