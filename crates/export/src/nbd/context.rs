//! Metadata contexts: what `BLOCK_STATUS` can tell about a range.

use super::wire::state;
use isobath_disk::BlockStatus;

/// A metadata context of this server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Context {
    /// `base:allocation`: holes and zeroes.
    Allocation,
    /// `qemu:allocation-depth`: which layer of the chain holds the range.
    Depth,
}

impl Context {
    /// Every context, in the order in which they are listed.
    pub const ALL: [Self; 2] = [Self::Allocation, Self::Depth];

    /// The name that a client asks for.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Allocation => "base:allocation",
            Self::Depth => "qemu:allocation-depth",
        }
    }

    /// The number by which replies refer to the context.
    pub const fn id(self) -> u32 {
        self as u32
    }

    /// Whether a query of `SET_META_CONTEXT` selects this context: only its full name does.
    pub fn is_selected_by(self, query: &[u8]) -> bool {
        query == self.name().as_bytes()
    }

    /// Whether a query of `LIST_META_CONTEXT` lists this context: its full name does, and so does
    /// its namespace with the colon.
    pub fn is_listed_by(self, query: &[u8]) -> bool {
        self.is_selected_by(query)
            || (query.ends_with(b":") && self.name().as_bytes().starts_with(query))
    }

    /// The flags of a run in this context.
    ///
    /// In `base:allocation` whatever reads as zeroes without data is a hole, as QEMU has it. In
    /// `qemu:allocation-depth` 0 means allocated nowhere, 1 in the active layer, 2 in its backing
    /// file, and so on.
    pub fn flags(self, run: &BlockStatus) -> u32 {
        match self {
            Self::Allocation => {
                let hole = if run.allocated && !run.zero { 0 } else { state::HOLE };
                let zero = if run.zero { state::ZERO } else { 0 };
                hole | zero
            }
            Self::Depth if run.allocated => run.depth.saturating_add(1),
            Self::Depth => 0,
        }
    }
}

/// The contexts that a client has selected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Contexts(u8);

impl Contexts {
    /// Adds a context.
    pub fn insert(&mut self, context: Context) {
        self.0 |= 1 << context.id();
    }

    /// Whether a context is selected.
    pub const fn contains(self, context: Context) -> bool {
        self.0 & (1 << context.id()) != 0
    }

    /// Whether none is selected.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The selected contexts in order.
    pub fn iter(self) -> impl Iterator<Item = Context> {
        Context::ALL.into_iter().filter(move |context| self.contains(*context))
    }
}

/// Turns runs into the extents of one context: `(length, flags)`, neighbours with equal flags
/// joined, cut to `length` bytes in all and to the first extent if `one`.
pub fn extents(context: Context, runs: &[BlockStatus], length: u32, one: bool) -> Vec<(u32, u32)> {
    let mut left = length;
    let mut extents: Vec<(u32, u32)> = Vec::with_capacity(if one { 1 } else { runs.len() });
    for run in runs {
        let take = u32::try_from(run.length).unwrap_or(u32::MAX).min(left);
        if take == 0 {
            break;
        }
        let flags = context.flags(run);
        match extents.last_mut() {
            Some(last) if last.1 == flags => last.0 += take,
            Some(_) if one => break,
            _ => extents.push((take, flags)),
        }
        left -= take;
    }
    extents
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(length: u64, allocated: bool, zero: bool, depth: u32) -> BlockStatus {
        BlockStatus { length, allocated, zero, compressed: false, depth, host: None }
    }

    #[test]
    fn queries_by_name_and_by_namespace() {
        assert!(Context::Depth.is_listed_by(b"qemu:"));
        assert!(!Context::Depth.is_selected_by(b"qemu:"));
        assert!(Context::Allocation.is_selected_by(b"base:allocation"));
        for query in [&b""[..], b"base", b"base:alloc", b"base:allocation:", b"x-y:", b"b:"] {
            assert!(!Context::ALL.iter().any(|context| context.is_listed_by(query)));
        }
    }

    #[test]
    fn neighbours_join_and_the_last_is_cut() {
        let runs = [
            run(4096, true, false, 0),
            run(4096, true, false, 3),
            run(4096, true, true, 3),
            run(1 << 40, false, true, 4),
        ];
        let allocation = extents(Context::Allocation, &runs, 1 << 20, false);
        assert_eq!(allocation, [(8192, 0), ((1 << 20) - 8192, 3)]);
        let depth = extents(Context::Depth, &runs, 1 << 20, false);
        assert_eq!(depth, [(4096, 1), (8192, 4), ((1 << 20) - 12288, 0)]);
        assert_eq!(extents(Context::Allocation, &runs, 1 << 20, true), [(8192, 0)]);
        assert_eq!(extents(Context::Depth, &runs, 100, false), [(100, 1)]);
    }
}
