//! The backing chain: its layers and how they are opened.

mod layer;
mod name;
mod open;

pub(crate) use layer::Qcow2;
pub use layer::{ImageFormat, Layer};
pub use open::{OpenOptions, Trust};
pub(crate) use open::{open_chain, open_layers};

use crate::index::ChainIndex;
use isobath_storage::Storage;
use parking_lot::RwLock;
use std::sync::Arc;

/// A layer's place in its chain: 0 is the base. Adding an overlay changes no layer's index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LayerIndex(u16);

impl LayerIndex {
    /// The layer at `index` from the base.
    pub const fn new(index: u16) -> Self {
        Self(index)
    }

    /// The number of layers below.
    pub const fn get(self) -> u16 {
        self.0
    }
}

/// The greatest number of layers in a chain.
pub const MAX_LAYERS: usize = 1 << 16;

/// An open backing chain.
pub(crate) struct Chain<S> {
    /// From the base up; never empty.
    layers: Vec<Arc<Layer<S>>>,
    /// The index that describes the lower layers, if one holds.
    index: RwLock<Option<Arc<ChainIndex<S>>>>,
}

impl<S: Storage> Chain<S> {
    /// The chain of the first `count` layers, as it is by itself, without an index. `None` if there
    /// are none.
    pub(crate) fn below(&self, count: usize) -> Option<Self> {
        let mut visible = u64::MAX;
        let mut layers = Vec::with_capacity(count);
        for layer in self.layers.get(..count)?.iter().rev() {
            let layer = layer.in_other_chain();
            layer.limit_visible(visible);
            visible = layer.visible();
            layers.push(Arc::new(layer));
        }
        layers.reverse();
        (!layers.is_empty()).then_some(Self { layers, index: RwLock::default() })
    }

    /// As [`below`](Self::below), with the index of this chain, which describes no more layers.
    pub(crate) fn below_with_index(&self, count: usize) -> Option<Self> {
        let index = self.index().filter(|index| index.root().position as usize <= count);
        Some(Self { index: RwLock::new(index), ..self.below(count)? })
    }
}

impl<S> Chain<S> {
    /// The index that describes the lower layers.
    pub(crate) fn index(&self) -> Option<Arc<ChainIndex<S>>> {
        self.index.read().clone()
    }

    /// Uses this index from now on.
    pub(crate) fn set_index(&self, index: Option<Arc<ChainIndex<S>>>) {
        *self.index.write() = index;
    }

    /// The layers with their indexes, from the base up.
    pub(crate) fn layers(&self) -> impl Iterator<Item = (LayerIndex, &Arc<Layer<S>>)> {
        self.layers.iter().enumerate().map(|(n, layer)| (LayerIndex::new(n as u16), layer))
    }

    /// The layer that takes writes.
    pub(crate) fn active(&self) -> &Arc<Layer<S>> {
        &self.layers[self.layers.len() - 1]
    }

    pub(crate) fn active_index(&self) -> LayerIndex {
        LayerIndex::new((self.layers.len() - 1) as u16)
    }

    pub(crate) fn get(&self, index: LayerIndex) -> Option<&Arc<Layer<S>>> {
        self.layers.get(index.get() as usize)
    }

    /// The number of layers.
    pub(crate) fn len(&self) -> usize {
        self.layers.len()
    }

    /// The layers with their indexes, from the active one down.
    pub(crate) fn top_down(&self) -> impl Iterator<Item = (LayerIndex, &Arc<Layer<S>>)> {
        self.layers.iter().enumerate().rev().map(|(n, layer)| (LayerIndex::new(n as u16), layer))
    }
}
