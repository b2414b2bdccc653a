//! The unified map: the layer and offset of each guest range.
//!
//! One cache serves the whole chain. It is divided into *units*, the smallest cluster or subcluster size of any layer,
//! and kept in *slices* of [`SLICE_UNITS`] units. A lookup costs the same at any depth. A lookup in a slice that is
//! not cached merges it over the layers, all of them or down to those that it needs (see [`resolve`]).

mod entry;
#[cfg(all(test, loom))]
mod interleavings;
mod latency;
pub mod resolve;

pub use entry::{Unit, UnitKind};

use crate::chain::LayerIndex;
use isobath_image::ids;
use isobath_image::per_thread::PerThread;
use isobath_image::sabotage::{self, Sabotage};
use isobath_image::violated;
use isobath_qcow2::CompressedCluster;
use isobath_sync::atomic::{AtomicBool, AtomicU64, Ordering};
use isobath_sync::{Mutex, RwLock};
use latency::Latencies;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64 as Count, AtomicUsize};
use std::time::Instant;

/// Units in a slice: with 64 KiB clusters, 64 MiB of the disk in 8 KiB of memory.
pub const SLICE_UNITS: usize = if cfg!(loom) { 2 } else { 1024 };
/// Whether the map is checked when it changes. Loom explores it as it is otherwise.
const CHECKED: bool = cfg!(all(debug_assertions, not(loom)));
const SHARDS: usize = if cfg!(loom) { 2 } else { 64 };
/// Memory of a slice besides its units: the allocation, the shard's entry and the clock's.
const SLICE_OVERHEAD: usize = 192;

/// A run of guest bytes with one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First guest byte.
    pub guest: u64,
    /// Bytes; never zero.
    pub length: u64,
    /// Where they come from.
    pub source: Source,
}

/// Consecutive extents; most requests have only one.
pub type Extents = SmallVec<[Extent; 2]>;

/// The guest bytes of consecutive extents.
pub fn guest_range(extents: &[Extent]) -> Range<u64> {
    let start = extents.first().map_or(0, |extent| extent.guest);
    start..extents.last().map_or(start, |extent| extent.guest + extent.length)
}

/// Where the bytes of an extent come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// No layer has them: zeroes.
    Absent,
    /// A layer marks them as zeroes.
    Zero(LayerIndex),
    /// Plain data.
    Data {
        /// The layer that has it.
        layer: LayerIndex,
        /// Byte offset in the layer's data file of the extent's first byte.
        host: u64,
        /// In the active layer and owned by it alone: writes may go there.
        in_place: bool,
    },
    /// A compressed cluster of which the extent is a part.
    Compressed {
        /// The layer that has it.
        layer: LayerIndex,
        /// Where it lies in the layer's file.
        cluster: CompressedCluster,
    },
    /// The layer's tables are not valid here: reading is an error.
    Invalid(LayerIndex),
}

impl Source {
    /// The layer that determines the bytes, if one does.
    pub fn layer(&self) -> Option<LayerIndex> {
        match *self {
            Self::Absent => None,
            Self::Zero(layer)
            | Self::Data { layer, .. }
            | Self::Compressed { layer, .. }
            | Self::Invalid(layer) => Some(layer),
        }
    }
}

/// A slice of the map.
pub struct Slice {
    units: Box<[AtomicU64; SLICE_UNITS]>,
    /// Compressed clusters that units refer to by index; entries are only ever appended.
    compressed: RwLock<Vec<CompressedCluster>>,
    used: AtomicBool,
}

impl Slice {
    /// A slice of these units; compressed ones refer to `compressed` by index.
    pub fn new(units: &[Unit; SLICE_UNITS], compressed: Vec<CompressedCluster>) -> Self {
        let units = Box::new(units.map(|unit| AtomicU64::new(unit.bits())));
        Self { units, compressed: RwLock::new(compressed), used: AtomicBool::new(false) }
    }

    fn unit(&self, index: usize) -> Unit {
        match self.units.get(index) {
            Some(unit) => Unit::from_bits(unit.load(Ordering::Acquire)),
            None => violated("a unit is looked up in its own slice"),
        }
    }

    fn set(&self, range: Range<usize>, value: impl Fn(usize) -> Unit) {
        let foreign = sabotage::is(Sabotage::ForeignUnit);
        let range = if foreign { range.start..SLICE_UNITS + 1 } else { range };
        let Some(units) = self.units.get(range) else {
            violated("units are changed in their own slice");
        };
        for (step, unit) in units.iter().enumerate() {
            unit.store(value(step).bits(), Ordering::Release);
        }
    }

