//! The journal: records, areas of them, and edits of the header that points to one.

use isobath_qcow2::journal::{
    BLOCK, Content, HEAD_BYTES, Journal, JournalExtension, MIN_AREA, Operation, Record,
};
use isobath_qcow2::{Crc32c, Header, HostOffset, IncompatibleFeatures, Lsn, ParseMode};

/// The journal that the seeds belong to.
pub(crate) const ID: u64 = 0x1504_a7b5_f022_1e55;

/// By the first byte: a record, an area, or a header and its edits.
pub fn journal(data: &[u8]) {
    let Some((kind, data)) = data.split_first() else { return };
    let mut bytes = data.to_vec();
    match kind % 3 {
        0 => {
            make_whole(&mut bytes);
            record(&bytes);
        }
        1 => {
            let length = bytes.len().next_multiple_of(BLOCK).clamp(MIN_AREA as usize, 1 << 20);
            bytes.resize(length, 0);
            // From the last on, so that the sums of those in which others lie are right too.
            for at in (0..length).step_by(BLOCK).rev() {
                make_whole(&mut bytes[at..]);
            }
            area(&bytes);
        }
        _ => edit(&bytes),
    }
}

/// Makes what looks like a record one of this journal, with a sum that is right.
fn make_whole(bytes: &mut [u8]) {
    if bytes.len() < HEAD_BYTES || !bytes.starts_with(b"IBJR") {
        return;
    }
    bytes[8..16].copy_from_slice(&ID.to_be_bytes());
    let length = u32::from_be_bytes([bytes[40], bytes[41], bytes[42], bytes[43]]) as usize;
    let crc = Crc32c::of(&bytes[8..length.clamp(8, bytes.len())]);
    bytes[4..8].copy_from_slice(&crc.to_be_bytes());
}

fn record(bytes: &[u8]) {
    let Ok(record) = Record::parse(bytes, ID) else { return };
    let again = record.encode(ID).expect("what was read here");
    assert_eq!(again.len(), record.encoded_length());
    // Nothing in a record is ignored: what follows `used` in it is zeroes.
    let used = again.iter().rposition(|byte| *byte != 0).unwrap_or(0);
    assert!(bytes.starts_with(&again[..=used]));
    assert_eq!(Record::parse(&again, ID), Ok(record));
}

fn area(area: &[u8]) {
    let extension = JournalExtension {
        area_offset: HostOffset::new(1 << 20),
        area_length: area.len() as u64,
        id: ID,
        first_lsn: Lsn::new(2),
    };
    let Ok(mut journal) = Journal::scan(area, &extension) else { return };
    replay(&journal, area.len());
    let last = journal.last();
    if let Some(last) = last {
        let record = Record::parse(&area[last.at..], ID).expect("found here");
        assert_eq!(record.encoded_length(), last.length);
        assert!(journal.checksums().count() <= record.operations.len());
        let zones = record.operations.iter().find_map(|operation| match operation {
            Operation::Zones(zones) => Some(zones),
            _ => None,
        });
        assert_eq!(journal.zones().as_ref(), zones);
    }
    if journal.drop_last().is_ok() {
        assert_eq!(journal.checksums().count(), 0);
        let expected = last.map(|last| last.previous).filter(|n| *n >= Lsn::new(2));
        assert_eq!(journal.last().map(|last| last.lsn), expected);
        replay(&journal, area.len());
    }
}

/// Ranges are in order, apart, and hold no more bytes than the area.
fn replay(journal: &Journal<'_>, most: usize) {
    let Ok(replay) = journal.replay() else { return };
    let (mut end, mut total) = (0, 0);
    for range in replay.ranges() {
        let length = match &range.content {
            Content::Bytes(bytes) => {
                total += bytes.len();
                bytes.len() as u64
            }
            Content::Zeroes(length) => *length,
        };
        assert!(length > 0 && range.offset.get() >= end && replay.touches(range.offset, 1));
        end = range.offset.get() + length;
    }
    assert!(total <= most && end <= 1 << 56 && end == replay.end().get());
}

/// After each write of an edit the header is whole.
fn edit(bytes: &[u8]) {
    let Ok(length) = Header::probe_length(bytes) else { return };
    let mut cluster = bytes.to_vec();
    cluster.resize(cluster.len().max(length), 0);
    let Ok(before) = Header::parse(&cluster) else { return };
    let length = 1u64 << before.cluster_bits.max(14);
    let wanted = [1, 2].map(|n| JournalExtension {
        area_offset: HostOffset::new(n * length),
        area_length: n * length,
        id: n,
        first_lsn: Lsn::new(n),
    });
    for wanted in [Some(&wanted[0]), Some(&wanted[1]), None, Some(&wanted[0])] {
        let Ok(writes) = Header::edit_journal(&cluster, wanted) else { continue };
        for (at, new) in writes {
            cluster[at..at + new.len()].copy_from_slice(&new);
            let now = Header::parse(&cluster).expect("a whole header");
            assert_eq!(now.backing_file, before.backing_file);
            assert_eq!(now.backing_format(), before.backing_format());
            assert_eq!(now.data_file(), before.data_file());
            assert_eq!((now.index(), now.bitmaps()), (before.index(), before.bitmaps()));
        }
        let mut now = Header::parse(&cluster).expect("a whole header");
        now.incompatible = now.incompatible.with(IncompatibleFeatures::JOURNAL);
        assert_eq!(now.validate(ParseMode::Open).ok().and(now.journal()), wanted);
    }
}
