//! Reads of cached data through mappings of the file: a copy, without a system call.
//!
//! A page that is not in the page cache would make the thread wait, and with it all tasks of its executor. So only
//! pages that an immediate read has found there before are read in this way, and those around of which the kernel says
//! the same. If a thread had to wait for pages nevertheless, since the kernel needed the memory for others, all of this
//! is [forgotten](doubts) for a while.
//!
//! A page may also be missing for good: the file was cut short, or its device cannot read it. The
//! [guard](isobath_buf::guard) notices; the data is then read by a system call, which knows what to say, and the file
//! is not mapped again.

mod budget;
mod doubts;
mod window;

pub(super) use budget::Mappings;

use super::sys;
use arc_swap::ArcSwapOption;
use budget::{Member, Owner};
use doubts::Doubts;
use isobath_ring::may_go_on;
use parking_lot::Mutex;
use std::io;
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use window::{WINDOW, Window};

/// Immediate reads of a file before a window of it is mapped.
const BEFORE_FIRST: u32 = 32;
/// The same, if there was no room for one, or only for what another one had.
const BEFORE_NEXT: u32 = 4096;
/// The smallest window of a file that grows, unless it is the largest.
const LEAST_GROWING: u64 = 64 << 20;

/// File systems whose mappings and reads show the same as long as they have no errors, by their numbers in `statfs(2)`,
/// and whose pages come from this machine. On tmpfs no read is immediate.
const COHERENT: [u64; 3] = [sys::EXT, sys::XFS, sys::BTRFS];

/// Windows of a file that are mapped at a time, by their numbers, in ascending order.
type Windows = Vec<(u64, Arc<Window>)>;

/// The mappings of a file.
pub(super) struct Mapped {
    mappings: Arc<Mappings>,
    /// The window at the start of the file, the only one of most files: found with one look less than in a list.
    first: ArcSwapOption<Window>,
    /// The others, if there are any.
    others: ArcSwapOption<Windows>,
    /// Held while `first` and `others` change; they are read without it.
    changing: Mutex<()>,
    doubts: Doubts,
    /// Immediate reads until the next attempt to map a window.
    until: AtomicU32,
    /// The file cannot be mapped, or a part of it was missing.
    ended: AtomicBool,
    /// How many changes to a shorter length are under way.
    cuts: AtomicU32,
    /// It may become longer, so that a window reaches beyond its end.
    grows: bool,
}

/// A change of the file to a shorter length, which ends when this is dropped: nothing is mapped meanwhile.
pub(super) struct Cut(Arc<Mapped>);