    fn add_compressed(&self, cluster: CompressedCluster) -> u32 {
        let mut list = self.compressed.write();
        list.push(cluster);
        (list.len() - 1) as u32
    }

    fn source(&self, unit: Unit, within: u64, unit_bits: u32, active: LayerIndex) -> Source {
        let layer = unit.layer();
        match unit.kind() {
            UnitKind::Absent => Source::Absent,
            UnitKind::Zero => Source::Zero(layer),
            UnitKind::Invalid => Source::Invalid(layer),
            UnitKind::Data => Source::Data {
                layer,
                host: unit.host(unit_bits) + within,
                in_place: unit.in_place() && layer == active,
            },
            UnitKind::Compressed => {
                let list = self.compressed.read();
                match list.get(unit.compressed_index() as usize) {
                    Some(&cluster) => Source::Compressed { layer, cluster },
                    None => violated("a slice has every compressed cluster that its units name"),
                }
            }
        }
    }

    /// Where the bytes of a unit come from.
    pub fn unit_source(&self, index: usize, unit_bits: u32) -> Source {
        let unit = self.unit(index);
        self.source(unit, 0, unit_bits, unit.layer())
    }

    fn cost(&self) -> usize {
        self.units.len() * 8 + SLICE_OVERHEAD
    }
}

#[derive(Default)]
struct Shard {
    slices: FxHashMap<u64, Arc<Slice>>,
    /// Incremented by every update, so that a slice resolved meanwhile is not considered current.
    generation: u64,
}

/// Counters of the map, each since the disk was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MapStats {
    /// Lookups answered from the cache.
    pub hits: u64,
    /// Hits that found no layer owning the range.
    pub unallocated_hits: u64,
    /// Lookups that had to resolve a slice.
    pub misses: u64,
    /// Bytes of memory that the cached slices take.
    pub bytes: u64,
    /// The limit of `bytes`.
    pub budget: u64,
    /// The median time of a lookup answered from the cache, in nanoseconds, from a sample of one in 64, including the
    /// cost of reading the clock; 0 without a sample.
    pub lookup_median_ns: u64,
    /// The time that 99 of 100 of them do not exceed.
    pub lookup_p99_ns: u64,
}

/// The unified cache.
pub struct Map {
    unit_bits: u32,
    shards: Box<[RwLock<Shard>; SHARDS]>,
    clock: Mutex<VecDeque<u64>>,
    /// The layer that takes writes; units of other layers are never in place.
    active: AtomicU16,
    budget: AtomicUsize,
    bytes: AtomicU64,
    looks: PerThread<Looks>,
    latencies: Latencies,
}

/// The lookups of one thread.
#[derive(Default)]
struct Looks {
    hits: Count,
    unallocated: Count,
    misses: Count,
}

/// One lookup in this many is timed.
const TIMED: u64 = 64;

/// The result of a lookup.
pub enum Lookup {
    /// The extents cover the range.
    Found,
    /// This slice must be resolved first.
    Missing(u64),
}

impl Map {
    /// A map of units of `1 << unit_bits` bytes that keeps at most `budget` bytes of slices (but
    /// always at least a few), of a chain whose layer `active` takes writes.
    pub fn new(unit_bits: u32, budget: usize, active: LayerIndex) -> Self {
        let least = 4 * (SLICE_UNITS * 8 + SLICE_OVERHEAD);
        Self {
            unit_bits,
            shards: Box::new(std::array::from_fn(|_| RwLock::default())),
            clock: Mutex::default(),
            active: AtomicU16::new(active.get()),
            budget: AtomicUsize::new(budget.max(least)),
            bytes: AtomicU64::new(0),
            looks: PerThread::default(),
            latencies: Latencies::default(),
        }
    }

    /// Raises the limit to `budget` bytes of slices if it is lower.
    pub fn raise_budget(&self, budget: usize) {
        self.budget.fetch_max(budget, Ordering::Relaxed);
    }

    fn budget(&self) -> u64 {
        self.budget.load(Ordering::Relaxed) as u64
    }

    fn active(&self) -> LayerIndex {
        LayerIndex::new(self.active.load(Ordering::Relaxed))
    }

