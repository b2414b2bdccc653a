//! What a chain is like, and how far the work on it is.

use crate::data::Data;
use crate::error::GenerateError;
use isobath_qcow2::{Geometry, NewImage};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What a chain is like, but for who owns which cluster.
#[derive(Clone, Debug)]
pub struct Chain {
    /// The layers, at least 1.
    pub layers: u32,
    /// The disk's size in bytes, a multiple of 512 and at least that.
    pub size: u64,
    /// Base-2 logarithm of the cluster size, 9 to 21.
    pub cluster_bits: u32,
    /// What the clusters hold.
    pub data: Data,
    /// The seed of everything that is random.
    pub seed: u64,
}

impl Chain {
    /// The geometry of every image.
    ///
    /// # Errors
    /// If there are no layers, or the format cannot hold such a disk.
    pub fn geometry(&self) -> Result<Geometry, GenerateError> {
        if self.layers == 0 {
            return Err(GenerateError::NoLayers);
        }
        if self.size == 0 || !self.size.is_multiple_of(512) {
            return Err(GenerateError::Size(self.size));
        }
        let image = NewImage { cluster_bits: self.cluster_bits, ..NewImage::new(self.size) };
        Ok(image.plan()?.header().geometry()?)
    }

    /// The file name of a layer, from the base at 0: `layer-00000.qcow2`, with more digits where the
    /// chain has more layers than five can count.
    pub fn file_name(&self, layer: u32) -> String {
        let digits = self.layers.saturating_sub(1).to_string().len().max(5);
        format!("layer-{layer:0digits$}.qcow2")
    }
}

/// How far the work is, for another thread to look at and to stop.
#[derive(Debug, Default)]
pub struct Progress {
    done: AtomicU64,
    stop: AtomicBool,
}

impl Progress {
    /// The clusters written so far, of [`Ownership::total`](crate::Ownership::total).
    pub fn clusters(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Ends the work soon, with [`GenerateError::Stopped`].
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    pub(crate) fn advance(&self, clusters: u64) {
        self.done.fetch_add(clusters, Ordering::Relaxed);
    }
}
