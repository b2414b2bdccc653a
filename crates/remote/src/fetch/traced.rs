//! Fetching ahead what a trace says, while nothing else waits to be fetched.

use super::fetcher::{Inner, start};
use super::flight::lock;
use super::layer::{Common, RemoteLayer};
use super::queue::MOST_AT_ONCE;
use super::wanted::Wanted;
use crate::cache::{Cache, ObjectKind};
use crate::digest::{BLOCK, Digest};
use crate::error::{Error, Result};
use crate::keys;
use crate::manifest::TraceObject;
use crate::trace::Trace;
use crate::work::Room;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Requests at once: of a deep chain each fetches a block alone, and takes as long as the store needs to answer.
const AT_ONCE: usize = 12;

/// Most bytes of these requests together. What the guest asks for meanwhile waits until they have arrived: no more are
/// needed to keep a link of 1 Gbit/s busy whose answers begin after 30 ms.
const IN_FLIGHT: u64 = 4 << 20;

/// Requests in a row whose blocks the cache does not keep, after which no more are made.
const FRUITLESS: u64 = 16;

/// How long to wait until the cache has counted its files for the first time: what is filled meanwhile may not be kept.
const MOST_OF_A_COUNT: Duration = Duration::from_secs(10);

/// A layer whose blocks may be in a trace. Who drops the chain ends what is done for it.
struct Followed {
    layer: Weak<RemoteLayer>,
    blocks: u64,
}

/// The layers of a chain, by the digests of their objects.
type Layers = HashMap<Digest, Followed>;

fn followed(layers: &[Arc<RemoteLayer>]) -> Layers {
    let followed = |layer: &Arc<RemoteLayer>| {
        let blocks = layer.length().div_ceil(BLOCK);
        (layer.described().digest, Followed { layer: Arc::downgrade(layer), blocks })
    };
    layers.iter().map(followed).collect()
}

/// Has what the object of a trace says of these layers fetched ahead, on a thread of its own, in the trace's order, as
/// long as what is fetched of traces takes at most half of the cache.
///
/// # Errors
/// The thread cannot be started.
pub(crate) fn follow(
    common: &Common,
    object: TraceObject,
    layers: &[Arc<RemoteLayer>],
) -> Result<JoinHandle<()>> {
    let (inner, cache) = (Arc::clone(common.fetcher().shared()), Arc::clone(common.cache()));
    let layers = followed(layers);
    start("fetch-trace", move || {
        if let Err(error) = fetch_all(&inner, &object, &layers, &cache)
            && !matches!(error, Error::Interrupted)
        {
            tracing::warn!("the chain's trace is not fetched ahead: {error}");
        }
    })
}

/// Fetches the blocks of a trace.
///
/// # Errors
/// The store fails, or the trace is damaged. Nobody needs the layers any more.
fn fetch_all(
    inner: &Arc<Inner>,
    object: &TraceObject,
    layers: &Layers,
    cache: &Arc<Cache>,
) -> Result<()> {
    let trace = trace(inner, object, cache)?;
    inner.wait_until(MOST_OF_A_COUNT, || cache.rounds() > 0)?;
    let pieces = Mutex::new(pieces(&trace, layers));
    let (fetched, fruitless, is_full) = Default::default();
    let in_flight = Room::new(IN_FLIGHT);
    let follower = Follower { inner, cache, fetched, fruitless, is_full, in_flight };
    let work = || -> Result<()> {
        while follower.hindrance().is_none() {
            let next = lock(&pieces).next();
            let Some((layer, blocks)) = next else { break };
            follower.fetch(layer, blocks)?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let others: Vec<_> = (1..AT_ONCE)
            .map_while(|_| {
                let name = "fetch-trace".to_owned();
                thread::Builder::new().name(name).spawn_scoped(scope, work).ok()
            })
            .collect();
        let own = work();
        let failed = || Error::Store("a thread that read ahead has ended early".to_owned());
        let others = others.into_iter().map(|other| other.join().unwrap_or_else(|_| Err(failed())));
        others.fold(own, Result::and)
    })?;
    let (blocks, of) = (follower.fetched.load(Ordering::Relaxed), trace.blocks());
    let is_left = lock(&pieces).next().is_some();
    match follower.hindrance().filter(|_| is_left) {
        None => tracing::info!(blocks, of, "fetched ahead what the chain's trace has"),
        Some(why) => tracing::info!(blocks, of, "fetched ahead a part of the chain's trace: {why}"),
    }
    Ok(())
}

/// The trace, from the cache or the store.
fn trace(inner: &Inner, object: &TraceObject, cache: &Cache) -> Result<Trace> {
    let TraceObject { digest, length } = object;
    if let Some(held) = cache.object(ObjectKind::Trace, digest) {
        return Trace::decode(held.bytes());
    }
    let bytes = inner.object(&keys::trace(digest), *length, digest)?;
    Trace::decode(cache.keep(ObjectKind::Trace, digest, &bytes)?.bytes())
}

