//! Verifies that a store has all of a chain.

use crate::checksums::{Checksums, Part};
use crate::digest::{BLOCK, Digest, Hasher, Table};
use crate::error::{Error, Result};
use crate::heads::{Head, Heads};
use crate::keys;
use crate::manifest::{Layer, Manifest, TraceObject};
use crate::progress::Progress;
use crate::pull::{heads, manifest};
use crate::recorded::{self, Comparison};
use crate::store::Store;
use crate::trace::Trace;
use crate::work;
use isobath_qcow2::index::WholeRoot;
use std::collections::BTreeMap;
use std::ops::Range;

const AT_ONCE: usize = 8;
const PIECE: u64 = 16 * BLOCK;

/// How closely a store is examined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Depth {
    /// Everything is read and compared with its digest.
    #[default]
    Digests,
    /// Each object must be there, and have its length.
    Lengths,
}

/// What was found of a chain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Its layers.
    pub layers: usize,
    /// Objects that were examined.
    pub objects: usize,
    /// What is wrong.
    pub problems: Vec<String>,
}

/// Verifies that everything that a chain's manifest names is there.
///
/// # Errors
/// There is no such chain; its manifest is damaged; those of the store.
pub fn check(store: &dyn Store, name: &str, depth: Depth, progress: &Progress) -> Result<Checked> {
    let manifest = manifest(store, name)?;
    let objects: BTreeMap<String, u64> = manifest.objects().collect();
    let objects: Vec<(String, u64)> = objects.into_iter().collect();
    progress.expect(objects.iter().fold(0, |sum: u64, (_, length)| sum.saturating_add(*length)));
    let lengths = work::each(objects.len(), AT_ONCE, |number| {
        progress.check()?;
        let Some((key, length)) = objects.get(number) else {
            unreachable!("each number is that of an object")
        };
        if depth == Depth::Lengths {
            progress.add(*length);
        }
        Ok(match store.head(key)? {
            None => Some(format!("'{key}' is missing")),
            Some(found) if found.length != *length => {
                Some(format!("'{key}' has {} bytes, and must have {length}", found.length))
            }
            Some(_) => None,
        })
    })?;
    let mut problems: Vec<String> = lengths.into_iter().flatten().collect();
    if depth == Depth::Digests && problems.is_empty() {
        // Damage is what this is for; any other error ends it.
        let heads = match heads(store, &manifest) {
            Ok(heads) => {
                problems.extend(check_index(store, &manifest, &heads, progress)?);
                heads
            }
            Err(Error::Damaged(problem)) => {
                problems.push(problem);
                // Nothing is recorded, so that nothing is compared.
                Heads::default()
            }
            Err(error) => return Err(error),
        };
        problems.extend(check_trace(store, &manifest, progress)?);
        progress.add(manifest.heads.length);
        let wrong = work::each(manifest.layers.len(), AT_ONCE / 2, |number| {
            let Some(layer) = manifest.layers.get(number) else {
                unreachable!("each number is that of a layer")
            };
            let head = heads.layers().get(number);
            let checked = check_layer(store, layer, head, progress);
            let checked = checked.map(|(mut problems, differs)| {
                let other =
                    |head: &&Head| !head.table.is_empty() && Digest::of(&head.table) != layer.table;
                if head.as_ref().is_some_and(other) {
                    problems.push(format!(
                        "the heads have other checksums than '{}': push the chain again",
                        keys::table(&layer.table)
                    ));
                }
                (problems, differs)
            });
            let differs = || recorded::differ(&layer.digest);
            match checked {
                Ok((problems, true)) => Ok([problems, vec![differs()]].concat()),
                Ok((problems, false)) => Ok(problems),
                Err(Error::Damaged(problem)) => Ok(vec![problem]),
                Err(error) => Err(error),
            }
        })?;
        problems.extend(wrong.into_iter().flatten());
        problems.sort();
        problems.dedup();
    }
    Ok(Checked { layers: manifest.layers.len(), objects: objects.len(), problems })
}

