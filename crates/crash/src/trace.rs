//! A digest of everything that a history does: each operation of its storage, each change that took effect, each step
//! of a task, of the history itself and of every recovery. Two runs of one seed must have the same.

use rustc_hash::FxHasher;
use std::cell::Cell;
use std::hash::{Hash, Hasher};

thread_local! {
    /// The digest of this thread's history so far.
    static DIGEST: Cell<u64> = const { Cell::new(0) };
}

/// Begins a history.
pub(crate) fn begin() {
    DIGEST.set(0);
}

/// Adds an event.
pub(crate) fn note(event: impl Hash) {
    let mut hasher = FxHasher::default();
    DIGEST.get().hash(&mut hasher);
    event.hash(&mut hasher);
    DIGEST.set(hasher.finish());
}

/// The digest of all events since [`begin`].
pub(crate) fn digest() -> u64 {
    DIGEST.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_tells_events_and_their_order_apart() {
        let of = |events: &[(&str, u64)]| {
            begin();
            events.iter().for_each(note);
            digest()
        };
        let (a, b) = (("write", 1), ("write", 2));
        assert_eq!(of(&[a, b]), of(&[a, b]));
        assert_ne!(of(&[a, b]), of(&[b, a]));
        assert_ne!(of(&[a, b]), of(&[a]));
    }
}
