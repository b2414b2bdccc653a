//! A number for each host cluster.

use crate::violated;
use std::collections::HashMap;

/// Clusters in a page.
pub(crate) const PAGE: u64 = 256;

/// Stands for a number kept in `wide`.
const WIDE: u16 = u16::MAX;

/// A number for each host cluster, 0 unless set. Takes two bytes per cluster in parts of the file that are referred to,
/// and almost nothing elsewhere: the memory that a hostile image costs is proportional to its bytes, not to the offsets
/// that it claims.
#[derive(Default)]
pub(crate) struct Counts {
    pages: Vec<Option<Box<[u16; PAGE as usize]>>>,
    wide: HashMap<u64, u64>,
    /// How many pages there are.
    made: u64,
}

/// Bytes of a page.
const PAGE_BYTES: u64 = 2 * PAGE;
/// Bytes that a number in `wide` takes, or an entry in another map or set.
pub(crate) const ENTRY_BYTES: u64 = 64;

impl Counts {
    pub(crate) fn get(&self, cluster: u64) -> u64 {
        let page = self.pages.get((cluster / PAGE) as usize).and_then(Option::as_ref);
        match page.map_or(0, |page| page[(cluster % PAGE) as usize]) {
            WIDE => match self.wide.get(&cluster) {
                Some(wide) => *wide,
                None => violated("a number that is too wide for its page is kept beside it"),
            },
            narrow => u64::from(narrow),
        }
    }

    pub(crate) fn set(&mut self, cluster: u64, value: u64) {
        let index = (cluster / PAGE) as usize;
        if index >= self.pages.len() {
            self.pages.resize_with(index + 1, || None);
        }
        self.made += u64::from(self.pages[index].is_none());
        let page = self.pages[index].get_or_insert_with(|| Box::new([0; PAGE as usize]));
        let slot = &mut page[(cluster % PAGE) as usize];
        if *slot == WIDE {
            self.wide.remove(&cluster);
        }
        *slot = match u16::try_from(value) {
            Ok(narrow) if narrow < WIDE => narrow,
            _ => {
                self.wide.insert(cluster, value);
                WIDE
            }
        };
    }

    /// How many bytes of memory it takes.
    pub(crate) fn bytes(&self) -> u64 {
        let list = self.pages.capacity() * size_of::<Option<Box<[u16; PAGE as usize]>>>();
        list as u64 + self.made * PAGE_BYTES + self.wide.len() as u64 * ENTRY_BYTES
    }

    /// Whether any cluster of the page that holds `cluster` was ever set.
    pub(crate) fn has_page(&self, cluster: u64) -> bool {
        self.pages.get((cluster / PAGE) as usize).is_some_and(Option::is_some)
    }

    /// One past the last cluster whose page was ever set.
    pub(crate) fn end(&self) -> u64 {
        self.pages.len() as u64 * PAGE
    }

    /// The clusters with a number above 0, in order.
    pub(crate) fn nonzero(&self) -> impl Iterator<Item = u64> + '_ {
        let pages = self.pages.iter().enumerate().filter_map(|(n, page)| Some((n, page.as_ref()?)));
        pages.flat_map(|(n, page)| {
            let first = n as u64 * PAGE;
            (first..).zip(page.iter()).filter(|(_, value)| **value > 0).map(|(at, _)| at)
        })
    }

    /// The last cluster with a number above 0.
    pub(crate) fn highest(&self) -> Option<u64> {
        let pages = self.pages.iter().enumerate().rev();
        pages.filter_map(|(n, page)| Some((n, page.as_ref()?))).find_map(|(n, page)| {
            let within = page.iter().rposition(|value| *value > 0)?;
            Some(n as u64 * PAGE + within as u64)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broken::must_panic;

    #[test]
    fn a_wide_number_that_is_lost_is_noticed() {
        let mut counts = Counts::default();
        counts.set(7, u64::MAX);
        counts.wide.clear();
        must_panic(|| counts.get(7), "a number that is too wide for its page is kept beside it");
    }

    #[test]
    fn numbers_of_any_width_are_kept() {
        let mut counts = Counts::default();
        assert_eq!((counts.get(5), counts.highest()), (0, None));
        for (cluster, value) in [(0, 1), (5, 65534), (6, 65535), (7, u64::MAX), (100_000, 3)] {
            counts.set(cluster, value);
            assert_eq!(counts.get(cluster), value);
        }
        assert_eq!(counts.highest(), Some(100_000));
        assert_eq!(counts.nonzero().collect::<Vec<_>>(), [0, 5, 6, 7, 100_000]);
        counts.set(7, 2);
        counts.set(100_000, 0);
        assert_eq!((counts.get(7), counts.highest(), counts.wide.len()), (2, Some(7), 1));
        assert!(counts.has_page(255) && !counts.has_page(256));
        let pages = 2 * PAGE_BYTES + counts.pages.capacity() as u64 * 8;
        assert_eq!(counts.bytes(), pages + ENTRY_BYTES);
    }
}
