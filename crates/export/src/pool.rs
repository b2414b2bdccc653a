//! Reused buffers for reads and writes.

use isobath_storage::IoBuf;
use std::cell::{Cell, RefCell};

/// The smallest size class in bytes. Each class is twice the size of the one before.
const SMALLEST: usize = 4096;
/// Number of size classes; the largest is 32 MiB.
const CLASSES: usize = 14;

/// Free buffers of one thread, by size.
pub(crate) struct Pool {
    classes: [RefCell<Vec<IoBuf>>; CLASSES],
    free: Cell<usize>,
    limit: Cell<usize>,
}

/// A buffer of exactly the requested length, and the rest of its memory.
pub(crate) struct Pooled {
    pub(crate) data: IoBuf,
    pub(crate) spare: IoBuf,
}

fn class_of(length: usize) -> Option<(usize, usize)> {
    let size = length.max(SMALLEST).checked_next_power_of_two()?;
    let class = (size / SMALLEST).trailing_zeros() as usize;
    (class < CLASSES).then_some((class, size))
}

impl Pool {
    /// A pool that keeps up to `limit` bytes of free buffers.
    pub(crate) fn new(limit: usize) -> Self {
        Self { classes: Default::default(), free: Cell::new(0), limit: Cell::new(limit) }
    }

    /// Keeps up to `limit` bytes of free buffers from now on.
    pub(crate) fn limit_to(&self, limit: usize) {
        self.limit.set(limit);
    }

    /// A buffer of `length` bytes with arbitrary contents.
    pub(crate) fn take(&self, length: usize) -> Pooled {
        let Some((class, size)) = class_of(length) else {
            return Pooled { data: IoBuf::zeroed(length), spare: IoBuf::empty() };
        };
        let free = self.classes.get(class).and_then(|list| list.borrow_mut().pop());
        let mut whole = if let Some(buf) = free {
            self.free.set(self.free.get() - size);
            buf
        } else {
            IoBuf::zeroed(size)
        };
        if length == size {
            return Pooled { data: whole, spare: IoBuf::empty() };
        }
        let data = whole.split_to(length);
        Pooled { data, spare: whole }
    }

    /// How many bytes of memory a buffer of `length` bytes takes.
    pub(crate) fn footprint(length: usize) -> usize {
        class_of(length).map_or(length, |(_, size)| size)
    }

    /// Returns a buffer to the pool.
    pub(crate) fn put(&self, Pooled { mut data, spare }: Pooled) {
        if !spare.is_empty() {
            if data.as_ptr_range().end != spare.as_ptr() {
                return;
            }
            data.unsplit(spare);
        }
        let Some((class, size)) = class_of(data.len()) else { return };
        let free = self.free.get() + size;
        if data.len() == size
            && free <= self.limit.get()
            && let Some(list) = self.classes.get(class)
        {
            list.borrow_mut().push(data);
            self.free.set(free);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_comes_back_whole_whatever_was_asked() {
        let pool = Pool::new(1 << 20);
        let mut addresses = Vec::new();
        for length in [1, 4096, 100, 0, 3000] {
            let pooled = pool.take(length);
            assert_eq!(pooled.data.len(), length);
            addresses.push(pooled.data.as_ptr());
            pool.put(pooled);
        }
        addresses.dedup();
        assert_eq!((addresses.len(), pool.free.get()), (1, 4096));
    }

    #[test]
    fn the_limit_holds() {
        let pool = Pool::new(3 << 20);
        let many: Vec<_> = (0..8).map(|_| pool.take((1 << 20) - 5)).collect();
        for pooled in many {
            pool.put(pooled);
        }
        assert_eq!(pool.free.get(), 3 << 20);
        pool.put(pool.take(64 << 20));
        assert_eq!(pool.free.get(), 3 << 20);
    }

    #[test]
    fn a_strange_buffer_is_let_go() {
        let pool = Pool::new(1 << 20);
        let Pooled { spare, .. } = pool.take(100);
        pool.put(Pooled { data: IoBuf::zeroed(100), spare });
        assert_eq!(pool.free.get(), 0);
    }
}
