//! A rotating disk: arm, platter, and a volatile write cache.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

/// The mechanics and the cache of a disk.
///
/// A seek to another track takes [`settle`](Self::settle), plus [`stroke`](Self::stroke) times the square root of the
/// distance as a fraction of the [`span`](Self::span). Then the disk rotates until the first byte is under the head: a
/// request that continues where the last one ended but arrives late waits for nearly a whole rotation, as does every
/// individually flushed write of a log. A read that continues where the last request ended does not wait, since disks
/// read ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mechanics {
    /// The minimum time of a seek to another track.
    pub settle: Duration,
    /// The additional time of a seek from one end to the other.
    pub stroke: Duration,
    /// The time of one rotation.
    pub turn: Duration,
    /// Bytes from one end to the other; larger distances cost no more.
    pub span: u64,
    /// The size of the write cache in bytes. It is written out, in order of position, by a flush and when it is full;
    /// until then a write costs only its latency.
    pub cache: u64,
}

impl Mechanics {
    /// A desktop disk of 320 GB: 7,200 rpm, a seek of 8.9 ms for a third of the span, 8 MiB of cache.
    pub const DESKTOP: Self = Self {
        settle: Duration::from_micros(800),
        stroke: Duration::from_millis(14),
        turn: Duration::from_nanos(8_333_333),
        span: 320_000_000_000,
        cache: 8 << 20,
    };

    /// The time of a seek to another track that is `distance` bytes away.
    fn seek(&self, distance: u64) -> Duration {
        let part = (u128::from(distance.min(self.span)) << 40) / u128::from(self.span.max(1));
        self.settle.saturating_add(nanoseconds((self.stroke.as_nanos() * part.isqrt()) >> 20))
    }
}

/// The state of the arm and the cache.
#[derive(Debug)]
pub(super) struct Arm {
    mechanics: Mechanics,
    /// Bytes per second.
    bandwidth: u64,
    /// The position after the last byte that passed under the head.
    place: u64,
    /// When that byte had passed.
    left: Duration,
    /// The ranges in the cache: their ends, by their starts.
    dirty: BTreeMap<u64, u64>,
    dirty_bytes: u64,
}

impl Arm {
    pub(super) fn new(mechanics: Mechanics, bandwidth: u64) -> Self {
        let (dirty, left) = (BTreeMap::new(), Duration::ZERO);
        Self { mechanics, bandwidth, place: 0, left, dirty, dirty_bytes: 0 }
    }

    /// Reads a range; returns the time at which the last byte has passed.
    pub(super) fn read(&mut self, now: Duration, places: Range<u64>) -> Duration {
        let start = if places.start == self.place { now } else { self.reach(now, places.start) };
        self.pass(start, places)
    }

    /// Adds a write to the cache; returns the time at which it is there.
    pub(super) fn write(&mut self, now: Duration, places: Range<u64>) -> Duration {
        self.remember(places);
        if self.dirty_bytes > self.mechanics.cache { self.write_out(now) } else { now }
    }

    /// Writes out the cache, upwards from the arm's position and then from the lowest one; returns the time at which
    /// that is done.
    pub(super) fn write_out(&mut self, now: Duration) -> Duration {
        let mut below = std::mem::take(&mut self.dirty);
        let above = below.split_off(&self.place);
        self.dirty_bytes = 0;
        above.into_iter().chain(below).fold(now, |now, (start, end)| {
            let start_time = self.reach(now, start);
            self.pass(start_time, start..end)
        })
    }

    /// Adds a range to the cache, merged with adjacent and overlapping ones.
    fn remember(&mut self, places: Range<u64>) {
        let Range { mut start, mut end } = places;
        while let Some((&other, &other_end)) = self.dirty.range(..=end).next_back()
            && other_end >= start
        {
            self.dirty.remove(&other);
            self.dirty_bytes -= other_end - other;
            start = start.min(other);
            end = end.max(other_end);
        }
        self.dirty.insert(start, end);
        self.dirty_bytes += end - start;
    }

    /// The time at which a position is under the head.
    fn reach(&self, now: Duration, place: u64) -> Duration {
        if place == self.place && now <= self.left {
            return now;
        }
        let turn = self.mechanics.turn.as_nanos().max(1);
        let track = (u128::from(self.bandwidth) * turn / 1_000_000_000).max(1);
        let track_of = |place: u64| u128::from(place) / track;
        let arrived = if track_of(place) == track_of(self.place) {
            now
        } else {
            now.saturating_add(self.mechanics.seek(place.abs_diff(self.place)))
        };
        let wanted = u128::from(place) % track * turn / track;
        let wait = (wanted + turn - arrived.as_nanos() % turn) % turn;
        arrived.saturating_add(nanoseconds(wait))
    }

    /// Passes a range under the head, from `start` on; returns the time at which its last byte has passed.
    fn pass(&mut self, start: Duration, places: Range<u64>) -> Duration {
        self.place = places.end;
        self.left = start.saturating_add(transfer(places.end - places.start, self.bandwidth));
        self.left
    }
}