/// What is wrong with the index of a chain and with what the heads say of it, short of what it says of the layers.
fn check_index(
    store: &dyn Store,
    manifest: &Manifest,
    heads: &Heads,
    progress: &Progress,
) -> Result<Vec<String>> {
    let (object, head) = match (&manifest.index, heads.index()) {
        (None, None) => return Ok(Vec::new()),
        (Some(object), Some(head)) => (object, head),
        _ => {
            return Ok(vec![
                "the heads have another index than the manifest: push the chain again".to_owned(),
            ]);
        }
    };
    let key = keys::index(&object.digest);
    let (mut hasher, mut table) = (Hasher::default(), Table::new());
    let mut at = 0;
    while at < object.length {
        progress.check()?;
        let size = PIECE.min(object.length - at);
        let bytes = store.read(&key, at, size as usize)?;
        hasher.update(&bytes);
        table.extend(&bytes);
        progress.add(size);
        at += size;
    }
    if hasher.finish() != object.digest {
        return Ok(vec![format!(
            "'{key}' does not match its digest: remove it, and push the chain again"
        )]);
    }
    let mut problems = Vec::new();
    if table.bytes() != head.table {
        problems.push(format!("the heads have other checksums than '{key}': push the chain again"));
    }
    let root = WholeRoot::decode(&head.root);
    let is_its = |root: &WholeRoot| {
        root.layers as usize == manifest.layers.len() && root.size == manifest.size
    };
    if root.as_ref().is_none_or(|root| !is_its(root)) {
        problems.push(format!("the heads have no root of '{key}': push the chain again"));
    }
    Ok(problems)
}

/// What is wrong with the trace of a chain.
fn check_trace(
    store: &dyn Store,
    manifest: &Manifest,
    progress: &Progress,
) -> Result<Option<String>> {
    let Some(TraceObject { digest, length }) = &manifest.trace else { return Ok(None) };
    let key = keys::trace(digest);
    progress.check()?;
    let bytes = store.read(&key, 0, *length as usize)?;
    progress.add(*length);
    if Digest::of(&bytes) != *digest {
        return Ok(Some(format!(
            "'{key}' does not match its digest: 'isobath remote trace --remove CHAIN' removes the chain's reference to \
             it"
        )));
    }
    Ok(Trace::decode(&bytes).err().map(|error| format!("'{key}': {error}")))
}

/// What is wrong with a layer and its table, and whether the layer, if it is whole, differs from its head.
fn check_layer(
    store: &dyn Store,
    layer: &Layer,
    head: Option<&Head>,
    progress: &Progress,
) -> Result<(Vec<String>, bool)> {
    let key = keys::layer(&layer.digest);
    let (mut hasher, mut wrong) = (Hasher::default(), None);
    let mut compared: Option<Comparison<'_>> = None;
    let mut read = |range: Range<u64>, part: Option<&Part>| -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            progress.check()?;
            let size = PIECE.min(range.end - at);
            let bytes = store.read(&key, at, size as usize)?;
            wrong = wrong.or_else(|| part.and_then(|part| part.mismatch(at, &bytes)));
            if at == 0 {
                compared =
                    head.map(|head| Comparison::new(head, layer.format, layer.length, &bytes));
            }
            if let Some(compared) = &mut compared {
                compared.show(at, &bytes);
            }
            hasher.update(&bytes);
            progress.add(size);
            at += size;
        }
        Ok(())
    };
    let (mut checksums, mut at) = (Checksums::of(store, layer), 0);
    // Whether the layer is whole must be known although its table is damaged.
    let table = loop {
        match checksums.next() {
            Ok(Some(part)) => {
                progress.add(part.bytes());
                at = part.range.end;
                read(part.range.clone(), Some(&part))?;
            }
            Ok(None) => break None,
            Err(Error::Damaged(problem)) => {
                read(at..layer.length, None)?;
                break Some(problem);
            }
            Err(error) => return Err(error),
        }
    };
    let matches = hasher.finish() == layer.digest;
    let mut problems = Vec::new();
    match (&table, wrong) {
        (None, Some(at)) if matches => problems.push(format!(
            "'{}' does not match the layer '{key}' at byte {at}",
            keys::table(&layer.table)
        )),
        (None, Some(at)) => {
            problems.push(format!("'{key}' does not match its digest: it differs at byte {at}"));
        }
        _ if !matches => problems.push(format!("'{key}' does not match its digest")),
        _ => {}
    }
    problems.extend(table);
    let differs = matches && compared.is_some_and(|compared| compared.differs());
    Ok((problems, differs))
}
