//! Journals as they are after a crash: what is found in them, and what it says.

use super::record::tests::operations;
use super::*;
use crate::checksum::Crc32c;
use crate::error::FormatErrorKind;
use crate::lsn::Lsn;
use crate::offset::HostOffset;
use proptest::prelude::*;
use proptest::sample::Index;

const ID: u64 = 0x5eed_5eed_5eed_5eed;
const FIRST: u64 = 100;
/// Bytes of the file that operations are about.
const FILE: u64 = 200;

fn extension(area: &[u8]) -> JournalExtension {
    JournalExtension {
        area_offset: HostOffset::new(1 << 16),
        area_length: area.len() as u64,
        id: ID,
        first_lsn: Lsn::new(FIRST),
    }
}

fn record(lsn: u64, tail: u64, operations: Vec<Operation>) -> Record {
    let (previous, lsn, tail) = (Lsn::new(lsn - 1), Lsn::new(lsn), Lsn::new(tail));
    Record { lsn, previous, tail, data_from: tail, operations }
}

fn put(area: &mut [u8], at: usize, record: &Record) {
    let blocks = record.encode(ID).unwrap();
    area[at..at + blocks.len()].copy_from_slice(&blocks);
}

fn patch(offset: u64, bytes: &[u8]) -> Operation {
    Operation::Patch { offset: HostOffset::new(offset), bytes: bytes.to_vec() }
}

fn bytes(offset: u64, bytes: &[u8]) -> ReplayRange {
    ReplayRange { offset: HostOffset::new(offset), content: Content::Bytes(bytes.to_vec()) }
}

fn zeroes(offset: u64, length: u64) -> ReplayRange {
    ReplayRange { offset: HostOffset::new(offset), content: Content::Zeroes(length) }
}

/// What is replayed of these records, one after the other in an area.
fn replayed(records: &[Record]) -> Vec<ReplayRange> {
    let mut area = vec![0; 64 << 10];
    let mut at = 0;
    for record in records {
        put(&mut area, at, record);
        at += record.encoded_length();
    }
    Journal::scan(&area, &extension(&area)).unwrap().replay().unwrap().ranges().collect()
}

#[test]
fn an_empty_area_has_nothing_to_replay() {
    let area = vec![0xa5; 16 << 10];
    let mut journal = Journal::scan(&area, &extension(&area)).unwrap();
    assert_eq!(journal.last(), None);
    assert_eq!(journal.checksums().next(), None);
    assert!(journal.replay().unwrap().is_empty());
    assert_eq!(journal.replay().unwrap().end().get(), 0);
    assert!(journal.drop_last().is_err());
}

#[test]
fn ranges_are_joined_and_zeroes_take_no_memory() {
    let zero = |offset, length| Operation::Zero { offset: HostOffset::new(offset), length };
    let ranges = replayed(&[
        record(100, 100, vec![patch(10, b"abcdef"), zero(1 << 40, u32::MAX)]),
        record(101, 100, vec![patch(16, b"gh"), patch(12, b"CD"), zero(18, 4), patch(20, b"x")]),
        record(102, 100, vec![zero((1 << 40) + u64::from(u32::MAX), u32::MAX), patch(30, b"")]),
    ]);
    let expected = [
        bytes(10, b"abCDefgh"),
        zeroes(18, 2),
        bytes(20, b"x"),
        zeroes(21, 1),
        zeroes(1 << 40, 2 * u64::from(u32::MAX)),
    ];
    assert_eq!(ranges, expected);
}

#[test]
fn a_revocation_cancels_what_is_earlier_than_its_record() {
    let revoke = |offset, length| Operation::Revoke { offset: HostOffset::new(offset), length };
    let ranges = replayed(&[
        record(100, 100, vec![patch(0, b"0123456789")]),
        // In the same record, before and behind it: these stay.
        record(101, 100, vec![patch(3, b"a"), revoke(2, 6), patch(4, b"b")]),
        record(102, 100, vec![patch(6, b"c")]),
    ]);
    assert_eq!(ranges, [bytes(0, b"01"), bytes(3, b"ab"), bytes(6, b"c"), bytes(8, b"89")]);
}

