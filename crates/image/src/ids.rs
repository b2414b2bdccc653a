//! Random ids of journals and zones, which distinguish one use of an image from all others.

use std::cell::Cell;
use std::hash::{BuildHasher, RandomState};

thread_local! {
    /// The state of a simulation's generator.
    static SEED: Cell<Option<u64>> = const { Cell::new(None) };
}

/// An unpredictable number, or with a [seed] the next one of its sequence.
pub fn fresh() -> u64 {
    let Some(seed) = SEED.get() else { return RandomState::new().hash_one(0_u64) };
    let next = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    SEED.set(Some(next));
    // SplitMix64.
    let mixed = (next ^ (next >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

/// Whether this thread runs a simulation, whose numbers come from a [seed].
pub fn are_seeded() -> bool {
    SEED.get().is_some()
}

/// Derives this thread's numbers from a seed, so that a simulation can be repeated; `None` ends that.
pub fn seed(seed: Option<u64>) {
    SEED.set(seed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_differ_and_follow_from_a_seed() {
        let some = || [fresh(), fresh(), fresh()];
        assert_ne!(some(), some());
        assert!(!are_seeded());
        seed(Some(7));
        assert!(are_seeded());
        let first = some();
        seed(Some(7));
        assert_eq!(some(), first);
        assert_ne!(some(), first);
        seed(None);
        assert_ne!(some(), first);
    }
}
