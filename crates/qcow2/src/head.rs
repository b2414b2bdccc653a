//! The heads of layers in a direct-access index: what an open reads of each layer, so that it need not be read from the
//! layer's own file. `docs/format.md` specifies them to the byte.

use crate::header::Header;
use crate::index::{CHAPTER_LAYERS, Fields, pad};
use crate::l1::{L1_ENTRY_SIZE, L1Entry};

const MAGIC: [u8; 4] = *b"IHDS";
/// The most bytes of a header in a head.
pub const MAX_HEAD_HEADER_BYTES: usize = 4096;
/// The most entries of the L1 table of a layer that has a head.
pub const MAX_HEAD_L1_ENTRIES: usize = 4096;
/// The most bytes of the heads of a chapter.
pub const MAX_HEADS_BYTES: u32 =
    8 + CHAPTER_LAYERS as u32 * (8 + MAX_HEAD_HEADER_BYTES + MAX_HEAD_L1_ENTRIES * 12) as u32;

/// What an open reads of a qcow2 image: its header and its active L1 table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// As many of the file's first bytes as its header and extensions take.
    header: Vec<u8>,
    /// The entries that are not 0, ascending, with their places in the table.
    l1: Vec<(u32, L1Entry)>,
}

impl Head {
    /// The head of an image that begins with `start` and has this L1 table, all of it. `None` if it is too large, or
    /// its header does not end in `start`.
    pub fn new(start: &[u8], l1: &[u8]) -> Option<Self> {
        let start = start.get(..MAX_HEAD_HEADER_BYTES).unwrap_or(start);
        if !Header::ends_in(start) {
            return None;
        }
        let (mut short, mut enough) = (0, start.len());
        while enough - short > 1 {
            let middle = usize::midpoint(short, enough);
            if Header::ends_in(&start[..middle]) {
                enough = middle;
            } else {
                short = middle;
            }
        }
        let header = start.get(..enough)?.to_vec();
        let same = Header::parse(&header).ok()? == Header::parse(start).ok()?;
        let count = l1.len() / L1_ENTRY_SIZE;
        if !same || count > MAX_HEAD_L1_ENTRIES {
            return None;
        }
        let entries =
            (0..count).filter_map(|index| Some((index as u32, L1Entry::read(l1, index)?)));
        let l1 = entries.filter(|(_, entry)| *entry != L1Entry::unallocated()).collect();
        Some(Self { header, l1 })
    }

    /// The header; `None` if it is not valid.
    pub fn header(&self) -> Option<Header> {
        Header::parse(&self.header).ok()
    }

    /// The entries of the L1 table that are not 0, ascending, with their places in it.
    pub fn l1(&self) -> &[(u32, L1Entry)] {
        &self.l1
    }

    fn write(head: Option<&Self>, out: &mut Vec<u8>) {
        let (header, l1) = head.map_or((&[][..], &[][..]), |head| (&head.header, &head.l1));
        out.extend((header.len() as u32).to_be_bytes());
        out.extend((l1.len() as u32).to_be_bytes());
        out.extend(header);
        for (index, entry) in l1 {
            out.extend(index.to_be_bytes());
            out.extend(entry.raw().to_be_bytes());
        }
        pad(out);
    }

    /// Reads a head, or `None` if there is none, into `place`.
    fn read(fields: &mut Fields<'_>, place: &mut Option<Self>) -> Option<()> {
        let (length, count) = (fields.u32()? as usize, fields.u32()? as usize);
        if length > MAX_HEAD_HEADER_BYTES || count > MAX_HEAD_L1_ENTRIES {
            return None;
        }
        let header = fields.take(length)?.to_vec();
        let mut l1 = Vec::new();
        for _ in 0..count {
            let (index, entry) = (fields.u32()?, L1Entry::from_raw(fields.u64()?));
            let ascends = l1.last().is_none_or(|(last, _)| *last < index);
            if !ascends || entry == L1Entry::unallocated() {
                return None;
            }
            l1.push((index, entry));
        }
        fields.align()?;
        *place = (length > 0).then_some(Self { header, l1 });
        Some(())
    }

