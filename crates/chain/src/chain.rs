//! The backing chain: its layers.

use crate::chain_index::ChainIndex;
use isobath_image::layer::Layer;
use isobath_image::violated;
use isobath_qcow2::index::Root;
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

    /// The layer above.
    #[must_use]
    pub const fn above(self) -> Self {
        Self(self.0.saturating_add(1))
    }

    /// The number of layers below.
    pub const fn get(self) -> u16 {
        self.0
    }
}

/// The greatest number of layers in a chain.
pub const MAX_LAYERS: usize = 1 << 16;

/// An open backing chain.
pub struct Chain<S> {
    /// From the base up.
    layers: Vec<Arc<Layer<S>>>,
    /// The last of them.
    active: Arc<Layer<S>>,
    /// The index that describes the lower layers, if there is a valid one.
    index: RwLock<Option<Arc<ChainIndex<S>>>>,
}

impl<S: Storage> Chain<S> {
    /// The chain of the first `count` layers by itself, without an index. `None` if there are none.
    pub fn below(&self, count: usize) -> Option<Self> {
        let mut visible = u64::MAX;
        let mut layers = Vec::with_capacity(count);
        for layer in self.layers.get(..count)?.iter().rev() {
            let layer = layer.in_other_chain();
            layer.limit_visible(visible);
            visible = layer.visible();
            layers.push(Arc::new(layer));
        }
        layers.reverse();
        (!layers.is_empty()).then(|| Self::of(layers))
    }

    /// As [`below`](Self::below), with the index of this chain, which describes no more layers.
    pub fn below_with_index(&self, count: usize) -> Option<Self> {
        let index = self.index().filter(|index| {
            index.root().map_or(index.covers(), |root| root.position as usize) <= count
        });
        Some(Self { index: RwLock::new(index), ..self.below(count)? })
    }
}

impl<S> Chain<S> {
    /// A chain of these layers, from the base up.
    pub fn of(layers: Vec<Arc<Layer<S>>>) -> Self {
        let Some(active) = layers.last().map(Arc::clone) else { violated("a chain has a layer") };
        if layers.len() > MAX_LAYERS {
            violated("each layer of a chain has an index");
        }
        Self { layers, active, index: RwLock::default() }
    }

    /// A chain of layers that may come from other chains, from the base up; how much of each is visible follows from
    /// those above it.
    pub fn stacked(layers: Vec<Arc<Layer<S>>>) -> Self
    where
        S: Storage,
    {
        let mut visible = layers.last().map_or(0, |active| active.visible());
        let top = layers.len().saturating_sub(1);
        let mut stacked = Vec::with_capacity(layers.len());
        for (number, layer) in layers.into_iter().enumerate().rev() {
            if number == top {
                stacked.push(layer);
                continue;
            }
            let layer = layer.in_other_chain();
            layer.limit_visible(visible);
            visible = layer.visible();
            stacked.push(Arc::new(layer));
        }
        stacked.reverse();
        Self::of(stacked)
    }

    /// log2 of the unit of the map of this chain.
    pub fn unit_bits(&self) -> u32
    where
        S: Storage,
    {
        self.layers.iter().filter_map(|layer| layer.unit_bits()).min().unwrap_or(16)
    }

    /// The index that describes the lower layers.
    pub fn index(&self) -> Option<Arc<ChainIndex<S>>> {
        self.index.read().clone()
    }

    /// The index whose `root` was read from one of its layers.
    pub fn indexed_by(&self, root: Root) -> Arc<ChainIndex<S>>
    where
        S: Storage,
    {
        let holder = root.position as usize;
        Arc::new(ChainIndex::new(
            self.layers.iter().take(holder + 1).map(Arc::clone).collect(),
            root,
        ))
    }

    /// Uses this index from now on.
    pub fn set_index(&self, index: Option<Arc<ChainIndex<S>>>)
    where
        S: Storage,
    {
        if index.as_ref().is_some_and(|index| index.covers() > self.depth()) {
            violated("an index describes layers of its chain");
        }
        *self.index.write() = index;
    }

    /// The layers with their indexes, from the base up.
    pub fn layers(&self) -> impl Iterator<Item = (LayerIndex, &Arc<Layer<S>>)> {
        self.layers.iter().enumerate().map(|(n, layer)| (LayerIndex::new(n as u16), layer))
    }

    /// The layer that takes writes.
    pub fn active(&self) -> &Arc<Layer<S>> {
        &self.active
    }

    /// The index of the active layer.
    pub fn active_index(&self) -> LayerIndex {
        LayerIndex::new((self.layers.len() - 1) as u16)
    }

    /// The layer at an index; `None` past the active one.
    pub fn get(&self, index: LayerIndex) -> Option<&Arc<Layer<S>>> {
        self.layers.get(index.get() as usize)
    }

    /// The number of layers.
    pub fn depth(&self) -> usize {
        self.layers.len()
    }

    /// The layers with their indexes, from the active one down.
    pub fn top_down(&self) -> impl Iterator<Item = (LayerIndex, &Arc<Layer<S>>)> {
        self.layers.iter().enumerate().rev().map(|(n, layer)| (LayerIndex::new(n as u16), layer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::must_panic::must_panic;
    use futures_executor::block_on;
    use isobath_storage::memory::{MemoryFile, MemoryHost};
    use isobath_storage::{Host, OpenMode};
    use std::path::{Path, PathBuf};

    /// So many layers, all of one raw file.
    fn layers(count: usize) -> Vec<Arc<Layer<MemoryFile>>> {
        let host = MemoryHost::new();
        host.insert("raw", &[0; 512]);
        let file = block_on(host.open(Path::new("raw"), OpenMode::default())).unwrap();
        let layer = Arc::new(Layer::raw(PathBuf::from("raw"), Arc::new(file), 512));
        vec![layer; count]
    }

    fn root(position: u32, covers: u32) -> Root {
        let (chapters, tail, segments) = (Vec::new(), Vec::new(), Vec::new());
        Root { unit_bits: 16, position, covers, size: 512, chapters, tail, segments }
    }

    #[test]
    fn a_chain_has_as_many_layers_as_can_be_counted() {
        must_panic(|| Chain::<MemoryFile>::of(Vec::new()), "a chain has a layer");
        let many = layers(MAX_LAYERS + 1);
        must_panic(|| Chain::of(many), "each layer of a chain has an index");
    }

    #[test]
    fn an_index_is_of_layers_of_its_chain() {
        let of = |count, root| ChainIndex::new(layers(count), root);
        must_panic(|| of(2, root(2, 1)), "an index is held by the last of its layers");
        let below = "an index describes layers below the image that holds it";
        must_panic(|| of(3, root(2, 3)), below);
        let index = Arc::new(of(4, root(3, 3)));
        let chain = Chain::of(layers(3));
        chain.set_index(Some(Arc::clone(&index)));
        let short = Chain::of(layers(2));
        must_panic(|| short.set_index(Some(index)), "an index describes layers of its chain");
    }
}
