//! The contents that requests write.
//!
//! There are several sorts of contents, since the engine may compress data to store something of its own beside it, or
//! look for its own data. Except for zeroes and data that a guest took from the files themselves, every 8 bytes of each
//! sort identify their pattern and their position.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// A sort of contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Sort {
    /// Zeroes, written as data.
    Zeroes,
    /// Numbers: compresses to two thirds.
    Plain,
    /// Letters: compresses.
    Text,
    /// Does not compress.
    Random,
    /// Of each 4 KiB only the first sector compresses.
    Sector,
    /// Of each 4 KiB all but the first sector compresses.
    Block,
    /// Some of each.
    Mixed,
    /// Imitates a record of the engine, with an id from the image's journal.
    Hostile,
    /// Clusters copied from the image's file.
    Copied,
}

impl Sort {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Zeroes,
        Self::Plain,
        Self::Text,
        Self::Random,
        Self::Sector,
        Self::Block,
        Self::Mixed,
        Self::Hostile,
        Self::Copied,
    ];

    /// Those of [`ALL`](Self::ALL) that are generated from a number.
    const WRITTEN: [Self; 6] =
        [Self::Plain, Self::Text, Self::Random, Self::Sector, Self::Block, Self::Mixed];
}

/// The contents that a request writes.
#[derive(Clone, PartialEq, Eq)]
pub enum Value {
    /// Zeroes.
    Zero,
    /// The pattern with this number, of a generated sort.
    Pattern(Sort, u32),
    /// Bytes that a guest took from elsewhere.
    Given(Given),
}

/// Bytes for a range of a disk.
#[derive(Clone, PartialEq, Eq)]
pub struct Given {
    /// Their sort.
    pub sort: Sort,
    /// Distinguishes them.
    pub number: u32,
    /// Where on the disk they begin.
    pub start: u64,
    /// The bytes.
    pub bytes: Arc<[u8]>,
}

impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zero => f.write_str("zeroes"),
            Self::Pattern(Sort::Plain, number) => write!(f, "pattern {number}"),
            Self::Pattern(sort, number) => write!(f, "{sort:?} pattern {number}"),
            Self::Given(given) => write!(f, "{:?} bytes {}", given.sort, given.number),
        }
    }
}

impl Value {
    /// The byte at an offset of the disk.
    pub fn byte(&self, offset: u64) -> u8 {
        match self {
            Self::Zero => 0,
            Self::Pattern(sort, number) => {
                word(*sort, *number, offset / 8).to_le_bytes()[(offset % 8) as usize]
            }
            Self::Given(given) => given.bytes[(offset - given.start) as usize],
        }
    }

    /// The bytes of a range.
    pub fn bytes(&self, range: Range<u64>) -> Vec<u8> {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        match self {
            Self::Zero => {}
            Self::Pattern(sort, number) => {
                let mut at = range.start;
                while at < range.end {
                    let next = (at / 8 * 8 + 8).min(range.end);
                    let word = word(*sort, *number, at / 8).to_le_bytes();
                    bytes[(at - range.start) as usize..(next - range.start) as usize]
                        .copy_from_slice(&word[(at % 8) as usize..(at % 8 + next - at) as usize]);
                    at = next;
                }
            }
            Self::Given(given) => {
                let start = (range.start - given.start) as usize;
                bytes.copy_from_slice(
                    &given.bytes[start..start + (range.end - range.start) as usize],
                );
            }
        }
        bytes
    }

    /// Whether whole words hold this value.
    pub fn fills(&self, offset: u64, bytes: &[u8]) -> bool {
        match self {
            Self::Zero => bytes.iter().all(|byte| *byte == 0),
            Self::Pattern(sort, number) => bytes
                .chunks_exact(8)
                .zip(offset / 8..)
                .all(|(chunk, index)| *chunk == word(*sort, *number, index).to_le_bytes()),
            Self::Given(given) => {
                let start = (offset - given.start) as usize;
                given.bytes[start..start + bytes.len()] == *bytes
            }
        }
    }
}

/// A word of a pattern.
fn word(sort: Sort, number: u32, index: u64) -> u64 {
    let plain = u64::from(number) << 32 | index & 0xffff_ffff;
    let first = index % 512 < 64;
    let compresses = match sort {
        Sort::Text => return letters(plain),
        Sort::Random => false,
        Sort::Sector => first,
        Sort::Block => !first,
        // Parts of 64 bytes.
        Sort::Mixed => mix(plain | 7) & 1 == 0,
        _ => true,
    };
    if compresses { plain } else { mix(plain) }
}

/// The number and the index of a word, whatever its sort. For a word of no pattern the result is arbitrary.
fn origin(word: u64) -> (u32, u64) {
    let split = |plain: u64| ((plain >> 32) as u32, plain & 0xffff_ffff);
    let likely = |(number, index): &(u32, u64)| *number < 1 << 24 && *index < 1 << 24;
    let read = [Some(word), numbers(word), Some(unmix(word))];
    read.into_iter().flatten().map(split).find(likely).unwrap_or(split(word))
}