    /// Sets the layer that takes writes. No request may be in flight.
    pub fn set_active(&self, layer: LayerIndex) {
        self.active.store(layer.get(), Ordering::Relaxed);
    }

    /// log2 of the unit's size in bytes.
    pub const fn unit_bits(&self) -> u32 {
        self.unit_bits
    }

    /// log2 of the bytes that a slice covers.
    pub const fn slice_bits(&self) -> u32 {
        self.unit_bits + SLICE_UNITS.trailing_zeros()
    }

    fn shard(&self, slice: u64) -> &RwLock<Shard> {
        &self.shards[slice as usize % SHARDS]
    }

    /// Appends the extents of the guest bytes in `range`, merged where they continue each other.
    pub fn lookup(&self, range: Range<u64>, extents: &mut Extents) -> Lookup {
        let (_, looks) = self.looks.mine();
        // A simulation has no clock of the machine's.
        if !looks.hits.load(Ordering::Relaxed).is_multiple_of(TIMED) || ids::are_seeded() {
            return self.look(looks, range, extents);
        }
        let begin = Instant::now();
        let found = self.look(looks, range, extents);
        if matches!(found, Lookup::Found) {
            self.latencies.record(begin.elapsed());
        }
        found
    }

    fn look(&self, looks: &Looks, range: Range<u64>, extents: &mut Extents) -> Lookup {
        let mut at = range.start;
        while at < range.end {
            let slice_index = at >> self.slice_bits();
            let slice_start = slice_index << self.slice_bits();
            let end = range.end.min(slice_start + (1 << self.slice_bits()));
            let shard = self.shard(slice_index).read();
            let Some(slice) = shard.slices.get(&slice_index) else {
                looks.misses.fetch_add(1, Ordering::Relaxed);
                return Lookup::Missing(slice_index);
            };
            if !slice.used.load(Ordering::Relaxed) {
                slice.used.store(true, Ordering::Relaxed);
            }
            looks.hits.fetch_add(1, Ordering::Relaxed);
            let absent = self.lookup_in(slice, slice_start, at..end, extents);
            if absent > 0 {
                looks.unallocated.fetch_add(absent, Ordering::Relaxed);
            }
            at = end;
        }
        Lookup::Found
    }

    /// Appends the extents of a part of a slice; returns how many of them no layer has.
    fn lookup_in(
        &self,
        slice: &Slice,
        slice_start: u64,
        range: Range<u64>,
        extents: &mut Extents,
    ) -> u64 {
        let mut absent = 0;
        let mut at = range.start;
        let mut index = ((at - slice_start) >> self.unit_bits) as usize;
        let active = self.active();
        while at < range.end {
            let first = slice.unit(index);
            let within = at - (slice_start + ((index as u64) << self.unit_bits));
            let mut last = first;
            loop {
                index += 1;
                if slice_start + ((index as u64) << self.unit_bits) >= range.end {
                    break;
                }
                let next = slice.unit(index);
                if !last.continues(next) {
                    break;
                }
                last = next;
            }
            let end = range.end.min(slice_start + ((index as u64) << self.unit_bits));
            if first.kind() == UnitKind::Absent {
                absent += 1;
            }
            let extent = Extent {
                guest: at,
                length: end - at,
                source: slice.source(first, within, self.unit_bits, active),
            };
            push_extent(extents, extent);
            at = end;
        }
        absent
    }

    /// Checks that the units of a slice are of layers of the chain.
    fn check_slice(&self, slice: &Slice, units: Range<usize>) {
        let clusters = slice.compressed.read().len();
        for unit in units.map(|index| slice.unit(index)) {
            if unit.layer() > self.active() {
                violated("a unit is of a layer of the chain");
            }
            let is_compressed = unit.kind() == UnitKind::Compressed;
            if is_compressed && unit.compressed_index() as usize >= clusters {
                violated("a slice has every compressed cluster that its units name");
            }
        }
    }

    /// Checks that the slices take the memory that is counted, and that each of them can be evicted.
    fn check_memory(&self, clock: &VecDeque<u64>) {
        let shards: Vec<_> = self.shards.iter().map(|shard| shard.read()).collect();
        let slices = || shards.iter().flat_map(|shard| &shard.slices);
        let bytes: u64 = slices().map(|(_, slice)| slice.cost() as u64).sum();
        if bytes != self.bytes.load(Ordering::Relaxed) {
            violated("the memory that is counted is that of the slices");
        }
        if slices().count() > clock.len() {
            violated("each slice can be evicted");
        }
        let misplaced = |(number, shard): (usize, &Shard)| {
            shard.slices.keys().any(|index| *index as usize % SHARDS != number)
        };
        if shards.iter().map(|shard| &**shard).enumerate().any(misplaced) {
            violated("a slice is in its own shard");
        }
    }

