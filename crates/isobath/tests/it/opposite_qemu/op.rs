//! The requests of a history.

use std::fmt;

/// What a write writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fill {
    Byte(u8),
    /// One of a few random blocks, over and over.
    Noise(u8),
}

/// One request. Where it reaches past the disk's end, it is cut off there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Write {
        offset: u64,
        length: u64,
        fill: Fill,
    },
    Zero {
        offset: u64,
        length: u64,
        unmap: bool,
    },
    Discard {
        offset: u64,
        length: u64,
    },
    /// Whole clusters, by number.
    Compressed {
        cluster: u64,
        count: u64,
        fill: Fill,
    },
    Read {
        offset: u64,
        length: u64,
    },
    /// Writes of different bytes, each a step further on and overlapping the one before, at once.
    Race {
        offset: u64,
        length: u64,
        step: u64,
        count: u8,
    },
    Flush,
}

impl Op {
    /// The operation within a disk of `size` bytes and clusters of `cluster`; `None` where nothing of
    /// it is.
    pub(crate) fn within(self, size: u64, cluster: u64) -> Option<Self> {
        let cut = |offset: u64, length: u64| size.saturating_sub(offset).min(length);
        let op = match self {
            Self::Write { offset, length, fill } => {
                Self::Write { offset, length: cut(offset, length), fill }
            }
            Self::Zero { offset, length, unmap } => {
                Self::Zero { offset, length: cut(offset, length), unmap }
            }
            Self::Discard { offset, length } => {
                Self::Discard { offset, length: cut(offset, length) }
            }
            Self::Read { offset, length } => Self::Read { offset, length: cut(offset, length) },
            Self::Race { offset, length, step, count } => {
                let reach = length + step * u64::from(count - 1);
                return (offset + reach <= size).then_some(self);
            }
            Self::Compressed { cluster: first, count, fill } => {
                let count = count.min(size.div_ceil(cluster).saturating_sub(first));
                Self::Compressed { cluster: first, count, fill }
            }
            Self::Flush => self,
        };
        (op == Self::Flush || op.range(size, cluster).1 > 0).then_some(op)
    }

    /// The bytes it may touch: where they start, and how many they are.
    pub(crate) fn range(self, size: u64, cluster: u64) -> (u64, u64) {
        match self {
            Self::Write { offset, length, .. }
            | Self::Zero { offset, length, .. }
            | Self::Discard { offset, length }
            | Self::Read { offset, length } => (offset, length),
            Self::Race { offset, length, step, count } => {
                (offset, length + step * u64::from(count - 1))
            }
            Self::Compressed { cluster: first, count, .. } => {
                let offset = first * cluster;
                (offset, (count * cluster).min(size.saturating_sub(offset)))
            }
            Self::Flush => (0, 0),
        }
    }

    /// The same with other bytes.
    pub(crate) fn with_fill(self, fill: Fill) -> Self {
        match self {
            Self::Write { offset, length, .. } => Self::Write { offset, length, fill },
            Self::Compressed { cluster, count, .. } => Self::Compressed { cluster, count, fill },
            other => other,
        }
    }

    /// Whether what the disk holds may change.
    pub(crate) fn changes(self) -> bool {
        !matches!(self, Self::Read { .. } | Self::Flush | Self::Discard { .. })
    }

    /// The writes of a race.
    pub(crate) fn racers(self) -> Vec<(u64, u64, u8)> {
        match self {
            Self::Race { offset, length, step, count } => {
                (0..count).map(|n| (offset + step * u64::from(n), length, n + 1)).collect()
            }
            _ => Vec::new(),
        }
    }
}

impl fmt::Display for Fill {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Byte(byte) => write!(out, "-P {byte:#04x}"),
            Self::Noise(number) => write!(out, "-s noise{number}"),
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Write { offset, length, fill } => write!(out, "write {fill} {offset} {length}"),
            Self::Zero { offset, length, unmap } => {
                write!(out, "write -z {}{offset} {length}", if *unmap { "-u " } else { "" })
            }
            Self::Discard { offset, length } => write!(out, "discard {offset} {length}"),
            Self::Compressed { cluster, count, fill } => {
                write!(out, "write -c {fill}, {count} clusters from number {cluster}")
            }
            Self::Read { offset, length } => write!(out, "read {offset} {length}"),
            Self::Race { offset, length, step, count } => {
                write!(out, "{count} writes at once, {length} each, at {offset} and {step} on")
            }
            Self::Flush => out.write_str("flush"),
        }
    }
}
