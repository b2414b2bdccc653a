//! The device as a guest sees it: features and configuration space (virtio 1.2, section 5.2).

use super::options::Options;
use isobath_disk::BlockDevice;
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ,
    VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC,
};

/// Bytes per sector, virtio's unit regardless of the block size.
pub(crate) const SECTOR: u64 = 512;
/// Maximum number of ranges in one discard or write-zeroes request.
pub(crate) const MAX_RANGES: usize = 16;
/// Maximum number of segments in a request: as many as fit into QEMU's default queue of 128 without indirect
/// descriptors.
const MAX_SEGMENTS: u32 = 126;
/// The physical block size reported to guests, in bytes.
const PHYSICAL_BLOCK: u32 = 4096;

/// Bytes of `struct virtio_blk_config` up to `write_zeroes_may_unmap` and its padding.
const LENGTH: usize = 60;

/// `VHOST_USER_F_PROTOCOL_FEATURES`.
pub(crate) const PROTOCOL_FEATURES: u64 = 1 << 30;

pub(crate) const EVENT_INDEX: u64 = 1 << VIRTIO_RING_F_EVENT_IDX;
pub(crate) const FLUSH: u64 = 1 << VIRTIO_BLK_F_FLUSH;

/// Whether requests that change the disk are refused.
pub(crate) fn is_read_only<D: BlockDevice>(device: &D, options: &Options) -> bool {
    !options.writable || device.is_read_only()
}

/// The features offered.
pub(crate) fn features<D: BlockDevice>(device: &D, options: &Options) -> u64 {
    let always = [
        VIRTIO_BLK_F_SEG_MAX,
        VIRTIO_BLK_F_BLK_SIZE,
        VIRTIO_BLK_F_TOPOLOGY,
        VIRTIO_BLK_F_FLUSH,
        VIRTIO_BLK_F_MQ,
        VIRTIO_F_VERSION_1,
        VIRTIO_RING_F_INDIRECT_DESC,
        VIRTIO_RING_F_EVENT_IDX,
    ];
    let by_kind: &[u32] = if is_read_only(device, options) {
        &[VIRTIO_BLK_F_RO]
    } else {
        &[VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES]
    };
    let bits = |sum, bit: &u32| sum | 1 << bit;
    by_kind.iter().fold(always.iter().fold(PROTOCOL_FEATURES, bits), bits)
}

/// The configuration space of a device of `size` bytes.
pub(crate) fn space<D: BlockDevice>(device: &D, options: &Options, size: u64) -> [u8; LENGTH] {
    let block = options.logical_block_size;
    let physical = PHYSICAL_BLOCK.max(block) / block;
    let optimal = (device.preferred_block() / block).max(physical);
    let alignment = (device.preferred_block() / SECTOR as u32).max(block / SECTOR as u32);
    // The maximum number of sectors in a range: a whole number of blocks, as many as 32 bits allow.
    let most = u32::MAX / (block / SECTOR as u32) * (block / SECTOR as u32);
    let ranges = MAX_RANGES as u32;
    let mut space = [0; LENGTH];
    let mut put = |offset: usize, bytes: &[u8]| {
        if let Some(place) = space.get_mut(offset..offset + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    };
    put(0, &(size / SECTOR).to_le_bytes());
    put(12, &MAX_SEGMENTS.to_le_bytes());
    put(20, &block.to_le_bytes());
    put(24, &[physical.trailing_zeros() as u8]);
    put(26, &(physical as u16).to_le_bytes());
    put(28, &optimal.to_le_bytes());
    put(34, &options.queues.to_le_bytes());
    put(36, &most.to_le_bytes());
    put(40, &ranges.to_le_bytes());
    put(44, &alignment.to_le_bytes());
    put(48, &most.to_le_bytes());
    put(52, &ranges.to_le_bytes());
    put(56, &[1]);
    space
}

/// `length` bytes of a configuration space from `offset` on, with zeroes past its end.
pub(crate) fn part(space: &[u8], offset: u32, length: u32) -> Vec<u8> {
    let from = (offset as usize).min(space.len());
    let mut part = space.get(from..).unwrap_or_default().to_vec();
    part.resize(length as usize, 0);
    part
}
