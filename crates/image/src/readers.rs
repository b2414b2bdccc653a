//! Requests that read an image's data through mappings that may change meanwhile.

use crate::layer::{Layer, OpeningId};
use crate::reader_epoch::ReaderEpoch;
use crate::{DiskError, Result};
use isobath_qcow2::CompressedCluster;
use isobath_qcow2::compress::decompress;
use isobath_storage::{IoBuf, Storage};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;

/// The number of decompressed clusters kept, since readers of a compressed image often read the rest of a cluster next.
pub const CACHED_CLUSTERS: usize = 8;

/// The place of a compressed cluster. A layer's number cannot identify it, since it changes when other layers leave the
/// chain.
type ClusterAt = (OpeningId, CompressedCluster);

/// The most recently decompressed clusters.
#[derive(Default)]
struct ClusterCache {
    recent: Mutex<VecDeque<(ClusterAt, Arc<IoBuf>)>>,
}

impl ClusterCache {
    fn get(&self, place: ClusterAt) -> Option<Arc<IoBuf>> {
        let recent = self.recent.lock();
        recent.iter().find(|(known, _)| *known == place).map(|(_, bytes)| Arc::clone(bytes))
    }

    fn put(&self, place: ClusterAt, bytes: Arc<IoBuf>) {
        let mut recent = self.recent.lock();
        if recent.len() == CACHED_CLUSTERS {
            recent.pop_front();
        }
        recent.push_back((place, bytes));
    }

    fn clear(&self) {
        self.recent.lock().clear();
    }
}

/// Read requests in progress, and the mappings that they may still use.
#[derive(Default)]
pub struct Readers {
    /// Requests that may use a mapping that was replaced.
    pub epoch: ReaderEpoch,
    decompressed: ClusterCache,
}

impl Readers {
    /// Waits until no request uses a mapping that was replaced before the call, and drops decompressed clusters: then
    /// host space can be reused.
    pub async fn drain(&self) {
        self.epoch.drain().await;
        self.decompressed.clear();
    }
    /// The contents of a compressed cluster of a qcow2 layer, from memory or from its file.
    ///
    /// # Errors
    /// If it cannot be read or is damaged, or the layer is raw.
    pub async fn decompressed<S: Storage>(
        &self,
        layer: &Layer<S>,
        cluster: CompressedCluster,
    ) -> Result<Arc<IoBuf>> {
        // A hostile index may say that a raw layer has one.
        let Some(qcow2) = layer.as_qcow2() else {
            return Err(DiskError::Corrupt {
                image: layer.name().to_owned(),
                reason: "a compressed cluster was requested, but a raw image has none".into(),
            });
        };
        let place = (qcow2.opening, cluster);
        if let Some(bytes) = self.decompressed.get(place) {
            return Ok(bytes);
        }
        let compression = qcow2.header.read().compression_type;
        let input =
            layer.read_at(cluster.offset.get(), IoBuf::zeroed(cluster.length as usize)).await?;
        let mut output = IoBuf::zeroed(qcow2.geometry.cluster_size() as usize);
        decompress(compression, &input, &mut output).map_err(|error| DiskError::Corrupt {
            image: layer.name().to_owned(),
            reason: format!("the compressed cluster at host offset {}: {error}", cluster.offset),
        })?;
        let bytes = Arc::new(output);
        self.decompressed.put(place, Arc::clone(&bytes));
        Ok(bytes)
    }
}
