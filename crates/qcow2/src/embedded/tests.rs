//! Embedded blocks are restored, and nothing else is mistaken for one.

use super::*;
use proptest::prelude::*;
use proptest::sample::Index;
use std::fs;
use std::sync::LazyLock;

const ZONE: ZoneId = ZoneId(*b"a zone's id: 16B");

/// The executable of these tests, as an example of program data.
static PROGRAM: LazyLock<Vec<u8>> =
    LazyLock::new(|| fs::read(std::env::current_exe().unwrap()).unwrap());

fn mapping(rest: Option<u32>) -> Mapping {
    Mapping { cluster: ClusterIndex::new(7), lsn: Lsn::new(9), durable_lsn: Lsn::new(5), rest }
}

/// Bytes that do not compress.
fn noise(length: usize) -> Vec<u8> {
    let mut state = 1u64;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    std::iter::repeat_with(next).take(length).collect()
}

/// A record by the specification; `form` is without the length.
fn by_hand(form: u16, numbers: [u64; 3], rest: u32, packed: &[u8]) -> Vec<u8> {
    let span = if form & 0x8000 == 0 { 512 } else { 4096 };
    let mut block = [&ZONE.0[..], &[0; 4], &rest.to_be_bytes()].concat();
    block.extend(numbers.iter().flat_map(|number| number.to_be_bytes()));
    block.extend((form | packed.len() as u16).to_be_bytes());
    block.extend(packed);
    block.resize(4096, 0);
    with_sum(block, span)
}

fn with_sum(mut block: Vec<u8>, span: usize) -> Vec<u8> {
    let sum = Crc32c::of(&[&block[..16], &block[20..span]].concat());
    block[16..20].copy_from_slice(&sum.to_be_bytes());
    block
}

/// 512 zeroes: one, a match of 505 from 1 byte back, and 6 more.
const ZEROES: [u8; 13] = [0x1f, 0, 1, 0, 0xff, 0xe7, 0x60, 0, 0, 0, 0, 0, 0];

#[test]
fn the_layout_is_as_specified() {
    let expected = by_hand(0, [9, 5, 7], 0, &ZEROES);
    assert_eq!(expected[48..50], [0, 13]);
    let mut block = vec![0; LEAD];
    assert_eq!(embed(&mut block, &mapping(None), ZONE), Some(Span::Sector));
    assert!(block == expected);
    // With a sum of the rest, which also covers the sectors after the span.
    let mut block = vec![0; LEAD];
    block[512..].fill(3);
    let stored = 0x0102_0304 ^ Crc32c::of(&[3; 3584]).wrapping_mul(0x9e37_79b1);
    let expected = by_hand(0x4000, [9, 5, 7], stored, &ZEROES);
    assert_eq!(embed(&mut block, &mapping(Some(0x0102_0304)), ZONE), Some(Span::Sector));
    assert_eq!(block[..512], expected[..512]);
    assert!(block[512..].iter().all(|byte| *byte == 3));
    // The whole block, if the first sector is not compressible enough.
    let mut block = noise(512);
    block.resize(LEAD, 0);
    let plain = block.clone();
    assert_eq!(embed(&mut block, &mapping(Some(0x0102_0304)), ZONE), Some(Span::Block));
    let length = usize::from(u16::from_be_bytes([block[48], block[49]]) & 0x1fff);
    let packed = &block[50..50 + length];
    assert_eq!(block, by_hand(0xc000, [9, 5, 7], 0x0102_0304, packed));
    let mut unpacked = vec![0; LEAD];
    assert_eq!(decompress_into(packed, &mut unpacked).ok(), Some(LEAD));
    assert_eq!(unpacked, plain);
}

#[test]
fn what_does_not_compress_enough_stays_as_it_is() {
    let mut block = noise(LEAD);
    let plain = block.clone();
    assert_eq!(embed(&mut block, &mapping(None), ZONE), None);
    assert_eq!(block, plain);
    // Just enough: noise with this many zeroes at its end.
    let spans: Vec<Option<Span>> = (0..100)
        .map(|zeroes| {
            let mut block = plain.clone();
            block[512 - zeroes..512].fill(0);
            let before = block.clone();
            let span = embed(&mut block, &mapping(None), ZONE);
            assert_eq!(span.is_some(), extract(&mut block, ZONE).is_some(), "{zeroes}");
            assert_eq!(block, before);
            span
        })
        .collect();
    assert!(spans[..50].iter().all(Option::is_none), "{spans:?}");
    assert!(spans[80..].iter().all(|span| *span == Some(Span::Sector)), "{spans:?}");
}

