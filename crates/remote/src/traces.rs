//! Puts a trace beside a chain.

use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::keys;
use crate::manifest::{MAX_MANIFEST, Manifest, TraceObject};
use crate::progress::Progress;
use crate::push::{Manifests, ROUNDS, Replace, noted, put_unless_there};
use crate::store::Store;
use crate::trace::Trace;
use std::collections::HashSet;

/// Has a chain's servers fetch ahead what a trace has, or nothing. What the trace has of other chains is left out.
/// Gives the number of blocks. What others push meanwhile stays: their manifest gets the trace. [`Replace::Any`] is for
/// stores that cannot replace an object only if it is unchanged; what is pushed there at the same time may be lost.
///
/// # Errors
/// There is no such chain, or the trace has nothing of it; somebody pushes to it again and again, or collects objects
/// at the same time; those of the store.
pub fn set_trace(
    store: &dyn Store,
    name: &str,
    trace: Option<&Trace>,
    replace: Replace,
    progress: &Progress,
) -> Result<u64> {
    let mut blocks = 0;
    noted(store, name, |_, done| {
        let mut rounds = ROUNDS;
        loop {
            progress.check()?;
            match replaced(store, name, trace, replace, done) {
                Err(Error::Conflict(_)) if rounds > 0 => rounds -= 1,
                set => {
                    blocks = set?;
                    return Ok(());
                }
            }
        }
    })?;
    Ok(blocks)
}

/// Replaces the manifest by one that has the trace, or none.
fn replaced(
    store: &dyn Store,
    name: &str,
    trace: Option<&Trace>,
    replace: Replace,
    done: &mut Manifests,
) -> Result<u64> {
    let Some((bytes, version)) = store.get(&keys::manifest(name), MAX_MANIFEST)? else {
        return Err(Error::refused(format_args!("the store has no chain '{name}'")));
    };
    let mut manifest = Manifest::decode(name, &bytes)?;
    manifest.trace = None;
    let mut blocks = 0;
    if let Some(trace) = trace {
        let layers = manifest.layers.iter().map(|layer| layer.digest);
        let index = manifest.index.iter().map(|index| index.digest);
        let own: HashSet<Digest> = layers.chain(index).collect();
        let trace = trace.of_those(|digest| own.contains(digest));
        blocks = trace.blocks();
        if blocks == 0 {
            return Err(Error::refused(format_args!(
                "the trace has no block of a layer of '{name}': it was recorded of another chain, or nothing was read"
            )));
        }
        let bytes = trace.encode();
        let (digest, length) = (Digest::of(&bytes), bytes.len() as u64);
        put_unless_there(store, &keys::trace(&digest), &bytes)?;
        manifest.trace = Some(TraceObject { digest, length });
    }
    store.settle()?;
    let (manifest, was) = (manifest.encode()?, Some((bytes, version)));
    match done.put(store, name, &manifest, was.as_ref(), Replace::Unchanged) {
        Err(Error::Refused(_)) if replace == Replace::Any => {
            done.put(store, name, &manifest, was.as_ref(), replace)
        }
        put => put,
    }
    .map(|()| blocks)
}
