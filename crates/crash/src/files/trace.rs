//! What a server did to its image, as the record that states of crashes are made from.

use crate::content::Content;
use crate::record::{Action, Change, Flush, NEVER, Record, Tick};
use isobath_storage_test::recorder::{self, Entry};
use rand::RngExt;
use rand::rngs::SmallRng;
use std::path::Path;
use std::sync::Arc;

/// The tick of an entry's completion.
const fn completed(entry: usize) -> Tick {
    2 * entry as Tick + 2
}

/// The tick of what was asked for when there were so many entries.
const fn asked(entries: usize) -> Tick {
    2 * entries as Tick + 1
}

/// The tick of a crash that comes when there are so many entries: all that was asked for by then may
/// have reached the disk.
pub const fn crash(entries: usize) -> Tick {
    completed(entries)
}

/// The record of an image that held `start`. Nothing but that image may have been changed.
pub fn record(entries: &[Entry], image: &Path, start: &[u8]) -> Result<Record, String> {
    let (mut changes, mut flushes) = (Vec::new(), Vec::new());
    for (number, entry) in entries.iter().enumerate() {
        if *entry.file != *image {
            return Err(format!("the server has changed {}", entry.file.display()));
        }
        let fill = |range: &std::ops::Range<u64>, extend| Action::Fill {
            offset: range.start,
            length: range.end - range.start,
            byte: 0,
            extend,
        };
        let action = match &entry.change {
            recorder::Change::Write(offset, bytes) => Action::Write(*offset, bytes.clone()),
            recorder::Change::Zero(range) => fill(range, true),
            recorder::Change::Discard(range) => fill(range, false),
            recorder::Change::SetLength(length) => Action::SetLength(*length),
            recorder::Change::Flush { started } => {
                let issued = asked(*started);
                flushes.push(Flush { file: 0, issued, completed: completed(number) });
                continue;
            }
            recorder::Change::Create | recorder::Change::Remove => {
                return Err(format!("the server has replaced {}", entry.file.display()));
            }
        };
        let at = completed(number);
        changes.push(Change {
            file: 0,
            issued: asked(entry.asked),
            applied: at,
            completed: at,
            sync: true,
            action,
        });
    }
    let start = vec![(image.to_owned(), Arc::new(Content::from(start)))];
    Ok(Record { start, changes, flushes, end: NEVER })
}

/// A crash between a sync that is chosen at random and the next: after so many entries.
pub fn moment(entries: &[Entry], rng: &mut SmallRng) -> usize {
    let is_flush = |entry: &Entry| matches!(entry.change, recorder::Change::Flush { .. });
    let syncs: Vec<usize> =
        entries.iter().enumerate().filter(|(_, entry)| is_flush(entry)).map(|(at, _)| at).collect();
    // Before the first one, and behind the last, too.
    let chosen = rng.random_range(0..=syncs.len());
    let first = chosen.checked_sub(1).map_or(0, |before| syncs[before] + 1);
    let next = syncs.get(chosen).copied().unwrap_or(entries.len());
    // As in the paper everything up to the next sync has been asked for, or only some of it.
    if rng.random() { next } else { rng.random_range(first..=next) }
}
