//! One zone: a run of host clusters with embedded mappings.

use crate::sabotage::{self, Sabotage};
use crate::violated;
use isobath_qcow2::embedded::{Span, ZoneId};
use isobath_qcow2::{HostOffset, Lsn, journal};
use isobath_sync::Invariants;
use std::ops::Range;

/// What a cluster of a zone holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Slot {
    /// Nothing that is referred to.
    Free,
    /// Data of a write in progress, or data that nothing refers to any more and whose space is being returned.
    Taken,
    /// The same, behind a lead block with a mapping of this LSN, which counts unless a record says otherwise.
    Left(Lsn),
    /// Data behind an embedded lead block.
    Embedded(Embedded),
    /// Data with a plain lead block.
    Plain,
}

/// What is known of an embedded lead block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Embedded {
    /// The guest cluster.
    pub cluster: u64,
    /// The LSN of the mapping; among mappings of the same cluster the latest counts.
    pub lsn: Lsn,
    /// The part of the lead block that is replaced.
    pub span: Span,
    /// The checksum that the record has of the rest of the cluster.
    pub rest: Option<u32>,
}

/// A zone in use.
#[derive(Debug)]
pub(super) struct Zone {
    pub(super) id: ZoneId,
    /// The first host cluster.
    pub(super) start: u64,
    slots: Vec<Slot>,
    /// Slots from here on were never taken.
    next: usize,
    /// Slots that were taken and are free again.
    freed: Vec<usize>,
    /// Slots before this are in space that was written before.
    prepared: usize,
    /// Zeroes are being written to slots behind these.
    pub(super) preparing: bool,
    /// Bytes that were never used read as zeroes.
    zeroed: bool,
    /// Slots whose lead block the next record lists as plain; one bit each.
    plain: Vec<u8>,
    /// A durable record lists it.
    pub(super) listed: bool,
    /// No more slots are taken.
    pub(super) frozen: bool,
    /// The record in progress no longer lists it.
    pub(super) left_out: bool,
}

impl Invariants for Zone {
    fn check_invariants(&self) {
        if self.next > self.prepared {
            violated("only prepared clusters of a zone are taken");
        }
        if self.prepared > self.slots.len() {
            violated("the prepared clusters of a zone lie in it");
        }
        if self.slots[self.next..].iter().any(|slot| *slot != Slot::Free) {
            violated("a cluster that was never taken is free");
        }
        if !self.listed && self.next > 0 {
            violated("a zone is used once a durable record lists it");
        }
        let mut freed = vec![false; self.next];
        for &place in &self.freed {
            match freed.get_mut(place) {
                None => violated("a cluster is free again after it was taken"),
                Some(true) => violated("a cluster of a zone is free once"),
                Some(freed) => *freed = true,
            }
            if self.slots.get(place) != Some(&Slot::Free) {
                violated("a cluster that can be taken again is free");
            }
            if self.is_plain(place) {
                violated("a cluster that may begin with any bytes is not used for a mapping again");
            }
        }
        if self.left_out && !self.is_spent() {
            violated("a zone with mappings is listed");
        }
    }
}

impl Zone {
    /// A zone of the host clusters in `area`. Only `prepared` space is used, unless that makes no difference.
    pub(super) fn new(area: &Range<u64>, id: ZoneId, zeroed: bool, prepared: bool) -> Self {
        let count = (area.end - area.start) as usize;
        Self {
            id,
            start: area.start,
            slots: vec![Slot::Free; count],
            next: 0,
            freed: Vec::new(),
            prepared: if prepared { count } else { 0 },
            preparing: false,
            zeroed,
            plain: vec![0; count.div_ceil(8)],
            listed: false,
            frozen: false,
            left_out: false,
        }
    }

    pub(super) fn clusters(&self) -> Range<u64> {
        self.start..self.start + self.slots.len() as u64
    }

    /// The slot of a host cluster.
    pub(super) fn slot(&self, cluster: u64) -> Option<Slot> {
        let place = cluster.checked_sub(self.start)?;
        self.slots.get(place as usize).copied()
    }

    /// Sets what a host cluster of the zone holds.
    pub(super) fn set(&mut self, cluster: u64, slot: Slot) {
        match self.slots.get_mut((cluster - self.start) as usize) {
            Some(place) => *place = slot,
            None => violated("a cluster of a zone has a slot"),
        }
    }

