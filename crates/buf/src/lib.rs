//! Owned memory for I/O.

pub mod guard;
mod lender;
pub mod loan;

pub use lender::Lender;

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::any::Any;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

/// Alignment of memory from [`IoBuf::zeroed`]: enough for `O_DIRECT` on any device with blocks up to
/// a page.
pub const ALIGNMENT: usize = 4096;

/// An owned byte buffer whose address never changes.
///
/// The kernel may hold the address while an operation is in flight, so the bytes belong to the operation until it
/// returns the buffer. A buffer can be split in two and joined again without copying. No two buffers overlap, except in
/// memory [shared](Self::shared) with a guest, which may change it at any time, and in what a [`Lender`] keeps.
pub struct IoBuf {
    start: NonNull<u8>,
    length: usize,
    /// Others may change the bytes at any time.
    shared: bool,
    /// The bytes must not be changed through this buffer.
    read_only: bool,
    /// Keeps the memory alive; `None` only for an empty buffer.
    owner: Option<Arc<dyn Any + Send + Sync>>,
}

// SAFETY: an `IoBuf` has exclusive access to its bytes (no two overlap), and the owner that keeps them alive is itself
// `Send + Sync`.
unsafe impl Send for IoBuf {}
// SAFETY: shared access gives only `&[u8]`.
unsafe impl Sync for IoBuf {}

struct Region {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the region is only a handle for freeing; access goes through `IoBuf`.
unsafe impl Send for Region {}
// SAFETY: as above; it has no methods that touch the memory.
unsafe impl Sync for Region {}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: `start` came from `alloc_zeroed` with this layout, and every buffer that pointed
        // into it held the `Arc` that is now gone.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

impl IoBuf {
    /// An empty buffer; allocates nothing.
    pub const fn empty() -> Self {
        Self { start: NonNull::dangling(), length: 0, shared: false, read_only: false, owner: None }
    }

    /// `length` zero bytes, aligned to [`ALIGNMENT`].
    pub fn zeroed(length: usize) -> Self {
        if length == 0 {
            return Self::empty();
        }
        let Ok(layout) = Layout::from_size_align(length, ALIGNMENT) else {
            handle_alloc_error(Layout::new::<u8>())
        };
        // SAFETY: the layout's size is not zero.
        let memory = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(memory) else { handle_alloc_error(layout) };
        let owner = Arc::new(Region { start, layout });
        Self { start, length, shared: false, read_only: false, owner: Some(owner) }
    }

    /// A copy of `bytes`, aligned to [`ALIGNMENT`].
    pub fn copy_of(bytes: &[u8]) -> Self {
        let mut buf = Self::zeroed(bytes.len());
        buf.copy_from_slice(bytes);
        buf
    }

    /// A buffer over memory with another owner, such as a pool.
    ///
    /// # Safety
    /// `start` must be valid for reads and writes of `length` bytes for as long as `owner` lives,
    /// and no other Rust reference or `IoBuf` may cover them meanwhile.
    pub unsafe fn from_owner(
        start: NonNull<u8>,
        length: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self { start, length, shared: false, read_only: false, owner: Some(owner) }
    }

    /// A buffer over memory that others may read and write at any time, such as a guest's.
    ///
    /// Such a buffer may be passed to the kernel. Code that reads the bytes and relies on them not changing must first
    /// make a [stable](Self::into_stable) copy.
    ///
    /// # Safety
    /// `start` must be valid for reads and writes of `length` bytes for as long as `owner` lives. No Rust
    /// reference of this process may cover them meanwhile; other processes may change them.
    pub unsafe fn shared(
        start: NonNull<u8>,
        length: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self { start, length, shared: true, read_only: false, owner: Some(owner) }
    }

    /// A buffer over [shared](Self::shared) memory that is only read: what is to be written to a file.
    ///
    /// # Safety
    /// `start` must be valid for reads of `length` bytes for as long as `owner` lives. References of this process that
    /// cover them must only be read through meanwhile.
    pub unsafe fn shared_read_only(
        start: NonNull<u8>,
        length: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self { start, length, shared: true, read_only: true, owner: Some(owner) }
    }

    /// Whether others may change the bytes.
    pub const fn is_shared(&self) -> bool {
        self.shared
    }

    /// Bytes that nobody else changes: the buffer itself, or a copy of [shared](Self::shared) memory, and that memory.
    #[must_use = "the shared memory is to be given back"]
    pub fn into_stable(self) -> (Self, Option<Self>) {
        if !self.shared {
            return (self, None);
        }
        let mut copy = Self::zeroed(self.length);
        self.copy_to(&mut copy);
        (copy, Some(self))
    }

    /// Copies the bytes, which may be [shared](Self::shared).
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy_to(&self, target: &mut [u8]) {
        assert_eq!(target.len(), self.length, "source and target lengths differ");
        // SAFETY: both are valid for `length` bytes, and the target is borrowed exclusively.
        unsafe {
            std::ptr::copy_nonoverlapping(self.start.as_ptr(), target.as_mut_ptr(), self.length);
        };
    }

