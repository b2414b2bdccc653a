//! Pages of L2 tables, as the file has them.

use isobath_qcow2::HostOffset;
use isobath_storage::IoBuf;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Bytes of pages that may stay in memory beside those of a commit.
const CACHE_BYTES: usize = 8 << 20;
const PAGE: u64 = 4096;

/// A cache of table pages by host offset; the oldest goes first.
pub(super) struct Pages {
    page: u64,
    cached: BTreeMap<u64, IoBuf>,
    age: VecDeque<u64>,
    /// Pages that a commit changes: they stay until it ends.
    pinned: BTreeSet<u64>,
}

impl Pages {
    pub(super) fn new(cluster_size: u64) -> Self {
        Self {
            page: cluster_size.min(PAGE),
            cached: BTreeMap::new(),
            age: VecDeque::new(),
            pinned: BTreeSet::new(),
        }
    }

    pub(super) fn page_size(&self) -> usize {
        self.page as usize
    }

    /// The page that holds a host offset, and the place in it.
    pub(super) fn position(&self, offset: u64) -> (u64, usize) {
        (offset / self.page * self.page, (offset % self.page) as usize)
    }

    pub(super) fn get(&self, page: u64) -> Option<&IoBuf> {
        self.cached.get(&page)
    }

    pub(super) fn get_mut(&mut self, page: u64) -> Option<&mut IoBuf> {
        self.cached.get_mut(&page)
    }

    /// Adds a page as read from the file, unless it is there already.
    pub(super) fn insert(&mut self, page: u64, bytes: IoBuf) {
        if self.cached.contains_key(&page) {
            return;
        }
        self.cached.insert(page, bytes);
        self.age.push_back(page);
        let mut steps = self.age.len();
        while self.cached.len() * self.page as usize > CACHE_BYTES && steps > 0 {
            steps -= 1;
            let Some(oldest) = self.age.pop_front() else { return };
            if self.pinned.contains(&oldest) || oldest == page {
                self.age.push_back(oldest);
            } else {
                self.cached.remove(&oldest);
            }
        }
    }

    /// Keeps a page until [`unpin`](Self::unpin); `false` if it is not there.
    pub(super) fn pin(&mut self, page: u64) -> bool {
        let there = self.cached.contains_key(&page);
        if there {
            self.pinned.insert(page);
        }
        there
    }

    pub(super) fn unpin(&mut self) {
        self.pinned.clear();
    }

    /// Drops the pages of a host range.
    pub(super) fn forget(&mut self, offset: HostOffset, length: u64) {
        let range = offset.get()..offset.get() + length;
        let pages: Vec<u64> = self.cached.range(range).map(|(page, _)| *page).collect();
        for page in pages {
            self.cached.remove(&page);
            self.age.retain(|aged| *aged != page);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_page_goes_and_a_pinned_one_stays() {
        let mut pages = Pages::new(65536);
        let count = (CACHE_BYTES as u64 / PAGE) + 10;
        for n in 0..count {
            pages.insert(n * PAGE, IoBuf::zeroed(PAGE as usize));
            assert!(n > 0 || pages.pin(0));
        }
        assert!(pages.get(0).is_some(), "pinned");
        assert!(pages.get(PAGE).is_none(), "oldest");
        assert!(pages.get((count - 1) * PAGE).is_some(), "newest");
        assert_eq!(pages.cached.len() * PAGE as usize, CACHE_BYTES);
    }
}
