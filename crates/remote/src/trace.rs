//! What is read of a chain, and in which order: recorded once, it is fetched ahead the next time.

use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::heads::MAX_LAYERS;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

const MAGIC: &[u8; 4] = b"ITRC";
const VERSION: u32 = 1;
/// Bytes before the digests, of a digest, and of a run.
const START: usize = 16;
const DIGEST: usize = 32;
const RUN: usize = 16;

/// Most objects of a trace: all layers of a chain, and its index.
const MOST_OBJECTS: usize = MAX_LAYERS + 1;

/// Most runs of a trace.
const MOST_RUNS: usize = 1 << 20;

/// Most bytes of a trace.
pub const MAX_TRACE: u64 = (START + MOST_OBJECTS * DIGEST + MOST_RUNS * RUN) as u64;

/// Least bytes of a trace.
pub(crate) const LEAST_TRACE: u64 = START as u64;

/// Neighbouring blocks of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// The number of the layer in the trace.
    pub(crate) layer: u32,
    /// The first block.
    pub(crate) first: u64,
    /// How many there are; at least one.
    pub(crate) count: u32,
}

/// The blocks of layers that were read, in the order of their first reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// The objects of the layers, or of the index.
    layers: Vec<Digest>,
    runs: Vec<Run>,
}

impl Trace {
    /// The bytes of the object, as `docs/format.md` specifies them.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&VERSION.to_be_bytes());
        bytes.extend_from_slice(&(self.layers.len() as u32).to_be_bytes());
        bytes.extend_from_slice(&(self.runs.len() as u32).to_be_bytes());
        for layer in &self.layers {
            bytes.extend_from_slice(layer.bytes());
        }
        for run in &self.runs {
            bytes.extend_from_slice(&run.layer.to_be_bytes());
            bytes.extend_from_slice(&run.first.to_be_bytes());
            bytes.extend_from_slice(&run.count.to_be_bytes());
        }
        bytes
    }

    /// The trace in `bytes`.
    ///
    /// # Errors
    /// It is none, or of a later version.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let wrong = |what: &str| Error::damaged(format_args!("this is no trace: {what}"));
        let (start, rest) = bytes.split_first_chunk::<START>().ok_or_else(|| {
            wrong(if bytes.is_empty() { "it is empty" } else { "it is too short" })
        })?;
        let number = |at: usize| {
            let field = start.get(at..at + 4).and_then(|field| field.first_chunk::<4>());
            field.map_or(0, |field| u32::from_be_bytes(*field))
        };
        if !start.starts_with(MAGIC) {
            return Err(wrong("it does not begin with 'ITRC'"));
        }
        if number(4) != VERSION {
            return Err(Error::damaged(format_args!(
                "the trace has version {}, and this program knows version {VERSION}: use a newer one",
                number(4)
            )));
        }
        let (layers, runs) = (number(8) as usize, number(12) as usize);
        if layers > MOST_OBJECTS || runs > MOST_RUNS {
            return Err(wrong("it has more objects or runs than a trace may have"));
        }
        if rest.len() != layers * DIGEST + runs * RUN {
            return Err(wrong("it has another length than its beginning says"));
        }
        let (digests, records) = rest.split_at(layers * DIGEST);
        let digests =
            digests.as_chunks::<DIGEST>().0.iter().map(|digest| Digest::of_bytes(*digest));
        let digests: Vec<Digest> = digests.collect();
        let runs = records.as_chunks::<RUN>().0.iter().map(|record| {
            let record = u128::from_be_bytes(*record);
            Run { layer: (record >> 96) as u32, first: (record >> 32) as u64, count: record as u32 }
        });
        let runs: Vec<Run> = runs.collect();
        let is_wrong = |run: &Run| {
            run.layer as usize >= layers
                || run.count == 0
                || run.first.checked_add(run.count.into()).is_none()
        };
        if runs.iter().any(is_wrong) {
            return Err(wrong("a run is of no layer, or has no blocks"));
        }
        Ok(Self { layers: digests, runs })
    }

    /// The blocks, in order: the digest of the object that each run is of, and the run.
    pub(crate) fn runs(&self) -> impl Iterator<Item = (&Digest, Range<u64>)> {
        self.runs.iter().filter_map(|run| {
            let end = run.first.saturating_add(run.count.into());
            Some((self.layers.get(run.layer as usize)?, run.first..end))
        })
    }

    /// How many blocks it has.
    pub fn blocks(&self) -> u64 {
        self.runs.iter().map(|run| u64::from(run.count)).sum()
    }

    /// The same without the blocks of objects that are not among these.
    #[must_use]
    pub(crate) fn of_those(&self, wanted: impl Fn(&Digest) -> bool) -> Self {
        Self::of(
            self.runs().filter(|(digest, _)| wanted(digest)).map(|(digest, run)| (*digest, run)),
        )
    }

    /// The trace of these blocks, in this order.
    pub(crate) fn of(blocks: impl IntoIterator<Item = (Digest, Range<u64>)>) -> Self {
        let mut trace = Self { layers: Vec::new(), runs: Vec::new() };
        let mut numbers = BTreeMap::new();
        for (digest, range) in blocks {
            let Ok(count) = u32::try_from(range.end - range.start) else { continue };
            let layer = *numbers.entry(digest).or_insert_with(|| {
                trace.layers.push(digest);
                trace.layers.len() as u32 - 1
            });
            trace.runs.push(Run { layer, first: range.start, count });
        }
        trace
    }
}

