//! The description of a chain, and the progress of the work on it.

use crate::data::Data;
use crate::error::GenerateError;
use isobath_qcow2::{Geometry, NewImage};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The description of a chain, except for which layer owns which cluster.
#[derive(Clone, Debug)]
pub struct Chain {
    /// The number of layers, at least 1.
    pub layers: u32,
    /// The disk's size in bytes, a multiple of 512 and at least 512.
    pub size: u64,
    /// Base-2 logarithm of the cluster size, 9 to 21.
    pub cluster_bits: u32,
    /// What the clusters contain.
    pub data: Data,
    /// The seed of everything that is random.
    pub seed: u64,
}

impl Chain {
    /// The geometry of every image.
    ///
    /// # Errors
    /// If there are no layers, or the format does not support such a disk.
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

    /// The file name of a layer, counted from 0, the base: `layer-00000.qcow2`, with more digits if five are too few
    /// for the chain.
    pub fn file_name(&self, layer: u32) -> String {
        let digits = self.layers.saturating_sub(1).to_string().len().max(5);
        format!("layer-{layer:0digits$}.qcow2")
    }
}

/// The progress of the work, which another thread can watch and stop.
#[derive(Debug, Default)]
pub struct Progress {
    done: AtomicU64,
    stop: AtomicBool,
}

impl Progress {
    /// The number of clusters written so far, out of [`Ownership::total`](crate::Ownership::total).
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
