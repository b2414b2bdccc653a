//! The heads of a chain's layers, in one object: what an open of the chain reads of each.

use crate::digest::{Digest, Table};
use crate::error::{Error, Result};
use isobath_qcow2::Header;
use isobath_qcow2::index::{MAX_WHOLE_BYTES, MAX_WHOLE_ROOT_BYTES};

/// Most layers of a chain.
pub const MAX_LAYERS: usize = 65_536;

const MAGIC: &[u8; 4] = b"IHDS";
const VERSION: u32 = 2;
/// The version without tables of checksums and without an index.
const FIRST_VERSION: u32 = 1;
/// Bytes before the records, and of a record.
const START: usize = 24;
const RECORD: usize = 12;
/// The same in the first version.
const FIRST_START: usize = 16;
const FIRST_RECORD: usize = 8;
/// Bytes of a header that are recorded at most, and of a file at least if its first cluster is shorter.
pub(crate) const MOST_HEADER: usize = 4096;
/// Most bytes of an L1 table that are recorded, and of those of a chain together.
pub(crate) const MOST_L1: usize = 1 << 20;
const MOST_L1_TOGETHER: usize = 32 << 20;
/// Most bytes of the recorded tables of checksums of a chain together.
const MOST_TABLES_TOGETHER: usize = 4 << 20;
/// Most bytes of the root of a chain's index.
pub(crate) const MOST_ROOT: usize = MAX_WHOLE_ROOT_BYTES;
/// Most bytes of a chain's index.
pub(crate) const MOST_INDEX: u64 = MAX_WHOLE_BYTES as u64;

/// What is recorded of a layer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Head {
    /// The first cluster, or the first 4,096 bytes if that is less, without the zeroes at the end; empty if this is
    /// longer than 4,096 bytes, or there is none.
    pub header: Vec<u8>,
    /// The active L1 table as it is in the file; empty if it is longer than 1 MiB, the header is not recorded, or there
    /// is no more room.
    pub l1: Vec<u8>,
    /// The checksums of the layer's blocks; empty if there is no more room.
    pub table: Vec<u8>,
}

/// What is recorded of a chain's index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexHead {
    /// Its root.
    pub root: Vec<u8>,
    /// The checksums of its blocks.
    pub table: Vec<u8>,
}

/// The heads of all layers, from the base to the top, and that of their index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Heads {
    layers: Vec<Head>,
    index: Option<IndexHead>,
    /// They were read from an object of the first version.
    is_first: bool,
}

impl Heads {
    /// Those of these layers, as far as there is room, and of their index.
    pub(crate) fn new(mut layers: Vec<Head>, index: Option<IndexHead>) -> Self {
        // Layers above change nothing of what is recorded of those below.
        let mut room = L1Room::default();
        for head in &mut layers {
            if head.header.len() > MOST_HEADER {
                head.header.clear();
            }
            if head.header.is_empty() || !room.take(head.l1.len() as u64) {
                head.l1.clear();
            }
        }
        // The blocks of upper layers are read more.
        let mut of_tables = MOST_TABLES_TOGETHER;
        for head in layers.iter_mut().rev() {
            match of_tables.checked_sub(head.table.len()) {
                Some(rest) => of_tables = rest,
                None => head.table.clear(),
            }
        }
        Self { layers, index, is_first: false }
    }

    /// Most bytes of the object, for so many layers.
    pub(crate) fn most(layers: usize) -> u64 {
        let of_index = MOST_ROOT as u64 + Table::length(MOST_INDEX);
        let of_layers = layers * (RECORD + MOST_HEADER) + MOST_L1_TOGETHER + MOST_TABLES_TOGETHER;
        (START + of_layers) as u64 + of_index
    }

    /// The head of each layer.
    pub fn layers(&self) -> &[Head] {
        &self.layers
    }

    /// Whether they were read from an object of the first version, which has less of some images than a push records
    /// now.
    pub(crate) fn is_first(&self) -> bool {
        self.is_first
    }