/// What a trace has of these layers, in pieces that one request fetches. A recording names each block once; of a trace
/// that names some again and again no more is looked at than there are blocks.
fn pieces<'a>(
    trace: &'a Trace,
    layers: &'a Layers,
) -> impl Iterator<Item = (&'a Followed, Range<u64>)> + 'a {
    let mut left: u64 = layers.values().map(|layer| layer.blocks).sum();
    let runs = trace.runs().filter_map(|(digest, run)| {
        let layer = layers.get(digest)?;
        Some((layer, run.start..run.end.min(layer.blocks)))
    });
    let pieces = runs.flat_map(|(layer, run)| {
        let end = run.end;
        run.step_by(MOST_AT_ONCE)
            .map(move |first| (layer, first..end.min(first + MOST_AT_ONCE as u64)))
    });
    pieces.take_while(move |(_, piece)| {
        let rest = left.checked_sub(piece.end - piece.start);
        left = rest.unwrap_or(0);
        rest.is_some()
    })
}

/// What the threads that follow a trace share.
struct Follower<'a> {
    inner: &'a Arc<Inner>,
    cache: &'a Cache,
    /// Blocks that were fetched.
    fetched: AtomicU64,
    /// Requests in a row whose blocks were not kept.
    fruitless: AtomicU64,
    /// No room is left for what is fetched ahead.
    is_full: AtomicBool,
    /// For what is on its way.
    in_flight: Room,
}

impl Follower<'_> {
    /// Why nothing more is fetched, if that is so.
    fn hindrance(&self) -> Option<&'static str> {
        if self.is_full.load(Ordering::Relaxed) {
            return Some("half of the cache is taken");
        }
        (self.fruitless.load(Ordering::Relaxed) >= FRUITLESS)
            .then_some("the cache does not keep it")
    }

    /// Fetches those of these blocks of a layer that are not here, each at most once.
    fn fetch(&self, layer: &Followed, blocks: Range<u64>) -> Result<()> {
        let layer = layer.layer.upgrade().ok_or(Error::Interrupted)?;
        if !layer.attach_ahead(self.inner)? {
            return Ok(());
        }
        let wanted: Arc<dyn Wanted> = layer;
        let room = (blocks.end - blocks.start) * BLOCK;
        // Before room in the cache, so that no more of that is taken than what is under way needs.
        let _arriving = self.in_flight.take(room);
        if !self.cache.take_ahead(room) {
            self.is_full.store(true, Ordering::Relaxed);
            return Ok(());
        }
        let mut taken = 0;
        let fetched = self.fetch_absent(&wanted, blocks, &mut taken);
        self.cache.give_ahead(room - taken * BLOCK);
        fetched
    }

    /// Fetches those of these blocks that are not here, and counts them in `taken`.
    fn fetch_absent(
        &self,
        wanted: &Arc<dyn Wanted>,
        blocks: Range<u64>,
        taken: &mut u64,
    ) -> Result<()> {
        let mut rest = blocks;
        while let Some(run) = self.inner.take_when_calm(wanted, rest.clone())? {
            let count = run.flights.len() as u64;
            rest.start = run.first + count;
            *taken += count;
            self.inner.blocks(&run);
            for flight in &run.flights {
                match flight.ended() {
                    Some(Ok(_)) => {}
                    Some(Err(error)) => return Err(Error::Store(error.to_string())),
                    None => unreachable!("blocks that were fetched have landed"),
                }
            }
            self.fetched.fetch_add(count, Ordering::Relaxed);
            if (run.first..rest.start).any(|block| !wanted.is_absent(block)) {
                self.fruitless.store(0, Ordering::Relaxed);
            } else {
                self.fruitless.fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_looked_at_in_pieces_of_a_request_and_no_longer_than_there_are_blocks() {
        let digest = |number: u8| Digest::of(&[number]);
        let of = |blocks| Followed { layer: Weak::new(), blocks };
        let layers = Layers::from([(digest(1), of(20)), (digest(2), of(3))]);
        let looked_at = |runs: &[(Digest, Range<u64>)]| -> Vec<(u64, Range<u64>)> {
            let trace = Trace::of(runs.iter().cloned());
            pieces(&trace, &layers).map(|(layer, piece)| (layer.blocks, piece)).collect()
        };
        assert_eq!(
            looked_at(&[(digest(1), 2..19), (digest(3), 0..9), (digest(2), 1..2)]),
            [(20, 2..10), (20, 10..18), (20, 18..19), (3, 1..2)]
        );
        assert_eq!(looked_at(&[(digest(2), 3..9), (digest(2), 2..1 << 31)]), [(3, 2..3)]);
        let again = vec![(digest(2), 0..u64::from(u32::MAX)); 100];
        assert_eq!(looked_at(&again), vec![(3, 0..3); 7]);
    }
}
