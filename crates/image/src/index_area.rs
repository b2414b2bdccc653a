//! The place of a direct-access index in its image's file.

use crate::layer::{Layer, Qcow2};
use isobath_qcow2::index::{BlockHash, BlockPointer, IndexExtension, MAX_BLOCK_BYTES, Root};
use isobath_storage::{IoBuf, Storage};
use std::ops::Range;

/// The root that an image's header points to, if it is present and intact.
pub async fn read_root<S: Storage>(layer: &Layer<S>) -> Option<Root> {
    let extension = *layer.as_qcow2()?.header.read().index()?;
    let pointer = BlockPointer {
        layer: 0,
        offset: extension.root_offset,
        length: extension.root_length,
        hash: extension.root_hash,
    };
    Root::decode(&read_block(layer, &pointer, MAX_BLOCK_BYTES).await?)
}

/// Reads a block from a layer's file; `None` if it does not match the pointer.
pub async fn read_block<S: Storage>(
    layer: &Layer<S>,
    pointer: &BlockPointer,
    most: u32,
) -> Option<IoBuf> {
    if pointer.length > most {
        return None;
    }
    let buf = IoBuf::zeroed(pointer.length as usize);
    match layer.storage().read_at(pointer.offset.get(), buf).await {
        Ok(bytes) => (BlockHash::of(&bytes) == pointer.hash).then_some(bytes),
        Err(error) => {
            tracing::debug!("{error}");
            None
        }
    }
}

/// The host clusters of an index's area; `None` if the area does not consist of whole clusters.
pub fn clusters(image: &Qcow2, index: &IndexExtension) -> Option<Range<u64>> {
    let size = image.geometry.cluster_size();
    let (start, length) = (index.area_offset.get(), index.area_length);
    let whole = start.is_multiple_of(size) && length.is_multiple_of(size) && start > 0;
    whole.then(|| start / size..(start + length) / size)
}