#[test]
fn what_is_in_its_place_is_not_overwritten_by_what_is_older() {
    let offset = HostOffset::new(2);
    let data = |bytes: &[u8]| Operation::Data { offset, bytes: bytes.to_vec() };
    let cover = Operation::Checksum { offset: HostOffset::new(6), length: 2, crc: 1 };
    let records = [
        record(100, 100, vec![patch(0, b"0123456789")]),
        record(101, 100, vec![data(b"ab")]),
        Record { data_from: Lsn::new(102), ..record(102, 100, vec![cover, patch(7, b"xy")]) },
    ];
    assert_eq!(replayed(&records), [bytes(0, b"01"), bytes(4, b"45"), bytes(8, b"y9")]);
    assert_eq!(replayed(&records[..2]), [bytes(0, b"01ab456789")]);
}

#[test]
fn a_replay_tells_what_it_touches() {
    let mut area = vec![0; 16 << 10];
    put(&mut area, 4096, &record(100, 100, vec![patch(10, b"abc"), patch(20, b"d")]));
    let replay = Journal::scan(&area, &extension(&area)).unwrap().replay().unwrap();
    let touches = |offset, length| replay.touches(HostOffset::new(offset), length);
    assert!(touches(0, 11) && touches(12, 1) && touches(0, u64::MAX) && touches(13, 8));
    assert!(!touches(0, 10) && !touches(13, 7) && !touches(11, 0) && !touches(21, u64::MAX));
    assert_eq!(replay.end().get(), 21);
}

#[test]
fn the_last_record_says_what_to_check_and_may_be_dropped_once() {
    let cover = |n: u32| Operation::Checksum { offset: HostOffset::new(512), length: n, crc: n };
    let mut area = vec![0; 16 << 10];
    put(&mut area, 0, &record(100, 100, vec![patch(0, b"a"), cover(9)]));
    put(&mut area, 8192, &record(101, 101, vec![cover(7), patch(0, b"b"), cover(8)]));
    let mut journal = Journal::scan(&area, &extension(&area)).unwrap();
    let last = Found {
        lsn: Lsn::new(101),
        previous: Lsn::new(100),
        tail: Lsn::new(101),
        data_from: Lsn::new(101),
        at: 8192,
        length: 4096,
    };
    assert_eq!(journal.last(), Some(last));
    let offset = HostOffset::new(512);
    assert_eq!(journal.checksums().collect::<Vec<_>>(), [(offset, 7, 7), (offset, 8, 8)]);
    assert_eq!(journal.replay().unwrap().ranges().collect::<Vec<_>>(), [bytes(0, b"b")]);
    journal.drop_last().unwrap();
    assert_eq!(journal.last().unwrap().lsn, Lsn::new(100));
    assert_eq!(journal.checksums().next(), None);
    assert_eq!(journal.replay().unwrap().ranges().collect::<Vec<_>>(), [bytes(0, b"a")]);
    let error = journal.drop_last().unwrap_err().to_string();
    assert!(error.contains("record is 100, the last one"), "{error}");
}

#[test]
fn the_first_record_may_be_dropped_and_needs_none_before_it() {
    let mut area = vec![0; 16 << 10];
    // The tail is older than the journal.
    put(&mut area, 0, &record(FIRST, 3, vec![patch(0, b"a")]));
    let mut journal = Journal::scan(&area, &extension(&area)).unwrap();
    assert_eq!(journal.replay().unwrap().ranges().collect::<Vec<_>>(), [bytes(0, b"a")]);
    journal.drop_last().unwrap();
    assert!(journal.replay().unwrap().is_empty());
    assert_eq!(journal.last(), None);
}