#[test]
fn hostile_heads_are_no_records() {
    let lead = |rest| Some(Lead { mapping: mapping(rest), span: Span::Sector });
    let mut sound = by_hand(0, [9, 5, 7], 0, &ZEROES);
    assert_eq!(find(&sound, ZONE), lead(None));
    assert_eq!(extract(&mut sound, ZONE), lead(None));
    assert_eq!(sound, [0; LEAD]);
    let form = |form: u16, span| {
        let mut block = by_hand(0, [9, 5, 7], 0, &ZEROES);
        block[48..50].copy_from_slice(&form.to_be_bytes());
        with_sum(block, span)
    };
    let wrong = [
        ("nothing is compressed", by_hand(0, [9, 5, 7], 0, &[])),
        ("one byte too long for a sector", form(463, 512)),
        ("one byte too long for a block", form(0x8fcf, 4096)),
        ("as long as can be said", form(0x1fff, 512)),
        ("reserved", by_hand(0x2000, [9, 5, 7], 0, &ZEROES)),
        ("durable before it was made", by_hand(0, [9, 10, 7], 0, &ZEROES)),
        ("a sum that is not there", by_hand(0, [9, 5, 7], 1, &ZEROES)),
        ("a sum of the wrong span", form(0x800d, 512)),
        ("zeroes", vec![0; LEAD]),
    ];
    for (what, mut block) in wrong {
        let before = block.clone();
        assert_eq!(find(&block, ZONE), None, "{what}");
        assert_eq!(extract(&mut block, ZONE), None, "{what}");
        assert!(block == before, "{what}");
    }
    // The longest that fit are accepted.
    assert!(find(&form(462, 512), ZONE).is_some());
    assert!(find(&form(0x8fce, 4096), ZONE).is_some());
    // These cannot be written either.
    let hasty = Mapping { durable_lsn: Lsn::new(10), ..mapping(None) };
    assert_eq!(embed(&mut [0; LEAD], &hasty, ZONE), None);
}

#[test]
fn what_is_no_span_is_not_extracted() {
    let packed = |length: usize| lz4_flex::block::compress(&vec![0; length]);
    let cases = [
        ("a byte less", 0, packed(511)),
        ("a byte more", 0, packed(513)),
        ("a block in a sector", 0, packed(4096)),
        ("a sector in a block", 0x8000, packed(512)),
        ("much more", 0x8000, packed(100_000)),
        ("cut short", 0, ZEROES[..12].to_vec()),
        ("an offset of 0", 0, [&[0x1f, 0, 0], &ZEROES[3..]].concat()),
        ("an offset before the start", 0, [&[0x1f, 0, 2], &ZEROES[3..]].concat()),
    ];
    for (what, form, packed) in cases {
        let mut block = by_hand(form, [9, 5, 7], 0, &packed);
        let before = block.clone();
        assert!(find(&block, ZONE).is_some(), "{what}");
        assert_eq!(extract(&mut block, ZONE), None, "{what}");
        assert!(block == before, "{what}");
    }
}

#[test]
fn what_is_shorter_than_a_lead_block_is_none() {
    let mut block = vec![0; LEAD];
    embed(&mut block, &mapping(None), ZONE).unwrap();
    for length in [0, 15, 16, 20, 49, 50, 512, LEAD - 1] {
        let mut part = block[..length].to_vec();
        assert_eq!(find(&part, ZONE), None, "{length}");
        assert_eq!(extract(&mut part, ZONE), None, "{length}");
        assert_eq!(embed(&mut part, &mapping(None), ZONE), None, "{length}");
        assert_eq!(part, block[..length]);
    }
}

#[test]
fn the_same_loss_in_the_lead_block_and_behind_it_is_noticed() {
    // All bytes the same, over zeroes; the last sector of both parts is lost.
    let rest = Crc32c::of(&[0x55; 4096]);
    let mut block = vec![0x55; LEAD];
    assert_eq!(embed(&mut block, &mapping(Some(rest)), ZONE), Some(Span::Sector));
    assert_eq!(find(&block, ZONE).unwrap().mapping.rest, Some(rest));
    block[LEAD - 512..].fill(0);
    let mut left = vec![0x55; 4096];
    left[4096 - 512..].fill(0);
    assert_ne!(find(&block, ZONE).unwrap().mapping.rest, Some(Crc32c::of(&left)));
    assert_ne!(find(&block, ZONE).unwrap().mapping.rest, Some(rest));
}

fn any_mapping() -> impl Strategy<Value = Mapping> {
    (any::<u64>(), any::<u64>(), any::<u64>(), any::<Option<u32>>()).prop_map(
        |(cluster, lsn, durable, rest)| Mapping {
            cluster: ClusterIndex::new(cluster),
            lsn: Lsn::new(lsn.max(durable)),
            durable_lsn: Lsn::new(durable.min(lsn)),
            rest,
        },
    )
}

