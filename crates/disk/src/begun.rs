//! Slices that are resolved in part.

use isobath_chain::map::resolve::Resolution;

/// Bits for the slices of one lock. If there are more slices, some share one, and are resolved as a whole at once.
const SEEN_BITS: usize = 1024;

/// What is known of the slices of one lock that are not in the map.
///
/// The first request to a slice resolves it down to the owners of what it needs: without an index a layer costs a read,
/// and of many layers half are below the owner on average. The second request resolves the rest.
#[derive(Default)]
pub struct Begun {
    /// Slices of which a part was resolved, by number.
    seen: [u64; SEEN_BITS / 64],
    /// The last one of them, unless it became whole.
    last: Option<Partial>,
    /// The last slice that could not be resolved.
    broken: Option<Broken>,
}

/// A slice of which a table cannot be read.
struct Broken {
    slice: u64,
    /// How often that was tried in vain.
    failures: u32,
    /// Requests that do not try it again.
    spared: u32,
}

/// After many failures, one request of 2^6 tries again to resolve a slice.
const MOST_FAILURES: u32 = 6;

/// A slice that is resolved in part.
pub struct Partial {
    /// Its number.
    pub slice: u64,
    /// The map's when that began.
    pub generation: u64,
    /// What is resolved.
    pub resolution: Resolution,
}

impl Begun {
    /// Notes that a part of a slice is resolved; returns whether that was so before.
    pub fn see(&mut self, slice: u64) -> bool {
        let bit = slice as usize % SEEN_BITS;
        let word = &mut self.seen[bit / 64];
        let before = *word;
        *word |= 1 << (bit % 64);
        before == *word
    }

    /// Keeps what was resolved of a slice, until another comes.
    pub fn keep(&mut self, partial: Partial) {
        self.last = Some(partial);
    }

    /// What was resolved of a slice, unless the map has changed since.
    pub fn take(&mut self, slice: u64, generation: u64) -> Option<Resolution> {
        let fits = |last: &mut Partial| last.slice == slice && last.generation == generation;
        self.last.take_if(fits).map(|last| last.resolution)
    }

    /// Notes that more of a slice than a request wants cannot be resolved. Trying takes long where a store does not
    /// answer, so it is tried again by the second request from now, then by the fourth, and so on.
    pub fn spare(&mut self, slice: u64) {
        let before = self.broken.take_if(|broken| broken.slice == slice);
        let failures = before.map_or(1, |broken| (broken.failures + 1).min(MOST_FAILURES));
        self.broken = Some(Broken { slice, failures, spared: (1 << failures) - 1 });
    }

    /// Whether a request to a slice should resolve no more than it wants, since more could not be resolved.
    pub fn is_spared(&mut self, slice: u64) -> bool {
        let Some(broken) = &mut self.broken else { return false };
        let spared = broken.slice == slice && broken.spared > 0;
        broken.spared -= u32::from(spared);
        spared
    }
}
