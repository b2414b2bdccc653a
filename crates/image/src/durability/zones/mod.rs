//! `--metadata embedded`: a mapping is stored in the data that it maps.
//!
//! A write to a new cluster makes room in the cluster's first 4 KiB, its *lead block*, by compressing them, and stores
//! a record there that names the guest cluster. So the data and its mapping are one write, and a flush after it is one
//! sync, with nothing written to the journal. This is Selfie (Wu et al., SYSTOR '15); `docs/decisions/0009` explains
//! the differences. Changes that cannot be embedded go into the journal's next record, which also contains the mappings
//! embedded before it.
//!
//! - Such clusters lie in *zones*. Each record of the journal lists the zones, with the id that marks a zone's embedded
//!   records. Ids are random and generated when a zone is opened, so nothing stored earlier contains one. While a zone
//!   is listed, guest bytes are never written unchanged to the start of one of its clusters, unless the record that has
//!   these bytes says that the cluster is *plain*. So neither stale bytes nor bytes that a guest chose can pass for a
//!   record.
//! - Embedded records take their LSNs ([`Lsn`]) from the log's one counter. A record of the journal gives the first LSN
//!   that still counts (*checkpoint LSN*): it contains all earlier mappings. So after a crash only mappings embedded
//!   since then must be found.
//! - An embedded record contains the LSN below which everything was durable when it was made (*durable LSN*). If the
//!   rest of a cluster cannot be distinguished from what was there before, its record has a checksum of the rest, which
//!   must match unless a later record shows that this one was durable; until then the
//!   [`data_journal`](super::data_journal) keeps the data from being overwritten.
//! - In quiet moments, and before the image is closed, lead blocks become plain again, by way of the journal: a plain
//!   qcow2 image remains.

mod flight;
mod zone;

pub(crate) use zone::Embedded;

use crate::alloc::Growth;
use crate::ids;
use crate::lsn::LogSequence;
use crate::range_lock::RangeLocks;
use crate::sabotage::{self, Sabotage};
use crate::{lock_order, violated};
use flight::{Flight, Flights};
use isobath_qcow2::embedded::{LEAD, Mapping, ZoneId};
use isobath_qcow2::{ClusterIndex, Geometry, HostCluster, Lsn, journal};
use isobath_sync::order::Rank;
use isobath_sync::{CheckedMutex, Condition, Invariants};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use zone::{Slot, Zone};

/// Default size of a zone in bytes (the paper's).
const ZONE_BYTES: u64 = 64 << 20;
/// The most clusters in a zone.
const ZONE_CLUSTERS: u64 = 4096;
/// Default limit on the zones in use: a recovery examines all of them.
const MOST_ZONES: u32 = 8;
/// A guest that takes more clusters than this between two commits gains nothing from saving one write.
const MOST_BETWEEN: u64 = 64;

const TAKEN: &str = "a cluster that was taken lies in a zone";

/// The zones of an image.
pub struct Zones {
    /// `None` if nothing is embedded.
    settings: Option<Settings>,
    /// Whether there is a zone; readers look no further while there is none.
    any: AtomicBool,
    /// The number of guards that suspend embedding.
    suspended: AtomicUsize,
    /// Locked, by host bytes, while a lead block is changed.
    pub(crate) locks: RangeLocks,
    /// A zone is no longer being prepared.
    prepared: Condition,
    state: CheckedMutex<ZoneState>,
}

#[derive(Clone, Copy)]
struct Settings {
    cluster_size: u64,
    /// Clusters of a zone.
    clusters: u64,
    most: usize,
}

#[derive(Default)]
struct ZoneState {
    zones: Vec<Zone>,
    /// Records with lower LSNs are durable.
    durable_lsn: Lsn,
    /// Embedded records with lower LSNs do not count any more, by the list of zones that was made last, and by the last
    /// durable one.
    listing: Lsn,
    listed: Lsn,
    /// The highest durable LSN in an embedded record written since this was last taken.
    noted: Lsn,
    flights: Arc<Flights>,
    /// Clusters that could be embedded, since the last commit and between the two before it.
    wanted: u64,
    wanted_before: u64,
    growth: Growth,
    /// The host could not give more space.
    exhausted: bool,
    /// Clusters taken since the last commit.
    taken: u64,
}