/// Blocks like those that guests write.
fn any_block() -> impl Strategy<Value = Vec<u8>> {
    let bytes = |length| prop::collection::vec(any::<u8>(), length);
    let words =
        prop::collection::vec(prop::sample::select(vec!["disk ", "a ", "\n", "0x1f, "]), LEAD);
    let text = words.prop_map(|words| words.concat().into_bytes()[..LEAD].to_vec());
    let sparse = prop::collection::vec((any::<Index>(), any::<u8>()), 0..200).prop_map(|set| {
        let mut block = vec![0; LEAD];
        for (at, byte) in set {
            block[at.index(LEAD)] = byte;
        }
        block
    });
    let repeated = prop::collection::vec(any::<u8>(), 1..600)
        .prop_map(|piece| piece.into_iter().cycle().take(LEAD).collect());
    let program = any::<Index>().prop_map(|at| {
        let at = at.index(PROGRAM.len() / LEAD) * LEAD;
        PROGRAM[at..at + LEAD].to_vec()
    });
    let record = (any_mapping(), 0u8..4, bytes(LEAD / 2)).prop_map(|(mapping, byte, tail)| {
        let mut block = [vec![byte; LEAD / 2], tail].concat();
        embed(&mut block, &mapping, ZONE).unwrap();
        block
    });
    prop_oneof![
        bytes(LEAD),
        text,
        Just(vec![0; LEAD]),
        sparse,
        repeated,
        program,
        record,
        bytes(LEAD / 2).prop_map(|head| [head, vec![7; LEAD / 2]].concat()),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn any_block_comes_back(plain in any_block(), mapping in any_mapping(), id: [u8; 16]) {
        let mut block = plain.clone();
        let before = find(&block, ZONE);
        let Some(span) = embed(&mut block, &mapping, ZONE) else {
            prop_assert_eq!(block, plain);
            return Ok(());
        };
        let lead = Some(Lead { mapping, span });
        prop_assert_eq!(&block[span.bytes()..], &plain[span.bytes()..]);
        prop_assert_eq!(find(&block, ZONE), lead);
        prop_assert_eq!(find(&block, ZoneId(id)), None);
        let stored = block.clone();
        prop_assert_eq!(extract(&mut block, ZoneId(id)), None);
        prop_assert!(block == stored);
        prop_assert_eq!(extract(&mut block, ZONE), lead);
        prop_assert!(block == plain);
        prop_assert_eq!(find(&block, ZONE), before);
    }

    #[test]
    fn a_changed_byte_is_noticed(
        plain in any_block(), mapping in any_mapping(), at: Index, near: bool, by in 1u8..,
    ) {
        let mut block = plain.clone();
        let Some(span) = embed(&mut block, &mapping, ZONE) else { return Ok(()) };
        let at = at.index(if near { HEAD } else { LEAD });
        block[at] ^= by;
        if at < span.bytes() {
            prop_assert_eq!(find(&block, ZONE), None);
            let changed = block.clone();
            prop_assert_eq!(extract(&mut block, ZONE), None);
            prop_assert!(block == changed);
            return Ok(());
        }
        // The record is intact, but the sum of the rest no longer matches.
        let found = find(&block, ZONE).unwrap();
        prop_assert_eq!(found.mapping.rest.is_some(), mapping.rest.is_some());
        prop_assert!(mapping.rest.is_none() || found.mapping.rest != mapping.rest);
        prop_assert_eq!(Mapping { rest: mapping.rest, ..found.mapping }, mapping);
        prop_assert_eq!(extract(&mut block, ZONE), Some(found));
        block[at] ^= by;
        prop_assert!(block == plain);
    }

    #[test]
    fn any_compressed_bytes_are_a_span_or_not(
        packed in prop::collection::vec(any::<u8>(), 1..400), whole: bool,
    ) {
        let mut block = by_hand(if whole { 0x8000 } else { 0 }, [9, 5, 7], 0, &packed);
        let before = block.clone();
        if extract(&mut block, ZONE).is_none() {
            prop_assert!(block == before);
        }
    }
}

#[test]
fn blocks_of_programs_embed_as_a_rule() {
    let blocks: Vec<&[u8]> = PROGRAM.chunks_exact(LEAD).step_by(64).collect();
    let embeds = |block: &&&[u8]| embed(&mut block.to_vec(), &mapping(None), ZONE).is_some();
    let embedded = blocks.iter().filter(embeds).count();
    assert!(embedded * 10 > blocks.len() * 9, "{embedded} of {}", blocks.len());
}
