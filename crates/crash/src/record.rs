//! The record of the simulated files' changes.

use crate::content::Content;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A moment of a history: every event has its own.
pub type Tick = u64;

/// The tick of an event that has not happened yet.
pub const NEVER: Tick = Tick::MAX;

/// Files by name.
pub type Files = Vec<(PathBuf, Arc<Content>)>;

/// The contents of the file of this name.
pub(crate) fn file<'a>(files: &'a Files, name: &Path) -> Option<&'a Content> {
    files.iter().find(|(own, _)| own == name).map(|(_, content)| &**content)
}

/// A change of a file.
#[derive(Clone, Debug, Hash)]
pub enum Action {
    /// Writes bytes at an offset.
    Write(u64, Arc<[u8]>),
    /// Fills `length` bytes at an offset with one byte, which is 0 except for discards; only up to the end of the file
    /// unless `extend` is set.
    Fill {
        /// Where.
        offset: u64,
        /// How many bytes.
        length: u64,
        /// The byte.
        byte: u8,
        /// Whether the file is extended.
        extend: bool,
    },
    /// Sets the length.
    SetLength(u64),
}

impl Action {
    /// The bytes that it touches in a file that is `length` bytes long: start and end.
    pub fn range(&self, length: u64) -> (u64, u64) {
        match self {
            Self::Write(offset, bytes) => (*offset, *offset + bytes.len() as u64),
            Self::Fill { offset, length: count, extend: true, .. } => (*offset, offset + count),
            Self::Fill { offset, length: count, .. } => {
                ((*offset).min(length), (offset + count).min(length))
            }
            Self::SetLength(new) => (*new, length.max(*new)),
        }
    }

    /// The file's length afterwards.
    pub fn length_after(&self, length: u64) -> u64 {
        match self {
            Self::SetLength(new) => *new,
            _ => length.max(self.range(length).1),
        }
    }

    /// Applies it to `content`.
    pub fn apply(&self, content: &mut Content) {
        let length = content.len();
        let after = self.length_after(length);
        if after != length {
            content.set_len(after);
        }
        let (start, end) = self.range(length);
        if !matches!(self, Self::SetLength(_)) {
            self.apply_part(content, start, end);
        }
    }

    /// Applies it to the bytes from `start` to `end` only, which are within its range.
    pub fn apply_part(&self, content: &mut Content, start: u64, end: u64) {
        match self {
            Self::Write(offset, new) => {
                content.write(start, &new[(start - offset) as usize..(end - offset) as usize]);
            }
            Self::Fill { byte, .. } => content.fill(start..end, *byte),
            Self::SetLength(_) => content.fill(start..end, 0),
        }
    }
}

/// One change of a file.
#[derive(Clone, Debug)]
pub struct Change {
    /// The file's number.
    pub file: usize,
    /// When it was submitted.
    pub issued: Tick,
    /// When reads began to see it.
    pub applied: Tick,
    /// When it was answered.
    pub completed: Tick,
    /// Whether flushes still cover it: a failed one may have made the host forget it.
    pub sync: bool,
    /// The change.
    pub action: Action,
}

/// One flush of a file that succeeded and took effect.
#[derive(Clone, Copy, Debug)]
pub struct Flush {
    /// The file's number.
    pub file: usize,
    /// When it was submitted: everything completed before that is durable.
    pub issued: Tick,
    /// When it was answered.
    pub completed: Tick,
}

/// The record of a history.
#[derive(Clone, Debug)]
pub struct Record {
    /// The initial files, all durable.
    pub start: Files,
    /// All changes, in the order of submission.
    pub changes: Vec<Change>,
    /// All flushes, in the order of completion.
    pub flushes: Vec<Flush>,
    /// The tick after the last event.
    pub end: Tick,
}

impl Change {
    /// In a few words.
    pub fn tell(&self, files: &Files) -> String {
        let name = files.get(self.file).map_or(Path::new("?"), |(name, _)| name).display();
        let action = match &self.action {
            Action::Write(offset, bytes) => format!("write {offset:#x}+{:#x}", bytes.len()),
            Action::Fill { offset, length, byte, .. } => {
                format!("fill {offset:#x}+{length:#x} with {byte}")
            }
            Action::SetLength(length) => format!("set length {length:#x}"),
        };
        format!(
            "{name} {action} issued {} applied {} completed {}",
            shown(self.issued),
            shown(self.applied),
            shown(self.completed)
        )
    }
}

impl Record {
    /// Whether a flush had been submitted before a moment, and not answered.
    pub fn is_amid_flush(&self, now: Tick) -> bool {
        self.flushes.iter().any(|flush| flush.issued < now && now <= flush.completed)
    }

    /// All events, one per line.
    pub fn tell(&self) -> Vec<String> {
        let changes = self.changes.iter().map(|change| (change.issued, change.tell(&self.start)));
        let flushes = self.flushes.iter().map(|flush| {
            let name = self.start.get(flush.file).map_or(Path::new("?"), |(name, _)| name);
            let text = format!("{} flush {}..{}", name.display(), flush.issued, flush.completed);
            (flush.issued, text)
        });
        let mut lines: Vec<(Tick, String)> = changes.chain(flushes).collect();
        lines.sort();
        lines.into_iter().map(|(_, line)| format!("  {line}")).collect()
    }
}

fn shown(tick: Tick) -> String {
    if tick == NEVER { "never".into() } else { tick.to_string() }
}
