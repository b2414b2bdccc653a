//! The operations of a random test, in qemu-io's syntax.

use rand::{Rng, RngExt};
use std::fmt;

/// One operation on a disk. Offsets and lengths are in bytes, without alignment requirements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Fill a range with one byte.
    Write {
        /// Where it starts.
        offset: u64,
        /// How long it is.
        length: u64,
        /// The byte.
        pattern: u8,
    },
    /// Make a range read as zeroes.
    Zero {
        /// Where it starts.
        offset: u64,
        /// How long it is.
        length: u64,
        /// Whether its space may be released.
        unmap: bool,
    },
    /// Discard a range.
    Discard {
        /// Where it starts.
        offset: u64,
        /// How long it is.
        length: u64,
    },
    /// Make everything before it durable.
    Flush,
    /// Change the size of the disk.
    Resize {
        /// The new size.
        size: u64,
    },
}

impl Op {
    /// The command for `qemu-io -c`; `None` for a resize, which `qemu-img` does.
    pub fn io_command(&self) -> Option<String> {
        match *self {
            Self::Resize { .. } => None,
            _ => Some(self.to_string()),
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Write { offset, length, pattern } => {
                write!(out, "write -P {pattern:#04x} {offset} {length}")
            }
            Self::Zero { offset, length, unmap: false } => {
                write!(out, "write -z {offset} {length}")
            }
            Self::Zero { offset, length, unmap: true } => {
                write!(out, "write -z -u {offset} {length}")
            }
            Self::Discard { offset, length } => write!(out, "discard {offset} {length}"),
            Self::Flush => write!(out, "flush"),
            Self::Resize { size } => write!(out, "resize {size}"),
        }
    }
}

/// The parameters of random operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The disk's size in bytes, at least 1.
    pub size: u64,
    /// The length of the longest operation in bytes, at least 1.
    pub longest: u64,
    /// A size in bytes, such as the cluster size, at least 1. Half of the operations start or end near its multiples.
    pub unit: u64,
}

impl Shape {
    /// A sequence of writes, zero-writes, discards and flushes within the disk.
    pub fn ops<R: Rng>(&self, rng: &mut R, count: usize) -> Vec<Op> {
        (0..count).map(|_| self.op(rng)).collect()
    }

    /// One write, zero-write, discard or flush within the disk.
    pub fn op<R: Rng>(&self, rng: &mut R) -> Op {
        let (offset, length) = self.range(rng);
        match rng.random_range(0..20) {
            0..12 => Op::Write { offset, length, pattern: rng.random_range(1..=255) },
            12..16 => Op::Zero { offset, length, unmap: rng.random() },
            16..19 => Op::Discard { offset, length },
            _ => Op::Flush,
        }
    }

    /// A range within the disk: anywhere, or near multiples of [`Shape::unit`].
    pub fn range<R: Rng>(&self, rng: &mut R) -> (u64, u64) {
        let mut offset = rng.random_range(0..self.size);
        let mut length = rng.random_range(1..=self.longest);
        if rng.random() {
            offset -= offset % self.unit;
        }
        if rng.random() {
            length = (length - length % self.unit).max(self.unit.min(self.longest));
        }
        (offset, length.min(self.size - offset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seed::Seed;

    #[test]
    fn random_operations_stay_within_the_disk_and_are_of_every_kind() {
        let seed = Seed::from(1);
        let shape = Shape { size: 100_001, longest: 9000, unit: 4096 };
        let ops = shape.ops(&mut seed.rng(), 1000);
        let mut kinds = std::collections::HashSet::new();
        for op in &ops {
            kinds.insert(std::mem::discriminant(op));
            if let Op::Write { offset, length, .. }
            | Op::Zero { offset, length, .. }
            | Op::Discard { offset, length } = *op
            {
                assert!(length > 0 && length <= 9000 && offset + length <= 100_001, "{op}");
            }
        }
        assert_eq!(kinds.len(), 4);
        assert_eq!(ops, shape.ops(&mut seed.rng(), 1000), "the same seed, the same operations");
    }

    #[test]
    fn operations_are_commands_of_qemu_io() {
        assert_eq!(Op::Write { offset: 3, length: 5, pattern: 7 }.to_string(), "write -P 0x07 3 5");
        let zero = Op::Zero { offset: 0, length: 512, unmap: true };
        assert_eq!(zero.io_command().as_deref(), Some("write -z -u 0 512"));
        assert_eq!(Op::Resize { size: 9 }.io_command(), None);
    }
}