#[test]
fn a_missing_record_is_named() {
    let mut area = vec![0; 32 << 10];
    put(&mut area, 0, &record(102, 102, vec![patch(0, b"a")]));
    put(&mut area, 4096, &record(104, 102, vec![]));
    let error = Journal::scan(&area, &extension(&area)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "journal record is 103 is missing: the journal is damaged: record 104, the last one, needs \
         it; the image cannot be recovered automatically: restore it from a backup, or have it \
         checked by hand"
    );
    put(&mut area, 4096, &record(104, 104, vec![]));
    let mut journal = Journal::scan(&area, &extension(&area)).unwrap();
    // What decided before it was 103.
    let error = journal.drop_last().unwrap_err();
    assert_eq!(error.value(), "103 is missing");
    put(&mut area, 8192, &record(103, 101, vec![]));
    let mut journal = Journal::scan(&area, &extension(&area)).unwrap();
    assert_eq!(journal.drop_last().unwrap_err().value(), "101 is missing");
    // A tail far below.
    put(&mut area, 4096, &record(u64::MAX, 0, vec![]));
    let error = Journal::scan(&area, &extension(&area)).unwrap_err();
    assert_eq!(error.value(), format!("{} is missing", u64::MAX - 1));
}

#[test]
fn what_is_whole_but_cannot_be_is_an_error() {
    let mut area = vec![0; 16 << 10];
    put(&mut area, 0, &record(100, 100, vec![patch(0, b"a")]));
    put(&mut area, 8192, &record(100, 100, vec![]));
    let error = Journal::scan(&area, &extension(&area)).unwrap_err();
    assert_eq!(error.value(), "100");
    assert!(error.to_string().contains("at 0x0 and 0x2000"), "{error}");
    // An operation of a later version, with a sum that is right.
    let mut blocks = record(101, 100, vec![patch(0, b"a")]).encode(ID).unwrap();
    blocks[64] = 9;
    let crc = Crc32c::of(&blocks[8..64 + 24]).to_be_bytes();
    blocks[4..8].copy_from_slice(&crc);
    area[8192..12288].copy_from_slice(&blocks);
    let error = Journal::scan(&area, &extension(&area)).unwrap_err();
    assert_eq!(error.kind(), FormatErrorKind::Unsupported);
    let whole = JournalExtension { area_length: 32 << 10, ..extension(&area) };
    assert!(Journal::scan(&area, &whole).unwrap_err().to_string().contains("header says 32768"));
}

#[test]
fn records_of_others_and_inside_of_others_are_passed_over() {
    let mut area = vec![0; 32 << 10];
    put(&mut area, 0, &record(99, 99, vec![patch(0, b"too early")]));
    let other = record(105, 105, vec![patch(0, b"of another journal")]).encode(ID + 1).unwrap();
    area[4096..8192].copy_from_slice(&other);
    assert_eq!(Journal::scan(&area, &extension(&area)).unwrap().last(), None);
    // A whole record as the payload of another, at the start of a block.
    let mut inner = vec![0; 4096 - 64 - 16];
    inner.extend(record(106, 106, vec![]).encode(ID).unwrap());
    put(&mut area, 8192, &record(100, 100, vec![patch(7, &inner)]));
    let journal = Journal::scan(&area, &extension(&area)).unwrap();
    assert_eq!(journal.last().unwrap().lsn, Lsn::new(100));
    assert_eq!(journal.replay().unwrap().ranges().collect::<Vec<_>>(), [bytes(7, &inner)]);
}

/// What byte `at` of the file must hold by records that are all there, the last of which decides:
/// looked for from the last operation to the first.
fn model(records: &[Record], at: u64) -> Option<u8> {
    let last = records.last()?;
    let hit = |offset: &HostOffset, length: usize| {
        (offset.get()..offset.get() + length as u64).contains(&at)
    };
    for record in records.iter().rev().filter(|record| record.lsn >= last.tail) {
        let covered = |operation: &Operation| match operation {
            Operation::Checksum { offset, length, .. } => hit(offset, *length as usize),
            _ => false,
        };
        if record.operations.iter().any(covered) {
            return None;
        }
        for operation in record.operations.iter().rev() {
            match operation {
                Operation::Patch { offset, bytes } if hit(offset, bytes.len()) => {
                    return Some(bytes[(at - offset.get()) as usize]);
                }
                Operation::Zero { offset, length } if hit(offset, *length as usize) => {
                    return Some(0);
                }
                Operation::Data { offset, bytes } if hit(offset, bytes.len()) => {
                    let needed = record.lsn >= last.data_from;
                    return needed.then(|| bytes[(at - offset.get()) as usize]);
                }
                _ => {}
            }
        }
        let revoked = |operation: &Operation| match operation {
            Operation::Revoke { offset, length } => hit(offset, *length as usize),
            _ => false,
        };
        if record.operations.iter().any(revoked) {
            return None;
        }
    }
    None
}

