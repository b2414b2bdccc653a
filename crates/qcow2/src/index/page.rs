//! Pages: the owners of 1,024 units.

use super::PAGE_UNITS;
use super::block::Fields;
use crate::l2::CompressedCluster;
use crate::offset::HostOffset;

const MAGIC: [u8; 4] = *b"IPAG";
const HEAD: usize = 16;
const BITMAP: usize = PAGE_UNITS / 8;
const COMPRESSED: usize = 16;
/// The largest page, in bytes.
pub const MAX_PAGE_BYTES: u32 = (HEAD + BITMAP + PAGE_UNITS * (8 + COMPRESSED)) as u32;

const KIND_SHIFT: u32 = 61;
const LAYER_SHIFT: u32 = 45;
const PAYLOAD: u64 = (1 << LAYER_SHIFT) - 1;

/// The entry of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageEntry {
    /// No layer has it.
    Absent,
    /// A layer marks it as zeroes.
    Zero {
        /// The layer, counted from the base.
        layer: u16,
    },
    /// A layer has it as data.
    Data {
        /// The layer, counted from the base.
        layer: u16,
        /// Its first byte in the layer's data file; a multiple of the unit.
        host: HostOffset,
    },
    /// It is part of a compressed cluster.
    Compressed {
        /// The layer, counted from the base.
        layer: u16,
        /// The whole cluster.
        cluster: CompressedCluster,
    },
}

impl PageEntry {
    /// The layer that owns the unit.
    pub fn layer(&self) -> Option<u16> {
        match *self {
            Self::Absent => None,
            Self::Zero { layer } | Self::Data { layer, .. } | Self::Compressed { layer, .. } => {
                Some(layer)
            }
        }
    }

    /// Whether `next`, the following entry, continues this one.
    fn continues(&self, next: &Self, unit_bits: u32) -> bool {
        match (self, next) {
            (Self::Data { layer, host }, Self::Data { layer: next_layer, host: next_host }) => {
                layer == next_layer && host.checked_add(1 << unit_bits) == Some(*next_host)
            }
            (a, b) => a == b,
        }
    }
}

/// Entries of one page that continue each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRun {
    /// The first unit of the page.
    pub first: usize,
    /// The number of units; not 0.
    pub count: usize,
    /// The entry of the first unit; further units of data follow it in the file.
    pub entry: PageEntry,
}

/// A page: a run for each stretch of units with one source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// The page's number on the disk.
    pub number: u32,
    /// Its runs: in order, without gaps, over all units.
    pub runs: Vec<PageRun>,
}

impl Page {
    /// The page with these entries, one per unit; units without one are absent.
    pub fn new(number: u32, unit_bits: u32, entries: impl IntoIterator<Item = PageEntry>) -> Self {
        let mut runs: Vec<PageRun> = Vec::new();
        let mut last = None;
        let all = entries.into_iter().chain(std::iter::repeat(PageEntry::Absent));
        for (first, entry) in all.take(PAGE_UNITS).enumerate() {
            match (&last, runs.last_mut()) {
                (Some(last), Some(run)) if PageEntry::continues(last, &entry, unit_bits) => {
                    run.count += 1;
                }
                _ => runs.push(PageRun { first, count: 1, entry }),
            }
            last = Some(entry);
        }
        Self { number, runs }
    }

    /// Whether no layer has anything here.
    pub fn is_absent(&self) -> bool {
        self.runs.iter().all(|run| run.entry == PageEntry::Absent)
    }

    /// The page's bytes; `None` if a host offset does not fit an entry (2^45 units).
    pub fn encode(&self, unit_bits: u32) -> Option<Vec<u8>> {
        let mut bitmap = [0u8; BITMAP];
        let mut heads = Vec::with_capacity(self.runs.len() * 8);
        let mut compressed: Vec<CompressedCluster> = Vec::new();
        for run in &self.runs {
            for unit in run.first + 1..run.first + run.count {
                *bitmap.get_mut(unit / 8)? |= 1 << (unit % 8);
            }
            let (kind, layer, payload) = match run.entry {
                PageEntry::Absent => (0, 0, 0),
                PageEntry::Zero { layer } => (1, layer, 0),
                PageEntry::Data { layer, host } => (2, layer, host.get() >> unit_bits),
                PageEntry::Compressed { layer, cluster } => {
                    if compressed.last() != Some(&cluster) {
                        compressed.push(cluster);
                    }
                    (3, layer, compressed.len() as u64 - 1)
                }
            };
            if payload > PAYLOAD {
                return None;
            }
            let entry = kind << KIND_SHIFT | u64::from(layer) << LAYER_SHIFT | payload;
            heads.extend(entry.to_be_bytes());
        }
        let mut out =
            Vec::with_capacity(HEAD + BITMAP + heads.len() + compressed.len() * COMPRESSED);
        out.extend(MAGIC);
        out.extend(self.number.to_be_bytes());
        out.extend((self.runs.len() as u16).to_be_bytes());
        out.extend((compressed.len() as u16).to_be_bytes());
        out.extend([0; 4]);
        out.extend(bitmap);
        out.extend(heads);
        for cluster in compressed {
            out.extend(cluster.offset.get().to_be_bytes());
            out.extend(cluster.length.to_be_bytes());
        }
        Some(out)
    }

