//! Conversion of a server's changes to the record from which crash states are built.

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

/// The tick of an operation submitted when there were `entries` entries.
const fn asked(entries: usize) -> Tick {
    2 * entries as Tick + 1
}

/// The tick of a crash when there are `entries` entries: everything submitted by then may have reached the disk.
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
            recorder::Change::Lengthen(length) => fill(&(*length..*length), true),
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

/// A crash between a randomly chosen sync and the next: returns the number of entries before it.
pub fn moment(entries: &[Entry], rng: &mut SmallRng) -> usize {
    let is_flush = |entry: &Entry| matches!(entry.change, recorder::Change::Flush { .. });
    let syncs: Vec<usize> =
        entries.iter().enumerate().filter(|(_, entry)| is_flush(entry)).map(|(at, _)| at).collect();
    // Also before the first sync, and after the last.
    let chosen = rng.random_range(0..=syncs.len());
    let first = chosen.checked_sub(1).map_or(0, |before| syncs[before] + 1);
    let next = syncs.get(chosen).copied().unwrap_or(entries.len());
    // Either everything up to the next sync has been submitted, as in the paper, or only some of it.
    if rng.random() { next } else { rng.random_range(first..=next) }
}