impl Invariants for ZoneState {
    const RANK: Option<Rank> = Some(lock_order::ZONES);

    fn check_invariants(&self) {
        for (number, zone) in self.zones.iter().enumerate() {
            zone.check_invariants();
            let own = zone.clusters();
            for other in &self.zones[..number] {
                let other_clusters = other.clusters();
                if own.start < other_clusters.end && other_clusters.start < own.end {
                    violated("zones do not overlap");
                }
                if zone.id == other.id {
                    violated("each zone has its own id");
                }
            }
        }
        if self.listed > self.listing {
            violated("a list that is durable was made");
        }
        if self.noted > self.durable_lsn {
            violated("an embedded record calls durable what is durable");
        }
    }
}

impl ZoneState {
    fn zone(&mut self, cluster: u64) -> Option<&mut Zone> {
        self.zones.iter_mut().find(|zone| zone.clusters().contains(&cluster))
    }

    fn slot(&self, cluster: u64) -> Option<(ZoneId, Slot)> {
        let zone = self.zones.iter().find(|zone| zone.clusters().contains(&cluster))?;
        Some((zone.id, zone.slot(cluster)?))
    }
}

/// A cluster for a first write.
pub struct Taken {
    /// The cluster that holds the data.
    pub host: HostCluster,
    /// The id of its zone.
    pub id: ZoneId,
    /// Whether the file holds zeroes there.
    pub zeroed: bool,
    lsn: Lsn,
    durable_lsn: Lsn,
    /// Held until the mapping is recorded.
    _flight: Flight,
}

impl Taken {
    /// The embedded record that maps a guest cluster to this one.
    pub fn mapping(&self, cluster: ClusterIndex, rest: Option<u32>) -> Mapping {
        Mapping { cluster, lsn: self.lsn, durable_lsn: self.durable_lsn, rest }
    }
}

/// An embedded lead block.
#[derive(Clone, Copy, Debug)]
pub struct LeadAt {
    /// Host byte offset.
    pub at: u64,
    /// The id of its zone.
    pub id: ZoneId,
    /// The mapping that it contains.
    pub embedded: Embedded,
}

impl LeadAt {
    /// The whole block in the file.
    pub fn block(&self) -> Range<u64> {
        self.at..self.at + LEAD as u64
    }

    /// The part that is not stored unchanged.
    pub fn span(&self) -> Range<u64> {
        self.at..self.at + self.embedded.span.bytes() as u64
    }
}

/// The boundary of a commit: what it makes durable.
#[must_use = "the commit is to be finished with it"]
pub struct CommitPoint {
    /// The commit's LSN: higher ones are assigned after it began.
    pub lsn: Lsn,
    /// The lowest LSN of a write that had not ended when the commit began, or the commit's.
    ended: Lsn,
    flights: Arc<Flights>,
}

impl CommitPoint {
    /// Waits until everything with an LSN below the commit's is recorded, so that a record written after that contains
    /// it.
    pub async fn landed(&self) {
        self.flights.ended_below(self.lsn).await;
    }
}

/// See [`Zones::suspend`].
pub struct Suspended<'a>(&'a Zones);

