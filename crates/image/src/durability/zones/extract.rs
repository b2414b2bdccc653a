//! Making embedded lead blocks plain, and preparing zones.

use super::LeadAt;
use crate::Result;
use crate::alloc::write_zeroes;
use crate::durability::metadata::Metadata;
use crate::readers::Readers;
use futures_util::stream::{self, TryStreamExt};
use isobath_storage::Storage;

/// Lead blocks read at once.
const READS: usize = 32;

impl<S: Storage> Metadata<S> {
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
            .try_for_each_concurrent(READS, |lead| self.extract_lead(lead, readers))
            .await?;
        Ok(found)
    }

    async fn extract_lead(&self, lead: LeadAt, readers: &Readers) -> Result<()> {
        let _lock = self.zones.locks.lock(lead.block()).await;
        // Clusters released meanwhile are not reused before this has ended.
        let _pass = readers.gate.enter();
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
        let run = self.zones.unprepared(clusters);
        let size = self.cluster_size();
        match write_zeroes(&**self.layer.storage(), run.start * size..run.end * size).await {
            Ok(()) => self.zones.prepared(&run),
            // Space is short: a write that needs it will report the error.
            Err(error) => {
                tracing::debug!(%error, "cannot preallocate a zone");
                self.zones.cannot_prepare();
            }
        }
        Ok(())
    }
}
