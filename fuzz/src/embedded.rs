//! Embedded records: lead blocks that claim to hold one, and data that gets one.

use crate::take;
use isobath_qcow2::embedded::{LEAD, Lead, Mapping, Span, ZoneId, embed, extract, find};
use isobath_qcow2::{ClusterIndex, Crc32c, Lsn};

/// The zone that the seeds belong to.
pub(crate) const ZONE: ZoneId = ZoneId(*b"the seeds' zone!");

/// By the first byte: a lead block, of which bit 1 says whether to make its head right, or data.
pub fn embedded(data: &[u8]) {
    let Some((kind, mut data)) = data.split_first() else { return };
    if kind % 2 == 1 {
        let number = |data: &mut &[u8]| u64::from_be_bytes(take(data));
        let (cluster, serial, proven) = (number(&mut data), number(&mut data), number(&mut data));
        let rest = u32::from_be_bytes(take(&mut data));
        let mapping = Mapping {
            cluster: ClusterIndex::new(cluster),
            lsn: Lsn::new(serial),
            durable_lsn: Lsn::new(proven),
            rest: (kind & 2 != 0).then_some(rest),
        };
        let mut block = data.to_vec();
        block.resize(LEAD, 0);
        round_trip(&block, &mapping);
        return;
    }
    let mut block = data.to_vec();
    if kind & 2 != 0 {
        block.resize(LEAD, 0);
        make_whole(&mut block);
    }
    any_block(&block);
}

/// Gives a block the zone's id and a sum that is right.
fn make_whole(block: &mut [u8]) {
    block[..16].copy_from_slice(&ZONE.0);
    let span = if block[48] & 0x80 == 0 { Span::Sector } else { Span::Block };
    let sum = Crc32c::of(&[&block[..16], &block[20..span.bytes()]].concat());
    block[16..20].copy_from_slice(&sum.to_be_bytes());
}

fn any_block(stored: &[u8]) {
    let found = find(stored, ZONE);
    let mut block = stored.to_vec();
    let Some(lead) = extract(&mut block, ZONE) else {
        assert!(block == stored);
        return;
    };
    assert_eq!(found, Some(lead));
    let behind = lead.span.bytes();
    assert!(block[behind..] == stored[behind..]);
    assert_eq!(find(stored, ZoneId([0; 16])), None);
    if block.len() == LEAD {
        round_trip(&block, &lead.mapping);
    }
}

fn round_trip(plain: &[u8], mapping: &Mapping) {
    let mut block = plain.to_vec();
    let Some(span) = embed(&mut block, mapping, ZONE) else {
        assert!(block == plain);
        return;
    };
    let lead = Some(Lead { mapping: *mapping, span });
    assert_eq!(find(&block, ZONE), lead);
    assert_eq!(extract(&mut block, ZONE), lead);
    assert!(block == plain);
}