impl Drop for Suspended<'_> {
    fn drop(&mut self) {
        self.0.suspended.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Zones {
    /// Nothing is embedded.
    pub fn none() -> Self {
        Self::with(None)
    }

    /// Zones of `zone_size` bytes, `zones` of them at most, for an image whose format allows it; see
    /// [`OpenOptions`](crate::options::OpenOptions).
    pub fn new(zone_size: Option<u64>, zones: Option<u32>, geometry: &Geometry) -> Self {
        let cluster_size = geometry.cluster_size();
        let fits = cluster_size >= LEAD as u64 && !geometry.extended_l2();
        let most = zones.unwrap_or(MOST_ZONES) as usize;
        let clusters = zone_size.unwrap_or(ZONE_BYTES) / cluster_size;
        let settings = Settings { cluster_size, clusters: clusters.clamp(1, ZONE_CLUSTERS), most };
        Self::with((fits && !geometry.has_data_file() && most > 0).then_some(settings))
    }

    fn with(settings: Option<Settings>) -> Self {
        Self {
            settings,
            any: AtomicBool::new(false),
            suspended: AtomicUsize::new(0),
            locks: RangeLocks::ranked(lock_order::LEADS),
            prepared: Condition::default(),
            state: CheckedMutex::default(),
        }
    }

    /// Whether anything can be embedded.
    pub fn are_used(&self) -> bool {
        self.settings.is_some()
    }

    /// Whether there is any zone.
    pub fn any(&self) -> bool {
        self.any.load(Ordering::SeqCst)
    }

    /// Suspends embedding until the returned guard is dropped.
    pub fn suspend(&self) -> Suspended<'_> {
        self.suspended.fetch_add(1, Ordering::SeqCst);
        self.state.lock().zones.iter_mut().for_each(|zone| zone.frozen = true);
        Suspended(self)
    }

    fn is_suspended(&self) -> bool {
        self.suspended.load(Ordering::SeqCst) > 0
    }

    /// Takes a cluster for a first write, if embedding is worth it.
    pub fn take(&self, sequence: &LogSequence) -> Option<Taken> {
        if !self.any() {
            return None;
        }
        let mut state = self.state.lock();
        let state = &mut *state;
        state.wanted += 1;
        if state.wanted.max(state.wanted_before) > MOST_BETWEEN || self.is_suspended() {
            return None;
        }
        let (zone, (cluster, zeroed)) =
            state.zones.iter_mut().find_map(|zone| zone.take().map(|taken| (zone, taken)))?;
        let id = zone.id;
        state.taken += 1;
        let lsn = sequence.next();
        Some(Taken {
            host: HostCluster::new(cluster),
            id,
            zeroed,
            lsn,
            durable_lsn: state.durable_lsn,
            _flight: state.flights.begin(lsn),
        })
    }

    /// Returns a taken cluster to which nothing was written.
    pub fn put_back(&self, taken: &Taken) {
        match self.state.lock().zone(taken.host.get()) {
            Some(zone) => zone.put_back(taken.host.get(), taken.zeroed),
            None => violated(TAKEN),
        }
    }

    /// Notes that a taken cluster has its data, and an embedded lead block. The entry that refers to it is recorded
    /// after this, before `taken` is dropped.
    pub fn written(&self, taken: &Taken, embedded: Embedded) {
        let mut state = self.state.lock();
        state.noted = state.noted.max(taken.durable_lsn);
        match state.zone(taken.host.get()) {
            Some(zone) => zone.set(taken.host.get(), Slot::Embedded(embedded)),
            None => violated(TAKEN),
        }
    }

    /// Whether a host cluster belongs to a zone: it may then hold data only with a lead block that allows it.
    pub fn contain(&self, cluster: HostCluster) -> bool {
        self.any() && self.state.lock().zone(cluster.get()).is_some()
    }

    /// The embedded lead blocks whose span overlaps a range of the file.
    pub fn leads_in(&self, range: &Range<u64>) -> Vec<LeadAt> {
        let (Some(settings), true) = (self.settings, self.any()) else { return Vec::new() };
        let size = settings.cluster_size;
        let mut leads = Vec::new();
        let state = self.state.lock();
        for cluster in range.start / size..range.end.div_ceil(size) {
            if let Some((id, Slot::Embedded(embedded))) = state.slot(cluster) {
                let lead = LeadAt { at: cluster * size, id, embedded };
                leads.extend((range.start < lead.span().end).then_some(lead));
            }
        }
        leads
    }

    /// What is known of a lead block, if it is embedded.
    pub(crate) fn embedded(&self, at: u64) -> Option<Embedded> {
        self.leads_in(&(at..at + 1)).first().map(|lead| lead.embedded)
    }

    /// Notes that a lead block was rewritten in embedded form.
    pub(crate) fn rewritten(&self, at: u64, embedded: Embedded) {
        let Some(settings) = self.settings else { return };
        let cluster = at / settings.cluster_size;
        if let Some(zone) = self.state.lock().zone(cluster) {
            zone.set(cluster, Slot::Embedded(embedded));
        }
    }

    /// The LSN for a lead block that is rewritten, and the durable LSN that it will contain.
    pub(crate) fn next_lsn(&self, sequence: &LogSequence) -> (Lsn, Lsn) {
        let state = self.state.lock();
        (sequence.next(), state.durable_lsn)
    }

    /// Marks an embedded lead block as plain, after `journal` has taken its plain contents for the next record. Does
    /// nothing if the block is no longer embedded.
    pub(crate) fn make_plain(&self, lead: &LeadAt, journal: impl FnOnce()) {
        let Some(settings) = self.settings else { return };
        let cluster = lead.at / settings.cluster_size;
        let mut state = self.state.lock();
        if let Some(zone) = state.zone(cluster)
            && zone.slot(cluster) == Some(Slot::Embedded(lead.embedded))
        {
            journal();
            zone.set(cluster, Slot::Plain);
        }
    }

    /// Begins a commit: fixes what belongs to it.
    pub fn begin_commit(&self, sequence: &LogSequence) -> CommitPoint {
        let mut state = self.state.lock();
        let lsn = sequence.next();
        state.wanted_before = std::mem::take(&mut state.wanted);
        let ended = state.flights.lowest().unwrap_or(lsn);
        CommitPoint { lsn, ended, flights: Arc::clone(&state.flights) }
    }

    /// Embedded records written since the last call show, once they are durable, that commits up to this LSN were
    /// durable.
    pub fn take_noted(&self) -> Lsn {
        std::mem::take(&mut self.state.lock().noted)
    }

    /// A commit without a record is durable: everything that had ended when it began.
    pub fn finish_embedded_commit(&self, point: CommitPoint) {
        self.durable_below(point.ended);
        drop(point);
    }

    /// A commit is durable: everything with a lower LSN.
    pub fn finish_commit(&self, point: CommitPoint) {
        self.all_durable(&point);
        drop(point);
    }

    /// Everything with an LSN below that of a commit in progress is durable.
    pub fn all_durable(&self, point: &CommitPoint) {
        self.durable_below(point.lsn);
    }

    fn durable_below(&self, lsn: Lsn) {
        let mut state = self.state.lock();
        if lsn < state.durable_lsn {
            violated("what is durable stays durable");
        }
        if state.flights.lowest().is_some_and(|lowest| lowest < lsn) {
            violated("a write that is not recorded is not durable");
        }
        state.durable_lsn = lsn;
    }

    /// Forgets the records of clusters that nothing refers to and nobody reads any more: their contents may change,
    /// but they are not given out before their [`release`](Self::release).
    pub fn forget(&self, freed: &[HostCluster]) {
        self.of_each(freed, Zone::forget);
    }

    /// Whether a recovery finds no mapping in a cluster that nothing refers to any more.
    pub fn may_erase(&self, cluster: HostCluster) -> bool {
        if !self.any() {
            return true;
        }
        let mut state = self.state.lock();
        let listed = state.listed;
        let Some(zone) = state.zone(cluster.get()) else { return true };
        match zone.slot(cluster.get()) {
            Some(Slot::Left(lsn)) => lsn < listed || zone.is_marked(cluster.get()),
            _ => true,
        }
    }

    /// Called before the [`table`](Self::table) of commit `lsn`, which frees these clusters. It has closed changes made
    /// after it began, so a cluster that it frees may have a mapping with a higher LSN. A recovery would take that for
    /// newer than the commit: the lead block is listed as plain.
    pub fn leave_out(&self, lsn: Lsn, freed: &[HostCluster]) {
        if !self.any() || sabotage::is(Sabotage::NewerLeads) {
            return;
        }
        let mut state = self.state.lock();
        for cluster in freed {
            let Some(zone) = state.zone(cluster.get()) else { continue };
            let newer = match zone.slot(cluster.get()) {
                Some(Slot::Embedded(embedded)) => embedded.lsn >= lsn,
                // Its write failed, and may have left a mapping.
                Some(Slot::Taken) => true,
                _ => false,
            };
            if newer {
                zone.mark(cluster.get());
            }
        }
    }

    /// Frees clusters that nothing refers to any more.
    pub fn release(&self, freed: &[HostCluster]) {
        self.of_each(freed, Zone::free);
    }

    fn of_each(&self, clusters: &[HostCluster], change: fn(&mut Zone, u64)) {
        if !self.any() {
            return;
        }
        let mut state = self.state.lock();
        for cluster in clusters {
            if let Some(zone) = state.zone(cluster.get()) {
                change(zone, cluster.get());
            }
        }
    }

    /// The list of zones for a record that contains everything below `checkpoint_lsn`. `plain` are clusters whose plain
    /// lead blocks are in the record too.
    pub fn table(&self, checkpoint_lsn: Lsn, plain: &[HostCluster]) -> Option<journal::Zones> {
        let settings = self.settings?;
        let mut state = self.state.lock();
        state.listing = checkpoint_lsn;
        for cluster in plain {
            if let Some(zone) = state.zone(cluster.get()) {
                zone.mark(cluster.get());
            }
        }
        let suspended = self.is_suspended();
        let mut zones = Vec::with_capacity(state.zones.len());
        for zone in &mut state.zones {
            // This includes a zone that was being opened when embedding was suspended.
            zone.frozen |= suspended;
            zone.left_out = zone.is_spent();
            if !zone.left_out {
                zones.push(zone.entry(settings.cluster_size));
            }
        }
        Some(journal::Zones { checkpoint_lsn, durable_lsn: state.durable_lsn, zones })
    }

    /// The record with that [`table`](Self::table) is durable. Returns the former zones, and the part of each that was
    /// never used.
    pub(crate) fn listed(&self) -> Vec<(Range<u64>, Range<u64>)> {
        let mut state = self.state.lock();
        let state = &mut *state;
        state.listed = state.listing;
        let gone = state.zones.iter().filter(|zone| zone.left_out);
        let gone = gone.map(|zone| (zone.clusters(), zone.unused())).collect();
        state.zones.retain(|zone| !zone.left_out);
        state.zones.iter_mut().for_each(|zone| zone.listed = true);
        self.any.store(!state.zones.is_empty(), Ordering::SeqCst);
        gone
    }

    /// Bytes that the [`table`](Self::table) takes in a record.
    pub fn table_bytes(&self) -> u64 {
        let state = self.state.lock();
        let of_zone = |zone: &Zone| 64 + (zone.clusters().end - zone.start).div_ceil(8);
        64 + state.zones.iter().map(of_zone).sum::<u64>()
    }

    /// Clusters of a zone that should be opened now.
    pub fn wants_zone(&self) -> Option<u64> {
        let settings = self.settings.filter(|_| !self.is_suspended())?;
        let state = self.state.lock();
        let room: usize = state.zones.iter().map(Zone::room).sum();
        let enough = room as u64 * 4 > settings.clusters;
        (!enough && state.zones.len() < settings.most).then_some(settings.clusters)
    }

    /// Opens a zone of free clusters that are not allocated in any other way. It is used once a durable record lists
    /// it. `zeroed` says that the file holds zeroes there, `prepared` that it need not be prepared.
    pub fn open(&self, area: &Range<u64>, zeroed: bool, prepared: bool) {
        let mut state = self.state.lock();
        let mut id = [0; 16];
        id[..8].copy_from_slice(&ids::fresh().to_be_bytes());
        id[8..].copy_from_slice(&ids::fresh().to_be_bytes());
        state.zones.push(Zone::new(area, ZoneId(id), zeroed, prepared));
        self.any.store(true, Ordering::SeqCst);
    }

    /// Whether zones should be emptied, so that a new one can be opened when needed.
    pub fn are_short(&self) -> bool {
        let Some(settings) = self.settings else { return false };
        let state = self.state.lock();
        state.zones.len() * 2 > settings.most && state.zones.iter().any(|zone| zone.frozen)
    }

    /// The embedded lead blocks of whole zones, oldest first: of all zones, or only of those that take no more
    /// clusters.
    pub(crate) fn to_extract(&self, all: bool, most: usize) -> Vec<LeadAt> {
        let Some(settings) = self.settings else { return Vec::new() };
        let state = self.state.lock();
        let zones = state.zones.iter().filter(|zone| all || zone.frozen);
        let leads = zones.flat_map(|zone| {
            zone.embedded().map(|(cluster, embedded)| LeadAt {
                at: cluster * settings.cluster_size,
                id: zone.id,
                embedded,
            })
        });
        leads.take(most).collect()
    }

    /// Called at each commit. Returns the number of clusters to [prepare](super::Metadata::prepare_zone).
    pub fn growth_wanted(&self) -> Option<u64> {
        let settings = self.settings?;
        let mut state = self.state.lock();
        let state = &mut *state;
        let taken = std::mem::take(&mut state.taken) * settings.cluster_size;
        let ready: usize = state.zones.iter().map(Zone::ready).sum();
        let fresh = ready == 0 && state.zones.iter().any(|zone| !zone.unprepared(1).is_empty());
        let wanted = state.growth.committed(taken, ready as u64 * settings.cluster_size);
        let step = wanted.or_else(|| fresh.then_some(FIRST_STEP)).filter(|_| !state.exhausted)?;
        Some(step.div_ceil(settings.cluster_size))
    }

    /// Begins to prepare up to `most` clusters, adjacent to those already prepared. Their zone stays until that ends,
    /// so nobody else is given its space.
    pub(crate) fn begin_preparing(&self, most: u64) -> Option<Preparing<'_>> {
        let mut state = self.state.lock();
        state.zones.iter_mut().find_map(|zone| {
            let run = zone.unprepared(most);
            if run.is_empty() {
                return None;
            }
            zone.preparing = true;
            Some(Preparing { zones: self, run })
        })
    }

    /// Waits until no zone is being prepared. While embedding is suspended, none begins to be.
    pub(crate) async fn none_in_preparation(&self) {
        self.prepared.until(|| !self.state.lock().zones.iter().any(|zone| zone.preparing)).await;
    }

    /// Notes that the host has no space to prepare any.
    pub(crate) fn cannot_prepare(&self) {
        self.state.lock().exhausted = true;
    }
}

