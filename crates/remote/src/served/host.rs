//! The layers of chains in stores, as files of a host.

use super::chain::{Chain, PINNED};
use super::file::{RemoteFile, read_only};
use crate::digest::Digest;
use isobath_storage::{FileId, Host, OpenMode, Operation, Result, StorageError};
use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

/// What the names of chains in stores begin with.
const SCHEMES: [&str; 4] = ["s3://", "gs://", "az://", "file:///"];

/// Whether a name has the form of those of chains in stores.
pub fn is_name(name: &str) -> bool {
    SCHEMES.iter().any(|scheme| name.starts_with(scheme))
}

/// Opens the layers of chains that were [added](Self::add). Nothing else makes it read from a store, whatever names the
/// headers of images contain. Clones share their chains.
#[derive(Clone, Debug, Default)]
pub struct RemoteHost {
    chains: Arc<RwLock<HashMap<String, Arc<Chain>>>>,
}

impl RemoteHost {
    /// The chain with this address, if it was added.
    pub fn chain(&self, address: &str) -> Option<Arc<Chain>> {
        let chains = self.chains.read().unwrap_or_else(PoisonError::into_inner);
        chains.get(address).map(Arc::clone)
    }

    /// Lets the layers of a chain be opened. If one with its address was added before, that stays, and is returned.
    pub fn add(&self, chain: &Arc<Chain>) -> Arc<Chain> {
        let mut chains = self.chains.write().unwrap_or_else(PoisonError::into_inner);
        let address = chain.address().to_string();
        Arc::clone(chains.entry(address).or_insert_with(|| Arc::clone(chain)))
    }

    /// The chain that a name is of, and what comes behind its address.
    fn split<'n>(&self, name: &'n str) -> Option<(Arc<Chain>, &'n str)> {
        let end = name.find(['#', '?']).unwrap_or(name.len());
        let (address, rest) = name.split_at(end);
        Some((self.chain(address)?, rest))
    }

    /// The layer that a name is of, by its number.
    fn layer(&self, name: &str) -> Option<(Arc<Chain>, usize)> {
        let (chain, rest) = self.split(name)?;
        let number = if rest.is_empty() {
            chain.depth().checked_sub(1)
        } else if let Some(number) = rest.strip_prefix('#') {
            number.parse().ok().filter(|number| chain.layer(*number).is_some())
        } else {
            let digest = rest.strip_prefix(PINNED).and_then(Digest::parse);
            digest.and_then(|digest| chain.pinned(&digest))
        };
        Some((chain, number?))
    }

    fn find_layer(&self, operation: Operation, name: &Path) -> Result<(Arc<Chain>, usize)> {
        let text = name.to_str().unwrap_or_default();
        self.layer(text).ok_or_else(|| {
            let text = match self.split(text) {
                Some(_) => {
                    "the chain in the store does not have these layers any more, so that what is above them cannot be \
                     read; push them again, or pull the chain from where they are"
                }
                None => {
                    "it is in a store, from which images are read only if the command line names the chain: serve it \
                     with 'isobath serve CHAIN --overlay IMAGE'"
                }
            };
            StorageError::new(operation, name, io::Error::new(io::ErrorKind::NotFound, text))
        })
    }
}

impl Host for RemoteHost {
    type File = RemoteFile;

    async fn open(&self, name: &Path, mode: OpenMode) -> Result<RemoteFile> {
        let (chain, number) = self.find_layer(Operation::Open, name)?;
        if mode.writable {
            return Err(read_only(Operation::Open, name));
        }
        let Some(layer) = chain.layer(number) else { unreachable!("the layer was found") };
        Ok(RemoteFile::new(name.to_owned(), layer))
    }

    async fn create(&self, name: &Path, _: OpenMode) -> Result<RemoteFile> {
        Err(read_only(Operation::Create, name))
    }

    async fn remove(&self, name: &Path) -> Result<()> {
        Err(read_only(Operation::Remove, name))
    }

    async fn remove_file(&self, name: &Path, _: &RemoteFile) -> Result<bool> {
        Err(read_only(Operation::Remove, name))
    }

    fn find(&self, name: &Path) -> Result<Option<FileId>> {
        let (chain, number) = self.find_layer(Operation::Query, name)?;
        Ok(chain.layer(number).map(|layer| RemoteFile::id_of(layer)))
    }

    /// Only names of certain layers of chains that were added: those that overlays have.
    fn protocol_name(&self, name: &str) -> bool {
        self.split(name).is_some_and(|(_, rest)| rest.starts_with(PINNED))
    }

    /// The layer that an overlay names; in a layer of a chain the one below, whatever name the header has: the manifest
    /// gives the order.
    fn resolve(&self, referrer: &Path, name: &str) -> PathBuf {
        if self.protocol_name(name) {
            let named = self.layer(name);
            return named.map_or_else(|| name.into(), |(chain, number)| chain.name_of(number));
        }
        let referrer = referrer.to_str().and_then(|referrer| self.layer(referrer));
        match referrer.and_then(|(chain, number)| Some(chain.name_of(number.checked_sub(1)?))) {
            Some(below) => below,
            None => name.into(),
        }
    }
}
