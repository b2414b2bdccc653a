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
    fn read(fields: &mut Fields<'_>) -> Option<Self> {
        Self::read_with_spare(fields).map(|(record, _)| record)
    }

    /// A record, and its spare bytes, which mean something in a chapter.
    fn read_with_spare(fields: &mut Fields<'_>) -> Option<(Self, u32)> {
        let format = match fields.u8()? {
            0 => RecordedFormat::Raw,
            1 => RecordedFormat::Qcow2,
            _ => return None,
        };
        let flags = fields.u8()?;
        let name_length = usize::from(fields.u16()?);
        let spare = fields.u32()?;
        let stamp = LayerStamp {
            length: fields.u64()?,
            modified: fields.u64()? as i64,
            changed: fields.u64()? as i64,
            inode: fields.u64()?,
        };
        let digest = fields.hash()?;
        let name = std::str::from_utf8(fields.take(name_length)?).ok()?.to_owned();
        fields.align()?;
        let record = Self {
            name,
            format,
            stamp: (flags & STAMPED != 0).then_some(stamp),
            digest: (flags & DIGESTED != 0).then_some(digest),
        };
        Some((record, spare))
    }

    pub(super) fn write(&self, spare: u32, out: &mut Vec<u8>) {
        out.push(match self.format {
            RecordedFormat::Raw => 0,
            RecordedFormat::Qcow2 => 1,
        });
        let stamped = if self.stamp.is_some() { STAMPED } else { 0 };
        let digested = if self.digest.is_some() { DIGESTED } else { 0 };
        out.push(stamped | digested);
        out.extend((self.name.len() as u16).to_be_bytes());
        out.extend(spare.to_be_bytes());
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

    /// A chapter of these records, which `heads` are to follow in its file.
    pub fn encode_chapter(records: &[Self], heads: Option<&HeadsBlock>) -> Vec<u8> {
        let mut out = Vec::new();
        for (number, record) in records.iter().enumerate() {
            record.write(heads.map_or(0, |heads| heads.spare(number)), &mut out);
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

/// Records whose spare bytes hold the hash and the length of the heads.
const SPARE_RECORDS: usize = 5;

/// The block of [heads](crate::Head) that follows a chapter in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadsBlock {
    /// Its length in bytes; not 0.
    pub length: u32,
    /// The hash of its bytes.
    pub hash: BlockHash,
}

impl HeadsBlock {
    /// What the spare bytes of a chapter's record `number` hold.
    fn spare(&self, number: usize) -> u32 {
        let mut words = [0; SPARE_RECORDS];
        for (word, bytes) in words.iter_mut().zip(self.hash.0.chunks_exact(4)) {
            *word = u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        words[SPARE_RECORDS - 1] = self.length;
        words.get(number).copied().unwrap_or(0)
    }

    /// The block that follows a chapter of `count` records; `None` if there is none, or the chapter is not valid.
    pub fn of_chapter(chapter: &[u8], count: usize) -> Option<Self> {
        if count < SPARE_RECORDS {
            return None;
        }
        let mut fields = Fields::new(chapter);
        let mut spare = [0; SPARE_RECORDS];
        for word in &mut spare {
            *word = LayerRecord::read_with_spare(&mut fields)?.1;
        }
        let [hash @ .., length] = spare;
        let mut bytes = [0; 16];
        for (place, word) in bytes.chunks_exact_mut(4).zip(hash) {
            place.copy_from_slice(&word.to_be_bytes());
        }
        (length != 0).then_some(Self { length, hash: BlockHash(bytes) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chapter_says_where_its_heads_end() {
        let record = LayerRecord {
            name: "a".into(),
            format: RecordedFormat::Qcow2,
            stamp: None,
            digest: None,
        };
        let records = vec![record; 6];
        let block = HeadsBlock { length: 77, hash: BlockHash::of(b"heads") };
        let with = LayerRecord::encode_chapter(&records, Some(&block));
        assert_eq!(HeadsBlock::of_chapter(&with, 6), Some(block));
        assert_eq!(LayerRecord::decode_chapter(&with, 6).as_ref(), Some(&records));
        let without = LayerRecord::encode_chapter(&records, None);
        assert_eq!(HeadsBlock::of_chapter(&without, 6), None);
        assert_eq!(with.len(), without.len());
        for count in 0..SPARE_RECORDS {
            let few = LayerRecord::encode_chapter(&records[..count], Some(&block));
            assert_eq!(HeadsBlock::of_chapter(&few, count), None);
        }
    }
}