/// The time to transfer this many bytes.
pub(super) fn transfer(bytes: u64, bandwidth: u64) -> Duration {
    nanoseconds(u128::from(bytes) * 1_000_000_000 / u128::from(bandwidth.max(1)))
}

fn nanoseconds(count: u128) -> Duration {
    Duration::from_nanos(count.try_into().unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const MB: u64 = 1_000_000;

    /// Rotates in 10 ms, in which a megabyte passes; a seek takes 1 ms, plus 10 ms across all of its 400 MB.
    fn arm() -> Arm {
        let mechanics =
            Mechanics { settle: MS, stroke: 10 * MS, turn: 10 * MS, span: 400 * MB, cache: 8 * MB };
        Arm::new(mechanics, 100 * MB)
    }

    #[test]
    fn a_seek_grows_with_the_root_of_the_distance() {
        let mechanics = arm().mechanics;
        let ten_microseconds = |distance| mechanics.seek(distance).as_nanos().div_ceil(10_000);
        assert_eq!([0, 4 * MB, 100 * MB, 400 * MB].map(ten_microseconds), [100, 200, 600, 1100]);
        assert_eq!(mechanics.seek(u64::MAX), mechanics.seek(400 * MB));
        let third = Mechanics::DESKTOP.seek(Mechanics::DESKTOP.span / 3).as_micros();
        assert!((8_800..9_000).contains(&third), "{third}");
    }

    #[test]
    fn who_comes_late_waits_for_the_place_to_come_by_again() {
        let mut arm = arm();
        assert_eq!(arm.write(Duration::ZERO, 0..MB / 2), Duration::ZERO);
        assert_eq!(arm.write_out(Duration::ZERO), 5 * MS);
        arm.write(5 * MS, MB / 2..MB * 6 / 10);
        assert_eq!(arm.write_out(5 * MS), 6 * MS, "in time");
        arm.write(7 * MS, MB * 6 / 10..MB * 7 / 10);
        assert_eq!(arm.write_out(7 * MS), 17 * MS, "a millisecond late: a turn, and its bytes");
        arm.write(17 * MS, MB * 9 / 10..MB);
        assert_eq!(arm.write_out(17 * MS), 20 * MS, "what lies ahead on the track comes by");
        arm.write(20 * MS, 100 * MB..101 * MB);
        assert_eq!(arm.write_out(20 * MS), 40 * MS, "a seek of 6 ms, the rest of the turn");
    }

    #[test]
    fn reads_go_on_without_a_wait() {
        let mut arm = arm();
        assert_eq!(arm.read(Duration::ZERO, 0..MB / 10), MS);
        assert_eq!(arm.read(4 * MS, MB / 10..MB * 2 / 10), 5 * MS);
        assert_eq!(arm.read(5 * MS, MB / 10..MB * 2 / 10), 12 * MS, "again: a turn");
    }

    #[test]
    fn a_cache_is_written_in_the_order_of_places() {
        let mut arm = arm();
        arm.read(Duration::ZERO, 0..3 * MB);
        for place in [5, 1, 3, 4] {
            arm.write(30 * MS, place * MB..(place + 1) * MB);
        }
        // Upwards from 3: three megabytes in a row; then back to 1, with a seek of some milliseconds.
        assert_eq!(arm.write_out(30 * MS), 80 * MS);
        assert_eq!(arm.place, 2 * MB);
        assert_eq!(arm.write_out(80 * MS), 80 * MS, "it is empty");
    }

    #[test]
    fn what_is_written_again_in_the_cache_is_written_out_once() {
        let mut arm = arm();
        for _ in 0..100 {
            assert_eq!(arm.write(Duration::ZERO, 0..MB), Duration::ZERO);
        }
        arm.write(Duration::ZERO, 3 * MB..4 * MB);
        arm.write(Duration::ZERO, MB / 2..3 * MB);
        assert_eq!((arm.dirty_bytes, arm.dirty.len()), (4 * MB, 1));
        assert_eq!(arm.write_out(Duration::ZERO), 40 * MS);
    }

    #[test]
    fn a_full_cache_holds_its_writer_up() {
        let mut arm = arm();
        for place in 0..8 {
            assert_eq!(arm.write(Duration::ZERO, place * MB..(place + 1) * MB), Duration::ZERO);
        }
        assert_eq!(arm.write(Duration::ZERO, 8 * MB..9 * MB), 90 * MS);
        assert_eq!(arm.dirty_bytes, 0);
    }

    #[test]
    fn nothing_overflows() {
        let nothing = Mechanics {
            settle: Duration::MAX,
            stroke: MS,
            turn: Duration::ZERO,
            span: 0,
            cache: 0,
        };
        let mut arm = Arm::new(nothing, 1);
        arm.write(Duration::MAX, 0..u64::MAX);
        assert_eq!(arm.read(Duration::MAX, 5..6), Duration::MAX);
    }
}