    /// The page in `bytes`; `None` if it is not valid or not page `number`.
    pub fn decode(bytes: &[u8], number: u32, unit_bits: u32) -> Option<Self> {
        let mut fields = Fields::after(MAGIC, bytes)?;
        let found = fields.u32()?;
        let count = usize::from(fields.u16()?);
        let compressed = usize::from(fields.u16()?);
        fields.take(4)?;
        let bitmap = fields.take(BITMAP)?;
        let mut heads = Fields::new(fields.take(count.checked_mul(8)?)?);
        let clusters = fields.take(compressed.checked_mul(COMPRESSED)?)?;
        if found != number || fields.rest() != 0 {
            return None;
        }
        let mut runs: Vec<PageRun> = Vec::with_capacity(count);
        for unit in 0..PAGE_UNITS {
            let continued = bitmap.get(unit / 8)? >> (unit % 8) & 1 == 1;
            if continued {
                runs.last_mut()?.count += 1;
            } else {
                let entry = Self::entry(heads.u64()?, clusters, unit_bits)?;
                runs.push(PageRun { first: unit, count: 1, entry });
            }
        }
        (heads.rest() == 0).then_some(Self { number, runs })
    }

    fn entry(raw: u64, clusters: &[u8], unit_bits: u32) -> Option<PageEntry> {
        let layer = (raw >> LAYER_SHIFT) as u16;
        let payload = raw & PAYLOAD;
        match raw >> KIND_SHIFT {
            0 => (raw == 0).then_some(PageEntry::Absent),
            1 => (payload == 0).then_some(PageEntry::Zero { layer }),
            2 => {
                let host = payload.checked_shl(unit_bits).filter(|h| h >> unit_bits == payload)?;
                Some(PageEntry::Data { layer, host: HostOffset::new(host) })
            }
            3 => {
                let at = usize::try_from(payload).ok()?.checked_mul(COMPRESSED)?;
                let mut fields = Fields::new(clusters.get(at..at.checked_add(COMPRESSED)?)?);
                let offset = fields.u64()?;
                let length = fields.u64()?;
                // The limits of an L2 entry.
                if offset >= 1 << 56 || length == 0 || length > 4 << 20 {
                    return None;
                }
                let cluster = CompressedCluster { offset: HostOffset::new(offset), length };
                Some(PageEntry::Compressed { layer, cluster })
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entry() -> impl Strategy<Value = PageEntry> {
        prop_oneof![
            Just(PageEntry::Absent),
            any::<u16>().prop_map(|layer| PageEntry::Zero { layer }),
            (any::<u16>(), 0u64..1 << 40)
                .prop_map(|(layer, n)| PageEntry::Data { layer, host: HostOffset::new(n << 16) }),
            (any::<u16>(), 0u64..1 << 56, 1u64..1 << 20).prop_map(|(layer, offset, length)| {
                let cluster = CompressedCluster { offset: HostOffset::new(offset), length };
                PageEntry::Compressed { layer, cluster }
            }),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn a_page_comes_back(
            few in prop::collection::vec((entry(), 1usize..200), 1..40),
        ) {
            let mut entries = vec![PageEntry::Absent; PAGE_UNITS];
            let mut at = 0;
            for (entry, count) in few.iter().cycle() {
                for step in 0..*count {
                    let Some(slot) = entries.get_mut(at) else { break };
                    *slot = match *entry {
                        PageEntry::Data { layer, host } => PageEntry::Data {
                            layer,
                            host: HostOffset::new(host.get() + ((step as u64) << 16)),
                        },
                        other => other,
                    };
                    at += 1;
                }
                if at >= PAGE_UNITS { break }
            }
            let page = Page::new(7, 16, entries.iter().copied());
            let bytes = page.encode(16).unwrap();
            prop_assert!(bytes.len() <= MAX_PAGE_BYTES as usize);
            prop_assert_eq!(Page::decode(&bytes, 7, 16), Some(page.clone()));
            prop_assert_eq!(Page::decode(&bytes, 8, 16), None);
            let mut unit = 0;
            for run in &page.runs {
                prop_assert_eq!(run.first, unit);
                prop_assert_eq!(run.entry, entries[unit]);
                unit += run.count;
            }
            prop_assert_eq!(unit, PAGE_UNITS);
        }

        #[test]
        fn any_bytes_are_taken_or_refused(mut bytes in prop::collection::vec(any::<u8>(), 0..400), magic: bool) {
            if magic && bytes.len() > 4 {
                bytes[..4].copy_from_slice(&MAGIC);
            }
            let _ = Page::decode(&bytes, 0, 16);
        }
    }

    #[test]
    fn sequential_data_is_one_run_and_a_random_page_costs_8_bytes_a_unit() {
        let data = |n: u64| PageEntry::Data { layer: 3, host: HostOffset::new(n << 16) };
        let page = Page::new(0, 16, (5..1029).map(data));
        assert_eq!(page.runs.len(), 1);
        assert_eq!(page.encode(16).unwrap().len(), HEAD + BITMAP + 8);
        let page = Page::new(0, 16, (0..1024).map(|n| data(n * 2))).encode(16).unwrap();
        assert_eq!(page.len(), HEAD + BITMAP + PAGE_UNITS * 8);
        let far = PageEntry::Data { layer: 0, host: HostOffset::new(1 << 55) };
        assert_eq!(Page::new(0, 9, [far]).encode(9), None);
    }

    #[test]
    fn a_page_that_lies_about_its_runs_is_refused() {
        let page = Page::new(0, 16, vec![PageEntry::Zero { layer: 1 }; 1000]);
        let good = page.encode(16).unwrap();
        for (at, value) in
            [(0, b'X'), (9, 3), (11, 1), (HEAD, 0xff), (HEAD + 1, 0), (HEAD + BITMAP, 0xf0)]
        {
            let mut bad = good.clone();
            bad[at] = value;
            assert_eq!(Page::decode(&bad, 0, 16), None, "{at}");
        }
        assert_eq!(Page::decode(&good[..good.len() - 1], 0, 16), None);
    }
}
