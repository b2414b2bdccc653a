//! What a log holds that somebody left.

use super::{CAPACITY, ENTRY, KEPT, MAGIC, at, load, sum};
use crate::durability::guard::Kept;
use isobath_qcow2::{Geometry, Header, L2Entry};
use isobath_storage::{Storage, Survivor};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What a killed process left of an image.
pub(crate) struct Survived {
    /// The last entry that each guest cluster got.
    pub(super) entries: BTreeMap<u64, L2Entry>,
    /// Bytes by host offset, in the order in which they were written.
    pub(super) kept: Vec<Kept>,
    memory: Arc<dyn Survivor>,
}

impl Survived {
    /// What is left for the image with this header, whose journal is in use; `None` if there is
    /// nothing, or nothing that can be used.
    pub(crate) fn find<S: Storage>(storage: &S, name: &Path, header: &Header) -> Option<Self> {
        let memory = storage.survivor(false)?;
        let (id, geometry) = (header.journal()?.id, header.geometry().ok()?);
        let words = memory.words();
        let belongs = load(words, at::MAGIC) == MAGIC && load(words, at::ID) == id;
        if !belongs || load(words, at::SUM) != u64::from(sum(id, MAGIC, &[], &[])) {
            return None;
        }
        let mut found = Self { entries: BTreeMap::new(), kept: Vec::new(), memory };
        if found.read(id, &geometry).is_none() {
            tracing::error!(
                image = %name.display(),
                "the log that a killed process left is damaged: the image is as after a crash"
            );
            return None;
        }
        Some(found)
    }

    /// Reads all items; `None` if any is not what was written.
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
                        self.kept.push(Kept { at: *place, bytes: raw });
                    }
                }
                _ => return None,
            }
            position = next;
        }
        Some(())
    }

    /// Whether a change was under way that may have left refcounts too high.
    pub(crate) fn is_unclean(&self) -> bool {
        load(self.memory.words(), at::UNCLEAN) != 0
    }

    pub(super) fn set_unclean(&self) {
        if let Some(word) = self.memory.words().get(at::UNCLEAN) {
            word.store(1, Ordering::Release);
        }
    }

    pub(super) fn remove(&self) {
        self.memory.remove();
    }
}
