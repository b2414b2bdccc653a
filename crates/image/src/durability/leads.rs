//! Embedded lead blocks: reading them, making them plain; and preparing zones.

use super::metadata::Metadata;
use super::zones::LeadAt;
use crate::alloc::write_zeroes;
use crate::readers::Readers;
use crate::{DiskError, Result};
use futures_util::stream::{self, TryStreamExt};
use isobath_qcow2::HostCluster;
use isobath_qcow2::embedded::{LEAD, extract};
use isobath_storage::{IoBuf, Storage};
use isobath_sync::order::in_order;

/// Lead blocks read at once.
const READS: usize = 32;

impl<S: Storage> Metadata<S> {
    /// The guest's bytes of a lead block that is, or was, embedded. The caller holds its lock.
    pub(crate) async fn plain_lead(&self, lead: &LeadAt) -> Result<IoBuf> {
        let embedded = self.zones.embedded(lead.at);
        let mut block = self.read_stored(lead.at, IoBuf::zeroed(LEAD)).await?;
        if embedded.is_some()
            && extract(&mut block, lead.id).is_none()
            // Its space may have been returned, and given to another write, while it was read.
            && self.zones.embedded(lead.at) == embedded
        {
            return Err(DiskError::Corrupt {
                image: self.layer.name().to_owned(),
                reason: format!(
                    "the embedded record at host offset {} is damaged, and with it 4 KiB of guest \
                     data at {}: was the file changed by another program?",
                    lead.at,
                    lead.embedded.cluster * self.cluster_size()
                ),
            });
        }
        Ok(block)
    }

    /// Makes a lead block plain with the next record: `plain` is the plain contents of its span.
    pub(crate) fn keep_plain(&self, lead: &LeadAt, plain: &[u8]) {
        let cluster = HostCluster::new(lead.at / self.cluster_size());
        self.zones.make_plain(lead, || self.data_journal.journal_plain(lead.at, plain, cluster));
        // From then on the mapping cannot be found in the block.
        self.tables.want_record();
    }

    /// Makes lead blocks plain with the next record, as many as take about `bytes` in it: of zones that take no more
    /// clusters, or of `all` zones. Returns `false` if there are none.
    pub async fn extract_leads(&self, all: bool, bytes: usize, readers: &Readers) -> Result<bool> {
        let mut room = bytes;
        let mut leads = self.zones.to_extract(all, bytes.div_ceil(512));
        let mut fits = |lead: &LeadAt| {
            let fits = room > 0;
            room = room.saturating_sub(lead.embedded.span.bytes());
            fits
        };
        let count = leads.iter().map_while(|lead| fits(lead).then_some(())).count();
        leads.truncate(count);
        let found = !leads.is_empty();
        stream::iter(leads.into_iter().map(Ok))
            .try_for_each_concurrent(READS, |lead| in_order(self.extract_lead(lead, readers)))
            .await?;
        Ok(found)
    }

    async fn extract_lead(&self, lead: LeadAt, readers: &Readers) -> Result<()> {
        let _lock = self.zones.locks.lock(lead.block()).await;
        // Clusters released meanwhile are not reused before this has ended.
        let _pass = readers.epoch.enter();
        let now = self.zones.leads_in(&(lead.at..lead.at + 1));
        let Some(lead) = now.first() else { return Ok(()) };
        let plain = self.plain_lead(lead).await?;
        self.keep_plain(lead, &plain[..lead.embedded.span.bytes()]);
        Ok(())
    }

    /// Opens a zone if one is wanted. The next record must list it.
    pub async fn open_zone(&self) -> Result<bool> {
        let Some(clusters) = self.zones.wants_zone().filter(|_| self.upkeep.has_room()) else {
            return Ok(false);
        };
        let storage = self.layer.storage();
        let Some(area) = self.alloc.reserve_zone(clusters).await? else {
            return Ok(false);
        };
        let prepared = !storage.gains_from_written_space();
        self.zones.open(&area, storage.extends_with_zeroes(), prepared);
        Ok(true)
    }

    /// A durable record lists the current zones: clusters of former zones can be allocated again.
    pub async fn zones_listed(&self) -> Result<()> {
        if !self.zones.any() {
            return Ok(());
        }
        let size = self.cluster_size();
        for (area, unused) in self.zones.listed() {
            if !unused.is_empty() {
                let (at, length) = (unused.start * size, (unused.end - unused.start) * size);
                if let Err(error) = self.layer.storage().discard(at, length).await {
                    tracing::debug!(%error, "cannot release a zone's unused preallocated space");
                }
            }
            self.alloc.forget_area(&area).await;
        }
        Ok(())
    }

    /// Writes zeroes to clusters of a zone that are about to be used. The next flush pays for them.
    pub async fn prepare_zone(&self, clusters: u64) -> Result<()> {
        let Some(preparing) = self.zones.begin_preparing(clusters) else { return Ok(()) };
        let (run, size) = (&preparing.run, self.cluster_size());
        match write_zeroes(&**self.layer.storage(), run.start * size..run.end * size).await {
            Ok(()) => preparing.done(),
            // Space is short: a write that needs it will report the error.
            Err(error) => {
                tracing::debug!(%error, "cannot preallocate a zone");
                self.zones.cannot_prepare();
            }
        }
        Ok(())
    }
}
