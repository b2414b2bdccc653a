//! An L1 table in memory.

use crate::error::violated;
use isobath_qcow2::L1Entry;
use std::iter::repeat_n;

/// Entries of a page.
const PAGE: usize = 512;

/// Stands for an entry that is past the end of the file: no L2 table is at its offset, the largest.
const MISSING: L1Entry = L1Entry::from_raw(0x00ff_ffff_ffff_fe00);

/// The entries of an L1 table. Pages of unallocated entries take no memory, nor do entries past the end of the file: a
/// table may have 32 MiB, there may be thousands of layers, and who makes such a chain must not fill the memory with
/// what a sparse file holds, or a file does not.
#[derive(Clone, Debug, Default)]
pub struct L1Table {
    /// The pages; shorter ones, and those that are missing, end with unallocated entries.
    pages: Vec<Option<Box<[L1Entry]>>>,
    /// The number of entries in the pages.
    length: u32,
    /// The number of entries after them, which are past the end of the file. Only what is read has any.
    missing: u32,
}

/// A number of entries, as a header has it.
fn counted(entries: usize) -> u32 {
    match u32::try_from(entries) {
        Ok(entries) => entries,
        Err(_) => violated("an L1 table has no more entries than a header can say"),
    }
}

impl L1Table {
    /// The number of entries.
    pub const fn len(&self) -> usize {
        self.in_pages() + self.missing as usize
    }