    /// The head of the index, if the chain has one.
    pub fn index(&self) -> Option<&IndexHead> {
        self.index.as_ref()
    }

    /// The head of each layer, in its place, and that of the index.
    pub(crate) fn into_parts(self) -> (Vec<Head>, Option<IndexHead>) {
        (self.layers, self.index)
    }

    /// The bytes of the object.
    pub fn encode(&self) -> Vec<u8> {
        let nothing = IndexHead { root: Vec::new(), table: Vec::new() };
        let IndexHead { root, table } = self.index.as_ref().unwrap_or(&nothing);
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&VERSION.to_be_bytes());
        bytes.extend_from_slice(&(self.layers.len() as u32).to_be_bytes());
        bytes.extend_from_slice(&(root.len() as u32).to_be_bytes());
        bytes.extend_from_slice(&(table.len() as u32).to_be_bytes());
        bytes.extend_from_slice(&[0; 4]);
        for head in &self.layers {
            for part in [&head.header, &head.l1, &head.table] {
                bytes.extend_from_slice(&(part.len() as u32).to_be_bytes());
            }
        }
        bytes.extend_from_slice(root);
        bytes.extend_from_slice(table);
        for head in &self.layers {
            for part in [&head.header, &head.l1, &head.table] {
                bytes.extend_from_slice(part);
            }
        }
        bytes
    }

    /// The heads in `bytes`, of a chain of so many layers.
    ///
    /// # Errors
    /// They are not these.
    pub fn decode(bytes: &[u8], layers: usize) -> Result<Self> {
        let most = Self::most(MAX_LAYERS);
        let fits = layers <= MAX_LAYERS && bytes.len() as u64 <= most;
        let parsed = fits.then(|| Self::parse(bytes, layers)).flatten();
        parsed.ok_or_else(|| {
            let digest = Digest::of(bytes);
            Error::damaged(format_args!(
                "the object 'heads/{digest}' has not the heads of {layers} layers"
            ))
        })
    }

    fn parse(bytes: &[u8], layers: usize) -> Option<Self> {
        let word = |at: usize| {
            let bytes = bytes.get(at..at.checked_add(4)?)?;
            Some(u32::from_be_bytes(bytes.try_into().ok()?))
        };
        if !bytes.starts_with(MAGIC) || word(8)? as usize != layers {
            return None;
        }
        let (is_first, start, record) = match word(4)? {
            FIRST_VERSION => (true, FIRST_START, FIRST_RECORD),
            VERSION => (false, START, RECORD),
            _ => return None,
        };
        let mut rest = Rest(bytes.get(start + layers * record..)?);
        let index = if is_first {
            None
        } else {
            let (root, table) = (word(12)? as usize, word(16)? as usize);
            if root > MOST_ROOT
                || table as u64 > Table::length(MOST_INDEX)
                || (root == 0) != (table == 0)
            {
                return None;
            }
            let head = IndexHead { root: rest.take(root)?, table: rest.take(table)? };
            (root > 0).then_some(head)
        };
        let mut heads = Vec::with_capacity(layers);
        for number in 0..layers {
            let at = start + number * record;
            let table = if is_first { 0 } else { word(at + 8)? as usize };
            let (header, l1) = (word(at)? as usize, word(at + 4)? as usize);
            if header > MOST_HEADER || l1 > MOST_L1 || table > MOST_TABLES_TOGETHER {
                return None;
            }
            let (header, l1, table) = (rest.take(header)?, rest.take(l1)?, rest.take(table)?);
            let mut head = Head { header, l1, table };
            // The first version has less than is read of an image whose first cluster is that short.
            if is_first && Header::probe_length(&head.header).is_ok_and(|first| first < MOST_HEADER)
            {
                head = Head::default();
            }
            heads.push(head);
        }
        rest.0.is_empty().then_some(Self { layers: heads, index, is_first })
    }
}