    /// Called before resolving a slice; pass the result to [`insert`](Self::insert).
    pub fn generation(&self, slice: u64) -> u64 {
        self.shard(slice).read().generation
    }

    /// Adds a slice resolved since `generation`. Returns `false` if there was an update in between: resolve it again.
    pub fn insert(&self, index: u64, generation: u64, slice: Slice) -> bool {
        let cost = slice.cost() as u64;
        let mut clock = self.clock.lock();
        {
            let mut shard = self.shard(index).write();
            if shard.generation != generation && !sabotage::is(Sabotage::StaleSlice) {
                return false;
            }
            if CHECKED && shard.generation == generation {
                self.check_slice(&slice, 0..SLICE_UNITS);
            }
            if shard.slices.insert(index, Arc::new(slice)).is_some() {
                return true;
            }
        }
        clock.push_back(index);
        let bytes = self.bytes.fetch_add(cost, Ordering::Relaxed) + cost;
        if bytes > self.budget() {
            self.evict(&mut clock);
            if CHECKED && clock.len() <= SHARDS {
                self.check_memory(&clock);
            }
        }
        true
    }

    /// Appends the extents of `range`, a part of a slice that was resolved since `generation` as far as they need, and
    /// is not kept. Returns `false` if there was an update in between: resolve it again.
    pub fn lookup_once(
        &self,
        index: u64,
        generation: u64,
        slice: &Slice,
        range: Range<u64>,
        extents: &mut Extents,
    ) -> bool {
        let shard = self.shard(index).read();
        if shard.generation != generation && !sabotage::is(Sabotage::StaleSlice) {
            return false;
        }
        self.lookup_in(slice, index << self.slice_bits(), range, extents);
        true
    }

    /// Second chance: a slice used since the hand last passed stays for another round.
    fn evict(&self, clock: &mut VecDeque<u64>) {
        let mut steps = clock.len() * 2;
        while self.bytes.load(Ordering::Relaxed) > self.budget() && steps > 0 {
            steps -= 1;
            let Some(index) = clock.pop_front() else { return };
            let mut shard = self.shard(index).write();
            let Some(slice) = shard.slices.get(&index) else { continue };
            if slice.used.swap(false, Ordering::Relaxed) {
                clock.push_back(index);
                continue;
            }
            let cost = slice.cost() as u64;
            shard.slices.remove(&index);
            self.bytes.fetch_sub(cost, Ordering::Relaxed);
        }
    }

    /// Changes those units of `range` (aligned to units) that are cached: `unit` is called with the byte offset of each
    /// unit from the range's start.
    pub fn update(&self, range: Range<u64>, unit: impl Fn(u64) -> Unit) {
        self.change(range, |slice, units, from_start| {
            slice.set(units, |step| unit(from_start + ((step as u64) << self.unit_bits)));
        });
    }

    /// Makes the units of `range` part of a compressed cluster.
    pub fn update_compressed(
        &self,
        range: Range<u64>,
        layer: LayerIndex,
        cluster: CompressedCluster,
    ) {
        self.change(range, |slice, units, _| {
            let index = slice.add_compressed(cluster);
            slice.set(units, |_| Unit::compressed(layer, index));
        });
    }

    fn change(&self, range: Range<u64>, apply: impl Fn(&Slice, Range<usize>, u64)) {
        let mut at = range.start;
        while at < range.end {
            let slice_index = at >> self.slice_bits();
            let slice_start = slice_index << self.slice_bits();
            let end = range.end.min(slice_start + (1 << self.slice_bits()));
            let mut shard = self.shard(slice_index).write();
            shard.generation += 1;
            if let Some(slice) = shard.slices.get(&slice_index) {
                let first = ((at - slice_start) >> self.unit_bits) as usize;
                let count = (end - at).div_ceil(1 << self.unit_bits) as usize;
                apply(slice, first..first + count, at - range.start);
                if CHECKED {
                    self.check_slice(slice, first..first + count);
                }
            }
            at = end;
        }
    }

