//! What the heads of a chain say of a layer, in place of its file's first bytes and its L1 table.

use crate::digest::BLOCK;
use crate::error::{Error, Result};
use crate::heads::{Head, MOST_HEADER};
use crate::manifest::{Format, Layer};
use isobath_qcow2::{Header, ParseMode};
use std::ops::Range;

/// Bytes of a layer that are known without reading it.
#[derive(Clone, Debug, Default)]
pub(crate) struct KnownHead {
    /// The first bytes, without zeroes at their end.
    start: Vec<u8>,
    /// How many first bytes are known, with these zeroes.
    start_length: u64,
    l1: Vec<u8>,
    l1_offset: u64,
    /// Bytes of the L1 table, known or not; 0 if the header is not known.
    l1_length: u64,
    /// The layer is a qcow2 image whose header is not known.
    unknown: bool,
}

impl KnownHead {
    /// What the heads say of a layer.
    ///
    /// # Errors
    /// It cannot be, or is another thing than what the manifest says.
    pub(crate) fn new(layer: &Layer, head: Head) -> Result<Self> {
        let Head { header: start, l1, table: _ } = head;
        let wrong = |what: &dyn std::fmt::Display| {
            Error::damaged(format_args!(
                "the chain's heads: layer '{}' has {what}; push the chain again from where it is whole",
                layer.digest
            ))
        };
        if layer.format == Format::Raw {
            if !start.is_empty() || !l1.is_empty() {
                return Err(wrong(&"a header, but is raw"));
            }
            if layer.size != layer.length.next_multiple_of(512) {
                return Err(wrong(&"another size than its file"));
            }
            return Ok(Self::default());
        }
        if start.is_empty() {
            // Where the L1 table is, its file says.
            return Ok(Self { unknown: true, ..Self::default() });
        }
        let header =
            describes(layer, &start).map_err(|what| wrong(&format_args!("a wrong {what}")))?;
        let cluster = Header::probe_length(&start).map_err(|error| wrong(&error))?;
        let start_length = layer.length.min(cluster.max(MOST_HEADER) as u64);
        if start.len() as u64 > start_length {
            return Err(wrong(&"a header that is longer than what is recorded of it"));
        }
        let l1_offset = header.l1_table_offset.get();
        let l1_length = u64::from(header.l1_size) * 8;
        let end = l1_offset.checked_add(l1.len() as u64).filter(|end| *end <= layer.length);
        if !l1.is_empty() && (end.is_none() || l1.len() as u64 != l1_length) {
            return Err(wrong(&"an L1 table of another length than its header says"));
        }
        Ok(Self { start, start_length, l1, l1_offset, l1_length, unknown: false })
    }

    /// A head with these bytes of a header and of an L1 table, of which there are `length`.
    #[cfg(test)]
    pub(crate) fn sample(start: &[u8], l1: &[u8], length: u64) -> Self {
        let (start, l1) = (start.to_vec(), l1.to_vec());
        Self { start_length: start.len() as u64, start, l1, l1_length: length, ..Self::default() }
    }

    /// The bytes that are known of the header, and of the L1 table.
    pub(crate) fn parts(&self) -> [&[u8]; 2] {
        [&self.start, &self.l1]
    }

    /// Where a push looks for an L1 table that it records, if the header is known.
    pub(crate) fn l1(&self) -> Range<u64> {
        self.l1_offset..self.l1_offset.saturating_add(self.l1_length)
    }

    /// Bytes of memory that it takes.
    pub(crate) fn memory(&self) -> u64 {
        (self.start.len() + self.l1.len()) as u64
    }

    /// Fills a buffer from `offset` on, if all of these bytes are known.
    pub(crate) fn read(&self, offset: u64, buf: &mut [u8]) -> bool {
        let Some(end) = offset.checked_add(buf.len() as u64) else { return false };
        if end <= self.start_length {
            let known = usize::try_from(offset).ok().and_then(|offset| self.start.get(offset..));
            fill(buf, known.unwrap_or_default());
            return true;
        }
        let place = offset.checked_sub(self.l1_offset).and_then(|place| {
            let place = usize::try_from(place).ok()?;
            self.l1.get(place..place.checked_add(buf.len())?)
        });
        match place {
            Some(bytes) if !bytes.is_empty() => {
                buf.copy_from_slice(bytes);
                true
            }
            _ => false,
        }
    }

    /// The blocks that have something of what is known.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = u64> + use<> {
        let of = |offset: u64, length: u64| offset / BLOCK..(offset + length).div_ceil(BLOCK);
        let start = of(0, if self.unknown { 1 } else { self.start_length });
        let l1 = if self.l1.is_empty() { 0..0 } else { of(self.l1_offset, self.l1.len() as u64) };
        let end = start.end;
        start.chain(l1.filter(move |block| *block >= end))
    }

    /// Whether a block has something of it.
    pub(crate) fn is_in(&self, block: u64) -> bool {
        self.blocks().any(|known| known == block)
    }

    /// Compares it with bytes of the layer's file, from `offset` on.
    ///
    /// # Errors
    /// What differs.
    pub(crate) fn agrees(
        &self,
        layer: &Layer,
        offset: u64,
        bytes: &[u8],
    ) -> std::result::Result<(), &'static str> {
        let end = offset + bytes.len() as u64;
        let part = |range: Range<u64>| {
            let (from, to) = (range.start.max(offset), range.end.min(end));
            (from < to).then(|| (from, bytes.get((from - offset) as usize..(to - offset) as usize)))
        };
        if self.unknown && offset == 0 {
            describes(layer, bytes)?;
        }
        if let Some((from, Some(found))) = part(0..self.start_length) {
            let known = usize::try_from(from).ok().and_then(|from| self.start.get(from..));
            let known = known.unwrap_or_default();
            let (same, rest) = found.split_at(known.len().min(found.len()));
            if known.get(..same.len()) != Some(same) || rest.iter().any(|byte| *byte != 0) {
                return Err("header");
            }
        }
        if let Some((from, Some(found))) =
            part(self.l1_offset..self.l1_offset + self.l1.len() as u64)
        {
            let at = (from - self.l1_offset) as usize;
            if self.l1.get(at..at + found.len()) != Some(found) {
                return Err("L1 table");
            }
        }
        Ok(())
    }
}

/// Fills a buffer with bytes, and zeroes behind them.
fn fill(buf: &mut [u8], bytes: &[u8]) {
    let (with, zeroes) = buf.split_at_mut(bytes.len().min(buf.len()));
    with.copy_from_slice(bytes.get(..with.len()).unwrap_or_default());
    zeroes.fill(0);
}

/// Compares a header with what the manifest says of its layer.
///
/// # Errors
/// What differs.
fn describes(layer: &Layer, header: &[u8]) -> std::result::Result<Header, &'static str> {
    // Zeroes at its end may be missing. Of a cluster that is larger than what is there, the rest has nothing more: a
    // header of which that is not so is not read.
    let length = Header::probe_length(header).map_err(|_| "header")?;
    let mut cluster = header.get(..length).unwrap_or(header).to_vec();
    cluster.resize((length as u64).min(layer.length) as usize, 0);
    let header = Header::parse_for(&cluster, ParseMode::Read).map_err(|_| "header")?;
    if header.disk_size() != layer.size {
        return Err("size");
    }
    if header.backing_file != layer.backing {
        return Err("backing file");
    }
    let named = header.backing_format().filter(|_| header.backing_file.is_some());
    if named != layer.backing_format.as_deref() {
        return Err("format of the backing file");
    }
    if header.data_file().is_some() {
        return Err("data file (none is allowed)");
    }
    Ok(header)
}
