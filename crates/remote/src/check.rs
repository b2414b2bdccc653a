//! Verifies that a store has all of a chain.

use crate::digest::{BLOCK, Hasher};
use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::pull::{heads, manifest, table};
use crate::store::Store;
use crate::work;
use std::collections::BTreeMap;

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
        let noted = |result: Result<()>| match result {
            Ok(()) => Ok(None),
            Err(Error::Damaged(problem)) => Ok(Some(problem)),
            Err(error) => Err(error),
        };
        problems.extend(noted(heads(store, &manifest).map(drop))?);
        progress.add(manifest.heads.length);
        let wrong = work::each(manifest.layers.len(), AT_ONCE / 2, |number| {
            let Some(layer) = manifest.layers.get(number) else {
                unreachable!("each number is that of a layer")
            };
            noted(check_layer(store, layer, progress))
        })?;
        problems.extend(wrong.into_iter().flatten());
        problems.sort();
        problems.dedup();
    }
    Ok(Checked { layers: manifest.layers.len(), objects: objects.len(), problems })
}

fn check_layer(
    store: &dyn Store,
    layer: &crate::manifest::Layer,
    progress: &Progress,
) -> Result<()> {
    let key = crate::keys::layer(&layer.digest);
    let table = table(store, layer)?;
    progress.add(table.bytes().len() as u64);
    let (mut hasher, mut at, mut wrong) = (Hasher::default(), 0, None);
    while at < layer.length {
        progress.check()?;
        let size = PIECE.min(layer.length - at);
        let bytes = store.read(&key, at, size as usize)?;
        wrong = wrong.or(table.mismatch(at / BLOCK, &bytes));
        hasher.update(&bytes);
        progress.add(size);
        at += size;
    }
    let matches = hasher.finish() == layer.digest;
    match (matches, wrong) {
        (true, None) => Ok(()),
        (false, Some(block)) => Err(Error::damaged(format_args!(
            "'{key}' does not match its digest: it differs at byte {}",
            block * BLOCK
        ))),
        (false, None) => Err(Error::damaged(format_args!("'{key}' does not match its digest"))),
        (true, Some(block)) => Err(Error::damaged(format_args!(
            "'{}' does not match the layer '{key}' at byte {}",
            crate::keys::table(&layer.table),
            block * BLOCK
        ))),
    }
}