/// The room that is left for L1 tables. Those of the lower layers take it first, so that a chain that grows keeps what
/// is recorded of its layers.
pub(crate) struct L1Room(u64);

impl Default for L1Room {
    fn default() -> Self {
        Self(MOST_L1_TOGETHER as u64)
    }
}

impl L1Room {
    /// Takes so many bytes for the next table, from the base up; whether it is recorded.
    pub(crate) fn take(&mut self, bytes: u64) -> bool {
        match self.0.checked_sub(bytes).filter(|_| bytes <= MOST_L1 as u64) {
            Some(rest) => {
                self.0 = rest;
                true
            }
            None => false,
        }
    }
}

/// Bytes that were not taken yet.
struct Rest<'b>(&'b [u8]);

impl Rest<'_> {
    fn take(&mut self, length: usize) -> Option<Vec<u8>> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken.to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Heads {
        let head = |n: u8| Head { header: vec![n; n.into()], l1: vec![n; 3], table: vec![n; 16] };
        let index = IndexHead { root: vec![7; 24], table: vec![8; 16] };
        Heads::new(vec![head(1), Head::default(), head(9)], Some(index))
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
        for at in (0..20).chain(24..60) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x80;
            assert!(Heads::decode(&damaged, 3).is_err(), "{at}");
        }
    }

    #[test]
    fn what_has_no_room_is_left_out() {
        let head =
            |length| Head { header: vec![1], l1: vec![0; length], table: vec![0; length / 8] };
        let count = MOST_L1_TOGETHER / MOST_L1;
        let mut layers = vec![head(MOST_L1); count];
        layers.insert(1, head(MOST_L1 + 1));
        layers.insert(2, Head { header: vec![1; MOST_HEADER + 1], ..head(MOST_L1) });
        let below = Heads::new(layers.clone(), None);
        layers.extend([head(MOST_L1), head(0)]);
        let heads = Heads::new(layers, None);
        let bytes = heads.encode();
        assert!(bytes.len() as u64 <= Heads::most(count + 4));
        assert_eq!(Heads::decode(&bytes, count + 4).unwrap(), heads);
        let of = |part: fn(&Head) -> &Vec<u8>| -> Vec<usize> {
            heads.layers().iter().map(|head| part(head).len()).collect()
        };
        let l1 = [&[MOST_L1, 0, 0][..], &vec![MOST_L1; count - 1], &[0, 0]].concat();
        assert_eq!(of(|head| &head.l1), l1);
        assert_eq!(of(|head| &head.header)[..4], [1, 1, 0, 1]);
        let tables = of(|head| &head.table);
        assert_eq!((tables[2], tables[3], tables[count + 2]), (0, MOST_L1 / 8, MOST_L1 / 8));
        for (below, now) in below.layers().iter().zip(heads.layers()) {
            assert!(below.header == now.header && below.l1 == now.l1);
        }
    }
    #[test]
    fn heads_of_the_first_version_are_read_where_they_have_what_an_open_reads() {
        let cluster = |bits: u32| {
            let mut header = b"QFI\xfb\0\0\0\x03".to_vec();
            header.resize(104, 0);
            header[20..24].copy_from_slice(&bits.to_be_bytes());
            header
        };
        let (long, short) = (cluster(16), cluster(9));
        let mut bytes = [&MAGIC[..], &1u32.to_be_bytes(), &2u32.to_be_bytes(), &[0; 4]].concat();
        for header in [&long, &short] {
            bytes.extend_from_slice(&(header.len() as u32).to_be_bytes());
            bytes.extend_from_slice(&8u32.to_be_bytes());
        }
        for header in [&long, &short] {
            bytes.extend_from_slice(header);
            bytes.extend_from_slice(&[5; 8]);
        }
        let whole = Head { header: long, l1: vec![5; 8], table: Vec::new() };
        let expected = Heads::new(vec![whole, Head::default()], None);
        let expected = Heads { is_first: true, ..expected };
        assert_eq!(Heads::decode(&bytes, 2).unwrap(), expected);
    }
}