    /// Takes a free host cluster; also returns whether it holds zeroes.
    pub(super) fn take(&mut self) -> Option<(u64, bool)> {
        if self.frozen || !self.listed {
            return None;
        }
        let (place, zeroed) = if self.next < self.prepared {
            self.next += 1;
            (self.next - 1, self.zeroed)
        } else {
            (self.freed.pop()?, false)
        };
        self.frozen = self.next == self.slots.len() && self.freed.is_empty();
        self.slots[place] = Slot::Taken;
        Some((self.start + place as u64, zeroed))
    }

    /// Nothing refers to an embedded host cluster any more: it holds no record, but it is not free yet.
    pub(super) fn forget(&mut self, cluster: u64) {
        let slot = &mut self.slots[(cluster - self.start) as usize];
        if let Slot::Embedded(embedded) = slot {
            *slot = Slot::Left(embedded.lsn);
        }
    }

    /// Frees a host cluster that nothing refers to any more.
    pub(super) fn free(&mut self, cluster: u64) {
        let place = (cluster - self.start) as usize;
        // A cluster listed as plain stays plain: it may get bytes that look like a record.
        if !self.is_plain(place) && !matches!(self.slots[place], Slot::Plain) {
            self.freed.push(place);
        }
        self.slots[place] = Slot::Free;
    }

    /// Returns a taken host cluster that was not written to; `zeroed` as returned when it was taken.
    pub(super) fn put_back(&mut self, cluster: u64, zeroed: bool) {
        let place = (cluster - self.start) as usize;
        self.slots[place] = Slot::Free;
        if zeroed && place + 1 == self.next {
            self.next = place;
        } else {
            self.freed.push(place);
        }
    }

    /// Lists the lead block of a host cluster as plain in the next record.
    pub(super) fn mark(&mut self, cluster: u64) {
        let place = (cluster - self.start) as usize;
        self.plain[place / 8] |= 1 << (place % 8);
    }

    /// Whether the next record lists the lead block of a host cluster as plain.
    pub(super) fn is_marked(&self, cluster: u64) -> bool {
        self.is_plain((cluster - self.start) as usize)
    }

    fn is_plain(&self, place: usize) -> bool {
        self.plain[place / 8] >> (place % 8) & 1 == 1
    }

    /// Host clusters with an embedded lead block.
    pub(super) fn embedded(&self) -> impl Iterator<Item = (u64, Embedded)> {
        self.slots.iter().enumerate().filter_map(|(place, slot)| match slot {
            Slot::Embedded(embedded) => Some((self.start + place as u64, *embedded)),
            _ => None,
        })
    }

    /// Nothing in it is embedded, and a record says so; nor are zeroes being written to it.
    pub(super) fn is_spent(&self) -> bool {
        let done = |(place, slot): (usize, &Slot)| match slot {
            Slot::Free => true,
            Slot::Plain => self.is_plain(place),
            Slot::Taken | Slot::Left(_) | Slot::Embedded(_) => false,
        };
        let preparing = self.preparing && !sabotage::is(Sabotage::ZonePreparedLate);
        self.frozen && !preparing && self.slots.iter().enumerate().all(done)
    }

    /// The number of slots that can be taken.
    pub(super) fn room(&self) -> usize {
        if self.frozen { 0 } else { self.slots.len() - self.next + self.freed.len() }
    }

    /// The number of slots that are prepared and not taken.
    pub(super) fn ready(&self) -> usize {
        if self.frozen { 0 } else { self.prepared - self.next }
    }

    /// Host clusters that were never taken.
    pub(super) fn unused(&self) -> Range<u64> {
        self.start + self.next as u64..self.clusters().end
    }

    /// Up to `most` host clusters that are not prepared, nor being prepared.
    pub(super) fn unprepared(&self, most: u64) -> Range<u64> {
        let left = if self.frozen || self.preparing { 0 } else { self.slots.len() - self.prepared };
        let start = self.start + self.prepared as u64;
        start..start + most.min(left as u64)
    }

    /// Notes that host clusters are prepared up to this one.
    pub(super) fn prepared_to(&mut self, end: u64) {
        self.prepared = (end - self.start) as usize;
    }

