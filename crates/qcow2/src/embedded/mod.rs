//! Embedded records: mappings stored in the data that they map.
//!
//! The first [`LEAD`] bytes of a data cluster, or only their first sector, are compressed to make room for a record
//! that names the guest cluster, so the write of a new cluster's data also maps it. A record is valid only in a
//! [zone](crate::journal::Zone) that the journal lists, and with that zone's id. `docs/format.md` specifies it to the
//! byte.

#[cfg(test)]
mod tests;

use crate::bytes;
use crate::checksum::Crc32c;
use crate::lsn::Lsn;
use crate::offset::ClusterIndex;
use lz4_flex::block::{
    CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size,
};
use std::cell::RefCell;

/// Bytes of a cluster's lead block.
pub const LEAD: usize = 4096;

/// Bytes of a record before the compressed bytes.
const HEAD: usize = 50;
const SUM: usize = 16;
/// First byte after the sum.
const BEHIND_SUM: usize = 20;
const REST: usize = 20;
const LSN: usize = 24;
const DURABLE: usize = 32;
const CLUSTER: usize = 40;
const FORM: usize = 48;

/// Bit of the form: the span is the whole block.
const FORM_BLOCK: u16 = 1 << 15;
/// Bit of the form: the sum of the rest is present.
const FORM_REST: u16 = 1 << 14;
/// Bit of the form that has no meaning.
const FORM_RESERVED: u16 = 1 << 13;
/// Bits of the form: how many bytes the compressed span takes.
const FORM_PACKED: u16 = FORM_RESERVED - 1;

/// Multiplier for the sum of the sectors after a sector span. It is odd and not a power of two: sums are linear, and
/// the same damage in both parts must not cancel out.
const STIR: u32 = 0x9e37_79b1;

/// Identifies a zone's time of use.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ZoneId(pub [u8; 16]);

/// How much of a lead block is compressed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Span {
    /// Its first sector of 512 bytes.
    Sector,
    /// All of it.
    Block,
}

impl Span {
    /// Bytes of it.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Sector => 512,
            Self::Block => LEAD,
        }
    }
}

/// The contents of the record in a lead block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// The guest cluster.
    pub cluster: ClusterIndex,
    /// The record's LSN; the highest for a guest cluster counts.
    pub lsn: Lsn,
    /// Every record with a lower LSN was durable when this one was made; at most `lsn`.
    pub durable_lsn: Lsn,
    /// CRC-32C of the cluster's bytes after the lead block, if they must be as written. If the sectors after a sector
    /// span are not as written, [`find`] returns a different number here: if the sum matches, the whole cluster is as
    /// written.
    pub rest: Option<u32>,
}

/// A record that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lead {
    /// Its contents.
    pub mapping: Mapping,
    /// How much of the lead block it takes.
    pub span: Span,
}

struct Scratch {
    table: CompressTable,
    packed: [u8; get_maximum_output_size(LEAD)],
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch {
        table: CompressTable::default(),
        packed: [0; get_maximum_output_size(LEAD)],
    });
}

impl Scratch {
    /// Compresses `plain`, a span; `None` if that leaves no room for a head.
    fn pack(&mut self, plain: &[u8]) -> Option<&[u8]> {
        let length = compress_into_with_table(plain, &mut self.packed, &mut self.table).ok()?;
        self.packed.get(..length).filter(|packed| HEAD + packed.len() <= plain.len())
    }
}

/// Puts `mapping` into the lead block at the start of `block`; `None`, with the block unchanged, if it
/// does not compress enough.
pub fn embed(block: &mut [u8], mapping: &Mapping, zone: ZoneId) -> Option<Span> {
    [Span::Sector, Span::Block].into_iter().find(|&span| embed_in(span, block, mapping, zone))
}

/// As [`embed`], for a given span. Returns whether it compresses enough.
#[must_use]
pub fn embed_in(span: Span, block: &mut [u8], mapping: &Mapping, zone: ZoneId) -> bool {
    let Some(block) = block.first_chunk_mut::<LEAD>() else { return false };
    if mapping.durable_lsn > mapping.lsn {
        return false;
    }
    SCRATCH.with_borrow_mut(|scratch| {
        let plain = block.get(..span.bytes()).unwrap_or_default();
        let packed = scratch.pack(plain);
        packed.and_then(|packed| write(block, span, packed, mapping, zone)).is_some()
    })
}