    const fn in_pages(&self) -> usize {
        self.length as usize
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of entries, at the end of the table, that are past the end of the file. Their L2 tables, whose
    /// offsets are unknown, are errors to whoever looks them up.
    pub const fn missing(&self) -> usize {
        self.missing as usize
    }

    /// An entry; `None` past the end.
    pub fn get(&self, index: usize) -> Option<L1Entry> {
        if (self.in_pages()..self.len()).contains(&index) {
            return Some(MISSING);
        }
        let page = self.pages.get(index / PAGE).filter(|_| index < self.in_pages())?;
        let entry = page.as_ref().and_then(|page| page.get(index % PAGE)).copied();
        Some(entry.unwrap_or(L1Entry::unallocated()))
    }

    /// Changes an entry; `None` past the end, and past that of the file.
    pub fn set(&mut self, index: usize, entry: L1Entry) -> Option<()> {
        let (length, within) = (self.page_length(index / PAGE), index < self.in_pages());
        let page = self.pages.get_mut(index / PAGE).filter(|_| within)?;
        if page.as_ref().is_none_or(|page| page.len() < length) {
            let mut entries = page.take().map(Vec::from).unwrap_or_default();
            entries.resize(length, L1Entry::unallocated());
            *page = Some(entries.into());
        }
        *page.as_mut()?.get_mut(index % PAGE)? = entry;
        Some(())
    }

    /// Entries of a page of the table.
    const fn page_length(&self, page: usize) -> usize {
        let left = self.in_pages().saturating_sub(page * PAGE);
        if left < PAGE { left } else { PAGE }
    }

    /// All entries, in order.
    pub fn iter(&self) -> impl Iterator<Item = L1Entry> {
        let in_pages = self.pages.iter().enumerate().flat_map(|(number, page)| {
            let entries = page.as_deref().unwrap_or_default();
            let missing = self.page_length(number).saturating_sub(entries.len());
            entries.iter().copied().chain(repeat_n(L1Entry::unallocated(), missing))
        });
        in_pages.chain(repeat_n(MISSING, self.missing()))
    }

    /// The entries in the file that are not unallocated, with their indices.
    pub fn allocated(&self) -> impl Iterator<Item = (usize, L1Entry)> {
        self.pages.iter().enumerate().flat_map(|(number, page)| {
            let entries = page.as_deref().unwrap_or_default().iter().copied();
            let entries = (number * PAGE..).zip(entries);
            entries.filter(|(_, entry)| *entry != L1Entry::unallocated())
        })
    }

    /// Whether both have the same entries, of which the same are in the file.
    pub fn is_same(&self, other: &Self) -> bool {
        (self.length, self.missing) == (other.length, other.missing)
            && self.allocated().eq(other.allocated())
    }

    /// Adds entries that are past the end of the file, up to so many entries in total. A table ends with them.
    pub fn end_missing(&mut self, length: usize) {
        self.missing = counted(length.saturating_sub(self.in_pages()));
    }

    /// Adds entries at the end.
    pub fn extend(&mut self, entries: &[L1Entry]) {
        let mut rest = entries;
        while !rest.is_empty() {
            let within = self.in_pages() % PAGE;
            let (now, later) = rest.split_at(rest.len().min(PAGE - within));
            let number = self.in_pages() / PAGE;
            self.grow(self.in_pages() + now.len());
            if now.iter().any(|entry| *entry != L1Entry::unallocated())
                && let Some(page) = self.pages.get_mut(number)
            {
                let mut entries = page.take().map(Vec::from).unwrap_or_default();
                entries.resize(within, L1Entry::unallocated());
                entries.extend_from_slice(now);
                *page = Some(entries.into());
            }
            rest = later;
        }
    }

    /// Adds unallocated entries, up to so many in total.
    pub fn grow(&mut self, length: usize) {
        if self.missing > 0 {
            violated("a table ends with the entries that are past the end of the file");
        }
        self.length = self.length.max(counted(length));
        self.pages.resize(self.in_pages().div_ceil(PAGE), None);
    }

    /// Removes all entries.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

impl FromIterator<L1Entry> for L1Table {
    fn from_iter<T: IntoIterator<Item = L1Entry>>(entries: T) -> Self {
        let mut table = Self::default();
        table.extend(&entries.into_iter().collect::<Vec<_>>());
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broken::must_panic;
    use proptest::prelude::*;

    fn entry(raw: u64) -> L1Entry {
        L1Entry::from_raw(raw << 16)
    }

    #[test]
    fn unallocated_entries_take_no_memory() {
        let mut table = L1Table::default();
        table.grow(4 << 20);
        table.extend(&[L1Entry::unallocated(); PAGE]);
        assert!(table.pages.iter().all(Option::is_none));
        table.set(5 * PAGE + 7, entry(1)).unwrap();
        assert_eq!(table.pages.iter().flatten().count(), 1);
        assert!(table.allocated().eq([(5 * PAGE + 7, entry(1))]));
    }

    #[test]
    fn entries_past_the_end_of_the_file_take_no_memory() {
        let mut table: L1Table = [entry(1), entry(0)].into_iter().collect();
        table.end_missing(4 << 20);
        assert_eq!((table.len(), table.missing()), (4 << 20, (4 << 20) - 2));
        assert_eq!(table.pages.len(), 1);
        assert_eq!(table.pages.iter().flatten().map(|page| page.len()).sum::<usize>(), 2);
        for index in [2, PAGE - 1, PAGE, (4 << 20) - 1] {
            assert_eq!(table.get(index), Some(MISSING), "{index}");
            assert_eq!(table.set(index, entry(1)), None, "{index}");
        }
        assert_eq!((table.get(1), table.get(4 << 20)), (Some(entry(0)), None));
        assert!(table.allocated().eq([(0, entry(1))]));
        assert_eq!(table.iter().filter(|entry| *entry == MISSING).count(), (4 << 20) - 2);
    }

    #[test]
    fn tables_are_the_same_if_the_same_of_them_is_in_the_file() {
        let table: L1Table = [entry(1), entry(0), entry(0)].into_iter().collect();
        let mut shorter: L1Table = [entry(1), entry(0)].into_iter().collect();
        assert!(!table.is_same(&shorter));
        let mut grown = shorter.clone();
        grown.grow(3);
        assert!(table.is_same(&grown));
        shorter.end_missing(3);
        assert!(!table.is_same(&shorter) && shorter.is_same(&shorter.clone()));
    }

    #[test]
    fn a_table_ends_with_the_entries_past_the_end_of_the_file() {
        let mut table = L1Table::default();
        table.end_missing(3);
        must_panic(
            || table.grow(4),
            "a table ends with the entries that are past the end of the file",
        );
    }

    #[test]
    fn a_table_has_no_more_entries_than_a_header_can_say() {
        let mut table = L1Table::default();
        must_panic(
            || table.end_missing(1 << 32),
            "an L1 table has no more entries than a header can say",
        );
    }

    #[derive(Clone, Debug)]
    enum Change {
        Set(usize, u64),
        Extend(Vec<u64>),
        Grow(usize),
    }

    fn change() -> impl Strategy<Value = Change> {
        prop_oneof![
            (0..2000_usize, 0..3_u64).prop_map(|(index, raw)| Change::Set(index, raw)),
            prop::collection::vec(0..2_u64, 0..700).prop_map(Change::Extend),
            prop::collection::vec(Just(0), 0..700).prop_map(Change::Extend),
            (0..2000_usize).prop_map(Change::Grow),
        ]
    }

    proptest! {
        #[test]
        fn a_table_has_the_entries_of_a_list(changes in prop::collection::vec(change(), 0..20)) {
            let (mut table, mut list) = (L1Table::default(), Vec::new());
            for change in changes {
                match change {
                    Change::Set(index, raw) => {
                        let slot = list.get_mut(index);
                        prop_assert_eq!(table.set(index, entry(raw)).is_some(), slot.is_some());
                        if let Some(slot) = slot {
                            *slot = entry(raw);
                        }
                    }
                    Change::Extend(raw) => {
                        let entries: Vec<_> = raw.into_iter().map(entry).collect();
                        table.extend(&entries);
                        list.extend(entries);
                    }
                    Change::Grow(length) => {
                        table.grow(length);
                        list.resize(list.len().max(length), L1Entry::unallocated());
                    }
                }
                prop_assert_eq!(table.len(), list.len());
                prop_assert!(table.iter().eq(list.iter().copied()));
                let all = list.iter().copied().enumerate();
                let allocated = all.filter(|(_, entry)| *entry != L1Entry::unallocated());
                prop_assert!(table.allocated().eq(allocated));
                for index in [0, 1, 511, 512, 1023, list.len()] {
                    prop_assert_eq!(table.get(index), list.get(index).copied());
                }
            }
        }
    }
}