    /// The zone's entry in a record's list.
    pub(super) fn entry(&self, cluster_size: u64) -> journal::Zone {
        journal::Zone {
            start: HostOffset::new(self.start * cluster_size),
            clusters: self.slots.len() as u32,
            id: self.id,
            plain: self.plain.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broken::assert_violated;

    fn embedded(cluster: u64) -> Slot {
        Slot::Embedded(Embedded { cluster, lsn: Lsn::new(cluster), span: Span::Sector, rest: None })
    }

    fn listed(count: u64) -> Zone {
        let mut zone = Zone::new(&(100..100 + count), ZoneId([7; 16]), true, true);
        zone.listed = true;
        zone
    }

    #[test]
    fn slots_are_given_out_once_and_again_when_free() {
        let mut zone = listed(3);
        assert_eq!(zone.take(), Some((100, true)));
        assert_eq!(zone.take(), Some((101, true)));
        zone.put_back(101, true);
        assert_eq!(zone.take(), Some((101, true)), "it was not written to");
        zone.set(101, embedded(5));
        zone.free(101);
        assert_eq!(zone.room(), 2);
        assert_eq!(zone.take(), Some((102, true)));
        assert_eq!(zone.take(), Some((101, false)), "it was");
        assert!(zone.frozen);
        assert_eq!(zone.take(), None);
        let mut zone = listed(2);
        assert_eq!(zone.take(), Some((100, true)));
        zone.free(100);
        // Unused clusters are taken first.
        assert_eq!(zone.take(), Some((101, true)));
        zone.free(101);
        assert_eq!(zone.take(), Some((101, false)));
        zone.put_back(101, false);
        assert_eq!(zone.take(), Some((101, false)), "it has what was there before");
    }

    #[test]
    fn a_cluster_that_is_left_keeps_the_number_of_its_mapping_until_it_is_free() {
        let mut zone = listed(1);
        assert_eq!(zone.take(), Some((100, true)));
        zone.set(100, embedded(7));
        zone.forget(100);
        assert_eq!(zone.slot(100), Some(Slot::Left(Lsn::new(7))));
        assert!(!zone.is_spent());
        zone.free(100);
        assert!(zone.is_spent());
    }

    #[test]
    fn nothing_is_given_out_before_a_record_lists_the_zone_or_where_nothing_is_prepared() {
        let mut zone = Zone::new(&(8..16), ZoneId([7; 16]), true, false);
        assert_eq!(zone.take(), None);
        zone.listed = true;
        assert_eq!(zone.take(), None);
        assert_eq!(zone.unprepared(3), 8..11);
        zone.prepared_to(11);
        assert_eq!((zone.ready(), zone.unprepared(100)), (3, 11..16));
        assert_eq!(zone.take(), Some((8, true)));
    }

    #[test]
    fn a_zone_is_not_spent_while_it_is_being_prepared() {
        let mut zone = Zone::new(&(8..16), ZoneId([7; 16]), true, false);
        zone.listed = true;
        zone.preparing = true;
        assert_eq!(zone.unprepared(3), 8..8, "only once at a time");
        zone.frozen = true;
        assert!(!zone.is_spent());
        zone.preparing = false;
        assert!(zone.is_spent());
        assert_violated("lie in it", zone, |zone| zone.prepared_to(17));
    }

    #[test]
    fn a_plain_slot_is_not_given_out_again_and_a_zone_is_spent_when_records_call_all_plain() {
        let mut zone = listed(2);
        for cluster in [100, 101] {
            assert_eq!(zone.take(), Some((cluster, true)));
            zone.set(cluster, embedded(cluster));
        }
        zone.set(100, Slot::Plain);
        zone.set(101, Slot::Plain);
        zone.mark(100);
        assert!(!zone.is_spent());
        zone.mark(101);
        assert!(zone.is_spent());
        assert_eq!(zone.entry(65536).plain, [3]);
        zone.free(101);
        assert!(zone.is_spent() && zone.room() == 0);
    }

    #[test]
    fn a_broken_zone_is_noticed() {
        let used = || {
            let mut zone = Zone::new(&(100..104), ZoneId([7; 16]), true, false);
            zone.prepared_to(103);
            zone.listed = true;
            assert_eq!(zone.take(), Some((100, true)));
            assert_eq!(zone.take(), Some((101, true)));
            zone.free(100);
            zone
        };
        assert_violated("only prepared clusters", used(), |zone| zone.prepared = 1);
        assert_violated("lie in it", used(), |zone| zone.prepared = 5);
        assert_violated("never taken is free", used(), |zone| zone.slots[3] = Slot::Taken);
        assert_violated("once a durable record lists it", used(), |zone| zone.listed = false);
        assert_violated("after it was taken", used(), |zone| zone.freed.push(2));
        assert_violated("is free once", used(), |zone| zone.freed.push(0));
        assert_violated("can be taken again is free", used(), |zone| zone.slots[0] = Slot::Plain);
        assert_violated("begin with any bytes", used(), |zone| zone.mark(100));
        assert_violated("with mappings is listed", used(), |zone| zone.left_out = true);
    }
}
