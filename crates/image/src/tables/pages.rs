//! Pages of L2 tables, as the file has them.

use crate::{MOST_CHECKED, violated};
use isobath_qcow2::HostOffset;
use isobath_storage::IoBuf;
use isobath_sync::Invariants;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Bytes of pages that may stay in memory besides those of a commit.
pub(crate) const CACHE_BYTES: usize = 8 << 20;
const PAGE: u64 = 4096;
/// Pages examined to find one that may be evicted.
const MAX_STEPS: usize = 64;
/// Bytes of pages written together.
const MAX_RUN: usize = 256 << 10;

/// A cache of table pages by host offset; the oldest is evicted first.
pub(super) struct Pages {
    page: u64,
    cached: BTreeMap<u64, IoBuf>,
    age: VecDeque<u64>,
    /// Pages that a commit changes: they stay until it ends.
    pinned: BTreeSet<u64>,
    /// Pages that are newer than the file: they stay until they are written.
    dirty: BTreeSet<u64>,
}

impl Invariants for Pages {
    fn check_invariants(&self) {
        if self.age.len() != self.cached.len() {
            violated("each page in the cache has an age");
        }
        if !self.dirty.iter().take(MOST_CHECKED).all(|page| self.cached.contains_key(page)) {
            violated("a page that is newer than the file is in the cache");
        }
        if !self.pinned.iter().take(MOST_CHECKED).all(|page| self.cached.contains_key(page)) {
            violated("a page that a commit changes is in the cache");
        }
        for (page, bytes) in self.cached.iter().take(MOST_CHECKED) {
            if !page.is_multiple_of(self.page) || bytes.len() as u64 != self.page {
                violated("the cache has whole pages");
            }
        }
    }
}

impl Pages {
    pub(super) fn new(cluster_size: u64) -> Self {
        Self {
            page: cluster_size.min(PAGE),
            cached: BTreeMap::new(),
            age: VecDeque::new(),
            pinned: BTreeSet::new(),
            dirty: BTreeSet::new(),
        }
    }

    pub(super) fn page_size(&self) -> usize {
        self.page as usize
    }

    /// The page that holds a host offset, and the offset in it.
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
        let mut steps = self.age.len().min(MAX_STEPS);
        while self.cached.len() * self.page as usize > CACHE_BYTES && steps > 0 {
            steps -= 1;
            let Some(oldest) = self.age.pop_front() else { return };
            if self.pinned.contains(&oldest) || self.dirty.contains(&oldest) || oldest == page {
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

    pub(super) fn has_pinned(&self) -> bool {
        !self.pinned.is_empty()
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
            self.dirty.remove(&page);
            self.age.retain(|aged| *aged != page);
        }
    }

    /// Notes that a cached page is newer than the file.
    pub(super) fn mark_dirty(&mut self, page: u64) {
        self.dirty.insert(page);
    }

    pub(super) fn dirty_count(&self) -> usize {
        self.dirty.len()
    }

    /// Copies of the pages that are newer than the file, adjacent ones merged, with their offsets.
    pub(super) fn dirty(&self) -> Vec<(u64, IoBuf)> {
        let mut runs: Vec<(u64, Vec<u8>)> = Vec::new();
        for page in &self.dirty {
            let Some(bytes) = self.cached.get(page) else {
                violated("a page that is newer than the file is in the cache");
            };
            match runs.last_mut() {
                Some((at, run)) if *at + run.len() as u64 == *page && run.len() < MAX_RUN => {
                    run.extend_from_slice(bytes);
                }
                _ => runs.push((*page, bytes.to_vec())),
            }
        }
        runs.into_iter().map(|(at, run)| (at, IoBuf::copy_of(&run))).collect()
    }

    /// Notes that the file has everything.
    pub(super) fn clean(&mut self) {
        self.dirty.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broken::assert_violated;

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

    #[test]
    fn broken_pages_are_noticed() {
        let pages = || {
            let mut pages = Pages::new(65536);
            pages.insert(0, IoBuf::zeroed(PAGE as usize));
            pages
        };
        assert_violated("has an age", pages(), |pages| pages.age.clear());
        assert_violated("newer than the file", pages(), |pages| pages.mark_dirty(PAGE));
        assert_violated("that a commit changes", pages(), |pages| {
            pages.pinned.insert(PAGE);
        });
        assert_violated("has whole pages", pages(), |pages| {
            pages.insert(PAGE, IoBuf::zeroed(512));
        });
    }
}
