//! Small programs that use the map, in every possible interleaving of their threads.

use super::*;
use isobath_sync::explore;

const BITS: u32 = 16;
const TOP: LayerIndex = LayerIndex::new(1);

/// The map, and the tables that it caches: the place of each unit's data, in units.
struct Disk {
    map: Map,
    tables: [AtomicU64; 12],
}

fn disk() -> Disk {
    Disk { map: Map::new(BITS, 0, TOP), tables: [0; 12].map(AtomicU64::new) }
}

/// Like [`disk`], but the map is full of unused slices.
fn full() -> Disk {
    let disk = disk();
    for slice in 0..4 {
        resolve(&disk, slice);
    }
    assert!(disk.map.stats().bytes == disk.map.stats().budget);
    disk
}

fn unit(host: u64) -> Unit {
    match host {
        0 => Unit::ABSENT,
        _ => Unit::data(TOP, host << BITS, BITS, true).unwrap(),
    }
}

fn bytes(unit: usize) -> Range<u64> {
    (unit as u64) << BITS..(unit as u64 + 1) << BITS
}

/// A request changes a unit: in the tables, then in the map.
fn write(disk: &Disk, at: usize, host: u64) {
    disk.tables[at].store(host, Ordering::Release);
    disk.map.update(bytes(at), |_| unit(host));
}

fn resolved(disk: &Disk, slice: u64) -> Slice {
    let units = [0, 1]
        .map(|n| unit(disk.tables[slice as usize * SLICE_UNITS + n].load(Ordering::Acquire)));
    Slice::new(&units, Vec::new())
}

fn resolve(disk: &Disk, slice: u64) {
    loop {
        let generation = disk.map.generation(slice);
        if disk.map.insert(slice, generation, resolved(disk, slice)) {
            return;
        }
    }
}

/// The place of a unit's data according to the map.
fn find(disk: &Disk, at: usize) -> u64 {
    loop {
        let mut extents = Extents::new();
        match disk.map.lookup(bytes(at), &mut extents) {
            Lookup::Missing(slice) => resolve(disk, slice),
            Lookup::Found => return place(&extents),
        }
    }
}

/// The place of a unit's data according to a slice that is not kept.
fn find_once(disk: &Disk, at: usize) -> u64 {
    let slice = (at / SLICE_UNITS) as u64;
    loop {
        let generation = disk.map.generation(slice);
        let part = resolved(disk, slice);
        let mut extents = Extents::new();
        if disk.map.lookup_once(slice, generation, &part, bytes(at), &mut extents) {
            return place(&extents);
        }
    }
}

fn place(extents: &[Extent]) -> u64 {
    match extents {
        [Extent { source: Source::Absent, .. }] => 0,
        [Extent { source: Source::Data { layer: TOP, host, in_place: true }, .. }] => host >> BITS,
        _ => panic!("{extents:?}"),
    }
}

/// Checks that the map matches the tables, and that its size is correct.
fn is_current(disk: &Disk) {
    for (at, host) in disk.tables.iter().enumerate() {
        let mut extents = Extents::new();
        if matches!(disk.map.lookup(bytes(at), &mut extents), Lookup::Found) {
            assert_eq!(find(disk, at), host.load(Ordering::Acquire), "unit {at}");
        }
    }
    counts_are_right(disk);
}

fn counts_are_right(disk: &Disk) {
    let slices: usize = disk.map.shards.iter().map(|shard| shard.read().slices.len()).sum();
    let cost = (SLICE_UNITS * 8 + SLICE_OVERHEAD) as u64;
    let stats = disk.map.stats();
    assert_eq!(stats.bytes, slices as u64 * cost);
    assert!(stats.bytes <= stats.budget);
    assert_eq!(disk.map.clock.lock().len(), slices);
}

#[test]
fn a_slice_resolved_during_an_update_is_not_stale() {
    let tasks: &[fn(&Disk)] = &[
        |d| {
            write(d, 0, 5);
            assert_eq!(find(d, 0), 5);
        },
        |d| assert!([0, 5].contains(&find(d, 0))),
        |d| assert!([0, 5].contains(&find(d, 0))),
    ];
    explore("Map, an update and two that resolve", 2, disk, tasks, is_current);
}

#[test]
fn a_slice_that_is_not_kept_is_not_stale() {
    let tasks: &[fn(&Disk)] = &[
        |d| {
            write(d, 0, 5);
            assert_eq!(find_once(d, 0), 5);
        },
        |d| {
            let first = find_once(d, 0);
            assert!(first == 0 || first == 5 && find_once(d, 0) == 5);
        },
        |d| {
            if find(d, 0) == 5 {
                assert_eq!(find_once(d, 0), 5);
            }
        },
    ];
    explore("Map, an update and slices that are not kept", 2, disk, tasks, is_current);
}

#[test]
fn updates_in_one_shard_do_not_hide_each_other() {
    let tasks: &[fn(&Disk)] = &[
        |d| {
            write(d, 0, 5);
            assert_eq!(find(d, 0), 5);
        },
        |d| {
            // Slices 0 and 2 share a shard.
            write(d, 4, 6);
            assert_eq!(find(d, 4), 6);
        },
        |d| {
            find(d, 1);
            find(d, 4);
        },
    ];
    explore("Map, two updates in a shard and a look-up", 2, disk, tasks, is_current);
}

#[test]
fn a_look_up_over_units_that_change_finds_each_old_or_new() {
    let tasks: &[fn(&Disk)] = &[
        |d| {
            for (at, host) in [(0, 5), (1, 6)] {
                d.tables[at].store(host, Ordering::Release);
            }
            d.map.update(bytes(0).start..bytes(1).end, |from| unit(5 + (from >> BITS)));
        },
        |d| assert!([0, 5].contains(&find(d, 0)) && [0, 6].contains(&find(d, 1))),
    ];
    explore("Map, an update of two units and look-ups", 3, full, tasks, is_current);
}

#[test]
fn the_budget_holds_whoever_adds() {
    let tasks: &[fn(&Disk)] = &[
        |d| assert_eq!(find(d, 8), 0),
        |d| assert_eq!(find(d, 10), 0),
        |d| {
            write(d, 0, 5);
            assert_eq!(find(d, 0), 5);
        },
    ];
    explore("Map, two slices too many and an update", 2, full, tasks, is_current);
}

#[test]
fn what_is_resolved_while_all_is_forgotten_is_not_of_before() {
    let tasks: &[fn(&Disk)] = &[
        |d| {
            // The size changed: every table is read again.
            d.tables[0].store(5, Ordering::Release);
            d.map.clear();
            assert_eq!(find(d, 0), 5);
        },
        |d| assert!([0, 5].contains(&find(d, 0))),
        |d| assert_eq!(find(d, 4), 0),
    ];
    explore("Map, forgetting and two that resolve", 2, disk, tasks, is_current);
}