/// What a recording has until now: for each run the number of a layer, and its blocks.
type Order = Vec<(usize, Range<u64>)>;

/// Records what is read of a chain.
#[derive(Debug)]
pub struct Recording {
    order: Arc<Mutex<Order>>,
    /// The objects of the layers, by their numbers.
    layers: Vec<Digest>,
}

impl Recording {
    pub(crate) fn new(layers: Vec<Digest>) -> Self {
        Self { order: Arc::default(), layers }
    }

    /// Notes the reads of the layer with this number, which has so many blocks.
    pub(crate) fn of_layer(&self, number: usize, blocks: u64) -> Recorded {
        let words = (0..blocks.div_ceil(64)).map(|_| AtomicU64::new(0));
        Recorded { number, seen: words.collect(), order: Arc::clone(&self.order) }
    }

    /// What was read until now.
    pub fn trace(&self) -> Trace {
        let order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        let of =
            |(number, run): &(usize, Range<u64>)| Some((*self.layers.get(*number)?, run.clone()));
        Trace::of(order.iter().filter_map(of))
    }
}

/// What is noted of a layer.
#[derive(Debug)]
pub(crate) struct Recorded {
    number: usize,
    /// A bit for each block.
    seen: Box<[AtomicU64]>,
    order: Arc<Mutex<Order>>,
}

impl Recorded {
    /// Notes a read of these blocks.
    pub(crate) fn note(&self, blocks: Range<u64>) {
        for block in blocks {
            let Some(word) = self.seen.get((block / 64) as usize) else { return };
            let bit = 1 << (block % 64);
            if word.load(Ordering::Relaxed) & bit == 0
                && word.fetch_or(bit, Ordering::Relaxed) & bit == 0
            {
                self.add(block);
            }
        }
    }

    /// Adds a block that is read for the first time.
    fn add(&self, block: u64) {
        let mut order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((number, run)) = order.last_mut()
            && *number == self.number
            && run.end == block
        {
            run.end += 1;
        } else if order.len() < MOST_RUNS {
            order.push((self.number, block..block + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(number: u8) -> Digest {
        Digest::of(&[number])
    }

    fn trace() -> Trace {
        Trace::of([(digest(3), 5..9), (digest(1), 0..1), (digest(3), 1 << 37..(1 << 37) + 2)])
    }

    #[test]
    fn a_trace_has_the_blocks_in_the_order_of_their_first_reads() {
        let recording = Recording::new(vec![digest(0), digest(1), digest(2)]);
        let (low, high) = (recording.of_layer(1, 100), recording.of_layer(2, 65));
        high.note(3..5);
        high.note(4..6);
        low.note(7..8);
        high.note(3..6);
        high.note(64..65);
        low.note(8..9);
        let trace = recording.trace();
        let runs: Vec<_> = trace.runs().map(|(digest, run)| (*digest, run)).collect();
        let expected =
            [(digest(2), 3..6), (digest(1), 7..8), (digest(2), 64..65), (digest(1), 8..9)];
        assert_eq!(runs, expected);
        assert_eq!((trace.blocks(), trace.layers.len()), (6, 2));
        let of_one = trace.of_those(|one| *one == digest(1));
        assert_eq!((of_one.blocks(), of_one.layers.len()), (2, 1));
    }

    #[test]
    fn a_trace_is_read_as_it_was_written() {
        let objects = (0..MOST_OBJECTS).map(|number| (Digest::of(&number.to_be_bytes()), 0..1));
        for trace in [trace(), Trace::of([]), Trace::of(objects)] {
            assert_eq!(Trace::decode(&trace.encode()).unwrap(), trace);
        }
        assert!(trace().encode().len() as u64 <= MAX_TRACE);
    }

    #[test]
    fn what_is_no_trace_is_refused_and_says_why() {
        let bytes = trace().encode();
        let changed = |at: usize, to: u8| {
            let mut bytes = bytes.clone();
            bytes[at] = to;
            bytes
        };
        let mut beyond = bytes.clone();
        beyond[16 + 64 + 4..16 + 64 + 12].fill(0xff);
        for (wrong, why) in [
            (Vec::new(), "it is empty"),
            (bytes[..15].to_vec(), "it is too short"),
            (changed(0, b'X'), "does not begin with"),
            (changed(7, 2), "has version 2"),
            (changed(8, 1), "more objects or runs"),
            (changed(12, 1), "more objects or runs"),
            (changed(11, 1), "another length"),
            (bytes[..bytes.len() - 1].to_vec(), "another length"),
            ([&bytes[..], &[0]].concat(), "another length"),
            (changed(16 + 64 + 3, 2), "a run is of no layer"),
            (changed(16 + 64 + 15, 0), "a run is of no layer, or has no blocks"),
            (beyond, "a run is of no layer, or has no blocks"),
        ] {
            let error = Trace::decode(&wrong).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