/// Clusters of a zone to which zeroes are being written.
#[must_use = "their zone cannot end before this is dropped"]
pub(crate) struct Preparing<'a> {
    zones: &'a Zones,
    /// The host clusters.
    pub(crate) run: Range<u64>,
}

impl Preparing<'_> {
    /// They are zero.
    pub(crate) fn done(self) {
        match self.zones.state.lock().zone(self.run.start) {
            Some(zone) => zone.prepared_to(self.run.end),
            None if sabotage::is(Sabotage::ZonePreparedLate) => {}
            None => violated("a zone stays while it is prepared"),
        }
    }
}

impl Drop for Preparing<'_> {
    fn drop(&mut self) {
        if let Some(zone) = self.zones.state.lock().zone(self.run.start) {
            zone.preparing = false;
        }
        self.zones.prepared.changed();
    }
}

/// Bytes prepared in a new zone before the rate of growth is known.
const FIRST_STEP: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broken::{assert_violated, must_panic};
    use isobath_qcow2::NewImage;
    use isobath_qcow2::embedded::Span;

    #[test]
    fn broken_zones_are_noticed() {
        let zone = |area: Range<u64>, id| Zone::new(&area, ZoneId([id; 16]), true, true);
        let state = || ZoneState { zones: vec![zone(0..4, 1)], ..ZoneState::default() };
        assert_violated("zones do not overlap", state(), |state| state.zones.push(zone(3..8, 2)));
        assert_violated("its own id", state(), |state| state.zones.push(zone(4..8, 1)));
        assert_violated("a list that is durable", state(), |state| state.listed = Lsn::new(1));
        assert_violated("calls durable what is durable", state(), |state| {
            state.noted = Lsn::new(1);
        });
    }

    /// Zones with a cluster whose mapping has an LSN above that of a commit in progress, which frees it.
    fn freed_by_a_commit() -> (Zones, CommitPoint, HostCluster) {
        let geometry = NewImage::new(1 << 30).plan().unwrap().header().geometry().unwrap();
        let zones = Zones::new(None, None, &geometry);
        let sequence = LogSequence::default();
        zones.open(&(100..104), true, true);
        assert!(zones.table(Lsn::default(), &[]).is_some());
        assert!(zones.listed().is_empty());
        let point = zones.begin_commit(&sequence);
        let taken = zones.take(&sequence).unwrap();
        let (host, lsn) = (taken.host, taken.lsn);
        assert!(lsn > point.lsn);
        zones.written(&taken, Embedded { cluster: 7, lsn, span: Span::Sector, rest: None });
        (zones, point, host)
    }

    #[test]
    fn a_mapping_newer_than_the_commit_that_frees_its_cluster_does_not_count() {
        let (zones, point, host) = freed_by_a_commit();
        zones.leave_out(point.lsn, &[host]);
        let table = zones.table(point.lsn, &[]).unwrap();
        assert_eq!(table.zones[0].plain, [1]);
        zones.listed();
        zones.forget(&[host]);
        assert!(zones.may_erase(host));
        zones.release(&[host]);
        // It is not used for another.
        let next = zones.take(&LogSequence::default()).unwrap();
        assert_ne!(next.host, host);
    }

    #[test]
    fn what_a_recovery_would_find_is_not_erased() {
        let (zones, point, host) = freed_by_a_commit();
        assert_eq!(zones.table(point.lsn, &[]).unwrap().zones[0].plain, [0]);
        zones.listed();
        zones.forget(&[host]);
        assert!(!zones.may_erase(host));
    }

    #[test]
    fn an_older_mapping_is_in_the_record_and_its_cluster_is_used_again() {
        let (zones, _, host) = freed_by_a_commit();
        let later = Lsn::new(50);
        zones.leave_out(later, &[host]);
        assert_eq!(zones.table(later, &[]).unwrap().zones[0].plain, [0]);
        zones.listed();
        zones.forget(&[host]);
        assert!(zones.may_erase(host));
    }

    #[test]
    fn what_is_durable_was_recorded_and_stays_durable() {
        let (zones, point, _) = freed_by_a_commit();
        let sequence = LogSequence::default();
        let taken = zones.take(&sequence).unwrap();
        let early = || zones.durable_below(Lsn::new(taken.lsn.get() + 1));
        must_panic(early, "a write that is not recorded is not durable");
        drop(taken);
        zones.finish_commit(point);
        must_panic(|| zones.durable_below(Lsn::default()), "what is durable stays durable");
    }

    #[test]
    fn what_is_taken_or_prepared_keeps_its_zone() {
        let (zones, ..) = freed_by_a_commit();
        let taken = zones.take(&LogSequence::default()).unwrap();
        zones.open(&(200..204), true, false);
        let preparing = zones.begin_preparing(4).unwrap();
        zones.state.lock().zones.clear();
        must_panic(|| zones.put_back(&taken), "a cluster that was taken lies in a zone");
        let embedded = Embedded { cluster: 7, lsn: taken.lsn, span: Span::Sector, rest: None };
        let written = || zones.written(&taken, embedded);
        must_panic(written, "a cluster that was taken lies in a zone");
        must_panic(|| preparing.done(), "a zone stays while it is prepared");
        let mut zone = Zone::new(&(0..4), ZoneId([1; 16]), true, true);
        must_panic(|| zone.set(4, Slot::Taken), "a cluster of a zone has a slot");
    }
}
