//! Reading a restart log that a process left.

use super::{CAPACITY, ENTRY, KEPT, at, load, mark, sum};
use crate::pieces::JournaledWrite;
use crate::sabotage::{self, Sabotage};
use crate::{DiskError, Result, violated};
use isobath_qcow2::{Geometry, Header, L2Entry, Lsn};
use isobath_storage::{MemoryUse, Operation, RestartMemory, Storage, StorageError, shown};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The restart log that a killed process left for an image.
pub struct FoundLog {
    /// The last entry that each guest cluster got.
    pub entries: BTreeMap<u64, L2Entry>,
    /// Bytes by host offset, in the order in which they were written.
    pub writes: Vec<JournaledWrite>,
    /// It is not [set aside](Self::set_aside): those who rely on it go on with the image.
    pub must_fit: bool,
    memory: Arc<dyn RestartMemory>,
}

/// What a found log is wanted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogUse {
    /// To be applied, and removed.
    Take,
    /// The same, and it must fit.
    Rely,
    /// To be read, beside others that do.
    Look,
    /// To be read without locks: none while somebody writes to the image.
    Glance,
}

impl FoundLog {
    /// The restart log for the image with this header, whose journal is in use; `None` if there is none.
    ///
    /// # Errors
    /// If the log cannot be accessed, or is damaged: opening the image without it would lose writes that the guest was
    /// told had completed.
    pub async fn find<S: Storage>(
        storage: &S,
        name: &Path,
        header: &Header,
        how: LogUse,
    ) -> Result<Option<Self>> {
        let refused = |reason: String| DiskError::Refused { image: name.to_owned(), reason };
        let (Some(journal), Ok(geometry)) = (header.journal(), header.geometry()) else {
            return Ok(None);
        };
        let id = journal.id;
        let mark = mark(id);
        let must_fit = how == LogUse::Rely;
        let how = match how {
            LogUse::Take | LogUse::Rely => MemoryUse::Take(mark),
            LogUse::Look => MemoryUse::Look(mark),
            LogUse::Glance => MemoryUse::Glance(mark),
        };
        let memory = storage.restart_memory(how).await;
        if memory.is_err() && sabotage::is(Sabotage::IgnoredLog) {
            return Ok(None);
        }
        let memory = memory.map_err(|error| {
            refused(format!(
                "its server was killed, and its unflushed writes cannot be recovered: {error}. \
                 Remove that file to open the image as after a power failure"
            ))
        })?;
        let Some(memory) = memory else { return Ok(None) };
        if [at::MAGIC, at::ID, at::SUM].map(|place| load(memory.words(), place)) != mark {
            return Ok(None);
        }
        let mut found = Self { entries: BTreeMap::new(), writes: Vec::new(), must_fit, memory };
        let damaged = found.read(id, &geometry).is_none();
        if damaged && sabotage::is(Sabotage::IgnoredDamage) {
            return Ok(None);
        }
        if damaged {
            return Err(refused(format!(
                "its server was killed, and the log of its unflushed writes is damaged. Remove \
                 '{}' to open the image as after a power failure",
                found.memory.name()
            )));
        }
        Ok(Some(found))
    }

    /// Whether the log continues an image whose journal's last record is `durable`, with `previous` before it. A kill
    /// may come between a record and the log's update for it.
    pub fn follows(&self, durable: Lsn, previous: Option<Lsn>) -> bool {
        let known = Lsn::new(load(self.memory.words(), at::LAST));
        durable == known || previous == Some(known) || sabotage::is(Sabotage::ForeignLog)
    }

    /// From now on the log continues after the record with this LSN.
    ///
    /// # Errors
    /// If the log cannot be changed.
    pub fn goes_on_behind(&self, name: &Path, last: Lsn) -> Result<()> {
        self.store(name, at::LAST, last.get())
    }

    fn store(&self, name: &Path, place: usize, value: u64) -> Result<()> {
        let stored = self.memory.store(place, value);
        let stored = stored.map_err(|error| StorageError::new(Operation::Write, name, error));
        Ok(stored?)
    }

    /// Reads all items; `None` if any is damaged.
    fn read(&mut self, id: u64, geometry: &Geometry) -> Option<()> {
        let memory = Arc::clone(&self.memory);
        let words = memory.words();
        let [entries, bytes, end] = [at::ENTRIES, at::BYTES, at::END].map(|p| load(words, p));
        let mut position = entries.min(bytes);
        if end.checked_sub(position)? > CAPACITY || entries.max(bytes) > end {
            return None;
        }
        let items = words.get(at::ITEMS..)?;
        let word = |position: u64| {
            items.get((position % CAPACITY) as usize).map(|word| word.load(Ordering::Relaxed))
        };
        while position < end {
            let head = word(position)?;
            let (kind, length, checked) = (head & 0xff, head >> 8 & 0xff_ffff, head >> 32);
            let next = position.checked_add(length).filter(|next| *next <= end)?;
            let content: Vec<u64> = (position + 1..next).map(word).collect::<Option<_>>()?;
            match (kind, content.as_slice()) {
                (ENTRY, &[cluster, high, low]) => {
                    if checked != u64::from(sum(id, position, &[cluster, high, low], &[])) {
                        return None;
                    }
                    if position >= entries {
                        let mut raw = [0; 16];
                        raw[..8].copy_from_slice(&high.to_le_bytes());
                        raw[8..].copy_from_slice(&low.to_le_bytes());
                        self.entries.insert(cluster, L2Entry::read(&raw, 0, geometry)?);
                    }
                }
                (KEPT, [place, count, data @ ..]) => {
                    let count = usize::try_from(*count).ok()?;
                    if count.div_ceil(8) != data.len() {
                        return None;
                    }
                    let mut raw: Vec<u8> = data.iter().flat_map(|d| d.to_le_bytes()).collect();
                    raw.truncate(count);
                    if checked != u64::from(sum(id, position, &[*place, count as u64], &raw)) {
                        return None;
                    }
                    place.checked_add(count as u64)?;
                    if position >= bytes && count > 0 {
                        self.writes.push(JournaledWrite { at: *place, bytes: raw });
                    }
                }
                _ => return None,
            }
            position = next;
        }
        Some(())
    }

    /// Whether there is nothing in it that the image lacks.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.writes.is_empty()
    }

    /// Whether a change was in progress that may have left refcounts too high.
    pub fn is_unclean(&self) -> bool {
        load(self.memory.words(), at::UNCLEAN) != 0
    }

    /// Notes the start of a change of the image `name` that may leave refcounts too high.
    ///
    /// # Errors
    /// If the log cannot be changed.
    pub fn set_unclean(&self, name: &Path) -> Result<()> {
        self.store(name, at::UNCLEAN, 1)
    }

    /// Sets the log aside, for this `reason`: it cannot be applied to the image `name`, and may hold somebody's writes.
    ///
    /// # Errors
    /// If that fails; the log is then where it was.
    pub fn set_aside(&self, name: &Path, reason: &str) -> Result<()> {
        if self.must_fit {
            violated("a log on which clients rely stays in its place");
        }
        let aside = self.memory.set_aside();
        let aside = aside.map_err(|error| StorageError::new(Operation::Remove, name, error))?;
        tracing::error!(image = %shown(name), kept = aside, "{reason}");
        Ok(())
    }

    /// Removes the log: the image has everything.
    pub fn remove(&self) {
        self.memory.remove();
    }
}
