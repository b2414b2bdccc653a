//! Ranges that are worked on part by part.

use isobath_image::{Result, invariant};
use std::ops::Range;
use std::path::Path;

/// The parts of a range: each begins where the one before it ended, and together they make the range up.
#[derive(Debug)]
pub(crate) struct Parts<'a> {
    /// The image that is named if they do not.
    name: &'a Path,
    /// Where the next part begins, and where the range ends.
    left: Range<u64>,
}

impl<'a> Parts<'a> {
    pub(crate) fn of(range: Range<u64>, name: &'a Path) -> Self {
        Self { name, left: range }
    }

    /// Where the next part begins.
    pub(crate) fn next(&self) -> u64 {
        self.left.start
    }

    /// Adds the part of `length` bytes at `start`.
    pub(crate) fn add(&mut self, start: u64, length: u64) -> Result<()> {
        invariant(start == self.left.start, self.name, "a part begins where the last one ended")?;
        let left = self.left.end.saturating_sub(start);
        invariant(length > 0 && length <= left, self.name, "a part has bytes of its range alone")?;
        self.left.start += length;
        Ok(())
    }

    /// Ends the range.
    pub(crate) fn end(self) -> Result<()> {
        invariant(self.left.start >= self.left.end, self.name, "the parts of a range make it up")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::must_violate;

    fn parts() -> Parts<'static> {
        Parts::of(512..2048, Path::new("image"))
    }

    #[test]
    fn parts_make_a_range_up() {
        let mut all = parts();
        all.add(512, 1000).unwrap();
        assert_eq!(all.next(), 1512);
        all.add(1512, 536).unwrap();
        all.end().unwrap();
        Parts::of(512..512, Path::new("image")).end().unwrap();
    }

    #[test]
    fn no_part_is_missing_or_too_many() {
        let follows = "a part begins where the last one ended";
        must_violate(parts().add(511, 1), follows);
        must_violate(parts().add(513, 1), follows);
        let within = "a part has bytes of its range alone";
        must_violate(parts().add(512, 0), within);
        must_violate(parts().add(512, 1537), within);
        must_violate(parts().add(512, u64::MAX), within);
        let mut short = parts();
        short.add(512, 1535).unwrap();
        must_violate(short.end(), "the parts of a range make it up");
    }
}