    /// The number of bytes.
    pub const fn len(&self) -> usize {
        self.length
    }

    /// Whether there are no bytes.
    pub const fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Splits after `at` bytes: returns the first `at`; `self` keeps the rest.
    ///
    /// # Panics
    /// If `at` is beyond the end.
    #[must_use = "the first part is returned"]
    pub fn split_to(&mut self, at: usize) -> Self {
        assert!(at <= self.length, "cannot split {} bytes at {at}", self.length);
        let first = Self { length: at, owner: self.owner.clone(), ..*self };
        // SAFETY: `at` is within the buffer or at its end.
        self.start = unsafe { self.start.add(at) };
        self.length -= at;
        first
    }

    /// Rejoins the part that followed this one before a [`split_to`](Self::split_to).
    ///
    /// # Panics
    /// If `next` is not the adjacent part of the same memory.
    pub fn unsplit(&mut self, next: Self) {
        if self.is_empty() {
            *self = next;
            return;
        }
        if next.is_empty() {
            return;
        }
        let same = match (&self.owner, &next.owner) {
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            _ => false,
        };
        // SAFETY: the end of the buffer's own memory.
        let end = unsafe { self.start.add(self.length) };
        assert!(same && end == next.start, "the parts are not adjacent");
        self.length += next.length;
    }
}

impl Deref for IoBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `start` is valid for `length` initialised bytes while the owner lives, and `self`
        // is the only handle to them.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

impl DerefMut for IoBuf {
    /// # Panics
    /// If the memory is [only read](Self::shared_read_only).
    fn deref_mut(&mut self) -> &mut [u8] {
        assert!(!self.read_only, "the memory of what is written is changed");
        // SAFETY: as in `deref`, and `&mut self` makes the access unique.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.length) }
    }
}

impl From<Vec<u8>> for IoBuf {
    fn from(bytes: Vec<u8>) -> Self {
        Self::copy_of(&bytes)
    }
}

impl fmt::Debug for IoBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IoBuf({} bytes at {:p})", self.length, self.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_split_and_join_without_moving() {
        let mut rest = IoBuf::copy_of(b"isobath");
        let address = rest.as_ptr();
        let mut first = rest.split_to(3);
        assert_eq!((&*first, &*rest), (&b"iso"[..], &b"bath"[..]));
        rest.fill(b'!');
        first.unsplit(rest);
        assert_eq!((&*first, first.as_ptr()), (&b"iso!!!!"[..], address));
    }

    #[test]
    #[should_panic(expected = "not adjacent")]
    fn strangers_do_not_join() {
        let mut a = IoBuf::copy_of(b"a");
        a.unsplit(IoBuf::copy_of(b"b"));
    }

    #[test]
    fn a_stable_copy_does_not_change_with_shared_memory() {
        let mut memory = [1_u8; 8];
        let start = NonNull::from(&mut memory).cast();
        // SAFETY: the memory lives until the end of the test, which accesses it only through `start`.
        let mut shared = unsafe { IoBuf::shared(start, 8, Arc::new(())) };
        let first = shared.split_to(3);
        let address = shared.as_ptr();
        let ((first, lent), (rest, also_lent)) = (first.into_stable(), shared.into_stable());
        // SAFETY: as above.
        unsafe { start.as_ptr().write_bytes(2, 8) };
        assert_eq!((&*first, &*rest), (&[1; 3][..], &[1; 5][..]));
        assert_ne!(rest.as_ptr(), address);
        assert_eq!(also_lent.unwrap().as_ptr(), address);
        assert_eq!(lent.unwrap().as_ptr(), start.as_ptr());
        let own = IoBuf::copy_of(b"own");
        let address = own.as_ptr();
        let (own, lent) = own.into_stable();
        assert_eq!((own.as_ptr(), lent.is_none()), (address, true));
    }

    #[test]
    #[should_panic(expected = "is changed")]
    fn memory_that_is_only_read_is_not_changed() {
        static BYTES: [u8; 4] = *b"only";
        let start = NonNull::from(&BYTES).cast();
        // SAFETY: it lives for ever, and nothing changes it.
        let mut buf = unsafe { IoBuf::shared_read_only(start, 4, Arc::new(())) };
        let (mut copy, lent) = buf.split_to(2).into_stable();
        copy.fill(1);
        assert_eq!((&*lent.unwrap(), &*buf), (&b"on"[..], &b"ly"[..]));
        buf.fill(0);
    }

    #[test]
    fn memory_outlives_the_other_part() {
        let mut rest = IoBuf::copy_of(b"abcd");
        drop(rest.split_to(2));
        assert_eq!(&*rest, b"cd");
        assert_eq!(IoBuf::zeroed(1).as_ptr() as usize % ALIGNMENT, 0);
    }
}
