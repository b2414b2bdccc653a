//! What an image's index is, for people.

use super::load;
use crate::chain::open_layers;
use crate::{ImageFormat, OpenOptions};
use isobath_qcow2::index::IndexExtension;
use isobath_storage::{Host, Locking};
use std::path::Path;

/// An image's direct-access index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexInfo {
    /// Layers that it describes, from the base; 0 if that cannot be told.
    pub layers: u32,
    /// Bytes that it takes in this image's file; what did not change since the snapshot before lies
    /// in the files below.
    pub bytes: u64,
    /// The smallest piece of the disk that it tells apart, in bytes; 0 if that cannot be told.
    pub granularity: u64,
    /// Whether it is used.
    pub state: IndexState,
}

/// Whether an index is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IndexState {
    /// It describes the layers below as they are.
    Valid,
    /// It does not, for this reason.
    Invalid(String),
    /// Nobody looked at the layers below.
    Unchecked,
}

impl IndexInfo {
    /// What an extension tells by itself.
    pub(crate) fn unchecked(extension: &IndexExtension) -> Self {
        let end = extension.root_offset.get() + u64::from(extension.root_length);
        Self {
            layers: 0,
            bytes: end - extension.area_offset.get(),
            granularity: 0,
            state: IndexState::Unchecked,
        }
    }
}

/// What is to be said of the image `name`, which has the index `unchecked`, once the layers that it
/// describes were looked at.
pub(crate) async fn index_info<H: Host>(
    host: &H,
    name: &Path,
    unchecked: &IndexInfo,
    locking: Locking,
) -> IndexInfo {
    let mut info = unchecked.clone();
    let options =
        OpenOptions { format: Some(ImageFormat::Qcow2), locking, ..OpenOptions::default() };
    let chain = match open_layers(host, name, &options).await {
        Ok(chain) => chain,
        Err(error) => {
            let reason = format!("its chain cannot be opened: {error}");
            return IndexInfo { state: IndexState::Invalid(reason), ..info };
        }
    };
    if let Some(root) = load::read_root(chain.active()).await {
        info.layers = root.covers;
        info.granularity = 1 << root.unit_bits;
    }
    info.state = match load::examine(&chain).await {
        Ok(_) => IndexState::Valid,
        Err(reason) => IndexState::Invalid(reason),
    };
    info
}