fn check_zones(journal: &Journal<'_>, records: &[Record]) {
    let listed = records.last().and_then(|last| {
        last.operations.iter().find_map(|operation| match operation {
            Operation::Zones(zones) => Some(zones.clone()),
            _ => None,
        })
    });
    assert_eq!(journal.zones(), listed);
}

fn check_replay(journal: &Journal<'_>, records: &[Record]) {
    let mut file = vec![None; 300];
    let mut before: Option<(u64, bool)> = None;
    for range in journal.replay().unwrap().ranges() {
        let start = range.offset.get();
        let (bytes, is_bytes) = match range.content {
            Content::Bytes(bytes) => (bytes, true),
            Content::Zeroes(length) => (vec![0; length as usize], false),
        };
        assert!(!bytes.is_empty());
        if let Some((end, kind)) = before {
            assert!(start > end || start == end && kind != is_bytes, "{end} {start}");
        }
        before = Some((start + bytes.len() as u64, is_bytes));
        for (at, byte) in bytes.iter().enumerate() {
            file[start as usize + at] = Some(*byte);
        }
    }
    assert_eq!(journal.replay().unwrap().end().get(), before.map_or(0, |(end, _)| end));
    for (at, byte) in file.iter().enumerate() {
        assert_eq!(*byte, model(records, at as u64), "byte {at} by {records:?}");
        let touched = journal.replay().unwrap().touches(HostOffset::new(at as u64), 1);
        assert_eq!(touched, byte.is_some());
    }
}

/// What a record is made of: operations, how far tail and `data_from` move, blocks of ballast, and numbers that
/// are left out before its own.
type Plan = (Vec<Operation>, Index, Index, usize, u64);

/// A history of records in an area, each durable before the next is written, that ends before a
/// record would overwrite one that is still needed.
fn written(area: &mut [u8], plans: &[Plan]) -> Vec<(usize, Record)> {
    let mut written: Vec<(usize, Record)> = Vec::new();
    let mut previous = FIRST - 1;
    for (operations, tail, data_from, ballast, gap) in plans {
        let lsn = previous + 1 + gap;
        let before = written.last().map_or((0, FIRST, FIRST), |(at, record)| {
            (at + record.encoded_length(), record.tail.get(), record.data_from.get())
        });
        let (mut at, least_tail, least_data) = before;
        let mut operations = operations.clone();
        let elsewhere = Operation::Checksum { offset: HostOffset::new(1 << 20), length: 9, crc: 9 };
        operations.extend(vec![elsewhere; ballast * 90]);
        let between = |least: u64, by: &Index| least + by.index((lsn - least + 1) as usize) as u64;
        let record = Record {
            lsn: Lsn::new(lsn),
            previous: Lsn::new(previous),
            tail: Lsn::new(between(least_tail, tail)),
            data_from: Lsn::new(between(least_data, data_from)),
            operations,
        };
        previous = lsn;
        let length = record.encoded_length();
        if at + length > area.len() {
            at = 0;
        }
        let taken = written.iter().any(|(other, record)| {
            record.lsn >= Lsn::new(least_tail)
                && at < other + record.encoded_length()
                && *other < at + length
        });
        if taken {
            break;
        }
        put(area, at, &record);
        written.push((at, record));
    }
    written
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn what_a_crash_leaves_is_replayed_as_the_model_says(
        plans in prop::collection::vec(
            (operations(FILE, 0..6), any::<Index>(), any::<Index>(), 0usize..6, 0u64..4),
            1..40,
        ),
        old in 0u8..3,
        sectors in prop::collection::vec(any::<Index>(), 0..4),
        drop: bool,
    ) {
        let mut area = vec![0; 32 << 10];
        for (n, block) in (0..).zip(area.chunks_exact_mut(BLOCK)) {
            // What an earlier journal has left, or the numbers before this one's first.
            let (id, lsn) = [(0, n + 1), (ID ^ 1, FIRST + n), (ID, FIRST - 1 - n)][usize::from(old)];
            let record = Record { lsn: Lsn::new(lsn), ..Record::default() };
            block.copy_from_slice(&record.encode(id).unwrap());
        }
        let mut before = area.clone();
        let records = written(&mut area, &plans);
        // The same without the last, of which a crash keeps some sectors from reaching the disk.
        prop_assert_eq!(written(&mut before, &plans[..records.len() - 1]).len(), records.len() - 1);
        let (at, last) = records.last().unwrap();
        let whole = area.clone();
        for sector in &sectors {
            let from = at + 512 * sector.index(last.encoded_length() / 512);
            area[from..from + 512].copy_from_slice(&before[from..from + 512]);
        }
        // Behind the operations is padding.
        let used = 64 + last.operations.iter().map(Operation::encoded_length).sum::<usize>();
        let torn = area[*at..at + used] != whole[*at..at + used];
        let mut records: Vec<Record> = records.iter().map(|(_, record)| record.clone()).collect();
        if torn {
            records.pop();
        }
        let mut journal = Journal::scan(&area, &extension(&area)).unwrap();
        prop_assert_eq!(journal.last().map(|last| last.lsn), records.last().map(|r| r.lsn));
        check_replay(&journal, &records);
        check_zones(&journal, &records);
        if drop && !torn {
            let checksums = journal.checksums().count();
            prop_assert!(checksums >= 90 * plans[records.len() - 1].3);
            journal.drop_last().unwrap();
            records.pop();
            check_replay(&journal, &records);
            check_zones(&journal, &records);
        }
    }

    #[test]
    fn any_area_is_scanned(
        changes in prop::collection::vec((0usize..16384, any::<u8>()), 0..20),
    ) {
        let mut area = vec![0; 16 << 10];
        put(&mut area, 0, &record(100, 100, vec![patch(0, &[1; 5000])]));
        put(&mut area, 8192, &record(101, 100, vec![patch(0, &[2; 50])]));
        for (at, byte) in changes {
            area[at] = byte;
        }
        if let Ok(mut journal) = Journal::scan(&area, &extension(&area)) {
            let _ = journal.replay().unwrap().ranges().count();
            let _ = journal.drop_last();
        }
    }
}

