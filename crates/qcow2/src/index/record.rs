//! The record of each layer that an index describes.

use super::block::{BlockHash, Fields, pad};

/// The format of a recorded layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordedFormat {
    /// The guest's bytes as they are.
    Raw,
    /// qcow2.
    Qcow2,
}

/// The file's length and times when the index was written; any change of the file changes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerStamp {
    /// Bytes in the file.
    pub length: u64,
    /// Last modification, in nanoseconds since the epoch.
    pub modified: i64,
    /// Last change of contents or attributes, in nanoseconds since the epoch.
    pub changed: i64,
    /// The file's number in its file system.
    pub inode: u64,
}

/// A layer, as it was when the index was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerRecord {
    /// The name by which the layer above refers to it.
    pub name: String,
    /// Its format.
    pub format: RecordedFormat,
    /// Cheap evidence that the file is unchanged; `None` if its file system cannot provide it.
    pub stamp: Option<LayerStamp>,
    /// A hash of everything that maps guest clusters to host clusters; `None` if that was too much to read.
    pub digest: Option<BlockHash>,
}

const STAMPED: u8 = 1;
const DIGESTED: u8 = 2;

impl LayerRecord {
    pub(super) fn read(fields: &mut Fields<'_>) -> Option<Self> {
        let format = match fields.u8()? {
            0 => RecordedFormat::Raw,
            1 => RecordedFormat::Qcow2,
            _ => return None,
        };
        let flags = fields.u8()?;
        let name_length = usize::from(fields.u16()?);
        fields.take(4)?;
        let stamp = LayerStamp {
            length: fields.u64()?,
            modified: fields.u64()? as i64,
            changed: fields.u64()? as i64,
            inode: fields.u64()?,
        };
        let digest = fields.hash()?;
        let name = std::str::from_utf8(fields.take(name_length)?).ok()?.to_owned();
        fields.align()?;
        Some(Self {
            name,
            format,
            stamp: (flags & STAMPED != 0).then_some(stamp),
            digest: (flags & DIGESTED != 0).then_some(digest),
        })
    }

    pub(super) fn write(&self, out: &mut Vec<u8>) {
        out.push(match self.format {
            RecordedFormat::Raw => 0,
            RecordedFormat::Qcow2 => 1,
        });
        let stamped = if self.stamp.is_some() { STAMPED } else { 0 };
        let digested = if self.digest.is_some() { DIGESTED } else { 0 };
        out.push(stamped | digested);
        out.extend((self.name.len() as u16).to_be_bytes());
        out.extend([0; 4]);
        let stamp =
            self.stamp.unwrap_or(LayerStamp { length: 0, modified: 0, changed: 0, inode: 0 });
        out.extend(stamp.length.to_be_bytes());
        out.extend(stamp.modified.to_be_bytes());
        out.extend(stamp.changed.to_be_bytes());
        out.extend(stamp.inode.to_be_bytes());
        out.extend(self.digest.unwrap_or_default().0);
        out.extend(self.name.as_bytes());
        pad(out);
    }

    /// A chapter of these records.
    pub fn encode_chapter(records: &[Self]) -> Vec<u8> {
        let mut out = Vec::new();
        for record in records {
            record.write(&mut out);
        }
        out
    }

    /// The `count` records of a chapter; `None` if they are not valid.
    pub fn decode_chapter(bytes: &[u8], count: usize) -> Option<Vec<Self>> {
        let mut fields = Fields::new(bytes);
        let records = Self::read_all(&mut fields, count)?;
        (fields.rest() == 0).then_some(records)
    }

    pub(super) fn read_all(fields: &mut Fields<'_>, count: usize) -> Option<Vec<Self>> {
        let mut records = Vec::with_capacity(count.min(super::CHAPTER_LAYERS));
        for _ in 0..count {
            records.push(Self::read(fields)?);
        }
        Some(records)
    }
}