    /// A block of the heads of a chapter's layers.
    pub fn encode_all(heads: &[Option<Self>]) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend([0; 4]);
        for head in heads {
            Self::write(head.as_ref(), &mut out);
        }
        out
    }

    /// The `count` heads of a block; `None` if they are not valid.
    pub fn decode_all(bytes: &[u8], count: usize) -> Option<Vec<Option<Self>>> {
        let mut fields = Fields::after(MAGIC, bytes)?;
        fields.take(4)?;
        let mut heads = Vec::with_capacity(count.min(CHAPTER_LAYERS));
        for _ in 0..count {
            let mut head = None;
            Self::read(&mut fields, &mut head)?;
            heads.push(head);
        }
        (fields.rest() == 0).then_some(heads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::create::NewImage;
    use proptest::prelude::*;

    fn start() -> Vec<u8> {
        let new = NewImage { backing_file: Some("base".into()), ..NewImage::new(1 << 30) };
        new.plan().unwrap().header().encode().unwrap()
    }

    fn sample() -> Vec<Option<Head>> {
        let mut l1 = vec![0; 64];
        l1[8..16].copy_from_slice(&0x8000_0000_0005_0000_u64.to_be_bytes());
        l1[56..].copy_from_slice(&0x6_0000_u64.to_be_bytes());
        vec![Head::new(&start(), &l1), None, Head::new(&start(), &[])]
    }

    #[test]
    fn a_head_has_what_an_open_reads() {
        let heads = sample();
        let head = heads[0].as_ref().unwrap();
        assert_eq!(head.header(), Header::parse(&start()).ok());
        let entries: Vec<_> = head.l1().iter().map(|(at, entry)| (*at, entry.raw())).collect();
        assert_eq!(entries, [(1, 0x8000_0000_0005_0000), (7, 0x6_0000)]);
        let bytes = Head::encode_all(&heads);
        assert!(bytes.len() < 2048, "{}", bytes.len());
        assert_eq!(Head::decode_all(&bytes, 3), Some(heads));
        assert_eq!(Head::decode_all(&bytes, 2), None);
        assert_eq!(Head::decode_all(&bytes, 4), None);
    }

    #[test]
    fn what_is_too_large_has_no_head() {
        assert!(Head::new(&start(), &vec![0; MAX_HEAD_L1_ENTRIES * 8]).is_some());
        assert!(Head::new(&start(), &vec![0; MAX_HEAD_L1_ENTRIES * 8 + 8]).is_none());
        assert!(Head::new(&start()[..100], &[]).is_none());
        assert!(Head::new(&[0; 4096], &[]).is_none());
    }

    #[test]
    fn the_largest_heads_fit_their_block() {
        let entry = L1Entry::from_raw(1 << 16);
        let l1 = (0..MAX_HEAD_L1_ENTRIES as u32).map(|at| (at, entry)).collect();
        let head = Some(Head { header: vec![1; MAX_HEAD_HEADER_BYTES], l1 });
        let bytes = Head::encode_all(&vec![head; CHAPTER_LAYERS]);
        assert_eq!(bytes.len(), MAX_HEADS_BYTES as usize);
    }

    #[test]
    fn entries_ascend_and_are_not_0() {
        let head = |l1| Head { header: vec![1; 8], l1 };
        let entry = L1Entry::from_raw(1 << 16);
        for (l1, valid) in [
            (vec![(3, entry), (4, entry)], true),
            (vec![(3, entry), (3, entry)], false),
            (vec![(3, entry), (2, entry)], false),
            (vec![(3, entry), (4, L1Entry::unallocated())], false),
        ] {
            let bytes = Head::encode_all(&[Some(head(l1))]);
            assert_eq!(Head::decode_all(&bytes, 1).is_some(), valid);
        }
    }

    proptest! {
        #[test]
        fn any_change_is_taken_or_refused(at in 0usize..2000, value: u8) {
            let mut bytes = Head::encode_all(&sample());
            let at = at % bytes.len();
            bytes[at] = value;
            for head in Head::decode_all(&bytes, 3).into_iter().flatten().flatten() {
                let _ = head.header();
            }
        }
    }
}
