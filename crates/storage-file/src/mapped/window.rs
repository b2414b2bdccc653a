//! A part of a file that is mapped.

use super::budget::{Member, Share};
use crate::sys;
use isobath_buf::guard::{Access, Guard};
use std::io;
use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::thread;

/// Bytes of a file in a window. Windows are aligned to it.
pub(super) const WINDOW: u64 = 1 << 30;

/// Bytes around a page that was found in the page cache of which the kernel is asked whether they are there as well, if
/// something in them was found before. It also maps as much when a page is read for the first time.
const AROUND: usize = 64 << 10;

/// Bytes of pages found in a window up to which it is unmapped at once: that takes up to a millisecond for 4 MiB.
const UNMAPPED_AT_ONCE: usize = 4 << 20;

/// A mapped part of a file, in one line of the processor's cache but for the bits of its pages.
#[repr(align(64))]
pub(super) struct Window {
    start: NonNull<u8>,
    length: usize,
    /// Taken when the mapping ends.
    guard: Option<Guard>,
    /// log2 of the bytes of a page.
    page_bits: u8,
    /// A bit for each page: an immediate read has found it in the page cache.
    present: Box<[AtomicU64]>,
    /// The kernel says which pages are in the page cache. To who might not write to the file it says that all are.
    tells: bool,
    /// The number of doubts when the bits were cleared last.
    since: AtomicU32,
    /// Read, or found cached, since that was last asked.
    used: AtomicBool,
    share: Arc<Share>,
}

const _: () = assert!(size_of::<Window>() == 64, "a window has the size of a line");

// SAFETY: the mapping belongs to the whole process and is only read.
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

impl Window {
    /// Maps `length` bytes of the file's window with this number.
    ///
    /// # Errors
    /// The file cannot be mapped.
    pub(super) fn new(
        file: &OwnedFd,
        number: u64,
        length: usize,
        share: Arc<Share>,
    ) -> io::Result<Self> {
        let page = sys::page_size();
        let start = sys::map_to_read(file, number * WINDOW, length)?;
        let mut window = Self {
            start,
            length,
            guard: None,
            page_bits: page.trailing_zeros() as u8,
            present: Box::default(),
            tells: sys::may_write(file),
            since: AtomicU32::new(0),
            used: AtomicBool::new(true),
            share,
        };
        let mapped = length.next_multiple_of(page);
        window.guard = Some(Guard::new(start, mapped, page, Access::Read)?);
        let words = length.div_ceil(page).div_ceil(u64::BITS as usize);
        window.present = (0..words).map(|_| AtomicU64::new(0)).collect();
        Ok(window)
    }

    /// Bytes of a page.
    fn page(&self) -> usize {
        1 << self.page_bits
    }

    /// The bits of a range's pages, word by word.
    fn words(&self, at: usize, length: usize) -> impl Iterator<Item = (&AtomicU64, u64)> {
        let bits = u64::BITS as usize;
        let (first, last) = (at >> self.page_bits, (at + length - 1) >> self.page_bits);
        (first / bits..=last / bits).map(move |word| {
            let from = first.saturating_sub(word * bits);
            let to = (last - word * bits).min(bits - 1);
            (&self.present[word], (u64::MAX << from) & (u64::MAX >> (bits - 1 - to)))
        })
    }

    /// Whether all of a range of at least a byte was found in the page cache, after so many doubts.
    pub(super) fn is_present(&self, at: usize, length: usize, doubts: u32) -> bool {
        if !self.reaches(at + length) || self.since.load(Ordering::Relaxed) != doubts {
            return false;
        }
        // Most ranges are of one page.
        let (first, last) = (at >> self.page_bits, (at + length - 1) >> self.page_bits);
        if first == last {
            let bits = u64::BITS as usize;
            return self.present[first / bits].load(Ordering::Relaxed) >> (first % bits) & 1 == 1;
        }
        self.words(at, length).all(|(word, mask)| word.load(Ordering::Relaxed) & mask == mask)
    }

    /// An immediate read has found a range of at least a byte, after so many doubts.
    pub(super) fn note(&self, at: usize, length: usize, doubts: u32) {
        if !self.reaches(at + length) {
            return;
        }
        self.is_of_use();
        // Another thread may still see some of the old bits, and wait for a page: no harm but the time.
        if self.since.swap(doubts, Ordering::Relaxed) != doubts {
            for word in &self.present {
                word.store(0, Ordering::Relaxed);
            }
        }
        // A page read once says nothing about those around it.
        let again = self.tells && length < AROUND && self.is_some_around(at);
        self.set(at, length);
        if again {
            self.note_around(at);
        }
    }

    /// Where the pages around one begin, and their bytes.
    fn around(&self, at: usize) -> (usize, usize) {
        let from = at & !(AROUND - 1);
        (from, AROUND.min(self.length - from))
    }

    fn is_some_around(&self, at: usize) -> bool {
        let (from, length) = self.around(at);
        self.words(from, length).any(|(word, mask)| word.load(Ordering::Relaxed) & mask != 0)
    }

    fn set(&self, at: usize, length: usize) {
        for (word, mask) in self.words(at, length) {
            if word.load(Ordering::Relaxed) & mask != mask {
                word.fetch_or(mask, Ordering::Relaxed);
            }
        }
    }

