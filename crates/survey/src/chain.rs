//! The survey's results for each chain.

use crate::clusters::Counted;
use crate::cost;
use crate::fleet::{Flags, Fleet, Image};
use crate::link::{Links, below, chain};
use crate::{Survey, exact};
use serde::{Serialize, Serializer};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// How many hidden bytes in a chain's own layers justify merging, whatever its length.
pub(crate) const MERGE_GAIN: u64 = 1 << 30;
/// Longer chains are worth an index: two batches of reads resolve only this many layers.
pub(crate) const INDEX_ABOVE: u32 = 12;

/// What to do about a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Advice {
    /// It is incomplete: fix the problems first.
    Repair,
    /// Merge the layers that only this chain uses.
    Merge,
    /// Write a direct-access index: merging is not worth it, or not possible.
    Index,
    /// Leave it unchanged: none of these, or its lower layers are in an object store.
    Leave,
}

impl Advice {
    /// Every variant.
    pub const ALL: [Self; 4] = [Self::Repair, Self::Merge, Self::Index, Self::Leave];

    /// The name, for programs and users.
    pub fn word(self) -> &'static str {
        match self {
            Self::Repair => "repair",
            Self::Merge => "merge",
            Self::Index => "index",
            Self::Leave => "leave",
        }
    }
}

impl Serialize for Advice {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.word())
    }
}

/// Sums over the files from an image down to its base.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sums {
    held: u64,
    qemu_memory: u64,
    oldest: i64,
    /// The average number of L2 tables that a cold slice needs.
    tables: f32,
    unit_bits: u8,
    cut: bool,
    stored: bool,
}

/// The sums of every image.
pub(crate) fn sums(fleet: &Fleet, links: &Links, counted: Option<&Counted>) -> Vec<Sums> {
    let own = |number: u32| own_sums(fleet.image(number), number, counted);
    let mut sums: Vec<Sums> = fleet.all_numbers().map(own).collect();
    for &number in links.top_down.iter().rev() {
        let image = fleet.image(number);
        let Some(parent) = below(fleet, number) else { continue };
        let base = if image.flags.has(Flags::RAW_BACKING) {
            // It is read as raw: its tables are not looked up, and its own chain does not count.
            Sums { tables: 0.0, unit_bits: u8::MAX, cut: false, stored: false, ..own(parent) }
        } else {
            sums.get(parent as usize).copied().unwrap_or_default()
        };
        if let Some(sum) = sums.get_mut(number as usize) {
            sum.held = sum.held.saturating_add(base.held);
            sum.qemu_memory = sum.qemu_memory.saturating_add(base.qemu_memory);
            sum.oldest = sum.oldest.min(base.oldest);
            sum.tables += base.tables;
            sum.unit_bits = sum.unit_bits.min(base.unit_bits);
            sum.cut |= base.cut;
            sum.stored |= base.stored;
        }
    }
    sums
}

fn own_sums(image: &Image, number: u32, counted: Option<&Counted>) -> Sums {
    let qcow2 = !image.flags.has(Flags::RAW) && !image.flags.has(Flags::BROKEN);
    let extended = image.flags.has(Flags::EXTENDED_L2);
    let entry = if extended { 16 } else { 8 };
    let entries = image.disk.div_ceil(1 << image.cluster_bits);
    let table_entries = (1_u64 << image.cluster_bits) / entry;
    let tables = entries.div_ceil(table_entries).max(1);
    let share = match counted.map(|counted| counted.of(number)) {
        _ if !qcow2 => 0.0,
        Some(own) if own.counted => (f64::from(own.tables) / tables as f64).min(1.0),
        _ => 1.0,
    };
    Sums {
        held: image.held,
        qemu_memory: cost::qemu_layer_memory(((entries * entry) as f64 * share) as u64),
        oldest: image.born,
        tables: share as f32,
        unit_bits: if qcow2 { image.cluster_bits - if extended { 5 } else { 0 } } else { u8::MAX },
        cut: image.flags.has(Flags::CUT),
        stored: image.flags.has(Flags::STORED),
    }
}

/// A chain, identified by its active image.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChainRow {
    /// The active image's name; see [`exact`].
    pub image: String,
    /// The number of files from the active image to the base.
    pub length: u32,
    /// Whether the chain is complete; an incomplete one, or one whose lower layers are in a store, may be longer.
    pub whole: bool,
    /// The disk's size in bytes.
    pub disk_bytes: u64,
    /// Bytes that the chain's files occupy.
    pub held_bytes: u64,
    /// The number of files that only this chain uses.
    pub own_files: u32,
    /// Bytes that those files occupy.
    pub own_bytes: u64,
    /// Bytes of clusters in its files that no disk can see, if they were counted.
    pub hidden_bytes: Option<u64>,
    /// Creation time of the active image, in seconds since 1970.
    pub newest: i64,
    /// Creation time of the oldest file, in seconds since 1970.
    pub oldest: i64,
    /// Whether the active image has a direct-access index, valid or not.
    pub indexed: bool,
    /// The time of a cold lookup in QEMU, in microseconds; see [`cost`].
    pub qemu_cold_us: f64,
    /// The time of a warm lookup in QEMU, for data in the base, in microseconds.
    pub qemu_warm_us: f64,
    /// The time of a cold lookup in Isobath, in microseconds.
    pub isobath_cold_us: f64,
    /// The time of a cold lookup in Isobath through an index, in microseconds.
    pub indexed_cold_us: f64,
    /// Memory in QEMU, in bytes.
    pub qemu_memory_bytes: u64,
    /// Memory in Isobath, in bytes.
    pub isobath_memory_bytes: u64,
    /// What to do about it.
    pub advice: Advice,
    /// Its length after following the advice.
    pub length_after: u32,
}

