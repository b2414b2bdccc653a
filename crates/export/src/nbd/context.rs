//! Metadata contexts: the information that `BLOCK_STATUS` returns for a range.

use super::wire::state;
use isobath_disk::BlockStatus;

/// A metadata context of this server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Context {
    /// `base:allocation`: holes and zeroes.
    Allocation,
    /// `qemu:allocation-depth`: which layer of the chain holds the range.
    Depth,
    /// `qemu:dirty-bitmap:NAME`: the bitmap with this index.
    Bitmap(u8),
}

impl Context {
    /// The ID by which replies refer to the context.
    pub const fn id(self) -> u32 {
        match self {
            Self::Allocation => 0,
            Self::Depth => 1,
            Self::Bitmap(number) => 2 + number as u32,
        }
    }

    fn from_id(id: u32) -> Self {
        match id {
            0 => Self::Allocation,
            1 => Self::Depth,
            _ => Self::Bitmap((id - 2) as u8),
        }
    }

    /// The flags of a run in this context.
    ///
    /// In `base:allocation`, everything that reads as zeroes without data is a hole, as in QEMU. In
    /// `qemu:allocation-depth`, 0 means not allocated, 1 allocated in the active layer, 2 in its backing file, and so
    /// on. A bitmap's flags do not depend on runs.
    pub fn flags(self, run: &BlockStatus) -> u32 {
        match self {
            Self::Allocation => {
                let hole = if run.allocated && !run.zero { 0 } else { state::HOLE };
                let zero = if run.zero { state::ZERO } else { 0 };
                hole | zero
            }
            Self::Depth if run.allocated => run.depth.saturating_add(1),
            Self::Depth | Self::Bitmap(_) => 0,
        }
    }
}

/// Whether a `SET_META_CONTEXT` query selects the context of this name. Only the full name does.
pub fn is_selected(name: &str, query: &[u8]) -> bool {
    query == name.as_bytes()
}

/// Whether a `LIST_META_CONTEXT` query lists the context of this name. The full name does, and so does any prefix that
/// ends in a colon.
pub fn is_listed(name: &str, query: &[u8]) -> bool {
    is_selected(name, query) || (query.ends_with(b":") && name.as_bytes().starts_with(query))
}

/// The contexts that a client has selected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Contexts(u64);

impl Contexts {
    /// Adds a context.
    pub fn insert(&mut self, context: Context) {
        self.0 |= 1 << context.id();
    }

    /// Whether a context is selected.
    pub const fn contains(self, context: Context) -> bool {
        self.0 & (1 << context.id()) != 0
    }

    /// Whether no context is selected.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The selected contexts in order.
    pub fn iter(self) -> impl Iterator<Item = Context> {
        (0..u64::BITS).filter(move |id| self.0 & (1 << id) != 0).map(Context::from_id)
    }
}

/// Converts runs into the extents of one context, as `(length, flags)`. Neighbours with equal flags are merged. The
/// result covers at most `length` bytes in total, and only the first extent if `one`.
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
        let (base, depth) = ("base:allocation", "qemu:allocation-depth");
        assert!(is_listed(depth, b"qemu:"));
        assert!(!is_selected(depth, b"qemu:"));
        assert!(is_selected(base, b"base:allocation"));
        assert!(is_listed("qemu:dirty-bitmap:b", b"qemu:dirty-bitmap:"));
        for query in [&b""[..], b"base", b"base:alloc", b"base:allocation:", b"x-y:", b"b:"] {
            assert!(!is_listed(base, query) && !is_listed(depth, query));
        }
        let mut contexts = Contexts::default();
        let all = [Context::Depth, Context::Bitmap(0), Context::Bitmap(61)];
        for context in all {
            contexts.insert(context);
        }
        assert_eq!(contexts.iter().collect::<Vec<_>>(), all);
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