#[test]
fn more_ranges_than_any_writer_leaves_are_refused() {
    let zeroes = |count: u64| {
        let zero = |n: u64| Operation::Zero { offset: HostOffset::new(n * 2), length: 1 };
        let record = record(FIRST, FIRST, (0..count).map(zero).collect());
        let blocks = record.encode(ID).unwrap();
        let mut area = vec![0; blocks.len().next_multiple_of(64 << 10)];
        area[..blocks.len()].copy_from_slice(&blocks);
        Journal::scan(&area, &extension(&area))
            .unwrap()
            .replay()
            .map(|replay| replay.ranges().count())
    };
    assert_eq!(zeroes(1 << 16), Ok(1 << 16));
    assert_eq!(zeroes(MAX_PIECES as u64), Ok(MAX_PIECES));
    let error = zeroes(MAX_PIECES as u64 + 1).unwrap_err();
    assert!(error.to_string().contains("more than 2097152 ranges"), "{error}");
}

#[test]
fn numbers_may_be_left_out_and_a_missing_record_is_told_from_a_gap() {
    let after = |previous: u64, record: Record| Record { previous: Lsn::new(previous), ..record };
    let mut area = vec![0; 32 << 10];
    put(&mut area, 0, &after(90, record(103, 90, vec![patch(0, b"a")])));
    put(&mut area, 4096, &after(103, record(110, 104, vec![patch(1, b"b")])));
    put(&mut area, 8192, &after(110, record(111, 103, vec![patch(2, b"c")])));
    let mut journal = Journal::scan(&area, &extension(&area)).unwrap();
    assert_eq!(journal.replay().unwrap().ranges().collect::<Vec<_>>(), [bytes(0, b"abc")]);
    journal.drop_last().unwrap();
    // Only the one: a tail may be a number that no record has.
    assert_eq!(journal.replay().unwrap().ranges().collect::<Vec<_>>(), [bytes(1, b"b")]);
    area[4096..8192].fill(0);
    let error = Journal::scan(&area, &extension(&area)).unwrap_err();
    assert_eq!(error.value(), "110 is missing");
}
