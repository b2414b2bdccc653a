//! The heads of a chain's layers, in one object: what an open of the chain reads of each.

use crate::digest::Digest;
use crate::error::{Error, Result};

/// Most layers of a chain.
pub const MAX_LAYERS: usize = 65_536;

const MAGIC: &[u8; 4] = b"IHDS";
const VERSION: u32 = 1;
/// Bytes before the records, and of a record.
const START: usize = 16;
const RECORD: usize = 8;
/// Most bytes of a header that are recorded.
pub(crate) const MOST_HEADER: usize = 4096;
/// Most bytes of an L1 table that are recorded, and of those of a chain together.
pub(crate) const MOST_L1: usize = 1 << 20;
pub(crate) const MOST_L1_TOGETHER: usize = 32 << 20;

/// What is recorded of a layer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Head {
    /// The header cluster without the zeroes at its end; empty if that is longer than 4,096 bytes, or there is none.
    pub header: Vec<u8>,
    /// The active L1 table as it is in the file; empty if it is longer than 1 MiB or there is no more room.
    pub l1: Vec<u8>,
}

/// The heads of all layers, from the base to the top.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Heads(Vec<Head>);

impl Heads {
    /// Those of these layers, as far as there is room.
    pub(crate) fn new(mut layers: Vec<Head>) -> Self {
        let mut room = MOST_L1_TOGETHER;
        // The upper layers are read more.
        for head in layers.iter_mut().rev() {
            if head.header.len() > MOST_HEADER {
                head.header.clear();
            }
            match room.checked_sub(head.l1.len()).filter(|_| head.l1.len() <= MOST_L1) {
                Some(rest) => room = rest,
                None => head.l1.clear(),
            }
        }
        Self(layers)
    }

    /// Most bytes of the object, for so many layers.
    pub(crate) fn most(layers: usize) -> u64 {
        (START + layers * (RECORD + MOST_HEADER) + MOST_L1_TOGETHER) as u64
    }

    /// The head of each layer.
    pub fn layers(&self) -> &[Head] {
        &self.0
    }

    /// The head of each layer, in its place.
    pub(crate) fn into_layers(self) -> Vec<Head> {
        self.0
    }

    /// The bytes of the object.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&VERSION.to_be_bytes());
        bytes.extend_from_slice(&(self.0.len() as u32).to_be_bytes());
        bytes.extend_from_slice(&[0; 4]);
        for head in &self.0 {
            bytes.extend_from_slice(&(head.header.len() as u32).to_be_bytes());
            bytes.extend_from_slice(&(head.l1.len() as u32).to_be_bytes());
        }
        for head in &self.0 {
            bytes.extend_from_slice(&head.header);
            bytes.extend_from_slice(&head.l1);
        }
        bytes
    }

    /// The heads in `bytes`, of a chain of so many layers.
    ///
    /// # Errors
    /// They are not these.
    pub fn decode(bytes: &[u8], layers: usize) -> Result<Self> {
        let parsed = (layers <= MAX_LAYERS).then(|| Self::parse(bytes, layers)).flatten();
        parsed.ok_or_else(|| {
            let digest = Digest::of(bytes);
            Error::damaged(format_args!(
                "the object 'heads/{digest}' has not the heads of {layers} layers"
            ))
        })
    }

    fn parse(bytes: &[u8], layers: usize) -> Option<Self> {
        let word = |at: usize| {
            let bytes = bytes.get(at..at + 4)?;
            Some(u32::from_be_bytes(bytes.try_into().ok()?))
        };
        let known = bytes.starts_with(MAGIC) && word(4)? == VERSION && word(8)? as usize == layers;
        let mut rest = bytes.get(START + layers * RECORD..).filter(|_| known)?;
        let mut heads = Vec::with_capacity(layers);
        for number in 0..layers {
            let at = START + number * RECORD;
            let (header, l1) = (word(at)? as usize, word(at + 4)? as usize);
            if header > MOST_HEADER || l1 > MOST_L1 {
                return None;
            }
            let (first, after) = rest.split_at_checked(header)?;
            let (second, after) = after.split_at_checked(l1)?;
            heads.push(Head { header: first.to_vec(), l1: second.to_vec() });
            rest = after;
        }
        rest.is_empty().then_some(Self(heads))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Heads {
        let head = |n: u8| Head { header: vec![n; n.into()], l1: vec![n; 3] };
        Heads::new(vec![head(1), Head::default(), head(9)])
    }

    #[test]
    fn heads_are_read_as_they_are_written() {
        let bytes = sample().encode();
        assert_eq!(Heads::decode(&bytes, 3).unwrap(), sample());
        assert!(bytes.len() as u64 <= Heads::most(3));
    }

    #[test]
    fn heads_that_are_damaged_are_refused() {
        let bytes = sample().encode();
        for length in 0..bytes.len() {
            assert!(Heads::decode(&bytes[..length], 3).is_err(), "{length}");
        }
        assert!(Heads::decode(&[&bytes[..], &[0]].concat(), 3).is_err());
        assert!(Heads::decode(&bytes, 2).is_err());
        assert!(Heads::decode(&bytes, usize::MAX).is_err());
        for at in (0..12).chain(16..40) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x80;
            assert!(Heads::decode(&damaged, 3).is_err(), "{at}");
        }
    }

    #[test]
    fn what_has_no_room_is_left_out_from_the_base_up() {
        let head = |length| Head { header: vec![1], l1: vec![0; length] };
        let count = MOST_L1_TOGETHER / MOST_L1 + 1;
        let mut layers = vec![head(MOST_L1); count];
        layers.push(head(MOST_L1 + 1));
        layers.push(Head { header: vec![1; MOST_HEADER + 1], l1: Vec::new() });
        let heads = Heads::new(layers);
        let bytes = heads.encode();
        assert!(bytes.len() as u64 <= Heads::most(count + 2));
        assert_eq!(Heads::decode(&bytes, count + 2).unwrap(), heads);
        let l1: Vec<usize> = heads.layers().iter().map(|head| head.l1.len()).collect();
        assert_eq!((l1[0], l1[1], l1[count], l1[count - 1]), (0, MOST_L1, 0, MOST_L1));
        assert!(heads.layers()[count + 1].header.is_empty());
    }
}