    /// The cached source of the byte at `guest`, as a unit of a map with smaller units; `None` also if it is
    /// compressed.
    pub fn cached(&self, guest: u64, unit_bits: u32) -> Option<Unit> {
        let slice = guest >> self.slice_bits();
        let within = guest - (slice << self.slice_bits());
        let index = (within >> self.unit_bits) as usize;
        let unit = self.shard(slice).read().slices.get(&slice)?.unit(index);
        match unit.kind() {
            UnitKind::Data => {
                let host = unit.host(self.unit_bits) + within % (1 << self.unit_bits);
                Unit::data(unit.layer(), host, unit_bits, unit.in_place())
            }
            UnitKind::Compressed => None,
            UnitKind::Absent | UnitKind::Zero | UnitKind::Invalid => Some(unit),
        }
    }

    /// Rewrites the cache for a changed chain; no request may be in flight. `unit` returns a unit's new form, or `None`
    /// if that is unknown: its slice is then evicted.
    pub fn rewrite(&self, unit: impl Fn(u64, Unit) -> Option<Unit>) {
        for shard in self.shards.iter() {
            let mut shard = shard.write();
            shard.generation += 1;
            shard.slices.retain(|index, slice| {
                let start = index << self.slice_bits();
                let known = slice.units.iter().enumerate().all(|(n, place)| {
                    let old = Unit::from_bits(place.load(Ordering::Relaxed));
                    let new = unit(start + ((n as u64) << self.unit_bits), old);
                    new.is_some_and(|new| {
                        place.store(new.bits(), Ordering::Relaxed);
                        true
                    })
                });
                if !known {
                    self.bytes.fetch_sub(slice.cost() as u64, Ordering::Relaxed);
                }
                known
            });
        }
    }

    /// Evicts everything, as after a change of the chain or of the disk's size.
    pub fn clear(&self) {
        let mut clock = self.clock.lock();
        clock.clear();
        for shard in self.shards.iter() {
            let mut shard = shard.write();
            shard.generation += 1;
            for (_, slice) in shard.slices.drain() {
                self.bytes.fetch_sub(slice.cost() as u64, Ordering::Relaxed);
            }
        }
    }

    /// The counters.
    pub fn stats(&self) -> MapStats {
        let sum = |of: fn(&Looks) -> &Count| {
            self.looks.all().map(|looks| of(looks).load(Ordering::Relaxed)).sum()
        };
        MapStats {
            hits: sum(|looks| &looks.hits),
            unallocated_hits: sum(|looks| &looks.unallocated),
            misses: sum(|looks| &looks.misses),
            bytes: self.bytes.load(Ordering::Relaxed),
            budget: self.budget(),
            lookup_median_ns: self.latencies.quantile(0.5),
            lookup_p99_ns: self.latencies.quantile(0.99),
        }
    }
}

