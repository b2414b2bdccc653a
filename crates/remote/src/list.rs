//! What is in a store.

use crate::digest::Digest;
use crate::error::Result;
use crate::keys;
use crate::manifest::{MAX_MANIFEST, Manifest};
use crate::store::Store;
use crate::work;
use std::collections::{BTreeMap, BTreeSet};

const AT_ONCE: usize = 8;

/// A chain in a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// What is known of it, or why nothing is.
    pub chain: std::result::Result<Chain, String>,
}

/// What is known of a chain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chain {
    /// Its layers.
    pub layers: usize,
    /// The disk's size in bytes.
    pub size: u64,
    /// Bytes of its layers' files.
    pub bytes: u64,
    /// Those of layers that another chain of the store has, too.
    pub shared: u64,
}

/// All chains in a store, by name.
///
/// # Errors
/// Those of the store.
pub fn list(store: &dyn Store) -> Result<Vec<Listed>> {
    let entries = store.list(keys::MANIFESTS)?;
    let names: Vec<&str> = entries.iter().filter_map(|entry| keys::name(&entry.key)).collect();
    let manifests = work::each(names.len(), AT_ONCE, |number| {
        let Some(name) = names.get(number) else { unreachable!("each number is that of a name") };
        // One that is removed meanwhile is none.
        let Some((bytes, _)) = store.get(&keys::manifest(name), MAX_MANIFEST)? else {
            return Ok(None);
        };
        Ok(Some((
            (*name).to_owned(),
            Manifest::decode(name, &bytes).map_err(|error| error.to_string()),
        )))
    })?;
    let manifests: Vec<_> = manifests.into_iter().flatten().collect();
    let mut users: BTreeMap<Digest, usize> = BTreeMap::new();
    for (_, manifest) in &manifests {
        let layers = manifest.iter().flat_map(|manifest| &manifest.layers);
        for digest in layers.map(|layer| layer.digest).collect::<BTreeSet<_>>() {
            *users.entry(digest).or_default() += 1;
        }
    }
    let describe = |manifest: Manifest| {
        let unique: BTreeMap<Digest, u64> =
            manifest.layers.iter().map(|layer| (layer.digest, layer.length)).collect();
        let shared =
            unique.iter().filter(|(digest, _)| users.get(digest).is_some_and(|users| *users > 1));
        Chain {
            layers: manifest.layers.len(),
            size: manifest.size,
            bytes: unique.values().sum(),
            shared: shared.map(|(_, length)| length).sum(),
        }
    };
    Ok(manifests
        .into_iter()
        .map(|(name, chain)| Listed { name, chain: chain.map(describe) })
        .collect())
}
