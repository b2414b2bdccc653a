//! The layers of chains in stores, as files of a host.

use super::chain::{Chain, INDEX};
use super::file::{RemoteFile, read_only};
use super::pinned::Pinned;
use crate::fetch::RemoteLayer;
use isobath_storage::{
    FileId, Host, IndexFile, KeptLayer, OpenMode, Operation, Result, StorageError, word,
};
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

    /// The object of the index that a name is of.
    fn index(&self, name: &Path) -> Option<Arc<RemoteLayer>> {
        let (address, INDEX) = name.to_str()?.rsplit_once('#')? else { return None };
        self.chain(address)?.index_object().map(Arc::clone)
    }

    /// The chain that a name is of, and the number of the layer.
    fn layer(&self, name: &str) -> Option<(Arc<Chain>, usize)> {
        if let Some(pinned) = Pinned::parse(name) {
            let chain = self.chain(&pinned.address.to_string())?;
            let number = chain.number_of(&pinned)?;
            return Some((chain, number));
        }
        if let Some(chain) = self.chain(name) {
            let top = chain.depth().checked_sub(1)?;
            return Some((chain, top));
        }
        let (address, number) = name.rsplit_once('#')?;
        let (chain, number) = (self.chain(address)?, number.parse().ok()?);
        chain.layer(number)?;
        Some((chain, number))
    }

    fn find_layer(&self, operation: Operation, name: &Path) -> Result<(Arc<Chain>, usize)> {
        let text = name.to_str().unwrap_or_default();
        self.layer(text).ok_or_else(|| {
            let text = self.why_not(text);
            StorageError::new(operation, name, io::Error::new(io::ErrorKind::NotFound, text))
        })
    }

    /// Why there is no layer of this name.
    fn why_not(&self, name: &str) -> String {
        let Some(pinned) = Pinned::parse(name) else {
            return "it is the name of a chain in a store: a command reads it if its command line names it as the \
                    image, and 'isobath pull CHAIN DIRECTORY' makes files of it"
                .to_owned();
        };
        let address = &pinned.address;
        match self.chain(&address.to_string()) {
            Some(chain) => chain.without(&pinned),
            None => format!(
                "these are layers of a chain in a store, and only the command line of a server names one: 'isobath \
                 serve {} --overlay IMAGE' serves the disk, with the topmost local image as IMAGE",
                word(&address.to_string())
            ),
        }
    }
}

impl Host for RemoteHost {
    type File = RemoteFile;

    async fn open(&self, name: &Path, mode: OpenMode) -> Result<RemoteFile> {
        if let Some(index) = self.index(name).filter(|_| !mode.writable) {
            return Ok(RemoteFile::new(name.to_owned(), &index));
        }
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

    /// The index of a chain, for its top layer under the chain's own name, and under the name in the headers of local
    /// images, if the index is the one that was named with the layers.
    fn index_of(&self, top: &Path) -> Option<IndexFile> {
        let name = top.to_str()?;
        let chain = match Pinned::parse(name) {
            Some(pinned) => {
                let chain = self.chain(&pinned.address.to_string())?;
                Some(chain).filter(|chain| chain.has_index_of(&pinned))
            }
            None => self.chain(name),
        }?;
        let (name, root) = chain.index()?;
        let layers = (0..chain.depth()).filter_map(|number| chain.layer(number));
        let layers = layers.map(|layer| RemoteFile::id_of(layer)).collect();
        Some(IndexFile { name, root: Arc::clone(root), layers })
    }

    /// Names of [certain layers](Pinned), whether or not there are such.
    fn protocol_name(&self, name: &str) -> bool {
        Pinned::parse(name).is_some()
    }

    /// Names of chains, and of layers of whatever number, too.
    fn is_no_path(&self, name: &str) -> bool {
        is_name(name)
    }

    /// Layers that have such a name.
    fn kept(&self, image: &Path) -> Option<KeptLayer> {
        let name = image.to_str().filter(|name| self.protocol_name(name))?;
        let (chain, number) = self.layer(name)?;
        let below = number.checked_sub(1).and_then(|below| chain.pinned_at(below));
        Some(KeptLayer {
            format: chain.layer(number)?.described().format.name(),
            below: below.map(|below| below.to_string().into()),
        })
    }

    /// A name of certain layers stands for itself. In a layer of a chain it is the one below, whatever name the header
    /// has: the manifest gives the order. No header names a layer in another way.
    fn resolve(&self, referrer: &Path, name: &str) -> PathBuf {
        if let Some(KeptLayer { below: Some(below), .. }) = self.kept(referrer) {
            return below;
        }
        if self.protocol_name(name) {
            return name.into();
        }
        let referrer = referrer.to_str().and_then(|referrer| self.layer(referrer));
        match referrer.and_then(|(chain, number)| Some(chain.name_of(number.checked_sub(1)?))) {
            Some(below) => below,
            None => name.into(),
        }
    }
}