const STEP: u64 = 0xBF58_476D_1CE4_E5B9;
/// `STEP` times this is 1.
const STEP_BACK: u64 = inverse(STEP);

const fn inverse(odd: u64) -> u64 {
    // Each round doubles the number of correct bits, which starts at three.
    let (mut result, mut round) = (odd, 0);
    while round < 5 {
        result = result.wrapping_mul(2_u64.wrapping_sub(odd.wrapping_mul(result)));
        round += 1;
    }
    result
}

/// Makes a number look random; [`unmix`] undoes it.
const fn mix(number: u64) -> u64 {
    let number = (number ^ number >> 32).wrapping_mul(STEP);
    let number = (number ^ number >> 32).wrapping_mul(STEP);
    number ^ number >> 32
}

const fn unmix(mixed: u64) -> u64 {
    let number = (mixed ^ mixed >> 32).wrapping_mul(STEP_BACK);
    let number = (number ^ number >> 32).wrapping_mul(STEP_BACK);
    number ^ number >> 32
}

/// Eight letters for a number and an index of 20 bits each.
fn letters(plain: u64) -> u64 {
    let packed = plain >> 32 << 20 | plain & 0xf_ffff;
    let letter = |place: u32| b'A' + (packed >> (5 * place) & 31) as u8;
    u64::from_le_bytes(std::array::from_fn(|at| letter(7 - at as u32)))
}

/// The number and index encoded by [`letters`].
fn numbers(letters: u64) -> Option<u64> {
    let packed = letters.to_le_bytes().into_iter().try_fold(0_u64, |packed, letter| {
        let value = letter.checked_sub(b'A').filter(|value| *value < 32)?;
        Some(packed << 5 | u64::from(value))
    })?;
    Some(packed >> 20 << 32 | packed & 0xf_ffff)
}

/// Describes bytes of a disk.
pub fn interpret(offset: u64, bytes: &[u8]) -> String {
    if bytes.iter().all(|byte| *byte == 0) {
        return "zeroes".into();
    }
    let first = |bytes: &[u8]| bytes.first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
    let (number, index) = origin(first(bytes));
    let at = index * 8;
    for sort in Sort::WRITTEN {
        let pattern = Value::Pattern(sort, number);
        if pattern.bytes(at..at + bytes.len() as u64) == bytes {
            return if at == offset {
                format!("{pattern:?}")
            } else {
                format!("{pattern:?} as it belongs at {at}")
            };
        }
    }
    let parts: Vec<String> = bytes
        .chunks(64)
        .map(|part| {
            let (number, index) = origin(first(part));
            format!("{number:x}:{index:x}")
        })
        .collect();
    format!("a mixture ({})", parts.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use isobath_qcow2::embedded::{LEAD, Mapping, Span, ZoneId, embed};
    use isobath_qcow2::{ClusterIndex, Lsn};

    #[test]
    fn words_tell_where_they_are_from() {
        assert_eq!(STEP.wrapping_mul(STEP_BACK), 1);
        for sort in Sort::WRITTEN {
            for (number, index) in [(1, 0), (10_000, 77), (40_123, 130_000), (20_000, 511)] {
                let word = word(sort, number, index);
                assert_eq!(origin(word), (number, index), "{sort:?}");
            }
            let value = Value::Pattern(sort, 10_005);
            let bytes = value.bytes(3..9000);
            assert!(value.fills(8, &bytes[5..517]));
            assert!((3..9000).all(|at| value.byte(at) == bytes[at as usize - 3]));
            let told = interpret(512, &value.bytes(512..1024));
            assert!(told.ends_with("pattern 10005"), "{told}");
            let told = interpret(512, &value.bytes(8192..8704));
            assert!(told.ends_with("pattern 10005 as it belongs at 8192"), "{told}");
        }
    }

    #[test]
    fn sorts_compress_as_they_say() {
        let mapping = Mapping {
            cluster: ClusterIndex::new(1),
            lsn: Lsn::new(1),
            durable_lsn: Lsn::default(),
            rest: None,
        };
        let span = |sort| {
            let mut block = Value::Pattern(sort, 10_001).bytes(8192..8192 + LEAD as u64);
            embed(&mut block, &mapping, ZoneId([1; 16]))
        };
        assert_eq!(span(Sort::Plain), Some(Span::Sector));
        assert_eq!(span(Sort::Text), Some(Span::Sector));
        assert_eq!(span(Sort::Sector), Some(Span::Sector));
        assert_eq!(span(Sort::Block), Some(Span::Block));
        assert_eq!(span(Sort::Random), None);
    }

    #[test]
    fn given_bytes_are_told_from_others() {
        let bytes: Arc<[u8]> = (0..2048_u32).map(|at| at as u8 ^ 0x5a).collect();
        let given = Given { sort: Sort::Copied, number: 3, start: 512, bytes };
        let value = Value::Given(given);
        assert_eq!(value.byte(513), 1 ^ 0x5a);
        let part = value.bytes(1024..1536);
        assert!(value.fills(1024, &part) && value.fills(1280, &part[256..]));
        assert!(!value.fills(1032, &part[..504]));
        assert_eq!(format!("{value:?}"), "Copied bytes 3");
    }
}