    /// Notes what else is in the page cache.
    fn note_around(&self, at: usize) {
        let (from, length) = self.around(at);
        let mut found = [0_u8; AROUND / sys::LEAST_PAGE];
        // SAFETY: the range is in the mapping.
        if unsafe { sys::find_in_memory(self.start.add(from), length, &mut found) }.is_err() {
            return;
        }
        for (page, found) in found.iter().enumerate().take(length.div_ceil(self.page())) {
            if found & 1 == 1 {
                self.set(from + page * self.page(), 1);
            }
        }
    }

    /// Copies a range that [is present](Self::is_present). `false` if a part of the mapping is missing: what was copied
    /// is not the file's.
    pub(super) fn copy(&self, at: usize, buf: &mut [u8]) -> bool {
        assert!(buf.len() <= self.length && at <= self.length - buf.len(), "a range in its window");
        self.is_of_use();
        // SAFETY: the range is in the mapping, which lasts as long as this window, and cannot overlap with a buffer,
        // since nobody has references to it. Others may write to the file meanwhile; then the bytes are old or new
        // ones, as with a system call.
        unsafe {
            ptr::copy_nonoverlapping(self.start.as_ptr().add(at), buf.as_mut_ptr(), buf.len());
        };
        // What is missing is noted before zeroes are put in its place.
        fence(Ordering::Acquire);
        !self.guard.as_ref().is_none_or(Guard::is_lost)
    }

    /// Whether it has all up to an offset.
    pub(super) fn reaches(&self, end: usize) -> bool {
        end <= self.length
    }

    fn is_of_use(&self) {
        if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::Relaxed);
        }
    }
}

impl Member for Window {
    fn was_of_use(&self) -> bool {
        self.used.swap(false, Ordering::Relaxed)
    }

    fn counted(&self) -> u64 {
        self.share.bytes()
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        self.guard = None;
        let mapping =
            Mapping { start: self.start, length: self.length, _share: self.share.clone() };
        let pages: u32 =
            self.present.iter().map(|word| word.load(Ordering::Relaxed).count_ones()).sum();
        if pages as usize * self.page() <= UNMAPPED_AT_ONCE {
            return;
        }
        // If there can be no thread, this one does it.
        let _ = thread::Builder::new().name("unmap".into()).spawn(move || drop(mapping));
    }
}

/// What is left of a window.
struct Mapping {
    start: NonNull<u8>,
    length: usize,
    _share: Arc<Share>,
}

// SAFETY: the mapping belongs to the whole process, and nobody uses it.
unsafe impl Send for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by a window, and nobody reads it any more.
        unsafe { sys::unmap(self.start, self.length) };
    }
}

#[cfg(test)]
impl Window {
    /// Removes the pages of its file from the page cache.
    pub(super) fn remove_from_memory(&self, file: &OwnedFd) {
        sys::fdatasync(file).unwrap();
        let mut found = vec![1_u8; self.length.div_ceil(self.page())];
        for _ in 0..1000 {
            // SAFETY: the range is the mapping's, to which nobody has references.
            unsafe {
                let start = self.start.as_ptr().cast();
                assert_eq!(libc::madvise(start, self.length, libc::MADV_DONTNEED), 0);
                sys::advise(file, libc::POSIX_FADV_DONTNEED);
                sys::find_in_memory(self.start, self.length, &mut found).unwrap();
            }
            if found.iter().all(|page| page & 1 == 0) {
                return;
            }
        }
        panic!("the file system keeps pages");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapped::budget::Mappings;
    use std::os::unix::fs::FileExt;

    const PAGE: usize = 4096;

    #[test]
    fn what_is_not_cached_around_a_page_is_not_noted_nor_is_anything_if_the_kernel_does_not_say() {
        for tells in [true, false] {
            let mappings = Arc::<Mappings>::default();
            mappings.allow(1 << 30);
            let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
            file.write_all_at(&vec![7; 40 * PAGE], 0).unwrap();
            let file = OwnedFd::from(file);
            let length = 40 * PAGE;
            let share = mappings.admit(length).unwrap();
            let mut window = Window::new(&file, 0, length, share).unwrap();
            assert!(window.tells, "this test may write to its own file");
            window.tells = tells;
            window.remove_from_memory(&file);
            sys::advise(&file, libc::POSIX_FADV_RANDOM);
            for page in [20, 25] {
                sys::pread(&file, &mut [0; PAGE], (page * PAGE) as u64).unwrap();
            }
            window.note(20 * PAGE, PAGE, 0);
            let present = |page| window.is_present(page * PAGE, PAGE, 0);
            assert!(present(20) && !present(25), "one page says nothing about others");
            window.note(20 * PAGE, PAGE, 0);
            assert_eq!(present(25), tells);
            assert!((16..32).filter(|page| present(*page)).count() <= 2);
            assert!(!window.is_present(20 * PAGE, PAGE, 1), "there has been a doubt since");
            window.note(30 * PAGE, PAGE, 1);
            assert!(window.is_present(30 * PAGE, PAGE, 1));
            assert!(!window.is_present(39 * PAGE, 2 * PAGE, 1), "it reaches beyond the window");
        }
    }
}