/// Writes a record over a span; `None` only if `packed` is too long, which it is not.
fn write(
    block: &mut [u8; LEAD],
    span: Span,
    packed: &[u8],
    mapping: &Mapping,
    zone: ZoneId,
) -> Option<()> {
    let mut form = packed.len() as u16;
    let mut rest = 0;
    if span == Span::Block {
        form |= FORM_BLOCK;
    }
    if let Some(sum) = mapping.rest {
        form |= FORM_REST;
        rest = sum ^ behind(block, span);
    }
    let block = block.get_mut(..span.bytes())?;
    bytes::put(block, 0, &zone.0)?;
    bytes::put(block, REST, &rest.to_be_bytes())?;
    bytes::put(block, LSN, &mapping.lsn.get().to_be_bytes())?;
    bytes::put(block, DURABLE, &mapping.durable_lsn.get().to_be_bytes())?;
    bytes::put(block, CLUSTER, &mapping.cluster.get().to_be_bytes())?;
    bytes::put(block, FORM, &form.to_be_bytes())?;
    bytes::put(block, HEAD, packed)?;
    block.get_mut(HEAD + packed.len()..)?.fill(0);
    let sum = sum(block)?;
    bytes::put(block, SUM, &sum.to_be_bytes())
}

/// The record in the lead block at the start of `block`, if there is one of that zone with a right sum. The compressed
/// bytes are not examined.
pub fn find(block: &[u8], zone: ZoneId) -> Option<Lead> {
    Some(parse(block.first_chunk()?, zone)?.0)
}

/// Restores the plain contents of the lead block at the start of `block`; `None`, with the block unchanged, if it holds
/// no record of that zone or does not decompress to a span.
pub fn extract(block: &mut [u8], zone: ZoneId) -> Option<Lead> {
    let block: &mut [u8; LEAD] = block.first_chunk_mut()?;
    let (lead, packed) = parse(block, zone)?;
    let mut plain = [0; LEAD];
    let plain = plain.get_mut(..lead.span.bytes())?;
    if decompress_into(packed, plain).ok() != Some(plain.len()) {
        return None;
    }
    bytes::put(block, 0, plain)?;
    Some(lead)
}

/// The record and the compressed bytes.
fn parse(block: &[u8; LEAD], zone: ZoneId) -> Option<(Lead, &[u8])> {
    if !block.starts_with(&zone.0) {
        return None;
    }
    let form = bytes::be16(block, FORM)?;
    let span = if form & FORM_BLOCK == 0 { Span::Sector } else { Span::Block };
    let packed_length = usize::from(form & FORM_PACKED);
    let whole = block.get(..span.bytes())?;
    let packed = whole.get(HEAD..HEAD + packed_length)?;
    let [lsn, durable_lsn] = [bytes::be64(block, LSN)?, bytes::be64(block, DURABLE)?].map(Lsn::new);
    let stored = bytes::be32(block, REST)?;
    let has_rest = form & FORM_REST != 0;
    let valid = form & FORM_RESERVED == 0
        && packed_length > 0
        && durable_lsn <= lsn
        && (has_rest || stored == 0)
        && bytes::be32(block, SUM) == Some(sum(whole)?);
    let rest = has_rest.then(|| stored ^ behind(block, span));
    let cluster = ClusterIndex::new(bytes::be64(block, CLUSTER)?);
    valid.then_some((Lead { mapping: Mapping { cluster, lsn, durable_lsn, rest }, span }, packed))
}

/// The sum of a span as it is stored, without the sum's own bytes.
fn sum(span: &[u8]) -> Option<u32> {
    let mut sum = Crc32c::default();
    sum.update(span.get(..SUM)?);
    sum.update(span.get(BEHIND_SUM..)?);
    Some(sum.finish())
}

/// The value that the sum of the rest is xored with, which depends on the sectors after a sector span.
fn behind(block: &[u8; LEAD], span: Span) -> u32 {
    match block.get(span.bytes()..) {
        Some(sectors) if !sectors.is_empty() => Crc32c::of(sectors).wrapping_mul(STIR),
        _ => 0,
    }
}
