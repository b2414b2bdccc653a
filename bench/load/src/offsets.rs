//! Where requests go.

use crate::options::Load;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// The places that one queue's requests go to, in order.
pub(crate) struct Offsets {
    start: u64,
    stride: u64,
    /// Places of the whole range, and how this queue goes through them.
    places: u64,
    order: Order,
}

enum Order {
    /// Any place, again and again.
    Random(SmallRng),
    /// One after the other within `first..end`, and from the start again unless `once`.
    Forward { next: u64, first: u64, end: u64, once: bool },
    /// Every `step`th place of a permutation.
    Shuffled { next: u64, step: u64, permutation: Permutation },
}

impl Offsets {
    /// Those of queue number `queue`, on a device or file of `capacity` bytes.
    ///
    /// # Errors
    /// The range does not hold a request for each queue.
    pub(crate) fn new(load: &Load, queue: u16, capacity: u64) -> crate::Result<Self> {
        let stride = load.stride.unwrap_or(load.bs);
        let room = capacity.saturating_sub(load.offset);
        let size = load.size.unwrap_or(room);
        if stride < load.bs || load.bs == 0 || size > room {
            return Err("the range, the requests and their places do not fit together".into());
        }
        let places = size / stride;
        let (queue, queues) = (u64::from(queue), u64::from(load.queues));
        if places < queues {
            return Err("the range is too small".into());
        }
        let order = if !load.rw.random() {
            let first = places / queues * queue;
            let end = places / queues * (queue + 1);
            Order::Forward { next: first, first, end, once: load.once }
        } else if load.once {
            let permutation = Permutation::new(places, load.seed);
            Order::Shuffled { next: queue, step: queues, permutation }
        } else {
            Order::Random(SmallRng::seed_from_u64(load.seed.wrapping_add(queue)))
        };
        Ok(Self { start: load.offset, stride, places, order })
    }

    /// The next place, in bytes; `None` when all were used and none is used twice.
    pub(crate) fn next(&mut self) -> Option<u64> {
        let place = match &mut self.order {
            Order::Random(random) => random.random_range(0..self.places),
            Order::Forward { next, first, end, once } => {
                if *next == *end {
                    if *once {
                        return None;
                    }
                    *next = *first;
                }
                *next += 1;
                *next - 1
            }
            Order::Shuffled { next, step, permutation } => {
                if *next >= self.places {
                    return None;
                }
                let place = permutation.of(*next);
                *next += *step;
                place
            }
        };
        Some(self.start + place * self.stride)
    }
}

/// A permutation of `0..count`: a Feistel network over the next power of four, applied again where it
/// leaves the range.
struct Permutation {
    count: u64,
    half_bits: u32,
    seed: u64,
}

impl Permutation {
    fn new(count: u64, seed: u64) -> Self {
        let bits = u64::BITS - count.saturating_sub(1).leading_zeros();
        Self { count, half_bits: bits.div_ceil(2).max(1), seed }
    }

    fn of(&self, number: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let mut value = number;
        loop {
            let (mut left, mut right) = (value >> self.half_bits, value & mask);
            for round in 0..4 {
                let mixed = (right ^ self.seed.rotate_left(round * 16))
                    .wrapping_add(u64::from(round))
                    .wrapping_mul(0x9e37_79b9_7f4a_7c15);
                (left, right) = (right, left ^ (mixed >> 32) & mask);
            }
            value = left << self.half_bits | right;
            if value < self.count {
                return value;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Permutation;
    use std::collections::HashSet;

    #[test]
    fn each_place_comes_once() {
        for count in [1, 2, 3, 5, 16, 17, 1000, 65536] {
            let permutation = Permutation::new(count, 7);
            let seen: HashSet<u64> = (0..count).map(|number| permutation.of(number)).collect();
            assert_eq!(seen.len() as u64, count);
            assert!(seen.iter().all(|&place| place < count));
        }
    }
}