impl Drop for Cut {
    fn drop(&mut self) {
        self.0.cuts.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The window that has all of a range, and where the range begins in it.
fn place(offset: u64, length: usize) -> Option<(u64, usize)> {
    let (number, at) = (offset / WINDOW, offset % WINDOW);
    let fits = length > 0 && at.checked_add(length as u64).is_some_and(|end| end <= WINDOW);
    fits.then_some((number, at as usize))
}

fn find(windows: Option<&Arc<Windows>>, number: u64) -> Option<&Arc<Window>> {
    let windows = windows?;
    let found = windows.binary_search_by_key(&number, |(number, _)| *number);
    found.ok().map(|found| &windows[found].1)
}

impl Mapped {
    /// Nothing is mapped yet.
    pub(super) fn new(mappings: &Arc<Mappings>, grows: bool) -> Arc<Self> {
        Arc::new(Self {
            mappings: mappings.clone(),
            first: ArcSwapOption::empty(),
            others: ArcSwapOption::empty(),
            changing: Mutex::default(),
            doubts: Doubts::default(),
            until: AtomicU32::new(BEFORE_FIRST),
            ended: AtomicBool::new(false),
            cuts: AtomicU32::new(0),
            grows,
        })
    }

    /// Applies `look` to the window with this number, if it is mapped, which it stays meanwhile.
    fn look<T>(&self, number: u64, look: impl FnOnce(&Arc<Window>) -> T) -> Option<T> {
        if number == 0 {
            self.first.load().as_ref().map(look)
        } else {
            find(self.others.load().as_ref(), number).map(look)
        }
    }

    /// Fills the buffer; `false` if the range cannot be read in this way, and then its content is undefined.
    pub(super) fn read(&self, offset: u64, buf: &mut [u8]) -> bool {
        let Some((number, at)) = place(offset, buf.len()) else { return false };
        let read = |window: &Arc<Window>| {
            if !window.is_present(at, buf.len(), self.doubts.count()) || !may_go_on(buf.len()) {
                return false;
            }
            if !self.doubts.while_looking(|| window.copy(at, buf)) {
                // Whoever makes the file shorter takes its windows away; readers may still have them.
                if self.look(number, |now| Arc::ptr_eq(now, window)) == Some(true) {
                    self.end();
                }
                return false;
            }
            true
        };
        self.look(number, read) == Some(true)
    }

    /// An immediate read found all of this range in the page cache.
    pub(super) fn was_cached(self: &Arc<Self>, file: &OwnedFd, offset: u64, length: usize) {
        if self.ended.load(Ordering::Relaxed) || !self.doubts.may_note() {
            return;
        }
        let Some((number, at)) = place(offset, length) else { return };
        let note = |window: &Arc<Window>| {
            let reaches = window.reaches(at + length);
            if reaches {
                window.note(at, length, self.doubts.count());
            }
            reaches
        };
        if self.look(number, note) == Some(true) {
            return;
        }
        let until = self.until.load(Ordering::Relaxed);
        let next = if until > 0 { until - 1 } else { self.map(file, number) };
        self.until.store(next, Ordering::Relaxed);
    }

    /// Maps a window, if there is room for it. Returns the immediate reads until the next attempt for another one.
    fn map(self: &Arc<Self>, file: &OwnedFd, number: u64) -> u32 {
        let Ok(stat) = sys::stat(file) else { return BEFORE_NEXT };
        let rest = (stat.st_size as u64).saturating_sub(number.saturating_mul(WINDOW));
        if rest == 0 {
            return BEFORE_NEXT;
        }
        let wanted = if self.grows { rest.saturating_mul(2).max(LEAST_GROWING) } else { rest };
        let length = wanted.min(WINDOW) as usize;
        if !sys::file_system(file).is_ok_and(|number| COHERENT.contains(&number)) {
            self.end();
            return BEFORE_NEXT;
        }
        let Some(share) = self.mappings.admit(length) else { return BEFORE_NEXT };
        let is_others = share.is_others();
        let window = match Window::new(file, number, length, share) {
            Ok(window) => Arc::new(window),
            Err(error) if error.kind() == io::ErrorKind::OutOfMemory => return BEFORE_NEXT,
            Err(_) => {
                self.end();
                return BEFORE_NEXT;
            }
        };
        self.change(|windows| {
            windows.retain(|(other, _)| *other != number);
            if self.cuts.load(Ordering::SeqCst) == 0 && !self.ended.load(Ordering::SeqCst) {
                let place = windows.partition_point(|(other, _)| *other < number);
                windows.insert(place, (number, window.clone()));
            }
        });
        let (owner, window) = (Arc::downgrade(self), Arc::downgrade(&window));
        self.mappings.register(owner, window);
        if is_others { BEFORE_NEXT } else { BEFORE_FIRST }
    }

    /// All that are mapped.
    fn windows(&self) -> Windows {
        let first = self.first.load_full().map(|window| (0, window));
        let others = self.others.load_full();
        first.into_iter().chain(others.iter().flat_map(|others| others.iter().cloned())).collect()
    }

    fn change(&self, change: impl FnOnce(&mut Windows)) {
        let changing = self.changing.lock();
        let mut windows = self.windows();
        let before = windows.clone();
        change(&mut windows);
        let others = windows.split_off(windows.partition_point(|(number, _)| *number == 0));
        self.first.store(windows.pop().map(|(_, window)| window));
        self.others.store((!others.is_empty()).then(|| Arc::new(others)));
        drop(changing);
        // The last reference to a window unmaps it, which takes long.
        drop(before);
    }

    /// The file is about to end at `length`, so that what lies behind it is not to be read through windows.
    pub(super) fn cut(self: &Arc<Self>, length: u64) -> Cut {
        self.cuts.fetch_add(1, Ordering::SeqCst);
        let cut = Cut(self.clone());
        self.change(|windows| windows.retain(|(number, _)| *number < length / WINDOW));
        cut
    }

    /// Unmaps all. The file may be mapped again.
    pub(super) fn forget(&self) {
        self.until.store(BEFORE_FIRST, Ordering::Relaxed);
        self.change(Windows::clear);
    }

    /// Nothing of the file is mapped any more, for good.
    pub(super) fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
        self.change(Windows::clear);
    }
}

impl Owner for Mapped {
    fn give_up(&self, window: &Arc<dyn Member>) {
        let window = Arc::as_ptr(window);
        self.change(|windows| {
            windows.retain(|(_, other)| !ptr::addr_eq(Arc::as_ptr(other), window));
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    const PAGE: usize = 4096;

    /// A file with `pages` pages, each of which has its number in all bytes, and its mappings.
    struct Fixture {
        file: File,
        descriptor: OwnedFd,
        mapped: Arc<Mapped>,
    }

    fn file(pages: usize) -> File {
        let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        for page in 0..pages {
            file.write_all_at(&[page as u8; PAGE], (page * PAGE) as u64).unwrap();
        }
        file
    }

    impl Fixture {
        fn new(pages: usize, grows: bool) -> Self {
            let mappings = Arc::<Mappings>::default();
            mappings.allow(1 << 40);
            Self::with(file(pages), &mappings, grows)
        }

        fn with(file: File, mappings: &Arc<Mappings>, grows: bool) -> Self {
            let descriptor = file.try_clone().unwrap().into();
            let mapped = Mapped::new(mappings, grows);
            Self { file, descriptor, mapped }
        }

        fn was_cached(&self, page: usize, pages: usize) {
            self.mapped.was_cached(&self.descriptor, (page * PAGE) as u64, pages * PAGE);
        }

        /// Maps the window of a page, and notes the page.
        fn map(&self, page: usize) {
            for _ in 0..BEFORE_FIRST + 2 {
                self.was_cached(page, 1);
            }
        }

        fn read(&self, page: usize, pages: usize) -> Option<Vec<u8>> {
            let mut buf = vec![0xEE; pages * PAGE];
            self.mapped.read((page * PAGE) as u64, &mut buf).then_some(buf)
        }

        fn windows(&self) -> usize {
            self.mapped.windows().len()
        }
    }

    #[test]
    fn only_pages_that_were_found_cached_are_read_and_show_what_the_file_has() {
        let fixture = Fixture::new(200, false);
        assert!(fixture.read(3, 1).is_none());
        for _ in 0..BEFORE_FIRST {
            fixture.was_cached(3, 1);
            assert_eq!(fixture.windows(), 0, "a few reads are not worth a mapping");
        }
        fixture.map(3);
        assert_eq!(fixture.windows(), 1);
        assert_eq!(fixture.read(3, 1).unwrap(), [3; PAGE]);
        assert!(fixture.read(16, 1).is_none() && fixture.read(15, 2).is_none());
        assert!(fixture.read(199, 1).is_none());
        // Over the ends of words of bits.
        fixture.was_cached(60, 70);
        assert!(fixture.read(59, 2).is_none() && fixture.read(129, 2).is_none());
        assert!(fixture.read(130, 1).is_none());
        let found = fixture.read(60, 70).unwrap();
        assert!(found.chunks(PAGE).zip(60..).all(|(page, number)| page == [number; PAGE]));
        assert_eq!(fixture.read(64, 64).unwrap()[..PAGE], [64; PAGE]);
        assert_eq!(fixture.read(127, 1).unwrap(), [127; PAGE]);
        // Parts of a page, too.
        let mut part = [0; 100];
        assert!(fixture.mapped.read(64 * 4096 + 5, &mut part));
        assert_eq!(part, [64; 100]);
        fixture.file.write_all_at(b"new", 3 * PAGE as u64).unwrap();
        assert_eq!(fixture.read(3, 1).unwrap()[..4], *b"new\x03");
        assert!(!fixture.mapped.read(3 * PAGE as u64, &mut []));
    }

    #[test]
    fn what_else_is_cached_around_a_page_is_read_too() {
        let fixture = Fixture::new(40, false);
        fixture.map(20);
        assert!(fixture.read(21, 1).is_none());
        fixture.was_cached(21, 1);
        assert_eq!(fixture.read(16, 16).unwrap()[..PAGE], [16; PAGE]);
        assert!(fixture.read(15, 1).is_none() && fixture.read(32, 1).is_none());
        fixture.was_cached(39, 1);
        fixture.was_cached(38, 1);
        assert_eq!(fixture.read(32, 8).unwrap()[..PAGE], [32; PAGE]);
    }

    #[test]
    fn what_a_growing_file_has_gained_is_read() {
        for grows in [true, false] {
            let fixture = Fixture::new(2, grows);
            fixture.map(0);
            fixture.file.write_all_at(&[9; PAGE], 7 * PAGE as u64).unwrap();
            fixture.was_cached(7, 1);
            assert_eq!(fixture.read(7, 1), grows.then(|| vec![9; PAGE]));
            assert_eq!(fixture.read(0, 1).unwrap(), [0; PAGE]);
        }
    }

    #[test]
    fn a_range_in_two_windows_is_not_read() {
        let fixture = Fixture::new(1, true);
        let end = (WINDOW as usize) / PAGE;
        fixture.file.write_all_at(&[5; 2 * PAGE], WINDOW - PAGE as u64).unwrap();
        fixture.map(end - 1);
        fixture.map(end);
        assert_eq!(fixture.windows(), 2);
        fixture.was_cached(end - 1, 2);
        assert!(fixture.read(end - 1, 2).is_none());
        assert_eq!(fixture.read(end - 1, 1).unwrap(), [5; PAGE]);
        assert_eq!(fixture.read(end, 1).unwrap(), [5; PAGE]);
        assert!(place(u64::MAX, 2).is_none() && place(WINDOW - 1, 2).is_none());
        assert_eq!(place(WINDOW - 1, 1), Some((0, WINDOW as usize - 1)));
    }

    #[test]
    fn a_file_that_others_cut_short_is_read_by_system_calls_from_then_on() {
        let fixture = Fixture::new(10, false);
        fixture.map(8);
        fixture.was_cached(0, 10);
        fixture.file.set_len(4 * PAGE as u64).unwrap();
        assert_eq!(fixture.read(1, 1).unwrap(), [1; PAGE]);
        assert!(fixture.read(2, 6).is_none(), "half of it is missing");
        assert_eq!(fixture.windows(), 0);
        fixture.file.set_len(10 * PAGE as u64).unwrap();
        fixture.map(1);
        assert!(fixture.read(1, 1).is_none());
    }

    #[test]
    fn what_is_missing_in_any_window_ends_all_of_them() {
        let end = (WINDOW as usize) / PAGE;
        for missing in [3, end + 3] {
            let fixture = Fixture::new(10, true);
            fixture.file.write_all_at(&vec![5; 10 * PAGE], WINDOW).unwrap();
            for page in [0, end] {
                fixture.map(page);
                fixture.was_cached(page, 10);
            }
            assert_eq!(fixture.windows(), 2);
            fixture.file.set_len((missing * PAGE) as u64).unwrap();
            assert!(fixture.read(missing, 1).is_none());
            assert_eq!(fixture.windows(), 0);
        }
    }

    #[test]
    fn a_cut_takes_away_the_windows_behind_it_and_forgetting_takes_all() {
        let fixture = Fixture::new(10, true);
        let end = (WINDOW as usize) / PAGE;
        fixture.file.write_all_at(&vec![5; 10 * PAGE], 2 * WINDOW).unwrap();
        for page in [0, end * 2] {
            fixture.map(page);
        }
        assert_eq!(fixture.windows(), 2);
        drop(fixture.mapped.cut(WINDOW));
        assert_eq!(fixture.windows(), 1);
        assert_eq!(fixture.read(0, 1).unwrap(), [0; PAGE]);
        assert!(fixture.read(end * 2, 1).is_none());
        fixture.map(end * 2);
        assert_eq!(fixture.read(end * 2, 1).unwrap(), [5; PAGE]);
        fixture.mapped.forget();
        assert_eq!(fixture.windows(), 0);
    }

    #[test]
    fn a_file_that_its_owner_cuts_short_is_mapped_again() {
        let fixture = Fixture::new(10, true);
        fixture.map(8);
        let kept = fixture.mapped.windows();
        fixture.mapped.cut(4 * PAGE as u64);
        fixture.file.set_len(4 * PAGE as u64).unwrap();
        assert!(fixture.read(8, 1).is_none());
        // A reader that still has the window sees that it is missing something.
        assert!(!kept[0].1.copy(8 * PAGE, &mut [0; PAGE]));
        fixture.map(1);
        assert_eq!(fixture.read(1, 1).unwrap(), [1; PAGE]);
        // What lies before the end stays.
        fixture.mapped.cut(WINDOW + 1);
        assert_eq!(fixture.windows(), 1);
    }

    #[test]
    fn windows_that_are_not_used_make_room_for_others() {
        let mappings = Arc::<Mappings>::default();
        // Small ones count for 4 MiB each.
        mappings.allow(9 << 20);
        let [first, second, third] = [0; 3].map(|_| Fixture::with(file(10), &mappings, false));
        first.map(1);
        second.map(1);
        assert_eq!((first.windows(), second.windows()), (1, 1));
        // All are new; the next attempt finds those that nobody has used since.
        third.map(1);
        assert_eq!(third.windows(), 0);
        assert!(second.read(1, 1).is_some());
        third.mapped.until.store(0, Ordering::Relaxed);
        third.map(1);
        assert_eq!((first.windows(), second.windows(), third.windows()), (0, 1, 1));
        assert!(first.read(1, 1).is_none() && third.read(1, 1).is_some());
        // Who closes a file gives all back.
        drop((second, third));
        first.mapped.until.store(0, Ordering::Relaxed);
        first.map(1);
        assert!(first.read(1, 1).is_some());
        let large = Fixture::with(file(1), &mappings, false);
        large.file.set_len(10 << 20).unwrap();
        large.map(1);
        assert_eq!(large.windows(), 0);
    }

    #[test]
    fn more_files_in_use_than_there_is_room_for_do_not_take_it_from_each_other() {
        let mappings = Arc::<Mappings>::default();
        mappings.allow(16 << 20);
        let files = [0; 20].map(|_| Fixture::with(file(40), &mappings, false));
        let (mut hits, mut maps) = (0, 0);
        for round in 0..20_000 {
            let fixture = &files[round * 7 % 20];
            let page = round / 20 % 40;
            let before = fixture.windows();
            if fixture.read(page, 1).is_some() {
                hits += usize::from(round >= 10_000);
            } else {
                fixture.was_cached(page, 1);
                maps += usize::from(fixture.windows() > before && round >= 10_000);
            }
        }
        assert!(hits >= 1500, "{hits} of 10,000 hits; a fifth of the files have room");
        assert_eq!(maps, 0, "nobody is without room for lack of use");
    }

    #[test]
    fn where_a_file_is_read_costs_no_memory() {
        let fixture = Fixture::new(1, true);
        let offset = 7_u64 << 40;
        fixture.file.write_all_at(&[3; PAGE], offset).unwrap();
        fixture.map((offset as usize) / PAGE);
        assert_eq!(fixture.read((offset as usize) / PAGE, 1).unwrap(), [3; PAGE]);
        let windows = fixture.mapped.windows();
        assert_eq!((windows.len(), windows[0].0), (1, 7 << 10));
    }

    #[test]
    fn nothing_is_mapped_while_the_file_is_made_shorter() {
        let fixture = Fixture::new(10, true);
        let cut = fixture.mapped.cut(4 * PAGE as u64);
        fixture.map(1);
        assert_eq!(fixture.windows(), 0);
        drop(cut);
        fixture.map(1);
        assert_eq!(fixture.windows(), 1);
        fixture.mapped.forget();
        assert_eq!(fixture.windows(), 0);
        fixture.map(1);
        assert_eq!(fixture.windows(), 1);
        fixture.mapped.end();
        fixture.map(1);
        assert_eq!(fixture.windows(), 0);
    }

    #[test]
    fn nothing_is_mapped_that_is_not_allowed() {
        let mappings = Arc::<Mappings>::default();
        assert!(!mappings.are_allowed());
        let fixture = Fixture::with(file(1), &mappings, false);
        fixture.map(0);
        assert_eq!(fixture.windows(), 0);
    }

    #[test]
    fn a_file_system_that_is_not_known_to_be_coherent_is_not_mapped() {
        let mappings = Arc::<Mappings>::default();
        mappings.allow(1 << 40);
        let file = File::open("/proc/self/maps").unwrap();
        let mapped = Mapped::new(&mappings, true);
        let descriptor = OwnedFd::from(file);
        for _ in 0..BEFORE_FIRST + 2 {
            mapped.was_cached(&descriptor, 0, PAGE);
        }
        assert!(mapped.windows().is_empty());
    }

    #[test]
    fn who_had_to_wait_for_a_page_forgets_which_are_cached() {
        let fixture = Fixture::new(40, false);
        fixture.map(0);
        fixture.was_cached(0, 40);
        doubts::look_at_the_next_read();
        assert!(fixture.read(5, 1).is_some());
        let doubts = fixture.mapped.doubts.count();
        let windows = fixture.mapped.windows();
        windows[0].1.remove_from_memory(&fixture.descriptor);
        doubts::look_at_the_next_read();
        let before = sys::waits_for_pages().unwrap();
        assert!(fixture.read(5, 1).is_some());
        assert!(sys::waits_for_pages().unwrap() > before, "the page was not in memory");
        assert_eq!(fixture.mapped.doubts.count(), doubts + 1);
        assert!(fixture.read(5, 1).is_none());
        for _ in 0..1 << 6 {
            fixture.was_cached(5, 1);
            assert!(fixture.read(5, 1).is_none(), "it is noted only after a while");
        }
        fixture.was_cached(5, 1);
        assert!(fixture.read(5, 1).is_some());
        assert!(fixture.read(20, 1).is_none());
    }
}
