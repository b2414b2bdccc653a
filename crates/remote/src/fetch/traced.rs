//! Fetching ahead what a trace says, while no request waits for anything else.

use super::RemoteLayer;
use super::fetcher::Inner;
use super::flight::lock;
use super::wanted::Wanted;
use crate::cache::{Cache, ObjectKind};
use crate::digest::{BLOCK, Digest};
use crate::error::{Error, Result};
use crate::keys;
use crate::manifest::TraceObject;
use crate::trace::Trace;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread;

/// Requests at once.
const AT_ONCE: usize = 4;

/// The layers of a chain, by the digests of their objects.
type Layers = HashMap<Digest, Weak<RemoteLayer>>;

/// Fetches the blocks of a trace in its order, into at most half of the cache. Blocks until that is done.
///
/// # Errors
/// The store fails, or the trace is damaged. Nobody needs the layers any more.
pub(super) fn follow(
    inner: &Arc<Inner>,
    object: &TraceObject,
    layers: &Layers,
    cache: &Arc<Cache>,
) -> Result<()> {
    let trace = trace(inner, object, cache)?;
    let most = cache.limit() / 2 / BLOCK;
    let (runs, fetched) = (Mutex::new(trace.runs()), AtomicU64::new(0));
    let work = || -> Result<()> {
        loop {
            let next = lock(&runs).next();
            let Some((digest, blocks)) = next else { return Ok(()) };
            let Some(layer) = layers.get(digest) else { continue };
            fetch(inner, layer, blocks, &fetched, most)?;
        }
    };
    let done = thread::scope(|scope| {
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
    });
    let blocks = fetched.load(Ordering::Relaxed);
    tracing::info!(blocks, of = trace.blocks(), "fetched ahead what the chain's trace has");
    done
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

/// Fetches blocks of a layer that are not here, and counts them. Those past `most` are left out.
fn fetch(
    inner: &Arc<Inner>,
    layer: &Weak<RemoteLayer>,
    blocks: Range<u64>,
    fetched: &AtomicU64,
    most: u64,
) -> Result<()> {
    loop {
        if fetched.load(Ordering::Relaxed) >= most {
            return Ok(());
        }
        let layer = layer.upgrade().ok_or(Error::Interrupted)?;
        layer.attach_now(inner)?;
        let end = blocks.end.min(layer.length().div_ceil(BLOCK));
        let wanted: Arc<dyn Wanted> = layer;
        let Some(run) = inner.take_when_calm(&wanted, blocks.start..end)? else { return Ok(()) };
        inner.blocks(&run);
        for flight in &run.flights {
            match flight.ended() {
                Some(Ok(_)) => fetched.fetch_add(1, Ordering::Relaxed),
                Some(Err(error)) => return Err(Error::Store(error.to_string())),
                None => unreachable!("blocks that were fetched have landed"),
            };
        }
    }
}