/// The sort key for lists of chains, largest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SortBy {
    /// The number of files
    #[default]
    Length,
    /// Memory in QEMU
    Memory,
    /// Bytes that the chain's files occupy
    Held,
    /// Bytes that no disk can see
    Hidden,
}

impl Survey {
    /// Every chain, in the order in which the images were found.
    pub fn chains(&self) -> impl Iterator<Item = ChainRow> + '_ {
        self.links.active.iter().map(|&number| self.row(number))
    }

    /// The number of chains.
    pub fn chain_count(&self) -> usize {
        self.links.active.len()
    }

    /// The first `count` chains, ordered by `sort` and then by name.
    pub fn top(&self, count: usize, sort: SortBy) -> Vec<ChainRow> {
        // The lowest-ranked chain kept is on top, the first to be replaced.
        let mut kept: BinaryHeap<Reverse<Ranked>> = BinaryHeap::new();
        for &number in &self.links.active {
            let value = self.value(number, sort);
            if kept.len() == count {
                match kept.peek() {
                    Some(Reverse((least, ..))) if *least <= value => {}
                    _ => continue,
                }
            }
            kept.push(Reverse((value, Reverse(self.fleet.path_bytes(number)), number)));
            if kept.len() > count {
                kept.pop();
            }
        }
        kept.into_sorted_vec().into_iter().map(|Reverse((.., number))| self.row(number)).collect()
    }

    fn value(&self, number: u32, sort: SortBy) -> u64 {
        let sums = self.sums_of(number);
        match sort {
            SortBy::Length => u64::from(self.length_of(number)),
            SortBy::Memory => sums.qemu_memory,
            SortBy::Held => sums.held,
            SortBy::Hidden => self.hidden(number).unwrap_or(0),
        }
    }

    fn sums_of(&self, number: u32) -> Sums {
        self.sums.get(number as usize).copied().unwrap_or_default()
    }

    pub(crate) fn length_of(&self, number: u32) -> u32 {
        self.links.depth.get(number as usize).copied().unwrap_or(1)
    }

    fn hidden(&self, active: u32) -> Option<u64> {
        let counted = self.clusters.as_ref()?;
        Some(chain(&self.fleet, &self.links, active).map(|one| counted.of(one).hidden).sum())
    }

    /// Whether a chain is complete.
    pub(crate) fn is_whole(&self, active: u32) -> bool {
        let Sums { cut, stored, .. } = self.sums_of(active);
        !cut && !stored
    }

    /// What to do about a chain, and its length after following the advice.
    pub(crate) fn advice(&self, active: u32) -> (Advice, u32) {
        let length = self.length_of(active);
        let Sums { cut, stored, .. } = self.sums_of(active);
        if cut {
            return (Advice::Repair, length);
        }
        if stored {
            return (Advice::Leave, length);
        }
        let own = self.own(active);
        let gain = own.hidden >= MERGE_GAIN.max(own.held_below / 4);
        if own.files >= 3 && (length >= self.options.merge_at || gain) {
            return (Advice::Merge, length - own.files + 1);
        }
        let indexed = self.fleet.image(active).flags.has(Flags::INDEXED);
        if length > INDEX_ABOVE && !indexed {
            return (Advice::Index, length);
        }
        (Advice::Leave, length)
    }

    /// Sums over the files that only this chain uses.
    fn own(&self, active: u32) -> Own {
        let mut own = Own::default();
        for number in chain(&self.fleet, &self.links, active) {
            let users = self.links.children.get(number as usize).copied().unwrap_or(0);
            if users > 1 {
                break;
            }
            let held = self.fleet.image(number).held;
            own.files += 1;
            own.held += held;
            if number != active {
                own.held_below += held;
            }
            own.hidden += self.clusters.as_ref().map_or(0, |counted| counted.of(number).hidden);
        }
        own
    }

    fn row(&self, active: u32) -> ChainRow {
        let image = self.fleet.image(active);
        let sums = self.sums_of(active);
        let length = self.length_of(active);
        let own = self.own(active);
        let (advice, length_after) = self.advice(active);
        let microseconds = |nanoseconds: f64| (nanoseconds / 100.0).round() / 10.0;
        ChainRow {
            image: exact(&self.fleet.path_bytes(active)),
            length,
            whole: self.is_whole(active),
            disk_bytes: image.disk,
            held_bytes: sums.held,
            own_files: own.files,
            own_bytes: own.held,
            hidden_bytes: self.hidden(active),
            newest: image.born,
            oldest: sums.oldest,
            indexed: image.flags.has(Flags::INDEXED),
            qemu_cold_us: microseconds(cost::qemu_cold(length)),
            qemu_warm_us: microseconds(cost::qemu_warm(length)),
            isobath_cold_us: microseconds(cost::our_cold(f64::from(sums.tables))),
            indexed_cold_us: microseconds(cost::indexed_cold()),
            qemu_memory_bytes: sums.qemu_memory,
            isobath_memory_bytes: cost::our_memory(
                image.disk,
                1_u64.checked_shl(u32::from(sums.unit_bits)).unwrap_or(1 << 16),
                length,
            ),
            advice,
            length_after,
        }
    }
}

/// A chain's sort key, name (the first in byte order ranks highest) and number.
type Ranked = (u64, Reverse<Vec<u8>>, u32);

/// Sums over the files that only one chain uses.
#[derive(Default)]
struct Own {
    files: u32,
    held: u64,
    /// Like `held`, but without the active image.
    held_below: u64,
    hidden: u64,
}