/// Appends an extent, or extends the last one if the new one continues it (across a slice boundary).
fn push_extent(extents: &mut Extents, extent: Extent) {
    if let Some(last) = extents.last_mut() {
        let continues = match (last.source, extent.source) {
            (
                Source::Data { layer, host, in_place },
                Source::Data { layer: next_layer, host: next_host, in_place: next_in_place },
            ) => {
                layer == next_layer && in_place == next_in_place && host + last.length == next_host
            }
            (a, b) => a == b,
        };
        if continues && last.guest + last.length == extent.guest {
            last.length += extent.length;
            return;
        }
    }
    extents.push(extent);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::must_panic::must_panic;

    const TOP: LayerIndex = LayerIndex::new(3);

    fn filled(map: &Map, index: u64, unit: impl Fn(usize) -> Unit) {
        let units = std::array::from_fn(unit);
        assert!(map.insert(index, map.generation(index), Slice::new(&units, Vec::new())));
    }

    fn data(n: u64) -> Unit {
        Unit::data(TOP, n << 16, 16, true).unwrap()
    }

    #[test]
    fn extents_merge_within_and_across_slices() {
        let map = Map::new(16, 1 << 20, TOP);
        let mut extents = Extents::new();
        assert!(matches!(map.lookup(0..1, &mut extents), Lookup::Missing(0)));
        filled(&map, 0, |n| data(n as u64));
        filled(&map, 1, |n| data((SLICE_UNITS + n) as u64));
        let range = 100..(1 << 26) + 100;
        assert!(matches!(map.lookup(range, &mut extents), Lookup::Found));
        let source = Source::Data { layer: TOP, host: 100, in_place: true };
        assert_eq!(extents.as_slice(), [Extent { guest: 100, length: 1 << 26, source }]);
    }

    #[test]
    fn an_update_is_seen_and_outdates_a_slice_being_resolved() {
        let map = Map::new(16, 1 << 20, TOP);
        filled(&map, 0, |_| Unit::ABSENT);
        let generation = map.generation(64);
        map.update(1 << 16..3 << 16, |from| Unit::data(TOP, (9 << 16) + from, 16, true).unwrap());
        let mut extents = Extents::new();
        map.lookup(0..4 << 16, &mut extents);
        let lengths: Vec<_> = extents.iter().map(|e| e.length >> 16).collect();
        assert_eq!(lengths, [1, 2, 1]);
        // Slice 64 shares the shard of slice 0.
        assert!(!map.insert(64, generation, Slice::new(&[Unit::ABSENT; SLICE_UNITS], Vec::new())));
    }

    #[test]
    fn the_budget_is_kept_and_used_slices_stay() {
        let map = Map::new(16, 8 * (SLICE_UNITS * 8 + SLICE_OVERHEAD), TOP);
        let mut extents = Extents::new();
        for index in 0..100 {
            filled(&map, index, |_| Unit::ABSENT);
            map.lookup(0..1, &mut extents);
            assert!(map.stats().bytes <= map.stats().budget);
        }
        extents.clear();
        assert!(matches!(map.lookup(0..1, &mut extents), Lookup::Found));
        assert!(matches!(map.lookup(1 << 26..(1 << 26) + 1, &mut extents), Lookup::Missing(1)));
    }

    #[test]
    fn compressed_units_name_their_cluster() {
        let map = Map::new(16, 1 << 20, TOP);
        filled(&map, 0, |_| Unit::ABSENT);
        let cluster =
            CompressedCluster { offset: isobath_qcow2::HostOffset::new(12345), length: 678 };
        map.update_compressed(0..1 << 16, TOP, cluster);
        let mut extents = Extents::new();
        map.lookup(10..20, &mut extents);
        assert_eq!(extents[0].source, Source::Compressed { layer: TOP, cluster });
        map.clear();
        assert!(matches!(map.lookup(0..1, &mut extents), Lookup::Missing(0)));
        assert_eq!(map.stats().bytes, 0);
    }

    #[test]
    fn units_are_in_their_slice() {
        let slice = Slice::new(&[Unit::ABSENT; SLICE_UNITS], Vec::new());
        must_panic(|| slice.unit(SLICE_UNITS), "a unit is looked up in its own slice");
        let set = || slice.set(SLICE_UNITS - 1..SLICE_UNITS + 1, |_| Unit::ABSENT);
        must_panic(set, "units are changed in their own slice");
    }

    #[test]
    fn units_name_what_there_is() {
        let map = Map::new(16, 1 << 20, TOP);
        let slice = |unit| Slice::new(&[unit; SLICE_UNITS], Vec::new());
        let foreign = slice(Unit::zero(LayerIndex::new(4)));
        must_panic(|| map.check_slice(&foreign, 0..1), "a unit is of a layer of the chain");
        let compressed = slice(Unit::compressed(TOP, 0));
        let every = "a slice has every compressed cluster that its units name";
        must_panic(|| compressed.unit_source(0, 16), every);
        must_panic(|| map.check_slice(&compressed, 0..1), every);
    }

    #[test]
    fn slices_are_counted_and_each_is_in_its_shard() {
        type Change = fn(&Map, &mut VecDeque<u64>);
        let cases: [(&str, Change); 3] = [
            ("the memory that is counted is that of the slices", |map, _| {
                map.bytes.fetch_add(1, Ordering::Relaxed);
            }),
            ("each slice can be evicted", |_, clock| clock.clear()),
            ("a slice is in its own shard", |map, _| {
                let slice = map.shard(0).write().slices.remove(&0).unwrap();
                map.shard(1).write().slices.insert(0, slice);
            }),
        ];
        for (what, change) in cases {
            let map = Map::new(16, 1 << 20, TOP);
            filled(&map, 0, |_| Unit::ABSENT);
            let mut clock = map.clock.lock().clone();
            map.check_memory(&clock);
            change(&map, &mut clock);
            must_panic(|| map.check_memory(&clock), what);
        }
    }
}
