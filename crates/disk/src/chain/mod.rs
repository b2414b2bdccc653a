//! The backing chain: its layers and how they are opened.

mod layer;
mod name;
mod open;

pub(crate) use layer::Qcow2;
pub use layer::{ImageFormat, Layer};
pub(crate) use open::open_chain;
pub use open::{OpenOptions, Trust};

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
}

impl<S> Chain<S> {
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
